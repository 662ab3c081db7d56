"""The code in docs/decoding.md does what the text around it says."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import t2t_jax

PAGE = Path(__file__).parents[2] / "docs/decoding.md"
EOS = 1

pytestmark = pytest.mark.slow  # its five searches are compiled for their own shapes


@pytest.fixture(scope="module")
def page(translator):
    """Everything the examples define, run one after the other."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    names = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(t2t_jax, "load", lambda path: translator)
        for block in blocks:
            exec(block, names)
    return names


def changes(constraint, *said):
    """What a constraint adds to each token's log-probability, after each of the hypotheses `said`."""
    room = max(len(tokens) for tokens in said) + 2
    tokens = jnp.array([[[*tokens, *[0] * (room - len(tokens))]] for tokens in said])
    lengths = jnp.array([len(tokens) for tokens in said])
    return np.asarray(constraint(jnp.zeros((len(said), 1, 340)), tokens, lengths))[:, 0]


def test_a_word_is_forbidden_and_its_parts_are_not(page):
    *first, last = page["translator"].tokenizer.encode("Licht")[:-1]
    assert first
    added = changes(page["never_say_light"], [], [5, *first], [*first, 5], first[:-1], first)
    expected = np.zeros((5, 340))
    expected[[1, 4], last] = -np.inf
    np.testing.assert_array_equal(added, expected)


def test_a_term_is_asked_for_until_it_is_said(page):
    term = page["translator"].tokenizer.encode("Gerät")[:-1]
    assert len(set(term)) == len(term) > 2
    added = changes(page["say_device"], [], [5, *term[:2]], [*term[:2], 5], [5, *term], [*term, 5])
    expected = np.zeros((5, 340))
    expected[:3, EOS] = -np.inf
    expected[[0, 1, 2], [term[0], term[2], term[0]]] = 3.0
    np.testing.assert_array_equal(added, expected)


def test_each_example_gives_an_answer_for_each_sentence(page):
    for name in ("samples", "begun", "varied", "without", "within"):
        assert [len(found) > 0 for found in page[name]] == [True, True], name
    assert page["begun"][0][0].text.startswith("Schalte")
    assert page["score"].num_tokens == len(page["score"].token_log_probs)
