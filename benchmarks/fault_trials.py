"""Fault trials of `benchmarks.faults`: kills, stop signals and full disks at random moments of training."""

import contextlib
import functools
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tiny_experiment import Command, Experiment

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class Outcome(NamedTuple):
    """Counts of trials: survived the fault, lost a saved checkpoint, or had a wrong result or a traceback."""

    trials: int = 0
    survived: int = 0
    lost: int = 0
    wrong: int = 0

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(*(a + b for a, b in zip(self, other, strict=True)))


SURVIVED, LOST, WRONG = Outcome(1, 1), Outcome(1, 0, 1), Outcome(1, 0, 0, 1)


# --- The state of a run ------------------------------------------------------------------------------------


def digest(tree: Any) -> str:
    """SHA-256 of the paths and arrays of a pytree."""
    import jax
    import numpy as np

    found = hashlib.sha256()
    for path, x in jax.tree.leaves_with_path(tree):
        found.update(jax.tree_util.keystr(path).encode() + np.ascontiguousarray(x).tobytes())
    return found.hexdigest()


def final_state(run: Path) -> dict[str, Any]:
    """Everything that a fault must not change: parameters, order of the batches, losses, scores."""
    from t2t_jax.checkpoints import Checkpoints

    checkpoints = Checkpoints(run / "checkpoints")
    step = checkpoints.newest_good(1)[0]
    saved = checkpoints.restore(step)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "step": step,
        "params": digest(saved.params),
        "batches": saved.metadata["progress"]["batches_checksum"],
        "losses": [(record["step"], record["loss"]) for record in records if "loss" in record],
        "result": json.loads((run / "result.json").read_text())["test"],
    }


# --- Trials ------------------------------------------------------------------------------------------------


def kills(folder: Path, count: int, seed: int, moment: str) -> Outcome:
    """Sends `count` SIGKILLs in all, 'during a save' or at 'any moment', and resumes each run until it finishes.

    After each kill the newest good checkpoint must be no older than before; the final state must be that of an
    undisturbed run.
    """
    rng, experiment = random.Random(seed), Experiment(folder)
    expected, duration = _undisturbed(folder.parent)
    outcome, number = Outcome(), 0
    while outcome.trials < count:
        run, newest, number = folder / f"killed_{number}", 0, number + 1
        while True:
            process = experiment.start(run.name)
            if outcome.trials < count:
                if moment == "during a save":
                    wait_for_save(process, run, rng)
                else:
                    process.run_for(rng.uniform(0, duration))
                process.signal(signal.SIGKILL)
            code, log = process.wait()
            if code != -signal.SIGKILL:
                break
            good = newest_good(run)
            outcome += LOST if good < newest else _wrong(log) if "Traceback" in log else SURVIVED
            newest = good
        outcome += Outcome(0, -1, 0, 1) if code else _compare(run, expected)
        shutil.rmtree(run)
    return outcome


def wait_for_save(process: Command, run: Path, rng: random.Random) -> None:
    """Waits for a random moment of a save."""
    polls_to_skip = rng.randrange(12)
    while process.is_running:
        unfinished = [path for path in run.glob("checkpoints/*") if not path.name.isdecimal()]
        if unfinished and polls_to_skip == 0:
            time.sleep(rng.uniform(0, 0.05))
            return
        polls_to_skip -= bool(unfinished) and polls_to_skip > 0
        time.sleep(0.001)


def newest_good(run: Path) -> int:
    """The step of the newest undamaged checkpoint; 0 without one."""
    from t2t_jax.checkpoints import Checkpoints

    return next(iter(Checkpoints(run / "checkpoints").newest_good(1)), 0)


def stops(folder: Path, count: int, seed: int, twice: bool) -> Outcome:
    """Sends stop signals at random moments, or two, the second during the save, and resumes with the same command."""
    rng, experiment = random.Random(seed), Experiment(folder)
    expected, duration = _undisturbed(folder.parent)
    outcome, number = Outcome(), 0
    while outcome.trials < count:
        run, number = folder / f"stopped_{number}", number + 1
        while True:
            process = experiment.start(run.name)
            if outcome.trials < count:
                process.run_for(rng.uniform(0.2, duration))  # after it has installed its signal handlers
                process.signal(rng.choice(_STOP_SIGNALS))
                if twice:  # more than a second later: signals within a second count as one request
                    process.run_for(rng.uniform(1, 1.5))
                    process.signal(rng.choice(_STOP_SIGNALS))
            code, log = process.wait()
            if code == 0:
                break
            outcome += SURVIVED if code == 3 and "Traceback" not in log else _wrong(f"exit code {code}: {log}")
        outcome += _compare(run, expected)
        shutil.rmtree(run)
    return outcome


def full_disks(folder: Path, count: int, seed: int) -> Outcome:
    """Fills the disk during training: one line of error, and once there is space the same command finishes the run.

    Needs the permission to mount a tmpfs; without it there are no trials.
    """
    rng, experiment = random.Random(seed), Experiment(folder)
    (expected, _), outcome = _undisturbed(folder.parent), Outcome()
    run = folder / "disk" / "run"
    run.parent.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(run.parent)], capture_output=True)
    for _ in range(0 if mounted.returncode else count):
        process = experiment.start("disk/run")
        while process.is_running and not (run / "last_saved.json").exists():
            time.sleep(0.01)
        wait_for_save(process, run, rng)
        with contextlib.suppress(OSError), (run.parent / "filler").open("wb", buffering=0) as filler:
            while process.is_running:
                filler.write(bytes(1 << 12))
        code, log = process.wait()
        is_one_line = code == 2 and "No space left on device" in log.splitlines()[-1] and "Traceback" not in log
        outcome += LOST if newest_good(run) == 0 else SURVIVED if is_one_line else _wrong(log)
        (run.parent / "filler").unlink()
        experiment.train("disk/run")
        outcome += _compare(run, expected)
        shutil.rmtree(run)
    if not mounted.returncode:
        subprocess.run(["umount", "--lazy", str(run.parent)], check=True)
    return outcome


@functools.cache
def _undisturbed(folder: Path) -> tuple[dict[str, Any], float]:
    """The final state of a run without faults, trained below `folder`, and its seconds."""
    start = time.monotonic()
    return final_state(Experiment(folder / "undisturbed").train("run")), time.monotonic() - start


def _compare(run: Path, expected: dict[str, Any]) -> Outcome:
    """Counts the last trial of a run as wrong instead of survived if its final state is not the expected one."""
    found = final_state(run)
    if found == expected:
        return Outcome()
    _wrong(f"{run}: {found} in place of {expected}")
    return Outcome(0, -1, 0, 1)


def _wrong(what: str) -> Outcome:
    print(what, file=sys.stderr)
    return WRONG
