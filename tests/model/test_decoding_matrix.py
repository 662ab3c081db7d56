import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2t_jax.decoding.ensemble import as_computed, computing_in
from t2t_jax.model.decoding_matrix import DecodingMatrix, for_decoding, product
from tests import tiny


def numbers(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def quantized(matrix):
    return for_decoding({"kernel": matrix}, int8=True)["kernel"]


@pytest.mark.parametrize("rows", [1, 4, 128, 129])
@pytest.mark.parametrize("outputs_first", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_a_product_is_that_of_the_matrix(rows, outputs_first, dtype, tolerance):
    x, kernel = numbers(0, 1, rows, 16).astype(dtype), numbers(1, 16, 40).astype(dtype)
    matrix = for_decoding({"kernel": kernel}, int8=False)["kernel"]
    found = product(x, matrix, outputs_first=outputs_first)
    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    np.testing.assert_allclose(found, expected, atol=tolerance)
    assert found.dtype == jnp.float32


def test_kernels_of_several_heads_are_matrices_of_all_their_inputs_and_outputs():
    kernels = {"query_kernel": numbers(0, 6, 2, 3), "output_kernel": numbers(1, 2, 3, 6)}
    found = for_decoding({"attention": kernels}, int8=False)["attention"]
    np.testing.assert_array_equal(found["query_kernel"].values, kernels["query_kernel"].reshape(6, 6).T)
    np.testing.assert_array_equal(found["output_kernel"].values, kernels["output_kernel"].reshape(6, 6).T)


@pytest.mark.parametrize("int8", [False, True])
def test_few_rows_are_multiplied_by_the_matrix_not_it_by_them(int8):
    """In the compiled program, where XLA may exchange the factors: it would rearrange the matrix at every step."""
    matrix = for_decoding({"kernel": numbers(0, 16, 40)}, int8=int8)["kernel"]
    program = jax.jit(lambda x: product(x, matrix) + 1).lower(numbers(1, 2, 3, 16)).compile().as_text()
    assert re.findall(r"\[(\d+,\d+)\]\S* dot\(", program) == ["40,6"]


def test_products_of_numbers_that_int8_has_are_exact():
    """By hand: the scales are 1 of the first row and column, 2 of the second row, 0.5 of the second column."""
    x = jnp.asarray([[[127.0, -3.0], [-254.0, 2.0]]])
    kernel_in_float = jnp.asarray([[127.0, 1.5], [5.0, -63.5]])
    kernel = quantized(kernel_in_float)
    np.testing.assert_array_equal(kernel.values, [[127, 5], [3, -127]])
    np.testing.assert_array_equal(kernel.scale, [1, 0.5])
    expected = [[127 * 127 - 15, 190.5 + 190.5], [-254 * 127 + 10, -381 - 127]]
    np.testing.assert_array_equal(product(x, kernel), [expected])
    table = for_decoding({"table": kernel_in_float.T}, int8=True)["table"]
    np.testing.assert_array_equal(product(x, table, outputs_first=True), [expected])
    np.testing.assert_array_equal(table.rows(jnp.asarray([[1, 0]])), [[[1.5, -63.5], [127, 5]]])


def test_the_error_is_that_of_rounding_both_factors():
    x, kernel = numbers(0, 3, 5, 32), numbers(1, 32, 7)
    found, exact = product(x, quantized(kernel)), np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    x_steps, kernel_steps = jnp.abs(x).max(2, keepdims=True) / 127, jnp.abs(kernel).max(0, keepdims=True) / 127
    bound = jnp.abs(x).sum(2, keepdims=True) * kernel_steps[None] / 2
    bound += jnp.abs(kernel).sum(0)[None, None] * x_steps / 2 + 32 * x_steps * kernel_steps[None] / 4
    error = np.abs(found - exact)
    assert (error <= bound * (1 + 1e-5)).all() and error.max() > bound.max() / 100


def test_a_row_has_the_same_product_alone_and_in_any_batch():
    x, kernel = numbers(0, 4, 3, 16), quantized(numbers(1, 16, 40))
    together = product(x * jnp.asarray([1e-3, 1, 50, 0])[:, None, None], kernel)
    for row, factor in enumerate([1e-3, 1, 50, 0]):
        np.testing.assert_array_equal(product(x[row : row + 1, :1] * factor, kernel), together[row : row + 1, :1])
    assert (together[3] == 0).all()


def test_a_number_that_is_not_one_is_not_hidden():
    x = numbers(0, 1, 3, 4).at[0, 1, 2].set(jnp.nan)
    nan = np.isnan(product(x, quantized(numbers(1, 4, 5))))
    assert nan[0, 1].all() and not nan[0, [0, 2]].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_parameters_that_are_stored_for_decoding_stay_as_they_are(dtype):
    """A translator may be made of the ensemble of another one."""
    model = computing_in(dtype, tiny.model())
    once = as_computed(model, tiny.variables(tiny.model())["params"])
    twice = as_computed(model, once)
    jax.tree.map(np.testing.assert_array_equal, once, twice)
    assert [x.dtype for x in jax.tree.leaves(once)] == [x.dtype for x in jax.tree.leaves(twice)]


@pytest.mark.parametrize("changes", tiny.VARIANTS)
def test_every_matrix_of_a_model_is_quantized_and_its_logits_are_nearly_the_same(changes):
    model = tiny.model(**changes)
    variables = tiny.variables(model)
    batch = tiny.sentences([7, 4], tiny.S), tiny.sentences([5, 3], tiny.T, seed=1)
    in_int8 = computing_in("int8", model)
    params = as_computed(in_int8, variables["params"])
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, DecodingMatrix)):
        name = jax.tree_util.keystr(path)
        is_vector = any(part in name for part in ("bias", "scale", "positions"))
        assert isinstance(x, jax.Array) if is_vector else x.values.dtype == jnp.int8, name
    expected, logits = tiny.apply(model, variables, *batch), tiny.apply(in_int8, {"params": params}, *batch)
    assert logits.dtype == jnp.float32
    assert 0 < np.abs(logits - expected).max() < 0.05 * np.ptp(expected)
