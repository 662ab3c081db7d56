"""§5.4: label-smoothed cross-entropy."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(
    logits: Float[Array, "B T vocab"], targets: Int[Array, "B T"], label_smoothing: float
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """(smoothed loss, unsmoothed negative log-likelihood, tokens): sums in nats over the non-padding targets.

    The smoothed target has 1 − ε on the true id and ε/(vocab − 1) on every other one. It is never formed: with
    −log p_k = lse − z_k, the cross-entropy with it needs only the true logit and the sum of all.
    """
    others = label_smoothing / (logits.shape[-1] - 1)
    lse = jax.nn.logsumexp(logits, axis=-1)
    true_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    smoothed = lse - (1 - label_smoothing) * true_logit - others * (logits.sum(axis=-1) - true_logit)
    weights = (targets != 0).astype(jnp.float32)
    return jnp.sum(weights * smoothed), jnp.sum(weights * (lse - true_logit)), jnp.sum(weights)
