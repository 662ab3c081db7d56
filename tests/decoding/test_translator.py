import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2t_jax import sharding
from t2t_jax.data.tokenizer import Tokenizer, train_vocabulary
from t2t_jax.decoding import translator as translator_module
from t2t_jax.decoding.translator import Translator
from t2t_jax.errors import InputError
from t2t_jax.model.transformer import Transformer
from tests import tiny
from tests.data import toy_corpus

SENTENCES = [
    "one two three",
    "four",
    "",
    "five six seven eight one two three four five six seven eight one two",
    "two two",
]


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """A random model, its probabilities sharpened so that hypotheses differ by more than rounding."""
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.model"
    path.write_bytes(train_vocabulary([side for pair in toy_corpus.pairs(300, 0) for side in pair], 340))
    tokenizer = Tokenizer(path)
    model = Transformer(dataclasses.replace(tiny.CONFIG, vocab_size=len(tokenizer)))
    variables = tiny.sharp_variables(model, seed=1)
    mesh = sharding.make_mesh(jax.devices()[:1])
    return Translator(model, variables["params"], tokenizer, max_length=256, mesh=mesh)


def close(a, b):
    assert [h.tokens for h in a] == [h.tokens for h in b]
    np.testing.assert_allclose([h.log_prob for h in a], [h.log_prob for h in b], atol=1e-3, rtol=1e-5)


def test_a_sentence_alone_equals_the_same_sentence_in_any_batch(translator):
    together = translator.translate(SENTENCES, n_best=2, max_extra_length=6)
    for sentence, found in zip(SENTENCES, together, strict=True):
        close(translator.translate([sentence], n_best=2, max_extra_length=6)[0], found)
    shuffled = translator.translate(SENTENCES[::-1], n_best=2, max_extra_length=6)[::-1]
    for first, second in zip(together, shuffled, strict=True):
        close(first, second)


def test_the_forward_pass_gives_an_output_its_reported_log_probs(translator):
    """On the ids the search wrote; a random model's text is not always cut into the same ones again."""
    found = translator.translate(SENTENCES, n_best=3, max_extra_length=6)
    piece_to_id = translator._tokenizer._pieces.piece_to_id
    forward = jax.jit(translator._model.apply)
    checked = 0
    for sentence, hypotheses in zip(SENTENCES, found, strict=True):
        for h in hypotheses[: 3 if sentence else 0]:
            inputs = jnp.array([translator._tokenizer.encode(sentence)])
            targets = jnp.array([[piece_to_id(token) for token in h.tokens]])
            log_probs = jax.nn.log_softmax(forward({"params": translator._params}, inputs, targets))[0]
            expected = jnp.take_along_axis(log_probs, targets[0, :, None], axis=-1)[:, 0]
            np.testing.assert_allclose(h.token_log_probs, expected, rtol=1e-3, atol=1e-3)
            checked += 1
    assert checked > 8


def test_score_is_the_log_softmax_of_the_forward_pass(translator):
    source, target = "one two three", "drei zwei"
    inputs, targets = (jnp.array([translator._tokenizer.encode(text)]) for text in (source, target))
    logits = translator._model.apply({"params": translator._params}, inputs, targets)
    expected = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[0, :, 0]
    (score,) = translator.score([(source, target)])
    np.testing.assert_allclose(score.token_log_probs, expected, atol=1e-4)
    np.testing.assert_allclose(score.log_prob, expected.sum(), rtol=1e-5)


def test_each_hypothesis_is_what_the_contract_says(translator):
    for sentence, hypotheses in zip(
        SENTENCES, translator.translate(SENTENCES, n_best=4, max_extra_length=6), strict=True
    ):
        assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)
        for h in hypotheses:
            assert h.num_tokens == len(h.tokens) == len(h.token_log_probs)
            np.testing.assert_allclose(h.log_prob, sum(h.token_log_probs), rtol=1e-5)
            np.testing.assert_allclose(h.score, h.log_prob / ((5 + h.num_tokens) / 6) ** 0.6, rtol=1e-5)
            assert (h.tokens[-1:] == ["</s>"]) == h.finished or sentence == ""
            assert h.num_tokens <= len(translator._tokenizer.encode(sentence)) + 6


def test_an_empty_sentence_has_an_empty_translation(translator):
    ((only,), (spaces,)) = translator.translate(["", " \t "])
    assert only == spaces and only.text == "" and only.log_prob == 0.0
    assert translator.translate([]) == []


def test_an_over_long_sentence_is_translated_with_a_warning(translator, caplog):
    translator = Translator(translator._model, translator._params, translator._tokenizer, max_length=4)
    (hypotheses,) = translator.translate(["one two three four five"], max_extra_length=2)
    assert hypotheses[0].num_tokens > 0
    assert "6 subwords is longer than any in training (4)" in caplog.text


def test_eight_devices_translate_as_one_does(translator):
    mesh = sharding.make_mesh(jax.devices())
    eight = Translator(translator._model, translator._params, translator._tokenizer, max_length=256, mesh=mesh)
    assert eight._mesh.devices.size == 8
    expected, found = (which.translate(SENTENCES, max_extra_length=6) for which in (translator, eight))
    for one, other in zip(expected, found, strict=True):
        close(one, other)


def test_batches_cover_every_sentence_once_in_few_shapes():
    lengths = [1 + (37 * i) % 90 for i in range(500)]
    seen, shapes = [], set()
    for indices, width, rows in translator_module._batches(lengths):
        assert len(indices) <= rows
        assert all(width // 2 < lengths[i] <= width or (lengths[i] <= width == 16) for i in indices)
        seen += indices
        shapes.add((width, rows))
    assert sorted(seen) == list(range(500))
    assert len(shapes) <= 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beam_size": 0}, "beam_size must be at least 1; got 0"),
        ({"n_best": 5}, "n_best must be between 1 and beam_size=4; got 5"),
        ({"alpha": -1.0}, "alpha must be at least 0; got -1.0"),
        ({"max_extra_length": -1}, "max_extra_length must be at least 0; got -1"),
    ],
)
def test_impossible_options_are_refused(translator, options, said):
    with pytest.raises(InputError, match=said):
        translator.translate(["one"], **options)
