"""A trial of a sweep: one config with one seed, trained by `main.py`, or a script like it, in its own run folder."""

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from experiments.json_types import NUMBER, check_types, is_number
from experiments.scores import headline
from experiments.sweep.trial_process import HUNG
from t2t_jax.errors import DamagedError, InputError, shown
from t2t_jax.files import flat, read_object, try_lock
from t2t_jax.run_folder import RunFolder, changes, has_effect

WAITING, RUNNING, FINISHED, INTERRUPTED, FAILED = "waiting", "running", "finished", "interrupted", "failed"
REFUSED = "refused"  # until what its message names is corrected

MAIN = Path(__file__).parents[2] / "main.py"
_TAIL_BYTES = 8192  # read at the end of a log
_INTERRUPTED_CODES = (3, 128 + signal.SIGINT, 128 + signal.SIGTERM)  # the same command resumes


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """`changes` are the config fields set on the command line, `settings` is the whole resulting config.

    `script` has the command line of main.py.
    """

    name: str
    folder: Path
    config: Path
    changes: dict[str, str]
    settings: dict[str, Any]
    script: Path = MAIN

    @property
    def command(self) -> list[str]:
        """The command that trains it, as a person would type it."""
        return self._main(f"--config={self.config}", f"--workdir={self.folder}", *self._flags())

    @property
    def prepare_command(self) -> list[str]:
        """The command that only prepares its data."""
        return self._main("--mode=prepare", f"--config={self.config}", *self._flags())

    def _main(self, *arguments: str) -> list[str]:
        return [sys.executable, os.path.relpath(self.script), *arguments]

    def _flags(self) -> list[str]:
        return [f"--config.{field}={value}" for field, value in self.changes.items()]

    @property
    def train_steps(self) -> int:
        return self.settings["train"]["train_steps"]

    @property
    def result(self) -> dict[str, Any] | None:
        """Its result.json; None unless it was trained for all of its steps."""
        path = self.folder / "result.json"
        result = _read_object(path) if path.is_file() else {}
        return result if result.get("steps") == self.train_steps else None

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to train. A damaged result counts as one, so that it is not overwritten."""
        try:
            return self.result is not None
        except DamagedError:
            return True

    def outcome(self) -> tuple[str, str]:
        """State and scores of a trial that is done; refused where the result is damaged or of another config."""
        try:
            problem = self._config_mismatch()
            return (REFUSED, problem) if problem else (FINISHED, self._scores())
        except (DamagedError, InputError) as error:
            return REFUSED, f"{error}; delete its folder to train it again"

    def _config_mismatch(self) -> str | None:
        """A setting that differs from the trained one, if any. For unfinished trials `main.py` makes this check."""
        trained, wanted = flat(RunFolder.open(self.folder).config), flat(self.settings)
        for field, value in sorted(changes(wanted, trained).items()):
            if has_effect(field, self.settings):
                return (
                    f"{field} is {value!r}, but {self.folder} is finished with {shown(trained.get(field))}; "
                    "give the same values with --set or choose another --workdir"
                )
        return None

    def is_locked(self) -> bool:
        """Whether a process is training in its folder."""
        path = self.folder / ".lock"
        if not path.is_file():
            return False
        lock = try_lock(path)
        if lock:
            lock.close()
        return lock is None

    def progress(self) -> str:
        """Step, loss and speed, from the last line of metrics.jsonl that has them."""
        records = [record for record in map(_training_record, _tail(self.folder / "metrics.jsonl")) if record]
        if not records:
            return ""
        last = records[-1]
        speed = f"{last['target_tokens_per_second']:,.0f} target tokens/s"
        return f"step {last['step']:,}/{self.train_steps:,}, loss {last['loss']:.3f}, {speed}"

    def _scores(self) -> str:
        """Perplexity, where there is one, and the headline score of each split."""
        lines = []
        for split in ("dev", "test"):
            if split in self.result:
                where = f"{self.folder}/result.json: {split}"
                scores = check_types(self.result[split], {"perplexity": NUMBER}, where)
                perplexity = f"perplexity {scores['perplexity']:.2f}, " if "perplexity" in scores else ""
                lines.append(f"{split} {perplexity}{headline(scores, where)}")
        return "; ".join(lines)

    def outcome_of_exit(self, code: int | None) -> tuple[str, str]:
        """State and details after its process has exited; `code` is None where it is unknown."""
        if self.is_done:
            return self.outcome()
        last_line = " ".join(_tail(self.folder / "log.txt")[-1:])
        if code in _INTERRUPTED_CODES:  # for example by the watchdog of `main.py`
            return INTERRUPTED, "; ".join(filter(None, [self.progress(), last_line]))
        if code == InputError.exit_code:
            return REFUSED, last_line
        if code is None:
            return FAILED, "its job is gone without an exit code: cancelled, or the node failed"
        if code == HUNG:
            return FAILED, "hung: it stopped writing output, so it was killed"
        reason = f"killed by {_signal_name(code - 128)}" if code > 128 else f"exit code {code}"
        return FAILED, f"{reason}: {last_line}"


def _signal_name(number: int) -> str:
    known = {each.value for each in signal.Signals}
    return signal.Signals(number).name if number in known else f"signal {number}"


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run."""
    try:
        return read_object(path)
    except OSError as error:
        raise DamagedError(f"{path} can't be read: {error.strerror}") from None


def _training_record(line: str) -> dict[str, Any] | None:
    """The record of a training step in a line of metrics.jsonl; None for other and for unfinished lines."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    required = ("step", "loss", "target_tokens_per_second")
    return record if isinstance(record, dict) and all(is_number(record.get(field)) for field in required) else None


def _tail(path: Path) -> list[str]:
    """The last lines, without blank ones, of a file that another process may be writing."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read().decode("utf-8", "replace")
    return [line.strip() for line in text.replace("\r", "\n").split("\n") if line.strip()]
