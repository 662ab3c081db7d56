"""Reading and writing files safely: UTF-8 lines, whole-or-nothing JSON, checksums."""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from t2t_jax.errors import InputError

LONGEST_LINE = 10 << 20  # bytes
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_ENDS = str.maketrans(dict.fromkeys("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", " "))


def single_line(text: str) -> str:
    """`text` with a space for everything at which a reader may end a line, `str.splitlines` too."""
    return text.translate(_LINE_ENDS)


def read_lines(stream: BinaryIO, name: str) -> Iterator[str]:
    """The lines of UTF-8 text, ended by \\n or \\r\\n, without a byte order mark at the beginning.

    Refuses other encodings, and lines of more than 10 MiB, with the line's number.
    """
    for number, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE + 1), b""), start=1):
        if len(line) > LONGEST_LINE:
            raise InputError(f"{name}, line {number}: more than {LONGEST_LINE:,} bytes; give one sentence a line")
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        try:
            yield line.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name}, line {number}: not valid UTF-8 (byte {line[error.start]:#04x}); convert it to UTF-8"
            ) from None


def open_text(field: str, path: str | Path) -> BinaryIO:
    """The text file that `field` names, for `read_lines`."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise InputError(f"{field}: no file {path}; give a plain-text file with one sentence a line")
    return path.open("rb")


def read_text(field: str, path: str | Path) -> list[str]:
    """All lines of the text file that `field` names."""
    with open_text(field, path) as file:
        return list(read_lines(file, str(path)))


def read_json(path: Path) -> Any:
    """The value in a JSON file."""
    return json.loads(path.read_text("utf-8"))


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested values by their names, "section.field"."""
    leaves = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Writes text, one line each, whole or not at all."""
    _write_text(path, "".join(single_line(line) + "\n" for line in lines))


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON, whole or not at all."""
    _write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, "utf-8")
    os.replace(partial, path)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hold(lock: Path) -> TextIO | None:
    """Keeps other processes from holding this file until it is closed; None where one of them does already."""
    file = lock.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Waits for any other process that is in here with a folder; the death of one lets the next in."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
