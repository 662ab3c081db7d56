"""§4: the layers of Table 1 and of its text, each a pure function x [n, d] → [n, d] that does no more than it must.

Nothing but what mixes positions or multiplies matrices is in them: no heads, biases, residuals or normalisation.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from t2t_jax.model.attention import scaled_dot_product_attention

Parameters = dict[str, Array]
Attend = Callable[[Array, Array, Array, "Sizes"], Array]


class Sizes(NamedTuple):
    """Sequence length n, width d, kernel width k, neighbourhood r, as in Table 1."""

    n: int
    d: int
    k: int
    r: int


# --- What they are made of ---------------------------------------------------------------------------------


def sides(width: int) -> tuple[int, int]:
    """How many positions to the left and to the right a window of `width` reaches from its centre."""
    return (width - 1) // 2, width // 2


def windows(x: Float[Array, "n d"], width: int) -> Float[Array, "n width d"]:
    """The window around each position, zeros beyond the ends."""
    positions = jnp.arange(x.shape[0])[:, None] + jnp.arange(width)[None]  # [n, width], in the padded sequence
    return jnp.pad(x, (sides(width), (0, 0)))[positions]


def inside(n: int, width: int) -> Bool[Array, "n width"]:
    """Which places of the windows lie within the sequence."""
    return windows(jnp.ones((n, 1)), width)[..., 0] > 0


# --- The layers --------------------------------------------------------------------------------------------


def full_attention(
    query: Float[Array, "n d"], key: Float[Array, "n d"], value: Float[Array, "n d"], sizes: Sizes
) -> Float[Array, "n d"]:
    """Every position attends to every position (Eq. 1), with one head."""
    everything = jnp.ones((1, 1, 1, key.shape[0]), bool)
    return scaled_dot_product_attention(query[None, None], key.T[None, None], value[None, None], everything)[0, 0]


def restricted_attention(
    query: Float[Array, "n d"], key: Float[Array, "n d"], value: Float[Array, "n d"], sizes: Sizes
) -> Float[Array, "n d"]:
    """Every position attends to the r around it: to Eq. 1, n sentences of one query and r keys."""
    keys = jnp.einsum("nrd->ndr", windows(key, sizes.r))[:, None]  # [n, 1, d, r]
    values = windows(value, sizes.r)[:, None]  # [n, 1, r, d]
    allowed = inside(key.shape[0], sizes.r)[:, None, None]  # [n, 1, 1, r]
    return scaled_dot_product_attention(query[:, None, None], keys, values, allowed)[:, 0, 0]


def bare(attend: Attend) -> Callable[..., Array]:
    """The layer of the products that Table 1 counts: query, key and value are x itself."""
    return lambda parameters, x, sizes, dilation: attend(x, x, x, sizes)


def projected(attend: Attend) -> Callable[..., Array]:
    """The same with the four projections of §3.2.2, which Table 1 leaves out."""

    def apply(parameters: Parameters, x: Float[Array, "n d"], sizes: Sizes, dilation: int) -> Float[Array, "n d"]:
        query, key, value = (x @ parameters[name] for name in ("query", "key", "value"))
        return attend(query, key, value, sizes) @ parameters["output"]

    return apply


def recurrent(parameters: Parameters, x: Float[Array, "n d"], sizes: Sizes, dilation: int) -> Float[Array, "n d"]:
    """h_t = tanh(h_{t−1} W + x_t U), from h_0 = 0; all the x_t U at once, as nothing there waits."""

    def update(state, driven):
        state = jnp.tanh(state @ parameters["state"] + driven)
        return state, state

    return jax.lax.scan(update, jnp.zeros_like(x[0]), x @ parameters["input"])[1]


def state_update(parameters: Parameters, states: Float[Array, "n d"], x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """One update of the state, at all positions at once; from zeros, n of them are `recurrent`."""
    before = jnp.pad(states, ((1, 0), (0, 0)))[:-1]
    return jnp.tanh(before @ parameters["state"] + x @ parameters["input"])


def convolve(x: Float[Array, "n d"], kernel: Float[Array, "k d d"], padding: tuple[int, int], dilation: int = 1):
    """A convolution whose places lie `dilation` apart."""
    layout = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(
        x[None], kernel, (1,), [padding], rhs_dilation=(dilation,), dimension_numbers=layout
    )[0]


def contiguous(parameters: Parameters, x: Float[Array, "n d"], sizes: Sizes, dilation: int) -> Float[Array, "n d"]:
    """A convolution over the k positions around each."""
    return convolve(x, parameters["kernel"], sides(sizes.k))


def dilated(parameters: Parameters, x: Float[Array, "n d"], sizes: Sizes, dilation: int) -> Float[Array, "n d"]:
    """A convolution over k positions, each and those before it, `dilation` apart: that is 1, k, k², … in a stack.

    It looks back only, as in ByteNet's decoder. Were it centred, layers of n positions would never connect all pairs:
    with k = 3 the one path over +2 is −1 and +3, and the first position has nothing at −1.
    """
    return convolve(x, parameters["kernel"], ((sizes.k - 1) * dilation, 0), dilation)


def separable(parameters: Parameters, x: Float[Array, "n d"], sizes: Sizes, dilation: int) -> Float[Array, "n d"]:
    """Each channel convolved by itself over the k positions around, then all channels mixed at each position."""
    return jnp.einsum("nkd,kd->nd", windows(x, sizes.k), parameters["depthwise"]) @ parameters["pointwise"]


# --- The rows ----------------------------------------------------------------------------------------------


class Formula(NamedTuple):
    """A formula as it is printed, and its value: without the O, if it has one."""

    text: str
    value: Callable[[Sizes], float]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A row of the table: what the paper says of a layer, the exact path length, and the layer itself.

    Where the paper says nothing, for projections, `work` is the exact number of multiply-adds.

    `apply` takes (parameters, x, sizes, dilation); the dilation is 1 but for a `dilated` layer. `update`, of a
    recurrence, is one update of the state at all positions, (parameters, states, x). A `causal` layer connects a
    position to itself and to those after it alone.
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
    """⌈log_base(n)⌉, free of rounding."""
    return next(power for power in range(n) if base**power >= n)


def hops(n: int, width: int) -> int:
    """Layers that take the first position and the last to each other, through centred windows."""
    return math.ceil((n - 1) / min(sides(width)))


def square(*names: str) -> Callable[[Sizes], dict[str, tuple[int, ...]]]:
    """Matrices [d, d]."""
    return lambda sizes: {name: (sizes.d, sizes.d) for name in names}


def kernel(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    return {"kernel": (sizes.k, sizes.d, sizes.d)}


def separate(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    return {"depthwise": (sizes.k, sizes.d), "pointwise": (sizes.d, sizes.d)}


CONSTANT, LINEAR = Formula("O(1)", lambda s: 1), Formula("O(n)", lambda s: s.n)
OVER_K, OVER_R = Formula("O(n/k)", lambda s: s.n / s.k), Formula("O(n/r)", lambda s: s.n / s.r)
PROJECTIONS = square("query", "key", "value", "output")

LAYERS = (
    Layer(
        name="Self-attention",
        work=Formula("O(n²·d)", lambda s: s.n**2 * s.d),
        sequential=CONSTANT,
        path=CONSTANT,
        path_length=lambda s: 1,
        apply=bare(full_attention),
    ),
    Layer(
        name="Self-attention with projections",
        work=Formula("2·n²·d + 4·n·d²", lambda s: 2 * s.n**2 * s.d + 4 * s.n * s.d**2),
        sequential=CONSTANT,
        path=CONSTANT,
        path_length=lambda s: 1,
        apply=projected(full_attention),
        shapes=PROJECTIONS,
    ),
    Layer(
        name="Recurrent",
        work=Formula("O(n·d²)", lambda s: s.n * s.d**2),
        sequential=LINEAR,
        path=LINEAR,
        path_length=lambda s: s.n,
        apply=recurrent,
        shapes=square("state", "input"),
        update=state_update,
        causal=True,
    ),
    Layer(
        name="Convolutional, contiguous",
        work=Formula("O(k·n·d²)", lambda s: s.k * s.n * s.d**2),
        sequential=CONSTANT,
        path=OVER_K,
        path_length=lambda s: hops(s.n, s.k),
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
        path_length=lambda s: hops(s.n, s.k),
        apply=separable,
        shapes=separate,
    ),
    Layer(
        name="Self-attention (restricted)",
        work=Formula("O(r·n·d)", lambda s: s.r * s.n * s.d),
        sequential=CONSTANT,
        path=OVER_R,
        path_length=lambda s: hops(s.n, s.r),
        apply=bare(restricted_attention),
    ),
    Layer(
        name="Self-attention (restricted) with projections",
        work=Formula("2·r·n·d + 4·n·d²", lambda s: 2 * s.r * s.n * s.d + 4 * s.n * s.d**2),
        sequential=CONSTANT,
        path=OVER_R,
        path_length=lambda s: hops(s.n, s.r),
        apply=projected(restricted_attention),
        shapes=PROJECTIONS,
    ),
)


def initial(layer: Layer, sizes: Sizes, key: Array) -> Parameters:
    """Random parameters that keep the size of what passes: N(0, 1/√fan-in)."""
    shapes = layer.shapes(sizes)
    keys = jax.random.split(key, len(shapes) + 1)
    draw = lambda key, shape: jax.random.normal(key, shape) * math.prod(shape[:-1]) ** -0.5
    return {name: draw(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=False)}
