"""§6.1: greedy search, beam search, diverse beam search and sampling over any step function.

The search does not depend on the model: `step(tokens, positions, cache)` returns the logits of each hypothesis's next
token, and `reorder(cache, parents)` the cache after hypotheses have become continuations of others. `W` is the beam
width.

`beam_search` searches a whole batch. Its parts serve continuous batching: `advance` takes steps, `results` returns the
hypotheses; what starts, joins and resizes the state of a search is in search_state.py.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from t2t_jax.data.tokenizer import EOS
from t2t_jax.decoding import constraints
from t2t_jax.decoding.sampling import Sampling, sample
from t2t_jax.decoding.search_options import SearchOptions
from t2t_jax.decoding.search_state import (
    NEG_INF,
    Hypotheses,
    Search,
    append_tokens,
    gather_hypotheses,
    length_penalty,
    start,
    where_rows,
)
from t2t_jax.decoding.top_k import log_sum_exp, top_k, top_tokens

Cache = Any
Step = Callable[[Int[Array, "B W"], Int[Array, " B"], Cache], tuple[Float[Array, "B W vocab"], Cache]]
Reorder = Callable[[Cache, Int[Array, "B W"]], Cache]


def beam_search(
    step: Step,
    cache: Cache,
    max_lengths: Int[Array, " B"],
    options: SearchOptions,
    *,
    max_steps: int,
    prefixes: Int[Array, "B P"] | None = None,
    seeds: Int[Array, " B"] | None = None,
    features: Int[Array, "B F"] | None = None,
    reorder: Reorder = gather_hypotheses,
) -> Hypotheses:
    """The `options.n_best` best finished hypotheses of each sentence, of at most `max_lengths` tokens with EOS.

    Each step considers the 2·W most likely continuations; if W = 1, only the most likely one (greedy search). Of those
    that do not end with EOS, the best W stay alive. Those that do are finished, and the `n_best` by `scores` are kept.

    A sentence stops at its length limit, or earlier once no alive hypothesis can still enter the `n_best`, even if all
    further tokens had probability 1 and the constraint's largest bonus (`_upper_bound`). So stopping early never
    changes the result, unless `options.early_stop` is another rule than 'exact'. At the length limit, alive hypotheses
    follow those that have finished, if these are fewer than `n_best`. The result for a sentence does not depend on the
    other sentences in the batch. `max_steps` is a static upper bound of `max_lengths`.
    """
    search = start(max_lengths, options, max_steps, prefixes, seeds, features)
    search, _ = advance(step, reorder, search, cache, options, max_steps=max_steps, min_running=1)
    return results(search, options)


def advance(
    step: Step,
    reorder: Reorder,
    search: Search,
    cache: Cache,
    options: SearchOptions,
    *,
    max_steps: int | Int[Array, ""],
    min_running: int | Int[Array, ""],
) -> tuple[Search, Cache]:
    """Takes up to `max_steps` steps, while at least `min_running` sentences are still running."""

    def body(carry):
        count, search, cache = carry
        logits, cache = step(search.last_tokens, search.lengths, cache)
        search, parents = _extend(search, logits, options)
        return count + 1, search, reorder(cache, parents)

    def condition(carry):
        count, search, _ = carry
        return (count < max_steps) & (search.running.sum() >= min_running)

    _, search, cache = jax.lax.while_loop(condition, body, (jnp.zeros((), jnp.int32), search, cache))
    return search, cache


def results(search: Search, options: SearchOptions) -> Hypotheses:
    """The `n_best` best hypotheses of each sentence, those that have finished before those still alive."""

    def n_best(hypotheses, exists):
        scores = hypotheses.log_probs / length_penalty(hypotheses.lengths, options.alpha)  # no diversity penalties
        scores = jnp.where(exists, scores, NEG_INF)
        return gather_hypotheses(hypotheses._replace(scores=scores), top_k(scores, options.n_best))

    best = n_best(search.best, search.best.scores > NEG_INF)
    alive = n_best(search.alive, search.alive.log_probs != NEG_INF)  # true of NaN, which callers report
    both = _concatenate(best, alive)
    ranks, num_finished = jnp.arange(options.n_best)[None], (best.scores > NEG_INF).sum(axis=1, keepdims=True)
    return gather_hypotheses(both, jnp.where(ranks < num_finished, ranks, options.n_best + ranks - num_finished))


class _NextTokens(NamedTuple):
    """The distribution of each hypothesis's next token: its log-probabilities are `logits` − `log_normaliser`."""

    logits: Float[Array, "vocab B W"]
    log_normaliser: Float[Array, "B W"]

    def of(self, beams: slice) -> "_NextTokens":
        """The same for some of the W hypotheses."""
        return _NextTokens(self.logits[:, :, beams], self.log_normaliser[:, beams])


class _Candidates(NamedTuple):
    """N continuations of each sentence by one token.

    `parents` are the hypotheses they continue. `penalised_log_probs` ranks them: it is the cumulative log-probability
    less the accumulated diversity penalty.
    """

    parents: Int[Array, "B N"]
    tokens: Int[Array, "B N"]
    token_log_probs: Float[Array, "B N"]
    penalised_log_probs: Float[Array, "B N"]


def _extend(
    search: Search, logits: Float[Array, "B W vocab"], options: SearchOptions
) -> tuple[Search, Int[Array, "B W"]]:
    """The search after one more token, and the parent of each hypothesis that is alive then."""
    next_tokens = _next_tokens(search, logits, options)
    # How many hypotheses of earlier groups have chosen each token at this step. Only those that are alive are counted:
    # EOS is never penalised, and a group that has ended does not influence the others.
    counts = jnp.zeros((len(logits), logits.shape[-1]))
    extended, parents = [], []
    for group in range(options.groups):
        members = _group_members(search, group, options)
        distribution = next_tokens.of(_slice(group, options.group_size))
        penalty = options.diversity * counts if group else None
        members, group_parents = _extend_group(members, distribution, penalty, options)
        is_alive = (members.alive.log_probs > NEG_INF).astype(counts.dtype)
        counts = counts.at[jnp.arange(len(counts))[:, None], members.last_tokens].add(is_alive)
        extended.append(members)
        parents.append(group_parents + group * options.group_size)
    return where_rows(search.running, _join_groups(search, extended), search), jnp.concatenate(parents, axis=1)


def _slice(group: int, size: int) -> slice:
    return slice(group * size, (group + 1) * size)


def _group_members(search: Search, group: int, options: SearchOptions) -> Search:
    """One group of hypotheses as a separate search."""
    part = lambda tree, size: jax.tree.map(lambda x: x[:, _slice(group, size)], tree)
    return search._replace(
        alive=part(search.alive, options.group_size),
        penalties=part(search.penalties, options.group_size),
        best=part(search.best, options.finished_per_group),
        num_finished=part(search.num_finished, 1),
    )


def _join_groups(search: Search, groups: list[Search]) -> Search:
    """`search` one step later, from its groups."""
    of_groups = ("alive", "penalties", "best", "last_tokens", "num_finished")
    joined = {name: _concatenate(*(getattr(group, name) for group in groups)) for name in of_groups}
    lengths = search.lengths + 1
    can_improve = functools.reduce(jnp.logical_or, (group.running for group in groups))
    running = search.running & can_improve & (lengths < search.max_lengths)
    return search._replace(lengths=lengths, running=running, **joined)


def _concatenate(*trees: Any) -> Any:
    """One tree with the hypotheses of all, of each sentence in this order."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *trees)


def _extend_group(
    search: Search, next_tokens: _NextTokens, penalty: Float[Array, "B vocab"] | None, options: SearchOptions
) -> tuple[Search, Int[Array, "B W"]]:
    """`_extend` for one group; `running` is True where further steps can still change its result."""
    alive, best, lengths = search.alive, search.best, search.lengths
    if options.sampling:
        candidates = _sampled_candidates(jnp.moveaxis(next_tokens.logits, 0, -1), options.sampling, search)
    else:
        may_end = lengths + 1 >= options.min_length
        candidates = _top_candidates(alive.log_probs - search.penalties, next_tokens, penalty, may_end)
    parents, tokens, token_log_probs, penalised = candidates
    extended = append_tokens(gather_hypotheses(alive, parents), lengths, tokens, token_log_probs)
    is_eos = tokens == EOS
    # A sample that reaches the limit is a result; in beam search it is one only where nothing has finished.
    ends = is_eos | (lengths + 1 >= search.max_lengths)[:, None] if options.sampling else is_eos

    ended_scores = penalised / length_penalty(extended.lengths, options.alpha)
    ended = extended._replace(scores=jnp.where(ends, ended_scores, NEG_INF), finished=is_eos)
    both = _concatenate(best, ended)
    best = gather_hypotheses(both, top_k(both.scores, best.scores.shape[1]))

    # Of 2·W continuations at most W end, one for each hypothesis, so W stay alive (in greedy search perhaps none).
    extended = extended._replace(log_probs=jnp.where(ends, NEG_INF, extended.log_probs))
    order = top_k(jnp.where(ends, NEG_INF, penalised), alive.log_probs.shape[1])
    alive, parents, tokens, penalised = gather_hypotheses((extended, parents, tokens, penalised), order)
    exists = alive.log_probs > NEG_INF
    penalties = jnp.where(exists, alive.log_probs - penalised, 0.0)
    finished_in_beam = ended.scores[:, : options.group_size] > NEG_INF
    num_finished = search.num_finished + finished_in_beam.sum(axis=1, keepdims=True)
    search = search._replace(alive=alive, penalties=penalties, best=best, last_tokens=tokens, num_finished=num_finished)
    best_alive = jnp.where(exists, penalised, NEG_INF).max(axis=1)
    return search._replace(running=_can_improve(search, best_alive, options)), parents


def _can_improve(search: Search, best_alive: Float[Array, " B"], options: SearchOptions) -> Bool[Array, " B"]:
    """Whether to go on by the rule `options.early_stop`; `best_alive` is the best penalised log-probability."""
    lengths = search.lengths + 1
    if options.sampling:
        return best_alive > NEG_INF
    if options.early_stop == "best_finished":
        return best_alive / length_penalty(lengths, options.alpha) > search.best.scores[:, -1]
    can_improve = _upper_bound(best_alive, lengths, search.max_lengths, options) > search.best.scores[:, -1]
    if options.early_stop == "beam_full":
        can_improve &= search.num_finished[:, 0] < options.group_size
    return can_improve


def _upper_bound(
    penalised_log_probs: Float[Array, " B"],
    lengths: Int[Array, " B"],
    max_lengths: Int[Array, " B"],
    options: SearchOptions,
) -> Float[Array, " B"]:
    """An upper bound of the score of every continuation of a hypothesis with this log-probability and length.

    Each token adds at most the largest bonus, since its log-probability is at most 0 and diversity penalties only lower
    it. The bound of the sum is divided by the largest possible length penalty if negative, else by the smallest.
    """
    if options.largest_bonus == math.inf:
        return jnp.where(penalised_log_probs > NEG_INF, math.inf, NEG_INF)
    largest = penalised_log_probs + options.largest_bonus * (max_lengths - lengths)
    return largest / length_penalty(jnp.where(largest < 0, max_lengths, lengths + 1), options.alpha)


def _next_tokens(search: Search, logits: Float[Array, "B W vocab"], options: SearchOptions) -> _NextTokens:
    """The distribution of the next tokens after all logits processors.

    Without any, the logits stay unnormalised, and only the few candidates are normalised later.
    """
    processors, has_prefixes = _logits_processors(search, options), search.prefixes.shape[1] > 0
    vocab_first = jnp.moveaxis(logits, -1, 0)
    log_normaliser = log_sum_exp(vocab_first)
    if not (processors or has_prefixes or options.sampling):
        return _NextTokens(vocab_first, log_normaliser)
    log_probs = logits - log_normaliser[..., None]
    if has_prefixes:
        processors.append(constraints.force_prefix(search.prefixes, log_probs))
    for process in processors:
        log_probs = process(log_probs, search.alive.tokens, search.lengths)
    return _NextTokens(jnp.moveaxis(log_probs, -1, 0), jnp.zeros_like(log_normaliser))


def _logits_processors(search: Search, options: SearchOptions) -> list[constraints.LogitsProcessor]:
    processors = [_of_sentences(options.constraint, search)] if options.constraint else []
    if options.no_repeat_ngram:
        processors.append(constraints.no_repeated_ngram(options.no_repeat_ngram))
    if options.min_length and options.sampling:  # beam search drops these candidates (_top_candidates)
        processors.append(constraints.forbid_early_eos(options.min_length))
    return processors


def _of_sentences(constraint: constraints.Constraint, search: Search) -> constraints.LogitsProcessor:
    """The constraint as a function of tokens alone."""
    if constraint.features is None:
        return constraint
    return functools.partial(constraint, max_lengths=search.max_lengths, features=search.features)


def _sampled_candidates(log_probs: Float[Array, "B W vocab"], sampling: Sampling, search: Search) -> _Candidates:
    """One sampled continuation of each hypothesis."""
    tokens = sample(log_probs, sampling, search.seeds, search.lengths)
    token_log_probs = jnp.take_along_axis(log_probs, tokens[..., None], axis=2)[..., 0]
    parents = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    return _Candidates(parents, tokens, token_log_probs, search.alive.log_probs + token_log_probs)


def _top_candidates(
    penalised_log_probs: Float[Array, "B W"],
    next_tokens: _NextTokens,
    penalty: Float[Array, "B vocab"] | None,
    may_end: Bool[Array, " B"],
) -> _Candidates:
    """The 2·W best continuations of hypotheses that have these log-probabilities; one if W = 1.

    The best of a sentence are among the best few of each hypothesis, so that only these are sorted. EOS is left out
    where a sentence `may_end` not yet: here, as leaving it out of the logits would be another pass over them.
    """
    _, batch, width = next_tokens.logits.shape
    count = 2 * width if width > 1 else 1
    wanted = next_tokens.logits if penalty is None else next_tokens.logits - penalty.T[..., None]
    values, tokens = top_tokens(wanted, 2 * width)
    values -= next_tokens.log_normaliser[..., None]  # [B, W, count]: log-probabilities less this step's penalty
    penalised = penalised_log_probs[..., None] + values
    if penalty is not None:
        values += jnp.take_along_axis(penalty, tokens.reshape(batch, -1), axis=1).reshape(tokens.shape)
    penalised = jnp.where((tokens == EOS) & ~may_end[:, None, None], NEG_INF, penalised)
    flat = [x.reshape(batch, -1) for x in (tokens, values, penalised)]
    best = top_k(flat[-1], min(count, flat[-1].shape[1]))
    return _Candidates(best // penalised.shape[-1], *gather_hypotheses(flat, best))
