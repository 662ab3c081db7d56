"""Ensembles: several models whose probabilities are averaged at each step of a search."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from t2t_jax.model.transformer import Transformer


class Ensemble(NamedTuple):
    """One model, or several with the same vocabulary whose probabilities are averaged."""

    modules: tuple[Transformer, ...]
    params: tuple[Any, ...]


def average_probabilities(logits: Sequence[Float[Array, "*n vocab"]]) -> Float[Array, "*n vocab"]:
    """The logits of an ensemble: the logarithm of the mean of its members' probabilities."""
    if len(logits) == 1:
        return logits[0]
    log_probs = jnp.stack([jax.nn.log_softmax(x) for x in logits])
    return jax.nn.logsumexp(log_probs, axis=0) - jnp.log(len(logits))
