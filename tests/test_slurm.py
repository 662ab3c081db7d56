"""A training run as a job of a real Slurm (tests/slurm_up.sh) saves on the warning, is requeued and resumes."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from tests.test_resume import ROOT, assert_same_run, saved_steps, start, write_config

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(
        shutil.which("sbatch") is None or "SLURM_CONF" not in os.environ,
        reason="no Slurm: tests/slurm_up.sh up, then export SLURM_CONF",
    ),
]

# As in the README.
JOB = """#!/bin/bash
#SBATCH --requeue --open-mode=append --signal=USR2@120
srun {python} main.py --config={directory}/config.py --workdir={run}
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


def test_a_job_that_is_warned_saves_is_requeued_and_resumes_exactly(tmp_path):
    run, log, script = tmp_path / "run", tmp_path / "job.log", tmp_path / "job.sh"
    write_config(tmp_path)
    script.write_text(JOB.format(python=sys.executable, directory=tmp_path, run=run))
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    submitted = subprocess.run(
        ["sbatch", "--parsable", f"--output={log}", "--time=30", "--cpus-per-task=1", str(script)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    job = submitted.stdout.strip()
    try:
        wait(lambda: saved_steps(run), job, log)
        subprocess.run(["scancel", "--signal=USR2", job], check=True)
        wait(lambda: "Restarts=1" in show_job(job) and "JobState=PENDING" in show_job(job), job, log)
        stopped_after = int(re.search(r"stopped by a signal after step (\d+), saved", log.read_text())[1])
        assert saved_steps(run)[-1] == stopped_after < 200
        # Without this, Slurm would wait two minutes before it starts a requeued job.
        subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True)
        wait(lambda: "JobState=COMPLETED" in show_job(job), job, log, 240)
    finally:
        subprocess.run(["scancel", job], capture_output=True)
    assert f"resuming from step {stopped_after}" in log.read_text()
    uninterrupted = start(tmp_path, tmp_path / "uninterrupted")
    assert uninterrupted.wait(300) == 0, uninterrupted.stderr.read()
    assert_same_run(tmp_path / "uninterrupted", run, 200)
