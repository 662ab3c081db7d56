"""§5.1: the parallel corpora: where their text comes from and how it is divided into splits.

A corpus is three splits of pairs (source, target). To add one, write a function like `files` and enter it in `CORPORA`.
"""

import dataclasses
import functools
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from t2t_jax.data import wmt14
from t2t_jax.errors import DamagedError, InputError, choice
from t2t_jax.files import read_lines, sha256

SPLITS = ("train", "dev", "test")

Pair = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A parallel corpus: `splits` maps the name of a split to a function that streams its pairs.

    `checksums` identify the text. `table`, for people to read, compares the numbers of pairs with the known ones.
    """

    name: str
    languages: tuple[str, str]
    splits: dict[str, Callable[[], Iterator[Pair]]]
    checksums: dict[str, str]
    table: str = ""


# (languages, prefixes, directory, archives) → the corpus; the arguments are those of `read_corpus`.
CorpusReader = Callable[[tuple[str, str], dict[str, str], Path, str], Corpus]


def read_corpus(
    name: str,
    source_language: str,
    target_language: str,
    prefixes: dict[str, str],
    directory: Path,
    archives: str = "",
    corpora: Mapping[str, CorpusReader] | None = None,
) -> Corpus:
    """Finds, downloads if necessary, and checks the corpus `name` of `corpora` (default: `CORPORA`).

    `prefixes` name the user's files for the corpus `files`: PREFIX stands for PREFIX.en and PREFIX.de. Downloads are
    kept in `directory`; `archives` is a folder that may already have them.
    """
    corpora = CORPORA if corpora is None else corpora
    choice("data.corpus", name, corpora)
    return corpora[name]((source_language, target_language), prefixes, directory, archives)


# --- Text --------------------------------------------------------------------------------------------------


def one_line(text: str) -> str:
    """`text` with each run of ASCII white space, newlines included, replaced by one space, and stripped."""
    return re.sub(r"\s+", " ", text, flags=re.ASCII).strip(" ")


# --- The user's own files ----------------------------------------------------------------------------------


def files(languages: tuple[str, str], prefixes: dict[str, str], directory: Path, archives: str) -> Corpus:
    """Two plain-text files for each split, PREFIX.en and PREFIX.de, aligned line by line."""
    del directory, archives  # nothing to download
    paths = {split: _side_paths(f"data.{split}", prefixes[split], languages) for split in SPLITS}
    splits = {split: lambda sides=sides: _parallel_lines(sides) for split, sides in paths.items()}
    checksums = {f"{split}.{side.suffix}": sha256(side) for split, sides in paths.items() for side in sides}
    return Corpus("files", languages, splits, checksums)


def _side_paths(field: str, prefix: str, languages: tuple[str, str]) -> tuple[Path, Path]:
    if not prefix:
        example = " and ".join(f"PREFIX.{language}" for language in languages)
        raise InputError(f"{field} is empty; set it to the PREFIX of two text files, {example}")
    sides = tuple(Path(f"{prefix}.{language}").expanduser() for language in languages)
    for side in sides:
        if not side.is_file():
            raise InputError(f"{field}={prefix}: no file {side}; the PREFIX stands for {sides[0]} and {sides[1]}")
    source, target = (_count_lines(side) for side in sides)
    if source != target:
        raise InputError(
            f"{field}={prefix}: {sides[0]} has {source} lines, {sides[1]} has {target}; line n must translate line n"
        )
    if source == 0:
        raise InputError(f"{field}={prefix}: {sides[0]} is empty; give at least one sentence a side")
    return sides


def _count_lines(path: Path) -> int:
    count, last = 0, b"\n"
    with path.open("rb") as file:
        while part := file.read(1 << 20):  # not line by line: a line may be of any length
            count, last = count + part.count(b"\n"), part[-1:]
    return count + (last != b"\n")


def _parallel_lines(sides: tuple[Path, Path]) -> Iterator[Pair]:
    with sides[0].open("rb") as source, sides[1].open("rb") as target:
        yield from zip(read_lines(source, str(sides[0])), read_lines(target, str(sides[1])), strict=True)


# --- Home Assistant: real, small, free, and on the Python package index ------------------------------------

_WHEEL = "homeassistant-2026.11.0-py3-none-any.whl"
_WHEEL_SHA256 = "7ca5fbde9dea879ac7723949fc84347aac5182e6309c357b2e4973fd391b00f7"


def home_assistant(languages: tuple[str, str], prefixes: dict[str, str], directory: Path, archives: str) -> Corpus:
    """The user-interface translations of Home Assistant (Apache-2.0), English with any of its languages.

    A pair is two strings with the same key. Duplicates are dropped; pairs are ordered by integration and key. The split
    depends on the integration, so no source file is in two splits; held-out pairs that share a side with a training
    pair are dropped. English-German has 36,522 / 306 / 769 pairs.
    """
    del prefixes, archives
    wheel = _fetch_wheel(directory)
    pairs = {split: list(dict.fromkeys(pairs)) for split, pairs in _integration_pairs(wheel, languages).items()}
    if not pairs["train"]:
        raise InputError(
            f"data.source_language={languages[0]}, data.target_language={languages[1]}: "
            "home_assistant has no such translations; en with de or fr works"
        )
    seen = tuple({pair[side] for pair in pairs["train"]} for side in (0, 1))
    for split in ("dev", "test"):
        pairs[split] = [p for p in pairs[split] if p[0] not in seen[0] and p[1] not in seen[1]]
    splits = {split: lambda split=split: iter(pairs[split]) for split in SPLITS}
    return Corpus("home_assistant", languages, splits, {_WHEEL: _WHEEL_SHA256})


def _fetch_wheel(directory: Path) -> Path:
    """The wheel, downloaded once and checked by its hash on every use. It is read as an archive, never installed."""
    wheel = directory / "downloads" / _WHEEL
    if not wheel.exists():
        wheel.parent.mkdir(parents=True, exist_ok=True)
        _pip_download("homeassistant==2026.11.0", wheel.parent)
    if (found := sha256(wheel)) != _WHEEL_SHA256:
        raise DamagedError(f"{wheel}: sha256 is {found}, expected {_WHEEL_SHA256}; delete the file and run again")
    return wheel


def _pip_download(requirement: str, directory: Path) -> None:
    # The wheel requires a newer Python than ours, which does not matter as it is only read.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python"]
    command += ["--python-version", "3.14", "--only-binary=:all:", "--dest", str(directory), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        raise InputError(f"data.corpus: pip could not download {requirement} ({reason}); check the network")


def _integration_pairs(wheel: Path, languages: tuple[str, str]) -> dict[str, list[Pair]]:
    pairs = {split: [] for split in SPLITS}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        pattern = re.compile(r"homeassistant/components/([^/]+)/translations/")
        for integration in sorted({m[1] for m in map(pattern.match, names) if m}):
            folder = f"homeassistant/components/{integration}/translations"
            sides = [f"{folder}/{language}.json" for language in languages]
            if names.issuperset(sides):
                source, target = (dict(_leaves(json.loads(archive.read(side)))) for side in sides)
                both = ((one_line(source[key]), one_line(target[key])) for key in source if key in target)
                pairs[_split_of(integration)] += [pair for pair in both if all(pair)]
    return pairs


def _leaves(tree: dict, path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _split_of(integration: str) -> str:
    percent = int(hashlib.sha256(integration.encode()).hexdigest(), 16) % 100
    return "dev" if percent < 2 else "test" if percent < 5 else "train"


# --- WMT14, the paper's data -------------------------------------------------------------------------------


def wmt14_translate(
    foreign: str, languages: tuple[str, str], prefixes: dict[str, str], directory: Path, archives: str
) -> Corpus:
    """WMT14 English with 'de' or 'fr', in either direction; dev is newstest2013, test is newstest2014."""
    del prefixes
    name = f"wmt14_en{foreign}"
    if set(languages) != {"en", foreign}:
        raise InputError(
            f"data.source_language={languages[0]}, data.target_language={languages[1]}: "
            f"{name} has en and {foreign}, either as the source"
        )
    prepared = wmt14.prepare(foreign, directory, archives)
    splits = {split: functools.partial(prepared.pairs, split, languages) for split in SPLITS}
    return Corpus(name, languages, splits, prepared.checksums, prepared.table)


CORPORA: dict[str, CorpusReader] = {
    "files": files,
    "home_assistant": home_assistant,
    "wmt14_ende": functools.partial(wmt14_translate, "de"),
    "wmt14_enfr": functools.partial(wmt14_translate, "fr"),
}
