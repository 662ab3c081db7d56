"""Small archives with the real names and layouts, read by the real code; only the expected checksums are theirs."""

import gzip
import hashlib
import io
import json
import shutil
import socket
import subprocess
import sys
import tarfile
import types

import pytest

from t2t_jax.data import downloads, wmt14
from t2t_jax.data.corpora import read_corpus
from t2t_jax.data.preparation import open_store
from t2t_jax.errors import DamagedError, InputError, stop_reason
from tests.runs import tiny_config

# Where each part of the training set is: archive, file without the language, number of pairs.
PARTS = {
    "de": [
        ("training-parallel-europarl-v7.tgz", "training/europarl-v7.de-en", 5),
        ("training-parallel-commoncrawl.tgz", "commoncrawl.de-en", 4),
        ("training-parallel-nc-v9.tgz", "training/news-commentary-v9.de-en", 3),
    ],
    "fr": [
        ("training-parallel-europarl-v7.tgz", "training/europarl-v7.fr-en", 5),
        ("training-parallel-commoncrawl.tgz", "commoncrawl.fr-en", 4),
        ("training-parallel-un.tgz", "un/undoc.2000.fr-en", 6),
        ("training-parallel-nc-v9.tgz", "training/news-commentary-v9.fr-en", 3),
        ("training-giga-fren.tar", "giga-fren.release2.fixed", 7),
    ],
}
URLS = {
    "training-parallel-europarl-v7.tgz": "http://www.statmt.org/wmt13",
    "training-parallel-commoncrawl.tgz": "http://www.statmt.org/wmt13",
    "training-parallel-un.tgz": "http://www.statmt.org/wmt13",
    "training-parallel-nc-v9.tgz": "http://www.statmt.org/wmt14",
    "training-giga-fren.tar": "http://www.statmt.org/wmt10",
    "dev.tgz": "http://data.statmt.org/wmt19/translation-task",
}


def sentence(where, number, language):
    return f"{where} &amp; {number} in {language}"


def training_pairs(foreign):
    """Line 1 of each part is empty on one side, so it is dropped."""
    return [
        (sentence(stem, n, "en"), sentence(stem, n, foreign))
        for _, stem, count in PARTS[foreign]
        for n in range(count)
        if n != 1
    ]


def held_out_pairs(split, foreign, count):
    return [tuple(f"{split} {n}: R&D \"<{side}>\" 'é' &amp;" for side in ("en", foreign)) for n in range(count)]


def escaped(text):
    """As in the SGML of the shared task, so that unescaping twice would change the text."""
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")


def sgm(sentences):
    lines = [f'<seg id="{n}">{escaped(text)}</seg>' for n, text in enumerate(sentences, start=1)]
    return "\n".join(['<srcset setid="newstest2014">', '<doc docid="1">', "<p>", *lines, "</p>", "</doc>", ""])


def dev_files(foreign, test_count):
    dev, test = held_out_pairs("dev", foreign, 3000), held_out_pairs("test", foreign, test_count)
    files = {}
    for side, (language, role) in enumerate((("en", "ref"), (foreign, "src"))):
        files[f"dev/newstest2013.{language}"] = "".join(pair[side] + "\n" for pair in dev)
        files[f"dev/newstest2014-{foreign}en-{role}.{language}.sgm"] = sgm(pair[side] for pair in test)
    return files


def write_archive(path, files):
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as archive:
        for name, text in files.items():
            data = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def write_archives(folder, foreign, test_count=3003):
    folder.mkdir()
    for name, stem, count in PARTS[foreign]:
        end = ".gz" if name.endswith("fren.tar") else ""
        write_archive(folder / name, {
            f"{stem}.{language}{end}": "".join(
                ("" if n == 1 and language == "en" else sentence(stem, n, language)) + "\n" for n in range(count)
            )
            for language in (foreign, "en")
        })  # fmt: skip
    write_archive(folder / "dev.tgz", dev_files(foreign, test_count))
    return folder


def checksums(folder):
    infos = {}
    for path in folder.iterdir():
        data = path.read_bytes()
        infos[f"{URLS[path.name]}/{path.name}"] = types.SimpleNamespace(
            size=len(data), checksum=hashlib.sha256(data).hexdigest()
        )
    return infos


def expect(monkeypatch, folder):
    from tensorflow_datasets.translate.wmt14 import Wmt14Translate

    monkeypatch.setattr(Wmt14Translate, "url_infos", checksums(folder))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Archives for each language pair, written once."""
    return {foreign: write_archives(tmp_path_factory.mktemp("archives") / foreign, foreign) for foreign in ("de", "fr")}


@pytest.fixture(scope="module")
def prepared(made, tmp_path_factory):
    """A folder in which English-German was prepared; it does not have the archives."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as monkeypatch:
        expect(monkeypatch, made["de"])
        read_corpus("wmt14_ende", "en", "de", {}, folder, str(made["de"]))
    return folder


@pytest.fixture
def archives(made, monkeypatch, tmp_path):
    """The English-German archives, to be damaged."""
    expect(monkeypatch, made["de"])
    return shutil.copytree(made["de"], tmp_path / "archives")


@pytest.fixture
def copy(prepared, tmp_path):
    """The prepared folder, to be damaged."""
    return shutil.copytree(prepared, tmp_path / "data")


def shards(directory, foreign="de"):
    return directory / "tensorflow_datasets" / "wmt14_translate" / f"{foreign}-en" / "1.0.0"


@pytest.mark.parametrize("source", ["en", "de"])
def test_german_pairs_come_in_file_order_in_either_direction_without_the_archives(prepared, source):
    target = {"en": "de", "de": "en"}[source]
    corpus = read_corpus("wmt14_ende", source, target, {}, prepared)
    turn = lambda pairs: [pair if source == "en" else pair[::-1] for pair in pairs]
    # Training text is as it is in the archive, entities included; pairs with an empty side are not pairs.
    assert list(corpus.splits["train"]()) == turn(training_pairs("de"))
    assert list(corpus.splits["dev"]()) == turn(
        [tuple(text.replace("&amp;", "&") for text in pair) for pair in held_out_pairs("dev", "de", 3000)]
    )
    assert list(corpus.splits["test"]()) == turn(held_out_pairs("test", "de", 3003))


def test_french_has_five_parts_and_its_archives_known_checksums(made, monkeypatch, tmp_path):
    known = wmt14._url_infos()
    for name in URLS:
        assert len(known[f"{URLS[name]}/{name}"].checksum) == 64
    expect(monkeypatch, made["fr"])
    corpus = read_corpus("wmt14_enfr", "fr", "en", {}, tmp_path, str(made["fr"]))
    assert list(corpus.splits["train"]()) == [pair[::-1] for pair in training_pairs("fr")]
    assert list(corpus.splits["test"]()) == [pair[::-1] for pair in held_out_pairs("test", "fr", 3003)]
    assert "  gigafren" in corpus.table() and "40,836,715" in corpus.table()


def test_the_table_names_the_files_and_archives_and_the_numbers_of_pairs(prepared):
    rows = [line.split() for line in read_corpus("wmt14_ende", "en", "de", {}, prepared).table().splitlines()]
    assert rows[0][:3] == ["wmt14_translate", "expected", "ours"]
    assert rows[1] == ["train", "4,508,785", "9"]
    for row, (archive, stem, count) in zip(rows[2:5], PARTS["de"], strict=True):
        assert row[1:] == [str(count - 1), f"{archive}:", f"{stem}.de,", f"{stem}.en"]
    assert rows[5] == ["dev", "3,000", "3,000"]
    assert rows[7] == ["test", "3,003", "3,003"]
    assert rows[8][2:] == ["dev.tgz:", "dev/newstest2014-deen-src.de.sgm,", "dev/newstest2014-deen-ref.en.sgm"]


def test_importing_corpora_imports_neither_tensorflow_datasets_nor_jax():
    loaded = "import sys, t2t_jax.data.corpora; print({'tensorflow_datasets', 'jax'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True).stdout == "set()\n"


def test_character_entities_are_unescaped_once_and_lone_ampersands_stay():
    assert wmt14.unescape("a &amp;lt; b &#39;c&#x27; &quot;") == "a &lt; b 'c' \""
    assert wmt14.unescape("AT&T, R&reg, &unknown; & &;") == "AT&T, R&reg, &unknown; & &;"


def test_preparing_leaves_only_shards_their_metadata_and_the_manifest(prepared):
    assert sorted(path.name for path in (prepared / "tensorflow_datasets").iterdir()) == ["wmt14_translate"]
    manifest = json.loads((shards(prepared) / "manifest.json").read_text())
    names = {path.name for path in shards(prepared).iterdir()} - {"manifest.json"}
    assert set(manifest["sha256"]) == names > {"dataset_info.json", "features.json"}
    written = {path.name for path in shards(prepared).glob("*.array_record*")}
    assert written == {part["shard"] for part in manifest["parts"]}
    assert read_corpus("wmt14_ende", "en", "de", {}, prepared).checksums.keys() == written


def test_the_same_archives_give_the_same_checksums(archives, prepared, tmp_path):
    again = read_corpus("wmt14_ende", "de", "en", {}, tmp_path, str(archives))
    assert again.checksums == read_corpus("wmt14_ende", "en", "de", {}, prepared).checksums


def test_preparing_prints_nothing_on_standard_output_and_opens_no_connection(archives, tmp_path, capfd, monkeypatch):
    def refuse(*_):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    read_corpus("wmt14_ende", "en", "de", {}, tmp_path, str(archives))
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.count("unpacking") == len(list(archives.iterdir()))  # dev.tgz once for both held-out sets


@pytest.mark.parametrize(("source", "target"), [("en", "fr"), ("de", "fr"), ("en", "en")])
def test_other_languages_are_refused(source, target, tmp_path):
    with pytest.raises(InputError, match=f"data.source_language={source}, .*wmt14_ende has en and de"):
        read_corpus("wmt14_ende", source, target, {}, tmp_path)


def test_a_folder_of_archives_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"data.archives=/nowhere: no such folder"):
        read_corpus("wmt14_ende", "en", "de", {}, tmp_path, "/nowhere")


@pytest.mark.parametrize("cached", [False, True])
def test_a_truncated_archive_is_refused_by_name_even_if_downloaded(archives, cached, tmp_path):
    path = archives / "training-parallel-nc-v9.tgz"
    path.write_bytes(path.read_bytes()[:-1])
    if cached:
        archives = archives.rename(tmp_path / "downloads")
    with pytest.raises(DamagedError, match=r"training-parallel-nc-v9.tgz: \d+ bytes, expected \d+"):
        read_corpus("wmt14_ende", "en", "de", {}, tmp_path, "" if cached else str(archives))
    assert not shards(tmp_path).exists()


@pytest.mark.parametrize("cached", [False, True])
def test_an_archive_of_the_right_size_with_another_hash_is_refused_by_name(archives, cached, tmp_path):
    path = archives / "dev.tgz"
    data = bytearray(path.read_bytes())
    data[4] ^= 1  # gzip's time stamp: the content is the same
    path.write_bytes(data)
    if cached:
        archives = archives.rename(tmp_path / "downloads")
    with pytest.raises(DamagedError, match=r"dev.tgz: sha256 is \w{64}, expected \w{64}; replace it by http"):
        read_corpus("wmt14_ende", "en", "de", {}, tmp_path, "" if cached else str(archives))


def test_an_archive_that_would_write_outside_is_refused(archives, monkeypatch, tmp_path):
    write_archive(archives / "dev.tgz", dev_files("de", 3003) | {"../../outside": "x"})
    expect(monkeypatch, archives)
    with pytest.raises(DamagedError, match=r"dev.tgz: not an archive that can be unpacked .*outside"):
        read_corpus("wmt14_ende", "en", "de", {}, tmp_path, str(archives))
    assert not list(tmp_path.rglob("outside"))


@pytest.mark.parametrize(
    ("count", "message"), [(2737, r"2,737 pairs \(2,737 are the filtered copy\)"), (3002, "3,002")]
)
def test_a_test_set_of_another_size_is_refused(count, message, archives, monkeypatch, tmp_path):
    write_archive(archives / "dev.tgz", dev_files("de", count))
    expect(monkeypatch, archives)
    with pytest.raises(DamagedError, match=rf"test has {message}.*, expected 3,003; replace dev.tgz"):
        read_corpus("wmt14_ende", "en", "de", {}, tmp_path, str(archives))
    assert not shards(tmp_path).exists()


@pytest.mark.parametrize("damage", [
    lambda path: path.write_bytes(path.read_bytes()[:-100]),
    lambda path: path.write_bytes(path.with_name(path.name.replace("00000-of", "00001-of")).read_bytes()),
    lambda path: path.unlink(),
], ids=["truncated", "swapped", "missing"])  # fmt: skip
def test_a_damaged_shard_is_refused_by_name(copy, damage):
    damage(shards(copy) / "wmt14_translate-train.array_record-00000-of-00003")
    with pytest.raises(DamagedError, match=r"train.array_record-00000-of-00003 is damaged or missing; delete .*1.0.0"):
        read_corpus("wmt14_ende", "en", "de", {}, copy)


@pytest.mark.parametrize("manifest", ["", "[]", None])
def test_a_damaged_manifest_is_refused_by_name(copy, manifest):
    path = shards(copy) / "manifest.json"
    path.unlink()
    if manifest is not None:
        path.write_text(manifest)
    with pytest.raises(DamagedError, match="manifest.json is damaged or missing"):
        read_corpus("wmt14_ende", "en", "de", {}, copy)


def test_a_shard_with_fewer_records_than_were_written_is_refused(copy):
    parts = json.loads((shards(copy) / "manifest.json").read_text())["parts"]
    wmt14.check_counts(shards(copy), parts)
    shard = shards(copy) / parts[0]["shard"]
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    with pytest.raises(DamagedError, match=f"{parts[0]['shard']}: 0 records, expected"):
        wmt14.check_counts(shards(copy), parts)


def test_files_left_by_a_killed_process_are_removed_and_not_used(archives, tmp_path):
    root = tmp_path / "tensorflow_datasets"
    left = root / ".unfinished-abc"
    half = left / "wmt14_translate" / "de-en" / "1.0.0.incompleteXYZ"
    half.mkdir(parents=True)
    (half / "wmt14_translate-train.array_record-00000-of-00003").write_bytes(b"half")
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / "dev.tgz.partial").write_bytes(b"half")
    corpus = read_corpus("wmt14_ende", "en", "de", {}, tmp_path, str(archives))
    assert list(corpus.splits["train"]()) == training_pairs("de")
    assert not left.exists()


def test_downloads_are_atomic(tmp_path):
    served = tmp_path / "served"
    served.write_bytes(b"0123456789")
    path = tmp_path / "downloads" / "dev.tgz"
    path.parent.mkdir()
    path.with_name("dev.tgz.partial").write_bytes(b"left by a killed process")
    with pytest.raises(InputError, match=r"served gave 10 of 11 bytes; .*put dev.tgz into a folder .*data.archives"):
        downloads.download(served.as_uri(), path, 11)
    assert not path.exists()
    assert downloads.download(served.as_uri(), path, 10).read_bytes() == b"0123456789"
    assert [p.name for p in path.parent.iterdir()] == ["dev.tgz"]


def test_a_disk_that_is_full_is_not_taken_for_a_bug_or_for_the_network(archives, tmp_path, monkeypatch):
    def write_shard(*_):  # as array_record does
        raise RuntimeError("write() failed: No space left on device; writing x.array_record; at byte 495616")

    monkeypatch.setattr(wmt14._builder_class(), "_write_shard", write_shard)
    fields = {"data__corpus": "wmt14_ende", "data__train": "", "data__dev": "", "data__test": ""}
    config = tiny_config(tmp_path, data__archives=str(archives), **fields)
    with pytest.raises(OSError) as failed:
        open_store(config.data)
    assert stop_reason(failed.value) == (f"{tmp_path}/stores: No space left on device; {CORRECT_THAT}", 2)

    served = tmp_path / "served"
    served.write_bytes(b"0123456789")
    (tmp_path / "dev.tgz.partial").symlink_to("/dev/full")
    with pytest.raises(OSError) as failed:
        downloads.download(served.as_uri(), tmp_path / "dev.tgz", 10)
    assert stop_reason(failed.value) == (f"{tmp_path}/dev.tgz.partial: No space left on device; {CORRECT_THAT}", 2)


CORRECT_THAT = "correct that, or give another path"


def test_the_hash_of_a_download_is_checked(tmp_path):
    served = tmp_path / "dev.tgz"
    served.write_bytes(b"0123456789")
    known = {served.as_uri(): types.SimpleNamespace(size=10, checksum="0" * 64)}
    with pytest.raises(DamagedError, match=r"downloads/dev.tgz: sha256 is 84d89877\w*, expected 0{64}"):
        wmt14.Archives(known, [tmp_path / "downloads"], tmp_path).download_and_extract([served.as_uri()])


def test_a_failed_download_is_refused_in_one_line_with_the_url_and_advice(archives, tmp_path):
    (archives / "training-parallel-commoncrawl.tgz").unlink()
    with pytest.raises(InputError) as error:  # tests have no network
        read_corpus("wmt14_ende", "en", "de", {}, tmp_path, str(archives))
    assert "could not download http://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz" in str(error.value)
    assert "data.archives" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("end", ["", ".gz"])
def test_streamed_text_equals_what_the_builder_reads(tmp_path, end):
    from tensorflow_datasets.translate import wmt

    sides = {"fr": "un\n\ndeux\r\nà\u2028trois \nquatre", "en": "one\nnone\ntwo\r\nthree\x85\nfour"}
    paths = [tmp_path / f"corpus.fr-en.{language}{end}" for language in sides]
    for path, text in zip(paths, sides.values(), strict=True):
        path.write_bytes(gzip.compress(text.encode()) if end else text.encode())
    theirs = [example for _, example in wmt._parse_parallel_sentences(*map(str, paths)) if all(example.values())]
    found = list(wmt14.parallel_text(*paths))
    assert [example for _, example in found] == theirs
    assert [number for number, _ in found] == [0, 2, 3, 4]


def test_sides_of_different_length_are_refused_by_name(tmp_path):
    for language, text in (("de", "eins\nzwei\n"), ("en", "one\n")):
        (tmp_path / f"corpus.{language}").write_text(text)
    with pytest.raises(DamagedError, match="corpus.de, corpus.en: zip"):
        list(wmt14.parallel_text(tmp_path / "corpus.de", tmp_path / "corpus.en"))
