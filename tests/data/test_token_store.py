import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import itertools
import threading
import time

import numpy as np
import pytest

from t2t_jax.data import preparation, shards
from t2t_jax.data.cleaning import Rules
from t2t_jax.data.corpora import read_corpus
from t2t_jax.data.preparation import draw, open_store, prepare
from t2t_jax.data.store_settings import StoreSettings
from t2t_jax.data.task import TASKS, Task
from t2t_jax.data.token_store import TokenStore
from t2t_jax.errors import DamagedError, InputError, stop_reason
from t2t_jax.files import folder_lock, read_object, write_object
from tests.data import toy_corpus
from tests.runs import tiny_config

SETTINGS = StoreSettings(
    task="translation", vocabulary="", source_vocabulary="", vocab_size=340, source_vocab_size=0,
    vocab_kind="bpe", vocab_pairs=0, byte_fallback=True, character_coverage=1.0, max_length=32, heldout_max_length=0,
    segmentations=1, bpe_dropout=0.1,
    cleaning=Rules(),
)  # fmt: skip


@pytest.fixture
def corpus(tmp_path):
    return read_corpus("files", "en", "de", toy_corpus.write_splits(tmp_path), tmp_path)


def test_the_store_holds_the_corpus_pair_for_pair(corpus, tmp_path):
    store = prepare(corpus, SETTINGS, tmp_path / "stores")
    pairs = toy_corpus.pairs(300, 0)
    assert len(store.source) == len(store.target) == 300
    for index in (0, 1, 150, 299):
        decoded = tuple(store.vocabularies.target.decode(side[index]) for side in (store.source, store.target))
        assert decoded == pairs[index]
    np.testing.assert_array_equal(store.source.lengths(), [len(store.source[i]) for i in range(300)])
    assert list(zip(*store.held_out("test"), strict=True)) == toy_corpus.pairs(20, 2)


@pytest.mark.parametrize("indices", [[3, 0, 299, 3], [0], []])
def test_concatenated_sentences_are_the_sentences_one_after_another(corpus, tmp_path, indices):
    side = prepare(corpus, SETTINGS, tmp_path / "stores").source
    ids, lengths = side.concatenated(np.array(indices, np.uint32))
    assert ids.tolist() == [number for index in indices for number in side[index]]
    assert lengths.tolist() == [len(side[index]) for index in indices]


def test_a_second_preparation_opens_the_existing_store(corpus, tmp_path):
    first = prepare(corpus, SETTINGS, tmp_path / "stores")
    written = (first.directory / "train.source.ids").stat().st_mtime_ns
    again = prepare(corpus, SETTINGS, tmp_path / "stores")
    assert again.fingerprint == first.fingerprint
    assert (again.directory / "train.source.ids").stat().st_mtime_ns == written
    other = prepare(corpus, dataclasses.replace(SETTINGS, max_length=4), tmp_path / "stores")
    assert other.directory != first.directory and other.fingerprint != first.fingerprint


def shout(text):
    return text.upper() + "!"


def ask(text):
    return text.upper() + "?"


class Shout:
    def __call__(self, text):
        return shout(text)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (shout, ask),
        (functools.partial(str.replace, "a"), functools.partial(str.replace, "b")),
        (functools.partial(shout), functools.partial(shout, "a")),
        (str.upper, str.lower),
        (Shout(), shout),
    ],
)
def test_an_edited_task_of_the_users_own_has_another_store(corpus, monkeypatch, before, after):
    """Else the model would be trained on what the function made before."""

    def key(**changes):
        monkeypatch.setitem(TASKS, "mine", Task({}, "bleu", **changes))
        return preparation._key(corpus, dataclasses.replace(SETTINGS, task="mine"))

    assert len({key(), key(preprocess_target=before), key(preprocess_target=after)}) == 3
    assert key(preprocess_source=before) != key(preprocess_target=before) == key(preprocess_target=before)


def test_a_task_that_binds_a_set_is_refused(corpus, monkeypatch):
    """Its order is another in every process, and with it the key."""
    task = Task({}, "bleu", preprocess_source=functools.partial(shout, {"a", "the"}))
    monkeypatch.setitem(TASKS, "mine", task)
    with pytest.raises(InputError, match="data.task: functools.partial of shout binds more than texts, numbers and"):
        preparation._key(corpus, dataclasses.replace(SETTINGS, task="mine"))


def test_the_stores_of_built_in_tasks_keep_their_names(corpus):
    parsing = dataclasses.replace(SETTINGS, task="parsing_in_order", source_vocab_size=300)
    assert [preparation._key(corpus, settings) for settings in (SETTINGS, parsing)] == KEYS


KEYS = ["aeedfaba2f38", "ff9569067cea"]


def test_stores_keep_their_names_unless_their_rules_count_words_or_compare_letters(corpus):
    """Of these, combining marks were once words of their own and no part of a letter."""
    key = lambda **rules: preparation._key(corpus, dataclasses.replace(SETTINGS, cleaning=Rules(**rules)))
    others = ["normalize_punctuation", "remove_nonprinting", "drop_identical", "drop_wrong_script", "drop_duplicates"]
    assert key(**dict.fromkeys(others, True)) == "ed09365853ae"
    once = {
        "max_words": (9, "97b362f629c4"),
        "max_ratio": (1.5, "77276f08993f"),
        "drop_near_duplicates": (True, "903fde6d4c8b"),
        "drop_test_leaks": (True, "8a6e06f05546"),
    }
    assert not [rule for rule, (value, name) in once.items() if key(**{rule: value}) == name]


def test_only_stores_that_a_filter_by_script_once_left_alone_change_their_names(corpus):
    """It once knew no codes of languages but those of two letters."""
    regional, rules = dataclasses.replace(corpus, languages=("en-US", "de")), Rules(drop_wrong_script=True)
    assert preparation._key(regional, SETTINGS) == "1d719926c61c"
    assert preparation._key(regional, dataclasses.replace(SETTINGS, cleaning=rules)) != "599ef9818d2c"


def test_dropped_training_pairs_are_counted_and_held_out_pairs_are_never_dropped(tmp_path):
    prefixes = toy_corpus.write_splits(tmp_path)
    extra = [("", "eins"), ("one", " \t"), ("one " * 40, "eins")]
    toy_corpus.write(tmp_path / "train", [*toy_corpus.pairs(300, 0), *extra])
    toy_corpus.write(tmp_path / "test", extra)
    corpus = read_corpus("files", "en", "de", prefixes, tmp_path)
    store = prepare(corpus, SETTINGS, tmp_path)
    assert store.report.read == 303 and store.report.dropped == {"empty": 2, "too_long": 1}
    assert store.report.examples["empty"] == [["", "eins"], ["one", " \t"]]
    assert len(store.source) == store.report.kept == 300
    assert len(store.held_out("test")[0]) == 3
    assert store.describe().startswith("300 of 303 training pairs kept\n")
    assert "2 dropped: an empty side" in store.describe() and "1 dropped: more than" in store.describe()


def test_who_waits_for_another_preparation_of_the_same_data_says_so(corpus, tmp_path, capsys):
    final = preparation._store_folder(corpus, SETTINGS, tmp_path)
    work, said, deadline = final.with_name(f".{final.name}.unfinished"), "", time.monotonic() + 60
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with folder_lock(work, "nobody else has it"):
            waiting = pool.submit(prepare, corpus, SETTINGS, tmp_path)
            while not said and time.monotonic() < deadline:
                time.sleep(0.05)
                said = capsys.readouterr().err
        assert said == f"another process prepares these data, in {work}; waiting for it\n"
        assert waiting.result().directory == final


def test_the_longest_training_pair_has_exactly_max_length_subwords(corpus, tmp_path):
    store = prepare(corpus, dataclasses.replace(SETTINGS, max_length=5), tmp_path)
    assert max(store.source.lengths().max(), store.target.lengths().max()) == 5
    assert store.report.dropped["too_long"] == sum(len(en.split()) > 4 for en, _ in toy_corpus.pairs(300, 0))


def test_held_out_pairs_beyond_their_limit_are_counted(corpus, tmp_path):
    store = prepare(corpus, dataclasses.replace(SETTINGS, heldout_max_length=4), tmp_path)
    kept = [pair for pair in toy_corpus.pairs(20, 2) if len(pair[0].split()) <= 3]
    assert list(zip(*store.held_out("test"), strict=True)) == kept
    assert f"{len(kept)} test pairs; {20 - len(kept)} beyond data.heldout_max_length" in store.describe()


def test_a_training_set_without_pairs_is_refused(tmp_path):
    prefixes = toy_corpus.write_splits(tmp_path)
    toy_corpus.write(tmp_path / "train", [pair for pair in toy_corpus.pairs(300, 0) if " " in pair[0]])
    corpus = read_corpus("files", "en", "de", prefixes, tmp_path)
    refused = r"^data.train: no pair is left to train on \(0 of (\d+) training pairs kept; \1 dropped: .*\); "
    with pytest.raises(InputError, match=refused + "raise data.max_length$"):
        prepare(corpus, dataclasses.replace(SETTINGS, max_length=2), tmp_path)
    wrong = dataclasses.replace(corpus, languages=("ru", "de"))
    with pytest.raises(InputError, match=refused + "check the text and data.cleaning$"):
        prepare(wrong, dataclasses.replace(SETTINGS, cleaning=Rules(drop_wrong_script=True)), tmp_path)


def test_a_held_out_set_without_pairs_is_refused_by_field(corpus, tmp_path):
    for split, field in {"dev": "data.dev", "talks": r"data.test \(talks\)"}.items():
        empty = dataclasses.replace(corpus, splits=corpus.splits | {split: lambda: iter(())})
        with pytest.raises(InputError, match=f"^{field}: no pair is in it; choose another part of the corpus"):
            prepare(empty, SETTINGS, tmp_path)
    with pytest.raises(InputError, match="^data.dev: no pair of at most data.heldout_max_length=1 subwords; raise it$"):
        prepare(corpus, dataclasses.replace(SETTINGS, heldout_max_length=1), tmp_path)


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


def test_the_error_of_a_job_is_raised_though_others_still_write_shards(corpus, tmp_path):
    """Slurm takes some seconds to end the tasks of an array."""
    others, is_over = [], threading.Event()

    def write_by_jobs(work):
        def write():
            for number in itertools.takewhile(lambda _: not is_over.is_set(), itertools.count()):
                with contextlib.suppress(FileNotFoundError):
                    (work / f"shard-{number:05}.npz").write_bytes(b"")

        others.append(threading.Thread(target=write))
        others[0].start()
        threading.Timer(0.5, is_over.set).start()
        raise InputError("train.de, line 7: not valid UTF-8")

    with pytest.raises(InputError, match="line 7"):
        prepare(corpus, SETTINGS, tmp_path, write_by_jobs)
    others[0].join()


def test_duplicates_are_found_across_shards(tmp_path, monkeypatch):
    """Shards of 7 pairs, with duplicates in other shards and near-duplicates in digits and punctuation."""
    monkeypatch.setattr(shards, "SHARD_SIZE", 7)
    pairs = list(dict.fromkeys(toy_corpus.pairs(60, 0, longest=9)))
    prefixes = toy_corpus.write_splits(tmp_path)
    near = [(f"{pairs[n][0]} 7!", f"{pairs[n][1]}, 7") for n in (1, 30)]
    toy_corpus.write(tmp_path / "train", [*pairs, pairs[3], pairs[40], *near, pairs[3]])
    corpus = read_corpus("files", "en", "de", prefixes, tmp_path)
    rules = Rules(drop_duplicates=True, drop_near_duplicates=True)
    store = prepare(corpus, dataclasses.replace(SETTINGS, vocab_size=290, max_length=99, cleaning=rules), tmp_path)
    decode = store.vocabularies.target.decode
    decoded = [tuple(map(decode, sides)) for sides in zip(store.source, store.target, strict=True)]
    assert decoded == pairs
    assert store.report.dropped == {"duplicate": 3, "near_duplicate": 2}
    assert store.report.examples["duplicate"] == [list(pairs[3]), list(pairs[40]), list(pairs[3])]
    assert store.report.examples["near_duplicate"][0] == list(near[0])


def test_worker_processes_write_the_same_store_as_a_single_process(corpus, tmp_path, monkeypatch):
    alone = prepare(corpus, SETTINGS, tmp_path / "alone")
    monkeypatch.setattr(shards, "SHARD_SIZE", 100)
    together = prepare(corpus, SETTINGS, tmp_path / "together")
    assert together.fingerprint == alone.fingerprint


def test_a_resumed_preparation_keeps_finished_shards_and_refuses_damaged_ones_by_name(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_SIZE", 100)
    whole = prepare(corpus, SETTINGS, tmp_path / "whole")
    written = []

    def write_one_then_die(*arguments):
        if written:
            raise KeyboardInterrupt
        written.append(arguments[-2])
        return shards._write_shard(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(
            shards, "_on_all_cores", lambda write, jobs: (write_one_then_die(*write.args, *job) for job in jobs)
        )
        with pytest.raises(KeyboardInterrupt):
            prepare(corpus, SETTINGS, tmp_path / "stores")
    (shard,) = (tmp_path / "stores").glob(".*/shard-*.npz")
    content = shard.read_bytes()
    done, write_all = [], shards._on_all_cores
    monkeypatch.setattr(shards, "_on_all_cores", lambda write, jobs: write_all(write, watched(jobs, done)))
    for length in (len(content) // 2, 0):  # loss of power may leave an empty file
        shard.write_bytes(content[:length])
        with pytest.raises(DamagedError, match="shard-00000.npz is damaged .*; delete it and run again"):
            prepare(corpus, SETTINGS, tmp_path / "stores")
    shard.write_bytes(content)
    assert prepare(corpus, SETTINGS, tmp_path / "stores").fingerprint == whole.fingerprint
    assert [path.name for path in done] == ["shard-00001.npz", "shard-00002.npz"]
    assert [path.name for path in (tmp_path / "stores").iterdir()] == [whole.directory.name]


@pytest.mark.parametrize("name", ["train.source.ids", "train.target.ends"])
def test_a_disk_that_fills_up_while_shards_are_joined_ends_with_a_line_and_the_same_command_goes_on(
    corpus, tmp_path, monkeypatch, name
):
    whole = prepare(corpus, SETTINGS, tmp_path / "whole")

    def join_on_a_full_disk(*arguments):
        (arguments[-1] / name).symlink_to("/dev/full")
        shards.join_shards(*arguments)
        pytest.fail("the disk's error was ignored")

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "join_shards", join_on_a_full_disk)
        with pytest.raises(OSError) as failed:
            prepare(corpus, SETTINGS, tmp_path / "stores")
    line, code = stop_reason(failed.value)
    assert "No space left on device" in line and code == 2
    assert prepare(corpus, SETTINGS, tmp_path / "stores").fingerprint == whole.fingerprint


def test_a_shard_that_a_full_disk_cuts_short_takes_no_more_space_there(corpus, tmp_path, monkeypatch):
    """Each try would leave one of each worker process, until one succeeds."""

    def savez(file, **arrays):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards.np, "savez", savez)
    with pytest.raises(OSError, match="No space left"):
        prepare(corpus, SETTINGS, tmp_path)
    (work,) = tmp_path.glob(".*.unfinished")
    assert {path.name for path in work.iterdir()} == {"vocabularies", "store"}


def watched(jobs, seen):
    for job in jobs:
        seen.append(job[0])
        yield job


def test_shards_know_the_held_out_text_only_if_leaks_are_dropped(corpus, tmp_path):
    """Else each job of Slurm would read it, and each worker process get it with each shard, for nothing."""
    leaks = dataclasses.replace(SETTINGS, cleaning=Rules(drop_test_leaks=True))
    assert preparation._encoding(corpus, leaks, tmp_path).held_out
    unread = dataclasses.replace(corpus, splits={"dev": lambda: pytest.fail("the dev set was read")})
    assert not preparation._encoding(unread, SETTINGS, tmp_path).held_out


def test_reservoir_sampling_draws_uniformly_and_reproducibly():
    numbers = lambda count: iter([(str(n), "") for n in range(count)])
    assert list(draw(numbers(50), 0)) == list(numbers(50)) == list(draw(numbers(50), 60))
    drawn = [int(source) for source, _ in draw(numbers(200_000), 2000)]
    assert len(set(drawn)) == 2000 and drawn == [int(s) for s, _ in draw(numbers(200_000), 2000)]
    tenths, _ = np.histogram(drawn, bins=10, range=(0, 200_000))
    assert tenths.min() > 140 and tenths.max() < 260


def test_a_corpus_table_is_printed(corpus, tmp_path):
    corpus = dataclasses.replace(corpus, table=lambda: "archive | pairs")
    assert prepare(corpus, SETTINGS, tmp_path).describe().endswith("archive | pairs")


def test_a_ready_vocabulary_is_used_and_its_contents_determine_the_name_of_the_store(corpus, tmp_path):
    trained = prepare(corpus, SETTINGS, tmp_path / "trained")
    model = tmp_path / "some.model"
    model.write_bytes((trained.directory / "vocab.model").read_bytes())
    settings = dataclasses.replace(SETTINGS, vocabulary=str(model))
    ready = prepare(corpus, settings, tmp_path / "ready")
    assert ready.fingerprint == trained.fingerprint
    unread = iter(lambda: pytest.fail("a SentencePiece model needs no text"), None)
    unread = dataclasses.replace(corpus, splits={"train": lambda: unread})
    drawn = dataclasses.replace(settings, vocab_pairs=9)
    assert preparation._vocabulary(unread, drawn, preparation.SIDES) == model.read_bytes()
    model.write_text("#version: 0.2\no n\non e</w>\n")
    merges = prepare(corpus, settings, tmp_path / "ready")
    assert merges.directory != ready.directory
    vocabulary = merges.vocabularies.source
    assert vocabulary.tokens(vocabulary.encode("one two")) == ["one▁", "t", "w", "o▁", "</s>"]
    assert [vocabulary.decode(merges.source[n]) for n in range(9)] == [en for en, _ in toy_corpus.pairs(9, 0)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"character_coverage": 0.97}, "data.character_coverage must be at least 0.98 and at most 1; got 0.97"),
        ({"character_coverage": 0.99, "byte_fallback": False}, "data.character_coverage must be 1 without"),
        ({"vocab_size": 2}, "data.vocab_size must be at least 3 .*padding, EOS and unknown.*; got 2"),
        ({"source_vocab_size": 2}, "data.source_vocab_size must be at least 3 .*; got 2"),
    ],
)
def test_a_vocabulary_that_sentencepiece_cannot_train_is_refused_by_the_name_of_the_field(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(SETTINGS, **changes)


def test_blank_training_text_is_refused(tmp_path):
    prefixes = toy_corpus.write_splits(tmp_path)
    toy_corpus.write(tmp_path / "train", [("", " "), ("\t", "")])
    with pytest.raises(InputError, match="data.train has no text: every line is blank"):
        prepare(read_corpus("files", "en", "de", prefixes, tmp_path), SETTINGS, tmp_path)


def test_a_line_that_cannot_be_read_is_named_though_sentencepiece_reads_it(tmp_path):
    """With vocab_pairs=0 the text is read by its iterator: the vocabulary's size is not to blame."""
    prefixes = toy_corpus.write_splits(tmp_path)
    (tmp_path / "train.de").write_bytes(b"eins\n" * 99 + b"\xfc\n" + b"eins\n" * 200)
    with pytest.raises(InputError, match=r"^/.*train.de, line 100: not valid UTF-8 \(byte 0xfc\); convert it to U.*8$"):
        prepare(read_corpus("files", "en", "de", prefixes, tmp_path), SETTINGS, tmp_path)


@pytest.mark.parametrize("error", [IndexError, KeyboardInterrupt])
def test_an_error_in_a_task_of_the_users_own_is_no_bad_setting(corpus, tmp_path, monkeypatch, error):
    def fail(text):
        raise error

    monkeypatch.setitem(TASKS, "mine", Task({}, "bleu", preprocess_target=fail))
    with pytest.raises(error):
        prepare(corpus, dataclasses.replace(SETTINGS, task="mine"), tmp_path)


def test_a_missing_ready_vocabulary_is_refused_although_a_store_with_a_trained_one_exists(tmp_path):
    data = tiny_config(tmp_path).data
    open_store(data)
    data.vocabulary = str(tmp_path / "codes")
    with pytest.raises(InputError, match="data.vocabulary: no file .*codes"):
        open_store(data)


def test_a_held_out_line_that_cannot_be_scored_is_refused_before_the_corpus_is_encoded(tmp_path, monkeypatch):
    prefixes = toy_corpus.write_splits(tmp_path)
    toy_corpus.write(tmp_path / "dev", [("one", "eins"), ("two " * 1024, "zwei")])
    corpus = read_corpus("files", "en", "de", prefixes, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "write_shards", lambda *_: pytest.fail("the corpus was encoded"))
        with pytest.raises(InputError, match="data.dev, line 2: 1,025 subwords, which must be at most 1,024"):
            prepare(corpus, SETTINGS, tmp_path, lambda work: pytest.fail("jobs were submitted"))
    further = dataclasses.replace(
        corpus, splits=corpus.splits | {"dev": corpus.splits["test"], "talks": corpus.splits["dev"]}
    )
    with pytest.raises(InputError, match=r"^data.test \(talks\), line 2: 1,025 subwords"):
        prepare(further, SETTINGS, tmp_path)
    store = prepare(corpus, dataclasses.replace(SETTINGS, heldout_max_length=1024), tmp_path)
    assert store.held_out_counts["dev"] == {"read": 2, "kept": 1, "unknown": 0, "normalized": 0}


def test_a_held_out_line_that_cannot_be_read_is_refused_before_the_vocabulary_is_trained(tmp_path, monkeypatch):
    prefixes = toy_corpus.write_splits(tmp_path)
    (tmp_path / "test.de").write_bytes(b"eins\n" * 19 + b"\xff\n")
    monkeypatch.setattr(preparation, "draw", lambda *_: pytest.fail("the training text was read"))
    with pytest.raises(InputError, match=r"test.de, line 20: not valid UTF-8"):
        prepare(read_corpus("files", "en", "de", prefixes, tmp_path), SETTINGS, tmp_path / "stores")


def test_references_that_the_rules_for_training_text_would_change_are_counted_and_kept(tmp_path):
    """Translations hold none of these characters. Sources are normalised by the vocabulary; case is not counted."""
    prefixes = toy_corpus.write_splits(tmp_path)
    pairs = [("one", "„Eins“"), ("“two”", "zwei"), ("three", "drei\u00a0…"), ("four", "vier\u200b"), ("five", '"Fünf"')]
    toy_corpus.write(tmp_path / "dev", pairs)
    corpus = read_corpus("files", "en", "de", prefixes, tmp_path)
    for rules, count in (
        ({}, 0),
        ({"lowercase": True}, 0),
        ({"normalize_punctuation": True}, 2),
        ({"normalize_punctuation": True, "remove_nonprinting": True, "lowercase": True}, 3),
    ):
        store = prepare(corpus, dataclasses.replace(SETTINGS, cleaning=Rules(**rules)), tmp_path)
        assert store.held_out_counts["dev"]["normalized"] == count
        assert store.held_out("dev") == tuple(map(list, zip(*pairs, strict=True)))
        told = f"5 dev pairs; {count} references with characters that data.cleaning replaces\n"
        assert (told in store.describe()) == (count > 0)


def test_a_store_of_a_version_that_counted_less_is_opened(corpus, tmp_path):
    path = prepare(corpus, SETTINGS, tmp_path).directory / "manifest.json"
    manifest = read_object(path)
    for counts in manifest["held_out"].values():
        del counts["normalized"], counts["unknown"]
    write_object(path, {name: value for name, value in manifest.items() if name != "checksum"})
    assert "20 test pairs\n" in prepare(corpus, SETTINGS, tmp_path).describe()


def test_bad_settings_are_refused_before_anything_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "read_corpus", lambda *_: pytest.fail("the corpus was read"))
    for field, value, message in (
        ("max_length", 1, "data.max_length"),
        ("source_language", "", "data.source_language is empty; give the code of a language"),
    ):
        data = tiny_config(tmp_path).data
        data[field] = value
        with pytest.raises(InputError, match=message):
            open_store(data)
