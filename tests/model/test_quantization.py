import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2t_jax.decoding.ensemble import as_computed, computing_in
from t2t_jax.model.quantization import QuantizedMatrix, dense_int8, quantize
from tests import tiny


def numbers(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def quantized(matrix):
    return quantize({"kernel": matrix})["kernel"]


def test_products_of_numbers_that_int8_has_are_exact():
    """By hand: the scales are 1 of the first row and column, 2 of the second row, 0.5 of the second column."""
    x = jnp.asarray([[[127.0, -3.0], [-254.0, 2.0]]])
    kernel = quantized(jnp.asarray([[127.0, 1.5], [5.0, -63.5]]))
    np.testing.assert_array_equal(kernel.values, [[127, 3], [5, -127]])
    np.testing.assert_array_equal(kernel.scale, [1, 0.5])
    expected = [[127 * 127 - 15, 190.5 + 190.5], [-254 * 127 + 10, -381 - 127]]
    np.testing.assert_array_equal(dense_int8(x, kernel), [expected])
    table = quantize({"table": jnp.asarray([[127.0, 5.0], [1.5, -63.5]])})["table"]
    np.testing.assert_array_equal(dense_int8(x, table, transposed=True), [expected])
    np.testing.assert_array_equal(table.rows(jnp.asarray([[1, 0]])), [[[1.5, -63.5], [127, 5]]])


def test_the_error_is_that_of_rounding_both_factors():
    x, kernel = numbers(0, 3, 5, 32), numbers(1, 32, 7)
    found, exact = dense_int8(x, quantized(kernel)), np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    x_steps, kernel_steps = jnp.abs(x).max(2, keepdims=True) / 127, jnp.abs(kernel).max(0, keepdims=True) / 127
    bound = jnp.abs(x).sum(2, keepdims=True) * kernel_steps[None] / 2
    bound += jnp.abs(kernel).sum(0)[None, None] * x_steps / 2 + 32 * x_steps * kernel_steps[None] / 4
    error = np.abs(found - exact)
    assert (error <= bound * (1 + 1e-5)).all() and error.max() > bound.max() / 100


def test_a_row_has_the_same_product_alone_and_in_any_batch():
    x, kernel = numbers(0, 4, 3, 16), quantized(numbers(1, 16, 40))
    together = dense_int8(x * jnp.asarray([1e-3, 1, 50, 0])[:, None, None], kernel)
    for row, factor in enumerate([1e-3, 1, 50, 0]):
        np.testing.assert_array_equal(dense_int8(x[row : row + 1, :1] * factor, kernel), together[row : row + 1, :1])
    assert (together[3] == 0).all()


def test_a_number_that_is_not_one_is_not_hidden():
    x = numbers(0, 1, 3, 4).at[0, 1, 2].set(jnp.nan)
    nan = np.isnan(dense_int8(x, quantized(numbers(1, 4, 5))))
    assert nan[0, 1].all() and not nan[0, [0, 2]].any()


@pytest.mark.parametrize("changes", tiny.VARIANTS)
def test_every_matrix_of_a_model_is_quantized_and_its_logits_are_nearly_the_same(changes):
    model = tiny.model(**changes)
    variables = tiny.variables(model)
    batch = tiny.sentences([7, 4], tiny.S), tiny.sentences([5, 3], tiny.T, seed=1)
    in_int8 = computing_in("int8", model)
    params = as_computed(in_int8, variables["params"])
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, QuantizedMatrix)):
        name = jax.tree_util.keystr(path)
        is_vector = any(part in name for part in ("bias", "scale", "positions"))
        assert isinstance(x, jax.Array) if is_vector else x.values.dtype == jnp.int8, name
    expected, logits = tiny.apply(model, variables, *batch), tiny.apply(in_int8, {"params": params}, *batch)
    assert logits.dtype == jnp.float32
    assert 0 < np.abs(logits - expected).max() < 0.05 * np.ptp(expected)
