"""§5.2: ends a run that hangs, such as on a batch that never comes, so that a scheduler can start it again."""

import contextlib
import faulthandler
import threading
import time
from collections.abc import Iterator

from t2t_jax.signals import leave

_STANDARD_ERROR = 2


class Watchdog:
    """Ends the process, resumable, when no training step has ended for `minutes` (0: never) of its running time.

    It is a thread that counts its own ticks, so it works while the main thread waits in C++ for a batch or a device,
    and the time for which the whole process was stopped (SIGSTOP, a suspended job) does not count.
    """

    def __init__(self, minutes: float):
        self._limit = 60 * minutes
        self._tick = min(1.0, self._limit / 10)
        self._seconds, self._pauses = 0.0, 0
        self._is_over = threading.Event()

    def __enter__(self) -> "Watchdog":
        if self._limit:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._is_over.set()

    def step_ended(self) -> None:
        """To be called when the devices have ended a step."""
        self._seconds = 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A block that may take longer than a step: an evaluation, a save, a compilation."""
        self._pauses += 1
        try:
            yield
        finally:
            self._seconds = 0.0
            self._pauses -= 1

    def _watch(self) -> None:
        while not self._is_over.is_set():
            time.sleep(self._tick)
            self._seconds = 0.0 if self._pauses else self._seconds + self._tick
            if self._seconds >= self._limit and not self._is_over.is_set():
                faulthandler.dump_traceback(_STANDARD_ERROR)
                leave(
                    f"error: no training step has ended for {self._limit / 60:g} minutes "
                    "(machine.hang_timeout_minutes); the stacks of all threads are above. The same command resumes "
                    "from the last checkpoint"
                )
