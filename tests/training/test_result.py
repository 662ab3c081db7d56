"""The lines that a run ends with, and the hardware in its record."""

import os
import re

import jax
import pytest

from t2t_jax import sharding
from t2t_jax.evaluation.evaluate import Evaluation
from t2t_jax.evaluation.metrics import METRICS
from t2t_jax.training import result
from t2t_jax.training.loop import train
from t2t_jax.training.result import four_digits, hardware, print_samples, print_scores
from tests.runs import tiny_config

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


@pytest.mark.parametrize(("name", "label"), [("translation", "translation  "), ("tree", "tree         ")])
def test_samples_are_called_as_the_task_calls_its_outputs(capsys, name, label):
    print_samples(name, ["a", "b"], ["c", "d"], Evaluation(SCORES, ["e", "f"], METRICS["bleu"]), 1)
    assert capsys.readouterr().out == f"source       a\nreference    c\n{label}e\n\n"


@pytest.mark.parametrize(
    ("number", "printed"),
    [(1.0, "1.000"), (999.9, "999.9"), (999.97, "1,000"), (14210.95, "14,211"), (2.5e9, "2.500e+09")],
)
def test_numbers_for_people_have_four_digits_and_no_trailing_point(number, printed):
    assert four_digits(number) == printed


@pytest.mark.parametrize(("devices", "named"), [(1, r"\d+ cores?"), (8, r"\d+ cores?, 8 devices")])
def test_devices_that_share_the_cores_of_one_machine_are_one_machine(devices, named):
    assert re.fullmatch(rf"1 × .+ \({named}\), Python 3\..+", hardware(sharding.make_mesh(jax.devices()[:devices])))


def test_each_hardware_has_the_seconds_that_it_has_trained(tmp_path, monkeypatch):
    """The run is trained on one machine, on another, and only evaluated on a third."""
    found = []
    for machine, steps in (("a CPU", 30), ("another CPU", 60), ("a laptop", 60)):  # 30 take more than 0.05 s
        monkeypatch.setattr(result, "cpu_name", lambda machine=machine: machine)
        monkeypatch.setattr(result, "code_version", lambda machine=machine: f"commit on {machine}")
        config = tiny_config(tmp_path, train__train_steps=steps, checkpoint__interval_steps=30)
        found.append(train(config, str(tmp_path / "run")))
    last = found[-1]
    assert [entry["commit"] for entry in last["trained_on"]] == ["commit on a CPU", "commit on another CPU"]
    assert [entry["hardware"].split(" (")[0] for entry in last["trained_on"]] == ["1 × a CPU", "1 × another CPU"]
    assert last["commit"] == "commit on a laptop" and last["hardware"].startswith("1 × a laptop (")
    seconds = [entry["seconds"] for entry in last["trained_on"]]
    assert min(seconds) > 0 and sum(seconds) == pytest.approx(last["training_seconds"], abs=0.11)
    [first] = found[0]["trained_on"]
    assert first["jax"] == jax.__version__ and first["seconds"] == found[0]["training_seconds"]


def test_the_cores_are_those_that_the_process_may_use():
    usual = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(usual)})  # as a sweep does with its trials
        assert "(1 core)" in hardware(sharding.make_mesh(jax.devices()[:1]))
    finally:
        os.sched_setaffinity(0, usual)
