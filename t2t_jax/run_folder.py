"""What a run leaves behind: config.json, vocab.model, metrics.jsonl and TensorBoard events, result.json.

Reading a run never executes code: everything but the weights is JSON or a SentencePiece model.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import tensorboardX

from t2t_jax.errors import InputError
from t2t_jax.files import flat, hold, read_json, write_json, write_lines

# What may change between the parts of a run that was stopped and resumed: nothing that moves the weights. Where
# text lies may change, since checkpoints name the text itself.
_FREE_SECTIONS = ("checkpoint", "decode", "evaluate", "machine")
_FREE_FIELDS = ("train.train_steps", "train.log_interval", "train.accumulate", "data.directory", "data.train",
                "data.dev", "data.test")  # fmt: skip


class RunFolder:
    """Paths and small files of one run. Of several processes, one `writes`."""

    def __init__(self, path: str | Path, writes: bool = True):
        self.path, self.writes = Path(path), writes
        self.vocabulary = self.path / "vocab.model"
        self.checkpoints = self.path / "checkpoints"
        self.averaged = self.path / "averaged"
        self.result = self.path / "result.json"
        self._metrics = self.path / "metrics.jsonl"
        self._config = self.path / "config.json"
        self._events = None
        self._lock = None

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """A run that exists; refuses other folders."""
        run = cls(path)
        if not run._config.is_file():
            raise InputError(f"workdir: {path} is not a run folder (no config.json); train one with --config=…")
        return run

    @classmethod
    def start(cls, path: str | Path, config: dict[str, Any], writes: bool = True) -> "RunFolder":
        """The folder of a run about to train: new, or one with the same config to resume. The writer locks it."""
        run = cls(path, writes)
        run.path.mkdir(parents=True, exist_ok=True)
        if writes:
            run._lock_folder()
        if run._config.is_file():
            run._check_same(config)
        if writes:
            write_json(run._config, config)
        return run

    def _lock_folder(self) -> None:
        self._lock = hold(self.path / ".lock")
        if self._lock is None:
            raise InputError(f"workdir: another process is training in {self.path}; choose another folder")

    def _check_same(self, config: dict[str, Any]) -> None:
        old, new = flat(self.config), flat(config)
        for field in sorted(old.keys() | new.keys()):
            free = field in _FREE_FIELDS or field.split(".")[0] in _FREE_SECTIONS
            if not free and old.get(field) != new.get(field):
                raise InputError(
                    f"{field} is {new.get(field)!r}, but {self.path} was trained with {old.get(field)!r}; "
                    "resume with the same value or choose another --workdir"
                )

    @property
    def config(self) -> dict[str, Any]:
        """The run's whole configuration, as plain values."""
        return read_json(self._config)

    def decode_options(self, **given: Any) -> dict[str, Any]:
        """The run's own options of decoding, replaced by those `given` that are not None."""
        return self.config["decode"] | {name: value for name, value in given.items() if value is not None}

    def copy_vocabulary(self, source: Path) -> None:
        """Keeps the vocabulary with the run, so that reading it needs nothing else."""
        partial = self.vocabulary.with_suffix(".partial")
        shutil.copyfile(source, partial)
        os.replace(partial, self.vocabulary)

    def start_metrics(self, step: int) -> None:
        """Opens the logs to go on after `step`, dropping what an interrupted run logged beyond it."""
        if not self.writes:
            return
        if self._metrics.is_file():
            lines = self._metrics.read_text().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            write_lines(self._metrics, [line.removesuffix("\n") for line in kept])
        self._events = tensorboardX.SummaryWriter(str(self.path / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, **metrics: float) -> None:
        """Appends one line to metrics.jsonl and the same numbers to TensorBoard."""
        if not self.writes:
            return
        with self._metrics.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes the logs and lets others have the folder."""
        if self._events:
            self._events.close()
        if self._lock:
            self._lock.close()
