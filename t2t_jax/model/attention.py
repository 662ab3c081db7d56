"""§3.2 Attention: scaled dot-product attention (Eq. 1), multi-head attention, and all masks.

Attention(Q, K, V) = softmax(Q Kᵀ / √d_k) V                                    (Eq. 1)
MultiHead(Q, K, V) = Concat(head_1, …, head_h) W^O,                            (§3.2.2)
    where head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)

A mask is True where attention is allowed; every mask of whole sequences is made in this file.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from t2t_jax.errors import InputError
from t2t_jax.model.decoding_matrix import kernel_param
from t2t_jax.model.einsum import dense, einsum
from t2t_jax.model.kv_cache import LayerCache, write_slot
from t2t_jax.model.local_attention import block_length, local_attention
from t2t_jax.model.platform import platform

_MOST_ROWS_OF_CUDNN = 2**16 - 1  # more fail when they run (pytorch/pytorch#181235)
# The most negative float32. Not −∞: the softmax of a row that is masked everywhere would be NaN.
MASKED_SCORE = jnp.finfo(jnp.float32).min


def padding_mask(ids: Int[Array, "B S"]) -> Bool[Array, "B 1 1 S"]:
    """Every query may attend to every position that is not padding (id 0)."""
    return (ids != 0)[:, None, None, :]


def causal_mask(length: int) -> Bool[Array, "1 1 T T"]:
    """Position t may attend to positions up to and including t (§3.2.3)."""
    return jnp.tril(jnp.ones((length, length), dtype=bool))[None, None]


def segment_mask(queries: Int[Array, "B T"], keys: Int[Array, "B S"]) -> Bool[Array, "B 1 T S"]:
    """Sequence packing: a position may attend to the positions with the same segment id, those of its sentence."""
    return queries[:, None, :, None] == keys[:, None, None, :]


def window_mask(length: int, window: int) -> Bool[Array, "1 1 T T"]:
    """A position may attend to those within `window` / 2 of it, on either side: Table 1's r, "restricted"."""
    positions = jnp.arange(length)
    return (jnp.abs(positions[:, None] - positions[None]) <= window // 2)[None, None]


def whole_mask(mask: Bool[Array, "#B 1 #T S"] | None, keys: int, causal: bool) -> Bool[Array, "#B 1 #T S"]:
    """The mask, None for one that is True for all S = `keys`, and if `causal` the causal mask (T = S)."""
    mask = jnp.ones((1, 1, 1, keys), bool) if mask is None else mask
    return mask & causal_mask(keys) if causal else mask


def ancestor_mask(ancestors: Int[Array, "B W T"], slot: Int[Array, ""], window: int) -> Bool[Array, "B 1 W TW"]:
    """Beam search: a hypothesis may attend to its ancestors in the KV ring buffer, those of `KVCache.ancestors`.

    `slot` is the newest slot; with a `window` > 0, slots more than `window` / 2 steps older are masked.
    """
    batch, beam_size, capacity = ancestors.shape
    mask = ancestors[..., None] == jnp.arange(beam_size)[None, None, None]  # [B, W, T, W]
    if window:
        ages = (slot - jnp.arange(capacity)) % capacity
        mask &= (ages <= window // 2)[None, None, :, None]
    return mask.reshape(batch, 1, beam_size, capacity * beam_size)


def scaled_dot_product_attention(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B H K S"],
    value: Float[Array, "B H S V"],
    mask: Bool[Array, "#B 1 #T S"],
    dropout: Callable[[Array], Array] = lambda weights: weights,
) -> Float[Array, "B H T V"]:
    """softmax(Q Kᵀ / √d_k) V (Eq. 1), the softmax in float32; `dropout` acts on the attention weights.

    Keys are transposed ([K, S], not [S, K]), so that both matmuls read memory in order.
    """
    query = query * query.shape[-1] ** -0.5
    scores = einsum("bhtk,bhks->bhts", query, key, jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask, scores, MASKED_SCORE), axis=-1)  # [B, H, T, S]
    return einsum("bhts,bhsv->bhtv", dropout(weights).astype(value.dtype), value, value.dtype)


# How each query combines the values, by the name that `model.attention` gives. A variant has the same arguments, and
# must not depend on the indices of queries and keys: in decoding these are hypotheses and slots of the KV cache.
ATTENTIONS = {"dot_product": scaled_dot_product_attention}


def check_variant(name: str, num_heads: int, d_k: int, d_v: int) -> None:
    """Refuses an entry of `ATTENTIONS` that depends on orders, on masked keys, or on one being allowed.

    Its model would decode another function than the one that was trained, or compute NaN in rows of padding.
    """
    queries, keys = 3, 6
    random = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(random.normal(size=(1, num_heads, *shape)), jnp.float32)
        for shape in ((queries, d_k), (d_k, keys), (keys, d_v))
    )
    mask = jnp.arange(keys)[None, None, None] < keys - 1
    attend = ATTENTIONS[name]
    expected = attend(query, key, value, mask)
    order = random.permutation(keys)
    permuted = attend(query, key[..., order], value[:, :, order], mask[..., order])
    without_masked = attend(query, key[..., :-1], value[:, :, :-1], mask[..., :-1])
    reversed_back = attend(query[:, :, ::-1], key, value, mask)[:, :, ::-1]
    if not all(np.allclose(found, expected, atol=1e-4) for found in (permuted, without_masked, reversed_back)):
        raise InputError(
            f"model.attention={name}: depends on the indices of queries or keys or on masked keys, which in decoding "
            "are others than in training; make it a function of a query and its allowed keys and values alone"
        )
    total = lambda *arrays: attend(*arrays, jnp.zeros_like(mask)).sum()
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(jax.value_and_grad(total, (0, 1, 2))(query, key, value))):
        raise InputError(
            f"model.attention={name}: it or its gradient is NaN or infinite where a query may attend to no key, as in "
            "rows of padding; mask scores with MASKED_SCORE of t2t_jax/model/attention.py, not −∞, and divide by no 0"
        )


def needed_by_fused(d_k: int) -> dict[str, Any]:
    """The fields of a model of which `fused_attention` computes one value alone, and that value."""
    return {"attention": "dot_product", "attention_dropout": 0, "d_v": d_k}


def cudnn_supports(dtype: DTypeLike, head_dim: int) -> bool:
    """Whether cuDNN's attention computes this: half precision, heads of up to 128 in multiples of 8."""
    return jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16) and head_dim <= 128 and head_dim % 8 == 0


def fused_attention(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B H K S"],
    value: Float[Array, "B H S K"],
    mask: Bool[Array, "#B 1 #T S"] | None,
    *,
    causal: bool,
) -> Float[Array, "B H T K"]:
    """Eq. 1 by `jax.nn.dot_product_attention`: on GPU one cuDNN kernel, which never writes the weights to memory.

    d_v is d_k, as the shapes say. A mask that is the same for every query is passed on as lengths, so it must be
    True up to some length and False from there on, as a padding mask is. A row without any allowed position attends to
    the first one.
    """
    batch, _, length, head_dim = query.shape
    on_cudnn = platform() == "gpu" and cudnn_supports(query.dtype, head_dim) and batch <= _MOST_ROWS_OF_CUDNN
    if on_cudnn and any(more := _positions_that_cudnn_lacks(length, key.shape[3], mask, causal)):
        return _fused_attention_of_longer(query, key, value, mask, causal, *more)
    if mask is None:
        allowed = {}
    elif mask.shape[2] == 1:
        lengths = jnp.maximum(mask[:, 0, 0].sum(axis=-1, dtype=jnp.int32), 1)
        allowed = {"key_value_seq_lengths": jnp.broadcast_to(lengths, batch)}
        if on_cudnn:
            within = (jnp.arange(key.shape[3])[None] < lengths[:, None])[:, None]  # [B, 1, S]
            key = _without_gradient_beyond(within[:, :, None], key)
            value = _without_gradient_beyond(within[..., None], value)
    else:
        allowed = {"mask": jnp.broadcast_to(mask, (batch, 1, *mask.shape[2:]))}
    arguments = jnp.einsum("bhtk->bthk", query), jnp.einsum("bhks->bshk", key), jnp.einsum("bhsk->bshk", value)
    implementation = "cudnn" if on_cudnn else "xla"
    try:
        heads = jax.nn.dot_product_attention(*arguments, is_causal=causal, implementation=implementation, **allowed)
    except RuntimeError as error:  # no cuDNN, or too old a one or GPU
        raise InputError(f"machine.fused_attention=True: {error}; set it to False") from None
    return jnp.einsum("bthk->bhtk", heads)


@jax.custom_vjp
def _without_gradient_beyond(within: Bool[Array, "#B 1 #N #M"], x: Float[Array, "B H N M"]) -> Float[Array, "B H N M"]:
    """x, with a gradient of 0 where `within` is False.

    Beyond a row's length cuDNN skips the gradients of keys and values, and XLA leaves there what the memory held:
    jaxlib 0.10.2 always, 0.11.2 in CUDA graphs (openxla/xla#44867 and #46500).
    """
    return x


_without_gradient_beyond.defvjp(
    lambda within, x: (x, within),
    lambda within, cotangent: (None, jnp.where(within, cotangent, jnp.zeros_like(cotangent))),
)


def _positions_that_cudnn_lacks(queries: int, keys: int, mask: Array | None, causal: bool) -> tuple[int, int]:
    """How many queries and keys to add for gradients that are right: none of odd lengths, for which JAX has none.

    And no 64 keys beyond a multiple of 128 under a mask that differs from query to query: cuDNN's gradient on Hopper
    takes the missing half of its last 128 keys for scores of 0, beside which a row that may attend to nothing (its
    log-sum-exp is below −88.7) overflows, and all is NaN (cuDNN 9.30 and earlier; pytorch/pytorch#196678).
    """
    more_queries, more_keys = queries % 2, keys % 2
    per_query = not causal if mask is None else mask.shape[2] > 1
    if per_query and (keys + more_keys) % 128 == 64:
        more_keys += 2
    return max(more_queries, more_keys) if causal else more_queries, more_keys


def _fused_attention_of_longer(query, key, value, mask, causal, more_queries, more_keys):
    """`fused_attention` with so many positions more, which change nothing."""

    def longer(x, axis, count):
        return jnp.pad(x, [(0, count if i == axis else 0) for i in range(x.ndim)])

    if mask is None and more_keys and not causal:  # without a mask, the causal one keeps queries from later keys
        mask = jnp.ones((1, 1, 1, key.shape[3]), bool)
    if mask is not None:
        mask = longer(longer(mask, 3, more_keys), 2, more_queries if mask.shape[2] > 1 else 0)
    longer_ones = longer(query, 2, more_queries), longer(key, 3, more_keys), longer(value, 2, more_keys)
    return fused_attention(*longer_ones, mask, causal=causal)[:, :, : query.shape[2]]


def glorot_uniform(gain: float, in_axis: int | tuple[int, ...], out_axis: int | tuple[int, ...]):
    """Uniform in ±gain·√(6 / (fan_in + fan_out)), with the fans of the kernel flattened to a matrix."""
    return nn.initializers.variance_scaling(gain**2, "fan_avg", "uniform", in_axis=in_axis, out_axis=out_axis)


class MultiHeadAttention(nn.Module):
    """Multi-head attention (§3.2.2).

    `query_gain` and `key_value_gain` scale the Glorot limits. The paper's code initialises fused kernels: one matrix
    for q, k and v of self-attention, one for k and v of cross-attention; the gains give our separate kernels the
    same distributions where h·d_k = h·d_v = d_model. `function` is a name in `ATTENTIONS`; `fused` selects
    `fused_attention` instead, which has no dropout on the attention weights. With a `window` > 0, positions attend to
    those within `window` / 2 only.
    """

    num_heads: int
    d_k: int
    d_v: int
    d_model: int
    bias: bool
    query_gain: float
    key_value_gain: float
    function: str = "dot_product"
    window: int = 0
    fused: bool = False

    def setup(self):
        def affine(name, kernel_shape, init, bias_shape):
            """The parameters of one projection: (kernel as a matrix, bias or None)."""
            kernel = kernel_param(self, f"{name}_kernel", init, kernel_shape)
            bias = self.param(f"{name}_bias", nn.initializers.zeros_init(), bias_shape) if self.bias else None
            return kernel, bias

        def projection(name, head_dim, gain):
            shape = (self.d_model, self.num_heads, head_dim)
            return affine(name, shape, glorot_uniform(gain, 0, (1, 2)), shape[1:])

        self.query = projection("query", self.d_k, self.query_gain)
        self.key = projection("key", self.d_k, self.key_value_gain)
        self.value = projection("value", self.d_v, self.key_value_gain)
        shape = (self.num_heads, self.d_v, self.d_model)
        self.output = affine("output", shape, glorot_uniform(1.0, (0, 1), 2), shape[2:])

    def _project(self, affine, x):
        """[B, T, D] → [B, T, H, head_dim]."""
        kernel, bias = affine
        y = dense(x, kernel, None if bias is None else bias.ravel())
        return y.reshape(*x.shape[:2], self.num_heads, -1)

    def keys_values(self, memory: Float[Array, "B S D"]) -> tuple[Float[Array, "B H K S"], Float[Array, "B H S V"]]:
        """K W^K and V W^V: the key and the value of every attended position in every head."""
        key, value = self._project(self.key, memory), self._project(self.value, memory)
        return jnp.einsum("bshk->bhks", key), jnp.einsum("bshv->bhsv", value)

    def queries(self, x: Float[Array, "B T D"]) -> Float[Array, "B H T K"]:
        """Q W^Q: the query of every position in every head."""
        query = self._project(self.query, x)
        if self.bias and platform() == "gpu":
            # Without it XLA may scale x W + b in the same kernel, which jaxlib 0.10.2 (and 0.11.0) then may compute as
            # s (x W) + b (openxla/xla#46110).
            query = jax.lax.optimization_barrier(query)
        return jnp.einsum("bthk->bhtk", query)

    def combine(self, heads: Float[Array, "B H T V"]) -> Float[Array, "B T D"]:
        """Concat(head_1, …, head_h) W^O."""
        kernel, bias = self.output
        concatenated = jnp.einsum("bhtv->bthv", heads).reshape(heads.shape[0], heads.shape[2], -1)
        return dense(concatenated, kernel, bias)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"],
        mask: Bool[Array, "#B 1 #T S"] | None,
        dropout: Callable[[Array], Array],
        *,
        causal: bool = False,
    ) -> Float[Array, "B T D"]:
        """Attends from `x` to `memory` where `mask` (None: everywhere) allows it and, if `causal`, not to later ones.

        Sows the attention weights [B, H, T, S] into the collection 'intermediates', which is kept only by an `apply`
        with `mutable=["intermediates"]`; `fused_attention` has none to sow.
        """

        def sow_and_drop(weights):
            self.sow("intermediates", "weights", weights)
            # In blocks there are several to a row, on which dropout depends.
            return dropout(weights.reshape(len(x), -1, *weights.shape[2:])).reshape(weights.shape)

        def attend(query, key, value, mask, causal=False):
            if self.fused:
                return fused_attention(query, key, value, mask, causal=causal)
            return ATTENTIONS[self.function](query, key, value, whole_mask(mask, key.shape[3], causal), sow_and_drop)

        query, (key, value) = self.queries(x), self.keys_values(memory)
        left, right = self.window // 2, 0 if causal else self.window // 2
        keys = left + block_length(left, right) + right
        if self.window and 2 * keys <= x.shape[1] and not self.is_mutable_collection("intermediates"):
            return self.combine(local_attention(attend, query, key, value, mask, left, right))
        if self.window:
            within = window_mask(x.shape[1], self.window)
            mask = within if mask is None else mask & within
        return self.combine(attend(query, key, value, mask, causal))

    def append_and_attend(
        self, y: Float[Array, "B W D"], cache: LayerCache, slot: Int[Array, ""], mask: Bool[Array, "B 1 W TW"]
    ) -> tuple[Float[Array, "B W D"], LayerCache]:
        """Cached self-attention at one position of W hypotheses: writes its K/V into the ring buffer, then attends."""
        cache = write_slot(cache, slot, *self.keys_values(y))
        return self.attend_to_cache(y, cache, mask), cache

    def attend_to_cache(
        self, y: Float[Array, "B W D"], cache: LayerCache, mask: Bool[Array, "B 1 #W N"]
    ) -> Float[Array, "B W D"]:
        """Attends from one position of W hypotheses to cached keys and values, in the cache's dtype."""
        query = self.queries(y).astype(cache.key.dtype)
        heads = ATTENTIONS[self.function](query, cache.key, cache.value, mask)
        return self.combine(heads.astype(y.dtype))
