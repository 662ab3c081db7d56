"""Table 1, measured: work, sequential operations and path length of each layer, beside the paper's formulas.

    python -m experiments.table1_complexity [--n=128 --d=512 --k=3 --r=32] [--format=markdown|csv] [--figure=FILE.png]

The layers are those of `experiments/table1_layers.py`. Of each, at the n, d, k and r given:

- work: the multiply-adds of its matrix products and convolutions, counted in what JAX is about to compute, padding
  included. Exponents are slopes of log(count) over the log of n, d, k and r at 1, 2, 4 and 8 times their values; where
  the formula is a sum, the slopes of the formula over the same sizes are what to compare with.
- time: the slope over n of the median time of a call, without compilation.
- sequential operations: the longest chain of dependent iterations of loops, 1 without a loop.
- path: the fewest layers after which every output position depends on every input position, or on every earlier one
  if the layer looks back only; of a recurrent layer, the fewest updates of its state. Measured at sizes of its own, by
  which outputs have a gradient that is not zero.

Table 1 does not count the four projections of attention, n·d² each. Each self-attention is here twice: the products of
Eq. 1 alone, and with its projections.
"""

import argparse
import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jaxtyping import Array, Bool, Float

from experiments.table1_layers import LAYERS, Formula, Layer, Parameters, Sizes, initial
from experiments.tables import print_notes, render
from t2t_jax.errors import InputError, exit_code_of

SCALES = (1, 2, 4, 8)
REPEATS = 5
MOST_GIB = 4  # of the largest array of a layer that is timed
PATH_SIZES = (Sizes(9, 4, 3, 3), Sizes(16, 4, 5, 6), Sizes(28, 4, 3, 9))
FIGURES = (".png", ".svg")
LEAST = Sizes(n=2, d=1, k=3, r=3)  # a centred window of 2 would reach to one side only
SOLID, DASHED = {"marker": "o", "markersize": 5}, {"marker": "s", "markersize": 3, "linestyle": "--"}
STROKES = (  # of the layers in the figure: a colour for each kind, dashed where another of the kind is solid
    {"color": "#0072B2", **SOLID},
    {"color": "#0072B2", **DASHED},
    {"color": "#D55E00", **SOLID},
    {"color": "#009E73", **SOLID},
    {"color": "#E69F00", **DASHED},
    {"color": "#000000", **SOLID},
    {"color": "#CC79A7", **SOLID},
    {"color": "#CC79A7", **DASHED},
)


# --- What a computation does -------------------------------------------------------------------------------


def traced(layer: Layer, sizes: Sizes) -> Jaxpr:
    """The layer as JAX will compute it; the second of a stack, as that is the first whose kernel is dilated."""
    shaped = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    parameters = {name: shaped(shape) for name, shape in layer.shapes(sizes).items()}
    compute = lambda parameters, x: layer.apply(parameters, x, sizes, dilation(layer, sizes, 1))
    return jax.make_jaxpr(compute)(parameters, shaped((sizes.n, sizes.d))).jaxpr


def dilation(layer: Layer, sizes: Sizes, level: int) -> int:
    """That of a layer in a stack, whose lowest is level 0."""
    return sizes.k**level if layer.dilated else 1


def multiply_adds(jaxpr: Jaxpr) -> int:
    """Those of all matrix products and convolutions, a loop's as often as it runs."""
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation: JaxprEqn) -> int:
    kind, parameters = equation.primitive.name, equation.params
    if kind == "dot_general":
        (contracted, _), _ = parameters["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
    if kind == "conv_general_dilated":
        kernel = equation.invars[1].aval
        return equation.outvars[0].aval.size * kernel.size // kernel.shape[parameters["dimension_numbers"].rhs_spec[0]]
    assert kind not in ("while", "cond"), f"how often the parts of {kind} run is not written in it"
    return iterations(equation) * sum(map(multiply_adds, inner(equation)))


def sequential_operations(jaxpr: Jaxpr) -> int:
    """Iterations of loops in the longest chain in which each waits for the one before; 1 without a loop."""
    return max(1, _longest_chain(jaxpr))


def _longest_chain(jaxpr: Jaxpr) -> int:
    ended = {}  # variable → iterations before it is known
    for equation in jaxpr.eqns:
        begun = max((ended.get(v, 0) for v in equation.invars if not isinstance(v, Literal)), default=0)
        within = max(map(_longest_chain, inner(equation)), default=0)
        taken = iterations(equation) * max(1, within) if equation.primitive.name == "scan" else within
        ended |= dict.fromkeys(equation.outvars, begun + taken)
    return max(ended.values(), default=0)


def inner(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """The computations inside an equation: the body of a loop, a function compiled by itself."""
    for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: isinstance(v, ClosedJaxpr | Jaxpr)):
        if isinstance(value, ClosedJaxpr | Jaxpr):
            yield value.jaxpr if isinstance(value, ClosedJaxpr) else value


def iterations(equation: JaxprEqn) -> int:
    """How often an equation runs what is inside it."""
    return equation.params["length"] if equation.primitive.name == "scan" else 1


# --- How it grows ------------------------------------------------------------------------------------------


def scaled(sizes: Sizes, symbol: str) -> list[Sizes]:
    """The sizes with one of them at 1, 2, 4 and 8 times its value."""
    return [sizes._replace(**{symbol: scale * getattr(sizes, symbol)}) for scale in SCALES]


def slope(values: Sequence[float]) -> float:
    """The exponent of x in values measured at `SCALES` times some x: a line through the logarithms."""
    return float(np.polyfit(np.log(SCALES), np.log(values), 1)[0])


def counts(layer: Layer, sizes: Sizes, symbol: str) -> list[int]:
    """Multiply-adds at the scaled sizes."""
    return [multiply_adds(traced(layer, scaled_sizes)) for scaled_sizes in scaled(sizes, symbol)]


def exponents(layer: Layer, sizes: Sizes) -> dict[str, float]:
    """Of n, d, k and r in the work that was counted."""
    return {symbol: slope(counts(layer, sizes, symbol)) for symbol in Sizes._fields}


def formula_exponents(formula: Formula, sizes: Sizes) -> dict[str, float]:
    """The same of a formula."""
    return {symbol: slope([formula.value(s) for s in scaled(sizes, symbol)]) for symbol in Sizes._fields}


def seconds(layer: Layer, sizes: Sizes) -> float:
    """The median time of a call of the compiled layer."""
    parameters = initial(layer, sizes, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (sizes.n, sizes.d))
    run = jax.jit(lambda parameters, x: layer.apply(parameters, x, sizes, dilation(layer, sizes, 1)))
    run(parameters, x).block_until_ready()
    taken = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        run(parameters, x).block_until_ready()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


# --- How far signals travel --------------------------------------------------------------------------------


def measured_path(layer: Layer, sizes: Sizes) -> int:
    """The fewest layers (of a recurrence: updates of its state) that join all pairs of positions they may join."""
    wanted = np.tri(sizes.n, dtype=bool) if layer.causal else np.ones((sizes.n, sizes.n), bool)
    return next(depth for depth, joined in enumerate(reached(layer, sizes)) if joined[wanted].all())


def reached(layer: Layer, sizes: Sizes) -> Iterator[Bool[np.ndarray, "n n"]]:
    """[i, j]: does output i depend on input j, after 0, 1, 2, … n layers with random weights of their own?

    The Jacobian is carried from layer to layer, one direction for each number of the input. A recurrence starts from
    states that are zero; each update, with the same weights, brings the input of a position to the state before it.
    """
    x = 0.1 * jax.random.normal(jax.random.key(1), (sizes.n, sizes.d))  # small: attention is nearly even
    start = jnp.zeros_like if layer.update else jnp.array
    state, jacobian = start(x), start(jnp.eye(x.size).reshape(x.size, *x.shape))
    yield depends(jacobian)
    for level in range(sizes.n):
        parameters = initial(layer, sizes, jax.random.key(0 if layer.update else level))
        state, jacobian = through(layer, sizes, dilation(layer, sizes, level), parameters, x, state, jacobian)
        yield depends(jacobian)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def through(
    layer: Layer,
    sizes: Sizes,
    dilation: int,
    parameters: Parameters,
    x: Float[Array, "n d"],
    state: Float[Array, "n d"],
    jacobian: Float[Array, "nd n d"],
) -> tuple[Float[Array, "n d"], Float[Array, "nd n d"]]:
    """One layer or update further: the state, and its derivatives with respect to each number of x."""

    def step(state, x):
        return layer.update(parameters, state, x) if layer.update else layer.apply(parameters, state, sizes, dilation)

    by_state, by_x = (by.reshape(x.size, x.size) for by in jax.jacrev(step, (0, 1))(state, x))
    moved = jacobian.reshape(x.size, x.size) @ by_state.T + by_x.T
    return step(state, x), moved.reshape(jacobian.shape)


def depends(jacobian: Float[Array, "nd n d"]) -> Bool[np.ndarray, "n n"]:
    """[i, j]: is any derivative of output i with respect to input j not zero?"""
    _, n, d = jacobian.shape
    return np.asarray(jnp.abs(jacobian).reshape(n, d, n, d).sum((1, 3)).T) > 0


# --- The table ---------------------------------------------------------------------------------------------


def record(layer: Layer, sizes: Sizes, times: Sequence[float]) -> dict[str, Any]:
    """All that is known of a layer, by name; `times` are its seconds at the scaled n."""
    jaxpr = traced(layer, sizes)
    of_formula, of_count = formula_exponents(layer.work, sizes), exponents(layer, sizes)
    return {
        "layer": layer.name,
        **sizes._asdict(),
        "work": layer.work.text,
        "work_value": layer.work.value(sizes),
        "multiply_adds": multiply_adds(jaxpr),
        **{f"formula_exponent_{symbol}": value for symbol, value in of_formula.items()},
        **{f"counted_exponent_{symbol}": value for symbol, value in of_count.items()},
        "time_exponent_n": slope(times),
        **{f"seconds_n{s.n}": taken for s, taken in zip(scaled(sizes, "n"), times, strict=True)},
        "sequential": layer.sequential.text,
        "sequential_value": layer.sequential.value(sizes),
        "sequential_counted": sequential_operations(jaxpr),
        "path": layer.path.text,
        "path_value": layer.path.value(sizes),
        "path_exact": layer.path_length(sizes),
        **{f"path_exact_{suffix(s)}": layer.path_length(s) for s in PATH_SIZES},
        **{f"path_measured_{suffix(s)}": measured_path(layer, s) for s in PATH_SIZES},
    }


def suffix(sizes: Sizes) -> str:
    """What tells apart the columns of paths."""
    return f"n{sizes.n}_k{sizes.k}_r{sizes.r}"


def cells(found: dict[str, Any]) -> dict[str, str]:
    """A record for people, by the heads of the table."""
    exponents_of = lambda kind: " ".join(f"{found[f'{kind}_exponent_{symbol}']:z.2f}" for symbol in Sizes._fields)
    paths = {
        f"path at n={s.n} k={s.k} r={s.r}: exact / measured": f"{found[f'path_exact_{suffix(s)}']} / "
        f"{found[f'path_measured_{suffix(s)}']}"
        for s in PATH_SIZES
    }
    return {
        "layer": found["layer"],
        "work": f"{found['work']} = {found['work_value']:,}",
        "multiply-adds counted": f"{found['multiply_adds']:,}",
        "exponents of n d k r in the formula": exponents_of("formula"),
        "in the count": exponents_of("counted"),
        "of n in the time": f"{found['time_exponent_n']:.2f}",
        "sequential operations": f"{found['sequential']} = {found['sequential_value']:,}",
        "counted": f"{found['sequential_counted']:,}",
        "maximum path": f"{found['path']} = {found['path_value']:,.4g}",
        "exactly": f"{found['path_exact']:,}",
        **paths,
    }


def written(records: Sequence[dict[str, Any]], format: str) -> str:
    """The table: for programs every number as it is, for people the cells."""
    rows = records if format == "csv" else [cells(found) for found in records]
    return render(list(rows[0]), [[str(value) for value in row.values()] for row in rows], format)


def conditions(sizes: Sizes) -> str:
    """What the numbers hold for."""
    given = ", ".join(f"{symbol} = {value}" for symbol, value in sizes._asdict().items())
    machine = f"{jax.devices()[0].device_kind}, {len(os.sched_getaffinity(0))} cores, jax {jax.__version__}"
    lengths = ", ".join(str(s.n) for s in scaled(sizes, "n"))
    return f"{given}. Time: medians of {REPEATS} calls at n = {lengths}, float32; {machine}."


# --- The figure --------------------------------------------------------------------------------------------


def draw(path: Path, sizes: Sizes, times: Sequence[Sequence[float]]) -> None:
    """Multiply-adds and milliseconds over n, a line for each layer; `times` are the seconds at the scaled n."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    work, clock = figure.subplots(1, 2)
    lengths = [s.n for s in scaled(sizes, "n")]
    for layer, taken, stroke in zip(LAYERS, times, STROKES, strict=True):
        work.plot(lengths, counts(layer, sizes, "n"), **stroke, label=layer.name)
        clock.plot(lengths, [1000 * second for second in taken], **stroke)
    for axes, title in ((work, "multiply-adds, counted"), (clock, "milliseconds, measured")):
        axes.set(title=title, xlabel="n, positions", xscale="log", yscale="log")
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"One layer, d = {sizes.d}, k = {sizes.k}, r = {sizes.r}")
    figure.savefig(path, dpi=150)


# --- As a command ------------------------------------------------------------------------------------------


def checked(sizes: Sizes) -> Sizes:
    """Refuses sizes at which some layer is none of the table's, or does not fit in memory."""
    for symbol, value, least in zip(Sizes._fields, sizes, LEAST, strict=True):
        if value < least:
            raise InputError(f"{symbol}: got {value}; at least {least} is needed")
    longest = sizes.n * max(SCALES)
    gib = 4 * max(longest**2, longest * sizes.r * sizes.d, sizes.k * sizes.d**2) / 2**30
    if gib > MOST_GIB:
        raise InputError(
            f"n, d, k, r: {', '.join(map(str, sizes))} would take arrays of {gib:,.0f} GiB; at most {MOST_GIB} are made"
        )
    return sizes


def figure_file(path: str) -> Path:
    """Where the figure goes, once it is sure that it can be drawn."""
    file = Path(path).expanduser()
    if file.suffix not in FIGURES:
        raise InputError(f"figure: {path} has no known ending; known: {', '.join(FIGURES)}")
    if not file.parent.is_dir():
        raise InputError(f"figure: no folder {file.parent}; make it first")
    return file


def show(sizes: Sizes, format: str, figure: Path | None) -> None:
    """The table on standard output, the conditions under it (under CSV, on standard error), and the figure."""
    times = [[seconds(layer, s) for s in scaled(sizes, "n")] for layer in LAYERS]
    print(written([record(layer, sizes, taken) for layer, taken in zip(LAYERS, times, strict=True)], format))
    print_notes([conditions(sizes)], format)
    if figure:
        draw(figure, sizes, times)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.table1_complexity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--n", type=int, default=128, help="positions; timed at up to eight times as many")
    parser.add_argument("--d", type=int, default=512, help="numbers a position")
    parser.add_argument("--k", type=int, default=3, help="kernel width of the convolutions")
    parser.add_argument("--r", type=int, default=32, help="keys around a position in restricted self-attention")
    parser.add_argument("--format", choices=("markdown", "csv"), default="markdown")
    parser.add_argument("--figure", help="where to draw work and time over n: .png or .svg")
    options = parser.parse_args(argv)

    def run() -> None:
        sizes = checked(Sizes(options.n, options.d, options.k, options.r))
        show(sizes, options.format, options.figure and figure_file(options.figure))

    return exit_code_of(run)


if __name__ == "__main__":
    sys.exit(main())
