"""A task: its corpora, its metric, and how text becomes targets and back; and the vocabularies of a run.

Translation is one task; constituency parsing (§6.3) and users' own are others. Each is an entry of `TASKS`, which
`data.task` names:

    TASKS["summarization"] = Task(corpora={"files": corpora.files}, metric="bleu")

Its functions must be defined at module level: they are pickled for the worker processes that prepare a corpus. The
source of its preprocessing functions (of an object, of its class), but not of what they call, is part of the key of a
prepared corpus: where that changes, give another `data.directory`.
"""

import dataclasses
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from t2t_jax.data import treebanks, trees
from t2t_jax.data.corpora import CORPORA, CorpusReader
from t2t_jax.data.tokenizer import Tokenizer
from t2t_jax.errors import InputError
from t2t_jax.files import write_bytes
from t2t_jax.validation import choice

JOINT_FILE, SOURCE_FILE, TARGET_FILE = "vocab.model", "source_vocab.model", "target_vocab.model"


def _same_text(text: str) -> str:
    return text


def _no_check(source: str, target: str) -> None:
    del source, target


def _same_output(source: str, output: str) -> tuple[str, Mapping[str, int]]:
    del source
    return output, {}


@dataclasses.dataclass(frozen=True)
class Task:
    """A sequence-to-sequence problem.

    `corpora` are the possible values of `data.corpus`; `metric` is an entry of `METRICS`
    (t2t_jax/evaluation/metrics.py). The model reads `preprocess_source(source)` and is trained to write
    `preprocess_target(target)`, such as a linearised tree.
    `postprocess_output(source, output)` turns the model's detokenised output into the text that users read and that the
    metric compares with `target`; it also returns how often it had to make each kind of repair, nothing if the output
    was well-formed. Both texts are a single line. Of hypotheses that become the same text, the best is kept. `grammar`
    is an entry of `GRAMMARS` (t2t_jax/decoding/grammars.py), by which the search can be constrained to well-formed
    outputs; "" if there is none. `check_pair(source, target)` refuses by an InputError a target that no output for the
    source can be.

    `target_symbols`: preprocessed targets are sequences of symbols separated by single spaces. A separate target
    vocabulary that is not a ready one then holds each symbol of the training targets whole. `output` is what messages
    call the text that users read.
    """

    corpora: Mapping[str, CorpusReader]
    metric: str
    preprocess_target: Callable[[str], str] = _same_text
    postprocess_output: Callable[[str, str], tuple[str, Mapping[str, int]]] = _same_output
    grammar: str = ""
    target_symbols: bool = False
    preprocess_source: Callable[[str], str] = _same_text
    output: str = "output"
    check_pair: Callable[[str, str], None] = _no_check

    @property
    def postprocesses(self) -> bool:
        """Whether the text that users read may be another than the model's output."""
        return self.postprocess_output is not _same_output


_PARSING = Task(
    treebanks.TREEBANKS,
    metric="brackets",
    preprocess_source=trees.source_text,
    preprocess_target=trees.target_text,
    postprocess_output=trees.output_tree,
    grammar="trees",
    target_symbols=True,
    output="tree",
    check_pair=trees.check_words,
)

TASKS: dict[str, Task] = {
    "translation": Task(CORPORA, metric="bleu", output="translation"),
    "parsing": _PARSING,
    "parsing_with_tags": dataclasses.replace(_PARSING, preprocess_target=trees.tagged_text),
    "parsing_with_numbers": dataclasses.replace(
        _PARSING, preprocess_source=trees.numbered_words, preprocess_target=trees.numbered_text
    ),
    "parsing_in_order": dataclasses.replace(
        _PARSING,
        preprocess_source=trees.numbered_words,
        preprocess_target=functools.partial(trees.numbered_text, in_order=True),
        postprocess_output=functools.partial(trees.output_tree, in_order=True),
        grammar="trees_in_order",
    ),
}


_BUILT_IN = dict(TASKS)  # a user's script fills `TASKS` later


def is_built_in(name: str) -> bool:
    """Whether `TASKS` has this package's own task of this name."""
    return TASKS[name] is _BUILT_IN.get(name)


def own_preprocessing(name: str) -> list[str]:
    """What identifies the preprocessing of a user's own task; nothing for texts as they are and for built-in tasks."""
    functions = (TASKS[name].preprocess_source, TASKS[name].preprocess_target)
    if is_built_in(name) or functions == (_same_text, _same_text):
        return []
    return [_version(function) for function in functions]


def _version(function: Callable) -> str:
    """What changes with a function: its source, or its name where that is unknown; and what `partial` binds.

    It is the same in every process, so sets, whose order is not, can't be bound.
    """
    if isinstance(function, functools.partial):
        try:
            bound = json.dumps([function.args, function.keywords], sort_keys=True)
        except TypeError as error:
            raise InputError(
                f"data.task: functools.partial of {_name(function.func)} binds more than texts, numbers and lists of "
                f"them ({error}); make it a function"
            ) from None
        return _version(function.func) + bound
    try:
        return inspect.getsource(function if inspect.isroutine(function) else type(function))
    except (OSError, TypeError):
        return _name(function)


def _name(function: Callable) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def task_of(data: Mapping[str, Any]) -> Task:
    """The task that `config.data` names."""
    return TASKS[choice("data.task", data["task"], TASKS, is_open=True)]


class Vocabularies(NamedTuple):
    """The tokenizers of both sides (§5.1); `source` is `target` if the vocabulary is joint."""

    source: Tokenizer
    target: Tokenizer

    @classmethod
    def open(cls, folder: Path) -> "Vocabularies":
        """The vocabularies in a run folder or a token store."""
        joint, *separate = (folder / name for name in (JOINT_FILE, SOURCE_FILE, TARGET_FILE))
        if any(path.is_file() for path in separate) and not joint.is_file():
            return cls(*map(Tokenizer, separate))
        return cls(*(Tokenizer(joint),) * 2)  # refused where there is no file at all

    def encode_many(
        self, sources: Sequence[str], targets: Sequence[str], num_threads: int = -1
    ) -> tuple[list[list[int]], list[list[int]]]:
        """The ids of the texts of both sides; `num_threads` as in `Tokenizer.encode_many`."""
        sides = zip(self, (sources, targets), strict=True)
        return tuple(vocabulary.encode_many(texts, num_threads) for vocabulary, texts in sides)

    def sample_many(
        self, sources: Sequence[str], targets: Sequence[str], rate: float, seed: int
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Random segmentations of the texts of both sides; `rate` and `seed` as in `Tokenizer.sample_many`."""
        sides = zip(self, (sources, targets), strict=True)
        return tuple(vocabulary.sample_many(texts, rate, 2 * seed + i) for i, (vocabulary, texts) in enumerate(sides))

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
