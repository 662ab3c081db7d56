"""The lines that a run ends with, and the hardware in its record."""

import re

import jax
import pytest

from t2t_jax import sharding
from t2t_jax.evaluation.evaluate import Evaluation
from t2t_jax.evaluation.metrics import METRICS
from t2t_jax.training.result import hardware, print_scores

SCORES = {"sacrebleu": 12.345, "signature": "tok:13a", "chrf": 50.0, "perplexity": 4.0, "sentences": 2}


@pytest.mark.parametrize(
    ("further", "printed"),
    [({}, "chrF 50.00, perplexity"), ({"lowercased_bleu": 41.02}, "chrF 50.00, lower-cased BLEU 41.02, perplexity")],
)
def test_the_scores_that_there_are_are_printed(capsys, further, printed):
    print_scores("test", Evaluation(SCORES | further, [], METRICS["bleu"]))
    headline, others = capsys.readouterr().out.splitlines()
    assert headline == "test: BLEU 12.35 on 2 sentences  tok:13a"
    assert others == f"test: {printed} 4.000 per subword"


@pytest.mark.parametrize(("devices", "named"), [(1, r"\d+ cores"), (8, r"\d+ cores, 8 devices")])
def test_devices_that_share_the_cores_of_one_machine_are_one_machine(devices, named):
    assert re.fullmatch(rf"1 × .+ \({named}\), Python 3\..+", hardware(sharding.make_mesh(jax.devices()[:devices])))
