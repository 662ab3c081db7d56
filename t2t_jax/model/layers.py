"""§3.3–3.5 and §5.4: feed-forward network (Eq. 2), shared embedding and softmax, positional encodings, dropout."""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from t2t_jax.errors import InputError
from t2t_jax.model.attention import glorot_uniform
from t2t_jax.model.decoding_matrix import DecodingMatrix, kernel_param, product
from t2t_jax.model.einsum import dense, einsum
from t2t_jax.model.platform import platform

# The index in the global batch of each given row, on which dropout depends; inside the layers None outside training.
Rows = Int[Array, " B"] | None


class FeedForward(nn.Module):
    """Position-wise feed-forward network: FFN(x) = max(0, x W_1 + b_1) W_2 + b_2 (Eq. 2, §3.3).

    `activation`, an entry of `ACTIVATIONS`, may replace max(0, ·).
    """

    d_ff: int
    activation: str = "relu"

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        hidden = ACTIVATIONS[self.activation](Dense(self.d_ff, name="hidden")(x))
        return Dense(x.shape[-1], name="output")(hidden)


@jax.custom_vjp
def relu(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """max(0, x). Custom VJP: the backward pass keeps the result, which the next layer keeps anyway, not x as well."""
    return jnp.maximum(x, 0)


def _relu_forward(x):
    y = relu(x)
    return y, y


def _relu_backward(y, cotangent):
    if platform() == "gpu":
        # Without it XLA would compare x with 0 instead, and could not compute max(0, x W + b) in one matmul kernel.
        y = jax.lax.optimization_barrier(y)
    return (jnp.where(y > 0, cotangent, jnp.zeros_like(cotangent)),)


relu.defvjp(_relu_forward, _relu_backward)

# Values of `model.activation`. swish(x) = x σ(x) (SiLU); gelu(x) = x Φ(x), without the approximation by tanh.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": relu,
    "swish": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
}


class LayerNorm(nn.Module):
    """Layer normalisation (§3.1): (x − mean) / √(variance + ε) · scale + bias, computed in float32."""

    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        scale = self.param("scale", nn.initializers.ones_init(), x.shape[-1:])
        return layer_norm(x, scale, self.param("bias", nn.initializers.zeros_init(), x.shape[-1:]), self.epsilon)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(
    x: Float[Array, "B T D"], scale: Float[Array, " D"], bias: Float[Array, " D"], epsilon: float
) -> Float[Array, "B T D"]:
    """Layer normalisation of x, in x's dtype.

    Custom VJP: the backward pass keeps x and two numbers a position, where JAX would keep float32 arrays of x's shape.
    """
    return _layer_norm_forward(x, scale, bias, epsilon)[0]


def _layer_norm_forward(x, scale, bias, epsilon):
    mean = x.mean(axis=-1, keepdims=True, dtype=jnp.float32)
    centred = x.astype(jnp.float32) - mean
    rate = jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + epsilon)
    y = centred * (rate * scale[None, None]) + bias[None, None]
    return y.astype(x.dtype), (x, scale, mean, rate)


def _layer_norm_backward(epsilon, residuals, cotangent):
    x, scale, mean, rate = residuals

    def in_float32(x, cotangent):
        return (x.astype(jnp.float32) - mean) * rate, cotangent.astype(jnp.float32)

    normalised, by_y = in_float32(x, cotangent)
    scaled = by_y * scale[None, None]
    along, across = (normalised * scaled).mean(axis=-1, keepdims=True), scaled.mean(axis=-1, keepdims=True)
    by_x = rate * (scaled - across - normalised * along)
    if platform() == "gpu":
        # XLA would keep both float32 arrays for the sums over positions, which are another kernel there.
        normalised, by_y = in_float32(*jax.lax.optimization_barrier((x, cotangent)))
    return by_x.astype(x.dtype), (by_y * normalised).sum(axis=(0, 1)), by_y.sum(axis=(0, 1))


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


class Dense(nn.Module):
    """x W + b in x's dtype; W has `features` columns."""

    features: int

    @nn.compact
    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B T N"]:
        kernel = kernel_param(self, "kernel", glorot_uniform(1.0, 0, 1), (x.shape[-1], self.features))
        return dense(x, kernel, self.param("bias", nn.initializers.zeros_init(), (self.features,)))


class Embedding(nn.Module):
    """Embedding matrix E and, transposed, the linear layer before the softmax (§3.4); E ~ N(0, σ = d_model^−0.5)."""

    vocab_size: int
    d_model: int
    dtype: DTypeLike

    def setup(self):
        init = nn.initializers.normal(self.d_model**-0.5)
        self.table = self.param("table", init, (self.vocab_size, self.d_model))

    def __call__(self, ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Rows of E times √d_model; id 0, padding and start symbol, gets the zero vector."""
        vectors = _look_up(self.table, ids).astype(self.dtype) * math.sqrt(self.d_model)
        return jnp.where((ids != 0)[..., None], vectors, 0).astype(self.dtype)

    def logits_of_step(self, x: Float[Array, "B W D"]) -> Float[Array, "B W vocab"]:
        """x Eᵀ for one decoding step, vocabulary first in memory, as a search reads them."""
        matrix = self.table if self._is_int8 else DecodingMatrix(self.table.astype(self.dtype))
        return product(x, matrix, outputs_first=True)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T vocab"]:
        """x Eᵀ, unscaled, in float32."""
        if self._is_int8:
            return product(x, self.table)
        return einsum("btd,vd->btv", x.astype(self.dtype), self.table, jnp.float32)

    @property
    def _is_int8(self) -> bool:
        return isinstance(self.table, DecodingMatrix)


def _look_up(table: Float[Array, "vocab D"] | DecodingMatrix, ids: Int[Array, "*n"]) -> Float[Array, "*n D"]:
    if isinstance(table, DecodingMatrix):
        return table.rows(ids)
    if table.dtype != jnp.bfloat16:
        return table[ids]
    # XLA on CPU converts a whole bfloat16 table to float32 before it gathers rows. Gathering the bits as integers,
    # behind a barrier, avoids that.
    table, ids = jax.lax.optimization_barrier((table, ids))
    bits = jax.lax.bitcast_convert_type(table, jnp.uint16)[ids]
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


def sinusoidal_positions(positions: Int[Array, " T"], d_model: int) -> Float[Array, "T D"]:
    """Positional encoding (§3.5), sines and cosines interleaved.

    PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d_model))
    """
    rates = _rates(10000 ** (-2 * np.arange(d_model // 2) / d_model))
    angles = positions[:, None] * rates
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(-1, d_model)


def t2t_positions(positions: Int[Array, " T"], d_model: int) -> Float[Array, "T D"]:
    """The layout of the paper's code: all sines, then all cosines; wavelengths from 2π to 10000·2π inclusive."""
    step = math.log(10000) / max(d_model // 2 - 1, 1)
    angles = positions[:, None] * _rates(np.exp(-step * np.arange(d_model // 2)))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def _rates(rates: np.ndarray) -> Float[Array, "1 D_half"]:
    return jnp.asarray(rates, jnp.float32)[None]


class LearnedPositions(nn.Module):
    """Learned positional embedding (Table 3 row E); positions beyond the table use its last row."""

    length: int
    d_model: int

    @nn.compact
    def __call__(self, positions: Int[Array, " T"]) -> Float[Array, "T D"]:
        init = nn.initializers.normal(self.d_model**-0.5)
        table = self.param("table", init, (self.length, self.d_model))
        return table[jnp.minimum(positions, self.length - 1)]


# Values of `model.positions`: (max_positions, d_model) → a function of positions, or a module if it has parameters.
POSITIONS: dict[str, Callable[[int, int], Callable[[Int[Array, " T"]], Float[Array, "T D"]]]] = {
    "sinusoidal": lambda max_positions, d_model: functools.partial(sinusoidal_positions, d_model=d_model),
    "t2t": lambda max_positions, d_model: functools.partial(t2t_positions, d_model=d_model),
    "learned": LearnedPositions,
}


def check_positions(name: str, max_positions: int, d_model: int) -> None:
    """Refuses an entry of `POSITIONS` whose vectors depend on more than their position.

    Decoding asks for those of one step of several sentences, not for those of a sentence from 0 on.
    """
    encode = POSITIONS[name](max_positions, d_model)
    whole, some = jnp.arange(4), jnp.array([2, 0])
    if isinstance(encode, nn.Module):
        encode = functools.partial(encode.apply, encode.init(jax.random.key(0), whole))
    if not np.allclose(encode(whole)[some], encode(some), atol=1e-4):
        raise InputError(
            f"model.positions={name}: the vector of a position depends on the others that are asked for; make it a "
            "function of the positions that it is given, which in decoding are not 0, 1, 2, …"
        )


def keep_mask(
    key: Array, keep_probability: float, shape: tuple[int, ...], rows: Int[Array, " B"]
) -> Bool[Array, "B ..."]:
    """Dropout mask: True with `keep_probability`, independently for each element.

    `rows` are the indices of the array's rows in the global batch. An element's bits are a hash of the key and of its
    index in the global batch, so they are the same however the batch is split over devices and microbatches. The
    compiler fuses these few integer operations into the multiplication: on CPU several times cheaper than threefry
    (`jax.random`).
    """
    words = jax.random.key_data(key).ravel()
    index = jnp.expand_dims(rows.astype(jnp.uint32), range(1, len(shape))) * jnp.uint32(math.prod(shape[1:]))
    for axis in range(1, len(shape)):
        stride = math.prod(shape[axis + 1 :])
        index = index + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    bits = _mix(_mix(index + words[-1]) ^ words[0])
    return bits < jnp.uint32(min(keep_probability * 2**32, 2**32 - 1))


def _mix(x: Array) -> Array:
    """Wellons' integer hash "lowbias32": a bijection where each input bit flips each output bit half of the time."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


class Dropout(nn.Module):
    """Dropout with a key of its own in each call (see `dropout`); `rows` are None outside training: the identity."""

    rate: float

    def __call__(self, x: Float[Array, "B ..."], rows: Rows) -> Float[Array, "B ..."]:
        return dropout(x, self.rate, self.key(rows), rows)

    def key(self, rows: Rows) -> Array | None:
        """The key of a mask; None where nothing is dropped."""
        return None if rows is None or self.rate == 0 else self.make_rng("dropout")


def dropout(x: Float[Array, "B ..."], rate: float, key: Array | None, rows: Rows) -> Float[Array, "B ..."]:
    """Zeroes each element with probability `rate` and scales the rest by 1/(1 − rate) (§5.4); without a key, x.

    In bfloat16 the rate is that of the nearest 1/(1 − rate): 0.0986 for 0.1, and 0 for less than 0.0039. `rows` are the
    indices of x's rows in the global batch (see `keep_mask`).
    """
    if key is None:
        return x
    scale, keep_probability = np.asarray(1 / (1 - rate), x.dtype), 1 - rate
    if x.dtype == jnp.bfloat16:  # in which 1/0.9 is 1.109: the mean is kept if as much less is dropped
        keep_probability = 1 / float(scale)
    keep = keep_mask(key, keep_probability, x.shape, rows)
    return jnp.where(keep, x * scale, jnp.zeros_like(x))
