"""§6.1: BLEU and chrF of plain text, with the signatures that make them comparable."""

from collections.abc import Sequence
from typing import Any

from sacrebleu.metrics import BLEU, CHRF

from t2t_jax.errors import InputError


def corpus_scores(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """sacreBLEU (13a, cased, detokenised) and chrF of a whole test set, one reference a sentence."""
    if len(hypotheses) != len(references):
        raise InputError(
            f"{len(hypotheses)} translations but {len(references)} references; they must pair line by line"
        )
    if not references:
        raise InputError("the test set is empty; BLEU needs at least one sentence")
    bleu, chrf = BLEU(), CHRF()
    return {
        "sacrebleu": bleu.corpus_score(hypotheses, [references]).score,
        "signature": str(bleu.get_signature()),
        "chrf": chrf.corpus_score(hypotheses, [references]).score,
        "chrf_signature": str(chrf.get_signature()),
    }
