"""§5.2: ends a training run that hangs, for example in its data loader, so that a scheduler can restart it."""

import contextlib
import faulthandler
import threading
from collections.abc import Iterator

from t2t_jax.signals import end_process

_STANDARD_ERROR = 2


class Watchdog:
    """Ends the process with exit code 3 when no training step has ended for `minutes` of running time; 0: never.

    A thread counts ticks, so it works while the main thread waits in C++ for a batch or a device. Time during which the
    whole process was stopped (SIGSTOP, a suspended job) does not count.
    """

    def __init__(self, minutes: float):
        self._limit = 60 * minutes
        self._tick = min(1.0, self._limit / 10)
        self._ends, self._pauses = 0, 0  # of steps and pauses; of pauses that have begun and not ended
        self._is_over = threading.Event()

    def __enter__(self) -> "Watchdog":
        if self._limit:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._is_over.set()

    def step_ended(self) -> None:
        """To be called when the devices have finished a step."""
        self._ends += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Does not count the time of the block, such as an evaluation, a save or a compilation."""
        self._pauses += 1
        try:
            yield
        finally:
            self._ends += 1
            self._pauses -= 1

    def _watch(self) -> None:
        seconds, ends = 0.0, 0
        while not self._is_over.wait(self._tick):
            before, ends = ends, self._ends  # read once: a step that ends meanwhile is seen at the next tick
            seconds = 0.0 if self._pauses or ends != before else seconds + self._tick
            if seconds >= self._limit:
                faulthandler.dump_traceback(_STANDARD_ERROR)
                end_process(
                    f"error: no training step has ended for {self._limit / 60:g} minutes "
                    "(machine.hang_timeout_minutes); the stacks of all threads are above. The same command resumes "
                    "from the last checkpoint"
                )
