"""Runs one trial: a process group that ends when it hangs, when it is told to, and when whoever started it is gone.

    python -m experiments.trial_process FOLDER TIMEOUT_MINUTES COMMAND...

Exit code: the command's; 124 if it was killed because it wrote nothing for TIMEOUT_MINUTES; 128 + n if signal n
ended it.
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

from experiments.trials import HUNG, Silence

POLL_SECONDS = 0.2
_GRACE_SECONDS = 120  # for the last checkpoint
_PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent ends


@dataclasses.dataclass
class TrialProcess:
    """A command, to be run in and for the folder of a trial."""

    command: list[str]
    folder: str
    timeout_minutes: float
    _process: subprocess.Popen | None = dataclasses.field(default=None, init=False)
    told: bool = dataclasses.field(default=False, init=False)

    def __call__(self) -> int:
        """Runs it, its output to log.txt, and returns the exit code."""
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.txt").open("ab", buffering=0) as log:
            log.write(f"$ {shlex.join(self.command)}\n".encode())
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=ending_with_parent(signal.SIGKILL),
            )
        silence = Silence(folder)
        try:
            while (code := self._exit_code()) is None:
                if silence.minutes() > self.timeout_minutes:
                    return HUNG
                time.sleep(POLL_SECONDS)
            return code
        finally:
            self._kill()

    def stop(self, number: int) -> int:
        """Has it save and end, and returns its exit code; kills what takes too long."""
        if self._process is None:
            return 128 + number
        deadline = time.monotonic() + _GRACE_SECONDS
        if not self.told:  # a second signal would not let it save
            self.told = True
            os.kill(self._process.pid, number)
        while self._exit_code() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return self._kill()

    def _kill(self) -> int:
        """Ends whatever is left of the group, and returns the exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        while (code := self._exit_code()) is None:
            time.sleep(POLL_SECONDS)
        return code

    def _exit_code(self) -> int | None:
        """None while it runs. Takes no lock, unlike Popen.poll: a signal handler may ask while the loop is asking."""
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended and ended.si_status + 128 * (ended.si_code != os.CLD_EXITED)


def exit_code(process: subprocess.Popen) -> int:
    """That of a process that has ended, as a shell gives it."""
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def ending_with_parent(number: int) -> Callable[[], None]:
    """For `preexec_fn`: the new process gets this signal when the one that starts it dies, however that happens."""
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def prepare() -> None:
        # Slurm's warning goes to every process of a job. A trial hears of it from its TrialProcess alone, which would
        # otherwise take the end of the trial for its own doing, and not have the job queued again.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
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
