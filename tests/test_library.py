"""The examples of docs/library.md run one after the other and compute what the text around them says."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import t2t_jax
from t2t_jax.decoding.trained_model import TrainedModel
from tests.decoding.conftest import translator  # noqa: F401  (a fixture)

PAGE = Path(__file__).parents[1] / "docs/library.md"


@pytest.fixture(scope="module")
def page(translator):  # noqa: F811
    """The names that the examples define; in place of the run, the translator's model."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    unread = dict.fromkeys(("run", "step", "checkpoint", "averaged_steps", "data"))
    (model,), (params,) = translator.ensemble
    trained = TrainedModel(
        model=model, params=params, vocabularies=translator.vocabularies, task=translator.task, **unread
    )
    names = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(t2t_jax, "restore", lambda path: trained)
        for block in blocks:
            exec(block, names)
    return names


def test_logits_and_gradients_are_functions_of_the_parameters(page):
    assert page["logits"].shape == (2, 3, 340)
    assert jax.tree.map(jnp.shape, page["gradients"]) == jax.tree.map(jnp.shape, page["params"])
    assert page["sums"]["target_tokens"] == page["metrics"]["target_tokens"] == 5


def test_the_steps_change_the_state_and_the_seeds_differ(page):
    assert int(page["state"].step) == 3 and page["metrics"]["finite"] == 1
    np.testing.assert_array_equal(page["states"].step, [1, 1, 1, 1])
    assert len(set(np.asarray(page["of_seeds"]["loss"]).tolist())) == 4


def test_own_parameters_translate(page):
    ((hypothesis,),) = page["translations"]
    assert hypothesis.num_tokens == len(hypothesis.tokens) > 0


def test_the_search_returns_the_log_probabilities_of_the_bigrams(page):
    log_probs = np.asarray(jax.nn.log_softmax(page["bigrams"]))
    found = page["found"]
    for row in range(2):
        for rank in range(2):
            tokens = np.asarray(found.tokens[row, rank, : int(found.lengths[row, rank])])
            steps = zip([0, *tokens[:-1]], tokens, strict=True)
            assert tokens[-1] == 1
            np.testing.assert_allclose(found.log_probs[row, rank], sum(log_probs[s] for s in steps), rtol=1e-5)
    np.testing.assert_array_equal(page["best"], found.tokens[:, 0])
