import bz2
import concurrent.futures
import gzip
import hashlib
import io
import json
import lzma
import time
import urllib.request
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t2t_jax.data import corpora, home_assistant, multi30k, parallel_text
from t2t_jax.data.corpora import read_corpus
from t2t_jax.data.downloads import downloaded
from t2t_jax.data.plain_text import collapse_spaces
from t2t_jax.data.preparation import open_store
from t2t_jax.data.treebanks import TREEBANKS
from t2t_jax.errors import DamagedError, InputError
from t2t_jax.files import zstd
from tests.data import toy_corpus
from tests.runs import tiny_config
from tests.test_resume import write_config


def read_files(prefixes, tmp_path):
    corpus = read_corpus("files", "en", "de", prefixes, tmp_path)
    corpus.check()
    return corpus


def test_the_users_files_are_read_pair_for_pair(tmp_path):
    prefixes = toy_corpus.write_splits(tmp_path)
    corpus = read_files(prefixes, tmp_path)
    assert list(corpus.splits["train"]()) == toy_corpus.pairs(300, 0)
    assert list(corpus.splits["test"]()) == toy_corpus.pairs(20, 2)


def test_a_file_is_not_paired_with_itself(tmp_path):
    with pytest.raises(InputError, match="data.source_language and data.target_language are both 'de'"):
        read_corpus("files", "de", "de", toy_corpus.write_splits(tmp_path), tmp_path)
    (tmp_path / "a.jsonl").write_text('{"de": "eins", "en": "one"}\n')
    (tmp_path / "a.tsv").write_text("eins\tein\n")
    given = {split: str(tmp_path / "a.jsonl") for split in corpora.SPLITS}
    for corpus, prefixes in (("files", given), ("home_assistant", {})):
        with pytest.raises(InputError, match="data.source_language and data.target_language are both 'de'"):
            read_corpus(corpus, "de", "de", prefixes, tmp_path)
    pairs = read_corpus("files", "de", "de", {split: str(tmp_path / "a.tsv") for split in corpora.SPLITS}, tmp_path)
    assert list(pairs.splits["train"]()) == [("eins", "ein")]


def test_lines_end_at_newlines_only(tmp_path):
    """Not at U+2028 or a form feed; a carriage return before the newline is not part of the line."""
    prefixes = toy_corpus.write_splits(tmp_path)
    (tmp_path / "dev.en").write_bytes("a\u2028b\x0cc\r\nd\n".encode())
    (tmp_path / "dev.de").write_bytes(b"x\ny")  # no newline at the end
    assert list(read_files(prefixes, tmp_path).splits["dev"]()) == [("a\u2028b\x0cc", "x"), ("d", "y")]


def test_lines_that_end_with_carriage_returns_alone_are_refused(tmp_path):
    """They would be one pair, which is dropped as too long."""
    prefixes = toy_corpus.write_splits(tmp_path)
    for language in ("en", "de"):
        (tmp_path / f"train.{language}").write_bytes(b"one\rtwo\r")
    with pytest.raises(InputError, match=r"train.en: lines end with CR alone, as on old Macs; end them with LF: tr "):
        read_files(prefixes, tmp_path)


def test_sides_of_different_length_are_refused_with_both_counts(tmp_path):
    prefixes = toy_corpus.write_splits(tmp_path)
    with (tmp_path / "train.de").open("a") as file:
        file.write("one more\n")
    with pytest.raises(InputError, match=r"data.train=.*train.en has 300 lines, .*train.de has 301"):
        read_files(prefixes, tmp_path)


def test_missing_files_and_prefixes_are_refused_by_field(tmp_path):
    prefixes = toy_corpus.write_splits(tmp_path)
    (tmp_path / "dev.de").unlink()
    with pytest.raises(InputError, match=r"data.dev=.*no file .*dev.de"):
        read_files(prefixes, tmp_path)
    with pytest.raises(InputError, match=r"data.train=.*no file .*train.en.en; leave out .en, the name is a PREFIX"):
        read_files(prefixes | {"train": f"{prefixes['train']}.en"}, tmp_path)
    with pytest.raises(InputError, match=r"data.train=.*/: no file .*/.en; the PREFIX stands for .*/.en and .*/.de"):
        read_files(prefixes | {"train": f"{tmp_path}/"}, tmp_path)
    with pytest.raises(InputError, match=r"data.test is empty; set it to the PREFIX"):
        read_files(toy_corpus.write_splits(tmp_path) | {"test": ""}, tmp_path)


UNKNOWN_HOME = "'~nobody_at_all/x.*': no home directory is known for it; write ~/ or ./"


def test_the_home_folder_of_nobody_is_refused_by_field(tmp_path):
    """~train/x is a slip for ~/train/x, which no shell expands after an equals sign."""
    name = "~nobody_at_all/x"
    for train in (name, f"{name}.tsv"):
        with pytest.raises(InputError, match=f"^data.train.*: {UNKNOWN_HOME}"):
            read_files(toy_corpus.write_splits(tmp_path) | {"train": train}, tmp_path)
    for corpus, readers in (("multi30k_ende", None), ("penn_treebank", TREEBANKS)):
        with pytest.raises(InputError, match=f"^data.archives: {UNKNOWN_HOME}"):
            read_corpus(corpus, "en", "de", dict.fromkeys(corpora.SPLITS, ""), tmp_path, name, readers)
    for field in ("directory", "vocabulary"):
        data = tiny_config(tmp_path).data
        data[field] = name
        with pytest.raises(InputError, match=f"^data.{field}: {UNKNOWN_HOME}"):
            open_store(data)


@pytest.mark.parametrize(
    ("corpus", "fields"),
    [
        ("files", ("archives",)),
        ("home_assistant", ("train", "dev", "test", "archives")),
        ("multi30k_ende", ("train", "dev", "test")),
        ("wmt14_ende", ("train", "dev", "test")),
        ("trees", ("archives",)),
    ],
)
def test_fields_that_a_corpus_does_not_read_are_refused_before_anything_is_fetched(tmp_path, corpus, fields):
    """Not ignored: --config.data.train=mine without data.corpus=files would train on another corpus."""
    of_task = TREEBANKS if corpus == "trees" else corpora.CORPORA
    for field in fields:
        given = dict.fromkeys((*corpora.SPLITS, "archives"), "") | {field: "mine"}
        archives = given.pop("archives")
        with pytest.raises(InputError, match=f"data.{field}=mine has no effect with data.corpus={corpus}; leave it em"):
            read_corpus(corpus, "en", "de", given, tmp_path / "data", archives, of_task)
    assert not (tmp_path / "data").exists()


def test_an_empty_corpus_is_refused(tmp_path):
    prefixes = toy_corpus.write_splits(tmp_path)
    toy_corpus.write(tmp_path / "train", [])
    with pytest.raises(InputError, match=r"data.train=.*is empty"):
        read_files(prefixes, tmp_path)


def test_other_encodings_are_refused_with_the_line(tmp_path):
    prefixes = toy_corpus.write_splits(tmp_path)
    (tmp_path / "dev.de").write_bytes(b"eins\n" * 11 + "fünf\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"dev.de, line 12: not valid UTF-8 \(byte 0xfc\)"):
        list(read_files(prefixes, tmp_path).splits["dev"]())


COMPRESS = {
    "": lambda data: data,
    ".gz": lambda data: gzip.compress(data, mtime=0),  # the same bytes at any time
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd.compress,
}


def write_text(directory, kind, suffix, pairs):
    """Writes pairs in one of the formats; returns the name that stands for them."""
    compressed = lambda lines: COMPRESS[suffix]("".join(f"{line}\n" for line in lines).encode())
    if kind == "prefix":
        for side, language in enumerate(("en", "de")):
            (directory / f"mine.{language}{suffix}").write_bytes(compressed(pair[side] for pair in pairs))
        return str(directory / "mine")
    objects = [{"en": source, "de": target} for source, target in pairs]
    lines = {
        "tsv": ["\t".join(pair) for pair in pairs],
        "jsonl": [json.dumps({"id": n, "translation": x}) for n, x in enumerate(objects)],
        "flat jsonl": [json.dumps(x, ensure_ascii=False) for x in objects],
    }[kind]
    path = directory / f"mine.{kind.split()[-1]}{suffix}"
    path.write_bytes(compressed(lines))
    return str(path)


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", ["prefix", "tsv", "jsonl", "flat jsonl"])
def test_every_format_of_text_compressed_or_not(tmp_path, kind, suffix):
    pairs, prefixes = toy_corpus.pairs(300, 0), toy_corpus.write_splits(tmp_path)
    prefixes["train"] = write_text(tmp_path, kind, suffix, pairs)
    assert list(read_files(prefixes, tmp_path).splits["train"]()) == pairs


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "suffix"), [("prefix", ".xz"), ("tsv", ".gz"), ("jsonl", ".zst")])
def test_text_is_prepared_and_trained_on(tmp_path, command, kind, suffix):
    write_config(tmp_path, "train__train_steps=1")
    text = write_text(tmp_path, kind, suffix, toy_corpus.pairs(300, 0))
    flags = (f"--config={tmp_path}/config.py", f"--config.data.train={text}:1,{tmp_path}/train:0.5")
    code, output, errors = command("--mode=prepare", *flags)
    assert code == 0 and "600 of 600 training pairs kept" in output, errors
    code, _, errors = command(f"--workdir={tmp_path}/run", *flags)
    assert code == 0 and json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 1, errors


@pytest.mark.parametrize("kind", ["prefix", "tsv"])
def test_text_that_has_been_prepared_is_not_unpacked_again(tmp_path, monkeypatch, kind):
    """It takes minutes for a large corpus, whenever a run is resumed or evaluated."""
    data = tiny_config(tmp_path).data
    data.train = write_text(tmp_path, kind, ".bz2", toy_corpus.pairs(300, 0))
    first = open_store(data)
    for reader in ("unpacked", "unpacked_lines"):
        monkeypatch.setattr(parallel_text, reader, lambda path, *_: pytest.fail(f"{path} was unpacked"))
    assert open_store(data).fingerprint == first.fingerprint


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_change_of_either_side_changes_the_checksums(tmp_path, suffix):
    """Else a changed file would be trained on as it was before."""
    prefixes, pairs = toy_corpus.write_splits(tmp_path), toy_corpus.pairs(300, 0)
    prefixes["train"] = write_text(tmp_path, "prefix", suffix, pairs)
    before = read_files(prefixes, tmp_path).checksums
    assert before.keys() > {"train..en", "train..de"}
    for side, language in enumerate(("en", "de")):
        changed = [(*pair[:side], "other words", *pair[side + 1 :]) for pair in pairs]
        write_text(tmp_path, "prefix", suffix, changed)
        after = read_files(prefixes, tmp_path).checksums
        assert {name for name in before if before[name] != after[name]} == {f"train..{language}"}


def test_several_training_texts_follow_each_other(tmp_path):
    prefixes = toy_corpus.write_splits(tmp_path)
    (tmp_path / "more.tsv").write_text("one\teins\n")
    corpus = read_files(prefixes | {"train": f"{prefixes['train']}, {tmp_path}/more.tsv"}, tmp_path)
    assert list(corpus.splits["train"]()) == [*toy_corpus.pairs(300, 0), ("one", "eins")]
    assert corpus.checksums.keys() > {"train.0..en", "train.0..de", "train.1..tsv"}
    with pytest.raises(InputError, match="data.train=.*a name is empty"):
        read_files(prefixes | {"train": f"{prefixes['train']},"}, tmp_path)


def test_further_test_sets_are_called_as_their_files(tmp_path):
    prefixes = toy_corpus.write_splits(tmp_path)
    (tmp_path / "talks-2020.tsv").write_text("one\teins\n")
    corpus = read_files(prefixes | {"test": f"{prefixes['test']}, {tmp_path}/talks-2020.tsv"}, tmp_path)
    assert list(corpus.splits) == ["train", "dev", "test", "talks_2020_tsv"]
    assert list(corpus.splits["test"]()) == toy_corpus.pairs(20, 2)
    assert list(corpus.splits["talks_2020_tsv"]()) == [("one", "eins")]
    for names, message in {
        f"{prefixes['test']},{prefixes['dev']}": "the name of .*dev would be 'dev', which is taken; rename it",
        f"{prefixes['test']},...": r"the name of \.\.\. would be '', which is none; rename it",
        f"{prefixes['test']},": "data.test=.*a name is empty",
        f"{prefixes['test']},nowhere": "data.test=nowhere: no file nowhere.en",
    }.items():
        with pytest.raises(InputError, match=message):
            read_files(prefixes | {"test": names}, tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.tsv", b"a\tb\nc\n", "x.tsv, line 2: 1 columns; a line must have two"),
        ("x.tsv", b"a\tb\tc\n", "x.tsv, line 1: 3 columns"),
        ("x.tsv", b"", "x.tsv is empty"),
        ("x.jsonl", b'{"en": "a", "de": "b"}\n\n', "x.jsonl, line 2: not JSON; each line must be like"),
        ("x.jsonl", b'{"translation": {"en": "a", "fr": "b"}}\n', "x.jsonl, line 1: de is None; each line must be"),
        ("x.jsonl", b'[1]\n', "line 1: en is None"),
        ("x.jsonl", b'{"en": "a", "de": "b"}\n{"en": "nice \\ud83d", "de": "b"}\n',
         r"x.jsonl, line 2: '\\ud83d' at character 6 of en is a lone surrogate, half a character; remove it"),
        ("x.tsv.gz", gzip.compress(b"a\tb\n" * 9999, mtime=0)[:-9], "x.tsv.gz: can't be unpacked .*; restore it"),
        ("x.tsv.xz", lzma.compress(b"a\tb\n" * 9999)[:-9], "x.tsv.xz: can't be unpacked .*; restore it"),
        ("x.tsv.bz2", b"BZh9 is no archive", "x.tsv.bz2: can't be unpacked .*; restore it"),
        ("x.tsv.zst", zstd.compress(b"a\tb\n" * 9999)[:-9], "x.tsv.zst: can't be unpacked .*; restore it"),
        ("x.tsv.zst", b"Zstandard is no archive", "x.tsv.zst: can't be unpacked .*; restore it"),
        ("train.en.gz", gzip.compress(b"a", mtime=0), "train.en and .*train.en.gz are there; keep one of the two"),
    ],
)  # fmt: skip
def test_text_that_cannot_be_read_is_refused_with_file_and_line(tmp_path, name, content, message):
    prefixes = toy_corpus.write_splits(tmp_path)
    (tmp_path / name).write_bytes(content)
    if not name.startswith("train"):
        prefixes["train"] = str(tmp_path / name)
    with pytest.raises(InputError, match=message):
        list(read_files(prefixes, tmp_path).splits["train"]())


def test_unknown_corpora_are_refused_with_the_known_ones(tmp_path):
    with pytest.raises(InputError, match=r"data.corpus: unknown value 'file'; did you mean 'files'"):
        read_corpus("file", "en", "de", {}, tmp_path)


def test_collapsed_spaces_keep_what_is_not_ascii_white_space():
    assert collapse_spaces(" a\n\t b\u00a0c \u2028d ") == "a b\u00a0c \u2028d"


# The split of an integration is sha256(name) modulo 100: these names were chosen to give one of each.
TRAIN, DEV, TEST = "light", "daikin", "aws"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A small archive with the real name and layout; its checksum is the expected one."""
    strings = {
        TRAIN: ({"a": {"b": "Turn  on\nnow", "only_en": "x"}, "c": "Twice"}, {"a": {"b": "Jetzt an"}, "c": "Doppelt"}),
        "lamp": ({"c": "Twice", "e": ""}, {"c": "Doppelt", "e": "leer"}),
        DEV: ({"k": "Twice", "l": "Fresh"}, {"k": "Anders", "l": "Frisch"}),
        TEST: ({"k": "New {name}", "l": "Own"}, {"k": "Neu {name}", "l": "Doppelt"}),
    }
    path = tmp_path / "downloads" / home_assistant._WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        for name, (en, de) in strings.items():
            folder = f"homeassistant/components/{name}/translations"
            archive.writestr(f"{folder}/en.json", json.dumps(en))
            archive.writestr(f"{folder}/de.json", json.dumps(de))
    monkeypatch.setattr(home_assistant, "_WHEEL_SHA256", home_assistant.sha256(path))
    return path


def test_home_assistant_pairs_leaves_by_key_and_holds_out_whole_integrations(wheel, tmp_path):
    assert [home_assistant._split_of(name) for name in (TRAIN, "lamp", DEV, TEST)] == ["train", "train", "dev", "test"]
    corpus = read_corpus("home_assistant", "en", "de", {}, tmp_path)
    # Unique, white space on one line, empty strings and keys of one language left out.
    assert sorted(corpus.splits["train"]()) == [("Turn on now", "Jetzt an"), ("Twice", "Doppelt")]
    # A held-out pair that shares either side with training is dropped; placeholders stay.
    assert list(corpus.splits["dev"]()) == [("Fresh", "Frisch")]
    assert list(corpus.splits["test"]()) == [("New {name}", "Neu {name}")]


def test_home_assistant_refuses_languages_it_does_not_have(wheel, tmp_path):
    with pytest.raises(InputError, match=r"data.target_language=xx.*en with de or fr works"):
        read_corpus("home_assistant", "en", "xx", {}, tmp_path)


def test_a_download_with_another_hash_is_refused_even_if_cached(wheel, tmp_path):
    data = bytearray(wheel.read_bytes())
    data[100] ^= 1
    wheel.write_bytes(data)
    with pytest.raises(DamagedError, match="sha256 is .*, expected .*; delete the file"):
        read_corpus("home_assistant", "en", "de", {}, tmp_path)


def in_two_threads(function):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return [future.result() for future in [pool.submit(function) for _ in range(2)]]


def test_two_preparations_at_once_download_the_wheel_once(wheel, tmp_path, monkeypatch):
    content, downloads = wheel.read_bytes(), []
    wheel.unlink()

    def download_slowly(requirement, directory):
        downloads.append(requirement)
        with wheel.open("wb") as file:
            file.write(content[:100])
            file.flush()
            time.sleep(0.3)
            file.write(content[100:])

    monkeypatch.setattr(home_assistant, "_pip_download", download_slowly)
    assert in_two_threads(lambda: home_assistant._fetch_wheel(tmp_path)) == [wheel, wheel]
    assert len(downloads) == 1


def test_two_preparations_at_once_download_a_file_once(tmp_path, monkeypatch):
    content, requests = bytes(range(10)), []

    class SlowResponse(io.BytesIO):
        def read(self, size):
            time.sleep(0.1)
            return super().read(2)

    def urlopen(url, timeout):
        requests.append(url)
        return SlowResponse(content)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    known = len(content), hashlib.sha256(content).hexdigest()
    path = tmp_path / "downloads" / "train.de.gz"
    found = in_two_threads(lambda: downloaded("https://host/train.de.gz", *known, [path.parent]))
    assert found == [path, path] and path.read_bytes() == content
    assert len(requests) == 1 and list(path.parent.iterdir()) == [path]


@given(source=st.binary(max_size=60), target=st.binary(max_size=60))
@settings(max_examples=100)
def test_any_two_files_are_a_corpus_or_refused(tmp_path_factory, source, target):
    directory = tmp_path_factory.mktemp("bytes")
    prefixes = toy_corpus.write_splits(directory, train=1)
    (directory / "train.en").write_bytes(source)
    (directory / "train.de").write_bytes(target)
    try:
        pairs = list(read_files(prefixes, directory).splits["train"]())
    except InputError as error:
        assert "train" in str(error)
    else:
        assert len(pairs) == source.count(b"\n") + (not source.endswith(b"\n"))


def test_counting_lines_agrees_with_reading_them(tmp_path):
    for content, count in [(b"", 0), (b"\n", 1), (b"a", 1), (b"a\n", 1), (b"a\nb", 2), (b"\n\n", 2)]:
        (tmp_path / "file").write_bytes(content)
        assert parallel_text._count_lines(tmp_path / "file") == count


# --- Multi30k ----------------------------------------------------------------------------------------------


@pytest.fixture
def captions(tmp_path, monkeypatch):
    """A checkout of the repository with 60 pairs a split, whose sizes and hashes are the known ones."""
    folder = tmp_path / "checkout" / "data" / "task1" / "raw"
    folder.mkdir(parents=True)
    known = {}
    for name in multi30k._FILES:
        path = folder / name
        path.write_bytes(gzip.compress("".join(f"{name} {n}\n" for n in range(60)).encode()))
        known[name] = (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(multi30k, "_FILES", known)
    return folder


def read_captions(captions, tmp_path, *languages):
    return read_corpus("multi30k_enfr", *languages, {}, tmp_path, str(captions.parents[2]))


def test_multi30k_has_three_test_sets_and_both_directions(captions, tmp_path):
    corpus = read_captions(captions, tmp_path, "fr", "en")
    assert list(corpus.splits) == ["train", "dev", "test", "test_2017_flickr", "test_2017_mscoco"]
    firsts = {split: next(pairs()) for split, pairs in corpus.splits.items()}
    assert firsts["dev"] == ("val.fr.gz 0", "val.en.gz 0")
    assert firsts["test"] == ("test_2016_flickr.fr.gz 0", "test_2016_flickr.en.gz 0")
    assert corpus.checksums.keys() == {path.name for path in captions.iterdir() if ".de." not in path.name}
    with pytest.raises(InputError, match="multi30k_enfr has en and fr, either as the source"):
        read_captions(captions, tmp_path, "en", "de")


@pytest.mark.slow
def test_multi30k_is_prepared_and_trained_on(captions, tmp_path, command):
    write_config(tmp_path, "train__train_steps=1")
    fields = {"corpus": "multi30k_ende", "archives": captions.parents[2], "train": "", "dev": "", "test": ""}
    flags = [f"--config={tmp_path}/config.py", *(f"--config.data.{name}={value}" for name, value in fields.items())]
    code, output, errors = command("--mode=prepare", *flags)
    assert code == 0 and "60 of 60 training pairs kept" in output, errors
    assert command(f"--workdir={tmp_path}/run", *flags)[0] == 0
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["steps"] == 1 and found["other_tests"].keys() == {"test_2017_flickr", "test_2017_mscoco"}


def test_files_of_multi30k_are_checked_before_use(captions, tmp_path, monkeypatch):
    path = captions / "val.fr.gz"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"!")
    with pytest.raises(DamagedError, match=r"val.fr.gz: sha256 is .*, expected .*; replace it by https://raw.github"):
        read_captions(captions, tmp_path, "en", "fr")
    path.unlink()
    monkeypatch.setattr(multi30k, "_URL", "http://127.0.0.1:9")
    with pytest.raises(InputError, match=r"could not download .*val.fr.gz .* put val.fr.gz into a folder"):
        read_captions(captions, tmp_path, "en", "fr")
    (tmp_path / "downloads").mkdir(exist_ok=True)
    (tmp_path / "downloads" / path.name).write_bytes(content)
    assert next(read_captions(captions, tmp_path, "en", "fr").splits["dev"]()) == ("val.en.gz 0", "val.fr.gz 0")
