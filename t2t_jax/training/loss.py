"""§5.4: label-smoothed cross-entropy; beyond the paper, R-Drop.

Chunked softmax cross-entropy: logits are computed for some target positions at a time (`tokens_per_chunk`; on GPU,
for all of a microbatch). `smoothed_cross_entropy_reference` is the same formula on all logits at once.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from t2t_jax.model.einsum import einsum, matmul_output_dtype
from t2t_jax.model.platform import platform
from t2t_jax.model.transformer import Transformer
from t2t_jax.training.train_step import Batch, LossFn

Sums = tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]


def smoothed_cross_entropy_reference(
    logits: Float[Array, "B T vocab"], targets: Int[Array, "B T"], label_smoothing: float
) -> Float[Array, ""]:
    """−Σ q · log softmax(logits) over non-padding targets; q is 1 − ε at the true id, ε/(vocab − 1) at the others."""
    is_target = jnp.arange(logits.shape[-1])[None, None] == targets[..., None]  # [B, T, vocab]
    q = jnp.where(is_target, 1 - label_smoothing, label_smoothing / (logits.shape[-1] - 1))
    losses = -jnp.sum(q * jax.nn.log_softmax(logits), axis=-1)  # [B, T]
    return jnp.sum(jnp.where(targets != 0, losses, 0))


def tokens_per_chunk() -> int | float:
    """Number of target positions whose logits are materialised at once: 63 MiB of float32 for 32,000 ids on CPU.

    On CPU that is faster than all at once; smaller chunks are slower, as each one reads and writes the whole gradient
    of the table. On GPU, whose matmuls are much faster than their memory, any second chunk costs more than it saves:
    there gradient accumulation (`train.accumulate`) bounds the memory.
    """
    return {"cpu": 512, "gpu": math.inf}.get(platform(), 4096)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def cross_entropy(
    y: Float[Array, "B T D"],
    table: Float[Array, "vocab D"],
    targets: Int[Array, "B T"],
    label_smoothing: float,
    r_drop: float = 0.0,
) -> Sums:
    """(smoothed loss, unsmoothed negative log-likelihood, tokens): sums in nats over the non-padding targets.

    The logits are y · tableᵀ. ε = `label_smoothing`: the smoothed target has 1 − ε on the true id and ε/(vocab − 1) on
    every other id. With α = `r_drop` > 0, rows 2i and 2i + 1 are two dropout passes of one sentence, each of which
    counts half in the three sums, and the loss is that of R-Drop (Liang et al. 2021, equation 4), halved: it also has
    α/4 of the sum of both Kullback-Leibler divergences between the passes.

    Custom VJP: the forward pass computes the gradients too, of the loss only; the other two sums have zero gradient.
    """

    def add(total, y, targets):
        return jax.tree.map(jnp.add, total, _softmax_loss(y, table, targets, label_smoothing, r_drop)[0]), None

    return _totals(_scan_chunks(add, _zero_sums(targets), y, targets)[0])


def _forward(y, table, targets, label_smoothing, r_drop):
    """The sums, and as residuals the gradients of the loss, computed while the logits of each chunk exist."""

    def add(total, y, targets):
        sums, by_logits = _softmax_loss(y, table, targets, label_smoothing, r_drop)
        by_y = einsum("btv,vd->btd", by_logits, table, y.dtype)
        # [D, vocab]: on CPU the matmul for [vocab, D] would first transpose a copy of the logits.
        by_table = einsum("btd,btv->dv", y, by_logits, jnp.float32)
        return jax.tree.map(jnp.add, total, (sums, by_table)), by_y

    (sums, by_table), by_y = _scan_chunks(add, (_zero_sums(targets), jnp.zeros(table.shape[::-1])), y, targets)
    # Without the barrier XLA would fuse the transposition into a matmul that it lacks for bfloat16 on CPU.
    by_table = jax.lax.optimization_barrier(by_table)
    return _totals(sums), (by_y, by_table.T.astype(table.dtype))


def _backward(label_smoothing, r_drop, gradients, cotangents):
    scale = lambda gradient: gradient * cotangents[0].astype(gradient.dtype)
    return *map(scale, gradients), None


cross_entropy.defvjp(_forward, _backward)


def _softmax_loss(y, table, targets, label_smoothing, r_drop):
    """Per row of a chunk, the sums; and the gradient of the logits: softmax − smoothed target, zero at padding, and
    that of the regularizer of R-Drop.
    """
    # In bfloat16 off the CPU, that is half the bytes of what the step reads and writes most. After training, rounding
    # them changes gradients by 0.4 %, bfloat16 everywhere else by 4 %.
    logits = einsum("btd,vd->btv", y, table, matmul_output_dtype(y.dtype)).astype(jnp.float32)
    on_target, elsewhere = 1 - label_smoothing, label_smoothing / (len(table) - 1)
    weights = (targets != 0).astype(jnp.float32)[..., None] * (0.5 if r_drop else 1.0)
    # As −log p_k = logsumexp(z) − z_k, the loss needs only the target's logit and the sum of all logits.
    target_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    largest, total, sum_of_logits = _reductions(logits)
    lse = largest + jnp.log(total)
    smoothed = lse - on_target * target_logit - elsewhere * (sum_of_logits - target_logit)
    ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
    q = jnp.where(ids == targets[..., None], on_target, elsewhere)
    by_logits = jnp.exp(logits - largest) * (weights / total) - weights * q
    if r_drop:
        divergence, by_divergence = _divergence_of_passes(logits - lse)
        smoothed += r_drop / 2 * divergence
        by_logits += r_drop / 2 * weights * by_divergence
    sums = tuple(x.sum(axis=(1, 2)) for x in (weights * smoothed, weights * (lse - target_logit), weights))
    return sums, by_logits.astype(y.dtype)


def _divergence_of_passes(log_p: Float[Array, "B T vocab"]) -> tuple[Float[Array, "B T 1"], Float[Array, "B T vocab"]]:
    """For each row KL(its pass ‖ the other pass), and the gradient of the sum of both divergences by its logits."""
    other = log_p.reshape(-1, 2, *log_p.shape[1:])[:, ::-1].reshape(log_p.shape)
    p, log_ratio = jnp.exp(log_p), log_p - other
    divergence = jnp.sum(p * log_ratio, axis=-1, keepdims=True)
    return divergence, p * (log_ratio - divergence) + p - jnp.exp(other)


def _reductions(logits: Float[Array, "B T vocab"]) -> tuple[Float[Array, "B T 1"], ...]:
    """max z, Σ exp(z − max z) and Σ z over the vocabulary."""
    if platform() != "gpu":
        largest = logits.max(axis=-1, keepdims=True)
        total = jnp.exp(logits - largest).sum(axis=-1, keepdims=True)
        return largest, total, logits.sum(axis=-1, keepdims=True)

    # XLA would read the logits once for each reduction; this is one, with a running maximum (online softmax).
    def combine(a, b):
        largest, smaller = jnp.maximum(a[0], b[0]), jnp.minimum(a[0], b[0])
        scale = jnp.exp(smaller - largest)  # of the total whose maximum is the smaller one
        total = jnp.where(a[0] > b[0], a[1] + b[1] * scale, a[1] * scale + b[1])
        return largest, total, a[2] + b[2]

    lowest, zero = jnp.finfo(logits.dtype).min, jnp.zeros((), logits.dtype)
    found = jax.lax.reduce((logits, jnp.ones_like(logits), logits), (lowest, zero, zero), combine, (2,))
    return tuple(x[..., None] for x in found)


def _zero_sums(targets):
    return (jnp.zeros(len(targets)),) * 3


def _totals(sums_of_rows) -> Sums:
    return tuple(x.sum() for x in sums_of_rows)


def _scan_chunks(add, total, y, targets):
    """Scans `add(total, y, targets) → (total, outputs)` over chunks of positions: (final total, outputs [B, T, …])."""
    rows, length = targets.shape
    chunk_length = math.ceil(length / max(1, math.ceil(rows * length / tokens_per_chunk())))
    count = -(-length // chunk_length)
    if count == 1:
        return add(total, y, targets)

    def split(x):
        x = jnp.pad(x, ((0, 0), (0, count * chunk_length - length)) + ((0, 0),) * (x.ndim - 2))
        return x.reshape(rows, count, chunk_length, *x.shape[2:]).swapaxes(0, 1)

    join = lambda x: x.swapaxes(0, 1).reshape(rows, count * chunk_length, *x.shape[3:])[:, :length]
    total, outputs = jax.lax.scan(lambda total, chunk: add(total, *chunk), total, (split(y), split(targets)))
    return total, jax.tree.map(join, outputs)


def label_smoothed_loss(model: Transformer, label_smoothing: float, r_drop: float = 0.0) -> LossFn:
    """The loss of the paper for `train_step`: `loss` is label-smoothed, `nll` is not; sums in nats.

    The entries of the batch are the arguments of the model. With `r_drop` > 0 the model sees each sentence twice, with
    different dropout masks, and `loss` has the regularizer of R-Drop (see `cross_entropy`).
    """

    def loss_fn(params, batch: Batch, key):
        if r_drop:
            batch = _two_passes(batch)
        method, rngs = Transformer.before_softmax, {"dropout": key}
        y, table = model.apply({"params": params}, **batch, train=True, rngs=rngs, method=method)
        loss, nll, tokens = cross_entropy(y, table, batch["targets"], label_smoothing, r_drop)
        return loss, {"loss": loss, "nll": nll, "target_tokens": tokens}

    return loss_fn


# Values of `train.loss`: (model, config.train) → the loss for `train_step`.
LOSSES: dict[str, Callable[[Transformer, Mapping[str, Any]], LossFn]] = {
    "label_smoothed": lambda model, fields: label_smoothed_loss(model, fields["label_smoothing"], fields["r_drop"]),
}


def _two_passes(batch: Batch) -> dict[str, Int[Array, "2*B ..."]]:
    """Each row twice; the copies of row i draw the dropout masks of the rows 2i and 2i + 1."""
    batch = {name: jnp.repeat(x, 2, axis=0) for name, x in batch.items()}
    return batch | {"rows": 2 * batch["rows"] + jnp.arange(len(batch["rows"])) % 2}
