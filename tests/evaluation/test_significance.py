import random

import numpy as np
import pytest
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from t2t_jax.evaluation.significance import paired_bootstrap

SENTENCE = "das Haus steht am Rand der alten Stadt und niemand weiß genau wer es gebaut hat"
WORDS = SENTENCE.split()


def sentences(count, seed):
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(4, 14))) + "." for _ in range(count)]


def worsened(lines, rate, seed):
    """Replaces each word with another one with probability `rate`."""
    chance = random.Random(seed)
    return [" ".join(chance.choice(WORDS) if chance.random() < rate else w for w in line.split()) for line in lines]


REFERENCES = sentences(150, seed=0)
BETTER, WORSE = worsened(REFERENCES, 0.20, seed=1), worsened(REFERENCES, 0.24, seed=2)


def test_scores_and_p_value_are_those_of_sacrebleu(monkeypatch):
    monkeypatch.delenv("SACREBLEU_SEED", raising=False)
    found = paired_bootstrap(BETTER, WORSE, REFERENCES)
    named = [("baseline", WORSE), ("system", BETTER)]
    _, scores = PairedTest(named, {"BLEU": BLEU()}, [REFERENCES], test_type="bs", n_samples=1000)()
    baseline, system = scores["BLEU"]
    assert found.score == pytest.approx(system.score) and found.baseline == pytest.approx(baseline.score)
    assert found.p_value == pytest.approx(system.p_value, abs=0.0011)  # they compute in float32
    assert 0.01 < found.p_value < 0.5, "the example must be neither certain nor hopeless"


FEW_MATCHES = ["a b c d e f", "a b x d e f", "x y c z e v"]  # only the first has 4-grams of "a b c d e f"


@pytest.mark.parametrize(
    ("references", "better", "worse"),
    [(REFERENCES[:20], BETTER[:20], WORSE[:20]), (["a b c d e f"] * 3, FEW_MATCHES, FEW_MATCHES[::-1])],
    ids=["usual", "smoothed"],
)
def test_the_interval_equals_that_of_rescoring_every_resample(references, better, worse):
    """Every resample is scored as a test set: the interval contains 95 % of the differences."""
    count = len(references)
    found = paired_bootstrap(better, worse, references, resamples=40, seed=3)
    chance, differences = np.random.default_rng(3), []
    for _ in range(40):
        drawn = chance.choice(count, size=count)
        texts = [[side[i] for i in drawn] for side in (better, worse, references)]
        differences.append(
            BLEU().corpus_score(texts[0], texts[2:]).score - BLEU().corpus_score(texts[1], texts[2:]).score
        )
    assert found.interval == pytest.approx((np.quantile(differences, 0.025), np.quantile(differences, 0.975)))
    assert found.interval[0] <= found.difference <= found.interval[1]


def test_the_same_seed_gives_the_same_answer_and_another_seed_another():
    first, again, other = (paired_bootstrap(BETTER, WORSE, REFERENCES, resamples=50, seed=s) for s in (7, 7, 8))
    assert first == again and first.interval != other.interval and first.difference == other.difference


def test_swapping_the_systems_changes_the_sign_and_nothing_else():
    one, two = paired_bootstrap(BETTER, WORSE, REFERENCES), paired_bootstrap(WORSE, BETTER, REFERENCES)
    assert (one.score, one.baseline, one.difference) == (two.baseline, two.score, -two.difference)
    assert one.p_value == two.p_value and one.interval == pytest.approx((-two.interval[1], -two.interval[0]))


def test_equal_translations_are_not_different_and_a_far_better_one_is():
    same = paired_bootstrap(BETTER, BETTER, REFERENCES, resamples=50)
    assert same.difference == 0 and same.interval == (0, 0) and same.p_value == 1
    better = paired_bootstrap(REFERENCES, WORSE, REFERENCES, resamples=50)
    assert better.interval[0] > 0 and better.p_value == pytest.approx(1 / 51)


def test_empty_lines_are_scored():
    found = paired_bootstrap(["", *BETTER[1:]], ["", *WORSE[1:]], REFERENCES, resamples=20)
    assert found.score == pytest.approx(BLEU().corpus_score(["", *BETTER[1:]], [REFERENCES]).score)


def test_an_order_without_matches_is_smoothed_as_sacrebleu_does():
    """No four-gram matches."""
    hypotheses, references = ["a b c x d e f"], ["a b c y d e f"]
    found = paired_bootstrap(hypotheses, hypotheses, references, resamples=1)
    assert found.score == pytest.approx(BLEU().corpus_score(hypotheses, [references]).score) and found.score > 0
