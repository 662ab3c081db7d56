"""Jobs of Slurm, through submitit; they need no accounting database."""

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from t2t_jax import signals
from t2t_jax.errors import DamagedError, InputError, InterruptedRun, on_one_line

_POLL_SECONDS = 2.0
_MAX_REQUEUES = 1000  # what takes longer than the time limit of a job is requeued several times
_DEFAULT_JOBS = 8
# Parameters of submitit that are no single text, by their type.
_WHOLE_NUMBERS = ("time", "nodes", "ntasks_per_node", "cpus_per_task", "signal_delay_s")
_LISTS = ("setup", "teardown", "srun_args")
_SWITCHES = ("use_srun", "stderr_to_stdout")


class JobsRefused(InputError):
    """Slurm refuses jobs: of a mistake in their resources, or because a queue is full. Work done so far is kept."""


def parse_options(text: str) -> dict[str, str]:
    """The value of --slurm, NAME=VALUE,NAME=VALUE: parameters of submitit's SlurmExecutor."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if not all(value for _, _, value in pairs):
        raise InputError(f"--slurm={text}: must be NAME=VALUE with commas between, as in partition=main,time=60")
    return {name: value for name, _, value in pairs}


def new_executor(folder: Path, options: Mapping[str, str], job_name: str) -> Any:
    """submitit's executor for jobs with these resources, whose logs and results are in `folder`."""
    try:
        import submitit
    except ImportError:
        raise InputError("--launcher=slurm needs submitit: pip install -e '.[sweep]'") from None
    if "time" not in options:
        raise InputError("--slurm: needs the time limit of a job in minutes, for example --slurm=time=60")
    values = {name: _typed(name, value) for name, value in options.items()}
    try:
        executor = submitit.SlurmExecutor(folder, max_num_timeout=_MAX_REQUEUES)
        executor.update_parameters(**{"job_name": job_name} | values)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"--slurm: {on_one_line(error)}") from None
    return executor


def _typed(name: str, value: str) -> Any:
    """The value of a parameter as submitit takes it."""
    if name in _LISTS:
        return [value]
    if value in ("True", "False"):
        return value == "True"
    if name in _SWITCHES:
        raise InputError(f"--slurm: {name}={value}: must be True or False")
    if re.fullmatch("0|[1-9][0-9]*", value):  # an account may begin with 0
        return int(value)
    if name in _WHOLE_NUMBERS:
        unit = " of minutes, such as time=600" if name == "time" else ""
        raise InputError(f"--slurm: {name}={value}: must be a whole number{unit}")
    return value


def check_array(options: Mapping[str, str]) -> None:
    """Refuses mistakes in the options of `run_array` that can be found without Slurm; call it before long work."""
    _count(options)
    new_executor(Path(), options, "check")


def _count(options: Mapping[str, str]) -> int:
    """The number of jobs in an array."""
    given = options.get("array_parallelism", str(_DEFAULT_JOBS))
    if not re.fullmatch("[1-9][0-9]{0,3}", given):
        raise InputError(f"--slurm: array_parallelism={given}: must be the number of jobs, from 1 to 9999")
    return int(given)


def job_states() -> dict[str, str]:
    """{job: state} of the user's jobs that have not ended; the tasks of an array are called JOB_TASK."""
    command = ["squeue", "--me", "--array", "--noheader", "--format=%i %T"]
    asked = subprocess.run(command, capture_output=True, text=True)
    if asked.returncode:
        raise InputError(f"--launcher=slurm: squeue: {on_one_line(asked.stderr)}")
    return dict(line.split() for line in asked.stdout.splitlines())


class _Share:
    """One of the tasks of `run_array`. A task that is preempted or runs out of time starts again."""

    def __init__(self, work: Callable[[int, int], None], index: int, count: int):
        self._work, self._index, self._count = work, index, count

    def __call__(self) -> Exception | None:
        try:
            self._work(self._index, self._count)
        except (InputError, DamagedError) as error:  # raised again by the launcher, in one line
            return error
        return None

    def checkpoint(self) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def run_array(work: Callable[[int, int], None], folder: Path, options: Mapping[str, str], job_name: str) -> None:
    """Calls `work(index, count)` for each index below count in an array of jobs, and waits for them all.

    The option `array_parallelism` is the count. Whatever ends the wait cancels the jobs that are left.
    """
    count = _count(options)
    executor = new_executor(folder, options, job_name)
    try:
        jobs = executor.submit_array([_Share(work, index, count) for index in range(count)])
    except submission_error() as error:
        raise JobsRefused(f"--slurm: {on_one_line(error)}") from None
    array = jobs[0].job_id.partition("_")[0]
    print(f"job {array} of Slurm, {count} tasks; their logs are in {folder}", file=sys.stderr)
    with signals.cleanup(lambda: subprocess.run(["scancel", array], capture_output=True)):
        for job in jobs:
            _wait(job)


def submission_error() -> type[Exception]:
    """What submitit raises where Slurm refuses a job."""
    import submitit

    return submitit.core.utils.FailedJobError


def _wait(job: Any) -> None:
    """Waits for a task; raises its error, or that it ended without a result."""
    absent = 0  # polls; a job that is being requeued may be absent from one
    while not _has_result(job):
        if absent > 1:
            raise InterruptedRun(
                f"--launcher=slurm: job {job.job_id} ended without a result; see {job.paths.stderr}; the same command "
                "does what is missing"
            )
        with contextlib.suppress(InputError):  # the Slurm controller may be down for a while
            absent = 0 if job.job_id in job_states() else absent + 1
        time.sleep(_POLL_SECONDS)
    try:
        error = job.result()
    except Exception as failure:  # submitit raises here whatever was raised in the job
        reason = on_one_line(failure)[-300:]
        raise InterruptedRun(f"--launcher=slurm: job {job.job_id} failed: {reason}; see {job.paths.stderr}") from None
    if error is not None:
        raise error


def _has_result(job: Any) -> bool:
    """Whether the result of a task is there. NFS may deny it for a minute, unless the folder is changed before."""
    with contextlib.suppress(OSError):
        job.paths.folder.chmod(job.paths.folder.stat().st_mode)  # as submitit's Job.done
    return job.paths.result_pickle.exists()
