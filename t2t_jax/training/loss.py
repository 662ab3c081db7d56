"""§5.4: label-smoothed cross-entropy, straight from what the softmax multiplies: all logits never exist at once."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from t2t_jax.model.attention import product_dtype

# Target positions whose logits are in memory together: 63 MiB of float32 at 32,000 ids. On CPU that is faster than all
# at once; with fewer, each chunk's pass over the gradient by the table costs more than it saves.
TOKENS_PER_CHUNK = 512

Sums = tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def cross_entropy(
    y: Float[Array, "B T D"], table: Float[Array, "vocab D"], targets: Int[Array, "B T"], label_smoothing: float
) -> Sums:
    """(smoothed loss, unsmoothed negative log-likelihood, tokens): sums in nats over the non-padding targets.

    The logits are y tableᵀ. The smoothed target has 1 − ε on the true id and ε/(vocab − 1) on every other one. The
    smoothed loss alone has a gradient; that of the other two is zero.
    """

    def add(total, y, targets):
        return jax.tree.map(jnp.add, total, _softmax_loss(y, table, targets, label_smoothing)[0]), None

    return _over_chunks(add, (jnp.zeros(()),) * 3, y, targets)[0]


def _with_gradients(y, table, targets, label_smoothing):
    """The sums, and the gradients of the loss, made while the logits of each chunk are there anyway."""

    def add(total, y, targets):
        sums, by_logits = _softmax_loss(y, table, targets, label_smoothing)
        product = functools.partial(jnp.einsum, preferred_element_type=product_dtype(y.dtype))
        by_y = product("btv,vd->btd", by_logits, table.astype(y.dtype)).astype(y.dtype)
        # [D, vocab], as the product for [vocab, D] would first transpose a copy of the logits.
        by_table = jnp.einsum("btd,btv->dv", y, by_logits, preferred_element_type=jnp.float32)
        return jax.tree.map(jnp.add, total, (sums, by_table)), by_y

    zeros = ((jnp.zeros(()),) * 3, jnp.zeros(table.shape[::-1]))
    (sums, by_table), by_y = _over_chunks(add, zeros, y, targets)
    # Behind a barrier, as XLA would put the transposition into the product, for which it has no bfloat16 on CPU.
    return sums, (by_y, jax.lax.optimization_barrier(by_table).T.astype(table.dtype))


def _backward(label_smoothing, gradients, cotangents):
    times = lambda gradient: gradient * cotangents[0].astype(gradient.dtype)
    return *map(times, gradients), None


cross_entropy.defvjp(_with_gradients, _backward)


def _softmax_loss(y, table, targets, label_smoothing) -> tuple[Sums, Float[Array, "B T vocab"]]:
    """The sums of a chunk, and the gradient by its logits: softmax minus smoothed target, zero at padding."""
    logits = jnp.einsum("btd,vd->btv", y, table.astype(y.dtype), preferred_element_type=jnp.float32)
    true, others = 1 - label_smoothing, label_smoothing / (len(table) - 1)
    weights = (targets != 0).astype(jnp.float32)[..., None]
    # With −log p_k = lse − z_k, the loss needs only the true logit and the sum of all.
    true_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    largest = logits.max(axis=-1, keepdims=True)
    powers = jnp.exp(logits - largest)
    total = powers.sum(axis=-1, keepdims=True)
    lse = largest + jnp.log(total)
    smoothed = lse - true * true_logit - others * (logits.sum(axis=-1, keepdims=True) - true_logit)
    sums = jnp.sum(weights * smoothed), jnp.sum(weights * (lse - true_logit)), jnp.sum(weights)
    ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
    wanted = jnp.where(ids == targets[..., None], true, others)
    return sums, (powers * (weights / total) - weights * wanted).astype(y.dtype)


def _over_chunks(add, total, y, targets):
    """`add` for the chunks, one after the other: (the total, what it gave for the positions [B, T, …]).

    A chunk holds some target positions of all rows, so that it is shared out over the devices as the batch is.
    """
    rows, length = targets.shape
    width = -(-length // -(-rows * length // TOKENS_PER_CHUNK))
    count = -(-length // width)
    if count == 1:
        return add(total, y, targets)

    def cut(x):
        x = jnp.pad(x, ((0, 0), (0, count * width - length)) + ((0, 0),) * (x.ndim - 2))
        return x.reshape(rows, count, width, *x.shape[2:]).swapaxes(0, 1)

    join = lambda x: x.swapaxes(0, 1).reshape(rows, count * width, *x.shape[3:])[:, :length]
    total, found = jax.lax.scan(lambda total, chunk: add(total, *chunk), total, (cut(y), cut(targets)))
    return total, jax.tree.map(join, found)
