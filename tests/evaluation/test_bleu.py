import math

import pytest
import sacrebleu

from t2t_jax.errors import InputError
from t2t_jax.evaluation.bleu import corpus_scores

REFERENCES = ["Das Licht ist an .", "Schalte das Licht ein, bitte!", "Gerät"]


def test_a_perfect_translation_scores_100_with_its_signature():
    scores = corpus_scores(REFERENCES, REFERENCES)
    assert scores["sacrebleu"] == pytest.approx(100) and scores["chrf"] == pytest.approx(100)
    assert "tok:13a" in scores["signature"] and f"version:{sacrebleu.__version__}" in scores["signature"]
    assert "case:mixed" in scores["signature"] and "nc:6" in scores["chrf_signature"]


def test_bleu_by_hand():
    """4 of 5 words right in the places that leave 3 of 4 bigrams, 2 of 3 trigrams and 1 of 2 four-grams."""
    scores = corpus_scores(["a b c d x"], ["a b c d e"])
    assert scores["sacrebleu"] == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)


def test_brevity_penalty_by_hand():
    scores = corpus_scores(["a b c d e f"], ["a b c d e f g h"])
    assert scores["sacrebleu"] == pytest.approx(100 * math.exp(1 - 8 / 6))


def test_sides_must_pair():
    with pytest.raises(InputError, match="2 translations but 3 references"):
        corpus_scores(REFERENCES[:2], REFERENCES)
    with pytest.raises(InputError, match="test set is empty"):
        corpus_scores([], [])
