"""Reading and writing files safely: UTF-8 lines, whole-or-nothing JSON, checksums."""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from t2t_jax.errors import DamagedError, InputError, shown


def read_lines(stream: Iterable[bytes], name: str) -> Iterator[str]:
    """The lines of UTF-8 text, ended by \\n or \\r\\n; refuses other encodings with the line's number."""
    for number, line in enumerate(stream, start=1):
        try:
            yield line.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name}, line {number}: not valid UTF-8 (byte {line[error.start]:#04x}); convert it to UTF-8"
            ) from None


def existing_file(field: str, path: str | Path, wanted: str = "") -> Path:
    """The path of a file that must be there, which `field` names; `wanted` says what it must be."""
    try:
        full = Path(path).expanduser()
        if full.is_file():
            return full
    except (OSError, RuntimeError) as error:  # a name that is too long; ~somebody who is nobody
        raise InputError(f"{field}: {shown(str(path))}: {getattr(error, 'strerror', None) or error}") from None
    raise InputError(f"{field}: no file {full}{wanted and '; ' + wanted}")


def open_text(field: str, path: str | Path) -> BinaryIO:
    """The text file that `field` names, for `read_lines`."""
    return existing_file(field, path, "give a plain-text file with one sentence a line").open("rb")


def read_text(field: str, path: str | Path) -> list[str]:
    """All lines of the text file that `field` names."""
    with open_text(field, path) as file:
        return list(read_lines(file, str(path)))


def read_json(path: Path) -> Any:
    """The value in a JSON file."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise DamagedError(f"{path} is damaged: not JSON ({reason}); restore it from a copy") from None


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested values by their names, "section.field"."""
    leaves = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Writes text, one line each, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(line + "\n" for line in lines), "utf-8")
    os.replace(partial, path)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON, whole or not at all."""
    write_lines(path, [json.dumps(value, indent=2, ensure_ascii=False)])


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
