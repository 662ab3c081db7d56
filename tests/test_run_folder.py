import json

import pytest

from t2t_jax.errors import InputError
from t2t_jax.run_folder import RunFolder

CONFIG = {"model": {"d_model": 16}, "train": {"train_steps": 5, "seed": 0}, "decode": {"alpha": 0.6}}


def test_metrics_beyond_the_resumed_step_are_dropped_and_half_lines_too(tmp_path):
    run = RunFolder.start(tmp_path, CONFIG)
    run.start_metrics(0)
    for step in (1, 2, 3):
        run.log(step, loss=float(step))
    run.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    run = RunFolder.start(tmp_path, CONFIG)
    run.start_metrics(2)
    run.log(3, loss=30.0)
    run.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 30.0}]


def test_a_start_that_is_killed_while_it_writes_loses_no_log_and_no_vocabulary(tmp_path, monkeypatch):
    """The files are replaced whole: whatever has been written before that, the old ones are there."""
    (tmp_path / "new").write_text("new")
    run = RunFolder.start(tmp_path / "run", CONFIG)
    old = '{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n'
    (tmp_path / "run/metrics.jsonl").write_text(old)
    run.vocabulary.write_text("old")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    for act in (lambda: run.start_metrics(1), lambda: run.copy_vocabulary(tmp_path / "new")):
        with pytest.raises(KeyboardInterrupt):
            act()
    assert (tmp_path / "run/metrics.jsonl").read_text() == old and run.vocabulary.read_text() == "old"


def test_what_moves_no_weight_may_change_and_the_rest_may_not(tmp_path):
    RunFolder.start(tmp_path, CONFIG).close()
    longer = CONFIG | {"train": {"train_steps": 9, "seed": 0}, "decode": {"alpha": 1.0}}
    run = RunFolder.start(tmp_path, longer)
    assert run.config == longer
    run.close()
    with pytest.raises(InputError, match="train.seed is 1, but .* was trained with 0"):
        RunFolder.start(tmp_path, CONFIG | {"train": {"train_steps": 5, "seed": 1}})


def test_two_at_once_are_refused(tmp_path):
    run = RunFolder.start(tmp_path, CONFIG)
    with pytest.raises(InputError, match="another process is training"):
        RunFolder.start(tmp_path, CONFIG)
    run.close()
    RunFolder.start(tmp_path, CONFIG).close()


def test_other_folders_are_no_runs(tmp_path):
    with pytest.raises(InputError, match="is not a run folder"):
        RunFolder.open(tmp_path)
