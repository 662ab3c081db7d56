"""Matrix products in int8, for decoding on CPUs: dynamic quantization, symmetric, of the whole numbers −127 to 127.

x W ≈ s_x s_W · (q_x q_W). The matrix is quantized once, with a scale s_W for each column; x at each product, with a
scale s_x for each row, so that no row depends on another. The sums of whole numbers are exact.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

# The parameters that are matrices, by name: the axes that their products sum over.
_SUMMED = {"kernel": 0, "query_kernel": 0, "key_kernel": 0, "value_kernel": 0, "output_kernel": (0, 1), "table": 1}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix of M inputs and N outputs: `values` times the `scale` of its output."""

    values: Int8[Array, "..."]  # in the shape of the parameter
    scale: Float[Array, " N"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def reshape(self, *shape: int) -> "QuantizedMatrix":
        return QuantizedMatrix(self.values.reshape(*shape), self.scale)

    def rows(self, ids: Int[Array, "*n"]) -> Float[Array, "*n M"]:
        """Rows of `values` [N, M], those of an embedding."""
        return self.values[ids].astype(self.scale.dtype) * self.scale[ids][..., None]


def quantize(params: Any) -> Any:
    """The parameters of a model, each matrix a QuantizedMatrix; biases, layer norms and positions as they are."""

    def quantized(path, x):
        *modules, name = (key.key for key in path)
        is_matrix = name in _SUMMED and not any(module.endswith("positions") for module in modules)
        return _quantized(x, _SUMMED[name]) if is_matrix else x

    return jax.tree_util.tree_map_with_path(quantized, params)


@functools.partial(jax.jit, static_argnums=1)
def _quantized(matrix: Float[Array, "..."], summed: int | tuple[int, ...]) -> QuantizedMatrix:
    values, scale = _rounded(matrix, summed)
    return QuantizedMatrix(values, scale.ravel())


def _rounded(x, axis):
    """x ≈ values · scale, along these axes the same scale."""
    scale = jnp.abs(x).max(axis, keepdims=True) / 127
    return jnp.round(x / jnp.where(scale == 0, 1, scale)).astype(jnp.int8), scale


def dense_int8(x: Float[Array, "B T M"], matrix: QuantizedMatrix, *, transposed: bool = False) -> Float[Array, "B T N"]:
    """x · matrix in x's dtype. Its `values` are [M, N], or [N, M] if `transposed`, as those of an embedding are."""
    rows, scale = _rounded(x.reshape(-1, x.shape[-1]), 1)
    count = len(rows)
    if count == 1:  # for which XLA on CPU has no fast kernel
        rows = jnp.concatenate([rows, rows])
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.int32)
    if transposed:
        # As (matrix · xᵀ)ᵀ: a search needs the outputs first, and for few rows the product is faster. It is scaled
        # before it is transposed, as XLA would turn a product that is transposed at once back into x · matrixᵀ.
        sums = product("nm,rm->nr", matrix.values, rows)[:, :count]
        y = sums.astype(x.dtype) * scale.T * matrix.scale[:, None]
        return jnp.moveaxis(y.reshape(-1, *x.shape[:2]), 0, -1)
    sums = product("rm,mn->rn", rows, matrix.values)[:count]
    return (sums.astype(x.dtype) * scale * matrix.scale[None]).reshape(*x.shape[:2], -1)
