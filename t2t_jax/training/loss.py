"""§5.4: label-smoothed cross-entropy, straight from what the softmax multiplies: all logits never exist at once."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from t2t_jax.model.products import product
from t2t_jax.model.transformer import Transformer
from t2t_jax.training.train_step import Batch, LossFn

Sums = tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]


def tokens_per_chunk() -> int:
    """Target positions whose logits a device has in memory together: 63 MiB of float32 at 32,000 ids on CPU.

    There that is faster than all at once; with fewer, each chunk's pass over the gradient by the table costs more than
    it saves. So it would on an accelerator, whose products are far faster than its memory.
    """
    return 512 if jax.default_backend() == "cpu" else 4096


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def cross_entropy(
    y: Float[Array, "B T D"],
    table: Float[Array, "vocab D"],
    targets: Int[Array, "B T"],
    label_smoothing: float,
    devices: int = 1,
) -> Sums:
    """(smoothed loss, unsmoothed negative log-likelihood, tokens): sums in nats over the non-padding targets.

    The logits are y tableᵀ. The smoothed target has 1 − ε on the true id and ε/(vocab − 1) on every other one. The
    smoothed loss alone has a gradient; that of the other two is zero. The rows lie in equal shares on `devices`.
    """

    def add(total, y, targets):
        return jax.tree.map(jnp.add, total, _softmax_loss(y, table, targets, label_smoothing)[0]), None

    return _totals(_over_chunks(add, _no_sums(targets), y, targets, devices)[0])


def _with_gradients(y, table, targets, label_smoothing, devices):
    """The sums, and the gradients of the loss, made while the logits of each chunk are there anyway."""

    def add(total, y, targets):
        sums, by_logits = _softmax_loss(y, table, targets, label_smoothing)
        by_y = product("btv,vd->btd", by_logits, table, y.dtype)
        # Each device adds up its own rows', so that the devices need to be added up but once. [D, vocab], as the
        # product for [vocab, D] would first transpose a copy of the logits.
        of_device = lambda x: x.reshape(devices, -1, *x.shape[1:])
        by_table = product("nbtd,nbtv->ndv", of_device(y), of_device(by_logits), jnp.float32)
        return jax.tree.map(jnp.add, total, (sums, by_table)), by_y

    zeros = _no_sums(targets), jnp.zeros((devices, *table.shape[::-1]))
    (sums, by_table), by_y = _over_chunks(add, zeros, y, targets, devices)
    # Behind a barrier, as XLA would put the transposition into the product, for which it has no bfloat16 on CPU.
    by_table = jax.lax.optimization_barrier(by_table.sum(axis=0))
    return _totals(sums), (by_y, by_table.T.astype(table.dtype))


def _backward(label_smoothing, devices, gradients, cotangents):
    times = lambda gradient: gradient * cotangents[0].astype(gradient.dtype)
    return *map(times, gradients), None


cross_entropy.defvjp(_with_gradients, _backward)


def _softmax_loss(y, table, targets, label_smoothing):
    """The sums of each row of a chunk, and the gradient by its logits: softmax − smoothed target, zero at padding."""
    logits = product("btd,vd->btv", y, table, jnp.float32)
    true, others = 1 - label_smoothing, label_smoothing / (len(table) - 1)
    weights = (targets != 0).astype(jnp.float32)[..., None]
    # With −log p_k = lse − z_k, the loss needs only the true logit and the sum of all.
    true_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    largest = logits.max(axis=-1, keepdims=True)
    powers = jnp.exp(logits - largest)
    total = powers.sum(axis=-1, keepdims=True)
    lse = largest + jnp.log(total)
    smoothed = lse - true * true_logit - others * (logits.sum(axis=-1, keepdims=True) - true_logit)
    sums = tuple(x.sum(axis=(1, 2)) for x in (weights * smoothed, weights * (lse - true_logit), weights))
    ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
    wanted = jnp.where(ids == targets[..., None], true, others)
    return sums, (powers * (weights / total) - weights * wanted).astype(y.dtype)


def _no_sums(targets):
    return (jnp.zeros(len(targets)),) * 3


def _totals(sums_of_rows) -> Sums:
    return tuple(x.sum() for x in sums_of_rows)


def _over_chunks(add, total, y, targets, devices):
    """`add` for the chunks, one after the other: (the total, what it gave for the positions [B, T, …]).

    A chunk holds some target positions of all rows, so that it is shared out over the devices as the batch is.
    """
    rows, length = targets.shape
    width = -(-length // -(-rows * length // (devices * tokens_per_chunk())))
    count = -(-length // width)
    if count == 1:
        return add(total, y, targets)

    def cut(x):
        x = jnp.pad(x, ((0, 0), (0, count * width - length)) + ((0, 0),) * (x.ndim - 2))
        return x.reshape(rows, count, width, *x.shape[2:]).swapaxes(0, 1)

    join = lambda x: x.swapaxes(0, 1).reshape(rows, count * width, *x.shape[3:])[:, :length]
    total, found = jax.lax.scan(lambda total, chunk: add(total, *chunk), total, (cut(y), cut(targets)))
    return total, jax.tree.map(join, found)


def label_smoothed_loss(model: Transformer, label_smoothing: float, devices: int = 1) -> LossFn:
    """The loss of the paper for `train_step`: `loss` is label-smoothed, `nll` is not; sums in nats.

    The rows of a batch are divided equally among `devices`. The entries of the batch are the arguments of the model.
    """

    def loss_fn(params, batch: Batch, key):
        method, rngs = Transformer.before_softmax, {"dropout": key}
        y, table = model.apply({"params": params}, **batch, train=True, rngs=rngs, method=method)
        loss, nll, tokens = cross_entropy(y, table, batch["targets"], label_smoothing, devices)
        return loss, {"loss": loss, "nll": nll, "target_tokens": tokens}

    return loss_fn
