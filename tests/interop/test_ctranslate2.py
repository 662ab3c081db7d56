import json

import flax.linen as nn
import numpy as np
import pytest
import sentencepiece

import t2t_jax
from t2t_jax.decoding.trained_model import restore
from t2t_jax.errors import InputError
from t2t_jax.interop.export import export_run
from t2t_jax.model.layers import POSITIONS
from t2t_jax.training.loop import train
from tests.data import toy_corpus
from tests.interop import models
from tests.runs import tiny_config

ctranslate2 = pytest.importorskip("ctranslate2")

ONE = {"num_layers": 1}
VARIANTS = [{}, ONE | {"norm": "pre"}, ONE | {"positions": "t2t"}, ONE | {"positions": "learned"},
            ONE | {"share_embeddings": False}, ONE | {"attention_bias": True, "layer_norm_epsilon": 1e-3},
            ONE | {"activation": "gelu"}, ONE | {"activation": "swish", "logits_bias": True},
            ONE | {"d_model": 15, "num_heads": 3, "d_k": 5, "d_v": 5, "d_ff": 7, "positions": "learned"},
            {"norm": "pre", "positions": "learned", "share_embeddings": False, "attention_bias": True,
             "logits_bias": True}]  # fmt: skip


def export(run, folder):
    export_run(str(run), format="ctranslate2", output=str(folder), step=None)
    return ctranslate2.Translator(str(folder), device="cpu", compute_type="float32", inter_threads=1)


def pieces(tokenizer, text):
    """Without EOS, which CTranslate2 adds to sources and targets."""
    return tokenizer.tokens(tokenizer.encode(text))[:-1]


def assert_reads_as(path, tokenizer):
    """The SentencePiece model alone, which our own tokenizer does not read text for, encodes any line as we do."""
    exported = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert [exported.id_to_piece(i) for i in range(len(exported))] == tokenizer.pieces()
    for text in models.WHITE_SPACE:
        assert [*exported.encode(text), 1] == tokenizer.encode(text), text


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_score_batch_is_our_score(tmp_path, changes):
    run = models.random_run(tmp_path / "run", **changes)
    theirs, ours = export(run, tmp_path / "ct2"), t2t_jax.load(run)
    tokenizer = ours.vocabularies.source
    pairs = [*toy_corpus.pairs(6, 1), ("fünf €", "a"), ("x", "")]
    found = theirs.score_batch(*([pieces(tokenizer, side) for side in sides] for sides in zip(*pairs, strict=True)))
    for score, expected in zip(found, ours.score(pairs), strict=True):
        np.testing.assert_allclose(score.log_probs, expected.token_log_probs, atol=1e-4)


# --- Separate source and target vocabularies ---------------------------------------------------------------


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    """A run with 310 source and 325 target pieces, and its export."""
    return exported_with_separate_vocabularies(tmp_path_factory.mktemp("separate"))


def exported_with_separate_vocabularies(directory, **changes):
    run = models.random_run_with_separate_vocabularies(directory / "run", seed=4, **changes)
    return t2t_jax.load(run), export(run, directory / "ct2"), directory / "ct2"


def test_with_separate_vocabularies_score_batch_is_our_score(separate):
    assert_scores_are_ours(*separate)


def test_with_separate_vocabularies_and_all_else_score_batch_is_our_score(tmp_path):
    changes = {"norm": "pre", "positions": "learned", "attention_bias": True, "logits_bias": True, "activation": "gelu"}
    changes |= ONE
    assert_scores_are_ours(*exported_with_separate_vocabularies(tmp_path, num_heads=2, d_k=8, d_v=8, **changes))


def assert_scores_are_ours(ours, theirs, _):
    pairs = [*toy_corpus.pairs(6, 1), ("five €", "fünf €"), ("x", "")]
    tokens = [
        [pieces(v, text) for text in side] for v, side in zip(ours.vocabularies, zip(*pairs, strict=True), strict=True)
    ]
    for score, expected in zip(theirs.score_batch(*tokens), ours.score(pairs), strict=True):
        assert len(score.log_probs) == len(expected.token_log_probs)
        np.testing.assert_allclose(score.log_probs, expected.token_log_probs, atol=1e-4)


@pytest.mark.slow
def test_with_separate_vocabularies_translations_are_ours(separate):
    """Greedy search, as far as the length limit allows: a random model rarely ends a sentence."""
    ours, theirs, _ = separate
    sentences = [source for source, _ in toy_corpus.pairs(6, 4)]
    tokens = [pieces(ours.vocabularies.source, sentence) for sentence in sentences]
    found = theirs.translate_batch(tokens, beam_size=1, min_decoding_length=0, max_decoding_length=10)
    expected = ours.translate(sentences, beam_size=1, alpha=0.0, min_length=0, max_extra_length=20)
    assert len({tuple(result.hypotheses[0]) for result in found}) > 1
    for result, hypotheses in zip(found, expected, strict=True):
        assert len(result.hypotheses[0]) > 1
        assert result.hypotheses[0] == hypotheses[0].tokens[: len(result.hypotheses[0])]


def test_with_separate_vocabularies_the_folder_holds_both_and_their_models_tokenise_as_ours(separate):
    ours, _, folder = separate
    for name, tokenizer in zip(("source", "target"), ours.vocabularies, strict=True):
        assert json.loads((folder / f"{name}_vocabulary.json").read_text()) == tokenizer.pieces()
        assert_reads_as(folder / f"{name}_vocab.model", tokenizer)
    assert not (folder / "shared_vocabulary.json").exists()


def test_special_pieces_whose_names_differ_are_refused(tmp_path):
    vocabularies = models.separate_vocabularies()
    vocabularies["target_vocab.model"] = models.with_eos_named(vocabularies["target_vocab.model"], "[end]")
    run = models.random_run_with_separate_vocabularies(tmp_path / "run", vocabularies=vocabularies)
    with pytest.raises(InputError, match="CTranslate2 has one name for each of them; --format=safetensors keeps both"):
        export(run, tmp_path / "ct2")


# --- A trained model ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model trained until its translations end and differ from each other."""
    directory = tmp_path_factory.mktemp("trained")
    config = tiny_config(
        directory, train__train_steps=500, optimizer__warmup_steps=100, optimizer__learning_rate_factor=0.5,
        model__d_model=32, model__d_k=16, model__d_v=16, model__d_ff=64, data__tokens_per_batch=512,
        checkpoint__interval_steps=100, model__dropout=0.0, train__log_interval=50,
    )  # fmt: skip
    train(config, str(directory / "run"))
    return directory / "run"


@pytest.mark.slow
@pytest.mark.parametrize("beam_size", [1, 4])
def test_without_a_length_penalty_translations_are_ours(trained, tmp_path, beam_size):
    theirs, ours = export(trained, tmp_path / "ct2"), t2t_jax.load(trained)
    tokenizer = ours.vocabularies.source
    sentences = [source for source, _ in toy_corpus.pairs(20, 2)]
    found = theirs.translate_batch(
        [pieces(tokenizer, sentence) for sentence in sentences],
        beam_size=beam_size,
        length_penalty=0,
        min_decoding_length=0,  # 1, the default, takes EOS out of the first softmax
        max_decoding_length=100,
        return_scores=True,
    )
    expected = ours.translate(sentences, beam_size=beam_size, alpha=0.0, min_length=0, max_extra_length=100)
    assert len({tuple(result.hypotheses[0]) for result in found}) > 10
    for result, hypotheses in zip(found, expected, strict=True):
        assert hypotheses[0].finished and [*result.hypotheses[0], "</s>"] == hypotheses[0].tokens
        assert result.scores[0] == pytest.approx(hypotheses[0].log_prob, abs=1e-4)


class Sloped(nn.Module):
    d_model: int

    @nn.compact
    def __call__(self, positions):
        return positions[:, None] / 9 * self.param("slope", nn.initializers.normal(), (1, self.d_model))


def test_a_position_encoding_of_ones_own_is_exported_with_its_parameters(tmp_path, monkeypatch):
    monkeypatch.setitem(POSITIONS, "sloped", lambda max_positions, d_model: Sloped(d_model))
    run = models.random_run(tmp_path / "run", num_layers=1, positions="sloped")
    pair = ("one two", "eins zwei")
    theirs, ours = export(run, tmp_path / "ct2"), t2t_jax.load(run)
    source, target = (pieces(ours.vocabularies.source, text) for text in pair)
    found = theirs.score_batch([source], [target])[0].log_probs
    np.testing.assert_allclose(found, ours.score([pair])[0].token_log_probs, atol=1e-4)


def test_positions_reach_beyond_the_longest_sentence(tmp_path):
    run = models.random_run(tmp_path / "run", num_layers=1)
    theirs, ours = export(run, tmp_path / "ct2"), t2t_jax.load(run)
    tokenizer = ours.vocabularies.source
    source = " ".join(["one two"] * 300)
    tokens = pieces(tokenizer, source)
    assert 300 < len(tokens) < 1024
    found = theirs.score_batch([tokens], [tokens])[0].log_probs
    np.testing.assert_allclose(found, ours.score([(source, source)])[0].token_log_probs, atol=1e-4)


def test_the_folder_holds_the_vocabulary_and_its_sentencepiece_model(tmp_path):
    run = models.random_run(tmp_path / "run", num_layers=1)
    export(run, tmp_path / "ct2")
    tokenizer = restore(run).vocabularies.target
    assert_reads_as(tmp_path / "ct2/vocab.model", tokenizer)
    vocabulary = json.loads((tmp_path / "ct2/shared_vocabulary.json").read_text())
    assert vocabulary == tokenizer.pieces()
