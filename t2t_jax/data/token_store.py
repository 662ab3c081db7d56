"""§5.1: the tokenised corpus on disk: written once, memory-mapped, any pair read in O(1).

A store is a folder named for what it was made from:

    manifest.json               settings, counts, report, and the sha256 of every other file
    vocab.model                 the joint vocabulary
    train.{source,target}.ids   every sentence's ids, EOS last, one after the other (uint16, or uint32 for
                                vocabularies beyond 65,536)
    train.{source,target}.ends  int64: where each sentence ends in `.ids`
    {dev,test}.{source,target}.txt   the held-out text

It is written in a hidden folder beside it: first the vocabulary, then shards of cleaned and encoded pairs by several
processes, then the files above without the duplicates among all shards. Each file there is whole or absent, so that
an interrupted preparation goes on where it was and ends with the same bytes.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import threading
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from t2t_jax import signals
from t2t_jax.data import cleaning
from t2t_jax.data.corpora import SPLITS, Corpus, Pair, one_line, read_corpus
from t2t_jax.data.ready_vocabulary import ready_vocabulary
from t2t_jax.data.tokenizer import Tokenizer, longest_whole, train_vocabulary
from t2t_jax.errors import DamagedError, InputError, Range, check_ranges, choice
from t2t_jax.files import alone_in, read_object, sha256, write_bytes, write_object
from t2t_jax.progress_bar import progress_bar

_FORMAT = 3  # of stores; raised when the same corpus and settings give other bytes
_SHARD = 20_000  # pairs read, cleaned and encoded at a time by one process
_HELD_OUT = ("dev", "test")
_SIDES = ("source", "target")
_RANGES = {
    "vocab_size": Range(1, 10_000_000),
    "vocab_pairs": Range(0, 10**9),
    "max_length": Range(2, 16_384),  # a subword and EOS; attention weights grow with its square
    "heldout_max_length": Range(0, 16_384),
}


@dataclasses.dataclass(frozen=True)
class StoreSettings:
    """What a store depends on besides the corpus; the field names are those of `config.data`.

    The vocabulary is the file `vocabulary` (see ready_vocabulary.py), or trained on `vocab_pairs` training pairs drawn
    at random (0: all). Lengths are in subwords, EOS included. `max_length` bounds training pairs;
    `heldout_max_length` says which dev and test pairs belong to the experiment (0: all of them).
    """

    vocabulary: str
    vocab_size: int
    vocab_kind: str
    vocab_pairs: int
    byte_fallback: bool
    character_coverage: float
    max_length: int
    heldout_max_length: int
    cleaning: cleaning.Rules

    def __post_init__(self):
        choice("data.vocab_kind", self.vocab_kind, ["bpe", "unigram"])
        check_ranges(_RANGES, self, "data.")
        if not 0.9 <= self.character_coverage <= 1 or (self.character_coverage < 1 and not self.byte_fallback):
            raise InputError(
                f"data.character_coverage must be from 0.9 to 1, and 1 without data.byte_fallback; got "
                f"{self.character_coverage}"
            )
        if self.vocabulary and not Path(self.vocabulary).is_file():
            raise InputError(
                f"data.vocabulary: no file {self.vocabulary}; give a SentencePiece model or subword-nmt's codes"
            )

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "StoreSettings":
        """Those of `config.data`."""
        names = [field.name for field in dataclasses.fields(cls)]
        if missing := [name for name in names if name not in data]:  # as in the runs that are imported
            raise InputError(f"data.{missing[0]} is not in the config: the run has no data of its own; name your files")
        fields = {name: data[name] for name in names}
        fields["vocabulary"] = str(Path(data["vocabulary"]).expanduser()) if data["vocabulary"] else ""
        return cls(**fields | {"cleaning": cleaning.Rules(**dict(data["cleaning"]))})


class Sentences:
    """One side of the training set: `sentences[i]` is the i-th sentence's ids.

    They lie one after the other in `ids`; `ends` says where each of them ends.
    """

    def __init__(self, ids: np.ndarray, ends: np.ndarray):
        self._ids, self._ends = ids, ends

    @classmethod
    def open(cls, stem: Path, dtype: np.dtype) -> "Sentences":
        """Maps the two files of a store without reading them."""
        return cls(np.memmap(f"{stem}.ids", dtype, mode="r"), np.memmap(f"{stem}.ends", np.int64, mode="r"))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> np.ndarray:
        start = self._ends[index - 1] if index else 0
        return self._ids[start : self._ends[index]]

    def lengths(self) -> np.ndarray:
        """The number of subwords of every sentence, EOS included."""
        found, start = np.empty(len(self._ends), np.int32), 0
        for first in range(0, len(found), 1 << 20):  # a part at a time: `ends` has twice the bytes
            ends = self._ends[first : first + (1 << 20)]
            found[first : first + len(ends)] = np.diff(ends, prepend=start)
            start = ends[-1]
        return found


_FILES = frozenset(
    ["vocab.model"]
    + [f"train.{side}.{part}" for side in _SIDES for part in ("ids", "ends")]
    + [f"{split}.{side}.txt" for split in _HELD_OUT for side in _SIDES]
)


def _checked_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a store, all of whose files match it."""
    again = f"delete {directory} and run again"
    try:
        manifest = read_object(directory / "manifest.json")
        sums = manifest["sha256"]
        if sums.keys() != _FILES:
            raise DamagedError(f"it names {', '.join(sorted(sums)) or 'no files'}")
    except (DamagedError, AttributeError, KeyError) as error:
        raise DamagedError(f"{directory / 'manifest.json'} is damaged ({error}); {again}") from None
    for name, expected in sums.items():
        path = directory / name
        if not path.is_file() or sha256(path) != expected:
            raise DamagedError(f"{path} is damaged or missing; {again}")
    return manifest


class TokenStore:
    """A complete store; opening it checks every file against its checksum."""

    def __init__(self, directory: Path):
        self.directory = directory
        manifest = _checked_manifest(directory)
        self.tokenizer = Tokenizer(directory / "vocab.model")
        self.report = cleaning.Report(**manifest["report"])
        self._corpus_table = manifest["corpus_table"]
        self.held_out_counts = manifest["held_out"]
        dtype = np.dtype(manifest["dtype"])
        self.source, self.target = (Sentences.open(directory / f"train.{side}", dtype) for side in _SIDES)
        self.fingerprint = hashlib.sha256(json.dumps(manifest["sha256"], sort_keys=True).encode()).hexdigest()

    def held_out(self, split: str) -> tuple[list[str], list[str]]:
        """Source and reference sentences of 'dev' or 'test'."""
        paths = (self.directory / f"{split}.{side}.txt" for side in _SIDES)
        return tuple(path.read_text("utf-8").split("\n")[:-1] for path in paths)

    def describe(self) -> str:
        """What is in the store and what was left out, for people."""
        lines = [str(self.report)]
        for split, counts in self.held_out_counts.items():
            beyond = counts["read"] - counts["kept"]
            left_out = f"; {beyond:,} beyond data.heldout_max_length are not part of it" if beyond else ""
            lines.append(f"{counts['kept']:,} {split} pairs{left_out}")
        lines.append(f"{len(self.tokenizer):,} pieces; {self.directory}")
        return "\n".join(filter(None, [*lines, self._corpus_table]))


def open_store(data: Mapping[str, Any]) -> TokenStore:
    """The store that the fields of `config.data` describe, prepared now if it is not there."""
    settings = StoreSettings.of(data)  # checks itself, before anything is downloaded
    directory = Path(data["directory"]).expanduser()
    prefixes = {split: data[split] for split in SPLITS}
    languages = data["source_language"], data["target_language"]
    corpus = read_corpus(data["corpus"], *languages, prefixes, directory, data["archives"])
    return prepare(corpus, settings, directory)


def prepare(corpus: Corpus, settings: StoreSettings, directory: Path) -> TokenStore:
    """Opens the store of this corpus with these settings under `directory`, writing it first if there is none."""
    ready = sha256(Path(settings.vocabulary)) if Path(settings.vocabulary).is_file() else None
    made_from = dataclasses.asdict(settings) | {"vocabulary": ready}
    identity = json.dumps([_FORMAT, corpus.checksums, corpus.languages, made_from], sort_keys=True)
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    final = directory / f"{corpus.name}-{'-'.join(corpus.languages)}-{key}"
    work = final.with_name(f".{final.name}.unfinished")
    while work.exists() or not final.exists():
        work.mkdir(parents=True, exist_ok=True)
        with alone_in(work):
            try:
                if not final.exists():
                    _write(corpus, settings, work, final)
                shutil.rmtree(work)
            except InputError:  # it would only be raised again
                shutil.rmtree(work)
                raise
    return TokenStore(final)


def _write(corpus: Corpus, settings: StoreSettings, work: Path, final: Path) -> None:
    vocabulary = _unfinished_vocabulary(work) or _write_vocabulary(work, _vocabulary(corpus, settings))
    tokenizer = Tokenizer(vocabulary)
    held_out = {split: list(corpus.splits[split]()) for split in _HELD_OUT}
    leaks = cleaning.leak_index(itertools.chain(*held_out.values()))
    shards = _write_shards(corpus, settings, work, vocabulary, leaks)
    store = work / "store"
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir()
    shutil.copy(vocabulary, store / "vocab.model")
    dtype = np.dtype("<u2" if len(tokenizer) <= 1 << 16 else "<u4")
    report = _join_shards(shards, settings, tokenizer, dtype, store)
    if not report.kept:
        raise InputError(f"data.train: no pair is left to train on ({report}); raise data.max_length")
    counts = {split: _write_held_out(pairs, tokenizer, settings, store / split) for split, pairs in held_out.items()}
    manifest = {
        "languages": corpus.languages,
        "corpus": corpus.checksums,
        "corpus_table": corpus.table,
        "settings": dataclasses.asdict(settings),
        "dtype": dtype.str,
        "report": dataclasses.asdict(report),
        "held_out": counts,
        "sha256": {path.name: sha256(path) for path in sorted(store.iterdir())},
    }
    write_object(store / "manifest.json", manifest)
    os.rename(store, final)


def _write_vocabulary(work: Path, content: bytes) -> Path:
    """Under a name that holds its checksum: the shards are encoded with this one alone."""
    path = work / f"vocabulary-{hashlib.sha256(content).hexdigest()}.model"
    write_bytes(path, content)
    return path


def _unfinished_vocabulary(work: Path) -> Path | None:
    """The one that an interrupted preparation wrote."""
    for path in work.glob("vocabulary-*.model"):
        if path.stem.removeprefix("vocabulary-") != sha256(path):
            raise DamagedError(f"{path} is damaged; delete {work} and run again")
        return path
    return None


def _vocabulary(corpus: Corpus, settings: StoreSettings) -> bytes:
    pairs = draw(corpus.splits["train"](), settings.vocab_pairs)
    sentences = _with_text(one_line(cleaning.normalize(side, settings.cleaning)) for pair in pairs for side in pair)
    if settings.vocabulary:
        return ready_vocabulary(Path(settings.vocabulary), sentences)
    return train_vocabulary(
        sentences,
        settings.vocab_size,
        kind=settings.vocab_kind,
        byte_fallback=settings.byte_fallback,
        character_coverage=settings.character_coverage,
        replace=cleaning.replacements(settings.cleaning),
    )


def _with_text(sentences: Iterator[str]) -> Iterator[str]:
    """The sentences that are not blank, refused if there is none."""
    first = next(filter(None, sentences), None)
    if first is None:
        raise InputError("data.train has no text: every line is blank; give it sentences")
    return itertools.chain([first], filter(None, sentences))


def draw(pairs: Iterator[Pair], count: int) -> Iterator[Pair]:
    """`count` of the pairs, each as likely as any other and the same ones every time; all of them where it is 0."""
    if not count:
        return pairs
    drawn, rng, read = list(itertools.islice(pairs, count)), np.random.default_rng(0), count
    for chunk in _chunks(pairs, _SHARD):
        places = rng.integers(np.arange(read, read + len(chunk)) + 1)  # pair n replaces one of those with odds count/n
        for index in np.flatnonzero(places < count):
            drawn[places[index]] = chunk[index]
        read += len(chunk)
    return iter(drawn)


# --- Shards ------------------------------------------------------------------------------------------------


def _write_shards(
    corpus: Corpus, settings: StoreSettings, work: Path, vocabulary: Path, held_out: Collection[str]
) -> list[Path]:
    """Writes those that are not there yet, on all cores, and returns all in order."""
    paths = []

    def missing() -> Iterator[tuple[Path, list[Pair]]]:
        for number, chunk in enumerate(_chunks(corpus.splits["train"](), _SHARD)):
            paths.append(work / f"shard-{number:05}.npz")
            if paths[-1].exists():
                bar.update(len(chunk))
            else:
                yield paths[-1], chunk

    write = functools.partial(_write_shard, vocabulary, settings, corpus.languages, held_out)
    with progress_bar(unit=" pairs", desc="preparing") as bar:
        for count in _on_all_cores(write, missing()):
            bar.update(count)
    return paths


def _on_all_cores(write: Any, jobs: Iterator[tuple[Path, list[Pair]]]) -> Iterator[int]:
    """`write(*job)` of each, a few ahead of what is asked for; one job alone is done here and now."""
    first = list(itertools.islice(jobs, 2))
    if len(first) < 2:
        yield from (write(*job) for job in first)
        return
    cores = len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")  # the caller may have threads, which do not survive a fork
    with concurrent.futures.ProcessPoolExecutor(cores, context, _end_with_parent) as pool:
        running = set()
        for job in itertools.chain(first, jobs):
            with signals.left_to_parent():  # the first call starts the workers
                running.add(pool.submit(write, *job))
            if len(running) > 2 * cores:
                done, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                yield from (future.result() for future in done)
        yield from (future.result() for future in concurrent.futures.as_completed(running))


def _end_with_parent() -> None:
    """A killed parent cannot tell its workers to end."""

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@functools.cache
def _tokenizer(vocabulary: Path) -> Tokenizer:
    return Tokenizer(vocabulary)


def _write_shard(
    vocabulary: Path,
    settings: StoreSettings,
    languages: tuple[str, str],
    held_out: Collection[str],
    path: Path,
    pairs: list[Pair],
) -> int:
    """Cleans and encodes some training pairs into one file, and returns how many it has read.

    It holds all ids of a side in one array and the lengths of its sentences, the keys by which duplicates are found
    (none where they are kept), and the report.
    """
    rules, report = settings.cleaning, cleaning.Report()
    cleaned = cleaning.clean(pairs, rules, languages, held_out, report)
    tokenizer = _tokenizer(vocabulary)
    encoded = zip(*(tokenizer.encode_many([p[side] for p in cleaned], num_threads=1) for side in (0, 1)), strict=True)
    kept, texts = [], []
    for ids, text in zip(encoded, cleaned, strict=True):
        if cleaning.is_too_long(*ids, settings.max_length):
            report.drop("too_long", *text)
        else:
            kept.append(ids)
            texts.append(text)
    arrays = {}
    for side, name in enumerate(_SIDES):
        lengths = np.array([len(ids[side]) for ids in kept], np.int32)
        flat = itertools.chain.from_iterable(ids[side] for ids in kept)
        arrays |= {f"{name}_ids": np.fromiter(flat, np.int32, lengths.sum()), f"{name}_lengths": lengths}
    for name, key, on in (
        ("exact_keys", cleaning.exact_key, rules.drop_duplicates),
        ("near_keys", cleaning.near_key, rules.drop_near_duplicates),
    ):
        arrays[name] = np.array([key(*text) for text in texts] if on else [], np.uint64)
    arrays["report"] = np.frombuffer(json.dumps(dataclasses.asdict(report)).encode(), np.uint8)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(partial, path)
    return len(pairs)


def _read_shard(path: Path, *names: str) -> Mapping[str, np.ndarray]:
    """These arrays of a shard, or all of them, against their checksums."""
    try:
        with np.load(path) as arrays:
            return {name: arrays[name] for name in names or arrays.files}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DamagedError(f"{path} is damaged ({error}); delete it and run again") from None


def _join_shards(
    shards: list[Path], settings: StoreSettings, tokenizer: Tokenizer, dtype: np.dtype, directory: Path
) -> cleaning.Report:
    """Writes the training files: all shards without what occurs in them again."""
    report, position = cleaning.Report(), [0, 0]
    keys = {"duplicate": "exact_keys", "near_duplicate": "near_keys"}
    repeated = {rule: _repeated(shards, name) for rule, name in keys.items()}
    first = 0
    with contextlib.ExitStack() as stack:
        open_all = lambda end: [stack.enter_context((directory / f"train.{side}.{end}").open("wb")) for side in _SIDES]
        ids_files, ends_files = open_all("ids"), open_all("ends")
        for path in shards:
            shard = _read_shard(path)
            report.add(cleaning.Report(**json.loads(shard["report"].tobytes())))
            count = len(shard["source_lengths"])
            keep = np.ones(count, bool)
            for rule, again in repeated.items():
                drop = again[first : first + count] & keep if len(again) else np.zeros(count, bool)
                keep &= ~drop
                _report_repeated(report, rule, drop, shard, tokenizer)
            first += count
            for side, name in enumerate(_SIDES):
                lengths = shard[f"{name}_lengths"]
                shard[f"{name}_ids"][np.repeat(keep, lengths)].astype(dtype).tofile(ids_files[side])
                ends = position[side] + lengths[keep].cumsum(dtype=np.int64)
                ends.tofile(ends_files[side])
                position[side] = int(ends[-1]) if len(ends) else position[side]
    return report


def _repeated(shards: list[Path], name: str) -> np.ndarray:
    """True for each pair of all shards whose key an earlier pair has; empty where there are no keys."""
    keys = np.concatenate([np.zeros(0, np.uint64), *(_read_shard(path, name)[name] for path in shards)])
    return cleaning.repeated(keys)


def _report_repeated(
    report: cleaning.Report, rule: str, drop: np.ndarray, shard: Mapping[str, np.ndarray], tokenizer: Tokenizer
) -> None:
    """Counts dropped pairs; the first of them become examples, as text."""
    sides = [Sentences(shard[f"{name}_ids"], shard[f"{name}_lengths"].cumsum()) for name in _SIDES]
    for count, index in enumerate(np.flatnonzero(drop)):
        text = (tokenizer.decode(side[index]) for side in sides) if count < cleaning.EXAMPLES else ("", "")
        report.drop(rule, *text)


def _write_held_out(pairs: list[Pair], tokenizer: Tokenizer, settings: StoreSettings, stem: Path) -> dict[str, int]:
    limit, most = settings.heldout_max_length, longest_whole(settings.max_length)
    encoded = zip(*(tokenizer.encode_many([pair[side] for pair in pairs]) for side in (0, 1)), strict=True)
    kept = []
    for line, (pair, ids) in enumerate(zip(pairs, encoded, strict=True), start=1):
        if limit and cleaning.is_too_long(*ids, limit):
            continue
        if cleaning.is_too_long(*ids, most):  # could not be scored, after hours of training
            raise InputError(
                f"data.{stem.name}, line {line}: {max(map(len, ids)):,} subwords, which must be at most {most:,}; "
                f"split the line, or leave such lines out with data.heldout_max_length={most}"
            )
        kept.append(pair)
    if not kept:
        raise InputError(f"data.{stem.name}: no pair of at most data.heldout_max_length={limit} subwords")
    for side, name in enumerate(_SIDES):
        # Lines end at \n alone, so that a sentence may hold any other character.
        Path(f"{stem}.{name}.txt").write_bytes("".join(one_line(p[side]) + "\n" for p in kept).encode())
    return {"read": len(pairs), "kept": len(kept)}


def _chunks(pairs: Iterator[Pair], size: int) -> Iterator[list[Pair]]:
    while chunk := list(itertools.islice(pairs, size)):
        yield chunk
