"""Matrix products, forwards and backwards, in the forms that XLA computes fastest."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def product_dtype(dtype: DTypeLike) -> DTypeLike:
    """What a matrix product of `dtype` is best written in, before it is rounded to `dtype`.

    XLA's CPU kernels are twice as fast in bfloat16 when the result is left in float32, in which it is added up
    anyway.
    """
    return jnp.float32 if jax.default_backend() == "cpu" else dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def product(equation: str, x: Array, y: Array, dtype: DTypeLike) -> Array:
    """`jnp.einsum(equation, x, y)`, multiplied in x's dtype and given in `dtype`.

    So are the gradients, where JAX would multiply in float32 whatever has a float32 result. That of `y` is rounded to
    y's own dtype alone: a float32 kernel's is not rounded to bfloat16 on the way. There is no forward-mode derivative.
    """
    written = jnp.promote_types(dtype, product_dtype(x.dtype))
    return jnp.einsum(equation, x, y.astype(x.dtype), preferred_element_type=written).astype(dtype)


def _forward(equation, x, y, dtype):
    return product(equation, x, y, dtype), (x, y)


def _backward(equation, dtype, arrays, by_result):
    x, y = arrays
    inputs, result = equation.split("->")
    of_x, of_y = inputs.split(",")
    by_result = by_result.astype(x.dtype)
    by_x = product(f"{result},{of_y}->{of_x}", by_result, y, x.dtype)
    return by_x, product(f"{of_x},{result}->{of_y}", x, by_result, y.dtype)


product.defvjp(_forward, _backward)


def dense(
    x: Float[Array, "B T M"], kernel: Float[Array, "M N"], bias: Float[Array, " N"] | None = None
) -> Float[Array, "B T N"]:
    """x · kernel + bias in x's dtype."""
    # For the kernel's gradient, XLA on CPU has a float32 kernel that reads the rows of x as they lie, but only where
    # both are matrices; else it copies them first. In bfloat16 only the product of the copy is fast.
    if x.dtype == jnp.float32:
        y = product("rm,mn->rn", x.reshape(-1, x.shape[-1]), kernel, x.dtype).reshape(*x.shape[:2], -1)
    else:
        y = product("btm,mn->btn", x, kernel, x.dtype)
    return y if bias is None else y + bias.astype(x.dtype)[None, None]
