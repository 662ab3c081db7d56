import dataclasses
import math
import os
import re
import shlex
import subprocess
import sys

import pytest

from t2t_jax.errors import InputError, full_disk_named, stop_reason
from t2t_jax.validation import Range, check_ranges


@dataclasses.dataclass
class Sizes:
    count: int = 1
    share: float = 0.5

    def __post_init__(self):
        check_ranges(
            {"count": Range(1, 10), "share": Range(0, 1, open_below=True, open_above=True, hint="half: 0.5")},
            self,
            "sizes.",
        )


def test_a_range_contains_its_ends_unless_they_are_open():
    assert [value in Range(1, 3) for value in (0, 1, 2, 3, 4)] == [False, True, True, True, False]
    assert [value in Range(0, 1, open_below=True, open_above=True) for value in (0, 0.5, 1)] == [False, True, False]
    assert [value in Range(0) for value in (math.nan, math.inf, -math.inf, 10**400)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 11}, "sizes.count must be at least 1 and at most 10; got 11"),
        ({"count": 10**9999}, r"sizes.count must be at least 1 and at most 10; got an integer of 33216 bits"),
        ({"count": 2.5}, "sizes.count must be a whole number; got 2.5"),
        ({"count": "2"}, "sizes.count must be a whole number; got '2'"),
        ({"share": None}, "sizes.share must be a number; got None"),
        ({"share": 1.0}, r"sizes.share must be above 0 and below 1 \(half: 0.5\); got 1.0"),
        ({"share": math.nan}, r"sizes.share must be finite, above 0 and below 1 \(half: 0.5\); got nan"),
    ],
)
def test_a_value_out_of_range_is_refused_with_field_value_and_range(values, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        Sizes(**values)


def run(body, redirection="", **options):
    """Runs a function of one line as a command, with buffered output, in a shell."""
    program = (
        "import sys; from t2t_jax.errors import DamagedError, exit_code_of\n"
        f"def command(): {body}\n"
        "sys.exit(exit_code_of(command))"
    )
    command = f"{shlex.join([sys.executable, '-c', program])} {redirection}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(command, shell=True, env=environment, text=True, **options)


@pytest.fixture
def closed_pipe():
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


@pytest.mark.parametrize("lines", [1, 10**6])  # the output fits into the buffer, or does not
def test_a_command_whose_output_is_closed_ends_without_an_error(closed_pipe, lines):
    with run(f"print('line\\n' * {lines})", stdout=closed_pipe, stderr=subprocess.PIPE) as process:
        assert (process.stderr.read(), process.wait(60)) == ("", 0)


@pytest.mark.parametrize(
    ("body", "code", "message"), [("return 3", 3, ""), ("raise DamagedError('bad')", 4, "error: bad\n")]
)
def test_a_closed_output_hides_neither_an_exit_code_nor_an_error(closed_pipe, body, code, message):
    with run(f"print('line'); {body}", stdout=closed_pipe, stderr=subprocess.PIPE) as process:
        assert (process.stderr.read(), process.wait(60)) == (message, code)
    with run(f"print('line'); {body}", stdout=closed_pipe, stderr=closed_pipe) as process:
        assert process.wait(60) == code


@pytest.mark.parametrize("lines", [1, 10**6])
def test_a_full_disk_behind_standard_output_is_one_line(lines):
    with run(f"print('line\\n' * {lines})", "> /dev/full", stderr=subprocess.PIPE) as process:
        assert re.fullmatch("error: (standard output|a file): No space left .*\n", process.stderr.read())
        assert process.wait(60) == 2


class RustError(Exception):
    """As the libraries raise that are not written in Python."""


def write(path):
    with open(path, "w", buffering=1) as file:
        print("a line", file=file)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (lambda: write("/dev/full"), "FOLDER: No space left on device; correct that, or give another path"),
        (RustError("I/O error: No space left on device (os error 28)"), "FOLDER: No space left on device; correct"),
        (InputError("workdir: not saved (No space left on device)"), "workdir: not saved"),
        (lambda: write("/dev/full/file"), "/dev/full/file: Not a directory"),
        (lambda: write("/dev/full/two\nlines"), r"/dev/full/two\nlines: Not a directory"),
        (InputError("data.train=a\r\nb: no file a\r\nb.en"), r"data.train=a\r\nb: no file a\r\nb.en"),
        (RustError("bug"), None),
    ],
)
def test_a_full_disk_is_named_by_where_the_command_writes(body, line):
    """The operating system names no file where a write fails, only where opening one does."""
    with pytest.raises(Exception) as failed, full_disk_named("FOLDER"):
        if callable(body):
            body()
        raise body
    stop = stop_reason(failed.value)
    assert (stop and (stop[0].startswith(line), stop[1])) == (line and (True, 2))


def test_other_files_and_lines_do_not_get_into_closed_streams():
    body = "print('log', file=sys.stderr); print('result'); return open('/dev/zero').fileno()"
    with run(body, "2>&-", stdout=subprocess.PIPE) as process:
        assert process.stdout.read() == "result\n" and process.wait(60) > 2
    with run(body, "<&- >&-", stderr=subprocess.PIPE) as process:
        assert process.stderr.read() == "log\n" and process.wait(60) > 2
