"""Ensembles: several models whose probabilities are averaged at each step of a search."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from t2t_jax import sharding
from t2t_jax.model.decoding_matrix import DecodingMatrix, for_decoding
from t2t_jax.model.platform import platform
from t2t_jax.model.transformer import Transformer, param_shapes


class Ensemble(NamedTuple):
    """One model, or several with the same vocabulary whose probabilities are averaged."""

    modules: tuple[Transformer, ...]
    params: tuple[Any, ...]


DTYPES = ("float32", "bfloat16", "int8")


def computing_in(dtype: str, model: Transformer) -> Transformer:
    """The model that decodes in one of `DTYPES`; with int8, all but the matrix products is computed in float32."""
    int8 = dtype == "int8"
    return dataclasses.replace(model, dtype=jnp.dtype("float32" if int8 else dtype), int8=int8)


def as_computed(module: Transformer, params: Any) -> Any:
    """The parameters in the dtype of the computation and, on CPU, in the layout that is fastest to decode with.

    The parameters of another translator's ensemble may be so already.
    """
    quantized = lambda x: isinstance(x, DecodingMatrix) and x.scale is not None
    in_dtype = lambda x: x if quantized(x) else jnp.asarray(x, module.dtype)
    params = jax.tree.map(in_dtype, params, is_leaf=quantized)
    return for_decoding(params, int8=module.int8) if module.int8 or platform() == "cpu" else params


def computed_shapes(modules: Sequence[Transformer], mesh: Mesh) -> tuple[Any, ...]:
    """The shapes of the parameters `as_computed`, on every device."""
    shapes = tuple(jax.eval_shape(functools.partial(as_computed, module), param_shapes(module)) for module in modules)
    return sharding.shapes_of(shapes, sharding.replicated(mesh))


def average_probabilities(logits: Sequence[Float[Array, "*n vocab"]]) -> Float[Array, "*n vocab"]:
    """The logits of an ensemble: the logarithm of the mean of its members' probabilities."""
    if len(logits) == 1:
        return logits[0]
    return jax.nn.logmeanexp(jnp.stack([jax.nn.log_softmax(x) for x in logits]), axis=0)
