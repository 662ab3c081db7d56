"""§6.1: beam search over any step function.

The search knows no model: it calls `step(tokens, positions, cache)` for the logits of the next token of every
hypothesis, and `reorder(cache, parents)` when hypotheses have become continuations of others. `W` is the beam width.

`beam_search` is the whole search of a batch. Its parts are for those who replace sentences that have ended by new
ones: `start` makes an empty `Search`, `admit` begins sentences in some of its rows, `advance` takes steps, `results`
reads the answers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from t2t_jax.decoding import constraints
from t2t_jax.decoding.constraints import Constraint
from t2t_jax.decoding.sampling import Sampling, sample
from t2t_jax.errors import InputError, Range, check_ranges

Cache = Any
Step = Callable[[Int[Array, "B W"], Int[Array, " B"], Cache], tuple[Float[Array, "B W vocab"], Cache]]
Reorder = Callable[[Cache, Int[Array, "B W"]], Cache]

NEVER = -jnp.inf  # the score of a hypothesis that does not exist

# Memory grows with the beam width, and the compiled program with the order of the n-grams and the number of groups.
_RANGES = {
    "beam_size": Range(1, 256),
    "alpha": Range(0, 10),
    "n_best": Range(1, 256),
    "min_length": Range(0, 100_000),
    "no_repeat_ngram": Range(0, 100),
    "groups": Range(1, 64),
    "diversity": Range(0),
}


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """What to search for; checks itself.

    `n_best` hypotheses of at least `min_length` tokens, EOS included, in which no `no_repeat_ngram` tokens in a row
    occur twice (0: they may). `groups` divides the beam for diverse beam search: each group prefers, by `diversity`
    for each, tokens that the groups before it have not chosen at the same step. With `sampling`, the hypotheses are
    independent samples, and the beam is as wide as there are of them. `constraint` is your own function, or a
    `Constraint`, with which a search may stop early; see constraints.py.
    """

    beam_size: int = 4
    alpha: float = 0.6
    n_best: int = 1
    min_length: int = 0
    no_repeat_ngram: int = 0
    groups: int = 1
    diversity: float = 0.5
    sampling: Sampling | None = None
    constraint: Constraint | constraints.Function | None = None

    def __post_init__(self):
        check_ranges(_RANGES, self)
        if self.n_best > self.beam_size and not self.sampling:
            raise InputError(f"n_best must be between 1 and beam_size={self.beam_size}; got {self.n_best}")
        if self.beam_size % self.groups:
            raise InputError(f"groups must divide beam_size={self.beam_size}; got {self.groups}")

    @property
    def width(self) -> int:
        """W, how many hypotheses are alive at a time."""
        return self.n_best if self.sampling else self.beam_size

    @property
    def largest_bonus(self) -> float:
        """The most that constraints raise a token's log-probability by; infinite where nobody says."""
        if self.constraint is None:
            return 0.0
        return self.constraint.largest_bonus if isinstance(self.constraint, Constraint) else math.inf


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


class Search(NamedTuple):
    """The state of a search of B sentences, which need not have begun at the same time.

    All alive hypotheses of a sentence have `lengths` tokens, and have paid `penalties` for saying what other groups
    say. `best` holds the finished ones, their scores less the penalties. `prefixes` are what each sentence must begin
    with, padded with 0; `seeds` make its samples.
    """

    alive: Hypotheses
    penalties: Float[Array, "B W"]
    best: Hypotheses
    last_tokens: Int[Array, "B W"]
    lengths: Int[Array, " B"]
    max_lengths: Int[Array, " B"]
    prefixes: Int[Array, "B P"]
    seeds: Int[Array, " B"]
    running: Bool[Array, " B"]


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
    options: SearchOptions,
    *,
    max_steps: int,
    prefixes: Int[Array, "B P"] | None = None,
    seeds: Int[Array, " B"] | None = None,
    reorder: Reorder = gather_hypotheses,
    eos: int = 1,
) -> Hypotheses:
    """The `options.n_best` best finished hypotheses of each sentence, of at most `max_lengths` tokens with EOS.

    Each step takes the 2·W likeliest continuations (the likeliest alone where W = 1: greedy search): the best W
    that do not end stay alive, those that end compete for the `n_best` places by `scores`.

    A sentence stops when it reaches its limit, or when not even its likeliest alive hypothesis could beat the worst of
    `n_best` finished ones, though each token up to the limit were certain and had the largest bonus of the constraint
    (`_upper_bound`): stopping early never changes the answer. A sentence of which nothing finished returns its alive
    hypotheses, whole. The answer for a sentence does not depend on the others in the batch. `max_steps` is the static
    bound of `max_lengths`.
    """
    search = start(max_lengths, options, max_steps, prefixes, seeds)
    search, _ = advance(step, reorder, search, cache, options, max_steps=max_steps, min_running=1, eos=eos)
    return results(search, options)


def start(
    max_lengths: Int[Array, " B"],
    options: SearchOptions,
    room: int,
    prefixes: Int[Array, "B P"] | None = None,
    seeds: Int[Array, " B"] | None = None,
) -> Search:
    """A search that has taken no step yet, for hypotheses of at most `room` tokens; limit 0 means no sentence."""
    rows = len(max_lengths)
    alive = _no_hypotheses(rows, options.width, room)
    # One way to have said nothing yet, in each group; but every sample is on its own from the start.
    every = 1 if options.sampling else options.width // options.groups
    return Search(
        alive=alive._replace(log_probs=alive.log_probs.at[:, ::every].set(0.0)),
        penalties=jnp.zeros((rows, options.width)),
        best=_no_hypotheses(rows, options.groups * _places(options), room),
        last_tokens=jnp.zeros((rows, options.width), jnp.int32),
        lengths=jnp.zeros(rows, jnp.int32),
        max_lengths=max_lengths,
        prefixes=jnp.zeros((rows, 0), jnp.int32) if prefixes is None else prefixes,
        seeds=jnp.zeros(rows, jnp.int32) if seeds is None else seeds,
        running=max_lengths > 0,
    )


def admit(search: Search, new: Search, rows: Int[Array, " A"]) -> Search:
    """Puts the sentences of `new` into these rows; a row number beyond the last is left out."""
    return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), search, new)


def resize(search: Search, room: int) -> Search:
    """The same search with room for hypotheses of `room` tokens; no running one may have more."""

    def fit(hypotheses):
        change = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, max(0, room - x.shape[2]))))[:, :, :room]
        tokens, token_log_probs = change(hypotheses.tokens), change(hypotheses.token_log_probs)
        return hypotheses._replace(tokens=tokens, token_log_probs=token_log_probs)

    return search._replace(alive=fit(search.alive), best=fit(search.best))


def advance(
    step: Step,
    reorder: Reorder,
    search: Search,
    cache: Cache,
    options: SearchOptions,
    *,
    max_steps: int | Int[Array, ""],
    min_running: int | Int[Array, ""],
    eos: int = 1,
) -> tuple[Search, Cache]:
    """Takes up to `max_steps` steps, as long as `min_running` sentences have not ended."""

    def grow(loop):
        count, search, cache = loop
        logits, cache = step(search.last_tokens, search.lengths, cache)
        search, parents = _extend(search, logits, options, eos)
        return count + 1, search, reorder(cache, parents)

    def goes_on(loop):
        count, search, _ = loop
        return (count < max_steps) & (search.running.sum() >= min_running)

    _, search, cache = jax.lax.while_loop(goes_on, grow, (jnp.zeros((), jnp.int32), search, cache))
    return search, cache


def results(search: Search, options: SearchOptions) -> Hypotheses:
    """The finished hypotheses of each sentence, best first; the alive ones where nothing finished."""
    true_scores = search.best.log_probs / length_penalty(search.best.lengths, options.alpha)
    best = search.best._replace(scores=jnp.where(search.best.scores > NEVER, true_scores, NEVER))
    best = gather_hypotheses(best, _top_k(best.scores, options.n_best))
    alive = gather_hypotheses(search.alive, _top_k(search.alive.scores, options.n_best))
    return _where(best.scores[:, 0] > NEVER, best, alive)


def _places(options: SearchOptions) -> int:
    """How many finished hypotheses each group keeps."""
    return -(-options.n_best // options.groups)


class _Next(NamedTuple):
    """What may be said next, for each hypothesis: log-probability = `values` − `log_normaliser`.

    The vocabulary comes first because the fastest products of few rows leave it there.
    """

    values: Float[Array, "vocab B W"]
    log_normaliser: Float[Array, "B W"]

    def of(self, hypotheses: slice) -> "_Next":
        """Of some of the hypotheses."""
        return _Next(self.values[:, :, hypotheses], self.log_normaliser[:, hypotheses])


def _extend(
    search: Search, logits: Float[Array, "B W vocab"], options: SearchOptions, eos: int
) -> tuple[Search, Int[Array, "B W"]]:
    """The search one token further, and which hypothesis each alive one continues."""
    following = _allowed(search, logits, options, eos)
    size, places = options.width // options.groups, _places(options)
    groups, said = [], jnp.zeros((len(logits), logits.shape[-1]))  # how often, just now; ending is everybody's right
    for group in range(options.groups):
        own, kept = slice(group * size, (group + 1) * size), slice(group * places, (group + 1) * places)
        part = lambda tree, which: jax.tree.map(lambda x: x[:, which], tree)
        members = search._replace(
            alive=part(search.alive, own), penalties=part(search.penalties, own), best=part(search.best, kept)
        )
        penalty = options.diversity * said if group else None
        grown, parents = _extend_group(members, following.of(own), penalty, options, eos)
        said = said.at[jnp.arange(len(said))[:, None], grown.last_tokens].add(1.0)
        groups.append((grown, parents + group * size))

    join = lambda *parts: jnp.concatenate(parts, axis=1)
    per_hypothesis = ("alive", "penalties", "best", "last_tokens")
    joined = {name: jax.tree.map(join, *(getattr(grown, name) for grown, _ in groups)) for name in per_hypothesis}
    lengths = search.lengths + 1
    useful = functools.reduce(jnp.logical_or, (grown.running for grown, _ in groups))
    running = search.running & useful & (lengths < search.max_lengths)
    grown = search._replace(lengths=lengths, running=running, **joined)
    return _where(search.running, grown, search), join(*(parents for _, parents in groups))


def _extend_group(
    search: Search, following: _Next, penalty: Float[Array, "B vocab"] | None, options: SearchOptions, eos: int
) -> tuple[Search, Int[Array, "B W"]]:
    """`_extend` for the hypotheses of one group; `running` where going on may change its answer."""
    alive, best, lengths = search.alive, search.best, search.lengths
    if options.sampling:
        chosen = _sampled(jnp.moveaxis(following.values, 0, -1), options.sampling, search)
    else:
        chosen = _likeliest(
            alive.log_probs - search.penalties, following, penalty, lengths + 1 < options.min_length, options, eos
        )
    parents, tokens, token_log_probs, ranks = chosen
    grown = _append(gather_hypotheses(alive, parents), lengths, tokens, token_log_probs, options.alpha)
    is_eos = tokens == eos
    # A sample that reaches the limit is an answer; in a beam it is one only where nothing finished.
    ends = is_eos | (lengths + 1 >= search.max_lengths)[:, None] if options.sampling else is_eos

    ended_scores = ranks / length_penalty(grown.lengths, options.alpha)
    ended = grown._replace(scores=jnp.where(ends, ended_scores, NEVER), finished=is_eos)
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), best, ended)
    best = gather_hypotheses(both, _top_k(both.scores, best.scores.shape[1]))

    # Of 2·W continuations at most W end, one for each hypothesis, so W remain (or none, in greedy search).
    grown = grown._replace(log_probs=jnp.where(ends, NEVER, grown.log_probs))
    order = _top_k(jnp.where(ends, NEVER, ranks), alive.log_probs.shape[1])
    alive, parents, tokens, ranks = gather_hypotheses((grown, parents, tokens, ranks), order)
    exists = alive.log_probs > NEVER
    penalties = jnp.where(exists, alive.log_probs - ranks, 0.0)
    bound = _upper_bound(jnp.where(exists, ranks, NEVER).max(axis=1), lengths + 1, search.max_lengths, options)
    beatable = NEVER if options.sampling else best.scores[:, -1]
    grown = search._replace(alive=alive, penalties=penalties, best=best, last_tokens=tokens, running=bound > beatable)
    return grown, parents


def _upper_bound(
    ranks: Float[Array, " B"], lengths: Int[Array, " B"], max_lengths: Int[Array, " B"], options: SearchOptions
) -> Float[Array, " B"]:
    """No continuation of a hypothesis of this rank and length has a higher score when it ends.

    A token adds at most the largest bonus: its log-probability is at most 0, and diversity only takes away. What that
    comes to is divided by the largest length penalty where it is negative, and where it is positive by the smallest.
    """
    if options.largest_bonus == math.inf:
        return jnp.where(ranks > NEVER, math.inf, NEVER)
    most = ranks + options.largest_bonus * (max_lengths - lengths)
    return most / length_penalty(jnp.where(most < 0, max_lengths, lengths + 1), options.alpha)


def _allowed(search: Search, logits: Float[Array, "B W vocab"], options: SearchOptions, eos: int) -> _Next:
    """What the model says, after all constraints. Normalised at once only where something needs all of it."""
    chosen = [options.constraint] if options.constraint else []
    if options.no_repeat_ngram:
        chosen.append(constraints.no_repeated_ngram(options.no_repeat_ngram))
    if search.prefixes.shape[1]:
        chosen.append(constraints.force_prefix(search.prefixes))
    if options.sampling and options.min_length:  # a beam takes care of it among its candidates
        chosen.append(constraints.at_least(options.min_length, eos))
    values = jnp.moveaxis(logits, -1, 0)
    # Chunk by chunk: their maxima are needed anyway, to find the likeliest tokens.
    log_normaliser = jax.nn.logsumexp(jax.nn.logsumexp(_chunks(values), axis=1), axis=0).reshape(values.shape[1:])
    if not (chosen or options.sampling):
        return _Next(values, log_normaliser)
    log_probs = logits - log_normaliser[..., None]
    for constraint in chosen:
        log_probs = constraint(log_probs, search.alive.tokens, search.lengths)
    return _Next(jnp.moveaxis(log_probs, -1, 0), jnp.zeros_like(log_normaliser))


Chosen = tuple[Int[Array, "B N"], Int[Array, "B N"], Float[Array, "B N"], Float[Array, "B N"]]


def _sampled(log_probs: Float[Array, "B W vocab"], sampling: Sampling, search: Search) -> Chosen:
    """A token for each hypothesis; see `_likeliest`."""
    tokens = sample(log_probs, sampling, search.seeds, search.lengths)
    token_log_probs = jnp.take_along_axis(log_probs, tokens[..., None], axis=2)[..., 0]
    parents = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    return parents, tokens, token_log_probs, search.alive.log_probs + token_log_probs


def _likeliest(
    ranks: Float[Array, "B W"],
    following: _Next,
    penalty: Float[Array, "B vocab"] | None,
    too_short: Bool[Array, " B"],
    options: SearchOptions,
    eos: int,
) -> Chosen:
    """The best continuations of each sentence: their hypothesis, their token, its log-probability, their rank.

    `ranks` are log-probabilities less penalties.
    Only the likeliest few of each hypothesis can be among the likeliest of all: the rest is never sorted.
    """
    _, batch, width = following.values.shape
    count = 2 * width if width > 1 else 1
    spare = 1 if options.min_length else 0  # EOS may be one that is not allowed yet
    wanted = following.values if penalty is None else following.values - penalty.T[..., None]
    values, tokens = _top_tokens(wanted, count + spare)
    if options.min_length:
        values = jnp.where(too_short[:, None, None] & (tokens == eos), NEVER, values)
    values -= following.log_normaliser[..., None]  # [B, W, count]
    ranks = ranks[..., None] + values
    if penalty is not None:
        values += jnp.take_along_axis(penalty, tokens.reshape(batch, -1), axis=1).reshape(tokens.shape)
    flat = lambda x: x.reshape(batch, -1)
    best = _top_k(flat(ranks), min(count, ranks[0].size))
    parents = best // ranks.shape[-1]
    tokens, values, ranks = (jnp.take_along_axis(flat(x), best, axis=1) for x in (tokens, values, ranks))
    return parents, tokens, values, ranks


def _top_tokens(
    values: Float[Array, "vocab B W"], count: int
) -> tuple[Float[Array, "B W count"], Int[Array, "B W count"]]:
    """The `count` largest values of each hypothesis, largest first, and their tokens; of equal ones the first.

    They lie in the `count` chunks with the largest maxima, so that only those are sorted.
    """
    vocab, chunk = len(values), _chunk_size(len(values))
    if vocab <= 4 * chunk * count:
        return _sorted_top_k(jnp.moveaxis(values, 0, -1), min(count, vocab))
    maxima = _chunks(values).max(axis=1).T.reshape(*values.shape[1:], -1)
    likely = jnp.sort(_top_k(maxima, count), axis=-1)  # in order for the sake of ties
    tokens = (likely[..., None] * chunk + jnp.arange(chunk)[None, None, None]).reshape(
        *values.shape[1:], -1
    )  # [B, W, count·chunk]
    rows, hypotheses = (x[..., None] for x in jnp.indices(values.shape[1:]))
    candidates = values.at[tokens, rows, hypotheses].get(mode="fill", fill_value=NEVER)
    values, places = _sorted_top_k(candidates, count)
    return values, jnp.take_along_axis(tokens, places, axis=2)


def _chunks(values: Float[Array, "vocab B W"]) -> Float[Array, "chunks chunk BW"]:
    """The vocabulary in chunks; one axis for all hypotheses, as XLA on CPU is slow where the last axis is short."""
    chunk = _chunk_size(len(values))
    flat = values.reshape(len(values), -1)
    return jnp.pad(flat, ((0, -len(values) % chunk), (0, 0)), constant_values=NEVER).reshape(-1, chunk, flat.shape[1])


def _chunk_size(vocab: int) -> int:
    """A divisor of `vocab` near 128, so that nothing needs padding; 128 where there is none."""
    return min((size for size in range(64, 257) if vocab % size == 0), key=lambda size: abs(size - 128), default=128)


def _sorted_top_k(values: Float[Array, "*n"], count: int) -> tuple[Float[Array, "*k"], Int[Array, "*k"]]:
    # Without the barrier XLA may see that only a part is used, and sorts everything instead: 100 times as slow.
    return tuple(jax.lax.optimization_barrier(jax.lax.top_k(values, count)))


def _top_k(values: Float[Array, "*n"], count: int) -> Int[Array, "*k"]:
    """Where the `count` largest values of each row are, largest first; of equal ones the first."""
    return _sorted_top_k(values, count)[1]


def _append(
    hypotheses: Hypotheses,
    lengths: Int[Array, " B"],
    tokens: Int[Array, "B N"],
    token_log_probs: Float[Array, "B N"],
    alpha: float,
) -> Hypotheses:
    here = (jnp.arange(hypotheses.tokens.shape[2])[None] == lengths[:, None])[:, None]  # [B, 1, T]
    log_probs = hypotheses.log_probs + token_log_probs
    lengths = jnp.broadcast_to(lengths[:, None] + 1, tokens.shape)
    return hypotheses._replace(
        tokens=jnp.where(here, tokens[..., None], hypotheses.tokens),
        token_log_probs=jnp.where(here, token_log_probs[..., None], hypotheses.token_log_probs),
        lengths=lengths,
        log_probs=log_probs,
        scores=log_probs / length_penalty(lengths, alpha),
    )


def _no_hypotheses(batch: int, width: int, room: int) -> Hypotheses:
    return Hypotheses(
        tokens=jnp.zeros((batch, width, room), jnp.int32),
        token_log_probs=jnp.zeros((batch, width, room)),
        lengths=jnp.zeros((batch, width), jnp.int32),
        log_probs=jnp.full((batch, width), NEVER),
        scores=jnp.full((batch, width), NEVER),
        finished=jnp.zeros((batch, width), bool),
    )


def _where(condition: Bool[Array, " B"], first: Any, second: Any) -> Any:
    """For each sentence, `first` where the condition holds, else `second`."""
    return jax.tree.map(lambda a, b: jnp.where(condition.reshape(-1, *(1,) * (a.ndim - 1)), a, b), first, second)
