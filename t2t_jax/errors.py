"""The three kinds of error that end a run with one line, each with the exit code that `main.py` returns.

`exit_code_of` runs a program accordingly. Any other exception is a bug in this code: a traceback and exit code 1.
"""

import contextlib
import errno
import io
import os
import reprlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


class StopError(Exception):
    """An error reported as one line without a traceback; `exit_code` is what the process returns."""

    exit_code: int


class InputError(StopError, ValueError):
    """Bad arguments, config or input: names the field, the value and what would work."""

    exit_code = 2


class InterruptedRun(StopError):
    """Stopped early, for example by a signal; the same command resumes.

    Where several processes train a run, all of them raise it, after the same step.
    """

    exit_code = 3


class InterruptedProcess(InterruptedRun):
    """This process alone has stopped early, for example for lack of memory; the same command resumes."""


class DamagedError(StopError):
    """NaN or infinity, or files that do not match their checksums."""

    exit_code = 4


# Errors of the file system that the user has to correct, not this code.
_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ELOOP,
            errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.EEXIST, errno.EMFILE,
            errno.ENFILE)  # fmt: skip
_NAMED_IN_TEXT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE, errno.EACCES)


def storage_reason(error: BaseException) -> str | None:
    """The file system's reason for an error, such as "No space left on device"; None for any other error.

    C++ libraries raise other types of error, with the reason in their text.
    """
    if isinstance(error, OSError) and error.errno in _STORAGE:
        return os.strerror(error.errno)
    found = (os.strerror(number) for number in _NAMED_IN_TEXT if os.strerror(number) in str(error))
    return next(found, None)


@contextlib.contextmanager
def full_disk_named(path: str | os.PathLike) -> Iterator[None]:
    """Names `path`, where the block writes, in the error of a full disk, which itself names no file."""
    try:
        yield
    except StopError:
        raise
    except Exception as error:  # of C++ and Rust too
        for number in (errno.ENOSPC, errno.EDQUOT):
            if storage_reason(error) == os.strerror(number) and getattr(error, "filename", None) is None:
                raise OSError(number, os.strerror(number), str(path)) from error
        raise


def memory_reason(error: BaseException) -> str | None:
    """The reason for an error of JAX that a device's memory is too small for; None for any other error.

    A compiled function raises a JaxRuntimeError in its first call, and a ValueError in later ones (jax 0.10 and 0.11).
    The former is known by its name: this file does not import JAX.
    """
    if type(error).__name__ not in ("JaxRuntimeError", "XlaRuntimeError", "ValueError"):
        return None
    _, found, reason = str(error).partition("RESOURCE_EXHAUSTED:")
    return reason.strip().partition("\n")[0] if found else None


@contextlib.contextmanager
def out_of_memory(field: str, remedies: str) -> Iterator[None]:
    """Turns a device's out-of-memory error into an InputError of `field`, with what to do."""
    try:
        yield
    except Exception as error:
        if (reason := memory_reason(error)) is None:
            raise
        raise InputError(f"{field}: out of memory ({reason}); {remedies}") from None


def on_one_line(text: object) -> str:
    """A text, or the message of an error, on one line."""
    return " ".join(str(text).split())


_SHORT = reprlib.Repr()
_SHORT.maxstring = 160


def shown(value: Any) -> str:
    """A value for an error message: short and on one line, however large the value is."""
    if isinstance(value, int) and abs(value) >> 64:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float, str)):
        return _SHORT.repr(value)
    return f"a {type(value).__name__}"


def stop_reason(error: BaseException) -> tuple[str, int] | None:
    """The line and the exit code of an error to report without a traceback; None for any other error."""
    if isinstance(error, StopError):
        return _escaped(str(error)), error.exit_code
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError) and (reason := storage_reason(error)):
        where = error.filename2 or error.filename or "a file"
        return f"{_escaped(str(where))}: {reason}; correct that, or give another path", InputError.exit_code
    if reason := memory_reason(error):
        advice = "lower --beam_size or data.tokens_per_batch, or end what else uses the device"
        return f"a device is out of memory ({reason}); {advice}", InputError.exit_code
    return None


def _escaped(text: str) -> str:
    r"""The text with \n and \r in place of line ends, which a path or a value may contain."""
    return text.replace("\n", r"\n").replace("\r", r"\r")


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Runs `command`, which may return an exit code; errors with a `stop_reason` are printed as one line.

    Standard output is UTF-8, whatever the locale. A full disk behind it is such an error; a closed pipe is none.
    """
    open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook's is another
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")  # paths are printed byte for byte
    code = 0
    try:
        code = command() or 0
        _flush_output()
        return code
    except BrokenPipeError:  # the program that reads our output has closed it, as `head` does
        return code
    except Exception as error:
        if (stop := stop_reason(error)) is None:
            raise
        with contextlib.suppress(OSError):  # standard error may be closed or full as well
            print(f"error: {stop[0]}", file=sys.stderr)
        return stop[1]
    finally:
        _discard_unwritten()


def open_standard_streams() -> None:
    """Opens /dev/null in place of standard streams that are closed, as by `2>&-`.

    Otherwise the next file opened would get such a stream's number, with all that libraries write to standard error;
    and `print(…, file=sys.stderr)` writes to standard output where sys.stderr is None. sys.stdin remains None.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number is this one
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 (it stays open)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _flush_output() -> None:
    try:
        sys.stdout.flush()
    except OSError as error:  # a full disk, or a terminal that is gone
        error.filename = "standard output"
        raise


def _discard_unwritten() -> None:
    """Discards what a stream cannot take: else the interpreter would try again at its end, and exit with code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
