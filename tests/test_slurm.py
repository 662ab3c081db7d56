"""A training run as a job of a real Slurm (tests/slurm_up.sh) saves on the warning, is requeued and resumes."""

import os
import re
import subprocess
import sys
import time

import pytest

from benchmarks.tiny_experiment import FAST_COMPILATION
from tests.test_resume import ROOT, assert_same_run, saved_steps, write_config

pytestmark = pytest.mark.slurm

# As in docs/training.md.
JOB = """#!/bin/bash
#SBATCH --requeue --open-mode=append --signal=USR2@120
srun {python} main.py --config={directory}/config.py --workdir={run}{flags}
code=$?
if [ $code = 3 ]; then scontrol requeue $SLURM_JOB_ID; fi
exit $code
"""


def show_job(job):
    return subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True).stdout


def wait(condition, job, log, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, show_job(job) + (log.read_text() if log.exists() else "")
        time.sleep(0.1)


def submit(directory, run, log, tasks):
    """The number of a job that trains the run in `tasks` processes."""
    script = directory / f"{run.name}.sh"
    flags = " --distributed" if tasks > 1 else ""
    script.write_text(JOB.format(python=sys.executable, directory=directory, run=run, flags=flags))
    environment = os.environ | {"XLA_FLAGS": FAST_COMPILATION, "PYTHONPATH": str(ROOT)}
    submitted = subprocess.run(
        ["sbatch", "--parsable", f"--output={log}", "--time=30", f"--ntasks={tasks}", "--cpus-per-task=1", str(script)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return submitted.stdout.strip()


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_job_that_is_warned_saves_is_requeued_and_resumes_exactly(tmp_path, tasks):
    run, log = tmp_path / "run", tmp_path / "job.log"
    write_config(tmp_path)
    job = submit(tmp_path, run, log, tasks)
    try:
        wait(lambda: saved_steps(run), job, log)
        subprocess.run(["scancel", "--signal=USR2", job], check=True)
        wait(lambda: "Restarts=1" in show_job(job) and "JobState=PENDING" in show_job(job), job, log)
        stopped_after = int(re.search(r"stopped by a signal after step (\d+), saved", log.read_text())[1])
        assert saved_steps(run)[-1] == stopped_after < 200
        # By itself Slurm would start the requeued job only after two minutes. Not at once either: Slurm compares
        # credentials by the second, and one issued in the second of the requeue counts as revoked with the first.
        subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now+2seconds"], check=True)
        wait(lambda: "JobState=COMPLETED" in show_job(job), job, log, 240)
    finally:
        subprocess.run(["scancel", job], capture_output=True)
    assert f"resuming from step {stopped_after}" in log.read_text()
    log = tmp_path / "uninterrupted.log"
    job = submit(tmp_path, tmp_path / "uninterrupted", log, tasks)
    wait(lambda: "JobState=COMPLETED" in show_job(job), job, log, 240)
    assert ("2 × cpu" in log.read_text()) == (tasks == 2)
    assert_same_run(tmp_path / "uninterrupted", run, 200)
