"""§4, Table 1 (restricted): self-attention to nearby positions, in blocks, so that its time is linear in the length."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Attend = Callable[[Array, Array, Array, Array], Array]


def local_attention(
    attend: Attend,
    query: Float[Array, "B H T K"],
    key: Float[Array, "B H K T"],
    value: Float[Array, "B H T V"],
    mask: Bool[Array, "#B 1 #T T"] | None,
    left: int,
    right: int,
) -> Float[Array, "B H T V"]:
    """`attend(query, key, value, mask)` where position t may attend to t − `left`, …, t + `right` only.

    The queries are split into N blocks as long as the larger side; `attend` gets the blocks as B·N sentences, each with
    the keys and values of its block and of the neighbourhood on both sides.
    """
    batch, _, length, _ = query.shape
    block = block_length(left, right)
    split = lambda x, axis: _split(x, axis, block)
    nearby = lambda x, axis: _neighbourhoods(split(x, axis), axis, left, right)
    keys = left + block + right
    offsets = jnp.arange(keys)[None] - left - jnp.arange(block)[:, None]  # of a key from a query
    allowed = ((offsets >= -left) & (offsets <= right))[None, None] & nearby(jnp.ones(length, bool), 0)[None, :, None]
    if mask is not None and mask.shape[2] == 1:
        allowed = allowed & nearby(mask, 3)[:, 0, 0, :, None]
    elif mask is not None:  # the pairs of queries and keys whose blocks are the same
        allowed = allowed & jnp.moveaxis(jnp.diagonal(split(nearby(mask, 3), 2), axis1=2, axis2=4), -1, 2)[:, 0]
    count = allowed.shape[1]
    by_block = lambda x, axis: jnp.moveaxis(x, axis, 1).reshape(batch * count, *x.shape[1:axis], *x.shape[axis + 1 :])
    allowed = jnp.broadcast_to(allowed, (batch, count, block, keys)).reshape(batch * count, 1, block, keys)
    heads = attend(by_block(split(query, 2), 2), by_block(nearby(key, 3), 3), by_block(nearby(value, 2), 2), allowed)
    heads = jnp.moveaxis(heads.reshape(batch, count, *heads.shape[1:]), 1, 2)  # [B, H, N, block, V]
    return heads.reshape(batch, heads.shape[1], count * block, -1)[:, :, :length]


def block_length(left: int, right: int) -> int:
    """The queries of one block, at least two; each is compared with `left` + this + `right` keys."""
    return max(left, right, 2)


def _split(x: Array, axis: int, block: int) -> Array:
    """[…, T, …] → […, N, block, …], padded with zeros (False)."""
    added = [(0, -x.shape[axis] % block if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, added).reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :])


def _neighbourhoods(blocks: Array, axis: int, left: int, right: int) -> Array:
    """[…, N, block, …] → […, N, left + block + right, …]: with what the previous and the next block have beside it."""
    count, block = blocks.shape[axis : axis + 2]
    bordered = jnp.pad(blocks, [(int(a == axis), int(a == axis)) for a in range(blocks.ndim)])  # by an empty block

    def beside(first, start, end):
        return jax.lax.slice_in_dim(
            jax.lax.slice_in_dim(bordered, first, first + count, axis=axis), start, end, axis=axis + 1
        )

    return jnp.concatenate([beside(0, block - left, block), blocks, beside(2, 0, right)], axis=axis + 1)
