"""Trains every config of a folder with several seeds, one run folder each: DIR/ROW/seed_N.

    python -m experiments.sweep table3 --workdir=DIR [--rows=base,a_h1] [--seeds=3] [--set train.train_steps=2000 …]

Rows are the files of the folder; table3 is short for configs/table3. `--set SECTION.FIELD=VALUE` changes all of them,
`--set @NAME` as configs/presets/NAME.py does. Those of most steps start first. Interrupt it whenever you like: the same
command trains what is missing, each trial from its last checkpoint. A trial that fails or hangs does not stop the
others. Each writes to its log.txt.

Trials run on this machine, one on each GPU; without GPUs `--jobs` of them share the cores. With `--launcher=slurm` they
are jobs, whether this command lives or not; DIR must then be on a disk that the nodes share.

Exit codes: 0 all finished, 2 bad arguments, config or data, 3 interrupted, 4 a trial failed.
"""

import argparse
import contextlib
import importlib
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
from typing import Any

import main as command_line
from experiments.launchers import Slurm, Stops, local_slots, run_locally, run_on_slurm
from experiments.trial_process import POLL_SECONDS, ending_with_parent, exit_code
from experiments.trials import FAILED, INTERRUPTED, RUNNING, WAITING, Board, Trial
from t2t_jax import signals
from t2t_jax.errors import InputError, InterruptedRun, choice, exit_code_of
from t2t_jax.files import flat, hold

CONFIGS = Path(os.path.relpath(Path(__file__).parents[1] / "configs"))
STANDARD_ERROR = 2


# --- From the arguments to the trials ----------------------------------------------------------------------


def plan(folder: str, workdir: Path, rows: str | None, seeds: int, settings: Sequence[str]) -> list[Trial]:
    """The trials of a sweep: all rows with the first seed, then all with the second."""
    if not 1 <= seeds <= 10_000:
        raise InputError(f"--seeds={seeds}: must be at least 1, the number of seeds, and at most 10000")
    presets, values = read_settings(settings)
    files = row_files(folder, rows)
    changes = {row: preset_changes(path, presets) | values for row, path in files.items()}
    return [
        make_trial(f"{row}/seed_{seed}", workdir, path, changes[row] | {"train.seed": str(seed)})
        for seed in range(seeds)
        for row, path in files.items()
    ]


def row_files(folder: str, rows: str | None) -> dict[str, Path]:
    """The config file of each row: those asked for, or all."""
    path = Path(folder) if Path(folder).is_dir() else CONFIGS / folder
    files = {file.stem: file for file in sorted(path.glob("*.py")) if file.stem != "__init__"}
    if not files:
        raise InputError(f"{folder}: not a folder of configs; table3 is one")
    return files if rows is None else {row: files[choice("--rows", row, files)] for row in rows.split(",")}


def read_settings(settings: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The names of presets, and {field: value}. A preset comes before any value, wherever it stands."""
    known = [file.stem for file in (CONFIGS / "presets").glob("*.py") if file.stem != "__init__"]
    presets = [choice("--set", setting[1:], known) for setting in settings if setting.startswith("@")]
    values = {}
    for setting in settings:
        field, is_given, value = setting.partition("=")
        if setting.startswith("@"):
            continue
        if not is_given:
            raise InputError(f"--set {setting}: must be SECTION.FIELD=VALUE, as in train.train_steps=2000, or @PRESET")
        if field == "train.seed":
            raise InputError(f"--set {setting}: each trial has its own seed; --seeds=N makes them 0 to N-1")
        values[field] = value
    return presets, values


def preset_changes(path: Path, presets: Sequence[str]) -> dict[str, str]:
    """What the presets change in the config of this file."""
    config = parse(path, {})
    before = flat(config.to_dict())
    for preset in presets:
        importlib.import_module(f"configs.presets.{preset}").apply(config)
    return {field: str(value) for field, value in flat(config.to_dict()).items() if value != before[field]}


def make_trial(name: str, workdir: Path, path: Path, changes: dict[str, str]) -> Trial:
    """Refuses values that `main.py` would refuse to read."""
    return Trial(name, workdir / name, path, changes, parse(path, changes).to_dict())


def parse(path: Path, changes: dict[str, str]) -> Any:
    """The configuration that `main.py` would see."""
    flags = [f"--config.{field}={value}" for field, value in changes.items()]
    return command_line.parse(["main.py", f"--config={path}", *flags]).config


# --- Running them ------------------------------------------------------------------------------------------


def sweep(options: argparse.Namespace) -> int:
    """Runs what is missing, and returns the exit code."""
    trials = plan(options.configs, options.workdir, options.rows, options.seeds, options.set)
    # Those of most steps first, or one of them would still be running long after all others.
    missing = sorted((trial for trial in trials if not trial.is_over), key=lambda trial: -trial.train_steps)
    if options.dry_run:
        print("".join(f"{shlex.join(trial.command)}\n" for trial in missing), end="")
        return 0
    launch = choose_launcher(options)
    options.workdir.mkdir(parents=True, exist_ok=True)
    with alone(options.workdir), stop_signals() as stops:
        prepare(missing, stops)
        board = Board(trials)
        for trial in trials:
            if trial.is_over:
                board.put(trial, *trial.outcome())
        launch(missing, board, stops)
    return report(board)


def choose_launcher(options: argparse.Namespace) -> Callable[[Sequence[Trial], Board, Stops], None]:
    """What runs the trials, its options checked."""
    timeout = options.timeout_minutes
    if not 0 < timeout < math.inf:
        raise InputError(f"--timeout_minutes={timeout}: must be above 0 and finite")
    if options.launcher == "slurm":
        if options.jobs is not None:
            raise InputError(f"--jobs={options.jobs}: is for this machine; with --launcher=slurm, Slurm decides")
        slurm = Slurm(options.workdir, key_values("--slurm", options.slurm))
        return lambda trials, board, stops: run_on_slurm(trials, board, slurm, timeout, stops)
    if options.slurm:
        raise InputError(f"--slurm={options.slurm}: needs --launcher=slurm")
    slots = local_slots(options.jobs)
    return lambda trials, board, stops: run_locally(trials, board, slots, timeout, stops)


def key_values(option: str, text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if not all(value for _, _, value in pairs):
        raise InputError(f"{option}={text}: must be NAME=VALUE with commas between, as in partition=main,time=60")
    return {name: value for name, _, value in pairs}


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keeps a second launcher out of this folder."""
    lock = hold(folder / ".lock")
    if lock is None:
        raise InputError(f"--workdir: another sweep is running in {folder}; wait for it or choose another")
    with lock:
        yield


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The signals that have asked it to stop, one for each request."""
    received, requests = [], signals.Requests()

    def note(number: int) -> None:
        if requests.add(number) > len(received):
            received.append(number)

    with signals.answered(note):
        yield received


def prepare(trials: Sequence[Trial], stops: Stops) -> None:
    """Makes the token stores before the trials could all start to; what goes wrong there, `main.py` says."""
    for trial in {json.dumps(trial.settings["data"], sort_keys=True): trial for trial in trials}.values():
        process = subprocess.Popen(
            trial.prepare_command, stdout=STANDARD_ERROR, preexec_fn=ending_with_parent(signal.SIGTERM)
        )
        while process.poll() is None:
            if stops:
                process.terminate()
            time.sleep(POLL_SECONDS)
        if stops:
            raise InterruptedRun("interrupted while the data was prepared; the same command goes on")
        if process.returncode:
            raise SystemExit(exit_code(process))


def report(board: Board) -> int:
    """Says how it ended, and returns the exit code."""
    board.close()
    left = board.count(WAITING) + board.count(RUNNING) + board.count(INTERRUPTED)
    if left or board.count(FAILED):
        print("the same command goes on with those that are not finished", file=sys.stderr)
    return 4 if board.count(FAILED) else 3 if left else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("configs", help="a folder of configs, such as table3")
    add("--workdir", type=Path, required=True, metavar="DIR", help="the folder of the sweep")
    add("--rows", help="train these alone: a,b,c")
    add("--seeds", type=int, default=1, metavar="N", help="train each with the seeds 0 to N-1")
    add("--set", nargs="+", action="extend", default=[], metavar="CHANGE", help="SECTION.FIELD=VALUE or @PRESET")
    add("--launcher", choices=["local", "slurm"], default="local", help="where the trials run")
    add("--jobs", type=int, metavar="N", help="trials at a time on this machine")
    add(
        "--slurm",
        default="",
        metavar="NAME=VALUE,…",
        help="what each job asks for, as submitit calls it; needs time=MINUTES",
    )
    add(
        "--timeout_minutes",
        type=float,
        default=30.0,
        metavar="M",
        help="a trial that writes nothing for so long is killed",
    )
    add("--dry_run", action="store_true", help="print the commands of the trials that are missing, and do nothing")
    options = parser.parse_args(argv)
    return exit_code_of(lambda: sweep(options))


if __name__ == "__main__":
    sys.exit(main())
