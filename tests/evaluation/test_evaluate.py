import math

import pytest

from t2t_jax.decoding.translator import Hypothesis, Score, Translator
from t2t_jax.errors import InputError
from t2t_jax.evaluation.evaluate import evaluate, perplexity

OPTIONS = {"beam_size": 4, "alpha": 0.6, "max_extra_length": 50}


class Echo(Translator):
    """Translates a sentence as itself and finds each token half as likely as a coin."""

    def __init__(self):
        pass

    def translate(self, sentences, **options):
        assert options == OPTIONS
        return [[Hypothesis(s, [s], -1.0, -1.0, 1, [-1.0])] for s in sentences]

    def score(self, pairs):
        return [Score(-len(t) * math.log(4), [-math.log(4)] * len(t), len(t)) for _, t in pairs]


def test_perplexity_is_per_token_over_the_whole_set():
    assert perplexity(Echo(), ["a", "b"], ["cc", "ddddd"]) == pytest.approx(4)


def test_every_sentence_counts_also_empty_ones():
    found = evaluate(Echo(), ["a b c d", ""], ["a b c d", "x"], **OPTIONS)
    assert found.translations == ["a b c d", ""]
    assert found.scores["sentences"] == 2 and found.scores["sacrebleu"] < 100
    assert found.scores["beam_size"] == 4 and found.scores["alpha"] == 0.6


def test_sides_must_pair():
    with pytest.raises(InputError, match="2 sources but 1 references"):
        evaluate(Echo(), ["a", "b"], ["c"], **OPTIONS)
