"""The matrices of a model as decoding on CPUs stores them: transposed, and in int8 if asked.

Decoding multiplies a large matrix W by few rows x. XLA on CPU rearranges the second factor of a product in memory
before it multiplies; as (Wᵀ xᵀ)ᵀ, that is x.

int8 is dynamic quantization, symmetric, of the whole numbers −127 to 127: x W ≈ s_x s_W · (q_x q_W). The matrix is
quantized once, with a scale s_W for each column; x at each product, with a scale s_x for each row, so that no row
depends on another.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

# The kernels by name, with the number of axes of their inputs, which come first.
_INPUT_AXES = {"kernel": 1, "query_kernel": 1, "key_kernel": 1, "value_kernel": 1, "output_kernel": 2}
_MOST_ROWS = 128  # more are faster as x W


class DecodingMatrix(NamedTuple):
    """A matrix of M inputs and N outputs, transposed: `values`, times the `scale` of the output if it is quantized."""

    values: Float[Array, "N M"] | Int8[Array, "N M"]
    scale: Float[Array, " N"] | None = None

    def rows(self, ids: Int[Array, "*n"]) -> Float[Array, "*n M"]:
        """Rows of a quantized embedding."""
        return self.values[ids].astype(self.scale.dtype) * self.scale[ids][..., None]


def kernel_param(
    module: nn.Module, name: str, init: Callable[..., Array], shape: tuple[int, ...]
) -> Float[Array, "M N"] | DecodingMatrix:
    """A kernel of a module as a matrix, or the DecodingMatrix in its place."""
    stored = module.get_variable("params", name)
    return stored if isinstance(stored, DecodingMatrix) else _matrix(module.param(name, init, shape), _INPUT_AXES[name])


def _matrix(kernel, input_axes):
    return kernel.reshape(math.prod(kernel.shape[:input_axes]), -1)


def for_decoding(params: Any, *, int8: bool) -> Any:
    """The parameters of a model, each kernel, and in int8 each embedding, a DecodingMatrix; the others as they are."""

    def stored(path, x):
        if isinstance(x, DecodingMatrix):
            return _quantized(x.values) if int8 and x.scale is None else x
        *modules, name = (key.key for key in path)
        if any(module.endswith("positions") for module in modules):
            return x
        if name in _INPUT_AXES:
            return _transposed(x, _INPUT_AXES[name], int8)
        return _quantized(x) if int8 and name == "table" else x

    return jax.tree_util.tree_map_with_path(stored, params, is_leaf=lambda x: isinstance(x, DecodingMatrix))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _transposed(kernel, input_axes, int8):
    matrix = _matrix(kernel, input_axes).T
    return _quantized(matrix) if int8 else DecodingMatrix(matrix)


@jax.jit
def _quantized(matrix: Float[Array, "N M"]) -> DecodingMatrix:
    values, scale = _rounded(matrix)
    return DecodingMatrix(values, scale.ravel())


def _rounded(x):
    """x ≈ values · scale, along the last axis the same scale."""
    scale = jnp.abs(x).max(-1, keepdims=True) / 127
    return jnp.round(x / jnp.where(scale == 0, 1, scale)).astype(jnp.int8), scale


def product(x: Float[Array, "B T M"], matrix: DecodingMatrix, *, outputs_first: bool = False) -> Float[Array, "B T N"]:
    """x · matrix, in float32; in memory the N outputs come first if `outputs_first`, or if there are few rows."""
    rows = x.reshape(-1, x.shape[-1])
    outputs_first |= len(rows) <= _MOST_ROWS
    if matrix.scale is None:
        y = _multiply(rows, matrix.values, jnp.float32, outputs_first)
    else:
        rows, scale = _rounded(rows)
        scales = scale.T * matrix.scale[:, None] if outputs_first else scale * matrix.scale[None]
        y = _multiply(rows, matrix.values, jnp.int32, outputs_first) * scales
    if outputs_first:
        return jnp.moveaxis(y.reshape(-1, *x.shape[:2]), 0, -1)
    return y.reshape(*x.shape[:2], -1)


def _multiply(rows, matrix, dtype, outputs_first):
    """matrix · rowsᵀ [N, R] or its transpose."""
    if not outputs_first:
        return jnp.einsum("rm,nm->rn", rows, matrix, preferred_element_type=dtype)
    count = len(rows)
    if count == 1 and rows.dtype != jnp.float32:  # for which XLA on CPU has no fast kernel
        rows = jnp.concatenate([rows, rows])
    return jnp.einsum("nm,rm->nr", matrix, rows, preferred_element_type=dtype)[:, :count]
