"""What a task is: the corpora it is learned from, its vocabularies, and how text becomes targets and back.

A task is an entry of `TASKS`, which `data.task` names. Translation is one; another may have its own corpora, its own
metric, and targets that are written as text in a form of their own, as constituency trees are (§6.3).
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from t2t_jax.data.corpora import CORPORA, CorpusReader
from t2t_jax.data.tokenizer import Tokenizer
from t2t_jax.errors import InputError, choice

JOINT_FILE, SOURCE_FILE, TARGET_FILE = "vocab.model", "source_vocab.model", "target_vocab.model"


def _same_target(target: str) -> str:
    return target


def _same_output(source: str, output: str) -> str:
    del source
    return output


@dataclasses.dataclass(frozen=True)
class Task:
    """A sequence-to-sequence problem.

    `corpora` are what `data.corpus` may name, `metric` is an entry of `METRICS` (t2t_jax/evaluation/metrics.py). The
    model learns to produce `preprocess_target(target)`, such as a linearised tree, cut into subwords;
    `postprocess_output(source, output)` makes of its detokenised output what a user reads and the metric compares
    with the target itself. Both return a single line. They are module-level functions, as worker processes import them.
    """

    corpora: Mapping[str, CorpusReader]
    metric: str
    preprocess_target: Callable[[str], str] = _same_target
    postprocess_output: Callable[[str, str], str] = _same_output


TASKS: dict[str, Task] = {"translation": Task(corpora=CORPORA, metric="bleu")}


def task_of(data: Mapping[str, Any]) -> Task:
    """The task that `config.data` names."""
    return TASKS[choice("data.task", data["task"], TASKS)]


class Vocabularies(NamedTuple):
    """The subwords of both sides; `source` and `target` are one object where the vocabulary is joint (§5.1)."""

    source: Tokenizer
    target: Tokenizer

    @classmethod
    def open(cls, folder: Path) -> "Vocabularies":
        """Those in a run folder or a token store."""
        joint, *separate = (folder / name for name in (JOINT_FILE, SOURCE_FILE, TARGET_FILE))
        if joint.is_file():
            return cls(*(Tokenizer(joint),) * 2)
        if not any(path.is_file() for path in separate):
            raise InputError(f"no vocabulary {joint}; a run folder has it beside config.json")
        return cls(*map(Tokenizer, separate))

    @property
    def is_joint(self) -> bool:
        """Whether both sides share one vocabulary."""
        return self.source is self.target

    @property
    def sizes(self) -> dict[str, int | None]:
        """`vocab_size` and `source_vocab_size` as `TransformerConfig` takes them."""
        return {"vocab_size": len(self.target), "source_vocab_size": None if self.is_joint else len(self.source)}

    @property
    def files(self) -> dict[str, bytes]:
        """The files that `open` reads: their names and contents."""
        if self.is_joint:
            return {JOINT_FILE: self.target.model}
        return {SOURCE_FILE: self.source.model, TARGET_FILE: self.target.model}

    @property
    def checksum(self) -> str:
        """SHA-256 of the joint vocabulary, or of the two checksums."""
        if self.is_joint:
            return self.target.checksum
        return hashlib.sha256(f"{self.source.checksum} {self.target.checksum}".encode()).hexdigest()
