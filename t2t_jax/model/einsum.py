"""Matrix products and their gradients, in the forms that XLA computes fastest."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from t2t_jax.model.decoding_matrix import DecodingMatrix, product
from t2t_jax.model.platform import platform


def matmul_output_dtype(dtype: DTypeLike) -> DTypeLike:
    """The fastest `preferred_element_type` for a matrix product of `dtype`, before the result is rounded to `dtype`.

    On CPU that is float32: XLA's bfloat16 kernels accumulate in float32 anyway, and are twice as fast if the result
    stays float32.
    """
    return jnp.float32 if platform() == "cpu" else dtype


@functools.partial(jax.jit, static_argnums=(0, 3), inline=True)
def einsum(equation: str, x: Array, y: Array, dtype: DTypeLike) -> Array:
    """`jnp.einsum(equation, x, y)`, multiplied in x's dtype, with a result of `dtype`.

    Custom VJP: the backward matmuls run in x's dtype too, where JAX would run them in float32 if the result is
    float32. The gradient of `y` is rounded to y's dtype only, so that of a float32 kernel is never rounded to
    bfloat16. Forward-mode differentiation (jax.jvp) is not supported.
    """
    # By jit, layers of the same shapes share one trace: jnp.einsum is slow to trace. Inlined, the program is the same.
    return _einsum(equation, x, y, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _einsum(equation, x, y, dtype):
    output_dtype = jnp.promote_types(dtype, matmul_output_dtype(x.dtype))
    return jnp.einsum(equation, x, y.astype(x.dtype), preferred_element_type=output_dtype).astype(dtype)


def _forward(equation, x, y, dtype):
    return einsum(equation, x, y, dtype), (x, y)


def _backward(equation, dtype, residuals, cotangent):
    x, y = residuals
    inputs, result_axes = equation.split("->")
    x_axes, y_axes = inputs.split(",")
    cotangent = cotangent.astype(x.dtype)
    x_gradient = einsum(f"{result_axes},{y_axes}->{x_axes}", cotangent, y, x.dtype)
    return x_gradient, einsum(f"{x_axes},{result_axes}->{y_axes}", x, cotangent, y.dtype)


_einsum.defvjp(_forward, _backward)


def dense(
    x: Float[Array, "B T M"], kernel: Float[Array, "M N"] | DecodingMatrix, bias: Float[Array, " N"] | None = None
) -> Float[Array, "B T N"]:
    """x · kernel + bias in x's dtype."""
    if isinstance(kernel, DecodingMatrix):
        y = product(x, kernel).astype(x.dtype)
    # Backward in float32, XLA on CPU computes the kernel's gradient without copying x only if both are matrices.
    # In bfloat16 its only fast kernel is the one that copies.
    elif x.dtype == jnp.float32:
        y = einsum("rm,mn->rn", x.reshape(-1, x.shape[-1]), kernel, x.dtype).reshape(*x.shape[:2], -1)
    else:
        y = einsum("btm,mn->btn", x, kernel, x.dtype)
    return y if bias is None else add_bias(y, bias)


@jax.custom_vjp
def add_bias(y: Float[Array, "B T N"], bias: Float[Array, " N"]) -> Float[Array, "B T N"]:
    """y + bias in y's dtype. Custom VJP: the gradient of the bias is a sum in its own dtype, as that of a kernel is."""
    return y + bias.astype(y.dtype)[None, None]


def _add_bias_forward(y, bias):
    return add_bias(y, bias), bias


def _add_bias_backward(bias, cotangent):
    return cotangent, cotangent.sum(axis=(0, 1), dtype=bias.dtype)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)
