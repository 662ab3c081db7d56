"""§6: what an output is judged by. A metric is an entry of `METRICS`, which a task names (t2t_jax/data/task.py)."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from t2t_jax.data.languages import base_language
from t2t_jax.evaluation.bleu import corpus_scores, known_languages
from t2t_jax.evaluation.brackets import bracket_scores


@dataclasses.dataclass(frozen=True)
class Metric:
    """Named scores of a test set.

    `score(sources, outputs, references, target_language, lowercase)` returns them, with the signatures of their
    protocols; the sources are for metrics such as COMET. The language is None where it is not known, and
    `lowercase` is true of outputs in lower case. `labels` maps the scores to print to what they are called in print;
    the first is the headline, by which runs are compared: higher is better. A score may be missing from a result.
    """

    score: Callable[[Sequence[str], Sequence[str], Sequence[str], str | None, bool], dict[str, Any]]
    labels: Mapping[str, str]

    @property
    def headline(self) -> str:
        """The name of the score that stands for all."""
        return next(iter(self.labels))

    def describe(self, scores: Mapping[str, Any], digits: int = 2) -> str:
        """The headline for people to read: "BLEU 27.30"."""
        return f"{self.labels[self.headline]} {scores[self.headline]:.{digits}f}"


def _bleu(
    sources: Sequence[str],
    outputs: Sequence[str],
    references: Sequence[str],
    target_language: str | None,
    lowercase: bool,
) -> dict[str, Any]:
    """The five protocols of bleu.py; sacreBLEU and chrF alone where Moses has no rules for the language."""
    del sources
    if target_language is not None and base_language(target_language) not in known_languages():
        message = "data.target_language=%s: Moses has no rules for it; no score of Moses tokens"
        logging.log_first_n(logging.WARNING, message, 1, target_language)  # dev sets are evaluated often
        target_language = None
    return corpus_scores(outputs, references, target_language, lowercase)


def _brackets(
    sources: Sequence[str],
    outputs: Sequence[str],
    references: Sequence[str],
    target_language: str | None,
    lowercase: bool,
) -> dict[str, Any]:
    """EVALB's scores; the trees get the tags of the references, as the model writes XX for every tag."""
    del sources, target_language, lowercase  # of words, which brackets do not depend on
    return bracket_scores(references, outputs, gold_tags=True)


METRICS = {
    "bleu": Metric(_bleu, {"sacrebleu": "BLEU", "chrf": "chrF", "lowercased_bleu": "lower-cased BLEU"}),
    "brackets": Metric(
        _brackets, {"f1": "F1", "precision": "precision", "recall": "recall", "exact_match": "exact match"}
    ),
}
