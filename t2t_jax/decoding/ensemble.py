"""Ensembles: several models whose probabilities are averaged at each step of a search."""

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


def computed_shapes(modules: Sequence[Transformer], mesh: Mesh) -> tuple[Any, ...]:
    """The parameters' shapes, on every device, in the dtype of the computation."""
    as_computed = lambda module: jax.tree.map(lambda x: x.update(dtype=module.dtype), param_shapes(module))
    return sharding.shapes_of(tuple(map(as_computed, modules)), sharding.replicated(mesh))


def average_probabilities(logits: Sequence[Float[Array, "*n vocab"]]) -> Float[Array, "*n vocab"]:
    """The logits of an ensemble: the logarithm of the mean of its members' probabilities."""
    if len(logits) == 1:
        return logits[0]
    log_probs = jnp.stack([jax.nn.log_softmax(x) for x in logits])
    return jax.nn.logsumexp(log_probs, axis=0) - jnp.log(len(logits))
