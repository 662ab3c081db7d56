"""§5.1: the tokenised corpus on disk: written once, memory-mapped, random access to any pair in O(1).

A store is a folder, written by preparation.py, whose name holds a hash of the text and the settings:

    manifest.json               settings, counts, report, and the SHA-256 of every other file
    vocab.model                 the joint vocabulary; or source_vocab.model and target_vocab.model
    train.{source,target}.ids   the concatenated ids of all sentences, each ended by EOS (uint16, or uint32 if a
                                vocabulary has more than 65,536 pieces)
    train.{source,target}.ends  the end of each sentence in `.ids` (int64)
    {dev,test}.{source,target}.txt   the held-out text, a sentence per line; so is that of further test sets
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t2t_jax.data import cleaning
from t2t_jax.data.task import JOINT_FILE, SOURCE_FILE, TARGET_FILE, Vocabularies
from t2t_jax.errors import DamagedError
from t2t_jax.files import check_files, read_object

SIDES = ("source", "target")
_CHUNK = 1 << 20  # sentences whose lengths are computed at a time


class Sentences:
    """One side of the training set; `sentences[i]` holds the ids of sentence i.

    `ids` concatenates all sentences; sentence i is `ids[ends[i - 1] : ends[i]]`.
    """

    def __init__(self, ids: np.ndarray, ends: np.ndarray):
        self._ids, self._ends = ids, ends

    @classmethod
    def open(cls, stem: Path, dtype: np.dtype) -> "Sentences":
        """Memory-maps the two files of one side of a store."""
        return cls(np.memmap(f"{stem}.ids", dtype, mode="r"), np.memmap(f"{stem}.ends", np.int64, mode="r"))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> np.ndarray:
        start = self._ends[index - 1] if index else 0
        return self._ids[start : self._ends[index]]

    def lengths_of(self, indices: np.ndarray) -> np.ndarray:
        """The number of subwords of each of these sentences, EOS included."""
        return self._ends[indices] - np.where(indices > 0, self._ends[np.maximum(indices, 1) - 1], 0)

    def concatenated(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ids of these sentences, one after another, and the number of each."""
        lengths = self.lengths_of(indices)
        shifts = self._ends[indices] - np.cumsum(lengths)  # from an index of the result to one of `ids`
        return self._ids[np.arange(lengths.sum()) + np.repeat(shifts, lengths)], lengths

    def lengths(self) -> np.ndarray:
        """The number of subwords of every sentence, EOS included."""
        found, start = np.empty(len(self._ends), np.int32), 0
        for first in range(0, len(found), _CHUNK):  # `ends` takes twice the memory of the lengths
            ends = self._ends[first : first + _CHUNK]
            found[first : first + len(ends)] = np.diff(ends, prepend=start)
            start = ends[-1]
        return found


def _file_sets(held_out: Iterable[str]) -> tuple[set[str], set[str]]:
    """The files of a store with these dev and test sets: with a joint vocabulary, and with two."""
    texts = {f"train.{side}.{part}" for side in SIDES for part in ("ids", "ends")}
    texts |= {f"{split}.{side}.txt" for split in ("dev", "test", *held_out) for side in SIDES}
    return texts | {JOINT_FILE}, texts | {SOURCE_FILE, TARGET_FILE}


def _checked_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a store, after comparing the checksum of every file with it."""
    again = f"delete {directory} and run again"
    try:
        manifest = read_object(directory / "manifest.json")
        sums = manifest["sha256"]
        if sums.keys() not in _file_sets(manifest["held_out"]):
            raise DamagedError(f"it names {', '.join(sorted(sums)) or 'no files'}")
        if not all(re.fullmatch(r"\w+", split) for split in manifest["held_out"]):
            raise DamagedError("a name of a test set is not a word")
    except (DamagedError, AttributeError, KeyError, TypeError) as error:
        raise DamagedError(f"{directory / 'manifest.json'} is damaged ({error}); {again}") from None
    check_files(directory, sums)
    return manifest


class TokenStore:
    """A complete store; opening it verifies the checksum of every file.

    `texts` are the names and weights of its training texts, if there are several (mixture.py).
    """

    def __init__(self, directory: Path, texts: Sequence[tuple[str, float]] = ()):
        self.directory = directory
        manifest = _checked_manifest(directory)
        self.vocabularies = Vocabularies.open(directory)
        self.report = cleaning.Report(**manifest["report"])
        self._corpus_table = manifest["corpus_table"]
        self._segmentations = manifest["settings"].get("segmentations", 1)  # earlier stores lack it
        self.held_out_counts = manifest["held_out"]
        dtype = np.dtype(manifest["dtype"])
        self.source, self.target = (Sentences.open(directory / f"train.{side}", dtype) for side in SIDES)
        self._texts, self.weights = texts, [weight for _, weight in texts]
        identity = json.dumps(manifest["sha256"], sort_keys=True)
        if self.is_mixture:
            identity += json.dumps([self.report.texts, self.weights])
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()

    @property
    def is_mixture(self) -> bool:
        """Whether the pairs of some training texts occur more often than those of others."""
        return any(weight != 1 for weight in self.weights)

    @property
    def test_sets(self) -> list[str]:
        """The names of the test sets, 'test' first."""
        return [split for split in self.held_out_counts if split != "dev"]

    def held_out(self, split: str) -> tuple[list[str], list[str]]:
        """Source and reference sentences of 'dev' or of a test set."""
        paths = (self.directory / f"{split}.{side}.txt" for side in SIDES)
        return tuple(path.read_text("utf-8").split("\n")[:-1] for path in paths)

    def describe(self) -> str:
        """A summary for people: what the store holds and what was dropped."""
        lines = [str(self.report)]
        if self._segmentations > 1:
            lines.append(f"  each pair {self._segmentations} times, segmented into subwords at random")
        if self._texts:
            for (name, weight), size in zip(self._texts, self.report.texts, strict=True):
                lines.append(f"  {size:>12,} of {name}, weight {weight:g}")
        for split, counts in self.held_out_counts.items():
            beyond = counts["read"] - counts["kept"]
            left_out = f"; {beyond:,} beyond data.heldout_max_length are not part of it" if beyond else ""
            unknown, normalized = counts.get("unknown", 0), counts.get("normalized", 0)  # earlier stores lack them
            outside = f"; {unknown:,} with text that is not in the vocabulary" if unknown else ""
            rules = f"; {normalized:,} references with characters that data.cleaning replaces" if normalized else ""
            lines.append(f"{counts['kept']:,} {split} pairs{left_out}{outside}{rules}")
        lines.append(f"{self._describe_vocabularies()}; {self.directory}")
        return "\n".join(filter(None, [*lines, self._corpus_table]))

    def _describe_vocabularies(self) -> str:
        source, target = self.vocabularies
        if self.vocabularies.is_joint:
            return f"{len(target):,} pieces"
        return f"{len(source):,} source and {len(target):,} target pieces"
