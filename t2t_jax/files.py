"""Reading and writing files safely: UTF-8 lines, compressed or not, atomic writes, JSON with checksums, file locks."""

import bz2
import contextlib
import ctypes
import errno
import fcntl
import functools
import gzip
import hashlib
import json
import lzma
import os
import re
import shutil
import socket
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from t2t_jax import signals
from t2t_jax.errors import DamagedError, InputError, full_disk_named, on_one_line, shown, storage_reason

try:
    from compression import zstd  # from Python 3.14 on
except ImportError:
    from backports import zstd

COMPRESSIONS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": zstd.open}  # by the end of a file's name
# How compressed data begin: of which kind they are, and what unpacks them.
_MAGIC = {b"\x1f\x8b": ("gzip", "zcat"), b"BZh": ("bzip2", "bzcat"), b"\xfd7zXZ": ("xz", "xzcat"),
          b"\x28\xb5\x2f\xfd": ("zstd", "zstdcat")}  # fmt: skip
_CHECKSUM = "checksum"  # the key under which a JSON object holds the SHA-256 of everything else in it

LONGEST_LINE = 10 << 20  # bytes
_URL = re.compile(r"[a-z][a-z0-9+.-]*://|(s3|gs|gcs):/", re.IGNORECASE)  # pathlib makes one slash of two
_ATTEMPTS = 100  # to remove a folder in which another thread is still writing
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_ENDS = str.maketrans(dict.fromkeys("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", " "))


def without_line_ends(text: str) -> str:
    """Replaces every character that may end a line (those of `str.splitlines`) with a space."""
    return text.translate(_LINE_ENDS)


def lone_surrogate(text: str) -> int | None:
    """The index of the first lone surrogate, which UTF-8 cannot encode; None without one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


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
            for magic, (kind, program) in _MAGIC.items():
                if number == 1 and line.startswith(magic):
                    raise InputError(f"{name}, line 1: not text, but {kind}; unpack it: {program} FILE | …") from None
            raise InputError(
                f"{name}, line {number}: not valid UTF-8 (byte {line[error.start]:#04x}); convert it to UTF-8"
            ) from None


def is_url(path: str | Path) -> bool:
    """Whether a path is a URL, such as s3://bucket/folder."""
    return bool(_URL.match(str(path)))


def cache_folder() -> Path:
    """Where this package keeps what can be made or fetched again; it may not exist yet."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "t2t_jax"
    except RuntimeError:  # of Path.home
        raise InputError("XDG_CACHE_HOME: no home directory is known; set it to a folder for caches") from None


def expanded(field: str, path: str | Path) -> Path:
    """The path given as `field` with the home folder in place of ~ or ~user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user
        raise InputError(f"{field}: {shown(str(path))}: no home directory is known for it; write ~/ or ./") from None


def existing_file(field: str, path: str | Path, wanted: str = "") -> Path:
    """The path of a regular file that must exist; the error names `field` and says what is `wanted`."""
    full = expanded(field, path)
    try:
        if full.is_file():
            return full
        problem = "not a regular file:" if full.exists() else "no file"
    except OSError as error:  # a name that is too long
        raise InputError(f"{field}: {shown(str(path))}: {error.strerror}") from None
    raise InputError(f"{field}: {problem} {full}{wanted and '; ' + wanted}")


def read_text(field: str, path: str | Path) -> list[str]:
    """All lines of the text file given as `field`, which may be compressed."""
    return list(unpacked_lines(existing_text(field, path), str(path)))


def existing_text(field: str, path: str | Path) -> Path:
    """The path of the text file given as `field`, which must exist."""
    return existing_file(field, path, "give a text file with one sentence a line")


def unpacked_lines(path: Path, name: str | None = None) -> Iterator[str]:
    """`read_lines` of a text file, compressed or not, which errors call `name`."""
    name = name or str(path)
    with unpacked(path, name) as file:
        yield from read_lines(file, name)


@contextlib.contextmanager
def unpacked(path: Path, name: str) -> Iterator[BinaryIO]:
    """The contents of a file, compressed or not; refuses damaged ones, which errors call `name`."""
    try:
        with COMPRESSIONS.get(path.suffix.lower(), open)(path, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the file system
            raise
        raise InputError(f"{name}: can't be unpacked ({error}); restore it from a copy") from None


def compression(name: str) -> str:
    """The suffix that tells how a file is compressed; "" if none does."""
    suffix = Path(name).suffix
    return suffix if suffix.lower() in COMPRESSIONS else ""


def read_json(path: Path) -> Any:
    """The value in a JSON file; DamagedError where the file is missing or not JSON."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing; restore it, or start anew in another folder") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        reason = on_one_line(error)[:100]
        raise DamagedError(
            f"{path} is damaged: not JSON ({reason}); restore it, or start anew in another folder"
        ) from None


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; its checksum (`write_object`), if it has one, is verified and removed."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise DamagedError(f"{path} is damaged: {type(value).__name__} in place of an object")
    expected = value.pop(_CHECKSUM, None)
    if expected not in (None, json_digest(value)):
        raise DamagedError(
            f"{path} is damaged or was edited: it does not match its own checksum; restore it, and change options by "
            "flags instead"
        )
    return value


def write_object(path: Path, value: dict[str, Any]) -> None:
    """`write_json` with the SHA-256 of `value` added, by which `read_object` detects any change."""
    write_json(path, value | {_CHECKSUM: json_digest(value)})


def json_digest(value: Any) -> str:
    """The SHA-256 of a JSON value, in hexadecimal; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested dicts: {"section.field": leaf}."""
    leaves = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically, also when several processes do at once; pipes and devices are written to in place."""
    if _is_special(path):
        path.write_bytes(content)
        return
    with replacing(path) as partial, full_disk_named(path):
        partial.write_bytes(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the path of a file to write, of this process alone, which then replaces `path`; removed on an error."""
    partial = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Writes text atomically, one item a line."""
    write_bytes(path, "".join(without_line_ends(line) + "\n" for line in lines).encode())


def write_json(path: Path, value: Any) -> None:
    """Writes `value` atomically as indented JSON, in UTF-8."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write_bytes(path, text.encode("utf-8", "backslashreplace"))  # lone surrogates, of paths that are not UTF-8


@contextlib.contextmanager
def storage_errors(failed: str, folder: Path) -> Iterator[None]:
    """Turns the errors of a full, read-only or failing disk into an InputError: what `failed`, why, on which disk."""
    try:
        yield
    except Exception as error:  # tensorstore's are of several types
        reason = storage_reason(error)
        if reason is None:
            raise
        folder = Path(os.path.realpath(folder))
        disk = next(path for path in (folder, *folder.parents) if os.path.ismount(path))  # is_mount raises in 3.11
        raise InputError(f"workdir: {failed} ({reason}, on the disk of {disk})") from error


def check_output(field: str, path: str | Path, in_place: bool = False) -> Path:
    """The path of a file to be written later; raises InputError now where writing would fail then.

    A file that is there is to be replaced by a new one, or to be written over, `in_place`.
    """
    if is_url(path):
        raise InputError(f"{field}: {path} is a URL; give the path of a file")
    path = expanded(field, path)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a loop of links, a name that is too long
        raise InputError(f"{field}: {shown(str(path))}: {error.strerror}") from None
    if path.is_dir():
        raise InputError(f"{field}={path}: is a folder; give the path of a file")
    if not path.parent.is_dir():
        raise InputError(f"{field}={path}: no folder {path.parent}; make it first")
    target = output_path(path)
    needed = [target] if target.exists() else []
    if not (_is_special(target) or (in_place and needed)):
        needed.append(target.parent)  # where the new file is written, before it takes the name of the old one
    if refused := [str(place) for place in needed if not os.access(place, os.W_OK)]:
        raise InputError(f"{field}={path}: {refused[0]} can't be written to; give a path that can")
    return path


def output_path(path: str | Path) -> Path:
    """Where to write what is to be in the file `path`: links to files are followed, so that they remain links."""
    path = Path(path).expanduser()
    return path if _is_special(path) else path.resolve()  # what /dev/stdout links to may have no path


def _is_special(path: Path) -> bool:
    """Whether something is there that is no file, such as a pipe or a device."""
    return path.exists() and not path.is_file()


def check_pairing(paths: Sequence[str], counts: Sequence[int]) -> None:
    """Refuses two files with these numbers of lines if line n of one cannot belong to line n of the other."""
    source, target = counts
    if source != target:
        raise InputError(f"{paths[0]} has {source} lines, {paths[1]} has {target}; they must pair line by line")


@contextlib.contextmanager
def new_folder(field: str, path: str | Path) -> Iterator[Path]:
    """Yields a folder to fill, which gets the name `path` once it is complete; refuses a `path` that holds anything.

    Until then its name is PATH.partial. On an error, or when a signal ends the process (`signals.watch`), it is removed
    together with the parents that were made for it.
    """
    if is_url(path):
        raise InputError(f"{field}: {path} is a URL; give the path of a folder")
    with _folder_errors(field, path):
        folder = Path(path).expanduser().resolve()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"{field}: {path} exists and is not an empty folder; choose a new one")
        partial = folder.with_name(folder.name + ".partial")
        made = [parent for parent in partial.parents if not parent.exists()]
    with signals.cleanup(functools.partial(remove_folder, partial, made)):
        with _folder_errors(field, path):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        with full_disk_named(path):
            yield partial
        with _folder_errors(field, path):  # something may have taken its place meanwhile
            os.replace(partial, folder)


def remove_folder(folder: Path, parents: Sequence[Path] = ()) -> None:
    """Removes a folder in which another thread may be writing, and those of `parents` that are then empty."""
    for _ in range(_ATTEMPTS):
        if not folder.is_dir():
            break
        shutil.rmtree(folder, ignore_errors=True)
    for parent in parents:
        with contextlib.suppress(OSError):  # it is not empty, as it should be if nothing failed
            parent.rmdir()


@contextlib.contextmanager
def _folder_errors(field: str, path: str | Path) -> Iterator[None]:
    """Turns the operating system's refusal to make a folder into a one-line InputError."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, or a ~user that is nobody
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{field}: no folder {shown(str(path))} can be made: {reason}; choose another") from None


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


def check_files(folder: Path, checksums: Mapping[str, str]) -> None:
    """Refuses a folder where one of these files is missing or has another SHA-256."""
    for name, expected in checksums.items():
        path = folder / name
        if not path.is_file() or sha256(path) != expected:
            raise DamagedError(f"{path} is damaged or missing; delete {folder} and run again")


def try_lock(lock: Path) -> TextIO | None:
    """Exclusive file lock (flock), held until the returned file is closed; None where another process holds it."""
    file = lock.open("w")
    try:
        _flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, lock.parent)
    except BlockingIOError:
        file.close()
        return None
    return file


def _flock(handle: int, operation: int, folder: Path) -> None:
    """flock(2) for `folder`, whose file system may be mounted without it, as Lustre often is."""
    try:
        fcntl.flock(handle, operation)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        reason = os.strerror(error.errno)
        raise InputError(
            f"{folder}: its file system has no file locks ({reason}); mount it with them, or give another folder"
        ) from None


@contextlib.contextmanager
def folder_lock(folder: Path, held: str = "") -> Iterator[None]:
    """Exclusive flock on a folder, made if it does not exist; waited for, and released when the process dies.

    The holder may remove the folder: whoever waited for it then locks a new one. Where another process holds the lock,
    `held` says so to people: the wait may be long.
    """
    while (handle := _locked(folder, held)) is None:
        pass
    try:
        yield
    finally:
        os.close(handle)


def _locked(folder: Path, held: str) -> int | None:
    """The handle of a locked folder; None if another process has removed the folder meanwhile."""
    try:
        folder.mkdir(parents=True, exist_ok=True)  # FileNotFoundError: the file system refuses, as /proc does
    except FileExistsError:  # raised for what is no folder, and for a folder that was removed while mkdir looked at it
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                raise
        return None
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        _flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, folder)
    except BlockingIOError:
        if held:
            print(f"{held}; waiting for it", file=sys.stderr, flush=True)
        _flock(handle, fcntl.LOCK_EX, folder)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(handle), os.stat(folder)):
            return handle
    os.close(handle)
    return None
