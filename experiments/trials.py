"""A trial: one config with one seed, trained by `main.py` in a folder of its own; and how all of them stand."""

import dataclasses
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.kinds import NUMBER, check_kinds, is_number
from t2t_jax.errors import DamagedError, shown
from t2t_jax.files import flat, hold, read_object

WAITING, RUNNING, FINISHED, INTERRUPTED, FAILED = "waiting", "running", "finished", "interrupted", "failed"

HUNG = 124  # the exit code of a trial that was ended because it wrote nothing for too long
_TAIL = 8192  # bytes at the end of a file
_STOPPED = (3, 128 + 2, 128 + 15)  # exit codes of a trial that was told to stop; the same command goes on


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """`changes` are the fields that the command line gives, `settings` the whole configuration they lead to."""

    name: str
    folder: Path
    config: Path
    changes: dict[str, str]
    settings: dict[str, Any]

    @property
    def command(self) -> list[str]:
        """What a person would type."""
        return self._main(f"--config={self.config}", f"--workdir={self.folder}", *self._flags())

    @property
    def prepare_command(self) -> list[str]:
        """Prepares the same data, and nothing else."""
        return self._main("--mode=prepare", f"--config={self.config}", *self._flags())

    def _main(self, *arguments: str) -> list[str]:
        return [sys.executable, os.path.relpath(Path(__file__).parents[1] / "main.py"), *arguments]

    def _flags(self) -> list[str]:
        return [f"--config.{field}={value}" for field, value in self.changes.items()]

    @property
    def train_steps(self) -> int:
        return self.settings["train"]["train_steps"]

    @property
    def result(self) -> dict[str, Any] | None:
        """What it has achieved; None unless it has been trained for all of its steps."""
        result = _object(self.folder / "result.json") if (self.folder / "result.json").is_file() else {}
        return result if result.get("steps") == self.train_steps else None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to train: it has a result, or one that is damaged, which is not overwritten."""
        try:
            return self.result is not None
        except DamagedError:
            return True

    def outcome(self) -> tuple[str, str]:
        """State and scores of a trial that is over; a damaged result, or one with other settings, is none."""
        try:
            problem = self._disagreement()
            return (FAILED, problem) if problem else (FINISHED, self._scores())
        except DamagedError as error:
            return FAILED, f"{error}; with its folder removed it is trained again"

    def _disagreement(self) -> str | None:
        """Which setting it was not trained with, if there is one; of unfinished trials `main.py` says that."""
        trained, asked = flat(_object(self.folder / "config.json")), flat(self.settings)
        for field in trained.keys() & asked.keys():
            if trained[field] != asked[field]:
                return (
                    f"{field} is {asked[field]!r}, but {self.folder} is finished with {shown(trained[field])}; "
                    "give the same values with --set or choose another --workdir"
                )
        return None

    def is_held(self) -> bool:
        """Whether a process is training in its folder."""
        path = self.folder / ".lock"
        if not path.is_file():
            return False
        lock = hold(path)
        if lock:
            lock.close()
        return lock is None

    def progress(self) -> str:
        """How far it is, from the lines that it logs."""
        lines = _tail(self.folder / "metrics.jsonl")
        trained = [record for record in map(_logged, lines) if record]
        if not trained:
            return ""
        last = trained[-1]
        pace = f"{last['target_tokens_per_second']:,.0f} target tokens/s"
        return f"step {last['step']:,}/{self.train_steps:,}, loss {last['loss']:.3f}, {pace}"

    def _scores(self) -> str:
        shown_scores, kinds = [], {"perplexity": NUMBER, "sacrebleu": NUMBER}
        for split in ("dev", "test"):
            if split in self.result:
                of = check_kinds(self.result[split], kinds, f"{self.folder}/result.json: {split}", kinds)
                shown_scores.append(f"{split} perplexity {of['perplexity']:.2f}, BLEU {of['sacrebleu']:.1f}")
        return "; ".join(shown_scores)

    def ended(self, code: int | None) -> tuple[str, str]:
        """State and explanation of one whose process is gone; without a code the process could not say."""
        if self.is_over:
            return self.outcome()
        last = " ".join(_tail(self.folder / "log.txt")[-1:])
        if code in _STOPPED:  # for example by its own watchdog
            return INTERRUPTED, "; ".join(filter(None, [self.progress(), last]))
        if code is None:
            return FAILED, "its job is gone without an exit code: cancelled, or the node failed"
        if code == HUNG:
            return FAILED, "hung: nothing was written any more, so it was killed"
        how = f"killed by {_signal_name(code - 128)}" if code > 128 else f"exit code {code}"
        return FAILED, f"{how}: {last}"


def _signal_name(number: int) -> str:
    known = {each.value for each in signal.Signals}
    return signal.Signals(number).name if number in known else f"signal {number}"


def _object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a run."""
    try:
        return read_object(path)
    except OSError as error:
        raise DamagedError(f"{path} can't be read: {error.strerror}") from None


def _logged(line: str) -> dict[str, Any] | None:
    """What a line of metrics.jsonl says of the training; None of other lines, and of half a line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    needed = ("step", "loss", "target_tokens_per_second")
    return record if isinstance(record, dict) and all(is_number(record.get(field)) for field in needed) else None


def _tail(path: Path) -> list[str]:
    """The last lines, blank ones left out, of a file that another process is writing."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        text = file.read().decode("utf-8", "replace")
    return [line.strip() for line in text.replace("\r", "\n").split("\n") if line.strip()]


class Silence:
    """How long a trial has written nothing, on the monotonic clock."""

    def __init__(self, folder: Path):
        self._files = [folder / name for name in ("log.txt", "metrics.jsonl")]
        self._sizes, self._since = None, time.monotonic()

    def minutes(self) -> float:
        sizes = [path.stat().st_size if path.is_file() else 0 for path in self._files]
        if sizes != self._sizes:
            self._sizes, self._since = sizes, time.monotonic()
        return (time.monotonic() - self._since) / 60


class Board:
    """Shows how the trials stand: a table redrawn in place on a terminal, elsewhere a line per change of state."""

    def __init__(self, trials: Sequence[Trial]):
        self._rows = {trial.name: (WAITING, "") for trial in trials}
        self._on_terminal = sys.stderr.isatty()
        self._height, self._drawn = 0, -math.inf

    def put(self, trial: Trial, state: str, explanation: str = "") -> None:
        """Notes how a trial stands."""
        changed = state != self._rows[trial.name][0]
        self._rows[trial.name] = state, explanation
        if changed and not self._on_terminal:
            print(f"{trial.name}: {state}{f', {explanation}' if explanation else ''}", file=sys.stderr, flush=True)

    def draw(self) -> None:
        """Redraws the table, on a terminal, once a second."""
        if self._on_terminal and time.monotonic() - self._drawn >= 1:
            self._draw(self._shown(max(1, shutil.get_terminal_size().lines - 2)))

    def close(self) -> None:
        """The last word: everything on a terminal, elsewhere how many ended how."""
        if self._on_terminal:
            self._draw(list(self._rows.items()))
        else:
            print(self.summary(), file=sys.stderr, flush=True)

    def _draw(self, rows: list[tuple[str, tuple[str, str]]]) -> None:
        columns, width = shutil.get_terminal_size().columns, max(map(len, self._rows))
        table = [f"{name:<{width}}  {state:<11}  {text}"[: columns - 1] for name, (state, text) in rows]
        back = f"\x1b[{self._height}A" if self._height else ""
        print(back + "\x1b[J" + "\n".join([*table, self.summary()]), file=sys.stderr, flush=True)
        self._height, self._drawn = len(table) + 1, time.monotonic()

    def _shown(self, room: int) -> list[tuple[str, tuple[str, str]]]:
        """All trials in order, or those that fit, what happens now before what is over or to come."""
        rows = list(self._rows.items())
        if len(rows) > room:
            rows.sort(key=lambda row: (RUNNING, FAILED, INTERRUPTED, FINISHED, WAITING).index(row[1][0]))
        return rows[:room]

    def count(self, state: str) -> int:
        return sum(row[0] == state for row in self._rows.values())

    def summary(self) -> str:
        states = (FINISHED, RUNNING, WAITING, INTERRUPTED, FAILED)
        return ", ".join(f"{self.count(state)} {state}" for state in states if self.count(state))
