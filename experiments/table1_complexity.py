"""Table 1, measured: complexity, sequential operations and path length of each layer type, beside the paper's formulas.

    python -m experiments.table1_complexity [--n=128 --d=512 --k=3 --r=32] [--format=markdown|csv] [--figure=FILE.png]

The layers are those of `experiments/table1_layers.py`. For each, at the given n, d, k and r:

- work: the multiply-adds of its matrix products and convolutions, counted in its jaxpr, padding included. The exponents
  are slopes of log(count) over log(n), log(d), log(k) and log(r) at 1, 2, 4 and 8 times their values. Where the formula
  is a sum, compare them with the slopes of the formula over the same sizes, which are printed beside them.
- time: the slope of the median time of a call over n, without compilation.
- sequential operations: the longest chain of dependent loop iterations; 1 without a loop.
- path: the fewest layers after which every output position depends on every input position, or, for causal layers, on
  every earlier one; for a recurrent layer, the fewest state updates. It is measured at other, small sizes, from which
  outputs have a non-zero gradient with respect to which inputs.

Table 1 does not count the four projections of attention, n·d² each. So each kind of self-attention appears twice: the
products of Eq. 1 alone, and with projections.
"""

import functools
import math
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

from experiments.figure_file import figure_file, save
from experiments.table1_layers import LAYERS, Formula, Layer, Parameters, Sizes, init_parameters
from experiments.tables import print_notes, render
from t2t_jax.argument_parser import argument_parser
from t2t_jax.errors import InputError, exit_code_of
from t2t_jax.threads import available_cores

SCALES = (1, 2, 4, 8)
REPEATS = 5
MAX_GIB = 4  # of the largest array of a layer that is timed
PATH_SIZES = (Sizes(9, 4, 3, 3), Sizes(16, 4, 5, 6), Sizes(28, 4, 3, 9))
MIN_SIZES = Sizes(n=2, d=1, k=3, r=2)  # a centred window of two positions has none on the left
SOLID, DASHED = {"marker": "o", "markersize": 5}, {"marker": "s", "markersize": 3, "linestyle": "--"}
LINE_STYLES = (  # one per layer: a colour for each type, dashed for the variants
    {"color": "#0072B2", **SOLID},
    {"color": "#0072B2", **DASHED},
    {"color": "#D55E00", **SOLID},
    {"color": "#009E73", **SOLID},
    {"color": "#E69F00", **DASHED},
    {"color": "#000000", **SOLID},
    {"color": "#CC79A7", **SOLID},
    {"color": "#CC79A7", **DASHED},
)


# --- Counting in the jaxpr ---------------------------------------------------------------------------------


def jaxpr_of(layer: Layer, sizes: Sizes) -> Jaxpr:
    """The jaxpr of a layer; of the second of a stack, as it is the lowest with a dilation above 1."""
    shaped = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    parameters = {name: shaped(shape) for name, shape in layer.shapes(sizes).items()}
    compute = lambda parameters, x: layer.apply(parameters, x, sizes, dilation(layer, sizes, 1))
    return jax.make_jaxpr(compute)(parameters, shaped((sizes.n, sizes.d))).jaxpr


def dilation(layer: Layer, sizes: Sizes, level: int) -> int:
    """The dilation of a layer at a level of a stack, counted from 0."""
    return sizes.k**level if layer.dilated else 1


def multiply_adds(jaxpr: Jaxpr) -> int:
    """Multiply-adds of all matrix products and convolutions; those in a loop count once per iteration."""
    return sum(_multiply_adds_of(equation) for equation in jaxpr.eqns)


def _multiply_adds_of(equation: JaxprEqn) -> int:
    kind, parameters = equation.primitive.name, equation.params
    if kind == "dot_general":
        (contracted, _), _ = parameters["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
    if kind == "conv_general_dilated":
        kernel = equation.invars[1].aval
        return equation.outvars[0].aval.size * kernel.size // kernel.shape[parameters["dimension_numbers"].rhs_spec[0]]
    assert kind not in ("while", "cond"), f"the jaxpr of {kind} does not tell how often its parts run"
    return iterations(equation) * sum(map(multiply_adds, sub_jaxprs(equation)))


def sequential_operations(jaxpr: Jaxpr) -> int:
    """Loop iterations on the longest path of dependent operations; 1 without a loop."""
    return max(1, _longest_chain(jaxpr))


def _longest_chain(jaxpr: Jaxpr) -> int:
    depth = {}  # variable → iterations before its value is known
    for equation in jaxpr.eqns:
        before = max((depth.get(v, 0) for v in equation.invars if not isinstance(v, Literal)), default=0)
        inside = max(map(_longest_chain, sub_jaxprs(equation)), default=0)
        own = iterations(equation) * max(1, inside) if equation.primitive.name == "scan" else inside
        depth |= dict.fromkeys(equation.outvars, before + own)
    return max(depth.values(), default=0)


def largest_array(jaxpr: Jaxpr) -> int:
    """Bytes of the largest array that is given or computed."""
    variables = [*jaxpr.invars, *(variable for equation in jaxpr.eqns for variable in equation.outvars)]
    own = [variable.aval.size * variable.aval.dtype.itemsize for variable in variables]
    return max(own + [largest_array(inside) for equation in jaxpr.eqns for inside in sub_jaxprs(equation)])


def sub_jaxprs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs inside an equation: the body of a loop, a nested jit."""
    for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: isinstance(v, ClosedJaxpr | Jaxpr)):
        if isinstance(value, ClosedJaxpr | Jaxpr):
            yield value.jaxpr if isinstance(value, ClosedJaxpr) else value


def iterations(equation: JaxprEqn) -> int:
    """How often an equation runs its sub-jaxprs."""
    return equation.params["length"] if equation.primitive.name == "scan" else 1


# --- Exponents ---------------------------------------------------------------------------------------------


def scaled(sizes: Sizes, symbol: str) -> list[Sizes]:
    """The sizes with one of them multiplied by 1, 2, 4 and 8."""
    return [sizes._replace(**{symbol: scale * getattr(sizes, symbol)}) for scale in SCALES]


def slope(values: Sequence[float]) -> float:
    """The exponent of x in values at `SCALES` times x: least-squares slope of the logarithms."""
    return float(np.polyfit(np.log(SCALES), np.log(values), 1)[0])


def counts(layer: Layer, sizes: Sizes, symbol: str) -> list[int]:
    """Multiply-adds at the scaled sizes."""
    return [multiply_adds(jaxpr_of(layer, scaled_sizes)) for scaled_sizes in scaled(sizes, symbol)]


def exponents(layer: Layer, sizes: Sizes) -> dict[str, float]:
    """The exponents of n, d, k and r in the counted work."""
    return {symbol: slope(counts(layer, sizes, symbol)) for symbol in Sizes._fields}


def formula_exponents(formula: Formula, sizes: Sizes) -> dict[str, float]:
    """The exponents of n, d, k and r in a formula, at the same sizes."""
    return {symbol: slope([formula.value(s) for s in scaled(sizes, symbol)]) for symbol in Sizes._fields}


def seconds(layer: Layer, sizes: Sizes) -> float:
    """The median time of a call of the compiled layer."""
    parameters = init_parameters(layer, sizes, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (sizes.n, sizes.d))
    run = jax.jit(lambda parameters, x: layer.apply(parameters, x, sizes, dilation(layer, sizes, 1)))
    run(parameters, x).block_until_ready()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run(parameters, x).block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


# --- Path length -------------------------------------------------------------------------------------------


def measured_path(layer: Layer, sizes: Sizes) -> int:
    """The fewest layers (of a recurrence: state updates) that connect all pairs of positions; causal layers: i ≥ j."""
    required = np.tri(sizes.n, dtype=bool) if layer.causal else np.ones((sizes.n, sizes.n), bool)
    return next(depth for depth, found in enumerate(dependencies(layer, sizes)) if found[required].all())


def dependencies(layer: Layer, sizes: Sizes) -> Iterator[Bool[np.ndarray, "n n"]]:
    """[i, j]: whether output i depends on input j, after 0, 1, 2, … n layers with different random weights.

    By forward accumulation of the Jacobian with respect to the input, layer after layer. A recurrence starts from zero
    states and repeats the state update with the same weights.
    """
    x = 0.1 * jax.random.normal(jax.random.key(1), (sizes.n, sizes.d))  # small, so that attention is nearly uniform
    start = jnp.zeros_like if layer.update else jnp.array
    state, jacobian = start(x), start(jnp.eye(x.size).reshape(x.size, *x.shape))
    yield is_nonzero(jacobian)
    for level in range(sizes.n):
        parameters = init_parameters(layer, sizes, jax.random.key(0 if layer.update else level))
        state, jacobian = advance(layer, sizes, dilation(layer, sizes, level), parameters, x, state, jacobian)
        yield is_nonzero(jacobian)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def advance(
    layer: Layer,
    sizes: Sizes,
    dilation: int,
    parameters: Parameters,
    x: Float[Array, "n d"],
    state: Float[Array, "n d"],
    jacobian: Float[Array, "nd n d"],
) -> tuple[Float[Array, "n d"], Float[Array, "nd n d"]]:
    """One more layer or state update: the state, and its Jacobian with respect to x."""

    def step(state, x):
        return layer.update(parameters, state, x) if layer.update else layer.apply(parameters, state, sizes, dilation)

    by_state, by_x = (by.reshape(x.size, x.size) for by in jax.jacrev(step, (0, 1))(state, x))
    updated = jacobian.reshape(x.size, x.size) @ by_state.T + by_x.T
    return step(state, x), updated.reshape(jacobian.shape)


def is_nonzero(jacobian: Float[Array, "nd n d"]) -> Bool[np.ndarray, "n n"]:
    """[i, j]: whether any derivative of output i with respect to input j is non-zero."""
    _, n, d = jacobian.shape
    return np.asarray(jnp.abs(jacobian).reshape(n, d, n, d).sum((1, 3)).T) > 0


# --- The table ---------------------------------------------------------------------------------------------


def record(layer: Layer, sizes: Sizes, times: Sequence[float]) -> dict[str, Any]:
    """All columns of a layer, by name; `times` are its seconds at the scaled n."""
    jaxpr = jaxpr_of(layer, sizes)
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
        **{f"seconds_n{s.n}": median for s, median in zip(scaled(sizes, "n"), times, strict=True)},
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
    """The part of a column name that tells the sizes of a path measurement."""
    return f"n{sizes.n}_k{sizes.k}_r{sizes.r}"


def cells(record: dict[str, Any]) -> dict[str, str]:
    """The cells of a record in the Markdown table, by column."""
    exponents_of = lambda kind: " ".join(f"{record[f'{kind}_exponent_{symbol}']:z.2f}" for symbol in Sizes._fields)
    paths = {
        f"path at n={s.n} k={s.k} r={s.r}: exact / measured": f"{record[f'path_exact_{suffix(s)}']} / "
        f"{record[f'path_measured_{suffix(s)}']}"
        for s in PATH_SIZES
    }
    return {
        "layer": record["layer"],
        "work": f"{record['work']} = {record['work_value']:,}",
        "multiply-adds counted": f"{record['multiply_adds']:,}",
        "exponents of n d k r in the formula": exponents_of("formula"),
        "in the count": exponents_of("counted"),
        "of n in the time": f"{record['time_exponent_n']:z.2f}",
        "sequential operations": f"{record['sequential']} = {record['sequential_value']:,}",
        "counted": f"{record['sequential_counted']:,}",
        "maximum path": f"{record['path']} = {record['path_value']:,.4g}",
        "exactly": f"{record['path_exact']:,}",
        **paths,
    }


def table(records: Sequence[dict[str, Any]], format: str) -> str:
    """The table as text: in CSV each number in a column of its own, in Markdown the combined cells."""
    rows = records if format == "csv" else [cells(record) for record in records]
    return render(list(rows[0]), [[str(value) for value in row.values()] for row in rows], format)


def conditions(sizes: Sizes) -> str:
    """Sizes, hardware and how times were taken."""
    values = ", ".join(f"{symbol} = {value}" for symbol, value in sizes._asdict().items())
    machine = f"{jax.devices()[0].device_kind}, {available_cores()} cores, jax {jax.__version__}"
    lengths = ", ".join(str(s.n) for s in scaled(sizes, "n"))
    return f"{values}. Time: medians of {REPEATS} calls at n = {lengths}, float32; {machine}."


# --- The figure --------------------------------------------------------------------------------------------


def draw(path: Path, sizes: Sizes, times: Sequence[Sequence[float]]) -> None:
    """Plots multiply-adds and milliseconds over n, one line per layer; `times` are the seconds at the scaled n."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    work, duration = figure.subplots(1, 2)
    lengths = [s.n for s in scaled(sizes, "n")]
    for layer, layer_times, style in zip(LAYERS, times, LINE_STYLES, strict=True):
        work.plot(lengths, counts(layer, sizes, "n"), **style, label=layer.name)
        duration.plot(lengths, [1000 * median for median in layer_times], **style)
    for axes, title in ((work, "multiply-adds, counted"), (duration, "milliseconds, measured")):
        axes.set(title=title, xlabel="n, positions", xscale="log", yscale="log")
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"One layer, d = {sizes.d}, k = {sizes.k}, r = {sizes.r}")
    save(figure, "--figure", path, dots_per_inch=150)


# --- The command -------------------------------------------------------------------------------------------


def check_sizes(sizes: Sizes) -> Sizes:
    """Returns the sizes; refuses those that some layer is not defined for, or that do not fit in memory."""
    for symbol, value, minimum in zip(Sizes._fields, sizes, MIN_SIZES, strict=True):
        if value < minimum:
            raise InputError(f"{symbol}: got {value}; must be at least {minimum}")
    longest = sizes._replace(n=sizes.n * max(SCALES))
    gib = 4 * max(longest) / 2**30  # each is an axis of some array; no larger one is traced, as its indices overflow
    if gib <= MAX_GIB:
        gib = max(largest_array(jaxpr_of(layer, longest)) for layer in LAYERS) / 2**30
    if gib > MAX_GIB:
        raise InputError(
            f"n, d, k, r: {', '.join(map(str, sizes))} need an array of {gib:,.0f} GiB; the limit is {MAX_GIB} GiB"
        )
    return sizes


def show(sizes: Sizes, format: str, figure: Path | None) -> None:
    """Prints the table and the conditions under it (with CSV, to standard error), and draws the figure."""
    times = [[seconds(layer, s) for s in scaled(sizes, "n")] for layer in LAYERS]
    print(table([record(layer, sizes, layer_times) for layer, layer_times in zip(LAYERS, times, strict=True)], format))
    print_notes([conditions(sizes)], format)
    if figure:
        draw(figure, sizes, times)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser("experiments.table1_complexity", __doc__)
    parser.add_argument("--n", type=int, default=128, help="sequence length; timed at up to eight times this")
    parser.add_argument("--d", type=int, default=512, help="representation dimension")
    parser.add_argument("--k", type=int, default=3, help="kernel size of the convolutions")
    parser.add_argument("--r", type=int, default=32, help="neighbourhood size of restricted self-attention")
    parser.add_argument("--format", choices=("markdown", "csv"), default="markdown")
    parser.add_argument("--figure", help="plot work and time over n into this .png or .svg file")

    def run() -> None:
        options = parser.parse_args(argv)
        sizes = check_sizes(Sizes(options.n, options.d, options.k, options.r))
        show(sizes, options.format, options.figure and figure_file("--figure", options.figure))

    return exit_code_of(run)


if __name__ == "__main__":
    sys.exit(main())
