"""The lines that a run ends with."""

import pytest

from t2t_jax.evaluation.evaluate import Evaluation
from t2t_jax.evaluation.metrics import METRICS
from t2t_jax.training.result import print_scores

SCORES = {"sacrebleu": 12.345, "signature": "tok:13a", "chrf": 50.0, "perplexity": 4.0, "sentences": 2}


@pytest.mark.parametrize(
    ("further", "printed"),
    [({}, "chrF 50.00, perplexity"), ({"lowercased_bleu": 41.02}, "chrF 50.00, lower-cased BLEU 41.02, perplexity")],
)
def test_the_scores_that_there_are_are_printed(capsys, further, printed):
    print_scores("test", Evaluation(SCORES | further, [], METRICS["bleu"]))
    headline, others = capsys.readouterr().out.splitlines()
    assert headline == "test: BLEU 12.35 on 2 sentences  tok:13a"
    assert others == f"test: {printed} 4.00 per subword"
