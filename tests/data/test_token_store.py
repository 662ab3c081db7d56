import dataclasses

import numpy as np
import pytest

from t2t_jax.data.corpora import read_corpus
from t2t_jax.data.token_store import StoreSettings, TokenStore, prepare
from t2t_jax.errors import DamagedError, InputError
from tests.data import toy_corpus

SETTINGS = StoreSettings(vocab_size=340, vocab_kind="bpe", byte_fallback=True, max_length=32, heldout_max_length=0)


@pytest.fixture
def corpus(tmp_path):
    return read_corpus("files", "en", "de", toy_corpus.write_splits(tmp_path), tmp_path)


def test_the_store_holds_the_corpus_pair_for_pair(corpus, tmp_path):
    store = prepare(corpus, SETTINGS, tmp_path / "stores")
    pairs = toy_corpus.pairs(300, 0)
    assert len(store.source) == len(store.target) == 300
    for index in (0, 1, 150, 299):
        decoded = tuple(store.tokenizer.decode(side[index]) for side in (store.source, store.target))
        assert decoded == pairs[index]
    np.testing.assert_array_equal(store.source.lengths(), [len(store.source[i]) for i in range(300)])
    assert list(zip(*store.held_out("test"), strict=True)) == toy_corpus.pairs(20, 2)


def test_preparing_again_opens_what_is_there(corpus, tmp_path):
    first = prepare(corpus, SETTINGS, tmp_path / "stores")
    written = (first.directory / "train.source.ids").stat().st_mtime_ns
    again = prepare(corpus, SETTINGS, tmp_path / "stores")
    assert again.fingerprint == first.fingerprint
    assert (again.directory / "train.source.ids").stat().st_mtime_ns == written
    other = prepare(corpus, dataclasses.replace(SETTINGS, max_length=4), tmp_path / "stores")
    assert other.directory != first.directory and other.fingerprint != first.fingerprint


def test_what_is_left_out_of_training_is_counted_and_evaluation_loses_nothing(tmp_path):
    prefixes = toy_corpus.write_splits(tmp_path)
    extra = [("", "eins"), ("one", " \t"), ("one " * 40, "eins")]
    toy_corpus.write(tmp_path / "train", [*toy_corpus.pairs(300, 0), *extra])
    toy_corpus.write(tmp_path / "test", extra)
    corpus = read_corpus("files", "en", "de", prefixes, tmp_path)
    store = prepare(corpus, SETTINGS, tmp_path)
    assert dataclasses.asdict(store.report) == {"read": 303, "empty": 2, "too_long": 1}
    assert len(store.source) == store.report.kept == 300
    assert len(store.held_out("test")[0]) == 3
    assert "300 of 303 training pairs kept; dropped 2 with an empty side, 1 over data.max_length" in store.describe()


def test_the_longest_training_pair_has_exactly_max_length_subwords(corpus, tmp_path):
    store = prepare(corpus, dataclasses.replace(SETTINGS, max_length=5), tmp_path)
    assert max(store.source.lengths().max(), store.target.lengths().max()) == 5
    assert store.report.too_long == sum(len(en.split()) > 4 for en, _ in toy_corpus.pairs(300, 0))


def test_held_out_pairs_beyond_their_limit_are_counted(corpus, tmp_path):
    store = prepare(corpus, dataclasses.replace(SETTINGS, heldout_max_length=4), tmp_path)
    kept = [pair for pair in toy_corpus.pairs(20, 2) if len(pair[0].split()) <= 3]
    assert list(zip(*store.held_out("test"), strict=True)) == kept
    assert f"{len(kept)} test pairs; {20 - len(kept)} beyond data.heldout_max_length" in store.describe()


def test_nothing_left_to_train_on_is_refused(tmp_path):
    prefixes = toy_corpus.write_splits(tmp_path)
    toy_corpus.write(tmp_path / "train", [pair for pair in toy_corpus.pairs(300, 0) if " " in pair[0]])
    corpus = read_corpus("files", "en", "de", prefixes, tmp_path)
    with pytest.raises(InputError, match="no pair is left to train on"):
        prepare(corpus, dataclasses.replace(SETTINGS, max_length=2), tmp_path)


@pytest.mark.parametrize("name", ["train.source.ids", "train.target.ends", "dev.source.txt", "vocab.model"])
def test_one_flipped_bit_anywhere_is_refused_by_name(corpus, tmp_path, name):
    store = prepare(corpus, SETTINGS, tmp_path)
    path = store.directory / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match=name):
        TokenStore(store.directory)


def test_a_failed_preparation_leaves_nothing_behind(tmp_path):
    prefixes = toy_corpus.write_splits(tmp_path)
    (tmp_path / "test.de").write_bytes(b"eins\n" * 19 + b"\xff\n")
    corpus = read_corpus("files", "en", "de", prefixes, tmp_path)
    with pytest.raises(InputError, match="line 20"):
        prepare(corpus, SETTINGS, tmp_path / "stores")
    assert list((tmp_path / "stores").iterdir()) == []
