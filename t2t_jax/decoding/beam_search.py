"""§6.1: beam search over any step function.

The search knows no model: it calls `step(tokens, cache)` for the logits of the next token of every hypothesis,
and `reorder(cache, parents)` when hypotheses have become continuations of others. `W` is the beam width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Cache = Any
Step = Callable[[Int[Array, "B W"], Cache], tuple[Float[Array, "B W vocab"], Cache]]
Reorder = Callable[[Cache, Int[Array, "B W"]], Cache]

NEVER = -jnp.inf  # the score of a hypothesis that does not exist


class Hypotheses(NamedTuple):
    """W hypotheses of each of B sentences, best first.

    `tokens` are padded with 0 and hold EOS where `finished`; `lengths` counts them, EOS included; `log_probs` is
    the sum of `token_log_probs`; `scores` is `log_probs` over the length penalty, −∞ where there is no hypothesis.
    """

    tokens: Int[Array, "B W T"]
    token_log_probs: Float[Array, "B W T"]
    lengths: Int[Array, "B W"]
    log_probs: Float[Array, "B W"]
    scores: Float[Array, "B W"]
    finished: Bool[Array, "B W"]


def length_penalty(length: Int[Array, "*n"], alpha: float) -> Float[Array, "*n"]:
    """((5 + |Y|) / 6)^α, |Y| counting EOS (GNMT)."""
    return ((5.0 + length) / 6.0) ** alpha


def gather_hypotheses(tree: Any, parents: Int[Array, "B W"]) -> Any:
    """Leaves [B, W', …] → [B, W, …]: hypothesis w of each sentence becomes hypothesis `parents[:, w]`."""

    def gather(x):
        return jnp.take_along_axis(x, parents.reshape(*parents.shape, *(1,) * (x.ndim - 2)), axis=1)

    return jax.tree.map(gather, tree)


def beam_search(
    step: Step,
    cache: Cache,
    max_lengths: Int[Array, " B"],
    *,
    beam_size: int,
    alpha: float,
    n_best: int,
    max_steps: int,
    eos: int = 1,
    reorder: Reorder = gather_hypotheses,
) -> Hypotheses:
    """The `n_best` best finished hypotheses of each sentence, of at most `max_lengths` tokens with EOS.

    Each step takes the 2·W likeliest continuations (the likeliest alone where W = 1: greedy search): the best W
    that do not end stay alive, those that end compete for the `n_best` places by `scores`.

    A sentence stops when it reaches its limit, or when not even its likeliest alive hypothesis, ending at the limit
    at no further cost, could beat the worst of `n_best` finished ones: log-probabilities only fall and the penalty
    only grows, so stopping never changes the answer (`alpha` ≥ 0). A sentence of which nothing finished returns its
    alive hypotheses, whole. The answer for a sentence does not depend on the others in the batch. `max_steps` is
    the static bound of `max_lengths`.
    """
    batch = max_lengths.shape[0]
    alive = _no_hypotheses(batch, beam_size, max_steps)
    alive = alive._replace(log_probs=alive.log_probs.at[:, 0].set(0.0))  # one way to have said nothing yet
    best = _no_hypotheses(batch, n_best, max_steps)
    last_tokens = jnp.zeros((batch, beam_size), jnp.int32)
    running = max_lengths > 0
    candidates = 2 * beam_size if beam_size > 1 else 1

    def grow(loop):
        index, last_tokens, alive, best, running, cache = loop
        logits, cache = step(last_tokens, cache)
        token_log_probs = jax.nn.log_softmax(logits)
        parents, tokens, token_log_probs = _likeliest(alive.log_probs, token_log_probs, candidates)
        grown = _append(gather_hypotheses(alive, parents), index, tokens, token_log_probs, alpha)
        ends = tokens == eos

        ended = grown._replace(scores=jnp.where(ends & running[:, None], grown.scores, NEVER), finished=ends)
        both = _concatenate(best, ended)
        best = gather_hypotheses(both, _top_k(both.scores, n_best))

        # Of 2·W continuations at most W end, one for each hypothesis, so W remain (or none, in greedy search).
        grown = grown._replace(log_probs=jnp.where(ends, NEVER, grown.log_probs))
        order = _top_k(grown.log_probs, beam_size)
        grown, parents, last_tokens = gather_hypotheses((grown, parents, tokens), order)
        alive = _where(running, grown, alive)
        bound = alive.log_probs[:, 0] / length_penalty(max_lengths, alpha)
        running &= (index + 1 < max_lengths) & (bound > best.scores[:, -1])
        return index + 1, last_tokens, alive, best, running, reorder(cache, parents)

    def any_running(loop):
        *_, running, _ = loop
        return running.any()

    loop = (jnp.zeros((), jnp.int32), last_tokens, alive, best, running, cache)
    _, _, alive, best, _, _ = jax.lax.while_loop(any_running, grow, loop)
    any_finished = best.scores[:, 0] > NEVER
    return _where(any_finished, best, jax.tree.map(lambda x: x[:, :n_best], alive))


def _no_hypotheses(batch: int, width: int, max_steps: int) -> Hypotheses:
    return Hypotheses(
        tokens=jnp.zeros((batch, width, max_steps), jnp.int32),
        token_log_probs=jnp.zeros((batch, width, max_steps)),
        lengths=jnp.zeros((batch, width), jnp.int32),
        log_probs=jnp.full((batch, width), NEVER),
        scores=jnp.full((batch, width), NEVER),
        finished=jnp.zeros((batch, width), bool),
    )


def _likeliest(
    log_probs: Float[Array, "B W"], token_log_probs: Float[Array, "B W vocab"], count: int
) -> tuple[Int[Array, "B N"], Int[Array, "B N"], Float[Array, "B N"]]:
    """The `count` likeliest continuations of each sentence: their hypothesis, their token, and its log-probability."""
    total = (log_probs[:, :, None] + token_log_probs).reshape(len(log_probs), -1)  # [B, W·vocab]
    chosen = _top_k(total, min(count, total.shape[1]))
    parents, tokens = jnp.divmod(chosen, token_log_probs.shape[-1])
    flat = token_log_probs.reshape(total.shape)
    return parents, tokens, jnp.take_along_axis(flat, chosen, axis=1)


def _append(
    hypotheses: Hypotheses,
    index: Int[Array, ""],
    tokens: Int[Array, "B N"],
    token_log_probs: Float[Array, "B N"],
    alpha: float,
) -> Hypotheses:
    lengths = jnp.full_like(hypotheses.lengths, index + 1)
    log_probs = hypotheses.log_probs + token_log_probs
    return hypotheses._replace(
        tokens=hypotheses.tokens.at[:, :, index].set(tokens),
        token_log_probs=hypotheses.token_log_probs.at[:, :, index].set(token_log_probs),
        lengths=lengths,
        log_probs=log_probs,
        scores=log_probs / length_penalty(lengths, alpha),
    )


def _top_k(values: Float[Array, "B N"], count: int) -> Int[Array, "B K"]:
    """Where the `count` largest values of each row are, largest first; of equal ones the first."""
    return jax.lax.top_k(values, count)[1]


def _concatenate(first: Hypotheses, second: Hypotheses) -> Hypotheses:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), first, second)


def _where(condition: Bool[Array, " B"], first: Hypotheses, second: Hypotheses) -> Hypotheses:
    """For each sentence, `first` where the condition holds, else `second`."""
    return jax.tree.map(lambda a, b: jnp.where(condition.reshape(-1, *(1,) * (a.ndim - 1)), a, b), first, second)
