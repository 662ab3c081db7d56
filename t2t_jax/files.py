"""Reading and writing files safely: UTF-8 lines, atomic writes, JSON with checksums, file locks."""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from t2t_jax.errors import DamagedError, InputError, shown, storage_reason

_CHECKSUM = "checksum"  # the key under which a JSON object holds the SHA-256 of everything else in it

LONGEST_LINE = 10 << 20  # bytes
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_ENDS = str.maketrans(dict.fromkeys("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", " "))


def single_line(text: str) -> str:
    """Replaces every character that may end a line (those of `str.splitlines`) with a space."""
    return text.translate(_LINE_ENDS)


def read_lines(stream: BinaryIO, name: str) -> Iterator[str]:
    """Yields the lines of UTF-8 text, without their ends (\\n or \\r\\n) and without a leading byte order mark.

    Invalid UTF-8 and lines of more than 10 MiB are InputErrors that name the line.
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


def existing_file(field: str, path: str | Path, wanted: str = "") -> Path:
    """The path of a file that must exist; the error names `field` and says what is `wanted`."""
    try:
        full = Path(path).expanduser()
        if full.is_file():
            return full
    except (OSError, RuntimeError) as error:  # a name that is too long; ~user for an unknown user
        raise InputError(f"{field}: {shown(str(path))}: {getattr(error, 'strerror', None) or error}") from None
    raise InputError(f"{field}: no file {full}{wanted and '; ' + wanted}")


def open_text(field: str, path: str | Path) -> BinaryIO:
    """Opens the text file given as `field`, for `read_lines`."""
    return existing_file(field, path, "give a plain-text file with one sentence a line").open("rb")


def read_text(field: str, path: str | Path) -> list[str]:
    """All lines of the text file given as `field`."""
    with open_text(field, path) as file:
        return list(read_lines(file, str(path)))


def read_json(path: Path) -> Any:
    """The value in a JSON file; DamagedError where the file is missing or not JSON."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing; restore it, or start anew in another folder") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        reason = " ".join(str(error).split())[:100]
        raise DamagedError(
            f"{path} is damaged: not JSON ({reason}); restore it, or start anew in another folder"
        ) from None


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; its checksum (`write_object`), if it has one, is verified and removed."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise DamagedError(f"{path} is damaged: {type(value).__name__} in place of an object")
    expected = value.pop(_CHECKSUM, None)
    if expected not in (None, _digest(value)):
        raise DamagedError(
            f"{path} is damaged or was edited: it does not match its own checksum; restore it, and change options by "
            "flags instead"
        )
    return value


def write_object(path: Path, value: dict[str, Any]) -> None:
    """`write_json` with the SHA-256 of `value` added, by which `read_object` detects any change."""
    write_json(path, value | {_CHECKSUM: _digest(value)})


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested dicts: {"section.field": leaf}."""
    leaves = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Writes text atomically, one item a line."""
    write_bytes(path, "".join(single_line(line) + "\n" for line in lines).encode())


def write_json(path: Path, value: Any) -> None:
    """Writes `value` atomically as indented JSON."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


@contextlib.contextmanager
def storage_errors(failed: str) -> Iterator[None]:
    """Turns the errors of a full, read-only or failing disk into an InputError: what `failed`, and why."""
    try:
        yield
    except Exception as error:  # tensorstore's are of several types
        reason = storage_reason(error)
        if reason is None:
            raise
        raise InputError(f"workdir: {failed} ({reason})") from error


def check_output(field: str, path: str | Path) -> Path:
    """The path of a file to be written later; raises InputError now where writing would fail then."""
    path = Path(path).expanduser()
    if path.is_dir():
        raise InputError(f"{field}={path}: is a folder; give the path of a file")
    if not path.parent.is_dir():
        raise InputError(f"{field}={path}: no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"{field}={path}: can't be written to; give a path that can")
    return path


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of renameat2(2)


def replace_folder(new: Path, path: Path, removed: Path) -> None:
    """Renames the folder `new` to `path`; a folder that is there is renamed to `removed` and deleted.

    At every moment one of the two has the name `path`, where the file system supports RENAME_EXCHANGE.
    """
    if not path.exists():
        os.rename(new, path)
        return
    names = os.fsencode(new), os.fsencode(path)
    failed = ctypes.CDLL(None, use_errno=True).renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    if not failed:
        os.rename(new, removed)
    elif ctypes.get_errno() in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        os.rename(path, removed)
        os.rename(new, path)
    else:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    shutil.rmtree(removed)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def try_lock(lock: Path) -> TextIO | None:
    """Exclusive file lock (flock), held until the returned file is closed; None where another process holds it."""
    file = lock.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Exclusive flock on a folder, waited for, and released when the process dies."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
