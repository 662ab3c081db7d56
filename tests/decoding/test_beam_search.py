"""Searches of Markov chains whose results can be found by hand or by trying all sequences."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t2t_jax.decoding import beam_search as beam_search_module
from t2t_jax.decoding import top_k
from t2t_jax.decoding.beam_search import SearchOptions, beam_search, length_penalty
from t2t_jax.decoding.constraints import Constraint, no_repeated_ngram
from t2t_jax.decoding.sampling import Sampling
from t2t_jax.decoding.search_options import EARLY_STOPS
from t2t_jax.errors import InputError

EOS = 1
NO_CHANGE = lambda log_probs, tokens, lengths: log_probs
FAVOUR_3 = lambda log_probs, tokens, lengths: log_probs.at[..., 3].add(5.0)


@functools.partial(jax.jit, static_argnames="max_steps")
def search_chains(log_probs, limits, options, **arguments):
    def step(tokens, positions, cache):
        rows = jnp.arange(len(tokens))
        transitions = log_probs[rows, positions % log_probs.shape[1]]  # [B, last token, next token]
        return jnp.take_along_axis(transitions, tokens[..., None], axis=1), cache

    return beam_search(step, (), limits, options, **arguments)


def search(log_probs, limits, max_steps=None, prefixes=None, seeds=None, **options):
    """Searches a Markov chain for each sentence, `log_probs[b, last token, next token]`; token 0 is the start.

    With one more axis, `log_probs[b, position, last token, next token]`, transitions depend on the position.
    """
    options = jax.tree.map(np.float32, SearchOptions(**{"beam_size": 2} | options))  # traced: α compiles nothing
    arrays = {"prefixes": prefixes, "seeds": seeds}
    arrays = {name: jnp.asarray(values, jnp.int32) for name, values in arrays.items() if values is not None}
    max_steps = max_steps or int(max(limits))
    log_probs = jnp.asarray(log_probs, jnp.float32)
    log_probs = log_probs if log_probs.ndim == 4 else log_probs[:, None]
    found = search_chains(log_probs, jnp.asarray(limits), options, max_steps=max_steps, **arrays)
    return jax.tree.map(np.asarray, found)


def listed(found, sentence=0):
    """[(tokens, score), …] of one sentence's hypotheses."""
    rows = [w for w in range(found.scores.shape[1]) if np.isfinite(found.scores[sentence, w])]
    ids = lambda w: tuple(found.tokens[sentence, w, : found.lengths[sentence, w]].tolist())
    return [(ids(w), float(found.scores[sentence, w])) for w in rows]


def random_chains(seed, *count, vocab=4, sharpness=2.0):
    logits = sharpness * np.random.default_rng(seed).normal(size=(*(count or (1,)), vocab, vocab))
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def exhaustive(log_probs, limit, alpha):
    """Every finished sequence of at most `limit` tokens with its score, best first."""
    vocab = log_probs.shape[-1]
    others = [token for token in range(vocab) if token != EOS]
    found = []
    for length in range(1, limit + 1):
        for body in itertools.product(others, repeat=length - 1):
            tokens = (*body, EOS)
            total = sum(log_probs[a, b] for a, b in zip((0, *tokens), tokens, strict=False))
            found.append((tokens, total / ((5 + length) / 6) ** alpha))
    return sorted(found, key=lambda item: -item[1])


def stopped_search(log_probs, limit, width, alpha, n_best, rule):
    """Beam search of one sentence, written plainly: [(tokens, score), …], and after how many steps it stops."""
    penalty = lambda length: ((5 + length) / 6) ** alpha
    alive, finished, finished_in_beam = [(0.0, ())], [], 0
    for length in range(1, limit + 1):
        candidates = [
            (total + log_probs[length - 1, tokens[-1] if tokens else 0, token], (*tokens, token))
            for total, tokens in alive
            for token in range(log_probs.shape[-1])
        ]
        candidates = sorted(candidates, reverse=True)[: 2 * width if width > 1 else 1]
        ended = [rank for rank, (_, tokens) in enumerate(candidates) if tokens[-1] == EOS]
        finished += [(candidates[rank][0] / penalty(length), candidates[rank][1]) for rank in ended]
        finished_in_beam += sum(rank < width for rank in ended)
        alive = [candidate for candidate in candidates if candidate[1][-1] != EOS][:width]
        finished = sorted(finished, reverse=True)[:n_best]
        worst = finished[-1][0] if len(finished) == n_best else -np.inf
        stops = {
            "exact": False,
            "best_finished": bool(alive) and alive[0][0] / penalty(length) <= worst,
            "beam_full": finished_in_beam >= width,
        }
        if not alive or stops[rule]:
            break
    found = [*finished, *((total / penalty(length), tokens) for total, tokens in alive)]
    return [(tokens, score) for score, tokens in found[:n_best]], length


@pytest.mark.parametrize(
    ("width", "n_best", "alpha"), [(1, 1, 0.6), (2, 1, 0.0), (3, 2, 0.6), (4, 4, 1.0), (4, 1, 2.0)]
)
def test_each_rule_of_stopping_early_is_that_of_a_plain_search(width, n_best, alpha):
    """'exact' goes to the limit in the plain search; the others give other results and never take more steps."""
    limit, count = 8, 40
    log_probs = random_chains(width, count, limit, vocab=5, sharpness=1.0)
    plain = {rule: [stopped_search(x, limit, width, alpha, n_best, rule) for x in log_probs] for rule in EARLY_STOPS}
    for rule in EARLY_STOPS:
        options = {"beam_size": width, "n_best": n_best, "alpha": alpha, "early_stop": rule}
        found = search(log_probs, [limit] * count, **options)
        stopped = search(log_probs, [limit] * count, max_steps=max(steps for _, steps in plain[rule]), **options)
        np.testing.assert_array_equal(stopped.lengths, found.lengths)
        for sentence, (expected, _) in enumerate(plain[rule]):
            assert [tokens for tokens, _ in listed(found, sentence)] == [tokens for tokens, _ in expected]
            np.testing.assert_allclose([s for _, s in listed(found, sentence)], [s for _, s in expected], rtol=1e-4)
    if width > 1 and alpha:
        assert plain["exact"] != plain["best_finished"] and plain["best_finished"] != plain["beam_full"]


def test_groups_stop_by_themselves_when_their_own_beams_are_full():
    """Two groups of one hypothesis: the first ends with its first EOS, and the second still finds its own."""
    log_probs = np.log(np.full((1, 4, 4), 1e-9) + np.array([[0, 0.6, 0.4, 0], *[[0, 0.9, 0, 0.1]] * 3])[None])
    found = listed(search(log_probs, [6], beam_size=2, groups=2, n_best=2, diversity=5.0, early_stop="beam_full"))
    assert [tokens for tokens, _ in found] == [(EOS,), (EOS,)]
    wide = listed(search(log_probs, [6], beam_size=2, n_best=2, early_stop="beam_full"))
    assert [tokens for tokens, _ in wide] == [(EOS,), (2, EOS)]


def test_a_chain_whose_best_path_greedy_search_misses():
    """
    start ─ .6 → a ─ .4 → end        P(a, end) = .24, and what else follows a is less likely
          └ .4 → b ─ .9 → end        P(b, end) = .36: the best, though b is less likely than a
    """
    end, a, b = EOS, 2, 3
    p = np.full((4, 4), 1e-9)
    p[0, a], p[0, b] = 0.6, 0.4
    p[a, end], p[a, a], p[a, b] = 0.4, 0.3, 0.3
    p[b, end], p[b, b] = 0.9, 0.1
    log_probs = np.log(p)[None]
    assert listed(search(log_probs, [6], beam_size=1, alpha=0.0))[0][0] == (a, end)
    (tokens, score) = listed(search(log_probs, [6], beam_size=2, alpha=0.0))[0]
    assert tokens == (b, end)
    np.testing.assert_allclose(score, np.log(0.36), rtol=1e-5)


def test_length_penalty_is_its_formula():
    np.testing.assert_allclose(length_penalty(jnp.array([1, 7]), 0.6), [1.0, 2.0**0.6], rtol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
@pytest.mark.parametrize("seed", range(6))
def test_a_wide_beam_is_exhaustive_search(seed, alpha):
    """With a beam for every prefix, the n-best list is the true one. EOS counts in |Y|."""
    log_probs = random_chains(seed)
    expected = exhaustive(log_probs[0], 4, alpha)
    found = listed(search(log_probs, [4], beam_size=27, alpha=alpha, n_best=8))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected[:8]]
    np.testing.assert_allclose([s for _, s in found], [s for _, s in expected[:8]], rtol=1e-5)


@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([0.0, 0.6, 1.0, 2.0]), st.data())
@settings(max_examples=60)
def test_stopping_early_never_changes_the_n_best(seed, beam_size, alpha, data):
    """The result equals that of `search_to_the_limit`, which never stops early.

    Transitions depend on the position: otherwise sequences with the same transitions in another order would be ties.
    """
    n_best = data.draw(st.integers(1, beam_size))
    log_probs = random_chains(seed, 3, 9, vocab=5)
    limits = np.array([3, 9, 6])
    found = search(log_probs, limits, beam_size=beam_size, alpha=alpha, n_best=n_best, max_steps=9)
    for sentence, limit in enumerate(limits):
        expected = search_to_the_limit(log_probs[sentence], limit, beam_size, alpha)[:n_best]
        got = listed(found, sentence)
        assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
        np.testing.assert_allclose([s for _, s in got], [s for _, s in expected], rtol=1e-4)


def search_to_the_limit(log_probs, limit, beam_size, alpha, bonus=lambda tokens, token: 0.0):
    """Beam search in plain Python that always runs to the limit and keeps every finished hypothesis."""
    count = 2 * beam_size if beam_size > 1 else 1
    alive, finished = [((), 0.0)], []
    penalty = lambda tokens: ((5 + len(tokens)) / 6) ** alpha
    for _ in range(limit):
        extended = [
            ((*tokens, token), total + log_probs[len(tokens), (0, *tokens)[-1], token] + bonus(tokens, token))
            for tokens, total in alive for token in range(log_probs.shape[-1])
        ]  # fmt: skip
        extended = sorted(extended, key=lambda item: -item[1])[:count]
        finished += [(tokens, total / penalty(tokens)) for tokens, total in extended if tokens[-1] == EOS]
        alive = [item for item in extended if item[0][-1] != EOS][:beam_size]
    by_score = lambda items: sorted(items, key=lambda item: -item[1])
    return by_score(finished) + by_score((tokens, total / penalty(tokens)) for tokens, total in alive)


BONUSES = {  # (position, last token, next token) → whether there is a bonus, or a penalty
    "for a token": lambda position, last, token: token == 3,
    "from a position on": lambda position, last, token: position >= 2,
    "for a bigram": lambda position, last, token: (last + token) % 3 == 0,
    "always": lambda position, last, token: position >= 0,
    "for EOS": lambda position, last, token: token == EOS,
}


@functools.partial(jax.jit, static_argnames=("declared", "options", "max_steps"))
def search_with_bonuses(log_probs, bonuses, once, limits, declared, alpha, options, max_steps):
    """A search with bonuses[position, last token, next token]; with `once` only until a hypothesis contains token 3."""

    def add(log_probs, tokens, lengths):
        rows, last = jnp.arange(len(tokens)), jnp.maximum(lengths - 1, 0)
        last = jnp.where((lengths > 0)[:, None], tokens[rows, :, last], 0)  # [B, W]
        has_3 = (tokens == 3).any(axis=2)
        return log_probs + jnp.where((once & has_3)[..., None], 0.0, bonuses[lengths[:, None], last])

    def step(tokens, positions, cache):
        rows = jnp.arange(len(tokens))
        return log_probs[rows[:, None], positions[:, None], tokens], cache

    constraint = add if declared is None else Constraint(add, largest_bonus=declared)
    leaves, tree = jax.tree.flatten(dataclasses.replace(options, constraint=constraint))
    options = tree.unflatten([alpha, *leaves[1:]])  # traced: α compiles nothing
    return beam_search(step, (), limits, options, max_steps=max_steps)


@given(
    st.integers(0, 10**6),
    st.sampled_from(sorted(BONUSES)),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 4.0]),
    st.sampled_from([0.6, 2.0]),
    st.sampled_from([(1, 1), (3, 2)]),
    st.booleans(),
)
@settings(max_examples=60)
def test_stopping_early_never_changes_the_n_best_with_bonuses_either(seed, form, once, largest, alpha, beams, known):
    beam_size, n_best = beams
    log_probs, limits = random_chains(seed, 3, 9, vocab=5), np.array([3, 9, 6])
    has_bonus = BONUSES[form](*np.indices((9, 5, 5)))
    bonuses = np.where(has_bonus, np.random.default_rng(seed).uniform(-largest - 1, 2 * largest, (9, 5, 5)), 0)
    bonuses = np.minimum(bonuses, largest)
    declared = largest if known else None
    options = SearchOptions(beam_size=beam_size, n_best=n_best)
    arrays = [jnp.asarray(x, jnp.float32) for x in (log_probs, bonuses)]
    found = search_with_bonuses(*arrays, once, jnp.asarray(limits), declared, alpha, options, max_steps=9)
    found = jax.tree.map(np.asarray, found)
    bonus = lambda tokens, token: 0.0 if once and 3 in tokens else bonuses[len(tokens), (0, *tokens)[-1], token]
    for sentence, limit in enumerate(limits):
        expected = search_to_the_limit(log_probs[sentence], limit, beam_size, alpha, bonus)[:n_best]
        got = listed(found, sentence)
        assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
        np.testing.assert_allclose([s for _, s in got], [s for _, s in expected], rtol=1e-4, atol=1e-5)


def test_no_continuation_scores_above_the_upper_bound():
    """Hypotheses of 3 tokens grow to at most 9; each new token has probability 1 and the largest bonus."""
    log_probs = jnp.array([-40.0, -6.0, -0.1, 0.0, 2.0, -jnp.inf])
    for bonus, alpha in itertools.product((0.0, 0.5, 3.0), (0.0, 0.6, 2.0)):
        options = SearchOptions(alpha=alpha, constraint=Constraint(NO_CHANGE, largest_bonus=bonus))
        lengths, limits = jnp.full(6, 3), jnp.full(6, 9)
        bound = beam_search_module._upper_bound(log_probs, lengths, limits, options)
        for more in range(1, 7):
            assert (bound >= (log_probs + more * bonus) / length_penalty(lengths + more, alpha)).all()
    unknown = SearchOptions(constraint=NO_CHANGE)
    bound = beam_search_module._upper_bound(log_probs, lengths, limits, unknown)
    np.testing.assert_array_equal(bound, [np.inf] * 5 + [-np.inf])


@pytest.mark.parametrize(
    ("constraint", "steps"),
    [
        (None, 2),
        (NO_CHANGE, 9),
        (Constraint(NO_CHANGE, largest_bonus=0.0), 2),
        (Constraint(NO_CHANGE, largest_bonus=2.0), 3),
        (Constraint(NO_CHANGE, largest_bonus=5.0), 4),
        (no_repeated_ngram(3), 2),
    ],
)
def test_a_search_stops_early_where_the_bonus_is_known(constraint, steps):
    """2, then EOS are almost certain. Nothing else can score higher, unless there may be a bonus."""
    p = np.full((4, 4), 1e-4)
    p[:, 0], p[0, 2], p[2:, EOS] = 1e-30, 1.0, 1.0
    log_probs = jnp.log(jnp.asarray(p, jnp.float32) / p.sum(axis=1, keepdims=True))
    options = SearchOptions(beam_size=2, constraint=constraint)
    initial = beam_search_module.start(jnp.array([9]), options, 9)
    step = lambda tokens, positions, cache: (log_probs[tokens], cache)
    take = functools.partial(beam_search_module.advance, step, beam_search_module.gather_hypotheses)
    ended, _ = jax.jit(lambda search: take(search, (), options, max_steps=20, min_running=1))(initial)
    assert ended.lengths.tolist() == [steps]
    assert listed(jax.tree.map(np.asarray, beam_search_module.results(ended, options)))[0][0] == (2, EOS)


@given(st.integers(0, 10**6))
@settings(max_examples=30)
def test_beam_size_1_is_greedy_search(seed):
    log_probs = random_chains(seed, vocab=6)
    found = search(log_probs, [12], beam_size=1)
    tokens, last = [], 0
    while last != EOS and len(tokens) < 12:
        last = int(log_probs[0, last].argmax())
        tokens.append(last)
    assert listed(found)[0][0] == tuple(tokens)
    assert found.finished[0, 0] == (last == EOS)


def test_a_batch_gives_the_results_of_each_sentence_alone():
    log_probs = random_chains(3, 4, vocab=6)
    limits = np.array([2, 11, 5, 8])
    together = search(log_probs, limits, beam_size=3, n_best=3, max_steps=20)
    for b in range(4):
        alone = search(log_probs[b : b + 1], limits[b : b + 1], beam_size=3, n_best=3)
        assert listed(together, b) == listed(alone)


def test_the_n_best_are_sorted_and_distinct_and_begin_with_the_1_best():
    lengths = []
    for seed in range(10):
        log_probs = random_chains(seed, vocab=6)
        found = search(log_probs, [8], beam_size=4, n_best=4)
        many = listed(found)
        scores = [score for (_, score), finished in zip(many, found.finished[0], strict=False) if finished]
        assert scores == sorted(scores, reverse=True)
        assert len({tokens for tokens, _ in many}) == len(many)
        lengths.append(len(many))
        assert listed(search(log_probs, [8], beam_size=4, n_best=1)) == many[:1]
    assert lengths.count(4) > 5


def test_log_probs_are_the_sum_of_token_log_probs_and_scores_follow_from_them():
    log_probs = random_chains(0, 2, vocab=6)
    found = search(log_probs, [8, 5], beam_size=4, n_best=4, alpha=0.6)
    for b, w in zip(*np.nonzero(np.isfinite(found.scores)), strict=True):
        length, tokens = found.lengths[b, w], found.tokens[b, w]
        expected = [log_probs[b, last, token] for last, token in zip((0, *tokens), tokens[:length], strict=False)]
        np.testing.assert_allclose(found.token_log_probs[b, w, :length], expected, rtol=1e-5)
        np.testing.assert_allclose(found.log_probs[b, w], sum(expected), rtol=1e-5)
        np.testing.assert_allclose(found.scores[b, w], sum(expected) / ((5 + length) / 6) ** 0.6, rtol=1e-5)
        assert found.tokens[b, w, length - 1] == EOS and not found.tokens[b, w, length:].any()


def test_if_nothing_finishes_the_alive_hypotheses_are_returned_as_unfinished():
    p = np.full((8, 8), 1e-20)
    p[:, EOS] = 1e-30  # never among the 2·W most likely
    p[:, 2], p[:, 3] = 0.7, 0.3
    found = search(np.log(p)[None].repeat(2, 0), [3, 5], beam_size=2, n_best=2, alpha=0.6)
    assert not found.finished.any()
    assert listed(found, 0)[0][0] == (2, 2, 2) and sorted(listed(found, 0)[1][0]) == [2, 2, 3]
    assert listed(found, 1)[0][0] == (2, 2, 2, 2, 2)
    np.testing.assert_allclose(found.scores[0, 0], 3 * np.log(0.7) / (8 / 6) ** 0.6, rtol=1e-5)


def test_alive_hypotheses_follow_the_finished_ones_where_these_are_too_few():
    p = np.full((4, 4), 1e-9)
    p[:, EOS], p[:, 2], p[:, 3] = 0.1, 0.6, 0.3
    found = search(np.log(p)[None], [1], beam_size=3, n_best=3, alpha=0.0)
    assert [tokens for tokens, _ in listed(found)] == [(EOS,), (2,), (3,)]
    assert found.finished[0].tolist() == [True, False, False]
    np.testing.assert_allclose(found.scores[0], np.log([0.1, 0.6, 0.3]), rtol=1e-5)


def test_the_last_token_within_the_limit_may_be_eos():
    p = np.full((4, 4), 1e-9)
    p[0, 2] = p[2, 3] = p[3, EOS] = 1.0
    found = search(np.log(p)[None], [3], beam_size=2)
    assert listed(found)[0][0] == (2, 3, EOS) and found.finished[0, 0]


def test_unused_rows_change_nothing():
    """Their length limit is 0."""
    log_probs = random_chains(0, 2)
    assert listed(search(log_probs, [0, 4]), 1) == listed(search(log_probs[1:], [4]))


def test_with_min_length_the_results_are_the_best_that_are_long_enough():
    for seed in range(6):
        log_probs = random_chains(seed)
        expected = [found for found in exhaustive(log_probs[0], 4, 0.6) if len(found[0]) >= 3]
        found = listed(search(log_probs, [4], beam_size=27, n_best=4, min_length=3))
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected[:4]]


@pytest.mark.parametrize(
    "options", [{"beam_size": 1}, {"beam_size": 2, "groups": 2, "n_best": 2}], ids=["greedy", "groups"]
)
def test_a_search_that_keeps_one_hypothesis_takes_the_best_token_but_eos_until_it_may_end(options):
    for seed in range(6):
        log_probs = random_chains(seed)
        log_probs[0, :, EOS] = 2.0  # more likely than any other token
        found = listed(search(log_probs, [4], min_length=3, diversity=0.0, **options))
        tokens, last = [], 0
        for _ in range(2):
            last = max((0, 2, 3), key=lambda token: log_probs[0, last, token])
            tokens.append(last)
        assert [hypothesis for hypothesis, _ in found] == [(*tokens, EOS)] * len(found) and found


def test_with_a_prefix_the_results_are_the_best_that_begin_with_it():
    for seed in range(4):
        log_probs = random_chains(seed)
        expected = [found for found in exhaustive(log_probs[0], 4, 0.6) if found[0][:2] == (3, 2)]
        found = listed(search(log_probs, [4], beam_size=27, n_best=3, prefixes=[[3, 2, 0]]))
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected[:3]]
        np.testing.assert_allclose([s for _, s in found], [s for _, s in expected[:3]], rtol=1e-5)


def test_with_n_gram_blocking_the_results_are_the_best_without_repeats():
    for seed in range(4):
        log_probs = random_chains(seed)
        repeats = lambda tokens: len(set(itertools.pairwise(tokens))) < len(tokens) - 1
        expected = [found for found in exhaustive(log_probs[0], 5, 0.6) if not repeats(found[0])]
        found = listed(search(log_probs, [5], beam_size=81, n_best=5, no_repeat_ngram=2))
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected[:5]]


def test_a_prefix_is_forced_even_where_it_repeats_what_may_not_be_repeated():
    for seed in range(4):
        log_probs = random_chains(seed)
        once_more = lambda tokens: tokens[:2] == (3, 3) and len(set(tokens)) == len(tokens) - 1
        expected = [found for found in exhaustive(log_probs[0], 4, 0.6) if once_more(found[0])]
        found = listed(search(log_probs, [4], beam_size=27, n_best=3, prefixes=[[3, 3]], no_repeat_ngram=1))
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected[:3]]
        np.testing.assert_allclose([s for _, s in found], [s for _, s in expected[:3]], rtol=1e-5)


def test_a_logits_processor_forbids_and_rewards():
    log_probs = random_chains(1)
    never_2 = lambda log_probs, tokens, lengths: log_probs.at[..., 2].set(-jnp.inf)
    found = listed(search(log_probs, [4], beam_size=27, n_best=4, constraint=never_2))
    expected = [item for item in exhaustive(log_probs[0], 4, 0.6) if 2 not in item[0]]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected[:4]]
    bonus = np.where(np.arange(4) == 3, 5.0, 0.0)
    expected = exhaustive(log_probs[0] + bonus, 4, 0.6)
    for constraint in (FAVOUR_3, Constraint(FAVOUR_3, largest_bonus=5.0)):
        found = listed(search(log_probs, [4], beam_size=27, n_best=4, constraint=constraint))
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected[:4]]


@pytest.mark.parametrize("constraint", [FAVOUR_3, Constraint(FAVOUR_3, largest_bonus=5.0)])
def test_the_search_goes_on_while_a_bonus_can_still_win(constraint):
    """EOS at once is likely; 2, 3, EOS is unlikely, but its second step has a bonus of 5."""
    p = np.full((4, 4), 1e-9)
    p[0, EOS], p[0, 2] = 0.9, 0.1
    p[2, EOS] = p[2, 3] = 0.5
    p[3, EOS] = 1.0
    found = listed(search(np.log(p)[None], [3], beam_size=2, alpha=0.6, constraint=constraint))
    assert found[0][0] == (2, 3, EOS)
    np.testing.assert_allclose(found[0][1], (np.log(0.1 * 0.5) + 5) / (8 / 6) ** 0.6, rtol=1e-4)


def test_groups_repeat_the_same_search_without_diversity_and_differ_with_it():
    log_probs = random_chains(5, vocab=8, sharpness=0.7)
    alone = listed(search(log_probs, [6], beam_size=2, n_best=1))
    same = listed(search(log_probs, [6], beam_size=6, groups=3, n_best=3, diversity=0.0))
    assert same == alone * 3
    different = listed(search(log_probs, [6], beam_size=6, groups=3, n_best=3, diversity=4.0))
    assert len({tokens for tokens, _ in different}) == 3 and different[0] >= alone[0]
    for tokens, score in different:
        expected = sum(log_probs[0, a, b] for a, b in zip((0, *tokens), tokens, strict=False))
        np.testing.assert_allclose(score, expected / ((5 + len(tokens)) / 6) ** 0.6, rtol=1e-4)
    first_tokens = [tokens[0] for tokens, _ in different]
    assert len(set(first_tokens)) == 3, "a penalty of 4 is more than any difference between these probabilities"


def test_groups_of_one_hypothesis_never_penalise_eos_and_do_not_count_once_they_have_ended():
    """The first group ends at once, so the second searches greedily, as if it were alone."""
    log_probs = np.log(np.tile([1e-9, 0.5, 0.3, 0.2 - 1e-9], (4, 1)))[None]
    alone = listed(search(log_probs, [4], beam_size=1, n_best=1))
    assert alone == [((EOS,), pytest.approx(np.log(0.5), rel=1e-5))]
    assert listed(search(log_probs, [4], beam_size=2, groups=2, n_best=2, diversity=1.0)) == alone * 2


def test_frequencies_of_samples_are_the_probabilities_of_the_chain():
    """A sample that reaches the length limit is unfinished and has as many tokens as the limit."""
    log_probs = random_chains(2, sharpness=0.5)
    found = search(np.repeat(log_probs, 100, axis=0), [3] * 100, seeds=np.arange(100), sampling=Sampling(), n_best=40)
    assert np.isfinite(found.scores).all() and (np.diff(found.scores, axis=1) <= 0).all()
    counts = {}
    for b, w in np.ndindex(100, 40):
        tokens = tuple(found.tokens[b, w, : found.lengths[b, w]].tolist())
        assert found.finished[b, w] == (tokens[-1] == EOS) and (tokens[-1] == EOS or len(tokens) == 3)
        counts[tokens] = counts.get(tokens, 0) + 1
    for tokens, total in exhaustive(log_probs[0], 3, 0.0):
        assert abs(counts.get(tokens, 0) / 4000 - np.exp(total)) < 0.025


@pytest.mark.parametrize("vocab", [7, 33, 1000])
def test_the_log_sum_exp_is_exact_for_forbidden_tokens_infinities_and_nan_too(vocab):
    values = 40 * np.random.default_rng(0).normal(size=(vocab, 3, 4)).astype(np.float32)
    values[: vocab // 2, 1] = -np.inf
    values[:, 0, 0], values[3, 0, 1], values[3, 0, 2], values[vocab - 1, 0, 3] = -np.inf, np.inf, np.nan, 1e38
    found = jax.jit(top_k.log_sum_exp)(values)
    np.testing.assert_allclose(found, jax.nn.logsumexp(values, axis=0), rtol=1e-6)


@pytest.mark.parametrize(("vocab", "chunks"), [(32000, 1000), (6256, 184), (997 * 11, None), (40, None)])
def test_top_tokens_are_those_of_a_stable_sort(vocab, chunks):
    """With and without a divisor near 32, and with a vocabulary small enough to be sorted whole."""
    assert chunks is None or vocab == chunks * top_k.chunk_size(vocab)
    values = np.random.default_rng(0).integers(0, 50, (2, 3, vocab)).astype(np.float32)
    found, tokens = jax.jit(top_k.top_tokens, static_argnums=1)(jnp.moveaxis(jnp.asarray(values), -1, 0), 8)
    expected = np.argsort(-values, axis=-1, kind="stable")[..., :8]
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(found, np.take_along_axis(values, expected, axis=-1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": 0}, "beam_size must be at least 1 and at most 256; got 0"),
        ({"n_best": 5}, "n_best must be between 1 and beam_size=4; got 5"),
        ({"alpha": -1.0}, "alpha must be at least 0 and at most 10; got -1.0"),
        ({"alpha": float("nan")}, "alpha must be finite, at least 0 and at most 10; got nan"),
        ({"diversity": float("nan")}, "diversity must be finite, at least 0 and at most 1000; got nan"),
        ({"constraint": 5}, "constraint must be a function, bare or in a Constraint; got 5"),
        ({"min_length": 10**30}, r"min_length must be at least 0 and at most 4096; got an integer of 100 bits"),
        ({"early_stop": "soon"}, "early_stop: unknown value 'soon'; known: exact, best_finished, beam_full"),
        ({"groups": 3}, "groups must divide beam_size=4; got 3"),
        ({"sampling": Sampling(), "n_best": 4, "groups": 2}, "groups=2 is for beam search, samples are independent"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram must be at least 0 and at most 100; got -1"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        SearchOptions(**options)
