"""Fault injection: kills, damaged files, full disks, lost processes; nothing may be lost, wrong or end in a traceback.

    python -m benchmarks.faults [--output FILE.json] [--kills 100] [--damages 500] [--stops 40] [--only random|tests]

Kills, stop signals and damage are injected at random moments and into random files, as often as asked. All other rows
count the tests of the suite that `ROWS` names, slow ones included; tests that need Slurm run if SLURM_CONF is set. With
the numbers above it takes about an hour on two cores. The exit code is 1 if anything was lost or wrong, or if a test of
these files failed or could not run.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import fault_damage, fault_trials, measure
from benchmarks.fault_trials import SURVIVED, WRONG, Outcome
from benchmarks.measure import at_least
from benchmarks.tiny_experiment import FAST_COMPILATION
from experiments.tables import render
from t2t_jax.errors import exit_code_of

_DISTRIBUTED = "tests/test_processes.py::"
_RESUME, _RUN = "tests/test_resume.py::", "tests/test_run_folder.py::"


@dataclasses.dataclass(frozen=True)
class Row:
    """A kind of fault; `tests` are prefixes of the ids of its tests, in addition to the random trials of its number."""

    number: int
    fault: str
    tests: tuple[str, ...] = ()


ROWS = (
    Row(1, "SIGKILL while a checkpoint is saved", ("tests/test_checkpoints.py::test_a_kill_at_any_point",)),
    Row(2, "SIGKILL at any moment: starting, between steps, at the end", (_RESUME + "test_signals_save",)),
    Row(3, "SIGTERM, SIGINT, SIGUSR2 at any moment; requeued by Slurm",
        ("tests/test_signals.py", "tests/test_slurm.py")),
    Row(4, "a second signal during the save", ("tests/test_signals.py::test_a_second_signal",)),
    Row(5, "one bit flipped, or 4 KiB zeroed, in any file of a run or a store",
        ("tests/test_checkpoints.py::test_every_bit", _RUN + "test_a_flipped_bit",
         "tests/data/test_token_store.py::test_one_flipped_bit")),
    Row(6, "any file truncated or deleted", ("tests/test_checkpoints.py::test_missing_files",)),
    Row(7, "all checkpoints, or the folder, or its manifests gone",
        (_RESUME + "test_a_trained_folder", _RUN + "test_a_trained_run",
         "tests/test_checkpoints.py::test_all_damaged")),
    Row(8, "disk full, read-only, or not to be written to",
        ("tests/test_checkpoints.py::test_a_full_disk", _RUN + "test_a_folder_that_cannot")),
    Row(9, "another model, seed, text, vocabulary or shape at resume",
        (_RESUME + "test_a_refused_resume", _RESUME + "test_resuming_with_other_text",
         "tests/test_checkpoints.py::test_other_shapes", "tests/test_main.py::test_a_vocabulary_that_does_not_fit")),
    Row(10, "NaN or infinity in a loss, a gradient or an update",
        (_RESUME + "test_bad_numbers", _RESUME + "test_an_update",
         "tests/training/test_agreement.py::test_a_number")),
    Row(11, "parameters or data of one device or process differ",
        ("tests/training/test_agreement.py", _DISTRIBUTED + "test_a_difference")),
    Row(12, "a shard of the data truncated or damaged; preparation killed",
        ("tests/data/test_wmt14.py::test_a_damaged", "tests/data/test_wmt14.py::test_a_shard_with_fewer",
         "tests/data/test_token_store.py::test_a_resumed_preparation", "tests/data/test_prepare_killed.py")),
    Row(13, "lines that are not UTF-8, empty, over-long, misaligned, endless",
        ("tests/data/test_corpora.py", "tests/test_files.py", "tests/decoding/test_long_sentences.py",
         "tests/decoding/test_stream.py", "tests/data/test_token_store.py::test_dropped_training_pairs")),
    Row(14, "the loader's thread fails", ("tests/training/test_watchdog.py::test_a_batch_that_cannot",)),
    Row(15, "the loader hangs; the process is stopped and goes on",
        ("tests/training/test_watchdog.py::test_a_hang", "tests/training/test_watchdog.py::test_a_batch_that_never",
         "tests/training/test_watchdog.py::test_time_in_which", "tests/training/test_watchdog.py::test_long")),
    Row(16, "a process of several is killed, stopped or fails", ("tests/test_peers.py", _DISTRIBUTED + "test_a_lost")),
    Row(17, "another number of devices or processes at relaunch",
        ("tests/test_devices.py::test_many_devices", "tests/test_devices.py::test_a_sharded_run",
         _DISTRIBUTED + "test_two_processes", _DISTRIBUTED + "test_processes_save")),
    Row(18, "two launches in one folder; readers beside a trainer",
        (_RESUME + "test_a_second_process", _RESUME + "test_of_two", _RESUME + "test_readers",
         "tests/test_checkpoints.py::test_reading")),
    Row(19, "a download damaged, a cached file swapped",
        ("tests/data/test_wmt14.py::test_a_truncated", "tests/data/test_wmt14.py::test_an_archive_of_the_right_size",
         "tests/data/test_wmt14.py::test_the_hash_of_a_download", "tests/data/test_wmt14.py::test_a_failed_download",
         "tests/data/test_corpora.py::test_a_download_with_another_hash")),
    Row(20, "trials of a sweep crash, hang, are preempted; its launcher is killed",
        ("tests/experiments/test_sweep.py", "tests/experiments/test_trial_process.py",
         "tests/experiments/test_sweep_slurm.py")),
    Row(21, "the wall clock jumps by an hour", (_RESUME + "test_jumps",)),
    Row(22, "hostile run folders, vocabularies, models of other systems, arguments",
        ("tests/interop/test_hostile", "tests/interop/test_memory.py", "tests/data/test_hostile_vocabulary.py",
         "tests/experiments/test_hostile_runs.py", "tests/test_flags.py", "tests/training/test_checks.py")),
)  # fmt: skip


def main() -> int:
    parser = measure.argument_parser("benchmarks.faults", __doc__)
    parser.add_argument("--kills", type=at_least(0), default=100, help="half during saves, half at any moment")
    parser.add_argument("--damages", type=at_least(0), default=500, help="damaged files, half of them by one bit")
    parser.add_argument("--stops", type=at_least(0), default=40, help="signals, half of them followed by a second one")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments and files")
    parser.add_argument("--only", choices=["random", "tests"], help="run only the random trials, or only the tests")
    arguments = parser.parse_args()

    # For the child processes.
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FAST_COMPILATION,
                   "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # fmt: skip
    conditions = measure.conditions(["jax", "orbax-checkpoint", "sentencepiece"]) | {"seed": arguments.seed}
    outcomes, failed = {row.number: Outcome() for row in ROWS}, False
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/compiled")
        if arguments.only != "tests":
            for number, run_trials in _random_trials(Path(folder), arguments).items():
                outcomes[number] += run_trials()
                print(f"row {number}: {outcomes[number]}", file=sys.stderr)
        if arguments.only != "random":
            found, failed = _run_tests(Path(folder))
            for number, outcome in found.items():
                outcomes[number] += outcome
    print(table(outcomes))
    total = sum(outcomes.values(), Outcome())
    results = {"trials": total.trials, "survived": total.survived, "lost": total.lost, "wrong_loads": total.wrong}
    measure.write(arguments.output, conditions, results | _by_row(outcomes))
    return int(failed or total.survived < total.trials)


def _random_trials(folder: Path, arguments: argparse.Namespace) -> dict[int, Callable[[], Outcome]]:
    """The random trials of each row, by row number."""
    kills, stops, damages, seed = arguments.kills // 2, arguments.stops // 2, arguments.damages // 2, arguments.seed
    part_of_file = (fault_damage.flip_a_bit,) * 5 + (fault_damage.zero_a_page,)
    whole_file = (fault_damage.truncate, fault_damage.delete)
    return {
        1: lambda: fault_trials.kills(folder / "saves", kills, seed, "during a save"),
        2: lambda: fault_trials.kills(folder / "kills", kills, seed + 1, "any moment"),
        3: lambda: fault_trials.stops(folder / "stops", stops, seed + 2, twice=False),
        4: lambda: fault_trials.stops(folder / "twice", stops, seed + 3, twice=True),
        5: lambda: fault_damage.damages(folder / "bits", damages, seed + 4, part_of_file),
        6: lambda: fault_damage.damages(folder / "files", damages, seed + 5, whole_file),
        8: lambda: fault_trials.full_disks(folder / "full", max(1, stops // 4), seed + 6),
    }


def _run_tests(folder: Path) -> tuple[dict[int, Outcome], bool]:
    """Outcomes of the tests, by row number, and whether pytest failed, as where a file can't be imported.

    A test may belong to several rows; skipped tests do not count.
    """
    files = sorted({name.partition("::")[0] for row in ROWS for name in row.tests})
    paths = [str(path) for name in files for path in sorted(Path().glob(f"{name}*"))]
    marks = "" if "SLURM_CONF" in os.environ else "not slurm"
    report = folder / "tests.xml"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    command = [sys.executable, "-m", "pytest", "-n", "2", "-m", marks, f"--junitxml={report}", *paths]
    code = subprocess.run(command, env=environment, stdout=sys.stderr).returncode
    found = {row.number: Outcome() for row in ROWS}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"
        failed = case.find("failure") is not None or case.find("error") is not None
        if failed:
            print(f"failed: {name}", file=sys.stderr)
        if case.find("skipped") is None:
            for row in ROWS:
                if name.startswith(row.tests):
                    found[row.number] += WRONG if failed else SURVIVED
    return found, code != 0


def table(outcomes: dict[int, Outcome]) -> str:
    """The fault table in Markdown, with a row of totals."""
    cells: Callable[[Sequence[int]], list[str]] = lambda outcome: [f"{count:,}" for count in outcome]
    rows = [[f"{row.number}. {row.fault}", *cells(outcomes[row.number])] for row in ROWS]
    header = ["fault", "trials", "survived", "lost", "wrong or a traceback"]
    return render(header, [*rows, ["all", *cells(sum(outcomes.values(), Outcome()))]], "markdown")


def _by_row(outcomes: dict[int, Outcome]) -> dict[str, float]:
    numbers = {number: outcome._asdict() for number, outcome in outcomes.items()}
    return {f"row_{number:02}_{name}": x for number, found in numbers.items() for name, x in found.items()}


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
