"""Top-k over the vocabulary in chunks, as sorting all of it at every step would be slow, and its log-sum-exp.

Values are `[vocab, B, W]`: the fastest matrix products of few rows leave the vocabulary first.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def log_sum_exp(values: Float[Array, "vocab B W"]) -> Float[Array, "B W"]:
    """The log of the sum over the vocabulary of exp(values)."""
    largest = _maxima(values).max(axis=0, keepdims=True)
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    total = jnp.exp(values.reshape(len(values), -1) - largest).sum(axis=0, keepdims=True)
    return (largest + jnp.log(total)).reshape(values.shape[1:])


def top_tokens(
    values: Float[Array, "vocab B W"], count: int
) -> tuple[Float[Array, "B W count"], Int[Array, "B W count"]]:
    """The `count` largest values of each hypothesis, largest first, and their tokens; of equal values the first.

    They lie in the `count` chunks with the largest maxima, so only those chunks are sorted.
    """
    vocab, chunk = len(values), chunk_size(len(values))
    if vocab <= 4 * chunk * count:
        return sorted_top_k(jnp.moveaxis(values, 0, -1), min(count, vocab))
    maxima = _maxima(values).T.reshape(*values.shape[1:], -1)
    top_chunks = jnp.sort(top_k(maxima, count), axis=-1)  # in order of the vocabulary, so that ties keep theirs
    tokens = (top_chunks[..., None] * chunk + jnp.arange(chunk)[None, None, None]).reshape(
        *values.shape[1:], -1
    )  # [B, W, count·chunk]
    rows, hypotheses = (x[..., None] for x in jnp.indices(values.shape[1:]))
    candidates = values.at[tokens, rows, hypotheses].get(mode="fill", fill_value=-jnp.inf, wrap_negative_indices=False)
    values, columns = sorted_top_k(candidates, count)
    return values, jnp.take_along_axis(tokens, columns, axis=2, mode="promise_in_bounds")


def sorted_top_k(values: Float[Array, "*n"], count: int) -> tuple[Float[Array, "*k"], Int[Array, "*k"]]:
    """The `count` largest values of each row, largest first, and their indices; of equal values the first."""
    # Without the barrier, XLA may see that only part of the output is used, and then sort everything: 100 times slower.
    return tuple(jax.lax.optimization_barrier(jax.lax.top_k(values, count)))


def top_k(values: Float[Array, "*n"], count: int) -> Int[Array, "*k"]:
    """The indices of `sorted_top_k`."""
    return sorted_top_k(values, count)[1]


def chunk_size(vocab: int) -> int:
    """A divisor of `vocab` near 32, so that nothing needs padding; 32 where there is none."""
    return min((size for size in range(16, 65) if vocab % size == 0), key=lambda size: abs(size - 32), default=32)


def _maxima(values: Float[Array, "vocab B W"]) -> Float[Array, "chunks BW"]:
    """The largest value of each chunk of the vocabulary."""
    chunk = chunk_size(len(values))
    flat = values.reshape(len(values), -1)  # XLA on CPU is slow where the last axis is short
    padded = jnp.pad(flat, ((0, -len(values) % chunk), (0, 0)), constant_values=-jnp.inf)
    # The barrier keeps XLA from joining this maximum with the next one, so that both callers of a step share it.
    return jax.lax.optimization_barrier(padded.reshape(-1, chunk, flat.shape[1]).max(axis=1))
