"""Sweeps of tiny experiments, run as commands."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.runs import tiny_config
from tests.test_resume import saved_steps

ROOT = Path(__file__).parents[2]

# A row's file writes nothing, unlike tiny_config: several processes read it at a time.
ROW = """
from configs import base_ende

def get_config():
    config = base_ende.get_config()
    for section, fields in {fields!r}.items():
        config[section].update(fields)
    return config
"""


class Sweep:
    """A folder of rows, and of what they train to."""

    def __init__(self, directory: Path, **rows: dict[str, Any]):
        """Each row is given by its changes to the tiny experiment."""
        self.configs, self.workdir, self._log = directory / "rows", directory / "sweep", directory / "stderr"
        self.configs.mkdir()
        fields = tiny_config(directory).to_dict()
        for name, changes in rows.items():
            row = {section: dict(values) for section, values in fields.items()}
            for field, value in changes.items():
                section, key = field.split("__")
                row[section][key] = value
            (self.configs / f"{name}.py").write_text(ROW.format(fields=row))
        speed = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
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
        """What the last command has written to standard error."""
        return self._log.read_text()

    def trial(self, row: str) -> Path:
        return self.workdir / row / "seed_0"

    def log(self, row: str) -> str:
        return (self.trial(row) / "log.txt").read_text()

    def finished_at(self, row: str) -> int:
        return (self.trial(row) / "result.json").stat().st_mtime_ns

    def saved(self, row: str) -> int:
        """The step of the last checkpoint; -1 without one."""
        return max(saved_steps(self.trial(row)), default=-1)

    def process(self, row: str) -> int | None:
        """The process that trains it."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode().split("\0")
            except OSError:  # it has ended
                continue
            if words[1:2] == ["main.py"] and f"--workdir={self.trial(row)}" in words:
                return int(path.parent.name)
        return None

    def wait(self, what: Callable[[], Any], seconds: float = 120) -> Any:
        """What `what` returns once it is true."""
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < deadline, self.errors()
            time.sleep(0.05)
        return found
