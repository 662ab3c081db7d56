"""Subword regularisation: training pairs in several random segmentations."""

import collections
import dataclasses
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t2t_jax.data import shards
from t2t_jax.data.cleaning import Rules
from t2t_jax.data.corpora import read_corpus
from t2t_jax.data.preparation import _key, prepare
from t2t_jax.data.ready_vocabulary import model_of_merges
from t2t_jax.data.tokenizer import EOS, Tokenizer, train_symbols, train_vocabulary
from t2t_jax.errors import InputError
from tests.data import toy_corpus
from tests.data.test_token_store import SETTINGS

THREE = dataclasses.replace(SETTINGS, segmentations=3, max_length=99)
PAIRS = toy_corpus.pairs(300, 0)


@pytest.fixture
def corpus(tmp_path):
    return read_corpus("files", "en", "de", toy_corpus.write_splits(tmp_path), tmp_path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    def with_vocabulary(model):
        path = tmp_path_factory.mktemp("vocabulary") / "vocab.model"
        path.write_bytes(model)
        return Tokenizer(path)

    return with_vocabulary


@pytest.fixture(scope="module")
def bpe(tokenizer):
    return tokenizer(train_vocabulary([text for pair in PAIRS for text in pair], 340))


TEXTS = [source for source, _ in PAIRS]


def test_without_any_merge_each_piece_is_a_character(bpe):
    for text, ids in zip(TEXTS, bpe.sample_many(TEXTS, rate=1.0, seed=1), strict=True):
        assert [bpe.piece(i) for i in ids[:-1]] == list("▁" + text.replace(" ", "▁"))
        assert ids[-1] == EOS


def test_the_fewer_merges_are_left_out_the_nearer_to_the_best_segmentation(bpe):
    lengths = [sum(map(len, bpe.sample_many(TEXTS, rate, seed=1))) for rate in (0.0, 0.1, 0.4, 1.0)]
    assert lengths == sorted(set(lengths))


@functools.cache
def models():
    text = [text for pair in PAIRS for text in pair]
    merges = [("o", "n"), ("on", "e</w>"), ("t", "w"), ("tw", "o</w>"), ("e", "i"), ("ei", "n"), ("ein", "s</w>")]
    return {
        "byte fallback": train_vocabulary(text, 340),
        "unknown": train_vocabulary(text, 90, byte_fallback=False),
        "normalised": train_vocabulary([*text, "â"], 90, byte_fallback=False, replace={"â": "ae", "ü": "ue"}),
        "spaces end words": model_of_merges(merges, "abcdefghij"),
    }


@settings(max_examples=60)
@given(
    text=st.lists(st.text("onetwischâü▁ \x85éü\0☃😀", max_size=30), max_size=5), name=st.sampled_from(list(models()))
)
def test_with_every_merge_it_is_the_segmentation_of_sentencepiece(tokenizer, text, name):
    vocabulary = tokenizer(models()[name])
    assert vocabulary.sample_many(text, rate=0.0, seed=1) == vocabulary.encode_many(text)
    assert vocabulary.sample_many(TEXTS, rate=0.0, seed=1) == vocabulary.encode_many(TEXTS)


def test_a_merge_is_left_out_with_the_given_probability(tokenizer):
    """By hand, p = 0.3. a b▁: ab▁ is made with 0.7; a word without a merge to make is complete.

    c d e▁: cd, then cde▁, each with 0.7. b▁ and e▁ are no merges, but symbols that subword-nmt starts from.
    """
    vocabulary = tokenizer(model_of_merges([("a", "b</w>"), ("c", "d"), ("cd", "e</w>")], "abcde"))
    (ids,) = vocabulary.sample_many([" ".join(["ab"] * 20_000 + ["cde"] * 20_000)], rate=0.3, seed=1)
    counts = collections.Counter(vocabulary.tokens(ids))
    assert counts["ab▁"] / 20_000 == pytest.approx(0.7, abs=0.015)
    assert counts["cde▁"] / 20_000 == pytest.approx(0.7 * 0.7, abs=0.015) and counts["▁"] == 0


def test_samples_follow_the_seed_and_decode_to_the_text(bpe):
    first = bpe.sample_many(TEXTS, 0.3, seed=5)
    assert bpe.sample_many(TEXTS, 0.3, seed=5) == first != bpe.sample_many(TEXTS, 0.3, seed=6)
    assert [bpe.decode(ids) for ids in first] == TEXTS
    assert bpe.sample_many(["", "one", ""], 0.0, seed=1) == bpe.encode_many(["", "one", ""])
    assert bpe.sample_many([], 0.3, seed=1) == []


def test_the_store_holds_each_pair_in_each_segmentation(corpus, tmp_path):
    store, best = prepare(corpus, THREE, tmp_path / "three"), prepare(corpus, SETTINGS, tmp_path / "one")
    sides = zip(store.vocabularies, (store.source, store.target), strict=True)
    decoded = [[vocabulary.decode(ids) for ids in side] for vocabulary, side in sides]
    assert list(zip(*decoded, strict=True)) == PAIRS * 3
    for side, best_side in ((store.source, best.source), (store.target, best.target)):
        differing = {tuple(tuple(side[index + 300 * n]) for n in range(3)) for index in range(300)}
        assert sum(len(set(samples)) > 1 for samples in differing) > 100
        assert side.lengths().sum() > 3 * best_side.lengths().sum()
    assert store.vocabularies.checksum == best.vocabularies.checksum and store.held_out("dev") == best.held_out("dev")
    assert store.describe().startswith(
        "900 of 900 training pairs kept\n  each pair 3 times, segmented into subwords at random\n"
    )


def test_worker_processes_and_a_resumed_preparation_draw_the_same(corpus, tmp_path, monkeypatch):
    """The segmentations of a shard depend on its number, not on the shards that its process wrote before."""
    monkeypatch.setattr(shards, "SHARD_SIZE", 100)
    together = prepare(corpus, THREE, tmp_path / "together")
    assert any(together.source[i].tolist() != together.source[300 + i].tolist() for i in range(100))
    one_by_one = lambda write, jobs: (write(*job) for job in reversed(list(jobs)))
    monkeypatch.setattr(shards, "_on_all_cores", one_by_one)
    assert prepare(corpus, THREE, tmp_path / "alone").fingerprint == together.fingerprint


def test_each_rate_and_number_has_a_store_and_the_default_keeps_its_name(corpus, tmp_path):
    changes = ({}, {"segmentations": 2}, {"segmentations": 3}, {"segmentations": 3, "bpe_dropout": 0.2})
    stores = [prepare(corpus, dataclasses.replace(SETTINGS, **fields), tmp_path) for fields in changes]
    assert len({store.directory for store in stores}) == 4


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"cleaning": Rules(drop_duplicates=True)}, "data.cleaning.drop_duplicates=True would drop all but one of"),
        ({"task": "parsing", "source_vocab_size": 300}, "the targets of data.task=parsing are whole symbols"),
        ({"bpe_dropout": 0.0}, "data.bpe_dropout must be"),
        ({"segmentations": 0}, "data.segmentations must be"),
    ],
)
def test_what_has_one_segmentation_is_refused(corpus, tmp_path, fields, error):
    with pytest.raises(InputError, match=error):
        prepare(corpus, dataclasses.replace(THREE, **fields), tmp_path)


def test_a_unigram_vocabulary_is_refused_before_it_is_trained():
    with pytest.raises(InputError, match="data.segmentations=3: several need data.vocab_kind=bpe; got unigram"):
        dataclasses.replace(THREE, vocab_kind="unigram")
    dataclasses.replace(THREE, vocab_kind="unigram", vocabulary=__file__)  # none is trained


def test_with_one_segmentation_the_rate_of_dropout_changes_no_store(corpus):
    keys = {_key(corpus, dataclasses.replace(SETTINGS, bpe_dropout=rate)) for rate in (0.1, 0.2)}
    assert len(keys) == 1
    assert len({_key(corpus, dataclasses.replace(THREE, bpe_dropout=rate)) for rate in (0.1, 0.2)}) == 2


def test_other_vocabularies_than_bpe_are_refused(tokenizer):
    for model in (train_symbols(TEXTS, 30), train_vocabulary(TEXTS, 280, kind="unigram")):
        with pytest.raises(InputError, match="data.segmentations: several need a BPE vocabulary"):
            tokenizer(model).sample_many(TEXTS, 0.1, seed=1)
