"""The layers against loops in NumPy, the counters by hand and against XLA's, and Table 1 itself."""

import csv
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import table1_complexity as table1
from experiments.table1_layers import LAYERS, Sizes, initial, logarithm
from t2t_jax.errors import InputError

SMALL = Sizes(n=7, d=6, k=3, r=4)
LARGE = Sizes(n=128, d=512, k=3, r=32)
BY_NAME = {layer.name: layer for layer in LAYERS}
every_layer = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)


def applied(name, sizes, dilation=1):
    """(parameters, x, output), float64 for NumPy but the output."""
    parameters = initial(BY_NAME[name], sizes, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (sizes.n, sizes.d))
    output = jax.jit(BY_NAME[name].apply, static_argnums=(2, 3))(parameters, x, sizes, dilation)
    return {key: np.asarray(value, float) for key, value in parameters.items()}, np.asarray(x, float), output


# --- The layers --------------------------------------------------------------------------------------------


def attended(query, key, value, left, right):
    """Each position attends to those from `left` before to `right` after it."""
    output = np.empty_like(value)
    for i in range(len(query)):
        near = slice(max(0, i - left), i + right + 1)
        scores = np.exp(key[near] @ query[i] / np.sqrt(query.shape[1]))
        output[i] = scores / scores.sum() @ value[near]
    return output


@pytest.mark.parametrize(
    "name, left, right", [("Self-attention", 7, 7), ("Self-attention (restricted)", 1, 2)], ids=["full", "restricted"]
)
def test_attention_in_numpy(name, left, right):
    _, x, found = applied(name, SMALL)
    np.testing.assert_allclose(found, attended(x, x, x, left, right), atol=1e-5)
    given, x, found = applied(f"{name} with projections", SMALL)
    mixed = attended(x @ given["query"], x @ given["key"], x @ given["value"], left, right)
    np.testing.assert_allclose(found, mixed @ given["output"], atol=1e-5)


@pytest.mark.parametrize("r", [13, 14, 20])
def test_a_neighbourhood_of_all_is_full_attention(r):
    sizes = SMALL._replace(r=r)
    for ending in ("", " with projections"):
        full, restricted = (
            applied(kind + ending, sizes)[2] for kind in ("Self-attention", "Self-attention (restricted)")
        )
        np.testing.assert_allclose(restricted, full, atol=1e-5)


def test_recurrence_in_numpy():
    given, x, found = applied("Recurrent", SMALL)
    state = np.zeros(SMALL.d)
    for i in range(SMALL.n):
        state = np.tanh(state @ given["state"] + x[i] @ given["input"])
        np.testing.assert_allclose(found[i], state, atol=1e-5)


def test_as_many_state_updates_as_positions_are_the_recurrence():
    layer = BY_NAME["Recurrent"]
    given, x, found = jax.tree.map(jnp.float32, applied("Recurrent", SMALL))
    states = jnp.zeros_like(x)
    for update in range(SMALL.n):
        assert (np.abs(states - found).max(1) > 1e-3).sum() == SMALL.n - update  # one more is right after each
        states = layer.update(given, states, x)
    np.testing.assert_allclose(states, found, atol=1e-5)


def convolved(x, kernel, offsets):
    """Σ x[i + offset] kernel[place], nothing beyond the ends."""
    output = np.zeros_like(x)
    for i in range(len(x)):
        for place, offset in enumerate(offsets):
            if 0 <= i + offset < len(x):
                output[i] += x[i + offset] @ kernel[place]
    return output


@pytest.mark.parametrize("k, offsets", [(3, (-1, 0, 1)), (4, (-1, 0, 1, 2))])
def test_convolution_in_numpy(k, offsets):
    given, x, found = applied("Convolutional, contiguous", SMALL._replace(k=k))
    np.testing.assert_allclose(found, convolved(x, given["kernel"], offsets), atol=1e-5)
    given, x, found = applied("Convolutional, separable", SMALL._replace(k=k))
    each = convolved(x, [np.diag(weights) for weights in given["depthwise"]], offsets)
    np.testing.assert_allclose(found, each @ given["pointwise"], atol=1e-5)


@pytest.mark.parametrize("dilation, offsets", [(1, (-2, -1, 0)), (3, (-6, -3, 0)), (9, (-18, -9, 0))])
def test_dilated_convolution_in_numpy(dilation, offsets):
    given, x, found = applied("Convolutional, dilated", SMALL, dilation)
    np.testing.assert_allclose(found, convolved(x, given["kernel"], offsets), atol=1e-5)


# --- The counters ------------------------------------------------------------------------------------------


def jaxpr_of(function, *shapes):
    return jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes)).jaxpr


def test_multiply_adds_by_hand():
    product = jaxpr_of(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (2, 3, 5), (2, 5, 7))
    assert table1.multiply_adds(product) == 2 * 3 * 5 * 7
    within = jaxpr_of(jax.jit(lambda a, b: jnp.tanh(a @ b) @ b), (3, 5), (5, 5))
    assert table1.multiply_adds(within) == 2 * 3 * 5 * 5
    layout = ("NWC", "WIO", "NWC")
    convolve = lambda groups: (
        lambda x, kernel: jax.lax.conv_general_dilated(
            x, kernel, (1,), "VALID", dimension_numbers=layout, feature_group_count=groups
        )
    )
    assert table1.multiply_adds(jaxpr_of(convolve(1), (2, 11, 4), (3, 4, 6))) == 2 * 9 * 3 * 4 * 6
    assert table1.multiply_adds(jaxpr_of(convolve(4), (2, 11, 4), (3, 1, 4))) == 2 * 9 * 3 * 4


def loop(length, body=lambda state: jnp.tanh(state)):
    return lambda state: jax.lax.scan(lambda state, _: (body(state), None), state, length=length)[0]


def test_loops_by_hand():
    square = lambda state: state @ state
    nested = jaxpr_of(loop(5, loop(3, square)), (4, 4))
    assert table1.multiply_adds(nested) == 5 * 3 * 4**3
    assert table1.sequential_operations(nested) == 15
    assert table1.sequential_operations(jaxpr_of(lambda x: loop(5)(x) + loop(3)(x), (4,))) == 5  # side by side
    assert table1.sequential_operations(jaxpr_of(lambda x: loop(5)(jnp.sin(loop(3)(x))), (4,))) == 8  # in turn
    assert table1.sequential_operations(jaxpr_of(lambda x: loop(5)(jax.jit(loop(3))(x)), (4,))) == 8
    assert table1.sequential_operations(jaxpr_of(square, (4, 4))) == 1


def test_a_loop_of_unknown_length_is_not_counted():
    endless = jaxpr_of(lambda x: jax.lax.while_loop(lambda x: x.sum() < 3, lambda x: x @ x, x), (4, 4))
    with pytest.raises(AssertionError, match="while"):
        table1.multiply_adds(endless)


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if not layer.update], ids=lambda layer: layer.name)
def test_xla_counts_the_same(layer):
    """Its operations, two a multiply-add, include those that are none and leave out padding: a few in a hundred."""
    sizes = Sizes(n=96, d=512, k=3, r=8)
    parameters, x = initial(layer, sizes, jax.random.key(0)), jnp.zeros((sizes.n, sizes.d))
    lowered = jax.jit(lambda parameters, x: layer.apply(parameters, x, sizes, 1)).lower(parameters, x)
    counted = table1.multiply_adds(table1.traced(layer, sizes))
    assert lowered.cost_analysis()["flops"] / 2 == pytest.approx(counted, rel=0.05)


# --- Table 1 -----------------------------------------------------------------------------------------------

EXPONENTS = {  # of n, d, k, r in the paper
    "Self-attention": (2, 1, 0, 0),
    "Recurrent": (1, 2, 0, 0),
    "Convolutional, contiguous": (1, 2, 1, 0),
    "Convolutional, dilated": (1, 2, 1, 0),
    "Self-attention (restricted)": (1, 1, 0, 1),
}
EXACT = {  # multiply-adds
    "Self-attention": lambda n, d, k, r: 2 * n**2 * d,
    "Self-attention with projections": lambda n, d, k, r: 2 * n**2 * d + 4 * n * d**2,
    "Recurrent": lambda n, d, k, r: 2 * n * d**2,
    "Convolutional, contiguous": lambda n, d, k, r: k * n * d**2,
    "Convolutional, dilated": lambda n, d, k, r: k * n * d**2,
    "Convolutional, separable": lambda n, d, k, r: k * n * d + n * d**2,
    "Self-attention (restricted)": lambda n, d, k, r: 2 * r * n * d,
    "Self-attention (restricted) with projections": lambda n, d, k, r: 2 * r * n * d + 4 * n * d**2,
}


@every_layer
@pytest.mark.parametrize("sizes", [SMALL, LARGE, Sizes(50, 8, 5, 9)], ids=str)
def test_work_is_exactly(layer, sizes):
    assert table1.multiply_adds(table1.traced(layer, sizes)) == EXACT[layer.name](*sizes)


@pytest.mark.parametrize("name", EXPONENTS)
@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
def test_exponents_are_the_papers(name, sizes):
    assert [*table1.exponents(BY_NAME[name], sizes).values()] == pytest.approx(EXPONENTS[name], abs=0.05)


@every_layer
def test_formulas_grow_as_the_work_does(layer):
    of_formula = table1.formula_exponents(layer.work, LARGE)
    assert table1.exponents(layer, LARGE) == pytest.approx(of_formula, abs=0.05)


def test_a_separable_convolution_over_all_costs_as_attention_and_a_position_wise_layer():
    """§4: even with k = n."""
    everything = LARGE._replace(k=LARGE.n)
    separable = table1.multiply_adds(table1.traced(BY_NAME["Convolutional, separable"], everything))
    assert separable == BY_NAME["Self-attention"].work.value(LARGE) + LARGE.n * LARGE.d**2


@every_layer
@pytest.mark.parametrize("n", [2, 7, 64])
def test_sequential_operations(layer, n):
    found = table1.sequential_operations(table1.traced(layer, SMALL._replace(n=n)))
    assert found == layer.sequential.value(SMALL._replace(n=n)) == (n if layer.name == "Recurrent" else 1)


PATHS = {  # by hand, at these n, k and r
    (9, 3, 3): {"Convolutional, contiguous": 8, "Convolutional, dilated": 2, "Self-attention (restricted)": 8},
    (10, 3, 5): {"Convolutional, contiguous": 9, "Convolutional, dilated": 3, "Self-attention (restricted)": 5},
    (17, 4, 9): {"Convolutional, contiguous": 16, "Convolutional, dilated": 3, "Self-attention (restricted)": 4},
    (12, 5, 24): {"Convolutional, contiguous": 6, "Convolutional, dilated": 2, "Self-attention (restricted)": 1},
}
SAME_PATH = {
    "Convolutional, separable": "Convolutional, contiguous",
    "Self-attention (restricted) with projections": "Self-attention (restricted)",
}


@every_layer
@pytest.mark.parametrize("n, k, r", PATHS)
def test_gradients_travel_exactly_as_far(layer, n, k, r):
    sizes = Sizes(n, 4, k, r)
    by_hand = {"Recurrent": n} | PATHS[n, k, r]
    expected = by_hand.get(SAME_PATH.get(layer.name, layer.name), 1)
    assert table1.measured_path(layer, sizes) == layer.path_length(sizes) == expected


def test_each_layer_reaches_so_much_further():
    """[i, j] is joined after L layers if i − j lies within L windows, or, of kernels dilated, within k^L positions."""
    sizes = Sizes(n=9, d=4, k=4, r=3)
    apart = np.subtract.outer(np.arange(9), np.arange(9))
    within = {
        "Recurrent": lambda depth: (apart >= 0) & (apart < depth),
        "Convolutional, contiguous": lambda depth: (apart <= depth) & (apart >= -2 * depth),
        "Convolutional, dilated": lambda depth: (apart >= 0) & (apart < 4**depth),
        "Self-attention (restricted)": lambda depth: abs(apart) <= depth,
    }
    for name, expected in within.items():
        for depth, joined in enumerate(table1.reached(BY_NAME[name], sizes)):
            np.testing.assert_array_equal(joined, expected(depth), f"{name}, {depth} layers")


def test_logarithms_of_powers_are_exact():
    assert [logarithm(n, 3) for n in (2, 3, 4, 9, 10, 27, 243, 244)] == [1, 1, 2, 2, 3, 3, 5, 6]


# --- The command -------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Two layers, short paths and times that grow as n to the power of 1.5."""
    monkeypatch.setattr(table1, "LAYERS", (BY_NAME["Self-attention"], BY_NAME["Recurrent"]))
    monkeypatch.setattr(table1, "STROKES", table1.STROKES[:2])
    monkeypatch.setattr(table1, "PATH_SIZES", (Sizes(5, 2, 3, 3),))
    monkeypatch.setattr(table1, "seconds", lambda layer, sizes: sizes.n**1.5)


SIZES = ["--n=8", "--d=4", "--k=3", "--r=4"]


def test_table_for_programs(quick, capsys):
    assert table1.main([*SIZES, "--format=csv"]) == 0
    captured = capsys.readouterr()
    attention, recurrent = csv.DictReader(io.StringIO(captured.out))
    assert (recurrent["layer"], recurrent["n"], recurrent["d"]) == ("Recurrent", "8", "4")
    assert (recurrent["work"], recurrent["work_value"], recurrent["multiply_adds"]) == ("O(n·d²)", "128", "256")
    assert float(recurrent["time_exponent_n"]) == pytest.approx(1.5)
    assert float(attention["seconds_n64"]) == 512
    assert float(attention["counted_exponent_n"]) == pytest.approx(2)
    assert (recurrent["sequential_counted"], attention["sequential_counted"]) == ("8", "1")
    assert (recurrent["path_exact"], recurrent["path_measured_n5_k3_r3"]) == ("8", "5")
    assert "n = 8, d = 4, k = 3, r = 4" in captured.err


def test_table_for_people(quick, capsys):
    assert table1.main(SIZES) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith(
        "| Self-attention | O(n²·d) = 256 | 512 | 2.00 1.00 0.00 0.00 | 2.00 1.00 0.00 0.00 | 1.50"
    )
    assert {line.count("|") for line in lines[:4]} == {lines[0].count("|")}
    assert lines[-1].startswith("n = 8, d = 4, k = 3, r = 4. Time: medians of 5 calls at n = 8, 16, 32, 64,")


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_figure(quick, ending, tmp_path):
    assert table1.main([*SIZES, f"--figure={tmp_path / 'work'}.{ending}"]) == 0
    written = (tmp_path / f"work.{ending}").read_bytes()
    assert written.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    assert ending == "png" or b"Recurrent" in written


@pytest.mark.parametrize(
    "sizes, symbol", [((1, 1, 3, 3), "n"), ((2, 0, 3, 3), "d"), ((2, 1, 2, 3), "k"), ((2, 1, 3, 2), "r")]
)
def test_sizes_too_small(sizes, symbol):
    assert table1.checked(Sizes(2, 1, 3, 3))
    with pytest.raises(InputError, match=f"^{symbol}: got"):
        table1.checked(Sizes(*sizes))


@pytest.mark.parametrize("sizes", [(5000, 8, 3, 3), (512, 512, 3, 1024), (2, 32768, 3, 3)], ids=str)
def test_sizes_too_large_for_memory(sizes):
    with pytest.raises(InputError, match="GiB"):
        table1.checked(Sizes(*sizes))


def test_bad_figures_are_refused_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(table1, "show", None)
    for path, complaint in (("work.gif", ".png, .svg"), ("none/work.png", "no folder")):
        assert table1.main([f"--figure={tmp_path / path}"]) == 2
        assert complaint in capsys.readouterr().err
