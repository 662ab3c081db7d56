"""A trial is killed when it hangs, on request, and when its launcher dies, even if it ignores signals."""

import os
import signal
import subprocess
import sys
import time

import pytest

from experiments.sweep import trial_process
from experiments.sweep.trial_process import HUNG
from experiments.sweep.trials import FAILED, INTERRUPTED, REFUSED, Trial
from tests.experiments.sweeps import ROOT

# A trial that ignores all stop signals and starts a child process; it writes the process ids of both.
STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {child.pid}\\n")
time.sleep(60)
"""
# No trial is silent before a stubborn one has written its file: a loaded machine starts it slowly.
PROGRAM = """
import pathlib, sys
from experiments.sweep import trial_process
from experiments.sweep.hang_watchdog import HangWatchdog
trial_process._GRACE_SECONDS = 1
pid_file, silent_minutes = pathlib.Path(sys.argv[1]).with_name("pids"), HangWatchdog.silent_minutes
has_begun = lambda: pid_file.exists() and pid_file.read_text()
HangWatchdog.silent_minutes = lambda self: silent_minutes(self) if has_begun() else 0.0
sys.exit(trial_process.main(sys.argv[1:]))
"""


def start(folder, timeout_minutes, *command):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(timeout_minutes), *command], cwd=ROOT,
        preexec_fn=trial_process.signal_on_parent_death(signal.SIGTERM),
    )  # fmt: skip


def start_stubborn(tmp_path, timeout_minutes):
    """The supervisor of a stubborn trial, and the process ids of the trial and its child."""
    pid_file = tmp_path / "pids"
    process = start(tmp_path / "trial", timeout_minutes, sys.executable, "-c", STUBBORN, str(pid_file))
    while not (pid_file.exists() and pid_file.read_text().endswith("\n")):
        assert process.poll() is None
        time.sleep(0.01)
    return process, *map(int, pid_file.read_text().split())


def is_gone(pid, seconds=5):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_the_log_holds_the_command_also_with_a_path_that_is_not_utf8(tmp_path):
    assert start(tmp_path, 1, sys.executable, "-c", "", b"caf\xe9.de").wait(10) == 0
    assert (tmp_path / "log.txt").read_bytes() == b"$ %s -c '' 'caf\xe9.de'\n" % os.fsencode(sys.executable)


def test_a_hung_trial_that_ignores_sigterm_is_killed_with_its_children(tmp_path):
    process, trial, child = start_stubborn(tmp_path, 0.02)
    assert process.wait(10) == HUNG and is_gone(trial) and is_gone(child)


def test_a_trial_that_ignores_the_request_to_stop_is_killed_after_the_grace_period(tmp_path):
    process, trial, child = start_stubborn(tmp_path, 10)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGKILL and is_gone(trial) and is_gone(child)


def test_a_trial_that_ignores_sigterm_does_not_outlive_its_launcher(tmp_path):
    process, trial, child = start_stubborn(tmp_path, 10)
    process.kill()
    process.wait()
    assert is_gone(trial)
    os.kill(child, signal.SIGKILL)


def test_neither_supervisor_nor_trial_reacts_to_the_warning_signal_of_slurm(tmp_path):
    program = "import time; print('ready', flush=True); time.sleep(2)"
    process = start(tmp_path / "trial", 10, sys.executable, "-c", program)
    log = tmp_path / "trial/log.txt"
    while not (log.exists() and "ready\n" in log.read_text()):
        assert process.poll() is None
        time.sleep(0.01)
    trial = int(subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout)
    for pid in (process.pid, trial):
        os.kill(pid, signal.SIGUSR2)
    assert process.wait(10) == 0


@pytest.mark.parametrize(
    ("code", "last_line", "expected"),
    [
        (128 + 9, "", (FAILED, "killed by SIGKILL: ")),
        (128 + 7, "", (FAILED, "killed by SIGBUS: ")),
        (1, "KeyError: 'x'", (FAILED, "exit code 1: KeyError: 'x'")),
        (HUNG, "", (FAILED, "hung: it stopped writing output, so it was killed")),
        (2, "error: data: none", (REFUSED, "error: data: none")),
        (3, "error: no training step", (INTERRUPTED, "error: no training step")),
        (None, "", (FAILED, "its job is gone without an exit code: cancelled, or the node failed")),
    ],
)
def test_the_exit_code_of_a_trial_is_explained_with_its_last_line(tmp_path, code, last_line, expected):
    (tmp_path / "log.txt").write_text(f"$ main.py\n{last_line or expected[1].partition(': ')[2] or '-'}\n")
    trial = Trial("row/seed_0", tmp_path, tmp_path / "row.py", {}, {"train": {"train_steps": 6}})
    state, details = trial.outcome_of_exit(code)
    assert state == expected[0] and details.startswith(expected[1])
