"""The signals that ask a program to stop: Ctrl-C, SIGTERM, and SIGUSR2, with which Slurm warns that a job's time is up.

Python runs signal handlers in the main thread, between two of its own instructions; a long XLA compilation lets none of
them run, and schedulers wait 30 to 120 seconds before they kill. Here a thread reads the signals instead, from the
"wakeup fd" that the interpreter's C-level handler writes to, and so they are answered at once whatever else runs.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

from t2t_jax.errors import InterruptedRun

_STANDARD_ERROR = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
_ONE_REQUEST_SECONDS = 1.0  # Slurm signals every process of a job, and wrappers pass on what they get


class Requests:
    """Counts the requests to stop among the signals that come."""

    def __init__(self):
        self.count = 0
        self._since = None  # when the first SIGTERM or Ctrl-C came

    def add(self, number: int) -> int:
        """The number of requests so far, this signal included.

        Signals within a second are one request, and SIGUSR2, the warning, is one with the SIGTERM that it warns of.
        """
        self.count = max(self.count, 1)
        if number != signal.SIGUSR2:
            now = time.monotonic()
            if self._since is None:
                self._since = now
            elif now - self._since > _ONE_REQUEST_SECONDS:
                self.count += 1
        return self.count


def answer_with(answer: Callable[[int], None]) -> Callable[[], None]:
    """From now on calls `answer` with each signal that asks to stop, in a thread of its own; main thread only.

    Returns the function that puts everything back as it was.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)  # as set_wakeup_fd requires

    def listen() -> None:
        with receiver, sender:
            while numbers := receiver.recv(64):
                for number in numbers:
                    if number in _SIGNALS:
                        answer(number)

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    usual = {number: signal.getsignal(number) for number in _SIGNALS}
    if usual[signal.SIGUSR2] is signal.SIG_IGN:  # whoever started us passes on what Slurm says (trial_process.py)
        del usual[signal.SIGUSR2]
    usual_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    for number in usual:
        signal.signal(number, _wake)

    def restore() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(usual_fd)
        sender.shutdown(socket.SHUT_WR)  # which ends the thread
        thread.join()

    return restore


@contextlib.contextmanager
def answered(answer: Callable[[int], None]) -> Iterator[None]:
    """Signals within the block are answered so; blocks may be nested."""
    restore = answer_with(answer)
    try:
        yield
    finally:
        restore()


def _wake(*_) -> None:
    """The handler in Python, which comes too late: the thread has answered."""


def end_at_once(number: int) -> None:
    """Ends the process with a line. Skips all cleaning up, which would wait for the main thread.

    Nothing is damaged by it: every file is written whole or not at all, as for `kill -9`.
    """
    leave(f"stopped by {signal.Signals(number).name}; the same command goes on")


def leave(line: str) -> None:
    """Prints a line to standard error and ends the process as resumable, from any thread, whatever the others hold."""
    over_a_bar = "\r\x1b[K" if os.isatty(_STANDARD_ERROR) else "\r"
    os.write(_STANDARD_ERROR, f"{over_a_bar}{line}\n".encode())  # sys.stderr may be locked by the main thread
    os._exit(InterruptedRun.exit_code)


def watch() -> None:
    """From now on a signal ends the process with a line and exit code 3, except within `deferred`."""
    # What such an end leaves behind, multiprocessing's resource tracker removes; it need not say so.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
    answer_with(end_at_once)


@contextlib.contextmanager
def deferred(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Whether the process was asked to stop, for a block that then ends in good order; asked again, it ends at once."""
    requests = Requests()

    def note(number: int) -> None:
        is_first = requests.count == 0
        if requests.add(number) > 1:
            end_at_once(number)
        if is_first:
            say("stopping after this step; saving")

    with answered(note):
        yield lambda: requests.count > 0
    if requests.count:  # too late for the block to see it
        end_at_once(signal.SIGTERM)


@contextlib.contextmanager
def left_to_parent() -> Iterator[None]:
    """Processes that are started in the block never see the signals that go to a whole terminal or job.

    They are blocked rather than ignored, as a new process inherits that from its first instruction on.
    """
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGUSR2))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)


def _forget_in_child() -> None:
    """A forked process must not write its signals to the file descriptor of its parent."""
    for number in _SIGNALS:
        if signal.getsignal(number) is _wake:
            signal.set_wakeup_fd(-1)
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)
