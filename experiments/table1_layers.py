"""§4: the layer types of Table 1, each a minimal pure function x [n, d] → [n, d].

They have only matrix products and what mixes positions: no heads, biases, residual connections or normalisation.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from t2t_jax.model.attention import scaled_dot_product_attention
from t2t_jax.model.local_attention import local_attention

Parameters = dict[str, Array]
Attend = Callable[[Array, Array, Array, "Sizes"], Array]


class Sizes(NamedTuple):
    """Sequence length n, representation dimension d, kernel size k, neighbourhood size r, as in Table 1.

    A neighbourhood of size r is what is within r/2 of a position, on either side, as for `model.attention_window`.
    """

    n: int
    d: int
    k: int
    r: int


# --- Windows -----------------------------------------------------------------------------------------------


def sides(size: int) -> tuple[int, int]:
    """How many positions a centred window of `size` positions has on the left and on the right of its centre."""
    return (size - 1) // 2, size // 2


def windows(x: Float[Array, "n d"], size: int) -> Float[Array, "n size d"]:
    """The window around each position, zero-padded at both ends of the sequence."""
    positions = jnp.arange(x.shape[0])[:, None] + jnp.arange(size)[None]  # [n, size], in the padded sequence
    return jnp.pad(x, (sides(size), (0, 0)))[positions]


# --- The layers --------------------------------------------------------------------------------------------


def full_attention(
    query: Float[Array, "n d"], key: Float[Array, "n d"], value: Float[Array, "n d"], sizes: Sizes
) -> Float[Array, "n d"]:
    """Every position attends to every position (Eq. 1), with one head."""
    mask = jnp.ones((1, 1, 1, key.shape[0]), bool)
    return scaled_dot_product_attention(query[None, None], key.T[None, None], value[None, None], mask)[0, 0]


def restricted_attention(
    query: Float[Array, "n d"], key: Float[Array, "n d"], value: Float[Array, "n d"], sizes: Sizes
) -> Float[Array, "n d"]:
    """Every position attends to those within r/2 of it: Eq. 1 in blocks of r/2 queries and 3r/2 keys."""
    arrays = query[None, None], key.T[None, None], value[None, None]
    return local_attention(scaled_dot_product_attention, *arrays, None, sizes.r // 2, sizes.r // 2)[0, 0]


def without_projections(attend: Attend) -> Callable[..., Array]:
    """Attention as Table 1 counts it, without projections: query, key and value are x itself."""
    return lambda parameters, x, sizes, dilation: attend(x, x, x, sizes)


def with_projections(attend: Attend) -> Callable[..., Array]:
    """Attention with the four projections of §3.2.2, which Table 1 does not count."""

    def apply(parameters: Parameters, x: Float[Array, "n d"], sizes: Sizes, dilation: int) -> Float[Array, "n d"]:
        query, key, value = (x @ parameters[name] for name in ("query", "key", "value"))
        return attend(query, key, value, sizes) @ parameters["output"]

    return apply


def recurrent(parameters: Parameters, x: Float[Array, "n d"], sizes: Sizes, dilation: int) -> Float[Array, "n d"]:
    """h_t = tanh(h_{t−1} W + x_t U), h_0 = 0. The products x_t U do not depend on h and are computed in parallel."""

    def update(state, projected_input):
        state = jnp.tanh(state @ parameters["state"] + projected_input)
        return state, state

    return jax.lax.scan(update, jnp.zeros_like(x[0]), x @ parameters["input"])[1]


def state_update(parameters: Parameters, states: Float[Array, "n d"], x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """One update of the state at all positions in parallel; n updates from zero states equal `recurrent`."""
    previous = jnp.pad(states, ((1, 0), (0, 0)))[:-1]
    return jnp.tanh(previous @ parameters["state"] + x @ parameters["input"])


def convolve(x: Float[Array, "n d"], kernel: Float[Array, "k d d"], padding: tuple[int, int], dilation: int = 1):
    """A 1-D convolution, dilated."""
    layout = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(
        x[None], kernel, (1,), [padding], rhs_dilation=(dilation,), dimension_numbers=layout
    )[0]


def contiguous(parameters: Parameters, x: Float[Array, "n d"], sizes: Sizes, dilation: int) -> Float[Array, "n d"]:
    """A convolution over the k positions around each position."""
    return convolve(x, parameters["kernel"], sides(sizes.k))


def dilated(parameters: Parameters, x: Float[Array, "n d"], sizes: Sizes, dilation: int) -> Float[Array, "n d"]:
    """A causal dilated convolution, as in ByteNet's decoder; in a stack of layers the dilations are 1, k, k², …

    Centred convolutions of these dilations would not connect all pairs of positions. With k = 3, for example, the only
    path over a distance of +2 is −1 and then +3, and it leaves the sequence if it starts at the first position.
    """
    return convolve(x, parameters["kernel"], ((sizes.k - 1) * dilation, 0), dilation)


def separable(parameters: Parameters, x: Float[Array, "n d"], sizes: Sizes, dilation: int) -> Float[Array, "n d"]:
    """A depthwise convolution over the k positions around each position, then a pointwise one."""
    return jnp.einsum("nkd,kd->nd", windows(x, sizes.k), parameters["depthwise"]) @ parameters["pointwise"]


# --- The rows ----------------------------------------------------------------------------------------------


class Formula(NamedTuple):
    """A formula as printed, and its value; of O(f), the value of f."""

    text: str
    value: Callable[[Sizes], float]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A row of Table 1: the paper's formulas for a layer type, its exact path length, and its implementation.

    For layers with projections, which the paper has no formula for, `work` is the number of multiply-adds: exact, in
    restricted attention for an even r from 4 on and whole blocks (n a multiple of r/2).

    `apply` takes (parameters, x, sizes, dilation); the dilation is 1 except in a `dilated` layer. `update`, which only
    recurrent layers have, takes (parameters, states, x) and updates the states of all positions once. In a `causal`
    layer an output depends only on inputs at its own and at earlier positions.
    """

    name: str
    work: Formula
    sequential: Formula
    path: Formula
    path_length: Callable[[Sizes], int]
    apply: Callable[[Parameters, Array, Sizes, int], Array]
    shapes: Callable[[Sizes], dict[str, tuple[int, ...]]] = lambda sizes: {}
    update: Callable[[Parameters, Array, Array], Array] | None = None
    dilated: bool = False
    causal: bool = False


def logarithm(n: int, base: int) -> int:
    """⌈log_base(n)⌉, in exact integer arithmetic."""
    return next(power for power in range(n) if base**power >= n)


def layers_to_connect(n: int, reach: int) -> int:
    """The number of layers, each with `reach` positions on both sides, that connect the first and the last position."""
    return math.ceil((n - 1) / reach)


def square_matrices(*names: str) -> Callable[[Sizes], dict[str, tuple[int, ...]]]:
    """Shapes of parameters that are [d, d] matrices."""
    return lambda sizes: {name: (sizes.d, sizes.d) for name in names}


def kernel(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    return {"kernel": (sizes.k, sizes.d, sizes.d)}


def separable_kernels(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    return {"depthwise": (sizes.k, sizes.d), "pointwise": (sizes.d, sizes.d)}


CONSTANT, LINEAR = Formula("O(1)", lambda s: 1), Formula("O(n)", lambda s: s.n)
OVER_K, OVER_R = Formula("O(n/k)", lambda s: s.n / s.k), Formula("O(n/r)", lambda s: s.n / s.r)
PROJECTIONS = square_matrices("query", "key", "value", "output")

LAYERS = (
    Layer(
        name="Self-attention",
        work=Formula("O(n²·d)", lambda s: s.n**2 * s.d),
        sequential=CONSTANT,
        path=CONSTANT,
        path_length=lambda s: 1,
        apply=without_projections(full_attention),
    ),
    Layer(
        name="Self-attention with projections",
        work=Formula("2·n²·d + 4·n·d²", lambda s: 2 * s.n**2 * s.d + 4 * s.n * s.d**2),
        sequential=CONSTANT,
        path=CONSTANT,
        path_length=lambda s: 1,
        apply=with_projections(full_attention),
        shapes=PROJECTIONS,
    ),
    Layer(
        name="Recurrent",
        work=Formula("O(n·d²)", lambda s: s.n * s.d**2),
        sequential=LINEAR,
        path=LINEAR,
        path_length=lambda s: s.n,
        apply=recurrent,
        shapes=square_matrices("state", "input"),
        update=state_update,
        causal=True,
    ),
    Layer(
        name="Convolutional, contiguous",
        work=Formula("O(k·n·d²)", lambda s: s.k * s.n * s.d**2),
        sequential=CONSTANT,
        path=OVER_K,
        path_length=lambda s: layers_to_connect(s.n, min(sides(s.k))),
        apply=contiguous,
        shapes=kernel,
    ),
    Layer(
        name="Convolutional, dilated",
        work=Formula("O(k·n·d²)", lambda s: s.k * s.n * s.d**2),
        sequential=CONSTANT,
        path=Formula("O(log_k(n))", lambda s: math.log(s.n, s.k)),
        path_length=lambda s: logarithm(s.n, s.k),
        apply=dilated,
        shapes=kernel,
        dilated=True,
        causal=True,
    ),
    Layer(
        name="Convolutional, separable",
        work=Formula("O(k·n·d + n·d²)", lambda s: s.k * s.n * s.d + s.n * s.d**2),
        sequential=CONSTANT,
        path=OVER_K,
        path_length=lambda s: layers_to_connect(s.n, min(sides(s.k))),
        apply=separable,
        shapes=separable_kernels,
    ),
    Layer(
        name="Self-attention (restricted)",
        work=Formula("O(r·n·d)", lambda s: s.r * s.n * s.d),
        sequential=CONSTANT,
        path=OVER_R,
        path_length=lambda s: layers_to_connect(s.n, s.r // 2),
        apply=without_projections(restricted_attention),
    ),
    Layer(
        name="Self-attention (restricted) with projections",
        work=Formula("3·r·n·d + 4·n·d²", lambda s: 3 * s.r * s.n * s.d + 4 * s.n * s.d**2),
        sequential=CONSTANT,
        path=OVER_R,
        path_length=lambda s: layers_to_connect(s.n, s.r // 2),
        apply=with_projections(restricted_attention),
        shapes=PROJECTIONS,
    ),
)


def init_parameters(layer: Layer, sizes: Sizes, key: Array) -> Parameters:
    """Normal with standard deviation 1/√fan-in, which preserves the variance of activations."""
    shapes = layer.shapes(sizes)
    keys = jax.random.split(key, len(shapes) + 1)
    draw = lambda key, shape: jax.random.normal(key, shape) * math.prod(shape[:-1]) ** -0.5
    return {name: draw(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=False)}
