"""The headline of an evaluation: the one of its scores that stands for all, such as BLEU or F1."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.json_types import NUMBER, TEXT, check_types

SACREBLEU = "sacrebleu"


class Headline(NamedTuple):
    """Name and value of a headline score."""

    name: str
    value: float

    def __str__(self) -> str:
        return f"BLEU {self.value:.1f}" if self.name == SACREBLEU else f"{self.name} {self.value:.4g}"


def headline(scores: Mapping[str, Any], where: str) -> Headline:
    """The headline of the scores of one split; sacreBLEU where none is named, as in results of earlier versions.

    Raises DamagedError if the score is missing or no number; `where` names the file in its message.
    """
    check_types(scores, {"headline": TEXT}, where)
    name = headline_name(scores)
    check_types(scores, {name: NUMBER}, where, [name])
    return Headline(name, scores[name])


def headline_name(scores: Mapping[str, Any]) -> str:
    return scores.get("headline", SACREBLEU)
