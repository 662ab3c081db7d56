"""Runs trials as Slurm jobs, through submitit."""

import collections
import contextlib
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.json_types import TEXT, check_types
from experiments.sweep.status_table import StatusTable
from experiments.sweep.trial_process import TrialProcess
from experiments.sweep.trials import RUNNING, WAITING, Trial
from t2t_jax import slurm
from t2t_jax.errors import InputError, on_one_line
from t2t_jax.files import read_json, write_json
from t2t_jax.signals import Requests

_POLL_SECONDS = 2.0
_KILL_WAIT_SECONDS = 600  # longer than Slurm waits between SIGTERM and SIGKILL


class SlurmTrial(TrialProcess):
    """A trial inside a Slurm job: on timeout or preemption it saves and the job is requeued."""

    def __call__(self) -> int:
        # Slurm sends SIGTERM to some or to all processes of a job. The trial may receive it twice, from Slurm and from
        # here: main.py takes signals within a second for one request.
        previous = signal.signal(signal.SIGTERM, lambda *_: self.stop(signal.SIGINT))
        try:
            code = super().__call__()
        finally:
            signal.signal(signal.SIGTERM, previous)
        if self.stop_requested:  # a job that exits by itself is not requeued: wait until Slurm ends it
            time.sleep(_KILL_WAIT_SECONDS)
        return code

    def checkpoint(self) -> Any:
        """Called by submitit before a requeue: what the requeued job runs; None if the trial is finished."""
        from submitit.helpers import DelayedSubmission

        if self.stop(signal.SIGINT) == 0:
            return None
        return DelayedSubmission(SlurmTrial(self.command, self.folder, self.timeout_minutes))


class SlurmQueue:
    """The jobs of a sweep. They outlive the launcher, so their ids are kept in slurm.json."""

    def __init__(self, folder: Path, options: Mapping[str, str]):
        self._pickles, self._id_file = folder / ".slurm", folder / "slurm.json"
        self._job_ids = read_json(self._id_file) if self._id_file.is_file() else {}
        check_types(self._job_ids, {}, str(self._id_file))
        check_types(self._job_ids, dict.fromkeys(self._job_ids, TEXT), str(self._id_file))
        if "array_parallelism" in options:
            raise InputError("--slurm: array_parallelism is for --mode=prepare; a sweep submits each trial as a job")
        self._executor = slurm.new_executor(self._pickles, options, folder.name)

    def submit(self, trial: Trial, timeout_minutes: float) -> None:
        """Submits a trial as a job."""
        try:
            job = self._executor.submit(SlurmTrial(trial.command, str(trial.folder), timeout_minutes))
        except slurm.submission_error() as error:
            raise InputError(f"--slurm: {on_one_line(error)}") from None
        self._job_ids[trial.name] = job.job_id
        write_json(self._id_file, self._job_ids)

    def job_id(self, trial: Trial) -> str | None:
        return self._job_ids.get(trial.name)

    def exit_code(self, trial: Trial) -> int | None:
        """The exit code of a trial whose job is gone; None if the job did not return one."""
        import submitit

        job = submitit.SlurmJob(self._pickles, self._job_ids[trial.name])
        if not job.paths.result_pickle.exists():
            return None
        try:
            return job.result()
        except Exception:  # submitit re-raises here whatever was raised in the job
            return None


def run_on_slurm(
    trials: Sequence[Trial], table: StatusTable, queue: SlurmQueue, timeout_minutes: float, requests: Requests
) -> None:
    """Submits the trials that have no job yet and follows all jobs to their end. A signal stops only the launcher."""
    states = slurm.job_states()
    for trial in trials:
        if queue.job_id(trial) not in states:
            queue.submit(trial, timeout_minutes)
    polls_absent = collections.Counter()  # a job that is being requeued may be absent from one poll
    pending = list(trials)
    while pending and not requests.count:
        with contextlib.suppress(InputError):  # the Slurm controller may be down for a while
            states = slurm.job_states()
            for trial in list(pending):
                state = states.get(queue.job_id(trial))
                polls_absent[trial] = 0 if state else polls_absent[trial] + 1
                if polls_absent[trial] > 1:
                    table.update(trial, *trial.outcome_of_exit(queue.exit_code(trial)))
                    pending.remove(trial)
                elif state == "RUNNING":
                    table.update(trial, RUNNING, trial.progress())
                elif state:
                    table.update(trial, WAITING, f"job {queue.job_id(trial)}, {state.lower()}")
        table.redraw()
        time.sleep(_POLL_SECONDS)
