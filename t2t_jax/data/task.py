"""A task: its corpora, its metric, and how text becomes targets and back; and the vocabularies of a run.

Translation is one task; constituency parsing (§6.3) and users' own are others. Each is an entry of `TASKS`, which
`data.task` names:

    TASKS["summarization"] = Task(corpora={"files": corpora.files}, metric="bleu")

Its functions must be defined at module level: they are pickled for the worker processes that prepare a corpus.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from t2t_jax.data import trees
from t2t_jax.data.corpora import CORPORA, CorpusReader
from t2t_jax.data.tokenizer import Tokenizer
from t2t_jax.errors import InputError, choice
from t2t_jax.files import write_bytes

JOINT_FILE, SOURCE_FILE, TARGET_FILE = "vocab.model", "source_vocab.model", "target_vocab.model"


def _same_target(target: str) -> str:
    return target


def _same_output(source: str, output: str) -> str:
    del source
    return output


@dataclasses.dataclass(frozen=True)
class Task:
    """A sequence-to-sequence problem.

    `corpora` are the possible values of `data.corpus`; `metric` is an entry of `METRICS`
    (t2t_jax/evaluation/metrics.py). The model is trained on `preprocess_target(target)`, such as a linearised tree.
    `postprocess_output(source, output)` turns the model's detokenised output into the text that users read and that the
    metric compares with `target`. Both functions return a single line.
    """

    corpora: Mapping[str, CorpusReader]
    metric: str
    preprocess_target: Callable[[str], str] = _same_target
    postprocess_output: Callable[[str, str], str] = _same_output


TASKS: dict[str, Task] = {
    "translation": Task(CORPORA, metric="bleu"),
    "parsing": Task({"trees": trees.trees}, "brackets", trees.target_text, trees.output_tree),
}


def task_of(data: Mapping[str, Any]) -> Task:
    """The task that `config.data` names."""
    return TASKS[choice("data.task", data["task"], TASKS)]


class Vocabularies(NamedTuple):
    """The tokenizers of both sides (§5.1); `source` is `target` if the vocabulary is joint."""

    source: Tokenizer
    target: Tokenizer

    @classmethod
    def open(cls, folder: Path) -> "Vocabularies":
        """The vocabularies in a run folder or a token store."""
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
        """The contents of the files that `open` reads, by name."""
        if self.is_joint:
            return {JOINT_FILE: self.target.model}
        return {SOURCE_FILE: self.source.model, TARGET_FILE: self.target.model}

    def write(self, folder: Path) -> None:
        """Writes the files into a folder, for `open`."""
        for name, content in self.files.items():
            write_bytes(folder / name, content)

    @property
    def checksum(self) -> str:
        """The SHA-256 of the joint vocabulary, or of the two checksums together."""
        if self.is_joint:
            return self.target.checksum
        return hashlib.sha256(f"{self.source.checksum} {self.target.checksum}".encode()).hexdigest()
