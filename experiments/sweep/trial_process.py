"""Supervises one trial: its process group is killed when it hangs, on request, and when the launcher dies.

    python -m experiments.sweep.trial_process FOLDER TIMEOUT_MINUTES COMMAND...

Exit code: that of the command; 124 if it was killed because it wrote nothing for TIMEOUT_MINUTES; 128 + n if it was
killed by signal n.
"""

import contextlib
import ctypes
import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from experiments.sweep.hang_watchdog import HangWatchdog

HUNG = 124  # exit code of a trial that was killed because it hung, as of timeout(1)
POLL_SECONDS = 0.2
_GRACE_SECONDS = 120  # for the last checkpoint
_PR_SET_PDEATHSIG = 1  # prctl(2): the signal that a process receives when its parent dies


@dataclasses.dataclass
class TrialProcess:
    """The command of a trial, run in a process group of its own."""

    command: list[str]
    folder: str
    timeout_minutes: float
    stop_requested: bool = dataclasses.field(default=False, init=False)
    _process: subprocess.Popen | None = dataclasses.field(default=None, init=False)

    def __call__(self) -> int:
        """Runs the command, its output appended to log.txt, and returns the exit code."""
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.txt").open("ab", buffering=0) as log:
            log.write(os.fsencode(f"$ {shlex.join(self.command)}\n"))
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=signal_on_parent_death(signal.SIGKILL),
            )
        watchdog = HangWatchdog(folder)
        try:
            while (code := self._exit_code()) is None:
                if watchdog.silent_minutes() > self.timeout_minutes:
                    return HUNG
                time.sleep(POLL_SECONDS)
            return code
        finally:
            self._kill()

    def stop(self, number: int) -> int:
        """Asks it with a signal to save and exit, kills it after a grace period, and returns its exit code."""
        if self._process is None:
            return 128 + number
        deadline = time.monotonic() + _GRACE_SECONDS
        if not self.stop_requested:  # a second signal would interrupt the save
            self.stop_requested = True
            os.kill(self._process.pid, number)
        while self._exit_code() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return self._kill()

    def _kill(self) -> int:
        """Kills what is left of the process group and returns the exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        while (code := self._exit_code()) is None:
            time.sleep(POLL_SECONDS)
        return code

    def _exit_code(self) -> int | None:
        """None while it runs. Takes no lock, unlike Popen.poll, so that a signal handler may call it too."""
        exited = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return exited and exited.si_status + 128 * (exited.si_code != os.CLD_EXITED)


def shell_exit_code(process: subprocess.Popen) -> int:
    """The exit code of a process that has exited, in the shell's convention: 128 + n for signal n."""
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def signal_on_parent_death(number: int) -> Callable[[], None]:
    """A `preexec_fn`: the child process receives this signal when its parent dies, for whatever reason."""
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def prepare() -> None:
        # Slurm's warning signal goes to every process of a job. A trial must receive it through its TrialProcess only:
        # otherwise it would exit by itself, the job would end, and Slurm would not requeue it.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it died before prctl
            os._exit(1)

    return prepare


def main(argv: list[str]) -> int:
    folder, timeout_minutes, *command = argv
    process = TrialProcess(command, folder, float(timeout_minutes))

    def stop(*_) -> None:
        sys.exit(process.stop(signal.SIGTERM))

    signal.signal(signal.SIGTERM, stop)
    return process()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
