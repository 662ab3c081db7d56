"""The examples of docs/library.md run one after the other and compute what the text around them says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2t_jax.decoding.trained_model import TrainedModel
from tests.decoding.examples import run_examples

pytestmark = pytest.mark.slow  # compiles all of its functions


@pytest.fixture(scope="module")
def page(translator):
    """The names that the examples define; in place of the run, the translator's model."""
    unread = dict.fromkeys(("run", "step", "checkpoint", "averaged_steps", "data"))
    (model,), (params,) = translator.ensemble
    trained = TrainedModel(
        model=model, params=params, vocabularies=translator.vocabularies, task=translator.task, **unread
    )
    return run_examples(("docs/library.md",), 4, restore=lambda path: trained)


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


def test_the_pooled_states_of_a_sentence_do_not_depend_on_its_padding(page):
    assert page["pooled"].shape == (2, page["trained"].model.config.d_model)
    alone = page["encode"](page["trained"].params, jnp.array([page["ids"][1]])).mean(axis=1)
    np.testing.assert_allclose(page["pooled"][1:], alone, atol=1e-5)


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
