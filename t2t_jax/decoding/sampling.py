"""Sampling the next token: temperature, top-k and nucleus (top-p) sampling."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from t2t_jax.decoding.top_k import sorted_top_k
from t2t_jax.decoding.traced_fields import traced_fields
from t2t_jax.validation import Range, check_ranges

# Far smaller temperatures and probabilities overflow or underflow in float32.
_RANGES = {
    "temperature": Range(1e-3, hint="for the most likely token use beam_size=1"),
    "top_k": Range(0, 2**31 - 1, hint="0: all tokens"),
    "top_p": Range(1e-6, 1, hint="1: all tokens"),
}


@traced_fields("temperature")  # not `top_p`: only below 1 does the program look for a nucleus
@dataclasses.dataclass(frozen=True)
class Sampling:
    """The distribution to sample from: p^(1/temperature), restricted to the `top_k` most likely tokens (0: all), and of
    these to the fewest whose probabilities sum to at least `top_p`. Checks itself.

    The samples of a sentence are independent, so that some may be equal. For the most likely token use `beam_size=1`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        check_ranges(_RANGES, self)


def sample(
    log_probs: Float[Array, "B W vocab"], sampling: Sampling, seeds: Int[Array, " B"], lengths: Int[Array, " B"]
) -> Int[Array, "B W"]:
    """One token for each hypothesis: a pure function of the log-probabilities, the sentence's seed and the position."""
    kept = top_k_top_p_filter(log_probs / sampling.temperature, sampling.top_k, sampling.top_p)
    key = lambda seed, length: jax.random.fold_in(jax.random.key(seed), length)
    return jax.vmap(lambda seed, length, row: jax.random.categorical(key(seed, length), row))(seeds, lengths, kept)


def top_k_top_p_filter(logits: Float[Array, "B W vocab"], top_k: int, top_p: float) -> Float[Array, "B W vocab"]:
    """Keeps the `top_k` most likely tokens (0: all), and of these the nucleus of `top_p`; others become −∞."""
    if 0 < top_k < logits.shape[-1]:
        smallest = sorted_top_k(logits, top_k)[0].min(axis=-1, keepdims=True)
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    if top_p < 1:
        logits = jnp.where(logits >= _nucleus_threshold(logits, top_p), logits, -jnp.inf)
    return logits


def _nucleus_threshold(logits: Float[Array, "B W vocab"], top_p: float) -> Float[Array, "B W 1"]:
    """The logit of the least likely token in the nucleus: the fewest tokens whose probabilities sum to `top_p`.

    Found by bisection on the log-probability, because sorting the vocabulary is slow. 50 halvings narrow the interval
    to less than the spacing of float32 numbers.
    """
    log_probs = jax.nn.log_softmax(logits)
    highest = log_probs.max(axis=-1, keepdims=True)

    def halve(_, interval):
        low, high = interval  # tokens above `low` have enough probability, those above `high` too little
        middle = (low + high) / 2
        mass = jnp.where(log_probs >= middle, jnp.exp(log_probs), 0).sum(axis=-1, keepdims=True)
        enough = mass >= top_p
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low, _ = jax.lax.fori_loop(0, 50, halve, (highest - 100.0, highest + 1e-3))
    return jnp.where(log_probs >= low, logits, jnp.inf).min(axis=-1, keepdims=True)
