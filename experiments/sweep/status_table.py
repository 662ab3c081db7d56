"""The status of all trials: a table redrawn in place on a terminal, elsewhere one line per change of state."""

import math
import shutil
import sys
import time
from collections.abc import Sequence

from experiments.sweep.trials import FAILED, FINISHED, INTERRUPTED, REFUSED, RUNNING, WAITING, Trial

Row = tuple[str, tuple[str, str]]  # name, (state, details)

_REDRAW_SECONDS = 1


class StatusTable:
    """State and details of each trial, printed to standard error."""

    def __init__(self, trials: Sequence[Trial]):
        self._rows = {trial.name: (WAITING, "") for trial in trials}
        self._on_terminal = sys.stderr.isatty()
        self._height, self._drawn_at = 0, -math.inf

    def update(self, trial: Trial, state: str, details: str = "") -> None:
        """Sets the state of a trial."""
        changed = state != self._rows[trial.name][0]
        self._rows[trial.name] = state, details
        if changed and not self._on_terminal:
            print(f"{trial.name}: {state}{f', {details}' if details else ''}", file=sys.stderr, flush=True)

    def redraw(self) -> None:
        """Redraws the table, on a terminal and at most once a second."""
        if self._on_terminal and time.monotonic() - self._drawn_at >= _REDRAW_SECONDS:
            self._draw(self._visible_rows(max(1, shutil.get_terminal_size().lines - 2)))

    def close(self) -> None:
        """Prints the final status: all rows on a terminal, elsewhere the number of trials in each state."""
        if self._on_terminal:
            self._draw(list(self._rows.items()))
        else:
            print(self.summary(), file=sys.stderr, flush=True)

    def _draw(self, rows: list[Row]) -> None:
        columns, longest = shutil.get_terminal_size().columns, max(map(len, self._rows))
        table = [f"{name:<{longest}}  {state:<11}  {details}"[: columns - 1] for name, (state, details) in rows]
        cursor_up = f"\x1b[{self._height}A" if self._height else ""
        print(cursor_up + "\x1b[J" + "\n".join([*table, self.summary()]), file=sys.stderr, flush=True)
        self._height, self._drawn_at = len(table) + 1, time.monotonic()

    def _visible_rows(self, count: int) -> list[Row]:
        """All rows in order if they fit; otherwise `count` of them, running trials first."""
        rows = list(self._rows.items())
        if len(rows) > count:
            rows.sort(key=lambda row: (RUNNING, FAILED, REFUSED, INTERRUPTED, FINISHED, WAITING).index(row[1][0]))
        return rows[:count]

    def count(self, state: str) -> int:
        return sum(row[0] == state for row in self._rows.values())

    def summary(self) -> str:
        states = (FINISHED, RUNNING, WAITING, INTERRUPTED, FAILED, REFUSED)
        return ", ".join(f"{self.count(state)} {state}" for state in states if self.count(state))
