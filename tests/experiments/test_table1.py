"""The layers against NumPy loops, the counters against numbers by hand and XLA's count, and Table 1 itself."""

import csv
import io
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import table1_complexity as table1
from experiments.figure_file import figure_file
from experiments.table1_layers import LAYERS, Sizes, init_parameters, logarithm
from t2t_jax.errors import InputError
from t2t_jax.model.attention import window_mask

SMALL = Sizes(n=7, d=6, k=3, r=4)
LARGE = Sizes(n=128, d=512, k=3, r=32)
BY_NAME = {layer.name: layer for layer in LAYERS}
every_layer = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)


def applied(name, sizes, dilation=1):
    """(parameters, x, output); parameters and x in float64, for the NumPy reference."""
    parameters = init_parameters(BY_NAME[name], sizes, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (sizes.n, sizes.d))
    output = jax.jit(BY_NAME[name].apply, static_argnums=(2, 3))(parameters, x, sizes, dilation)
    return {key: np.asarray(value, float) for key, value in parameters.items()}, np.asarray(x, float), output


# --- The layers --------------------------------------------------------------------------------------------


def attended(query, key, value, left, right):
    """Each position attends to `left` positions before it, to itself and to `right` positions after it."""
    output = np.empty_like(value)
    for i in range(len(query)):
        near = slice(max(0, i - left), i + right + 1)
        scores = np.exp(key[near] @ query[i] / np.sqrt(query.shape[1]))
        output[i] = scores / scores.sum() @ value[near]
    return output


@pytest.mark.parametrize(
    "name, left, right", [("Self-attention", 7, 7), ("Self-attention (restricted)", 2, 2)], ids=["full", "restricted"]
)
def test_attention_equals_a_numpy_loop(name, left, right):
    _, x, found = applied(name, SMALL)
    np.testing.assert_allclose(found, attended(x, x, x, left, right), atol=1e-5)
    given, x, found = applied(f"{name} with projections", SMALL)
    mixed = attended(x @ given["query"], x @ given["key"], x @ given["value"], left, right)
    np.testing.assert_allclose(found, mixed @ given["output"], atol=1e-5)


@pytest.mark.parametrize("r", [13, 14, 20])
def test_restricted_attention_to_all_positions_is_full_attention(r):
    sizes = SMALL._replace(r=r)
    for ending in ("", " with projections"):
        full, restricted = (
            applied(kind + ending, sizes)[2] for kind in ("Self-attention", "Self-attention (restricted)")
        )
        np.testing.assert_allclose(restricted, full, atol=1e-5)


def test_the_recurrence_equals_a_numpy_loop():
    given, x, found = applied("Recurrent", SMALL)
    state = np.zeros(SMALL.d)
    for i in range(SMALL.n):
        state = np.tanh(state @ given["state"] + x[i] @ given["input"])
        np.testing.assert_allclose(found[i], state, atol=1e-5)


def test_n_parallel_state_updates_equal_the_recurrence():
    layer = BY_NAME["Recurrent"]
    given, x, found = jax.tree.map(jnp.float32, applied("Recurrent", SMALL))
    states = jnp.zeros_like(x)
    for update in range(SMALL.n):
        assert (np.abs(states - found).max(1) > 1e-3).sum() == SMALL.n - update  # each update completes one more
        states = layer.update(given, states, x)
    np.testing.assert_allclose(states, found, atol=1e-5)


def convolved(x, kernel, offsets):
    """Σ_k x[i + offsets[k]] kernel[k], zero-padded."""
    output = np.zeros_like(x)
    for i in range(len(x)):
        for k, offset in enumerate(offsets):
            if 0 <= i + offset < len(x):
                output[i] += x[i + offset] @ kernel[k]
    return output


@pytest.mark.parametrize("k, offsets", [(3, (-1, 0, 1)), (4, (-1, 0, 1, 2))])
def test_convolutions_equal_a_numpy_loop(k, offsets):
    given, x, found = applied("Convolutional, contiguous", SMALL._replace(k=k))
    np.testing.assert_allclose(found, convolved(x, given["kernel"], offsets), atol=1e-5)
    given, x, found = applied("Convolutional, separable", SMALL._replace(k=k))
    depthwise = convolved(x, [np.diag(weights) for weights in given["depthwise"]], offsets)
    np.testing.assert_allclose(found, depthwise @ given["pointwise"], atol=1e-5)


@pytest.mark.parametrize("dilation, offsets", [(1, (-2, -1, 0)), (3, (-6, -3, 0)), (9, (-18, -9, 0))])
def test_the_dilated_convolution_equals_a_numpy_loop(dilation, offsets):
    given, x, found = applied("Convolutional, dilated", SMALL, dilation)
    np.testing.assert_allclose(found, convolved(x, given["kernel"], offsets), atol=1e-5)


# --- The counters ------------------------------------------------------------------------------------------


def jaxpr_of(function, *shapes):
    return jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes)).jaxpr


def test_multiply_adds_equal_a_count_by_hand():
    product = jaxpr_of(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (2, 3, 5), (2, 5, 7))
    assert table1.multiply_adds(product) == 2 * 3 * 5 * 7
    nested = jaxpr_of(jax.jit(lambda a, b: jnp.tanh(a @ b) @ b), (3, 5), (5, 5))
    assert table1.multiply_adds(nested) == 2 * 3 * 5 * 5
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


def test_loop_iterations_equal_a_count_by_hand():
    square = lambda state: state @ state
    nested = jaxpr_of(loop(5, loop(3, square)), (4, 4))
    assert table1.multiply_adds(nested) == 5 * 3 * 4**3
    assert table1.sequential_operations(nested) == 15
    assert table1.sequential_operations(jaxpr_of(lambda x: loop(5)(x) + loop(3)(x), (4,))) == 5  # in parallel
    assert table1.sequential_operations(jaxpr_of(lambda x: loop(5)(jnp.sin(loop(3)(x))), (4,))) == 8  # in sequence
    assert table1.sequential_operations(jaxpr_of(lambda x: loop(5)(jax.jit(loop(3))(x)), (4,))) == 8
    assert table1.sequential_operations(jaxpr_of(square, (4, 4))) == 1


def test_a_loop_of_unknown_length_is_refused():
    endless = jaxpr_of(lambda x: jax.lax.while_loop(lambda x: x.sum() < 3, lambda x: x @ x, x), (4, 4))
    with pytest.raises(AssertionError, match="while"):
        table1.multiply_adds(endless)


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if not layer.update], ids=lambda layer: layer.name)
def test_xla_counts_the_same_multiply_adds(layer):
    """XLA counts two operations per multiply-add, counts other operations too and omits padding: within 5 %."""
    sizes = Sizes(n=96, d=512, k=3, r=8)
    parameters, x = init_parameters(layer, sizes, jax.random.key(0)), jnp.zeros((sizes.n, sizes.d))
    lowered = jax.jit(lambda parameters, x: layer.apply(parameters, x, sizes, 1)).lower(parameters, x)
    counted = table1.multiply_adds(table1.jaxpr_of(layer, sizes))
    assert lowered.cost_analysis()["flops"] / 2 == pytest.approx(counted, rel=0.05)


# --- Table 1 -----------------------------------------------------------------------------------------------

EXPONENTS = {  # of n, d, k, r in the paper's formulas
    "Self-attention": (2, 1, 0, 0),
    "Recurrent": (1, 2, 0, 0),
    "Convolutional, contiguous": (1, 2, 1, 0),
    "Convolutional, dilated": (1, 2, 1, 0),
    "Self-attention (restricted)": (1, 1, 0, 1),
}


def in_blocks(n, r):
    """Pairs of queries and keys: blocks of r // 2 queries, at least two, with as many keys as r // 2 on both sides."""
    block = max(r // 2, 2)
    return -(-n // block) * block * (block + 2 * (r // 2))


EXACT = {  # multiply-adds
    "Self-attention": lambda n, d, k, r: 2 * n**2 * d,
    "Self-attention with projections": lambda n, d, k, r: 2 * n**2 * d + 4 * n * d**2,
    "Recurrent": lambda n, d, k, r: 2 * n * d**2,
    "Convolutional, contiguous": lambda n, d, k, r: k * n * d**2,
    "Convolutional, dilated": lambda n, d, k, r: k * n * d**2,
    "Convolutional, separable": lambda n, d, k, r: k * n * d + n * d**2,
    "Self-attention (restricted)": lambda n, d, k, r: 2 * in_blocks(n, r) * d,
    "Self-attention (restricted) with projections": lambda n, d, k, r: 2 * in_blocks(n, r) * d + 4 * n * d**2,
}


@every_layer
@pytest.mark.parametrize("sizes", [SMALL, LARGE, Sizes(50, 8, 5, 9)], ids=str)
def test_work_is_the_exact_number_of_multiply_adds(layer, sizes):
    assert table1.multiply_adds(table1.jaxpr_of(layer, sizes)) == EXACT[layer.name](*sizes)


@pytest.mark.parametrize("name", [name for name in BY_NAME if "with projections" in name])
@pytest.mark.parametrize("sizes", [LARGE, Sizes(n=512, d=64, k=3, r=32), Sizes(n=30, d=8, k=3, r=4)], ids=str)
def test_with_projections_the_formula_is_the_exact_number_of_multiply_adds(name, sizes):
    assert table1.multiply_adds(table1.jaxpr_of(BY_NAME[name], sizes)) == BY_NAME[name].work.value(sizes)


@pytest.mark.parametrize("r", [2, 3, 4, 5, 6])
def test_the_neighbourhood_is_that_of_the_model(r):
    """Of one layer, by gradients, and `model.attention_window`."""
    _, dependent, *_ = table1.dependencies(BY_NAME["Self-attention (restricted)"], Sizes(n=9, d=4, k=3, r=r))
    np.testing.assert_array_equal(dependent, window_mask(9, r)[0, 0])


@pytest.mark.parametrize("name", EXPONENTS)
@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
def test_measured_exponents_are_those_of_the_paper(name, sizes):
    if "restricted" in name:  # few positions are not a whole number of blocks
        sizes = LARGE if sizes is LARGE else LARGE._replace(d=sizes.d)
    assert [*table1.exponents(BY_NAME[name], sizes).values()] == pytest.approx(EXPONENTS[name], abs=0.05)


@every_layer
def test_formulas_and_counted_work_have_the_same_exponents(layer):
    of_formula = table1.formula_exponents(layer.work, LARGE)
    assert table1.exponents(layer, LARGE) == pytest.approx(of_formula, abs=0.05)


def test_a_separable_convolution_with_k_equal_n_costs_attention_plus_a_pointwise_layer():
    """§4: "even with k = n"."""
    sizes = LARGE._replace(k=LARGE.n)
    separable = table1.multiply_adds(table1.jaxpr_of(BY_NAME["Convolutional, separable"], sizes))
    assert separable == BY_NAME["Self-attention"].work.value(LARGE) + LARGE.n * LARGE.d**2


@every_layer
@pytest.mark.parametrize("n", [2, 7, 64])
def test_only_the_recurrence_has_sequential_operations(layer, n):
    found = table1.sequential_operations(table1.jaxpr_of(layer, SMALL._replace(n=n)))
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
def test_the_measured_path_length_is_the_exact_one(layer, n, k, r):
    sizes = Sizes(n, 4, k, r)
    by_hand = {"Recurrent": n} | PATHS[n, k, r]
    expected = by_hand.get(SAME_PATH.get(layer.name, layer.name), 1)
    assert table1.measured_path(layer, sizes) == layer.path_length(sizes) == expected


def test_each_further_layer_extends_the_dependencies_by_its_window():
    """Output i depends on input j after L layers if i − j lies within L windows, or k^L positions if dilated."""
    sizes = Sizes(n=9, d=4, k=4, r=3)
    distance = np.subtract.outer(np.arange(9), np.arange(9))
    dependent = {
        "Recurrent": lambda depth: (distance >= 0) & (distance < depth),
        "Convolutional, contiguous": lambda depth: (distance <= depth) & (distance >= -2 * depth),
        "Convolutional, dilated": lambda depth: (distance >= 0) & (distance < 4**depth),
        "Self-attention (restricted)": lambda depth: abs(distance) <= depth,
    }
    for name, expected in dependent.items():
        for depth, found in enumerate(table1.dependencies(BY_NAME[name], sizes)):
            np.testing.assert_array_equal(found, expected(depth), f"{name}, {depth} layers")


def test_logarithms_of_powers_are_exact():
    assert [logarithm(n, 3) for n in (2, 3, 4, 9, 10, 27, 243, 244)] == [1, 1, 2, 2, 3, 3, 5, 6]


# --- The command -------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Two layers, small path sizes, and times proportional to n to the power of 1.5."""
    monkeypatch.setattr(table1, "LAYERS", (BY_NAME["Self-attention"], BY_NAME["Recurrent"]))
    monkeypatch.setattr(table1, "LINE_STYLES", table1.LINE_STYLES[:2])
    monkeypatch.setattr(table1, "PATH_SIZES", (Sizes(5, 2, 3, 3),))
    monkeypatch.setattr(table1, "seconds", lambda layer, sizes: sizes.n**1.5)


SIZES = ["--n=8", "--d=4", "--k=3", "--r=4"]


def test_the_csv_table(quick, capsys):
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


def test_the_markdown_table(quick, capsys):
    assert table1.main(SIZES) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith(
        "| Self-attention | O(n²·d) = 256 | 512 | 2.00 1.00 0.00 0.00 | 2.00 1.00 0.00 0.00 | 1.50"
    )
    assert {line.count("|") for line in lines[:4]} == {lines[0].count("|")}
    assert lines[-1].startswith("n = 8, d = 4, k = 3, r = 4. Time: medians of 5 calls at n = 8, 16, 32, 64,")


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_figure_is_written(quick, ending, tmp_path):
    assert table1.main([*SIZES, f"--figure={tmp_path / 'work'}.{ending}"]) == 0
    written = (tmp_path / f"work.{ending}").read_bytes()
    assert written.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    assert ending == "png" or b"Recurrent" in written


@pytest.mark.parametrize(
    "sizes, symbol", [((1, 1, 3, 3), "n"), ((2, 0, 3, 3), "d"), ((2, 1, 2, 3), "k"), ((2, 1, 3, 1), "r")]
)
def test_sizes_that_are_too_small_are_refused(sizes, symbol):
    assert table1.check_sizes(Sizes(2, 1, 3, 3))
    with pytest.raises(InputError, match=f"^{symbol}: got"):
        table1.check_sizes(Sizes(*sizes))


@pytest.mark.parametrize(
    ("sizes", "gib"),
    [((5000, 8, 3, 3), 6), ((2, 32768, 3, 3), 12), ((128, 16, 100_000, 32), 6), ((2, 1, 3, 200_000), 112),
     ((2, 1, 3, 10**12), 3725)],
    ids=str,
)  # fmt: skip
def test_sizes_that_do_not_fit_in_memory_are_refused(sizes, gib):
    with pytest.raises(InputError, match=f"need an array of {gib:,} GiB"):
        table1.check_sizes(Sizes(*sizes))


def test_sizes_are_refused_only_for_arrays_that_some_layer_has():
    assert table1.check_sizes(Sizes(512, 512, 3, 1024))
    outer = lambda x: jax.lax.fori_loop(0, 3, lambda _, x: jnp.outer(x, x).sum(1), x)  # in the body of a loop
    assert table1.largest_array(jaxpr_of(outer, (7,))) == 4 * 7**2


def test_bad_figures_are_refused_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(table1, "show", None)
    (tmp_path / "folder.png").mkdir()
    for path, complaint in (("work.gif", ".png or .svg"), ("none/work.png", "no folder"), ("folder.png", "a folder")):
        assert table1.main([f"--figure={tmp_path / path}"]) == 2
        assert complaint in capsys.readouterr().err


def test_a_figure_is_written_over_in_a_folder_that_takes_no_new_file(monkeypatch, tmp_path):
    (tmp_path / "old.svg").touch()
    writable = os.access  # not by chmod: root may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and writable(path, mode))
    assert figure_file("--figure", f"{tmp_path}/old.svg") == tmp_path / "old.svg"
    with pytest.raises(InputError, match=f"--figure={tmp_path}/new.svg: {tmp_path} can't be written to"):
        figure_file("--figure", f"{tmp_path}/new.svg")
