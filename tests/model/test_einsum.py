import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2t_jax.model.einsum import add_bias, dense, einsum


def numbers(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


EQUATIONS = [
    ("rm,mn->rn", (5, 3), (3, 4)),
    ("btm,mn->btn", (2, 5, 3), (3, 4)),
    ("bhtk,bhks->bhts", (2, 3, 5, 4), (2, 3, 4, 6)),
    ("bhts,bhsv->bhtv", (2, 3, 5, 6), (2, 3, 6, 4)),
]


@pytest.mark.parametrize(("equation", "x_shape", "y_shape"), EQUATIONS)
def test_values_and_gradients_are_those_of_jnp_einsum(equation, x_shape, y_shape):
    x, y = numbers(0, *x_shape), numbers(1, *y_shape)
    expected, expected_vjp = jax.vjp(lambda x, y: jnp.einsum(equation, x, y), x, y)
    found, vjp = jax.vjp(lambda x, y: einsum(equation, x, y, x.dtype), x, y)
    cotangent = numbers(2, *expected.shape)
    for a, b in zip((found, *vjp(cotangent)), (expected, *expected_vjp(cotangent)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_forward_and_backward_matmuls_run_in_the_dtype_of_x(dtype):
    """Scores are float32, so without the custom VJP JAX would run the backward matmuls in float32."""
    x, y = numbers(0, 2, 3, 5, 4).astype(dtype), numbers(1, 2, 3, 4, 6).astype(dtype)
    scores = lambda x, y: jnp.sum(einsum("bhtk,bhks->bhts", x, y, jnp.float32) ** 2)
    lowered = jax.jit(jax.grad(scores, (0, 1))).lower(x, y).as_text()
    operands = [line.split(" : (")[1].split(")")[0] for line in lowered.splitlines() if "dot_general" in line]
    assert len(operands) == 3
    assert all(types.count("xbf16" if dtype == jnp.bfloat16 else "xf32") == 2 for types in operands)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dense_is_x_kernel_plus_bias_and_the_gradient_of_a_float32_kernel_is_not_rounded(dtype):
    x, kernel, bias = numbers(0, 2, 5, 3).astype(dtype), numbers(1, 3, 4), numbers(2, 4)
    exact = np.asarray(x, np.float64) @ np.asarray(kernel.astype(dtype), np.float64)
    tolerance = {jnp.float32: 1e-6, jnp.bfloat16: 2**-7}[dtype]
    np.testing.assert_allclose(np.float64(dense(x, kernel)), exact, rtol=tolerance, atol=tolerance)
    biased = np.float64(dense(x, kernel, bias))
    np.testing.assert_allclose(biased, exact + np.asarray(bias)[None, None], rtol=2 * tolerance, atol=2 * tolerance)

    cotangent = numbers(3, 2, 5, 4).astype(dtype)
    _, vjp = jax.vjp(lambda kernel: dense(x, kernel), kernel)
    (gradient,) = vjp(cotangent)
    assert gradient.dtype == jnp.float32
    exact = np.einsum("btm,btn->mn", np.asarray(x, np.float64), np.asarray(cotangent, np.float64))
    np.testing.assert_allclose(gradient, exact, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_bias_is_summed_in_float32():
    """Of 998 ones and two 2⁻⁹; the nearest number to their sum in bfloat16 is 1,000."""
    cotangent = jnp.full((1000, 1, 2), 1.0, jnp.bfloat16).at[:2].set(2.0**-9)
    _, vjp = jax.vjp(lambda bias: add_bias(jnp.zeros_like(cotangent), bias), jnp.zeros(2))
    np.testing.assert_array_equal(vjp(cotangent)[0], np.full(2, 998 + 2.0**-8))
