"""Detects hung trials: a trial that writes no output is taken to hang."""

import time
from pathlib import Path


class HangWatchdog:
    """Measures for how long a trial has written nothing to its logs, on the monotonic clock."""

    def __init__(self, folder: Path):
        self._files = [folder / name for name in ("log.txt", "metrics.jsonl")]
        self._sizes, self._last_change = None, time.monotonic()

    def silent_minutes(self) -> float:
        """Minutes since the files were last seen to grow."""
        sizes = [path.stat().st_size if path.is_file() else 0 for path in self._files]
        if sizes != self._sizes:
            self._sizes, self._last_change = sizes, time.monotonic()
        return (time.monotonic() - self._last_change) / 60
