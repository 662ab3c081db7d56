"""A run that hangs is ended, with the stacks of its threads; one that is only slow, or was stopped, is not."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from t2t_jax.errors import InputError
from t2t_jax.training.loop import check
from tests.runs import tiny_config
from tests.test_resume import assert_same_run, saved_steps, start

ROOT = Path(__file__).parents[2]

WATCHED = """
import ctypes, time
from t2t_jax.training.watchdog import Watchdog

def waits_in_c(seconds):
    ctypes.CDLL(None).usleep(int(1e6 * seconds))

with Watchdog({minutes}) as watchdog:
    print(time.monotonic(), flush=True)
    {body}
print("went on")
"""


def watched(body, minutes=1 / 60):
    """The process, and when its block began, on the clock that all processes share."""
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHED.format(body=body, minutes=minutes)], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    began = process.stdout.readline()
    assert began, process.stderr.read()
    return process, float(began)


def test_a_hang_in_c_ends_within_the_limit_with_all_stacks_and_a_line():
    process, begun = watched("waits_in_c(30)")
    assert process.wait(4) == 3
    assert time.monotonic() - begun > 0.7
    errors = process.stderr.read()
    assert "in waits_in_c" in errors and errors.splitlines()[-1].startswith("error: no training step has ended for")


@pytest.mark.parametrize(
    ("body", "minutes"),
    [
        ("for _ in range(4): waits_in_c(0.5), watchdog.step_ended()", 1 / 60),
        ("with watchdog.paused(): waits_in_c(2)", 1 / 60),
        ("watchdog.paused()(waits_in_c)(2)", 1 / 60),
        ("waits_in_c(2)", 0.0),
    ],
    ids=["steps", "pause", "paused function", "never"],
)
def test_a_program_that_does_not_hang_is_not_ended(body, minutes):
    process, _ = watched(body, minutes)
    assert process.wait(8) == 0 and process.stdout.read() == "went on\n"


def test_time_in_which_the_process_was_stopped_does_not_count():
    process, _ = watched("for _ in range(6): time.sleep(0.1)")
    process.send_signal(signal.SIGSTOP)
    time.sleep(2)
    process.send_signal(signal.SIGCONT)
    assert process.wait(5) == 0, process.stderr.read()


@pytest.mark.parametrize("minutes", [-1.0, float("nan"), float("inf")])
def test_an_invalid_time_limit_is_refused(tmp_path, minutes):
    with pytest.raises(InputError, match="machine.hang_timeout_minutes must be .*at least 0; got"):
        check(tiny_config(tmp_path, machine__hang_timeout_minutes=minutes))


# main.py, in which something is replaced.
PATCHED = """
import runpy, time
from pathlib import Path
{patch}
runpy.run_path("main.py", run_name="__main__")
"""

INPUT = """
from t2t_jax.data.batching import Batches
read = Batches.read

def read_or_not(self, step, rows):
    if step == 50:
        {fault}
    return read(self, step, rows)

Batches.read = read_or_not
"""

LONG = """
from t2t_jax.checkpoints import CheckpointWriter
from t2t_jax.training import engine, loop

def slowly(function):
    def slow(*arguments, **options):
        Path({log!r}).open("a").write(function.__name__ + " ")
        time.sleep(3)
        return function(*arguments, **options)
    return slow

CheckpointWriter.save = slowly(CheckpointWriter.save)
loop.evaluate = slowly(loop.evaluate)
make = engine._pmap
engine._pmap = lambda *arguments: slowly(make(*arguments))
"""


def patched(directory, run, patch, *flags):
    script = directory / "patched.py"
    script.write_text(PATCHED.format(patch=patch))
    return start(directory, run, *flags, program=str(script))


@pytest.mark.slow
def test_a_batch_that_never_comes_ends_the_run_and_the_same_command_resumes_exactly(tmp_path):
    run, fifo = tmp_path / "run", tmp_path / "fifo"
    fault = f"import os; os.path.exists({str(fifo)!r}) or os.mkfifo({str(fifo)!r}); open({str(fifo)!r}).read()"
    process = patched(tmp_path, run, INPUT.format(fault=fault), "--config.machine.hang_timeout_minutes=0.05")
    while not fifo.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    begun = time.monotonic()
    _, errors = process.communicate(timeout=60)
    seconds = time.monotonic() - begun
    print(f"hung input: gone after {seconds:.1f} s")
    assert process.returncode == 3 and 2 < seconds < 8, errors
    assert "no training step has ended for 0.05 minutes (machine.hang_timeout_minutes)" in errors.splitlines()[-1]
    assert "in read_or_not" in errors and "in waiting_for" in errors, "not the stacks of all threads"
    assert saved_steps(run)[-1] == 40

    process = start(tmp_path, run)
    assert process.wait(300) == 0, process.stderr.read()
    whole = start(tmp_path, tmp_path / "whole")
    assert whole.wait(300) == 0, whole.stderr.read()
    assert_same_run(tmp_path / "whole", run, 200)


@pytest.mark.slow
def test_a_batch_that_cannot_be_made_ends_the_run_soon_with_a_line_that_names_its_step(tmp_path):
    mark = tmp_path / "mark"
    fault = f"Path({str(mark)!r}).touch(); raise OSError('Input/output error')"
    process = patched(tmp_path, tmp_path / "run", INPUT.format(fault=fault))
    while not mark.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    begun = time.monotonic()
    message = next(line for line in process.stderr if line.startswith("error: "))
    assert time.monotonic() - begun < 5
    assert "error: data: the batch of step 51 cannot be made (OSError: Input/output error)" in message
    assert process.wait(30) == 4 and process.stderr.read() == ""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["jit", "pmap"])
def test_long_evaluations_saves_and_compilations_are_not_taken_for_hangs(tmp_path, engine):
    log = tmp_path / "log"
    flags = ("--config.machine.hang_timeout_minutes=0.03", f"--config.machine.engine={engine}",
             "--config.train.train_steps=3", "--config.evaluate.interval_steps=2")  # fmt: skip
    process = patched(tmp_path, tmp_path / "run", LONG.format(log=str(log)), *flags)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert {"save", "evaluate"} | ({"take_step"} if engine == "pmap" else set()) == set(log.read_text().split())
