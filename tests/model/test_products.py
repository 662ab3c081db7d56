import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2t_jax.model.products import dense, product


def numbers(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


PRODUCTS = [
    ("rm,mn->rn", (5, 3), (3, 4)),
    ("btm,mn->btn", (2, 5, 3), (3, 4)),
    ("bhtk,bhks->bhts", (2, 3, 5, 4), (2, 3, 4, 6)),
    ("bhts,bhsv->bhtv", (2, 3, 5, 6), (2, 3, 6, 4)),
]


@pytest.mark.parametrize(("equation", "of_x", "of_y"), PRODUCTS)
def test_values_and_gradients_are_those_of_einsum(equation, of_x, of_y):
    x, y = numbers(0, *of_x), numbers(1, *of_y)
    expected, back = jax.vjp(lambda x, y: jnp.einsum(equation, x, y), x, y)
    found, our_back = jax.vjp(lambda x, y: product(equation, x, y, x.dtype), x, y)
    by_result = numbers(2, *expected.shape)
    for a, b in zip((found, *our_back(by_result)), (expected, *back(by_result)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_all_three_products_multiply_in_the_type_of_x(dtype):
    """Scores are float32 whatever is multiplied, and JAX's own gradients of them would multiply in float32."""
    x, y = numbers(0, 2, 3, 5, 4).astype(dtype), numbers(1, 2, 3, 4, 6).astype(dtype)
    scores = lambda x, y: jnp.sum(product("bhtk,bhks->bhts", x, y, jnp.float32) ** 2)
    lowered = jax.jit(jax.grad(scores, (0, 1))).lower(x, y).as_text()
    operands = [line.split(" : (")[1].split(")")[0] for line in lowered.splitlines() if "dot_general" in line]
    assert len(operands) == 3
    assert all(types.count("xbf16" if dtype == jnp.bfloat16 else "xf32") == 2 for types in operands)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dense_is_a_product_of_rows_and_a_kernel_keeps_the_digits_of_its_gradient(dtype):
    x, kernel, bias = numbers(0, 2, 5, 3).astype(dtype), numbers(1, 3, 4), numbers(2, 4)
    exact = np.asarray(x, np.float64) @ np.asarray(kernel.astype(dtype), np.float64)
    places = {jnp.float32: 1e-6, jnp.bfloat16: 2**-7}[dtype]
    np.testing.assert_allclose(np.float64(dense(x, kernel)), exact, rtol=places, atol=places)
    biased = np.float64(dense(x, kernel, bias))
    np.testing.assert_allclose(biased, exact + np.asarray(bias)[None, None], rtol=2 * places, atol=2 * places)

    by_y = numbers(3, 2, 5, 4).astype(dtype)
    _, back = jax.vjp(lambda kernel: dense(x, kernel), kernel)
    (by_kernel,) = back(by_y)
    assert by_kernel.dtype == jnp.float32
    in_full = np.einsum("btm,btn->mn", np.asarray(x, np.float64), np.asarray(by_y, np.float64))
    np.testing.assert_allclose(by_kernel, in_full, rtol=1e-5, atol=1e-5)
