"""Runs sweeps of tiny experiments as real commands."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.tiny_experiment import FAST_COMPILATION, config_source
from t2t_jax.threads import available_cores
from tests.runs import tiny_config
from tests.test_resume import saved_steps

ROOT = Path(__file__).parents[2]
TWO_AT_ONCE = ["--jobs=2"] if available_cores() > 1 else []  # more trials than cores are refused


class Sweep:
    """A folder of configs, one per row, and the folder of the sweep that trains them."""

    def __init__(self, directory: Path, **rows: dict[str, Any]):
        """Each row is given by the fields, SECTION__FIELD, that differ from the tiny experiment."""
        self.configs, self.workdir, self._log = directory / "rows", directory / "sweep", directory / "stderr"
        self.configs.mkdir()
        fields = tiny_config(directory).to_dict()
        for name, changes in rows.items():
            row = {section: dict(values) for section, values in fields.items()}
            for field, value in changes.items():
                section, key = field.split("__")
                row[section][key] = value
            # Unlike a call of tiny_config, this writes nothing when several processes read it at the same time.
            (self.configs / f"{name}.py").write_text(config_source(row))
        speed = {"XLA_FLAGS": FAST_COMPILATION, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        self._environment = os.environ | speed | {"JAX_PLATFORMS": "cpu"}

    def start(self, *arguments: str) -> subprocess.Popen:
        command = [
            sys.executable,
            "-m",
            "experiments.sweep",
            str(self.configs),
            f"--workdir={self.workdir}",
            *arguments,
        ]
        with self._log.open("w") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=self._environment, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def run(self, *arguments: str) -> int:
        return self.start(*arguments).wait(240)

    def errors(self) -> str:
        """Standard error of the last command."""
        return self._log.read_text()

    def damage(self, row: str) -> None:
        """Makes a trial fail when it starts, whatever its config."""
        self.trial(row).mkdir(parents=True)
        (self.trial(row) / "config.json").write_text("{")

    def trial(self, row: str) -> Path:
        return self.workdir / row / "seed_0"

    def log(self, row: str) -> str:
        return (self.trial(row) / "log.txt").read_text()

    def finished_at(self, row: str) -> int:
        return (self.trial(row) / "result.json").stat().st_mtime_ns

    def saved(self, row: str) -> int:
        """The step of the newest checkpoint; -1 without one."""
        return max(saved_steps(self.trial(row)), default=-1)

    def process(self, row: str) -> int | None:
        """The id of the process that trains a row, if it is running."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode().split("\0")
            except OSError:  # the process has exited
                continue
            if words[1:2] == ["main.py"] and f"--workdir={self.trial(row)}" in words:
                return int(path.parent.name)
        return None

    def wait(self, condition: Callable[[], Any], seconds: float = 120) -> Any:
        """Waits until `condition()` is true and returns its value."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, self.errors()
            time.sleep(0.05)
        return found
