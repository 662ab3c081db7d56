"""§5.1: WMT14 English–German and English–French, read from the archives of the shared task.

The builder `wmt14_translate` of TensorFlow Datasets knows which files of which archives make each split and how to read
them (TensorFlow itself is not needed). Our subclass differs in three ways: pairs stay in file order, the hash of an
archive is checked before every use, and each part of a split is streamed into its own shard.

The result is `DIRECTORY/tensorflow_datasets/wmt14_translate/{de,fr}-en/1.0.0`: array_record shards, and `manifest.json`
with their checksums, which are verified on every use. The archives are then no longer needed.
"""

import codecs
import contextlib
import dataclasses
import functools
import gzip
import html
import itertools
import locale
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from t2t_jax.data.downloads import base_name, download_folders, downloaded
from t2t_jax.data.tfds_corpora import FOLDER, SPLITS, read_pairs
from t2t_jax.errors import DamagedError, InputError
from t2t_jax.files import check_files, folder_lock, read_object, sha256, write_object
from t2t_jax.progress_bar import progress_bar

_HELD_OUT_PAIRS = {"dev": 3_000, "test": 3_003}  # newstest2013 and newstest2014
_FILTERED_TEST_PAIRS = 2_737
_TRAIN_PAIRS = {"de": 4_508_785, "fr": 40_836_715}


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A prepared language pair on disk; `checksums` identify the text, `table` tells people where it comes from."""

    directory: Path
    checksums: dict[str, str]
    table: str

    def pairs(self, split: str, languages: tuple[str, str]) -> Iterator[tuple[str, str]]:
        """Streams the pairs of 'train', 'dev' or 'test' in file order, as (`languages[0]`, `languages[1]`).

        Training text is unchanged; in the held-out sets, which are SGML, character entities are unescaped.
        """
        import tensorflow_datasets as tfds

        pairs = read_pairs(tfds.builder_from_directory(self.directory), SPLITS[split], languages)
        return pairs if split == "train" else (tuple(map(unescape, pair)) for pair in pairs)


def unescape(text: str) -> str:
    """`text` with character entities such as `&amp;` and `&#39;` unescaped once; an `&` without `;` stays."""
    return re.sub(r"&#?\w+;", lambda entity: html.unescape(entity[0]), text)


def prepare(foreign: str, directory: Path, archives: str) -> Prepared:
    """English with 'de' or 'fr', after preparing it under `directory` if it does not exist.

    `archives` is a folder that already has some of the archives; the others are downloaded.
    """
    root = directory / FOLDER
    final = root / "wmt14_translate" / f"{foreign}-en" / "1.0.0"
    if not final.exists():
        with folder_lock(root, f"another process prepares WMT14 in {root}"):
            if not final.exists():
                _prepare(foreign, final, directory / "downloads", archives)
    manifest = _checked_manifest(final)
    checksums = {part["shard"]: manifest["sha256"][part["shard"]] for part in manifest["parts"]}
    return Prepared(final, checksums, _table(foreign, manifest["parts"]))


def _prepare(foreign: str, final: Path, downloads: Path, archives: str) -> None:
    if codecs.lookup(locale.getpreferredencoding(False)).name != "utf-8":
        raise InputError("the locale's encoding must be UTF-8, or the test set would be misread; set PYTHONUTF8=1")
    folders = download_folders(downloads, archives)
    root = final.parents[2]
    for left in root.glob(".unfinished-*"):  # by a killed process; the file lock excludes running ones
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=root) as work:
        builder = _builder_class()(data_dir=work, config=f"{foreign}-en")
        builder.archives = Archives(_url_infos(), folders, Path(work))
        builder.download_and_prepare(file_format="array_record")
        written = Path(builder.data_dir)
        check_counts(written, builder.parts)
        checksums = {path.name: sha256(path) for path in sorted(written.iterdir())}
        write_object(written / "manifest.json", {"parts": builder.parts, "sha256": checksums})
        final.parent.mkdir(parents=True, exist_ok=True)
        os.rename(written, final)


def check_counts(directory: Path, parts: Iterable[Mapping[str, Any]]) -> None:
    """Refuses a shard whose number of records is not the number written."""
    from array_record.python.array_record_module import ArrayRecordReader

    for part in parts:
        reader = ArrayRecordReader(str(directory / part["shard"]))
        if (found := reader.num_records()) != part["pairs"]:  # 0 for a truncated file
            raise DamagedError(f"{directory / part['shard']}: {found:,} records, expected {part['pairs']:,}; run again")
        reader.close()


def _checked_manifest(directory: Path) -> dict[str, Any]:
    """The manifest, after comparing the checksum of every file with it."""
    path = directory / "manifest.json"
    try:
        manifest = read_object(path)
        expected = manifest["sha256"]
        if not {part["shard"] for part in manifest["parts"]} <= expected.keys():
            raise DamagedError("a part has no checksum")
    except (DamagedError, OSError, KeyError, TypeError) as error:
        raise DamagedError(f"{path} is damaged or missing ({error}); delete {directory} and run again") from None
    check_files(directory, expected)
    return manifest


def _table(foreign: str, parts: list[dict[str, Any]]) -> str:
    """A table for people: the parts of each split, and its expected and actual number of pairs."""
    expected = {"train": _TRAIN_PAIRS[foreign]} | _HELD_OUT_PAIRS
    rows = [("wmt14_translate", "expected", "ours", f"{foreign}-en; where from")]
    for split in SPLITS:
        in_split = [part for part in parts if part["split"] == split]
        rows.append((split, f"{expected[split]:,}", f"{sum(part['pairs'] for part in in_split):,}", ""))
        for part in in_split:
            rows.append((f"  {part['name']}", "", f"{part['pairs']:,}", f"{part['archive']}: {part['files']}"))
    return "\n".join(f"{row[0]:<20}{row[1]:>12}{row[2]:>12}  {row[3]}".rstrip() for row in rows)


# --- Archives ----------------------------------------------------------------------------------------------


class Archives:
    """The builder's download manager: finds or downloads an archive, checks its hash, extracts it temporarily.

    `url_infos` has the size and SHA-256 of each URL. Archives are looked for in `folders`; the last keeps downloads.
    """

    def __init__(self, url_infos: Mapping[str, Any], folders: list[Path], work: Path):
        self._url_infos, self._folders, self._work = url_infos, folders, work
        self._unpacked = {}
        self.downloaded_size = 0  # read by the builder

    def download_and_extract(self, urls: Any) -> Any:
        """The folder of an extracted archive; for lists and mappings of URLs, those of their folders."""
        if isinstance(urls, Mapping):
            return {name: self.download_and_extract(url) for name, url in urls.items()}
        if not isinstance(urls, str):
            return [self.download_and_extract(url) for url in urls]
        if urls not in self._unpacked:
            info = self._url_infos[urls]
            path = downloaded(urls, int(info.size), info.checksum, self._folders)
            self.downloaded_size += int(info.size)
            self._unpacked[urls] = self._unpack(path, info.checksum)
        return self._unpacked[urls]

    def extract(self, paths: Mapping[str, Any]) -> Mapping[str, Any]:
        """Nothing: these corpora have no manually downloaded files."""
        assert not paths
        return paths

    def _unpack(self, path: Path, checksum: str) -> Path:
        print(f"unpacking {path}", file=sys.stderr)
        folder = self._work / "unpacked" / checksum
        try:
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")
        except (tarfile.TarError, EOFError) as error:
            raise DamagedError(f"{path}: not an archive that can be unpacked ({error})") from None
        return folder


def _url_infos() -> dict[str, Any]:
    """The size and SHA-256 of each archive; TensorFlow Datasets lists some French ones under WMT13 only."""
    from tensorflow_datasets.translate import wmt13, wmt14

    return wmt13.Wmt13Translate.url_infos | wmt14.Wmt14Translate.url_infos


# --- The builder -------------------------------------------------------------------------------------------


@functools.cache
def _builder_class() -> type:
    """Our subclass of the builder. Created on demand, because its imports are slow."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.translate import wmt, wmt14

    class InFileOrder(wmt14.Wmt14Translate, skip_registration=True):
        """Writes each part of a split as one shard, in file order; `parts` describes what was written."""

        name = "wmt14_translate"
        archives: Archives

        def _info(self) -> tfds.core.DatasetInfo:
            features = tfds.features.Translation(languages=self.builder_config.language_pair)
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _log_download_bytes(self) -> None:  # standard output is for results
            pass

        _log_download_done = _log_download_bytes

        def _make_download_manager(self, **kwargs: Any) -> Archives:
            return self.archives

        def _download_and_prepare(self, dl_manager: Archives, download_config: Any = None) -> None:
            subsets = {str(generator.name): generator.gen_kwargs for generator in self._split_generators(dl_manager)}
            self.parts, infos = [], []
            for split in ("dev", "test", "train"):  # the long part last: a wrong test set is refused early
                infos.append(self._write_split(split, **subsets[SPLITS[split]]))
                _check_held_out(split, infos[-1].num_examples)
            self.info.set_splits(tfds.core.splits.SplitDict(infos))

        def _write_split(self, split: str, split_subsets: list[str], extraction_map: dict[str, list[str]]) -> Any:
            template, lengths, size = self._get_filename_template(SPLITS[split]), [], 0
            for index, name in enumerate(split_subsets):
                path = template.sharded_filepath(shard_index=index, num_shards=len(split_subsets))
                examples = self._generate_examples([name], extraction_map)
                bar = progress_bar(examples, unit=" pairs", desc=f"{split}: {name}")
                lengths.append(self._write_shard(path, bar))
                size += os.path.getsize(path)
                subset, (foreign, _) = wmt.DATASET_MAP[name], self.builder_config.language_pair
                self.parts.append({
                    "split": split,
                    "name": name,
                    "archive": ", ".join(map(base_name, subset.get_url(foreign))),
                    "files": ", ".join(subset.get_path(foreign)),
                    "shard": path.name,
                    "pairs": lengths[-1],
                })  # fmt: skip
            return tfds.core.SplitInfo(SPLITS[split], lengths, size, template)

        def _generate_examples(
            self, split_subsets: list[str], extraction_map: dict[str, list[str]]
        ) -> Iterator[tuple[str, dict[str, str]]]:
            """As in the builder, but plain text is streamed: the builder takes ten times a file's size in memory."""
            for name in split_subsets:
                paths = wmt.DATASET_MAP[name].get_path(self.builder_config.language_pair[0])
                if paths[0].endswith(".sgm"):
                    yield from super()._generate_examples([name], extraction_map)
                else:
                    folders = itertools.cycle(extraction_map[name])
                    sides = [Path(folder, path) for folder, path in zip(folders, paths, strict=False)]
                    yield from ((f"{name}/0/{number}", example) for number, example in parallel_text(*sides))

        def _write_shard(self, path: Path, examples: Iterable[tuple[str, Any]]) -> int:
            """The number of pairs written."""
            count = 0

            def records() -> Iterator[tuple[str, bytes]]:
                nonlocal count
                for key, example in examples:
                    count += 1
                    yield key, self.info.features.serialize_example(example)

            self._example_writer().write(path, records())
            return count

    return InFileOrder


def parallel_text(*paths: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Streams (line number, {language: sentence}) of aligned files, named by suffix; drops pairs with an empty side."""
    languages = [path.name.removesuffix(".gz").rsplit(".", 1)[-1] for path in paths]
    with contextlib.ExitStack() as stack:
        open_file = lambda path: stack.enter_context((gzip.open if path.suffix == ".gz" else open)(path, "rb"))
        try:
            for number, lines in enumerate(zip(*map(open_file, paths), strict=True)):
                sentences = [line.removesuffix(b"\n").decode() for line in lines]
                if all(sentences):
                    yield number, dict(zip(languages, sentences, strict=True))
        except ValueError as error:  # lengths differ, or not UTF-8
            raise DamagedError(f"{', '.join(path.name for path in paths)}: {error}; replace the archive") from None


def _check_held_out(split: str, found: int) -> None:
    expected = _HELD_OUT_PAIRS.get(split, found)
    if found != expected:
        hint = " (2,737 are the filtered copy)" if found == _FILTERED_TEST_PAIRS else ""
        raise DamagedError(f"data.corpus: {split} has {found:,} pairs{hint}, expected {expected:,}; replace dev.tgz")
