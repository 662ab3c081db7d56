"""§5.1: the translation corpora of TensorFlow Datasets (TFDS), by name; TensorFlow itself is not needed."""

import contextlib
import difflib
import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from t2t_jax.data.parallel_text import check_languages_differ
from t2t_jax.errors import DamagedError, InputError, on_one_line, storage_reason
from t2t_jax.files import expanded, folder_lock, sha256

PREFIX = "tfds:"  # of `data.corpus`
FOLDER = "tensorflow_datasets"  # below `data.directory`, with what TFDS prepares
_OURS = {"de-en": "wmt14_ende", "fr-en": "wmt14_enfr"}
_READ_AHEAD = 1000  # pairs
SPLITS = {"train": "train", "dev": "validation", "test": "test"}  # our name → that of most corpora


def open_builder(name: str, directory: Path, archives: str, languages: tuple[str, str]) -> Any:
    """The TFDS builder of NAME, NAME/CONFIG or NAME/CONFIG:VERSION, after preparing its data if they do not exist.

    Downloads are kept in `directory`; `archives` is the folder of files that TFDS asks to be downloaded by hand. A
    dataset without text in these languages is refused before.
    """
    _check_name(name)
    root = directory / FOLDER
    builder = _builder(name, root)
    _check_languages(builder, name, languages)
    if not builder.data_path.exists():
        with folder_lock(root, f"another process prepares a corpus in {root}"):
            builder = _builder(name, root)  # it may have prepared this one
            if not builder.data_path.exists():
                _prepare(builder, name, directory / "downloads", archives)
    return builder


def _builder(name: str, root: Path) -> Any:
    import tensorflow_datasets as tfds

    try:
        return tfds.builder(name, data_dir=root)
    except (ValueError, AssertionError) as error:  # no such version
        raise InputError(f"data.corpus={PREFIX}{name}: {on_one_line(error)[:200]}") from None


def _prepare(builder: Any, name: str, downloads: Path, archives: str) -> None:
    """Prepares the data of a builder; the caller holds the lock of the folder."""
    import tensorflow_datasets as tfds

    final = Path(builder.data_dir)
    for left in final.parent.glob(f"incomplete.*_{final.name}"):  # by a killed process; the lock excludes running ones
        shutil.rmtree(left)
    download = tfds.download.DownloadConfig(manual_dir=expanded("data.archives", archives) if archives else None)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
            builder.download_and_prepare(file_format="array_record", download_dir=downloads, download_config=download)
    except Exception as error:  # of the network, of the dataset's own code, of a missing archive
        reason = on_one_line(error)[:200]
        raise InputError(f"data.corpus={PREFIX}{name}: TFDS could not prepare it ({reason})") from error


def _check_name(name: str) -> None:
    """Refuses a dataset or a configuration that TFDS does not know."""
    import tensorflow_datasets as tfds

    importlib.import_module("tensorflow_datasets.translate")  # else TFDS does not know most of its own corpora
    dataset, _, config = name.partition(":")[0].partition("/")
    try:
        configs = [known.name for known in tfds.builder_cls(dataset).BUILDER_CONFIGS]
    except (tfds.core.DatasetNotFoundError, ValueError):
        near = _nearest(dataset, tfds.list_builders(with_community_datasets=False))
        raise InputError(f"data.corpus={PREFIX}{name}: no such dataset{near}") from None
    if configs and config not in configs:
        listed = ", ".join(configs[:10])
        raise InputError(
            f"data.corpus={PREFIX}{name}: {dataset} has no configuration {config!r}{_nearest(config, configs)}; it has "
            f"{listed}{', …' * (len(configs) > 10)}"
        )
    if dataset == "wmt14_translate" and config in _OURS:  # whose shards wmt14.py keeps in TFDS's own folder
        raise InputError(f"data.corpus={PREFIX}{name}: choose {_OURS[config]}, the same text in the order of its files")


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def split_of(builder: Any, name: str, split: str, given: str) -> str:
    """What TFDS calls our `split`: what the user has given, or its usual name; errors call the corpus `name`."""
    wanted = given or SPLITS[split]
    field = f"data.{split}" if split in SPLITS else "data.test"
    try:
        builder.info.splits[wanted]
    except (KeyError, ValueError):
        known = ", ".join(sorted(builder.info.splits))
        raise InputError(f"{field}={given}: {name} has no split {wanted!r}; it has {known}") from None
    return wanted


def _check_languages(builder: Any, name: str, languages: tuple[str, str]) -> None:
    """Refuses a dataset without text in these two languages."""
    check_languages_differ(name, languages)
    known = getattr(builder.info.features, "languages", None) or ()
    if missing := [language for language in languages if language not in known]:
        raise InputError(
            f"data.source_language={languages[0]}, data.target_language={languages[1]}: {name} has no {missing[0]}; it "
            f"has {', '.join(known) or 'no translations'}"
        )


def checksum(builder: Any, split: str) -> str:
    """The SHA-256 of the files of a split, and the part of them that it is."""
    instructions = builder.info.splits[split].file_instructions
    return " ".join(f"{sha256(Path(part.filename))}+{part.skip}:{part.take}" for part in instructions)


def read_pairs(builder: Any, split: str, languages: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Streams the pairs (`languages[0]`, `languages[1]`) of a prepared split in file order."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.proto import tf_example_pb2

    # Parsing the records here is more than twice as fast as the generic decoder.
    with _reading(builder):
        source = builder.as_data_source(split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)
        starts = range(0, len(source), _READ_AHEAD)
    for first in starts:
        with _reading(builder):
            records = source.__getitems__(range(first, min(first + _READ_AHEAD, len(source))))
        for record in records:
            sides = tf_example_pb2.Example.FromString(record).features.feature
            yield tuple(sides[language].bytes_list.value[0].decode() for language in languages)


@contextlib.contextmanager
def _reading(builder: Any) -> Iterator[None]:
    """Errors of reading prepared files, in one line."""
    try:
        yield
    except NotImplementedError:
        raise InputError(
            f"data.directory: {builder.data_dir} was prepared in a file format without random access; choose another "
            "folder, where it is prepared as array_record"
        ) from None
    except (RuntimeError, IndexError, ValueError) as error:
        if storage := storage_reason(error):
            raise InputError(f"data.directory: can't read {builder.data_dir} ({storage}); correct that") from None
        reason = on_one_line(error)[:200]
        raise DamagedError(
            f"{builder.data_dir} is damaged ({reason}); delete it, and the same command prepares it again"
        ) from None
