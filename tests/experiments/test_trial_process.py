"""A trial is gone when it hangs, when it is told to end, and when its launcher dies, whatever signals it ignores."""

import os
import signal
import subprocess
import sys
import time

import pytest

from experiments import trial_process
from experiments.trials import FAILED, HUNG, INTERRUPTED, Trial
from tests.experiments.sweeps import ROOT

# A trial that ignores every request and starts another process; it writes the numbers of both.
STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {child.pid}\\n")
time.sleep(60)
"""
PROGRAM = """
import sys
from experiments import trial_process
trial_process._GRACE_SECONDS = 1
sys.exit(trial_process.main(sys.argv[1:]))
"""


def start(folder, timeout_minutes, *command):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(timeout_minutes), *command], cwd=ROOT,
        preexec_fn=trial_process.ending_with_parent(signal.SIGTERM),
    )  # fmt: skip


def start_stubborn(tmp_path, timeout_minutes):
    """The process that watches a stubborn trial, the trial, and the trial's own child."""
    mark = tmp_path / "numbers"
    process = start(tmp_path / "trial", timeout_minutes, sys.executable, "-c", STUBBORN, str(mark))
    while not (mark.exists() and mark.read_text().endswith("\n")):
        assert process.poll() is None
        time.sleep(0.01)
    return process, *map(int, mark.read_text().split())


def is_gone(number, seconds=5):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{number}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_a_hung_trial_that_ignores_sigterm_is_killed_with_all_it_started(tmp_path):
    process, trial, child = start_stubborn(tmp_path, 0.02)
    assert process.wait(10) == HUNG and is_gone(trial) and is_gone(child)


def test_a_trial_that_ignores_its_request_is_killed_when_its_time_is_over(tmp_path):
    process, trial, child = start_stubborn(tmp_path, 10)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGKILL and is_gone(trial) and is_gone(child)


def test_a_trial_that_ignores_sigterm_does_not_outlive_its_launcher(tmp_path):
    process, trial, child = start_stubborn(tmp_path, 10)
    process.kill()
    process.wait()
    assert is_gone(trial)
    os.kill(child, signal.SIGKILL)


def test_slurms_warning_reaches_no_process_of_a_trial_but_through_the_one_that_watches_it(tmp_path):
    said = "import time; print('ready', flush=True); time.sleep(2)"
    process = start(tmp_path / "trial", 10, sys.executable, "-c", said)
    log = tmp_path / "trial/log.txt"
    while not (log.exists() and "ready\n" in log.read_text()):
        assert process.poll() is None
        time.sleep(0.01)
    trial = int(subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout)
    for number in (process.pid, trial):
        os.kill(number, signal.SIGUSR2)
    assert process.wait(10) == 0


@pytest.mark.parametrize(
    ("code", "last", "said"),
    [
        (128 + 9, "", (FAILED, "killed by SIGKILL: ")),
        (128 + 7, "", (FAILED, "killed by SIGBUS: ")),
        (1, "KeyError: 'x'", (FAILED, "exit code 1: KeyError: 'x'")),
        (HUNG, "", (FAILED, "hung: nothing was written any more, so it was killed")),
        (3, "error: no training step", (INTERRUPTED, "error: no training step")),
        (None, "", (FAILED, "its job is gone without an exit code: cancelled, or the node failed")),
    ],
)
def test_how_a_trial_ended_is_said_with_its_last_line(tmp_path, code, last, said):
    (tmp_path / "log.txt").write_text(f"$ main.py\n{last or said[1].partition(': ')[2] or '-'}\n")
    trial = Trial("row/seed_0", tmp_path, tmp_path / "row.py", {}, {"train": {"train_steps": 6}})
    state, text = trial.ended(code)
    assert state == said[0] and text.startswith(said[1])
