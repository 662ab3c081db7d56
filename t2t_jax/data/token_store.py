"""§5.1: the tokenised corpus on disk: written once, memory-mapped, any pair read in O(1).

A store is a folder named for what it was made from, written under another name and renamed when complete:

    manifest.json               settings, counts, report, and the sha256 of every other file
    vocab.model                 the joint vocabulary
    train.{source,target}.ids   every sentence's ids, EOS last, one after the other (uint16, or uint32 for
                                vocabularies beyond 65,536)
    train.{source,target}.ends  int64: where each sentence ends in `.ids`
    {dev,test}.{source,target}.txt   the held-out text
"""

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from t2t_jax.data import cleaning
from t2t_jax.data.corpora import SPLITS, Corpus, Pair, one_line, read_corpus
from t2t_jax.data.tokenizer import Tokenizer, train_vocabulary
from t2t_jax.errors import DamagedError, InputError, choice
from t2t_jax.files import read_json, sha256, write_json

_CHUNK = 20_000  # pairs in memory at a time while writing
_HELD_OUT = ("dev", "test")
_SIDES = ("source", "target")


@dataclasses.dataclass(frozen=True)
class StoreSettings:
    """What a store depends on besides the corpus; the field names are those of `config.data`.

    Lengths are in subwords, EOS included. `max_length` bounds training pairs; `heldout_max_length` says which
    dev and test pairs belong to the experiment (0: all of them).
    """

    vocab_size: int
    vocab_kind: str
    byte_fallback: bool
    max_length: int
    heldout_max_length: int

    def __post_init__(self):
        choice("data.vocab_kind", self.vocab_kind, ["bpe", "unigram"])
        if self.max_length < 2:
            raise InputError(f"data.max_length must be at least 2 (a subword and EOS); got {self.max_length}")


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
        return np.diff(self._ends, prepend=0).astype(np.int32)


class TokenStore:
    """A complete store; opening it checks every file against its checksum."""

    def __init__(self, directory: Path):
        self.directory = directory
        manifest = read_json(directory / "manifest.json")
        for name, expected in manifest["sha256"].items():
            path = directory / name
            if not path.is_file() or sha256(path) != expected:
                raise DamagedError(f"{path} is damaged or missing; delete {directory} and run again")
        self.tokenizer = Tokenizer(directory / "vocab.model")
        self.report = cleaning.Report(**manifest["report"])
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
        return "\n".join([*lines, f"{len(self.tokenizer):,} pieces; {self.directory}"])


def open_store(data: Mapping[str, Any]) -> TokenStore:
    """The store that the fields of `config.data` describe, prepared now if it is not there."""
    directory = Path(data["directory"]).expanduser()
    prefixes = {split: data[split] for split in SPLITS}
    corpus = read_corpus(data["corpus"], data["source_language"], data["target_language"], prefixes, directory)
    settings = StoreSettings(**{field.name: data[field.name] for field in dataclasses.fields(StoreSettings)})
    return prepare(corpus, settings, directory)


def prepare(corpus: Corpus, settings: StoreSettings, directory: Path) -> TokenStore:
    """Opens the store of this corpus with these settings under `directory`, writing it first if there is none."""
    identity = json.dumps([corpus.checksums, corpus.languages, dataclasses.asdict(settings)], sort_keys=True)
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    final = directory / f"{corpus.name}-{'-'.join(corpus.languages)}-{key}"
    if not final.exists():
        directory.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=directory))
        try:
            _write(corpus, settings, partial)
            os.rename(partial, final)
        except OSError:
            if not final.exists():  # otherwise another process was first with the same store
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return TokenStore(final)


def _write(corpus: Corpus, settings: StoreSettings, directory: Path) -> None:
    vocabulary = directory / "vocab.model"
    sentences = (one_line(side) for pair in corpus.splits["train"]() for side in pair)
    vocabulary.write_bytes(
        train_vocabulary(sentences, settings.vocab_size, kind=settings.vocab_kind, byte_fallback=settings.byte_fallback)
    )
    tokenizer = Tokenizer(vocabulary)
    dtype = np.dtype("<u2" if len(tokenizer) <= 1 << 16 else "<u4")
    report = _write_train(corpus.splits["train"](), tokenizer, settings.max_length, dtype, directory)
    if not report.kept:
        raise InputError(f"data.train: no pair is left to train on ({report}); raise data.max_length")
    limit = settings.heldout_max_length
    held_out = {s: _write_held_out(corpus.splits[s](), tokenizer, limit, directory / s) for s in _HELD_OUT}
    manifest = {
        "languages": corpus.languages,
        "corpus": corpus.checksums,
        "settings": dataclasses.asdict(settings),
        "dtype": dtype.str,
        "report": dataclasses.asdict(report),
        "held_out": held_out,
        "sha256": {path.name: sha256(path) for path in sorted(directory.iterdir())},
    }
    write_json(directory / "manifest.json", manifest)


def _write_train(
    pairs: Iterator[Pair], tokenizer: Tokenizer, max_length: int, dtype: np.dtype, directory: Path
) -> cleaning.Report:
    report = cleaning.Report()
    ids = [(directory / f"train.{side}.ids").open("wb") for side in _SIDES]
    ends = [(directory / f"train.{side}.ends").open("wb") for side in _SIDES]
    position = [0, 0]
    for chunk in _chunks(pairs):
        full = [pair for pair in chunk if not cleaning.is_empty(*pair)]
        encoded = zip(*_encode(full, tokenizer), strict=True)
        kept = [pair for pair in encoded if not cleaning.is_too_long(*pair, max_length)]
        report.read += len(chunk)
        report.empty += len(chunk) - len(full)
        report.too_long += len(full) - len(kept)
        for side in (0, 1):
            lengths = np.array([len(pair[side]) for pair in kept], np.int64)
            flat = itertools.chain.from_iterable(pair[side] for pair in kept)
            np.fromiter(flat, dtype, lengths.sum()).tofile(ids[side])
            (position[side] + lengths.cumsum()).tofile(ends[side])
            position[side] += lengths.sum()
    for file in (*ids, *ends):
        file.close()
    return report


def _write_held_out(pairs: Iterator[Pair], tokenizer: Tokenizer, limit: int, stem: Path) -> dict[str, int]:
    pairs = list(pairs)
    lengths = zip(*_encode(pairs, tokenizer), strict=True)
    kept = [p for p, ids in zip(pairs, lengths, strict=True) if not limit or not cleaning.is_too_long(*ids, limit)]
    if not kept:
        raise InputError(f"data.{stem.name}: no pair of at most data.heldout_max_length={limit} subwords")
    for side, name in enumerate(_SIDES):
        # Lines end at \n alone, so that a sentence may hold any other character.
        Path(f"{stem}.{name}.txt").write_bytes("".join(one_line(p[side]) + "\n" for p in kept).encode())
    return {"read": len(pairs), "kept": len(kept)}


def _encode(pairs: list[Pair], tokenizer: Tokenizer) -> tuple[list[list[int]], list[list[int]]]:
    return tuple(tokenizer.encode_many([pair[side] for pair in pairs]) for side in (0, 1))


def _chunks(pairs: Iterator[Pair]) -> Iterator[list[Pair]]:
    while chunk := list(itertools.islice(pairs, _CHUNK)):
        yield chunk
