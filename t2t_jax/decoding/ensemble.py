"""Ensembles: several models whose probabilities are averaged at each step of a search."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from t2t_jax import sharding
from t2t_jax.model.transformer import Transformer, param_shapes


class Ensemble(NamedTuple):
    """One model, or several with the same vocabulary whose probabilities are averaged."""

    modules: tuple[Transformer, ...]
    params: tuple[Any, ...]


def as_computed(module: Transformer, params: Any) -> Any:
    """The parameters in the dtype of the computation, so that no step converts them."""
    return jax.tree.map(lambda x: jnp.asarray(x, module.dtype), params)


def computed_shapes(modules: Sequence[Transformer], mesh: Mesh) -> tuple[Any, ...]:
    """The shapes of the parameters `as_computed`, on every device."""
    shapes = tuple(jax.eval_shape(functools.partial(as_computed, module), param_shapes(module)) for module in modules)
    return sharding.shapes_of(shapes, sharding.replicated(mesh))


def average_probabilities(logits: Sequence[Float[Array, "*n vocab"]]) -> Float[Array, "*n vocab"]:
    """The logits of an ensemble: the logarithm of the mean of its members' probabilities."""
    if len(logits) == 1:
        return logits[0]
    log_probs = jnp.stack([jax.nn.log_softmax(x) for x in logits])
    return jax.nn.logsumexp(log_probs, axis=0) - jnp.log(len(logits))
