"""Trains every config of a folder with several seeds, each trial in its own run folder DIR/ROW/seed_N.

    python -m experiments.sweep table3 --workdir=DIR [--rows=base,a_h1] [--seeds=3] [--set train.train_steps=2000 …]
        [--grid optimizer.warmup_steps=500,1000 …] [--main=SCRIPT]

Rows are the files of the folder; table3 is short for configs/table3. `--set SECTION.FIELD=VALUE` changes a field in all
rows, `--set @NAME` applies configs/presets/NAME.py to all rows. `--grid SECTION.FIELD=V1,V2,…` makes a row for each
value, such as base_warmup_steps_500, and several of them a row for each combination. Tasks, optimisers and other
entries of one's own need a `--main=SCRIPT` that adds them and calls main.run (docs/architecture.md).

All configs are checked before the first trial starts, except with --main: the script alone knows its entries. Trials
with the most steps start first. A sweep may be interrupted at any time: the same command resumes it, each trial from
its last checkpoint. A trial that fails or hangs does not stop the others. The output of each trial is in its log.txt.

Trials run on this machine, one per GPU, without GPUs one per core; `--jobs=N` at a time share them. With
`--launcher=slurm` they run as Slurm jobs, which outlive this command; DIR must then be on a file system that all nodes
share.

Exit codes: 0 all finished, 2 bad arguments, config or data, 3 interrupted, 4 a trial failed or was refused.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from experiments.sweep.local import run_locally, worker_slots
from experiments.sweep.plan import make_trials, script_path
from experiments.sweep.slurm import SlurmQueue, run_on_slurm
from experiments.sweep.status_table import StatusTable
from experiments.sweep.trial_process import POLL_SECONDS, shell_exit_code, signal_on_parent_death
from experiments.sweep.trials import FAILED, INTERRUPTED, MAIN, REFUSED, RUNNING, WAITING, Trial
from t2t_jax import signals, slurm
from t2t_jax.argument_parser import argument_parser
from t2t_jax.errors import InputError, InterruptedRun, exit_code_of
from t2t_jax.files import is_url, try_lock

STANDARD_ERROR = 2


def sweep(options: argparse.Namespace) -> int:
    """Runs the trials that are not done and returns the exit code."""
    trials = trials_of(options)
    # The longest trials first, so that none of them runs alone at the end.
    remaining = sorted((trial for trial in trials if not trial.is_done), key=lambda trial: -trial.train_steps)
    if not options.main:
        check_configs(remaining, on_this_machine=options.launcher == "local")
    if options.dry_run:
        print("".join(f"{shlex.join(trial.command)}\n" for trial in remaining), end="")
        return 0
    launch = make_launcher(options)
    options.workdir.mkdir(parents=True, exist_ok=True)
    requests = signals.Requests()
    with exclusive_lock(options.workdir), signals.handled_by(requests.add):
        prepare_data(remaining, requests)
        table = StatusTable(trials)
        for trial in trials:
            if trial.is_done:
                table.update(trial, *trial.outcome())
        launch(remaining, table, requests)
    return report(table)


def trials_of(options: argparse.Namespace) -> list[Trial]:
    """All trials that the command line names."""
    script = script_path(options.main) if options.main else MAIN
    return make_trials(options.configs, options.workdir, options.rows, options.seeds, options.set, options.grid, script)


def check_configs(trials: Sequence[Trial], on_this_machine: bool) -> None:
    """Refuses what `main.py` would refuse when a trial starts, which may be hours after the first one.

    Unless they run `on_this_machine`, its memory does not count.
    """
    from t2t_jax.training import checks  # loads JAX

    check = checks.check if on_this_machine else checks.check_config
    for trial in trials:
        try:
            check(ConfigDict(trial.settings))
        except InputError as error:
            raise InputError(f"{trial.name}: {error}") from None


def make_launcher(options: argparse.Namespace) -> Callable[[Sequence[Trial], StatusTable, signals.Requests], None]:
    """The function that runs the trials; checks the launcher's options."""
    timeout = options.timeout_minutes
    if not 0 < timeout < math.inf:
        raise InputError(f"--timeout_minutes={timeout}: must be above 0 and finite")
    if options.launcher == "slurm":
        if options.jobs is not None:
            raise InputError(f"--jobs={options.jobs}: is for this machine; with --launcher=slurm, Slurm decides")
        queue = SlurmQueue(options.workdir, slurm.parse_options(options.slurm))
        return lambda trials, table, requests: run_on_slurm(trials, table, queue, timeout, requests)
    if options.slurm:
        raise InputError(f"--slurm={options.slurm}: needs --launcher=slurm")
    slots = worker_slots(options.jobs)
    return lambda trials, table, requests: run_locally(trials, table, slots, timeout, requests)


@contextlib.contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """File lock against a second launcher in this folder."""
    lock = try_lock(folder / ".lock")
    if lock is None:
        raise InputError(f"--workdir: another sweep is running in {folder}; wait for it or choose another")
    with lock:
        yield


def prepare_data(trials: Sequence[Trial], requests: signals.Requests) -> None:
    """Makes each token store once, before several trials try to; `main.py` reports what goes wrong."""
    for trial in {json.dumps(trial.settings["data"], sort_keys=True): trial for trial in trials}.values():
        process = subprocess.Popen(
            trial.prepare_command, stdout=STANDARD_ERROR, preexec_fn=signal_on_parent_death(signal.SIGTERM)
        )
        while process.poll() is None:
            if requests.count:
                process.terminate()
            time.sleep(POLL_SECONDS)
        if requests.count:
            raise InterruptedRun("interrupted while the data was prepared; the same command resumes")
        if process.returncode:
            raise SystemExit(shell_exit_code(process))


def report(table: StatusTable) -> int:
    """Prints the final status and returns the exit code."""
    table.close()
    unfinished = table.count(WAITING) + table.count(RUNNING) + table.count(INTERRUPTED)
    if unfinished or table.count(FAILED):
        others = " or refused" * bool(table.count(REFUSED))
        print(f"the same command resumes the trials that are not finished{others}", file=sys.stderr)
    return 4 if table.count(FAILED) or table.count(REFUSED) else 3 if unfinished else 0


def folder(path: str) -> Path:
    """The value of --workdir."""
    if is_url(path):
        raise argparse.ArgumentTypeError(f"{path} is a URL; give the path of a folder")
    if not path or "," in path:
        raise argparse.ArgumentTypeError(f"{path!r} must be the path of a folder, without a comma")
    return Path(os.path.expanduser(path))  # as main.py does


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser("experiments.sweep", __doc__)
    parser.allow_abbrev = False
    add = parser.add_argument
    add("configs", help="a folder of configs, such as table3")
    add("--workdir", type=folder, required=True, metavar="DIR", help="the folder of the sweep")
    add("--rows", help="train only these rows: a,b,c")
    add("--seeds", type=int, default=1, metavar="N", help="train each row with the seeds 0 to N-1; default: 1")
    add("--set", nargs="+", action="extend", default=[], metavar="CHANGE", help="SECTION.FIELD=VALUE or @PRESET")
    add("--grid", nargs="+", action="extend", default=[], metavar="AXIS", help="SECTION.FIELD=V1,V2,…")
    add("--main", metavar="SCRIPT", help="run this instead of main.py, with the same flags")
    add("--launcher", choices=["local", "slurm"], default="local", help="where the trials run")
    add("--jobs", type=int, metavar="N", help="number of trials at a time on this machine")
    add(
        "--slurm",
        default="",
        metavar="NAME=VALUE,…",
        help="resources of each job, as parameters of submitit's SlurmExecutor; needs time=MINUTES",
    )
    add(
        "--timeout_minutes",
        type=float,
        default=30.0,
        metavar="M",
        help="kill a trial that has written no output for this long; default: 30",
    )
    add("--dry_run", action="store_true", help="print the commands of the trials that are not done, and run nothing")
    return exit_code_of(lambda: sweep(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
