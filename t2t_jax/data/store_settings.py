"""The settings on which a token store depends, their ranges and what they exclude."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from t2t_jax.data import cleaning
from t2t_jax.data.task import TASKS
from t2t_jax.errors import InputError
from t2t_jax.files import expanded
from t2t_jax.validation import Range, check_ranges, choice

_TRAINED_SIZE = Range(3, 10_000_000, hint="padding, EOS and unknown are pieces")
_RANGES = {
    "vocab_size": _TRAINED_SIZE,
    "source_vocab_size": Range(0, 10_000_000),
    "vocab_pairs": Range(0, 10**9),
    "character_coverage": Range(0.98, 1),  # SentencePiece's
    "max_length": Range(2, 16_384),  # at least a subword and EOS; attention takes quadratic memory
    "heldout_max_length": Range(0, 16_384),
    "segmentations": Range(1, 1000),
    "bpe_dropout": Range(0, 1, open_below=True),
}
# Rules of `config.data.cleaning` that change words, count them or look at their letters.
_FOR_WORDS = ("lowercase", "normalize_punctuation", "max_words", "max_ratio", "drop_wrong_script")


@dataclasses.dataclass(frozen=True)
class StoreSettings:
    """What a store depends on besides the corpus; the field names are those of `config.data`.

    The vocabulary is the file `vocabulary` (ready_vocabulary.py), or is trained on `vocab_pairs` randomly drawn
    training pairs (0: all). It is joint, or of the target alone if the source has a separate one: the file
    `source_vocabulary`, or `source_vocab_size` trained pieces. Lengths are in subwords, EOS included: `max_length`
    bounds training pairs, `heldout_max_length` dev and test pairs (0: no bound). A separate target vocabulary of a task
    with `target_symbols` holds all symbols of the training targets, of which there may be at most `vocab_size`.
    With several `segmentations`, the training set holds every pair as often, segmented at random with the rate
    `bpe_dropout` (`Tokenizer.sample_many`); dev and test sets have the best segmentation.
    """

    task: str
    vocabulary: str
    source_vocabulary: str
    vocab_size: int
    source_vocab_size: int
    vocab_kind: str
    vocab_pairs: int
    byte_fallback: bool
    character_coverage: float
    max_length: int
    heldout_max_length: int
    segmentations: int
    bpe_dropout: float
    cleaning: cleaning.Rules

    def __post_init__(self):
        choice("data.task", self.task, TASKS, is_open=True)
        choice("data.vocab_kind", self.vocab_kind, ["bpe", "unigram"])
        check_ranges(_RANGES, self, "data.")
        if self.source_vocab_size != 0:
            _TRAINED_SIZE.check("data.source_vocab_size", self.source_vocab_size)
        if self.character_coverage < 1 and not self.byte_fallback:
            raise InputError(
                f"data.character_coverage must be 1 without data.byte_fallback; got {self.character_coverage}"
            )
        if self.segmentations > 1 and TASKS[self.task].target_symbols:
            raise InputError(
                f"data.segmentations={self.segmentations}: the targets of data.task={self.task} are whole symbols, "
                "which are segmented in one way; give 1"
            )
        if self.segmentations > 1 and self.vocab_kind != "bpe" and self._trains_subwords:
            raise InputError(
                f"data.segmentations={self.segmentations}: several need data.vocab_kind=bpe; got {self.vocab_kind}"
            )
        for field in ("vocabulary", "source_vocabulary"):
            path = getattr(self, field)
            if path and not Path(path).is_file():
                raise InputError(f"data.{field}: no file {path}; give a SentencePiece model or subword-nmt's codes")

    def check_rules(self) -> None:
        """Refuses, for a new store, cleaning rules for words where the targets are trees."""
        for name in _FOR_WORDS if TASKS[self.task].grammar else ():
            if value := getattr(self.cleaning, name):
                raise InputError(
                    f"data.cleaning.{name}={value} is for words on both sides, but the targets of "
                    f"data.task={self.task} are not words; set it to {getattr(cleaning.Rules(), name)}"
                )

    @property
    def is_joint(self) -> bool:
        """Whether source and target share one vocabulary."""
        return not (self.source_vocabulary or self.source_vocab_size)

    @property
    def _trains_subwords(self) -> bool:
        """Whether a vocabulary of `vocab_kind` is trained."""
        return not self.vocabulary or bool(self.source_vocab_size and not self.source_vocabulary)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "StoreSettings":
        """The settings in `config.data`."""
        names = [field.name for field in dataclasses.fields(cls)]
        if missing := [name for name in names if name not in data]:  # as in imported runs
            raise InputError(f"data.{missing[0]} is not in the config: the run has no data of its own; name your files")
        for name in ("source_language", "target_language"):
            if not data[name]:
                raise InputError(f"data.{name} is empty; give the code of a language, such as en")
        fields = {name: data[name] for name in names}
        for name in ("vocabulary", "source_vocabulary"):
            fields[name] = str(expanded(f"data.{name}", data[name])) if data[name] else ""
        rules = cleaning.Rules.of(data["cleaning"])
        rules.check_languages(data["source_language"], data["target_language"])
        return cls(**fields | {"cleaning": rules})
