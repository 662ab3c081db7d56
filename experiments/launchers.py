"""Where trials run: on this machine's devices, or as jobs of Slurm. What one trial does never stops the others."""

import collections
import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.kinds import TEXT, check_kinds
from experiments.trial_process import POLL_SECONDS, TrialProcess, ending_with_parent, exit_code
from experiments.trials import FAILED, RUNNING, WAITING, Board, Silence, Trial
from t2t_jax.errors import InputError
from t2t_jax.files import read_json, write_json

Stops = Sequence[int]  # the signals received so far: one asks everything to save and end, a second one ends it

# --- This machine ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Slot:
    """What one trial at a time may use."""

    cores: frozenset[int]
    environment: dict[str, str]


def local_slots(jobs: int | None) -> list[Slot]:
    """One for each GPU; without GPUs one for each core, or `jobs` of them. They share the cores evenly."""
    cores, gpus = sorted(os.sched_getaffinity(0)), visible_gpus()
    most = len(gpus) or len(cores)
    if jobs is not None and not 1 <= jobs <= most:
        what = f"one for each of {len(gpus)} GPUs" if gpus else f"one for each of {len(cores)} cores"
        raise InputError(f"--jobs={jobs}: must be from 1 to {most}, {what}")
    count = jobs or most
    slots = []
    for n in range(count):
        share = cores[n * len(cores) // count : (n + 1) * len(cores) // count] or cores
        environment = {"OMP_NUM_THREADS": str(len(share))} | ({"CUDA_VISIBLE_DEVICES": gpus[n]} if gpus else {})
        slots.append(Slot(frozenset(share), environment))
    return slots


def visible_gpus() -> list[str]:
    """The names by which CUDA_VISIBLE_DEVICES chooses each GPU that JAX may use."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [] if listed.strip() in ("", "-1") else listed.split(",")
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.split()


def run_locally(
    trials: Sequence[Trial], board: Board, slots: Sequence[Slot], timeout_minutes: float, stops: Stops
) -> None:
    """Runs all trials, one in each slot at a time."""
    waiting, free = {trial: Silence(trial.folder) for trial in trials}, list(slots)
    running: dict[Trial, tuple[subprocess.Popen, Slot]] = {}
    signalled = 0
    while running or (waiting and not stops):
        for trial in [] if stops else list(waiting):
            if trial.is_held():  # by a trial of a launcher that was killed, while it saves
                if waiting[trial].minutes() > timeout_minutes:
                    board.put(trial, FAILED, f"another process is training in {trial.folder}; end it")
                    del waiting[trial]
            elif free:
                running[trial] = _start(trial, free[0], timeout_minutes), free.pop(0)
                del waiting[trial]
        for trial, (process, slot) in list(running.items()):
            if process.poll() is None:
                board.put(trial, RUNNING, trial.progress())
                continue
            board.put(trial, *trial.ended(exit_code(process)))
            free.append(slot)
            del running[trial]
        if len(stops) > signalled:  # the second time they are killed, and what they run ends with them
            for process, _ in running.values():
                process.send_signal(signal.SIGKILL if signalled else signal.SIGTERM)
            signalled += 1
        board.draw()
        time.sleep(POLL_SECONDS)


def _start(trial: Trial, slot: Slot, timeout_minutes: float) -> subprocess.Popen:
    command = [sys.executable, "-m", "experiments.trial_process", str(trial.folder), str(timeout_minutes)]
    end_with_parent = ending_with_parent(signal.SIGTERM)

    def prepare() -> None:
        os.sched_setaffinity(0, slot.cores)
        end_with_parent()

    # Away from this terminal, so that Ctrl-C reaches it through the launcher alone.
    return subprocess.Popen(
        command + trial.command, env=os.environ | slot.environment, start_new_session=True, preexec_fn=prepare
    )


# --- Slurm -------------------------------------------------------------------------------------------------

_POLL_SECONDS = 2.0  # between questions to Slurm
_PATIENCE_SECONDS = 600  # longer than Slurm leaves a job alone after SIGTERM
_REQUEUES = 1000  # a trial longer than the limit of a job takes several


class SlurmTrial(TrialProcess):
    """A trial inside a job, as submitit runs it: saves and is queued again when its time is up or it is preempted."""

    def __call__(self) -> int:
        # Slurm sends SIGTERM to some of a job's processes or to all; a second one would kill main.py, SIGINT will not.
        usual = signal.signal(signal.SIGTERM, lambda *_: self.stop(signal.SIGINT))
        try:
            code = super().__call__()
        finally:
            signal.signal(signal.SIGTERM, usual)
        if self.told:  # what Slurm does next is its decision; a job that ended by itself would not be queued again
            time.sleep(_PATIENCE_SECONDS)
        return code

    def checkpoint(self) -> Any:
        """What submitit runs when the job starts again; nothing where the trial was about to end anyway."""
        from submitit.helpers import DelayedSubmission

        if self.stop(signal.SIGINT) == 0:
            return None
        return DelayedSubmission(SlurmTrial(self.command, self.folder, self.timeout_minutes))


class Slurm:
    """The jobs of a sweep. They outlive the launcher, so their numbers are kept in slurm.json."""

    def __init__(self, folder: Path, options: Mapping[str, str]):
        try:
            import submitit
        except ImportError:
            raise InputError("--launcher=slurm needs submitit: pip install -e '.[sweep]'") from None
        if "time" not in options:
            raise InputError("--slurm: needs the time limit of a job in minutes, for example --slurm=time=60")
        self._pickles, self._numbers = folder / ".slurm", folder / "slurm.json"
        self._jobs = check_kinds(read_json(self._numbers) if self._numbers.is_file() else {}, {}, str(self._numbers))
        check_kinds(self._jobs, dict.fromkeys(self._jobs, TEXT), str(self._numbers))
        self._submitit = submitit
        try:
            self._executor = submitit.SlurmExecutor(self._pickles, max_num_timeout=_REQUEUES)
            values = {name: int(value) if value.isdigit() else value for name, value in options.items()}
            self._executor.update_parameters(**{"job_name": folder.name} | values)
        except (RuntimeError, ValueError) as error:
            raise InputError(f"--slurm: {' '.join(str(error).split())}") from None

    def submit(self, trial: Trial, timeout_minutes: float) -> None:
        """Queues a trial."""
        try:
            job = self._executor.submit(SlurmTrial(trial.command, str(trial.folder), timeout_minutes))
        except self._submitit.core.utils.FailedJobError as error:
            raise InputError(f"--slurm: {' '.join(str(error).split())}") from None
        self._jobs[trial.name] = job.job_id
        write_json(self._numbers, self._jobs)

    def number(self, trial: Trial) -> str | None:
        return self._jobs.get(trial.name)

    def exit_code(self, trial: Trial) -> int | None:
        """That of a trial whose job is over, if the job could still say it."""
        job = self._submitit.SlurmJob(self._pickles, self._jobs[trial.name])
        if not job.paths.result_pickle.exists():
            return None
        try:
            return job.result()
        except Exception:  # whatever went wrong in the job
            return None

    @staticmethod
    def queue() -> dict[str, str]:
        """The state of each job that is not over, by number. Asks the controller, which every Slurm has."""
        asked = subprocess.run(["squeue", "--me", "--noheader", "--format=%A %T"], capture_output=True, text=True)
        if asked.returncode:
            raise InputError(f"--launcher=slurm: squeue: {' '.join(asked.stderr.split())}")
        return dict(line.split() for line in asked.stdout.splitlines())


def run_on_slurm(trials: Sequence[Trial], board: Board, slurm: Slurm, timeout_minutes: float, stops: Stops) -> None:
    """Queues what is not queued yet, and watches until all is over; stopping ends the watching alone."""
    queue = slurm.queue()
    for trial in trials:
        if slurm.number(trial) not in queue:
            slurm.submit(trial, timeout_minutes)
    absent = collections.Counter()  # a job that is being queued again may be missing for a moment
    waiting = list(trials)
    while waiting and not stops:
        with contextlib.suppress(InputError):  # a controller that is away comes back
            queue = slurm.queue()
            for trial in list(waiting):
                state = queue.get(slurm.number(trial))
                absent[trial] = 0 if state else absent[trial] + 1
                if absent[trial] > 1:
                    board.put(trial, *trial.ended(slurm.exit_code(trial)))
                    waiting.remove(trial)
                elif state:
                    what = f"job {slurm.number(trial)}, {state.lower()}"
                    is_running = state == "RUNNING"
                    board.put(trial, RUNNING if is_running else WAITING, trial.progress() if is_running else what)
        board.draw()
        time.sleep(_POLL_SECONDS)
