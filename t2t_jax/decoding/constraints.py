"""What a hypothesis may say next: logits processors, functions that change log-probabilities during the search.

A constraint is called at every step with the log-probabilities of the next token `[B, W, vocab]`, the tokens said so
far `[B, W, T]`, of which `lengths` `[B]` count, and returns the log-probabilities to go on with: −∞ for what is
forbidden, more for what is wanted. Whatever it adds counts in the scores. It is traced by JAX: no Python `if` on
values. To forbid a token:

    def never_say(log_probs, tokens, lengths):
        return log_probs.at[..., forbidden_id].set(-jnp.inf)

    translator.translate(sentences, constraint=Constraint(never_say, largest_bonus=0.0))
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from t2t_jax.errors import InputError

Function = Callable[
    [Float[Array, "B W vocab"], Int[Array, "B W T"], Int[Array, " B"]],
    Float[Array, "B W vocab"],
]


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A function with the most, in nats, by which it ever raises the log-probability of a token: 0 if it only forbids.

    Beam search needs to know, to stop before the limit; with a bare function it goes on to the limit.
    """

    function: Function
    largest_bonus: float

    def __post_init__(self):
        if not self.largest_bonus >= 0:
            raise InputError(f"largest_bonus must be at least 0; got {self.largest_bonus}")

    def __call__(self, *arguments: Array) -> Array:
        return self.function(*arguments)


def at_least(min_length: int, eos: int) -> Constraint:
    """No EOS before token `min_length`."""

    def constrain(log_probs, tokens, lengths):
        del tokens
        too_short = (lengths + 1 < min_length)[:, None, None]
        return jnp.where(too_short & (_tokens_of(log_probs) == eos), -jnp.inf, log_probs)

    return Constraint(constrain, largest_bonus=0.0)


def force_prefix(prefixes: Int[Array, "B P"]) -> Constraint:
    """Each sentence begins with its prefix, which is padded with 0; its tokens count with their own probability."""

    def constrain(log_probs, tokens, lengths):
        del tokens
        last = prefixes.shape[1] - 1
        due = jnp.take_along_axis(prefixes, jnp.minimum(lengths, last)[:, None], axis=1)[:, :, None]  # [B, 1, 1]
        is_due = (lengths[:, None, None] <= last) & (due != 0)
        return jnp.where(is_due & (_tokens_of(log_probs) != due), -jnp.inf, log_probs)

    return Constraint(constrain, largest_bonus=0.0)


def no_repeated_ngram(n: int) -> Constraint:
    """No `n` tokens in a row that the hypothesis already has."""

    def constrain(log_probs, tokens, lengths):
        starts = jnp.arange(tokens.shape[2])[None]
        # repeats[b, w, i]: tokens[i : i + n - 1] are the last n − 1 ones, and a token has followed them.
        repeats = (starts + n <= lengths[:, None])[:, None]
        for offset in range(n - 1):
            last = jnp.maximum(lengths - (n - 1) + offset, 0)[:, None, None]  # [B, 1, 1]
            repeats &= jnp.roll(tokens, -offset, axis=2) == jnp.take_along_axis(tokens, last, axis=2)
        followers = jnp.where(repeats, jnp.roll(tokens, -(n - 1), axis=2), log_probs.shape[-1])
        rows, hypotheses = jnp.indices(tokens.shape[:2])
        return log_probs.at[rows[..., None], hypotheses[..., None], followers].set(-jnp.inf, mode="drop")

    return Constraint(constrain, largest_bonus=0.0)


def _tokens_of(log_probs: Float[Array, "B W vocab"]) -> Int[Array, "1 1 vocab"]:
    return jnp.arange(log_probs.shape[-1])[None, None]
