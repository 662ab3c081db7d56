"""§6.1: the state of a search: the hypotheses of each sentence. `W` is the beam width."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from t2t_jax.decoding.search_options import SearchOptions

NEG_INF = -jnp.inf  # the log-probability and the score of a hypothesis that does not exist


class Hypotheses(NamedTuple):
    """W hypotheses of each of B sentences.

    `tokens` and `token_log_probs` are padded with 0 to the capacity T. `lengths` counts tokens, EOS included.
    `log_probs` is the sum of `token_log_probs`; `scores` is `log_probs` divided by the length penalty. Both are −∞
    where there is no hypothesis. `finished` ones end with EOS.
    """

    tokens: Int[Array, "B W T"]
    token_log_probs: Float[Array, "B W T"]
    lengths: Int[Array, "B W"]
    log_probs: Float[Array, "B W"]
    scores: Float[Array, "B W"]
    finished: Bool[Array, "B W"]


class Search(NamedTuple):
    """The state of a search of B sentences, which need not have started at the same step.

    `alive` holds the hypotheses that the search extends; those of one sentence all have `lengths` tokens, and
    `penalties` is the accumulated diversity penalty of each; their scores are not computed. `best` holds the best
    finished hypotheses so far, and here their scores include the penalties. `last_tokens` is the next input of the
    decoder (0 at the start). `prefixes` is what each sentence must begin with, padded with 0. `seeds` seeds the samples
    of each sentence. `features` is what the constraint knows of it. `num_finished` counts, for each of the G groups
    (G > 1 in diverse beam search only), the hypotheses that finished within the beam. `running` is True for sentences
    whose search has not ended.
    """

    alive: Hypotheses
    penalties: Float[Array, "B W"]
    best: Hypotheses
    last_tokens: Int[Array, "B W"]
    lengths: Int[Array, " B"]
    max_lengths: Int[Array, " B"]
    prefixes: Int[Array, "B P"]
    seeds: Int[Array, " B"]
    features: Int[Array, "B F"]
    num_finished: Int[Array, "B G"]
    running: Bool[Array, " B"]


def length_penalty(length: Int[Array, "*n"], alpha: float | Float[Array, ""]) -> Float[Array, "*n"]:
    """((5 + |Y|) / 6)^α, |Y| counting EOS (GNMT)."""
    return ((5.0 + length) / 6.0) ** alpha


def start(
    max_lengths: Int[Array, " B"],
    options: SearchOptions,
    capacity: int,
    prefixes: Int[Array, "B P"] | None = None,
    seeds: Int[Array, " B"] | None = None,
    features: Int[Array, "B F"] | None = None,
) -> Search:
    """A search before its first step, with memory for `capacity` tokens a hypothesis; limit 0: an unused row."""
    rows = len(max_lengths)
    alive = _empty_hypotheses(rows, options.width, capacity)
    # Only each group's first hypothesis starts alive, since all begin alike; when sampling, all do.
    stride = 1 if options.sampling else options.group_size
    return Search(
        alive=alive._replace(log_probs=alive.log_probs.at[:, ::stride].set(0.0)),
        penalties=jnp.zeros((rows, options.width)),
        best=_empty_hypotheses(rows, options.groups * options.finished_per_group, capacity),
        last_tokens=jnp.zeros((rows, options.width), jnp.int32),
        lengths=jnp.zeros(rows, jnp.int32),
        max_lengths=max_lengths,
        prefixes=jnp.zeros((rows, 0), jnp.int32) if prefixes is None else prefixes,
        seeds=jnp.zeros(rows, jnp.int32) if seeds is None else seeds,
        features=jnp.zeros((rows, 0), jnp.int32) if features is None else features,
        num_finished=jnp.zeros((rows, options.groups), jnp.int32),
        running=max_lengths > 0,
    )


def resize(search: Search, capacity: int) -> Search:
    """The same search with memory for `capacity` tokens a hypothesis; no running hypothesis may have more."""

    def fit(hypotheses):
        change = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, max(0, capacity - x.shape[2]))))[:, :, :capacity]
        tokens, token_log_probs = change(hypotheses.tokens), change(hypotheses.token_log_probs)
        return hypotheses._replace(tokens=tokens, token_log_probs=token_log_probs)

    return search._replace(alive=fit(search.alive), best=fit(search.best))


def gather_hypotheses(tree: Any, parents: Int[Array, "B W"]) -> Any:
    """Leaves [B, W', …] → [B, W, …]: hypothesis w of each sentence becomes hypothesis `parents[:, w]`."""

    def gather(x):
        indices = parents.reshape(*parents.shape, *(1,) * (x.ndim - 2))
        return jnp.take_along_axis(x, indices, axis=1, mode="promise_in_bounds")

    return jax.tree.map(gather, tree)


def append_tokens(
    hypotheses: Hypotheses,
    lengths: Int[Array, " B"],
    tokens: Int[Array, "B N"],
    token_log_probs: Float[Array, "B N"],
) -> Hypotheses:
    """The hypotheses, of `lengths` tokens, with one token more; their scores stay."""
    is_next = (jnp.arange(hypotheses.tokens.shape[2])[None] == lengths[:, None])[:, None]  # [B, 1, T]
    return hypotheses._replace(
        tokens=jnp.where(is_next, tokens[..., None], hypotheses.tokens),
        token_log_probs=jnp.where(is_next, token_log_probs[..., None], hypotheses.token_log_probs),
        lengths=jnp.broadcast_to(lengths[:, None] + 1, tokens.shape),
        log_probs=hypotheses.log_probs + token_log_probs,
    )


def where_rows(condition: Bool[Array, " B"], first: Any, second: Any) -> Any:
    """For each sentence, the row of `first` where the condition holds, else that of `second`."""
    return jax.tree.map(lambda a, b: jax.vmap(jnp.where)(condition, a, b), first, second)


def _empty_hypotheses(rows: int, width: int, capacity: int) -> Hypotheses:
    return Hypotheses(
        tokens=jnp.zeros((rows, width, capacity), jnp.int32),
        token_log_probs=jnp.zeros((rows, width, capacity)),
        lengths=jnp.zeros((rows, width), jnp.int32),
        log_probs=jnp.full((rows, width), NEG_INF, jnp.float32),
        scores=jnp.full((rows, width), NEG_INF, jnp.float32),
        finished=jnp.zeros((rows, width), bool),
    )
