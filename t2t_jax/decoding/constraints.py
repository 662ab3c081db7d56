"""Constrained decoding by logits processors, on log-probabilities.

A logits processor is called at every step with the log-probabilities of the next token `[B, W, vocab]` and the tokens
of each hypothesis so far `[B, W, T]`, of which only the first `lengths` `[B]` are valid. It returns new
log-probabilities: −∞ for a forbidden token, a larger value for a wanted one. The scores include what it adds. JAX
traces it, so it must not use Python `if` on array values. To forbid a token:

    def forbid(log_probs, tokens, lengths):
        return log_probs.at[..., forbidden_id].set(-jnp.inf)

    translator.translate(sentences, constraint=Constraint(forbid, largest_bonus=0.0))

One that depends on the source sentence is a `Constraint` with `features`.
"""

import dataclasses
import numbers
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from t2t_jax.data.tokenizer import EOS
from t2t_jax.errors import InputError, shown

LogitsProcessor = Callable[
    [Float[Array, "B W vocab"], Int[Array, "B W T"], Int[Array, " B"]], Float[Array, "B W vocab"]
]


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A logits processor, and the most (in nats) that it ever adds to a log-probability: 0 if it only forbids tokens.

    Beam search needs this bound to stop early; with a bare function it runs to the length limit.

    `features(sentence)` are a fixed number of integers that the function needs to know of a source sentence, as the
    model reads it. It is then also given `features` `[B, F]` and `max_lengths` `[B]`, the limits in tokens with EOS.
    """

    function: Callable[..., Float[Array, "B W vocab"]]
    largest_bonus: float
    features: Callable[[str], Sequence[int]] | None = None

    def __post_init__(self):
        if not callable(self.function):
            raise InputError(f"constraint must be a function, bare or in a Constraint; got {shown(self.function)}")
        if not (self.features is None or callable(self.features)):
            raise InputError(f"features must be a function of a sentence; got {shown(self.features)}")
        is_number = isinstance(self.largest_bonus, numbers.Real) or getattr(self.largest_bonus, "shape", None) == ()
        if not is_number or not self.largest_bonus >= 0:
            raise InputError(f"largest_bonus must be a number of at least 0; got {shown(self.largest_bonus)}")

    def __call__(self, log_probs: Array, *arguments: Array, **of_sentences: Array) -> Array:
        changed = self.function(log_probs, *arguments, **of_sentences)
        found = getattr(changed, "shape", None)
        if found != log_probs.shape:  # with fewer tokens or hypotheses, the search would go on among others
            raise InputError(f"constraint: must return the log-probabilities, of shape {log_probs.shape}; got {found}")
        return changed


def forbid_early_eos(min_length: int) -> Constraint:
    """Forbids EOS before token `min_length`."""

    def process(log_probs, tokens, lengths):
        del tokens
        is_too_short = (lengths + 1 < min_length)[:, None, None]
        return jnp.where(is_too_short & (_vocabulary(log_probs) == EOS), -jnp.inf, log_probs)

    return Constraint(process, largest_bonus=0.0)


def force_prefix(prefixes: Int[Array, "B P"], model_log_probs: Float[Array, "B W vocab"]) -> Constraint:
    """Forces each sentence to begin with its prefix, padded with 0, whatever the processors before this one forbid.

    Forced tokens have the model's log-probability.
    """

    def process(log_probs, tokens, lengths):
        del tokens
        last = prefixes.shape[1] - 1
        forced = jnp.take_along_axis(prefixes, jnp.minimum(lengths, last)[:, None], axis=1)[:, :, None]  # [B, 1, 1]
        is_forced = (lengths[:, None, None] <= last) & (forced != 0)
        only_forced = jnp.where(_vocabulary(log_probs) == forced, model_log_probs, -jnp.inf)
        return jnp.where(is_forced, only_forced, log_probs)

    return Constraint(process, largest_bonus=0.0)


def no_repeated_ngram(n: int) -> Constraint:
    """Blocks repeated n-grams: forbids tokens that would complete an n-gram the hypothesis already contains."""

    def process(log_probs, tokens, lengths):
        starts = jnp.arange(tokens.shape[2])[None]
        # repeats[b, w, i]: tokens[i : i + n - 1] equal the last n − 1 tokens, and a token follows them.
        repeats = (starts + n <= lengths[:, None])[:, None]
        for offset in range(n - 1):
            last = jnp.maximum(lengths - (n - 1) + offset, 0)[:, None, None]  # [B, 1, 1]
            repeats &= jnp.roll(tokens, -offset, axis=2) == jnp.take_along_axis(tokens, last, axis=2)
        followers = jnp.where(repeats, jnp.roll(tokens, -(n - 1), axis=2), log_probs.shape[-1])
        rows, hypotheses = jnp.indices(tokens.shape[:2])
        return log_probs.at[rows[..., None], hypotheses[..., None], followers].set(-jnp.inf, mode="drop")

    return Constraint(process, largest_bonus=0.0)


def _vocabulary(log_probs: Float[Array, "B W vocab"]) -> Int[Array, "1 1 vocab"]:
    """All token ids."""
    return jnp.arange(log_probs.shape[-1])[None, None]
