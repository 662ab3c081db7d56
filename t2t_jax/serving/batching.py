"""Requests of many clients share batches: while the device is busy, those that come in wait and then run together.

One thread does all the work. It takes the job that has waited longest and those after it that can run with it (those
with an equal key), up to a number of items in all; one of more items runs alone. So every job runs after a bounded
number of batches, whatever the others ask for.
"""

import collections
import contextlib
import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

# Does the work of the jobs of one key: (key, all their items, a function to call now and then) → a result an item.
Work = Callable[[Hashable, list[Any], Callable[[], None]], Sequence[Any]]
_LONGEST_WAIT = 60  # seconds, in Retry-After


class Full(Exception):
    """Too many items wait; `retry_after` is in seconds."""

    def __init__(self, retry_after: int):
        super().__init__(f"too many sentences are waiting; try again in {retry_after} s")
        self.retry_after = retry_after


class Abandoned(Exception):
    """Nobody waits for the results of a batch any more."""


class Job:
    """Items to work on together with those of other jobs of the same key; `future` gets the list of results."""

    def __init__(self, key: Hashable, items: Sequence[Any]):
        self.key, self.items, self.future = key, list(items), Future()

    def settle(self, set_outcome: Callable[..., None], outcome: Any) -> None:
        """Sets the outcome, unless nobody waits for it."""
        with contextlib.suppress(InvalidStateError):  # cancelled
            set_outcome(outcome)


class Batcher:
    """Runs jobs in a thread of its own, until it is closed.

    Refused are jobs beyond `waiting_items`, and those that would wait for longer than `longest_wait` seconds: were they
    queued, all would wait for so long that their clients have left, and nobody would be answered.
    """

    def __init__(
        self,
        work: Work,
        *,
        batch_items: int,
        waiting_items: int,
        longest_wait: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._work, self._batch_items, self._clock = work, batch_items, clock
        self._most_waiting, self._longest_wait = waiting_items, longest_wait
        self._waiting: list[Job] = []  # in order of arrival
        self._idle: list[Job] = []  # those that run while no others wait
        self._changed = threading.Condition()
        self._closed = False
        self._begun: float | None = None  # when the batch at work began, unless it is an idle job
        # Of the last two batches that were no idle jobs, which compile. One of the others may compile, too.
        self._seconds: tuple[float, ...] = ()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queues a job; `Full` if too many items wait or it would wait for too long, or if the batcher is closed."""
        with self._changed:
            is_full = self.waiting() + len(job.items) > self._most_waiting or self._wait() > self._longest_wait
            if self._closed or is_full:
                raise Full(self.retry_after())
            self._waiting.append(job)
            self._changed.notify_all()

    def submit_idle(self, jobs: Sequence[Job]) -> None:
        """Queues jobs that run one by one, each when no others wait."""
        with self._changed:
            self._idle += jobs
            self._changed.notify_all()

    def withdraw(self, job: Job) -> None:
        """Forgets a job; a batch that has begun ends early if nobody waits for any of its jobs."""
        job.future.cancel()
        with self._changed:
            self._waiting = [other for other in self._waiting if other is not job]

    @property
    def is_running(self) -> bool:
        """Whether jobs are still worked on: the thread lives and has not been told to end."""
        return self._thread.is_alive() and not self._closed

    def waiting(self) -> int:
        """The number of items that wait."""
        with self._changed:
            return sum(len(job.items) for job in self._waiting)

    def batch_age(self) -> float:
        """Seconds since the batch at work began; 0 without one, and for a job of `submit_idle`."""
        begun = self._begun
        return 0.0 if begun is None else self._clock() - begun

    def retry_after(self) -> int:
        """Whole seconds until the jobs that wait now will have run, at least 1."""
        return min(max(1, math.ceil(self._wait())), _LONGEST_WAIT)

    def _wait(self) -> float:
        """Seconds until the jobs that wait now will have run, each batch as fast as the faster of the last two."""
        counts: collections.Counter[Hashable] = collections.Counter()
        with self._changed:
            for job in self._waiting:
                counts[job.key] += len(job.items)
        batches = sum(math.ceil(count / self._batch_items) for count in counts.values())
        return batches * min(self._seconds, default=0.0)

    def close(self) -> None:
        """Gives up all jobs and waits for the thread."""
        with self._changed:
            self._closed = True
            waiting, self._waiting, self._idle = self._waiting + self._idle, [], []
            self._changed.notify_all()
        for job in waiting:
            job.future.cancel()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._take():
            self._finish(batch)
            if self._begun is not None:
                self._seconds = (*self._seconds[-1:], self._clock() - self._begun)
                self._begun = None

    def _take(self) -> list[Job]:
        """The next batch: the oldest job and, in order, those of its key; an empty list once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._idle or self._closed)
            if not self._waiting:
                return [self._idle.pop(0)] if self._idle else []
            batch, count = [], 0
            for job in self._waiting:
                if job.key != self._waiting[0].key:
                    continue
                if batch and count + len(job.items) > self._batch_items:
                    break
                batch.append(job)
                count += len(job.items)
            self._waiting = [job for job in self._waiting if job not in batch]
            self._begun = self._clock()
            return batch

    def _finish(self, batch: list[Job]) -> None:
        """Sets the results of the jobs. If the work fails, each job is tried alone, so that only the culprit fails."""

        def check() -> None:
            if self._closed or all(job.future.cancelled() for job in batch):
                raise Abandoned

        try:
            results = iter(self._work(batch[0].key, [item for job in batch for item in job.items], check))
        except Abandoned:
            for job in batch:
                job.future.cancel()
        except Exception as error:
            if len(batch) == 1:
                batch[0].settle(batch[0].future.set_exception, error)
            else:
                for job in batch:
                    self._finish([job])
        else:
            for job in batch:
                job.settle(job.future.set_result, [next(results) for _ in job.items])
