"""The Python examples of README.md, docs/decoding.md and docs/constraints.md do what the text around them says."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.decoding.examples import run_examples

PAGES = ("README.md", "docs/decoding.md", "docs/constraints.md")
EOS = 1

pytestmark = pytest.mark.slow  # compiles five searches


@pytest.fixture(scope="module")
def page(translator):
    """The names that the examples define, run one after the other."""
    return run_examples(PAGES, 6, load=lambda path: translator)


def additions(processor, *hypotheses):
    """What a logits processor adds to the log-probability of each next token, for each of the hypotheses."""
    capacity = max(map(len, hypotheses)) + 2
    tokens = jnp.array([[[*tokens, *[0] * (capacity - len(tokens))]] for tokens in hypotheses])
    lengths = jnp.array([len(tokens) for tokens in hypotheses])
    return np.asarray(processor(jnp.zeros((len(hypotheses), 1, 340)), tokens, lengths))[:, 0]


def test_a_word_is_forbidden_but_its_subwords_are_not(page):
    *first, last = page["translator"].vocabularies.target.encode("Licht")[:-1]
    assert first
    added = additions(page["forbid_light"], [], [5, *first], [*first, 5], first[:-1], first)
    expected = np.zeros((5, 340))
    expected[[1, 4], last] = -np.inf
    np.testing.assert_array_equal(added, expected)


def test_a_term_is_favoured_until_the_hypothesis_contains_it(page):
    term = page["translator"].vocabularies.target.encode("Gerät")[:-1]
    assert len(set(term)) == len(term) > 2
    added = additions(page["require_device"], [], [5, *term[:2]], [*term[:2], 5], [5, *term], [*term, 5])
    expected = np.zeros((5, 340))
    expected[:3, EOS] = -np.inf
    expected[[0, 1, 2], [term[0], term[2], term[0]]] = 3.0
    np.testing.assert_array_equal(added, expected)


def test_each_example_translates_each_sentence(page):
    for name in ("samples", "prefixed", "diverse", "without_light", "with_device"):
        assert [len(found) > 0 for found in page[name]] == [True, True], name
    assert page["prefixed"][0][0].text.startswith("Schalte")
    assert page["score"].num_tokens == len(page["score"].token_log_probs)
