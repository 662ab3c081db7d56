"""A resumed run equals an uninterrupted one, and the same seed gives the same run, bit for bit."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import t2t_jax
from benchmarks.tiny_experiment import FAST_COMPILATION
from t2t_jax import signals
from t2t_jax.checkpoints import Checkpoints, average_run
from t2t_jax.data.batching import Batches
from t2t_jax.errors import DamagedError, InputError, InterruptedRun
from t2t_jax.evaluation.evaluate import evaluate_run
from t2t_jax.files import read_object, sha256, write_object
from t2t_jax.training import progress
from t2t_jax.training.loop import every, train
from t2t_jax.training.optimizer import SCHEDULES
from tests.data import toy_corpus
from tests.interop import models
from tests.runs import tiny_config

ROOT = Path(__file__).parents[1]


def weights(run, step):
    checkpoints = Checkpoints(Path(run) / "checkpoints")
    return checkpoints.restore(step).params


def losses(run):
    records = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"], r["nll"], r["batches_checksum"]) for r in records if "loss" in r]


def evaluations(run):
    records = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["dev_perplexity"]) for r in records if "dev_perplexity" in r]


def assert_same_run(one, other, step):
    assert losses(one) == losses(other)
    jax.tree.map(np.testing.assert_array_equal, weights(one, step), weights(other, step))


@pytest.mark.slow
def test_the_same_seed_is_the_same_run_and_another_seed_another(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(tiny_config(tmp_path, train__seed=seed), str(tmp_path / name))
    assert_same_run(tmp_path / "a", tmp_path / "b", 6)
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


@pytest.mark.slow
def test_a_run_resumed_twice_equals_an_uninterrupted_one_data_order_included(tmp_path):
    """Across the end of an epoch of 22 steps, with two batch shapes, and a step logged after the last checkpoint."""
    fields = {"checkpoint__interval_steps": 10, "data__num_buckets": 2}
    whole = tiny_config(tmp_path, train__train_steps=30, **fields)
    train(whole, str(tmp_path / "whole"))
    for steps in (10, 24, 30):
        part = tiny_config(tmp_path, train__train_steps=steps, **fields)
        train(part, str(tmp_path / "parts"))
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 30)


@pytest.mark.slow
def test_a_run_stopped_between_two_checkpoints_averages_the_same_ones_and_evaluates_when_resumed(tmp_path, monkeypatch):
    config = tiny_config(
        tmp_path, train__train_steps=10, checkpoint__interval_steps=4, checkpoint__average_last=3, checkpoint__keep=3,
        evaluate__interval_steps=3,
    )  # fmt: skip
    whole = train(config, str(tmp_path / "whole"))
    stopped_after(9, monkeypatch, config, str(tmp_path / "parts"))
    assert [step for step, _ in evaluations(tmp_path / "parts")] == [3, 6], "that of step 9 would delay the save"
    parts = train(config, str(tmp_path / "parts"))
    assert parts["averaged_steps"] == whole["averaged_steps"] == [4, 8, 10]
    assert parts["test"] == whole["test"]
    assert evaluations(tmp_path / "parts") == evaluations(tmp_path / "whole")

    # Step 10 was the last one and counted; of a longer run it is one off schedule.
    config.train.train_steps = 13
    assert train(config, str(tmp_path / "parts"))["averaged_steps"] == [8, 12, 13]


@pytest.mark.slow
def test_checkpoints_by_time_are_not_averaged_where_others_are_saved_by_steps(tmp_path):
    """Here every step saves by time."""
    fields = {"checkpoint__interval_minutes": 1e-9, "checkpoint__average_last": 3, "checkpoint__keep": 3}
    by_both = train(tiny_config(tmp_path, checkpoint__interval_steps=2, **fields), str(tmp_path / "both"))
    assert by_both["averaged_steps"] == [2, 4, 6]
    by_time = train(tiny_config(tmp_path, checkpoint__interval_steps=0, **fields), str(tmp_path / "time"))
    assert by_time["averaged_steps"] == [4, 5, 6]


CONFIG = """
from pathlib import Path
from tests.runs import tiny_config

def get_config():
    return tiny_config(Path({directory!r}), {fields})
"""
LONG = "train__train_steps=200, train__log_interval=10, checkpoint__interval_steps=20"


def write_config(directory, fields=LONG):
    (directory / "config.py").write_text(CONFIG.format(directory=str(directory), fields=fields))


def start(directory, run, *flags, fields=LONG, program="main.py"):
    """A real process on one device, as a user starts it."""
    write_config(directory, fields)
    command = [sys.executable, program, f"--config={directory}/config.py", f"--workdir={run}", *flags]
    environment = os.environ | {"XLA_FLAGS": FAST_COMPILATION, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# On a fast machine main.py may have ended before a signal that is sent at its first checkpoint.
HELD = """
import runpy, time
from pathlib import Path
from t2t_jax.data import batching
read, hold = batching._Steps.__getitem__, Path(__file__).with_name("hold")

def read_or_wait(self, index):
    while index >= {steps} and hold.exists():
        time.sleep(0.01)
    return read(self, index)

batching._Steps.__getitem__ = read_or_wait
runpy.run_path("main.py", run_name="__main__")
"""


def held_main(directory, steps):
    """A script that is main.py, but trains for no more steps than so many while a file exists; and that file."""
    (directory / "held.py").write_text(HELD.format(steps=steps))
    return str(directory / "held.py"), directory / "hold"


def wait_for_checkpoint(process, run, after=-1):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        steps = saved_steps(run)
        if steps and max(steps) > after:
            return max(steps)
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    raise AssertionError("no checkpoint in five minutes")


def saved_steps(run):
    return sorted(int(path.name) for path in run.glob("checkpoints/*") if path.name.isdecimal())


@pytest.mark.slow
def test_signals_save_and_exit_with_3_and_kill_9_loses_nothing(tmp_path):
    """SIGUSR2 is the time-limit warning of Slurm and submitit."""
    whole = start(tmp_path, tmp_path / "whole")
    assert whole.wait(300) == 0, whole.stderr.read()

    run = tmp_path / "stopped"
    held, hold = held_main(tmp_path, steps=30)
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        hold.touch()
        process = start(tmp_path, run, program=held)
        wait_for_checkpoint(process, run, after=max(saved_steps(run), default=-1))
        process.send_signal(number)
        hold.unlink()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 3 and "saved; the same command resumes" in errors, errors
        stopped_after = int(errors.partition("stopped by a signal after step ")[2].partition(",")[0])
        assert saved_steps(run)[-1] == stopped_after

    hold.touch()
    process = start(tmp_path, run, program=held)
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


def test_jumps_of_the_wall_clock_do_not_change_when_checkpoints_are_saved(monkeypatch):
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
def trained(tmp_path_factory):
    """A folder with a corpus and a run of six steps, checkpoints at 2, 4 and 6; read-only."""
    directory = tmp_path_factory.mktemp("trained")
    train(tiny_config(directory), str(directory / "run"))
    return directory


@pytest.fixture
def finished(trained, tmp_path):
    """A copy of `trained` that a test may change."""
    shutil.copytree(trained, tmp_path / "copy")
    return tmp_path / "copy"


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__d_ff": 32}, "model.d_ff is 32, but .* was trained with 24"),
        ({"train__seed": 5}, "train.seed is 5"),
        ({"optimizer__warmup_steps": 9}, "optimizer.warmup_steps is 9"),
        ({"train__train_steps": 4}, "train.train_steps=4, but .* has been trained for 6; raise it"),
        pytest.param(
            {"train__train_steps": 8, "machine__memory_gib": 1e-5},
            "a step needs .* MiB, more than the .* MiB of a device",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_refused_resume_names_the_field_and_changes_nothing(finished, changes, message):
    before = contents(finished / "run")
    with pytest.raises(InputError, match=message):
        train(tiny_config(finished, **changes), str(finished / "run"))
    assert contents(finished / "run") == before


@pytest.mark.slow
def test_more_steps_are_refused_where_those_so_far_would_have_had_other_learning_rates(tmp_path, monkeypatch):
    """A linear schedule is another one with more steps; one that decays in the last two has not begun to differ."""
    decays = {"linear": lambda steps: optax.linear_schedule(0.01, 0.0, steps),
              "late": lambda steps: optax.linear_schedule(0.01, 0.0, 2, transition_begin=steps - 2)}  # fmt: skip
    for name, decay in decays.items():
        monkeypatch.setitem(SCHEDULES, name, lambda fields, d_model, train_steps, decay=decay: decay(train_steps))
    config = lambda steps, name: tiny_config(tmp_path, train__train_steps=steps, optimizer__schedule=name)
    for name in decays:
        stopped_after(3, monkeypatch, config(6, name), str(tmp_path / name))
    with pytest.raises(InputError) as refused:
        train(config(8, "linear"), str(tmp_path / "linear"))
    assert str(refused.value) == (
        f"train.train_steps=8, but {tmp_path}/linear has been trained for 3 steps with 6, by which optimizer.schedule="
        "linear gave them other learning rates; resume with 6, or choose another --workdir, with "
        f"--init_from={tmp_path}/linear to start from its weights"
    )
    assert train(config(6, "linear"), str(tmp_path / "linear"))["steps"] == 6
    assert train(config(8, "late"), str(tmp_path / "late"))["steps"] == 8
    with pytest.raises(InputError, match="train.train_steps=10, .* for 8 steps with 8, by which optimizer.schedule=la"):
        train(config(10, "late"), str(tmp_path / "late"))


def stopped_after(step, monkeypatch, config, run):
    """Trains until a signal comes in this step."""

    @contextlib.contextmanager
    def deferred(_):
        calls = iter(range(1, step + 1))
        yield lambda: next(calls) == step

    with monkeypatch.context() as patched, pytest.raises(InterruptedRun, match=f"after step {step}, saved"):
        patched.setattr(signals, "deferred", deferred)
        train(config, run)


def test_resuming_with_other_text_under_the_same_names_is_refused(finished):
    config = tiny_config(finished, train__train_steps=8)
    write_object(finished / "run/config.json", config.to_dict())  # the copy has other names
    with (finished / "train.en").open("a") as en, (finished / "train.de").open("a") as de:
        en.write("one\n"), de.write("eins\n")
    before = contents(finished / "run")
    with pytest.raises(InputError, match=r"was trained with other (vocabulary|data) \(files of the same names have ch"):
        train(config, str(finished / "run"))
    assert contents(finished / "run") == before


@pytest.mark.parametrize(
    ("split", "what", "score"), [("test", "data", ", score other text by --mode=evaluate"), ("train", "vocabulary", "")]
)
def test_resuming_with_other_files_names_their_field_and_what_would_work(finished, split, what, score):
    run, ours = finished / "run", read_object(finished / "run/config.json")["data"]
    other = toy_corpus.write(finished / "other", toy_corpus.pairs(30, 9))
    config = tiny_config(finished, **{f"data__{field}": ours[field] for field in ("train", "dev", "test")})
    config.data[split] = other
    with pytest.raises(InputError) as refused:
        train(config, str(run))
    assert str(refused.value) == (
        f"workdir: checkpoint 6 of {run} was trained with other {what} (data.{split} is {other!r} and was "
        f"{ours[split]!r}); give that back{score}, or choose another --workdir, with --init_from={run} to start from "
        "its weights"
    )


def test_a_trained_folder_without_checkpoints_is_refused_and_never_retrained(finished):
    """Deletes the manifests, the checkpoints, and then one by one the files that show that the run was trained."""
    run = finished / "run"
    for path in run.glob("checkpoints/*/manifest.json"):
        path.unlink()
    with pytest.raises(DamagedError, match="every checkpoint is damaged"):
        train(tiny_config(finished), str(run))
    shutil.rmtree(run / "checkpoints")
    for gone in ("last_saved.json", "config.json", "result.json"):
        before = contents(run)
        with pytest.raises(
            DamagedError, match=r"(no checkpoint, but|config.json is missing).*to start anew on purpose, delete"
        ):
            train(tiny_config(finished), str(run))
        assert contents(run) == before
        (run / gone).unlink()


def test_a_run_with_some_damaged_checkpoints_still_completes(finished, caplog):
    flipped = max((finished / "run/checkpoints/4").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    result = train(tiny_config(finished), str(finished / "run"))
    assert result["averaged_steps"] == [2, 6] and "checkpoint 4 is damaged" in caplog.text
    sums = read_object(finished / "run/result.json")["sha256"]
    assert len(sums) == 4 and all(sha256(finished / "run" / name) == expected for name, expected in sums.items())


@pytest.mark.slow
def test_other_batches_for_the_same_seed_are_reported_when_a_run_resumes(finished, caplog, monkeypatch):
    """As another version of NumPy may give."""
    train(tiny_config(finished, train__train_steps=7), str(finished / "run"))
    assert "orders the corpus differently" not in caplog.text
    plan = Batches._plan
    monkeypatch.setattr(Batches, "_plan", lambda batches, epoch: plan(batches, epoch + 100))
    train(tiny_config(finished, train__train_steps=8), str(finished / "run"))
    assert "step 7 had other pairs than are now planned for it" in caplog.text


@pytest.mark.slow
def test_the_same_text_elsewhere_is_the_same_run(tmp_path):
    train(tiny_config(tmp_path), str(tmp_path / "run"))
    (tmp_path / "moved").mkdir()
    train(tiny_config(tmp_path / "moved", train__train_steps=8), str(tmp_path / "run"))
    assert Checkpoints(tmp_path / "run/checkpoints").steps() == [4, 6, 8]


def test_an_averaged_checkpoint_alone_is_not_resumed(finished):
    run = finished / "run"
    shutil.rmtree(run / "checkpoints")
    for name in ("last_saved.json", "result.json"):
        (run / name).unlink()
    with pytest.raises(InputError, match="holds only an averaged checkpoint"):
        train(tiny_config(finished), str(run))


def test_bad_numbers_stop_the_run_and_never_reach_a_checkpoint(tmp_path):
    config = tiny_config(tmp_path, optimizer__learning_rate_factor=1e20, train__train_steps=20)
    with pytest.raises(DamagedError, match=r"step \d+: loss .*Lower optimizer.learning_rate_factor"):
        train(config, str(tmp_path / "run"))
    for step in Checkpoints(tmp_path / "run/checkpoints").steps():
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(weights(tmp_path / "run", step)))


@pytest.fixture
def rate_of_step_4_is_nan(monkeypatch):
    """In step 4 the loss and the gradients are finite, but the update is not."""
    make_schedule = SCHEDULES["inverse_sqrt"]
    planted = lambda *arguments: lambda count: jnp.where(count == 3, jnp.nan, make_schedule(*arguments)(count))
    monkeypatch.setitem(SCHEDULES, "inverse_sqrt", planted)


def assert_all_checkpoints_finite(run):
    checkpoints = Checkpoints(run / "checkpoints")
    for step in checkpoints.steps():
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(weights(run, step)))
    return checkpoints.steps()


def test_an_update_that_is_not_finite_halts_before_it_is_saved(tmp_path, rate_of_step_4_is_nan):
    with pytest.raises(
        DamagedError, match=r"step 4: loss \d.*a parameter behind it, is not finite; no checkpoint holds"
    ):
        train(tiny_config(tmp_path), str(tmp_path / "run"))
    assert assert_all_checkpoints_finite(tmp_path / "run") == [2]


@pytest.mark.slow
def test_an_update_that_is_not_finite_can_be_skipped_and_is_counted(tmp_path, rate_of_step_4_is_nan, capsys):
    result = train(tiny_config(tmp_path, train__on_nonfinite="skip"), str(tmp_path / "run"))
    assert result["skipped_steps"] == 1 and result["averaged_steps"] == [4, 6]
    assert_all_checkpoints_finite(tmp_path / "run")
    assert "its update is skipped (1 so far)" in capsys.readouterr().err


@pytest.mark.slow
def test_the_updates_skipped_in_a_row_are_counted_across_restarts(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "_MOST_SKIPPED", 3)
    monkeypatch.setitem(SCHEDULES, "inverse_sqrt", lambda *_: lambda count: jnp.full_like(count, jnp.nan, float))
    config = lambda steps: tiny_config(tmp_path, train__on_nonfinite="skip", train__train_steps=steps)
    assert train(config(2), str(tmp_path / "run"))["skipped_steps"] == 2
    with pytest.raises(DamagedError, match="^step 4: .* is not finite, as those of the 3 steps before it"):
        train(config(6), str(tmp_path / "run"))


@pytest.mark.slow
def test_the_final_scores_equal_those_of_mode_evaluate(tmp_path):
    """Trained in bfloat16, evaluated in float32, with a vocabulary of another size than the config's."""
    (tmp_path / "other.model").write_bytes(models.vocabulary(330))
    config = tiny_config(tmp_path, train__dtype="bfloat16", data__vocabulary=str(tmp_path / "other.model"))
    result = train(config, str(tmp_path / "run"))
    given = dict.fromkeys(("step", "source", "reference", "output", "dtype"))
    scores, _ = evaluate_run(str(tmp_path / "run"), **given)
    assert (result["vocab_size"], result["source_vocab_size"]) == (330, None)
    assert result["evaluation_dtype"] == "float32" and scores == result["test"]


@pytest.fixture
def disk(tmp_path):
    """A small file system, and a function that remounts it as "ro" or "rw"."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = lambda *options: subprocess.run(["mount", *options, str(folder)], capture_output=True).returncode
    if mount("-t", "tmpfs", "-o", "size=32m", "tmpfs"):
        pytest.skip("may not mount")
    yield folder, lambda how: mount("-o", f"remount,{how}")
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path):
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))


@pytest.mark.slow
def test_a_disk_that_is_full_or_read_only_is_one_line_and_nothing_is_lost(tmp_path, disk):
    folder, remount = disk
    run, fields = folder / "run", LONG.replace("interval_steps=20", "interval_steps=5")

    def refused(process, message):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 2 and message in errors.splitlines()[-1] and "Traceback" not in errors, errors

    process = start(tmp_path, run, fields=fields)
    wait_for_checkpoint(process, run)
    fill(folder / "filler")
    refused(process, "No space left on device")
    newest = Checkpoints(run / "checkpoints").newest_good(1)
    refused(start(tmp_path, run, fields=fields), "No space left on device")
    (folder / "filler").unlink()
    assert remount("ro") == 0
    refused(start(tmp_path, run, fields=fields), "Read-only file system")
    assert remount("rw") == 0
    resumed, whole = (start(tmp_path, path, fields=fields) for path in (run, tmp_path / "whole"))
    errors = resumed.communicate(timeout=300)[1]
    assert resumed.returncode == whole.wait(300) == 0 and f"resuming from step {newest[0]}" in errors
    assert_same_run(tmp_path / "whole", run, 200)


@pytest.mark.slow
def test_readers_and_a_trainer_that_saves_every_step_do_not_disturb_each_other(tmp_path):
    """With checkpoint.keep=1, so that the checkpoint being read is deleted all the time."""
    fields = "train__train_steps=80, checkpoint__interval_steps=1, checkpoint__keep=1, checkpoint__average_last=1"
    trainer = start(tmp_path, tmp_path / "run", fields=fields)
    wait_for_checkpoint(trainer, tmp_path / "run")
    run, reads = tmp_path / "run", 0
    files = {"source": f"{tmp_path}/dev.en", "reference": f"{tmp_path}/dev.de"}
    while trainer.poll() is None:
        assert t2t_jax.load(run, step="last").translate(["one two"])
        evaluate_run(str(run), step="last", **files, output=None, dtype=None)
        average_run(run / "checkpoints", run / "averaged", last=1, steps=None)
        reads += 1
    assert trainer.returncode == 0, trainer.stderr.read()
    assert reads >= 3 and Checkpoints(run / "checkpoints").newest_good(1) == [80]
