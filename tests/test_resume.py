"""Stopped and resumed = never stopped; the same seed = the same run. To the last bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from t2t_jax.checkpoints import Checkpoints
from t2t_jax.errors import DamagedError, InputError
from t2t_jax.training.loop import every, train
from tests.runs import tiny_config

ROOT = Path(__file__).parents[1]


def weights(run, step):
    checkpoints = Checkpoints(Path(run) / "checkpoints")
    return checkpoints.restore(step, checkpoints.param_shapes(step)).params


def losses(run):
    records = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"], record["nll"]) for record in records if "loss" in record]


def assert_same_run(one, other, step):
    assert losses(one) == losses(other)
    jax.tree.map(np.testing.assert_array_equal, weights(one, step), weights(other, step))


@pytest.mark.slow
def test_the_same_seed_is_the_same_run_and_another_seed_another(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(tiny_config(tmp_path, train__seed=seed), str(tmp_path / name))
    assert_same_run(tmp_path / "a", tmp_path / "b", 6)
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


def test_a_run_cut_in_three_equals_one_piece_data_order_included(tmp_path):
    """Over an epoch's edge (an epoch has 22 steps), and with a step logged beyond the last checkpoint."""
    whole = tiny_config(tmp_path, train__train_steps=30, checkpoint__interval_steps=10)
    train(whole, str(tmp_path / "whole"))
    for steps in (10, 24, 30):
        part = tiny_config(tmp_path, train__train_steps=steps, checkpoint__interval_steps=10)
        train(part, str(tmp_path / "parts"))
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 30)


CONFIG = """
from pathlib import Path
from tests.runs import tiny_config

def get_config():
    return tiny_config(Path({directory!r}), train__train_steps=200, train__log_interval=10,
                       checkpoint__interval_steps=20)
"""


def start(directory, run, *flags, program="main.py"):
    """A real process on one device, as a user starts it."""
    (directory / "config.py").write_text(CONFIG.format(directory=str(directory)))
    command = [sys.executable, program, f"--config={directory}/config.py", f"--workdir={run}", *flags]
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_checkpoint(process, run, after=-1):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        steps = [int(p.parent.name) for p in run.glob("checkpoints/*/manifest.json")]
        if steps and max(steps) > after:
            return max(steps)
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    raise AssertionError("no checkpoint in five minutes")


def saved_steps(run):
    return sorted(int(path.parent.name) for path in run.glob("checkpoints/*/manifest.json"))


@pytest.mark.slow
def test_signals_save_and_exit_with_3_and_kill_9_loses_nothing(tmp_path):
    """SIGUSR2 is how Slurm, and submitit, warn of the end of a job's time."""
    whole = start(tmp_path, tmp_path / "whole")
    assert whole.wait(300) == 0, whole.stderr.read()

    run = tmp_path / "stopped"
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        process = start(tmp_path, run)
        wait_for_checkpoint(process, run, after=max(saved_steps(run), default=-1))
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 3 and "saved; the same command resumes" in errors, errors
        stopped_after = int(errors.partition("stopped by a signal after step ")[2].partition(",")[0])
        assert saved_steps(run)[-1] == stopped_after

    process = start(tmp_path, run)
    wait_for_checkpoint(process, run, after=stopped_after)
    process.kill()
    process.wait()

    process = start(tmp_path, run)
    assert process.wait(300) == 0, process.stderr.read()
    assert_same_run(tmp_path / "whole", run, 200)


@pytest.mark.slow
def test_a_second_process_in_the_same_folder_is_refused_and_the_first_unharmed(tmp_path):
    first = start(tmp_path, tmp_path / "run")
    wait_for_checkpoint(first, tmp_path / "run")
    with pytest.raises(InputError, match="another process is training in"):
        train(tiny_config(tmp_path, train__train_steps=200), str(tmp_path / "run"))
    assert first.wait(300) == 0


@pytest.mark.slow
def test_of_two_processes_that_start_together_in_a_folder_one_is_refused(tmp_path):
    processes = [start(tmp_path, tmp_path / "run") for _ in range(2)]
    outputs = [process.communicate(timeout=300)[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert sorted(codes) == [0, 2], outputs
    assert "another process is training in" in outputs[codes.index(2)].splitlines()[-1]


def test_jumps_of_the_wall_clock_do_not_move_the_saving_by_minutes(monkeypatch):
    running = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: running)
    due, saved = every(minutes=10), []
    for minute in range(1, 41):
        running = 60.0 * minute
        wall = 1.7e9 + running + {15: 3600, 25: -3600}.get(minute - minute % 5, 0)  # an hour forward, an hour back
        monkeypatch.setattr(time, "time", lambda wall=wall: wall)
        if due(minute):
            saved.append(minute)
    assert saved == [10, 20, 30, 40]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("finished")
    train(tiny_config(directory), str(directory / "run"))
    return directory


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model__d_ff": 32}, "model.d_ff is 32, but .* was trained with 24"),
        ({"train__seed": 5}, "train.seed is 5"),
        ({"optimizer__warmup_steps": 9}, "optimizer.warmup_steps is 9"),
    ],
)
def test_resuming_with_another_experiment_is_refused_by_field(finished, changes, said):
    with pytest.raises(InputError, match=said):
        train(tiny_config(finished, **changes), str(finished / "run"))


def test_resuming_with_other_text_under_the_same_names_is_refused(tmp_path):
    train(tiny_config(tmp_path), str(tmp_path / "run"))
    config = tiny_config(tmp_path, train__train_steps=8)
    with (tmp_path / "train.en").open("a") as en, (tmp_path / "train.de").open("a") as de:
        en.write("one\n"), de.write("eins\n")
    vocabulary = (tmp_path / "run/vocab.model").read_bytes()
    with pytest.raises(InputError, match="was trained with other (vocabulary|data)"):
        train(config, str(tmp_path / "run"))
    assert (tmp_path / "run/vocab.model").read_bytes() == vocabulary, "the refused attempt changed the run"


def test_the_same_text_elsewhere_is_the_same_run(tmp_path):
    train(tiny_config(tmp_path), str(tmp_path / "run"))
    (tmp_path / "moved").mkdir()
    train(tiny_config(tmp_path / "moved", train__train_steps=8), str(tmp_path / "run"))
    assert Checkpoints(tmp_path / "run/checkpoints").steps() == [4, 6, 8]


def test_fewer_steps_than_were_trained_are_refused(finished):
    with pytest.raises(InputError, match="train.train_steps=4, but .* has been trained for 6; raise it"):
        train(tiny_config(finished, train__train_steps=4), str(finished / "run"))


def test_an_averaged_checkpoint_alone_is_not_resumed(tmp_path):
    train(tiny_config(tmp_path), str(tmp_path / "run"))
    for checkpoint in (tmp_path / "run/checkpoints").iterdir():
        (checkpoint / "manifest.json").unlink()
    with pytest.raises(InputError, match="holds only an averaged checkpoint"):
        train(tiny_config(tmp_path), str(tmp_path / "run"))


def test_bad_numbers_stop_the_run_and_never_reach_a_checkpoint(tmp_path):
    config = tiny_config(tmp_path, optimizer__learning_rate_factor=1e20, train__train_steps=20)
    with pytest.raises(DamagedError, match=r"step \d+: loss .*Lower optimizer.learning_rate_factor"):
        train(config, str(tmp_path / "run"))
    for step in Checkpoints(tmp_path / "run/checkpoints").steps():
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(weights(tmp_path / "run", step)))
