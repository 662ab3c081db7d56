"""Token stores with separate source and target vocabularies, and the names of stores."""

import dataclasses

import numpy as np
import pytest

from t2t_jax.data import preparation
from t2t_jax.data.cleaning import Rules
from t2t_jax.data.corpora import CORPORA, Corpus, read_corpus
from t2t_jax.data.preparation import prepare
from t2t_jax.data.ready_vocabulary import model_of_merges
from t2t_jax.data.task import TASKS, Task
from t2t_jax.data.token_store import TokenStore
from t2t_jax.data.tokenizer import train_symbols, train_vocabulary
from t2t_jax.errors import DamagedError, InputError
from tests.data import toy_corpus
from tests.data.test_token_store import SETTINGS

SEPARATE = dataclasses.replace(SETTINGS, source_vocab_size=310, vocab_size=325)


@pytest.fixture
def corpus(tmp_path):
    return read_corpus("files", "en", "de", toy_corpus.write_splits(tmp_path), tmp_path)


def assert_holds_the_corpus(store):
    for index, (source, target) in enumerate(toy_corpus.pairs(300, 0)):
        assert store.source[index].tolist() == store.vocabularies.source.encode(source)
        assert store.target[index].tolist() == store.vocabularies.target.encode(target)
        assert store.vocabularies.source.decode(store.source[index]) == source
        assert store.vocabularies.target.decode(store.target[index]) == target
    assert len(store.source) == len(store.target) == 300


def test_each_vocabulary_is_trained_on_its_own_side_only_and_encodes_that_side(corpus, tmp_path):
    store = prepare(corpus, SEPARATE, tmp_path / "stores")
    source, target = zip(*toy_corpus.pairs(300, 0), strict=True)
    assert (store.directory / "source_vocab.model").read_bytes() == train_vocabulary(source, 310)
    assert (store.directory / "target_vocab.model").read_bytes() == train_vocabulary(target, 325)
    assert not (store.directory / "vocab.model").exists() and not store.vocabularies.is_joint
    assert "▁seven" in store.vocabularies.source.pieces() and "▁sieben" in store.vocabularies.target.pieces()
    assert_holds_the_corpus(store)
    assert store.held_out("test") == tuple(map(list, zip(*toy_corpus.pairs(20, 2), strict=True)))
    assert "310 source and 325 target pieces" in store.describe()


def test_a_ready_source_vocabulary_encodes_the_source_alone(corpus, tmp_path):
    codes = tmp_path / "codes"
    codes.write_text("#version: 0.2\no n\non e</w>\n")
    settings = dataclasses.replace(SETTINGS, source_vocabulary=str(codes), vocab_size=325)
    store = prepare(corpus, settings, tmp_path / "stores")
    source, target = store.vocabularies
    assert source.tokens(source.encode("one two")) == ["one▁", "t", "w", "o▁", "</s>"]
    assert target.model == train_vocabulary([pair[1] for pair in toy_corpus.pairs(300, 0)], 325)
    assert_holds_the_corpus(store)


def test_the_type_of_the_ids_fits_the_larger_vocabulary(corpus, tmp_path):
    ready = tmp_path / "large.model"
    ready.write_bytes(model_of_merges([("o", "n")], map(chr, range(0x20000, 0x20000 + 40_000))))
    settings = dataclasses.replace(SETTINGS, source_vocabulary=str(ready), vocab_size=325, max_length=99)
    store = prepare(corpus, settings, tmp_path / "stores")
    assert len(store.vocabularies.source) > 1 << 16 and store.source[0].dtype == np.uint32
    assert_holds_the_corpus(store)


def test_an_error_names_the_field_of_its_side(corpus, tmp_path):
    for field in ("source_vocab_size", "vocab_size"):
        settings = dataclasses.replace(SEPARATE, **{field: 100_000})
        with pytest.raises(InputError, match=f"^data.{field}=100000: "):
            prepare(corpus, settings, tmp_path / "stores")
    (tmp_path / "text").write_text("one two three\n")
    settings = dataclasses.replace(SEPARATE, source_vocabulary=str(tmp_path / "text"))
    with pytest.raises(InputError, match="^data.source_vocabulary=.*text is neither a SentencePiece model nor"):
        prepare(corpus, settings, tmp_path / "stores")
    with pytest.raises(InputError, match="^data.source_vocabulary: no file .*none"):
        dataclasses.replace(SEPARATE, source_vocabulary=str(tmp_path / "none"))


@pytest.mark.parametrize("name", ["source_vocab.model", "target_vocab.model"])
def test_a_flipped_bit_in_either_vocabulary_is_refused_by_name(corpus, tmp_path, name):
    store = prepare(corpus, SEPARATE, tmp_path)
    flip_a_bit(store.directory / name)
    with pytest.raises(DamagedError, match=name):
        TokenStore(store.directory)


def test_a_resumed_preparation_keeps_its_vocabularies_and_refuses_damaged_ones(corpus, tmp_path, monkeypatch):
    whole = prepare(corpus, SEPARATE, tmp_path / "whole")

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "write_shards", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(corpus, SEPARATE, tmp_path / "stores")
    (vocabulary,) = (tmp_path / "stores").glob(".*.unfinished/vocabularies/target_vocab.model")
    flip_a_bit(vocabulary)
    with pytest.raises(DamagedError, match="vocabularies is damaged; delete .*unfinished and run again"):
        prepare(corpus, SEPARATE, tmp_path / "stores")
    flip_a_bit(vocabulary)
    monkeypatch.setattr(preparation, "train_vocabulary", lambda *_, **__: pytest.fail("a vocabulary was trained again"))
    assert prepare(corpus, SEPARATE, tmp_path / "stores").fingerprint == whole.fingerprint


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# --- Target vocabularies of whole symbols ------------------------------------------------------------------


@pytest.fixture
def brackets(monkeypatch):
    """The settings of a task whose targets are sequences of symbols."""
    monkeypatch.setitem(TASKS, "brackets", Task(CORPORA, "bleu", _bracketed, target_symbols=True))
    return dataclasses.replace(SEPARATE, task="brackets", vocab_size=13)


def _bracketed(target):
    return f"<{target.split(' ')[0]} {target} >"


def test_the_target_vocabulary_is_the_symbols_of_all_training_targets(corpus, brackets, tmp_path):
    settings = dataclasses.replace(brackets, vocab_size=512, vocab_pairs=5)
    store = prepare(corpus, settings, tmp_path / "stores")
    targets = [target for _, target in toy_corpus.pairs(300, 0)]
    symbols = {"▁>"} | {f"▁{symbol}" for target in targets for symbol in _bracketed(target).split(" ")}
    assert set(store.vocabularies.target.pieces()[3:]) == symbols and len(store.vocabularies.target) == 3 + 17
    assert len(store.vocabularies.source) == 310  # byte-pair encoding, as without symbols
    decoded = [store.vocabularies.target.decode(store.target[n]) for n in range(300)]
    assert decoded == [_bracketed(target) for target in targets] and store.report.unknown == 0
    assert "310 source and 20 target pieces" in store.describe()


def test_too_many_symbols_are_refused_with_the_number_needed(corpus, brackets, tmp_path):
    with pytest.raises(InputError, match="^data.vocab_size=13: .* 17 symbols; .* need data.vocab_size=20 or more"):
        prepare(corpus, brackets, tmp_path / "stores")


def test_a_joint_and_a_ready_vocabulary_have_no_whole_symbols(corpus, brackets, tmp_path):
    joint = dataclasses.replace(brackets, source_vocab_size=0, vocab_size=340)
    assert len(prepare(corpus, joint, tmp_path / "stores").vocabularies.target) == 340
    ready = tmp_path / "ready.model"
    ready.write_bytes(train_vocabulary([">"], 261))
    store = prepare(corpus, dataclasses.replace(brackets, vocabulary=str(ready)), tmp_path / "stores")
    assert store.vocabularies.target.model == ready.read_bytes()


def test_pairs_with_unknown_symbols_are_counted_in_every_split(corpus, brackets, tmp_path):
    known = [
        "eins",
        "zwei",
        "drei",
        "vier",
        "fünf",
        ">",
        "<eins",
        "<zwei",
        "<drei",
        "<vier",
        "<fünf",
    ]  # not sechs, sieben and acht
    ready = tmp_path / "ready.model"
    ready.write_bytes(train_symbols([" ".join(known)], 512))
    store = prepare(corpus, dataclasses.replace(brackets, vocabulary=str(ready)), tmp_path / "stores")
    count = lambda pairs: sum(not set(target.split(" ")) <= set(known) for _, target in pairs)
    train, dev, test = (count(toy_corpus.pairs(n, seed)) for seed, n in enumerate((300, 12, 20)))
    assert 0 < train < 300 and 0 < dev < 12 and 0 < test < 20
    assert store.report.unknown == train
    assert {split: counts["unknown"] for split, counts in store.held_out_counts.items()} == {"dev": dev, "test": test}
    described = [" ".join(line.split()) for line in store.describe().splitlines()]
    assert f"{train} kept with text that is not in the vocabulary" in described
    assert f"12 dev pairs; {dev} with text that is not in the vocabulary" in described


def test_dropped_pairs_with_unknown_symbols_are_not_counted(brackets, tmp_path):
    prefixes = toy_corpus.write_splits(tmp_path)
    toy_corpus.write(tmp_path / "train", [("one two", "eins acht"), ("one", "eins"), ("one two", "eins acht")])
    corpus = read_corpus("files", "en", "de", prefixes, tmp_path)
    ready = tmp_path / "ready.model"
    ready.write_bytes(train_symbols(["eins > <eins"], 512))
    settings = dataclasses.replace(
        brackets, vocabulary=str(ready), source_vocab_size=265, cleaning=Rules(drop_duplicates=True)
    )
    store = prepare(corpus, settings, tmp_path / "stores")
    assert (store.report.kept, store.report.unknown) == (2, 1)


# --- The names of stores -----------------------------------------------------------------------------------

CORPUS = Corpus("files", ("en", "de"), {}, {"train.en": "0" * 64, "train.de": "1" * 64})
TRANSLATION = dataclasses.replace(SETTINGS, vocab_size=268)


def test_joint_translation_stores_keep_the_names_they_had_before_separate_vocabularies(tmp_path):
    """The two keys were computed by commit 654856d, which had neither tasks nor separate vocabularies."""
    assert preparation._key(CORPUS, TRANSLATION) == "df808c4853fb"
    codes = tmp_path / "codes"
    codes.write_text("o n\n")
    changes = {"vocabulary": str(codes), "cleaning": Rules(drop_identical=True)}
    assert preparation._key(CORPUS, dataclasses.replace(TRANSLATION, **changes)) == "48ac9d333880"


def test_a_store_with_a_vocabulary_of_symbols_has_a_name_of_its_own(tmp_path, monkeypatch, brackets):
    (tmp_path / "codes").write_text("o n\n")
    changes = [{}, {"source_vocab_size": 0}, {"vocabulary": str(tmp_path / "codes")}]
    with_symbols = [preparation._key(CORPUS, dataclasses.replace(brackets, **change)) for change in changes]
    monkeypatch.setitem(TASKS, "brackets", Task(CORPORA, "bleu", _bracketed))
    without = [preparation._key(CORPUS, dataclasses.replace(brackets, **change)) for change in changes]
    assert with_symbols[0] != without[0] and with_symbols[1:] == without[1:]


def test_stores_with_other_vocabularies_have_other_names(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("o n\n")
    second.write_text("t w\n")
    changes = [
        {}, {"vocab_size": 269}, {"source_vocab_size": 268}, {"source_vocab_size": 269}, {"vocabulary": str(first)},
        {"source_vocabulary": str(first)}, {"source_vocabulary": str(second)},
        {"vocabulary": str(first), "source_vocabulary": str(second)},
        {"vocabulary": str(second), "source_vocabulary": str(first)},
    ]  # fmt: skip
    keys = [preparation._key(CORPUS, dataclasses.replace(TRANSLATION, **change)) for change in changes]
    assert len(set(keys)) == len(keys)
    second.write_text(first.read_text())  # the content counts, not the path
    assert preparation._key(CORPUS, dataclasses.replace(TRANSLATION, source_vocabulary=str(second))) == keys[5]


@pytest.mark.parametrize("field", ["vocabulary", "source_vocabulary"])
def test_a_ready_vocabulary_with_rules_of_normalisation_is_not_that_of_an_earlier_store(tmp_path, monkeypatch, field):
    """Earlier ones had no such rules."""
    (tmp_path / "codes").write_text("o n\n")
    changes = {field: str(tmp_path / "codes"), "cleaning": Rules(normalize_punctuation=True)}
    settings = dataclasses.replace(TRANSLATION, **changes)
    key = preparation._key(CORPUS, settings)
    monkeypatch.setattr(Rules, "normalizes", False)
    assert preparation._key(CORPUS, settings) != key
