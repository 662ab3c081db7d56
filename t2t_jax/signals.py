"""Handling of signals that ask a program to stop: SIGINT (Ctrl-C), SIGTERM, and SIGUSR2, Slurm's time-limit warning.

Python runs signal handlers in the main thread, between two bytecode instructions. A long XLA compilation blocks them,
and schedulers send SIGKILL 30 to 120 seconds after SIGTERM. Here a thread reads the signals from the "wakeup fd", to
which the interpreter's C-level handler writes, so they are handled at once whatever the main thread does.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

from t2t_jax.errors import InterruptedProcess

_STANDARD_ERROR = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
_ONE_REQUEST_SECONDS = 1.0  # one stop may arrive twice: Slurm signals every process of a job, and wrappers forward it

_cleanups: list[Callable[[], None]] = []  # of the `cleanup` blocks that are open
_ending = threading.RLock()  # held by a thread that runs clean-ups; for ever by one that ends the process


class Requests:
    """Counts the requests to stop among the signals received."""

    def __init__(self):
        self.count = 0
        self.number = None  # of the first signal
        self._since = None  # time of the first SIGTERM or SIGINT

    def add(self, number: int) -> int:
        """Counts the signal `number`; returns the number of requests so far.

        Signals within one second count once, and a SIGUSR2 counts together with the SIGTERM that it announces.
        """
        self.count = max(self.count, 1)
        self.number = self.number or number
        if number != signal.SIGUSR2:
            now = time.monotonic()
            if self._since is None:
                self._since = now
            elif now - self._since > _ONE_REQUEST_SECONDS:
                self.count += 1
        return self.count


def set_handler(handler: Callable[[int], object]) -> Callable[[], None]:
    """Calls `handler` in a new thread for each of the three signals; main thread only.

    Returns the function that restores the previous handlers.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)  # as set_wakeup_fd requires

    def listen() -> None:
        with receiver, sender:
            while numbers := receiver.recv(64):
                for number in numbers:
                    if number in _SIGNALS:
                        handler(number)

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    usual = {number: signal.getsignal(number) for number in _SIGNALS}
    if usual[signal.SIGUSR2] is signal.SIG_IGN:  # trial_process.py, our parent, handles it
        del usual[signal.SIGUSR2]
    usual_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    for number in usual:
        signal.signal(number, _wake)

    def restore() -> None:
        for number, previous in usual.items():
            signal.signal(number, previous)
        signal.set_wakeup_fd(usual_fd)
        sender.shutdown(socket.SHUT_WR)  # which ends the thread
        thread.join()

    return restore


@contextlib.contextmanager
def handled_by(handler: Callable[[int], object]) -> Iterator[None]:
    """Handles signals with `handler` within the block; blocks may be nested."""
    restore = set_handler(handler)
    try:
        yield
    finally:
        restore()


def _wake(*_) -> None:
    """Does nothing: the thread of `set_handler` handles the signal, without waiting for Python to call this."""


def end_at_once(number: int) -> None:
    """Ends the process with one line, without unwinding the main thread, which may be busy in C++.

    Only the clean-ups of `cleanup` run. Nothing is damaged, as with `kill -9`: every file is written whole or not at
    all.
    """
    end_process(_stopped_by(number))


def _stopped_by(number: int) -> str:
    return f"stopped by {signal.Signals(number).name}; run the same command again"


def end_process(line: str) -> None:
    """Runs the registered clean-ups, prints a line to standard error and exits with code 3 (resumable); any thread."""
    _ending.acquire()  # never released: a thread that comes to the end of a `cleanup` block must not go on
    for action in reversed(_cleanups):
        with contextlib.suppress(Exception):
            action()
    clear_line = "\r\x1b[K" if os.isatty(_STANDARD_ERROR) else "\r"  # of a progress bar
    os.write(_STANDARD_ERROR, f"{clear_line}{line}\n".encode())  # sys.stderr may be locked by the main thread
    os._exit(InterruptedProcess.exit_code)


@contextlib.contextmanager
def time_limit(seconds: float, line: str) -> Iterator[None]:
    """Ends the process with `end_process(line)` where the block takes longer, even if it is busy in C++."""
    timer = threading.Timer(seconds, end_process, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def cleanup(action: Callable[[], None]) -> Iterator[None]:
    """Calls `action` when the block ends, whether by itself, by an error, or because a signal ends the process.

    After a signal another thread calls it, while the main thread may still be at work in the block.
    """
    with _ending:
        _cleanups.append(action)
    try:
        yield
    finally:
        with _ending:
            _cleanups.remove(action)
            action()


def watch() -> None:
    """Makes a signal end the process with one line and exit code 3, except within `deferred`."""
    # multiprocessing's resource tracker frees what such an end leaves behind; silence its warning about it.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
    set_handler(end_at_once)


@contextlib.contextmanager
def deferred(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether a signal has come, so that the block can save and stop.

    `say` is given the line to print. A second request ends the process at once. A signal that comes too late for the
    block's last look is an InterruptedProcess at its end. Outside the main thread, which alone gets signals, none does.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    requests = Requests()

    def note(number: int) -> None:
        is_first = requests.count == 0
        if requests.add(number) > 1:
            end_at_once(number)
        if is_first:
            say("stopping after this step; saving")

    with handled_by(note):
        yield lambda: requests.count > 0
    if requests.count:
        raise InterruptedProcess(_stopped_by(requests.number))


@contextlib.contextmanager
def left_to_parent() -> Iterator[None]:
    """Processes started in the block get neither SIGINT nor SIGUSR2, which terminals and Slurm send to all processes.

    The signals are blocked by mask, which a new process inherits from its first instruction on.
    """
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGUSR2))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)


def _forget_in_child() -> None:
    """Undoes, in a forked process, what belongs to its parent: the wakeup fd, the handlers and the clean-ups."""
    _cleanups.clear()
    for number in _SIGNALS:
        if signal.getsignal(number) is _wake:
            signal.set_wakeup_fd(-1)
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)
