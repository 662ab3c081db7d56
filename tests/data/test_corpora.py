import json
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t2t_jax.data import corpora
from t2t_jax.data.corpora import one_line, read_corpus
from t2t_jax.errors import DamagedError, InputError
from tests.data import toy_corpus


def read_files(prefixes, tmp_path):
    return read_corpus("files", "en", "de", prefixes, tmp_path)


def test_the_users_files_are_read_pair_for_pair(tmp_path):
    prefixes = toy_corpus.write_splits(tmp_path)
    corpus = read_files(prefixes, tmp_path)
    assert list(corpus.splits["train"]()) == toy_corpus.pairs(300, 0)
    assert list(corpus.splits["test"]()) == toy_corpus.pairs(20, 2)


def test_lines_end_at_newlines_only(tmp_path):
    """Not at U+2028 or a form feed; a carriage return before the newline is not part of the line."""
    prefixes = toy_corpus.write_splits(tmp_path)
    (tmp_path / "dev.en").write_bytes("a\u2028b\x0cc\r\nd\n".encode())
    (tmp_path / "dev.de").write_bytes(b"x\ny")  # no newline at the end
    assert list(read_files(prefixes, tmp_path).splits["dev"]()) == [("a\u2028b\x0cc", "x"), ("d", "y")]


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
    with pytest.raises(InputError, match=r"data.test is empty; set it to the PREFIX"):
        read_files(toy_corpus.write_splits(tmp_path) | {"test": ""}, tmp_path)


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


def test_unknown_corpora_are_refused_with_the_known_ones(tmp_path):
    with pytest.raises(InputError, match=r"data.corpus: unknown value 'file'; did you mean 'files'"):
        read_corpus("file", "en", "de", {}, tmp_path)


def test_one_line_keeps_what_is_not_ascii_white_space():
    assert one_line(" a\n\t b\u00a0c \u2028d ") == "a b\u00a0c \u2028d"


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
    path = tmp_path / "downloads" / corpora._WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        for name, (en, de) in strings.items():
            folder = f"homeassistant/components/{name}/translations"
            archive.writestr(f"{folder}/en.json", json.dumps(en))
            archive.writestr(f"{folder}/de.json", json.dumps(de))
    monkeypatch.setattr(corpora, "_WHEEL_SHA256", corpora.sha256(path))
    return path


def test_home_assistant_pairs_leaves_by_key_and_holds_out_whole_integrations(wheel, tmp_path):
    assert [corpora._split_of(name) for name in (TRAIN, "lamp", DEV, TEST)] == ["train", "train", "dev", "test"]
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
        assert corpora._count_lines(tmp_path / "file") == count
