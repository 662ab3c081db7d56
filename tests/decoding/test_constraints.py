import jax.numpy as jnp
import numpy as np
import pytest

from t2t_jax.decoding.constraints import Constraint, forbid_early_eos, force_prefix, no_repeated_ngram
from t2t_jax.errors import InputError

ALL = set(range(9))


def allowed(constraint, tokens, lengths):
    """The tokens allowed next, as a set for each sentence and hypothesis."""
    tokens = jnp.asarray(tokens)
    found = np.asarray(constraint(jnp.zeros((*tokens.shape[:2], 9)), tokens, jnp.asarray(lengths)))
    assert set(np.unique(found)) <= {0.0, -np.inf}
    return [[set(np.flatnonzero(row == 0)) for row in rows] for rows in found]


def test_eos_is_forbidden_before_the_minimum_length():
    tokens = np.zeros((2, 1, 4), int)
    assert allowed(forbid_early_eos(3), tokens, [1, 2]) == [[ALL - {1}], [ALL]]


def test_a_prefix_is_forced_token_by_token_and_then_every_token_is_allowed():
    tokens, log_probs = np.zeros((3, 1, 4), int), jnp.zeros((3, 1, 9))
    constraint = force_prefix(jnp.array([[5, 6], [7, 0], [0, 0]]), log_probs)
    assert allowed(constraint, tokens, [0, 0, 0]) == [[{5}], [{7}], [ALL]]
    assert allowed(constraint, tokens, [1, 1, 1]) == [[{6}], [ALL], [ALL]]
    assert allowed(constraint, tokens, [2, 2, 2]) == [[ALL], [ALL], [ALL]]


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda log_probs, tokens, lengths: log_probs[..., :3], r"\(2, 1, 3\)"),
        (lambda log_probs, tokens, lengths: log_probs[:, 0], r"\(2, 9\)"),
        (lambda log_probs, tokens, lengths: None, "None"),
    ],
)
def test_a_constraint_that_returns_other_than_log_probabilities_is_refused(function, shape):
    arguments = jnp.zeros((2, 1, 9)), jnp.zeros((2, 1, 4), int), jnp.zeros(2, int)
    message = rf"constraint: must return the log-probabilities, of shape \(2, 1, 9\); got {shape}"
    with pytest.raises(InputError, match=message):
        Constraint(function, largest_bonus=0.0)(*arguments)


@pytest.mark.parametrize("bonus", [-1.0, float("nan"), None, "3"])
def test_the_largest_bonus_is_a_number_of_at_least_0(bonus):
    with pytest.raises(InputError, match="largest_bonus must be a number of at least 0; got "):
        Constraint(lambda log_probs, *_: log_probs, bonus)
    Constraint(lambda log_probs, *_: log_probs, float("inf"))


def test_features_that_are_no_function_are_refused():
    with pytest.raises(InputError, match="features must be a function of a sentence; got a list"):
        Constraint(lambda log_probs, *_: log_probs, 0.0, [1])


def test_repeated_n_grams_are_blocked():
    """3 4 5 3 4 → 5 is forbidden, as it would repeat 3 4 5; tokens beyond the length are ignored."""
    tokens = [[[3, 4, 5, 3, 4, 0, 0], [3, 4, 5, 3, 4, 0, 0]], [[2, 2, 2, 8, 8, 8, 8], [6, 2, 7, 8, 8, 8, 8]]]
    assert allowed(no_repeated_ngram(3), tokens, [5, 3]) == [[ALL - {5}, ALL - {5}], [ALL - {2}, ALL]]
    assert allowed(no_repeated_ngram(2), tokens, [5, 3]) == [[ALL - {5}, ALL - {5}], [ALL - {2}, ALL]]
    assert allowed(no_repeated_ngram(1), tokens, [2, 3]) == [[ALL - {3, 4}] * 2, [ALL - {2}, ALL - {6, 2, 7}]]


def test_n_gram_blocking_equals_plain_python():
    rng = np.random.default_rng(0)
    for n in (1, 2, 3, 4):
        tokens, lengths = rng.integers(2, 5, (6, 3, 12)), rng.integers(0, 12, 6)
        found = allowed(no_repeated_ngram(n), tokens, lengths)
        for b, length in enumerate(lengths):
            for w in range(3):
                hypothesis = tokens[b, w, :length].tolist()
                seen = {tuple(hypothesis[i : i + n]) for i in range(len(hypothesis) - n + 1)}
                tail = hypothesis[len(hypothesis) - n + 1 :] if n > 1 else []
                expected = {t for t in ALL if len(tail) < n - 1 or (*tail, t) not in seen}
                assert found[b][w] == expected
