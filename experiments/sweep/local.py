"""Runs trials on this machine: one per GPU, or several that share the GPUs or the CPU cores."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from experiments.sweep.hang_watchdog import HangWatchdog
from experiments.sweep.status_table import StatusTable
from experiments.sweep.trial_process import POLL_SECONDS, shell_exit_code, signal_on_parent_death
from experiments.sweep.trials import FAILED, RUNNING, Trial
from t2t_jax.errors import InputError
from t2t_jax.signals import Requests

_GPU_MEMORY = 0.9  # of a GPU, for all trials that share it


@dataclasses.dataclass(frozen=True)
class WorkerSlot:
    """CPU cores and environment variables (the GPU among them) for one trial at a time."""

    cores: frozenset[int]
    environment: dict[str, str]


def worker_slots(jobs: int | None) -> list[WorkerSlot]:
    """`jobs` slots, which share the cores, the GPUs and their memory; by default one per GPU, without GPUs per core."""
    cores, gpus = sorted(os.sched_getaffinity(0)), visible_gpus()
    limit, of_what = max((len(cores), "cores"), (len(gpus), "GPUs"))
    if jobs is not None and not 1 <= jobs <= limit:
        raise InputError(f"--jobs={jobs}: must be from 1 to {limit}, the number of {of_what}")
    count = jobs or len(gpus) or len(cores)
    of_a_gpu = -(-count // len(gpus)) if gpus else 0
    slots = []
    for n in range(count):
        share = cores[n * len(cores) // count : (n + 1) * len(cores) // count] or cores
        environment = {"OMP_NUM_THREADS": str(len(share))}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = gpus[n % len(gpus)]
        if of_a_gpu > 1:  # JAX would take three quarters of its memory for the first trial
            environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{_GPU_MEMORY / of_a_gpu:.3f}"
        slots.append(WorkerSlot(frozenset(share), environment))
    return slots


def visible_gpus() -> list[str]:
    """The GPUs that JAX may use, named as in CUDA_VISIBLE_DEVICES."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [] if listed.strip() in ("", "-1") else listed.split(",")
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")
    return [line for line in listed if line.isdecimal()]  # where it fails, it says so there


def run_locally(
    trials: Sequence[Trial],
    table: StatusTable,
    slots: Sequence[WorkerSlot],
    timeout_minutes: float,
    requests: Requests,
) -> None:
    """Runs all trials, one per slot at a time.

    The first request to stop interrupts them all, so that they save and exit; the second one kills them.
    """
    waiting, free = {trial: HangWatchdog(trial.folder) for trial in trials}, list(slots)
    running: dict[Trial, tuple[subprocess.Popen, WorkerSlot]] = {}
    forwarded = 0
    while running or (waiting and not requests.count):
        for trial in [] if requests.count else list(waiting):
            if trial.is_locked():  # by a trial of a launcher that was killed, while it saves
                if waiting[trial].silent_minutes() > timeout_minutes:
                    table.update(trial, FAILED, f"another process is training in {trial.folder}; end it")
                    del waiting[trial]
            elif free:
                running[trial] = _start(trial, free[0], timeout_minutes), free.pop(0)
                del waiting[trial]
        for trial, (process, slot) in list(running.items()):
            if process.poll() is None:
                table.update(trial, RUNNING, trial.progress())
                continue
            table.update(trial, *trial.outcome_of_exit(shell_exit_code(process)))
            free.append(slot)
            del running[trial]
        if requests.count > forwarded:  # the second signal kills the supervisors, and their trials die with them
            for process, _ in running.values():
                process.send_signal(signal.SIGKILL if forwarded else signal.SIGTERM)
            forwarded += 1
        table.redraw()
        time.sleep(POLL_SECONDS)


def _start(trial: Trial, slot: WorkerSlot, timeout_minutes: float) -> subprocess.Popen:
    command = [sys.executable, "-m", "experiments.sweep.trial_process", str(trial.folder), str(timeout_minutes)]
    die_with_launcher = signal_on_parent_death(signal.SIGTERM)

    def prepare() -> None:
        os.sched_setaffinity(0, slot.cores)
        die_with_launcher()

    # In a session of its own, so that Ctrl-C on this terminal reaches it through the launcher only.
    return subprocess.Popen(
        command + trial.command, env=os.environ | slot.environment, start_new_session=True, preexec_fn=prepare
    )
