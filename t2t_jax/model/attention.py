"""§3.2 Attention: scaled dot-product (Eq. 1), multi-head attention, and the masks.

A mask is True where attention is allowed. The masks of the paper, and that of packed rows, are made here and
nowhere else.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from t2t_jax.model.products import dense, product

# Scores are float32; finite, so that a row with nothing to attend to stays finite after the softmax.
MASKED_SCORE = jnp.finfo(jnp.float32).min


def padding_mask(ids: Int[Array, "B S"]) -> Bool[Array, "B 1 1 S"]:
    """Every position may attend to every position that is not padding (id 0)."""
    return (ids != 0)[:, None, None, :]


def causal_mask(length: int) -> Bool[Array, "1 1 T T"]:
    """Position t may attend to positions up to and including t (§3.2.3)."""
    return jnp.tril(jnp.ones((length, length), dtype=bool))[None, None]


def segment_mask(queries: Int[Array, "B T"], keys: Int[Array, "B S"]) -> Bool[Array, "B 1 T S"]:
    """In packed rows, a position may attend to the positions of the same number: those of its own pair."""
    return queries[:, None, :, None] == keys[:, None, None, :]


def window_mask(length: int, window: int) -> Bool[Array, "1 1 T T"]:
    """A position may attend to those within `window` / 2 of it, on either side (Table 1, "restricted")."""
    places = jnp.arange(length)
    return (jnp.abs(places[:, None] - places[None]) <= window // 2)[None, None]


def scaled_dot_product_attention(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B H K S"],
    value: Float[Array, "B H S V"],
    mask: Bool[Array, "#B 1 #T S"],
    dropout: Callable[[Array], Array] = lambda weights: weights,
) -> Float[Array, "B H T V"]:
    """softmax(Q Kᵀ / √d_k) V (Eq. 1), the softmax in float32; `dropout` acts on the weights.

    Keys lie transposed, as both products then read memory in order.
    """
    query = query * query.shape[-1] ** -0.5
    scores = product("bhtk,bhks->bhts", query, key, jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask, scores, MASKED_SCORE), axis=-1)  # [B, H, T, S]
    return product("bhts,bhsv->bhtv", dropout(weights).astype(value.dtype), value, value.dtype)


def fused_attention(
    query: Float[Array, "B H T K"],
    key: Float[Array, "B H K S"],
    value: Float[Array, "B H S V"],
    mask: Bool[Array, "#B 1 #T S"],
    *,
    causal: bool,
) -> Float[Array, "B H T V"]:
    """Equation 1 in JAX's own function: on a GPU one cuDNN kernel, which never writes the weights to memory.

    A mask that is the same for every query must be True, then False, as that of padding is. Where it is all False,
    as in an empty row, the first position is attended to.
    """
    if query.shape[-1] != value.shape[-1]:
        mask = mask & causal_mask(query.shape[2]) if causal else mask
        return scaled_dot_product_attention(query, key, value, mask)
    batch, _, length, width = query.shape
    if mask.shape[2] == 1:
        lengths = jnp.maximum(mask[:, 0, 0].sum(axis=-1, dtype=jnp.int32), 1)
        allowed = {"key_value_seq_lengths": jnp.broadcast_to(lengths, batch)}
    else:
        allowed = {"mask": jnp.broadcast_to(mask, (batch, 1, *mask.shape[2:]))}
    even = "mask" not in allowed or (length % 2 == 0 and mask.shape[3] % 2 == 0)
    known = query.dtype in (jnp.bfloat16, jnp.float16) and width <= 128 and width % 8 == 0 and even
    heads = jax.nn.dot_product_attention(
        jnp.einsum("bhtk->bthk", query),
        jnp.einsum("bhks->bshk", key),
        jnp.einsum("bhsv->bshv", value),
        is_causal=causal,
        implementation="cudnn" if jax.default_backend() == "gpu" and known else "xla",
        **allowed,
    )
    return jnp.einsum("bthv->bhtv", heads)


def glorot_uniform(gain: float, in_axis: int | tuple[int, ...], out_axis: int | tuple[int, ...]):
    """U(±gain·√(6 / (fan_in + fan_out))), the fans those of the kernel flattened to a matrix."""
    return nn.initializers.variance_scaling(gain**2, "fan_avg", "uniform", in_axis=in_axis, out_axis=out_axis)


class MultiHeadAttention(nn.Module):
    """Multi-head attention (§3.2.2).

    `query_gain` and `key_value_gain` scale the Glorot limits, so that separate kernels start as the fused
    ones of the paper's own code did: q, k and v of self-attention in one matrix, k and v of the
    encoder-decoder attention in another.
    """

    num_heads: int
    d_k: int
    d_v: int
    d_model: int
    bias: bool
    query_gain: float
    key_value_gain: float
    fused: bool = False

    def setup(self):
        def projection(name, width, gain):
            shape = (self.d_model, self.num_heads, width)
            return self._affine(name, shape, glorot_uniform(gain, 0, (1, 2)), shape[1:])

        self.query = projection("query", self.d_k, self.query_gain)
        self.key = projection("key", self.d_k, self.key_value_gain)
        self.value = projection("value", self.d_v, self.key_value_gain)
        shape = (self.num_heads, self.d_v, self.d_model)
        self.output = self._affine("output", shape, glorot_uniform(1.0, (0, 1), 2), shape[2:])

    def _affine(self, name, kernel_shape, init, bias_shape):
        kernel = self.param(f"{name}_kernel", init, kernel_shape)
        bias = self.param(f"{name}_bias", nn.initializers.zeros_init(), bias_shape) if self.bias else None
        return kernel, bias

    def _heads(self, affine, x):
        """[B, T, D] → [B, T, H, width]."""
        kernel, bias = affine
        y = dense(x, kernel.reshape(self.d_model, -1), None if bias is None else bias.ravel())
        return y.reshape(*x.shape[:2], *kernel.shape[1:])

    def keys_values(self, memory: Float[Array, "B S D"]) -> tuple[Float[Array, "B H K S"], Float[Array, "B H S V"]]:
        """What can be computed once per attended position: its key and its value in every head."""
        key, value = self._heads(self.key, memory), self._heads(self.value, memory)
        return jnp.einsum("bshk->bhks", key), jnp.einsum("bshv->bhsv", value)

    def queries(self, x: Float[Array, "B T D"]) -> Float[Array, "B H T K"]:
        """The query of every position in every head."""
        return jnp.einsum("bthk->bhtk", self._heads(self.query, x))

    def combine(self, heads: Float[Array, "B H T V"]) -> Float[Array, "B T D"]:
        """Concat(head_1, …, head_h) W^O."""
        kernel, bias = self.output
        concatenated = jnp.einsum("bhtv->bthv", heads).reshape(heads.shape[0], heads.shape[2], -1)
        return dense(concatenated, kernel.reshape(-1, self.d_model), bias)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S D"],
        mask: Bool[Array, "#B 1 #T S"],
        dropout: Callable[[Array], Array],
        *,
        causal: bool = False,
    ) -> Float[Array, "B T D"]:
        """Attends where `mask` allows it and, if `causal`, not to the right; `fused` leaves out the dropout."""
        query, (key, value) = self.queries(x), self.keys_values(memory)
        if self.fused:
            return self.combine(fused_attention(query, key, value, mask, causal=causal))
        mask = mask & causal_mask(x.shape[1]) if causal else mask
        return self.combine(scaled_dot_product_attention(query, key, value, mask, dropout))
