"""Sweeps on a real Slurm, which tests/slurm_up.sh starts on this machine."""

import json
import os
import signal
import subprocess

import pytest

from tests.experiments.sweeps import Sweep

pytest.importorskip("submitit")
pytestmark = pytest.mark.slurm

SLURM = ("--launcher=slurm", "--slurm=partition=main,time=30,cpus_per_task=1")


def jobs(tiny):
    path = tiny.workdir / "slurm.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def queued(job):
    listed = subprocess.run(["squeue", "--me", "--noheader", "--format=%A"], capture_output=True, text=True)
    return job in listed.stdout.split()


def described(job):
    return subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True).stdout


def test_jobs_outlive_the_launcher_and_none_is_submitted_twice(tmp_path):
    steps = {"train__train_steps": 1000, "checkpoint__interval_steps": 100}
    tiny = Sweep(tmp_path, crashes={}, long=steps)
    tiny.damage("crashes")
    launcher = tiny.start(*SLURM)
    tiny.wait(lambda: tiny.saved("long") > 0)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    submitted = jobs(tiny)
    assert submitted.keys() == {"crashes/seed_0", "long/seed_0"}
    assert queued(submitted["long/seed_0"]) and tiny.process("long"), "the job died with the launcher"

    launcher = tiny.start(*SLURM)
    tiny.wait(lambda: "long/seed_0: running" in tiny.errors())
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 3 and queued(submitted["long/seed_0"]), tiny.errors()

    assert tiny.run(*SLURM) == 4
    assert jobs(tiny)["long/seed_0"] == submitted["long/seed_0"] and tiny.log("long").count("main.py --config") == 1
    assert jobs(tiny)["crashes/seed_0"] != submitted["crashes/seed_0"], "a job that failed is submitted again"
    assert "crashes/seed_0: failed, exit code 4: error: " in tiny.errors()
    assert "long/seed_0: finished, " in tiny.errors()

    assert tiny.run("--rows=long", *SLURM) == 0 and jobs(tiny)["long/seed_0"] == submitted["long/seed_0"]


def test_a_preempted_trial_saves_and_is_queued_again(tmp_path):
    """As Slurm does it: SIGTERM to all, then submitit's signal. Slurm would take two minutes to start it again."""
    tiny = Sweep(tmp_path, long={"train__train_steps": 100_000, "checkpoint__interval_steps": 100})
    launcher = tiny.start(*SLURM)
    tiny.wait(lambda: tiny.saved("long") > 0 and "long/seed_0: running" in tiny.errors())
    job = jobs(tiny)["long/seed_0"]
    subprocess.run(["scancel", "--signal=TERM", job], check=True)
    try:
        tiny.wait(lambda: "saved; the same command resumes" in tiny.log("long"))
        tiny.wait(lambda: tiny.process("long") is None)
        said = len(tiny.errors())  # among it, perhaps, that the job waited before it ran
        subprocess.run(["scancel", "--signal=USR2", job], check=True)
        tiny.wait(lambda: "long/seed_0: waiting, job" in tiny.errors()[said:])
        # At first it is completing.
        tiny.wait(lambda: "Restarts=1" in described(job) and "JobState=PENDING" in described(job))
        assert tiny.process("long") is None
    finally:
        subprocess.run(["scancel", job], check=True)
    assert launcher.wait(60) == 4 and "long/seed_0: failed, its job is gone" in tiny.errors()
