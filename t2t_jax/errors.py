"""The three ways a run may end early, each with the exit code `main.py` gives it.

Anything else that is raised is a bug of ours and exits with 1 and a traceback.
"""

import difflib
import sys
from collections.abc import Callable, Iterable


class StopError(Exception):
    """A reason to stop that is said in one line; `exit_code` is what the process returns."""

    exit_code: int


class InputError(StopError, ValueError):
    """Bad arguments, config or input: names the field, the value and what would work."""

    exit_code = 2


class InterruptedRun(StopError):
    """Stopped early, by a signal for example; the same command resumes."""

    exit_code = 3


class DamagedError(StopError):
    """Bad numbers (NaN, infinity) or files that do not match their checksums."""

    exit_code = 4


def choice(field: str, value: str, allowed: Iterable[str]) -> str:
    """Returns `value` if it is one of `allowed`; otherwise refuses it and suggests the nearest."""
    allowed = list(allowed)
    if value in allowed:
        return value
    near = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InputError(f"{field}: unknown value {value!r}; {hint}known: {', '.join(allowed)}")


def exit_code_of(command: Callable[[], int | None]) -> int:
    """What a process returns that runs `command`, which may return a code itself; a reason to stop is one line."""
    try:
        return command() or 0
    except StopError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
