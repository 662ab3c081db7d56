"""§6.1: the KV cache of decoding: a typed structure and pure functions, cache in and cache out.

The self-attention keys and values of the target are a ring buffer of T slots. A decoding step writes the next slot,
the same one for all sentences, even if they were admitted at different times; after the last slot comes the first. Beam
search never moves keys and values: after each step it only reorders `ancestors`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from t2t_jax.model.platform import platform


class LayerCache(NamedTuple):
    """Keys and values of one attention module at N positions, in every head.

    On a CPU keys are stored transposed, [K, N], so that matrix products read memory in order. Elsewhere they are not,
    so that the components of a position, which a step writes, lie together: on an H200, with 512 sentences of 64
    positions, writing them transposed was an eighth of a step.
    """

    stored_key: Float[Array, "B H K N"] | Float[Array, "B H N K"]
    value: Float[Array, "B H N V"]

    @classmethod
    def of(cls, key: Float[Array, "B H K N"], value: Float[Array, "B H N V"]) -> "LayerCache":
        """These keys, as they are stored on the platform, and values."""
        return cls(key if _stores_transposed_keys() else jnp.swapaxes(key, 2, 3), value)

    @property
    def key(self) -> Float[Array, "B H K N"]:
        """The keys, however they are stored."""
        return self.stored_key if _stores_transposed_keys() else jnp.swapaxes(self.stored_key, 2, 3)

    def map_positions(self, function: Callable[[Array, int], Array], *others: "LayerCache") -> "LayerCache":
        """Applies `function`, which is also given the axis of the positions, to the stored keys and to the values."""
        axes = 3 if _stores_transposed_keys() else 2, 2
        return LayerCache(*(function(*arrays, axis) for *arrays, axis in zip(self, *others, axes, strict=True)))


def _stores_transposed_keys() -> bool:
    return platform() == "cpu"


class SourceCache(NamedTuple):
    """What decoding needs of the source sentences; all hypotheses of a sentence share it."""

    layers: tuple[LayerCache, ...]  # cross-attention of each decoder layer, N = S
    mask: Bool[Array, "B 1 1 S"]  # True where the source is not padding


class KVCache(NamedTuple):
    """State of incremental decoding for B sentences of W hypotheses each, with a capacity of T target positions.

    `ancestors[b, w, t]` is the beam whose K/V hypothesis w of sentence b reads at slot t; −1 where the sentence has
    written nothing at t.
    """

    layers: tuple[LayerCache, ...]  # self-attention of each decoder layer, N = T·W: ring buffer, beam w at t·W + w
    source: SourceCache
    ancestors: Int[Array, "B W T"]
    slot: Int[Array, ""]  # slot that the next step writes

    @property
    def capacity(self) -> int:
        """T, the number of slots of the ring buffer."""
        return self.ancestors.shape[2]


def init_cache(
    rows: int,
    source_length: int,
    beam_size: int,
    capacity: int,
    *,
    num_layers: int,
    num_heads: int,
    d_k: int,
    d_v: int,
    dtype: DTypeLike,
) -> KVCache:
    """An empty cache: B = `rows`, S = `source_length`, W = `beam_size`, T = `capacity`."""

    def layers(length):
        key, value = (rows, num_heads, d_k, length), (rows, num_heads, length, d_v)
        return tuple(LayerCache.of(jnp.zeros(key, dtype), jnp.zeros(value, dtype)) for _ in range(num_layers))

    return KVCache(
        layers=layers(capacity * beam_size),
        source=SourceCache(layers(source_length), jnp.zeros((rows, 1, 1, source_length), bool)),
        ancestors=jnp.full((rows, beam_size, capacity), -1, jnp.int32),
        slot=jnp.zeros((), jnp.int32),
    )


def admit_to_cache(cache: KVCache, source: SourceCache, picks: Int[Array, " B"]) -> KVCache:
    """Replaces sentence b by sentence `picks[b]` of the A in `source`, not yet begun; where that is −1, it stays."""
    choose = jax.vmap(jnp.where)  # one condition for each row
    replace = lambda old, new: choose(picks >= 0, new[picks].astype(old.dtype), old)
    ancestors = choose(picks >= 0, jnp.full_like(cache.ancestors, -1), cache.ancestors)
    return cache._replace(source=jax.tree.map(replace, cache.source, source), ancestors=ancestors)


def claim_slot(cache: KVCache) -> KVCache:
    """Before a step: in the slot it is about to write, each hypothesis reads its own keys and values."""
    beam_ids = jnp.arange(cache.ancestors.shape[1])[None]
    return cache._replace(ancestors=cache.ancestors.at[:, :, cache.slot].set(beam_ids))


def write_slot(
    cache: LayerCache, slot: Int[Array, ""], key: Float[Array, "B H K W"], value: Float[Array, "B H W V"]
) -> LayerCache:
    """Writes one target position of W hypotheses into the ring buffer."""
    start = slot * key.shape[3]
    write = lambda old, new, axis: jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), start, axis)
    return cache.map_positions(write, LayerCache.of(key, value))


def reorder_cache(cache: KVCache, parents: Int[Array, "B W"]) -> KVCache:
    """After a step of beam search: hypothesis w of sentence b now continues hypothesis `parents[b, w]`."""
    return cache._replace(
        ancestors=jnp.take_along_axis(cache.ancestors, parents[..., None], axis=1, mode="promise_in_bounds")
    )


def resize_cache(cache: KVCache, capacity: int) -> KVCache:
    """The cache with another capacity; a smaller one keeps the newest positions."""
    beam_size, old = cache.ancestors.shape[1:]

    def resize(x, axis, per_slot, fill=0):
        x = jnp.roll(x, -cache.slot * per_slot, axis)  # oldest slot first
        if capacity < old:
            return jax.lax.slice_in_dim(x, (old - capacity) * per_slot, old * per_slot, axis=axis)
        return jnp.pad(x, [(0, (capacity - old) * per_slot) if a == axis else (0, 0) for a in range(x.ndim)],
                       constant_values=fill)  # fmt: skip

    layers = tuple(layer.map_positions(lambda x, axis: resize(x, axis, beam_size)) for layer in cache.layers)
    slot = jnp.asarray(old if capacity > old else 0, jnp.int32)  # the first new slot, or else the oldest
    return cache._replace(layers=layers, ancestors=resize(cache.ancestors, 2, 1, fill=-1), slot=slot)
