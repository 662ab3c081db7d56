"""The three ways a run may end early, each with the exit code `main.py` gives it.

Anything else that is raised is a bug of ours and exits with 1 and a traceback.
"""

import difflib
import reprlib
import sys
from collections.abc import Callable, Iterable
from typing import Any


class StopError(Exception):
    """A reason to stop that is said in one line; `exit_code` is what the process returns."""

    exit_code: int


class InputError(StopError, ValueError):
    """Bad arguments, config or input: names the field, the value and what would work."""

    exit_code = 2


class InterruptedRun(StopError):
    """Stopped by a signal after saving; the same command resumes."""

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


_SHORT = reprlib.Repr()
_SHORT.maxstring = 160


def shown(value: Any) -> str:
    """A value for a message: short and on one line, however long, deep or large the value is."""
    if isinstance(value, int) and abs(value) >> 64:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float, str)):
        return _SHORT.repr(value)
    return f"a {type(value).__name__}"


def exit_code_of(command: Callable[[], int | None]) -> int:
    """What a process returns that runs `command`, which may return a code itself; a reason to stop is one line."""
    try:
        return command() or 0
    except StopError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
