"""§6: perplexity and BLEU of a translator on a test set."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from t2t_jax.decoding.translator import Translator
from t2t_jax.errors import InputError
from t2t_jax.evaluation.bleu import corpus_scores


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The scores of a test set, and the translations they were computed from."""

    scores: dict[str, Any]
    translations: list[str]


def perplexity(translator: Translator, sources: Sequence[str], references: Sequence[str]) -> float:
    """exp of the mean unsmoothed cross-entropy per reference subword, EOS included."""
    scores = translator.score(list(zip(sources, references, strict=True)))
    return math.exp(-sum(s.log_prob for s in scores) / sum(s.num_tokens for s in scores))


def evaluate(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    *,
    beam_size: int,
    alpha: float,
    max_extra_length: int,
) -> Evaluation:
    """Translates every source and scores the result against the references."""
    if len(sources) != len(references):
        raise InputError(f"{len(sources)} sources but {len(references)} references; they must pair line by line")
    found = translator.translate(
        sources, beam_size=beam_size, alpha=alpha, max_extra_length=max_extra_length
    )
    translations = [hypotheses[0].text for hypotheses in found]
    scores = {
        **corpus_scores(translations, references),
        "perplexity": perplexity(translator, sources, references),
        "sentences": len(references),
        "beam_size": beam_size,
        "alpha": alpha,
    }
    return Evaluation(scores, translations)
