"""Folders in an object store: s3://, gs:// and whatever else fsspec opens.

An object store has no locks, no renaming and no appending; a folder there is only the common beginning of some names.
All work is therefore done in a copy on this machine, of which changed files are uploaded, each whole. What is valid
only when complete, such as a checkpoint, is a *unit*: a folder with a manifest.json, which is uploaded after all its
other files and deleted before them. A unit without one is what an interrupted upload has left, and is not read.
"""

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from absl import logging

from t2t_jax import signals
from t2t_jax.errors import InputError, InterruptedProcess, on_one_line, shown
from t2t_jax.files import folder_lock, is_url, remove_folder
from t2t_jax.temporary_folders import standing_for, temporary_folder

_MANIFEST = "manifest.json"
_WHOLE = re.compile("")  # the unit is the folder itself
_ATTEMPTS = 20  # to download what another process is replacing
_WAITS = (10, 60, 300)  # seconds, before an upload is tried again: a run of days outlives minutes without a network
_REASONS = {FileNotFoundError: "not found", PermissionError: "no permission"}
_EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs"}  # by scheme; the packages are extras of pyproject.toml

Select = Callable[[set[str]], Iterable[str]]  # among the names of files


def everything(names: set[str]) -> Iterable[str]:
    """Selects all names."""
    return names


class Stamp(NamedTuple):
    """By which a changed file is recognised: its size in bytes, and the time of its last change in nanoseconds."""

    size: int
    changed: int


@contextlib.contextmanager
def local_copy(url: str) -> Iterator[Path]:
    """A temporary folder that stands for `url`: errors raised in the block name the URL, not the folder."""
    with temporary_folder() as directory:
        folder = directory / url.rstrip("/").rpartition("/")[2]
        with standing_for(folder, url):
            yield folder


class RemoteFolder:
    """The folder `url` and its copy `local`. A name is the path of a file in it, with slashes.

    `unit` matches the beginning of a name that is the folder of its unit. `field` is what the user gave as `url`.
    """

    def __init__(self, field: str, url: str, local: Path, unit: re.Pattern[str]):
        self._field, self._url, self._local, self._unit = field, url, local, unit
        self._stamps: dict[str, Stamp] = {}  # of the files that were last seen to be the same on both sides
        self._sent: set[str] = set()  # what may be in the store from here, also where no answer has come
        self._files, self._root = self._connect()

    def _connect(self) -> tuple[Any, str]:
        scheme, separator, path = self._url.partition("://")
        if not separator or scheme != scheme.lower():
            raise InputError(f"{self._field}: {self._url}: write s3:// or gs://, in lower case, with two slashes")
        if scheme in ("file", "local"):
            raise InputError(f"{self._field}: {self._url}: give the path of the folder, {path}")
        if {".", ".."} & set(path.split("/")):
            raise InputError(f"{self._field}: {self._url}: . and .. are names in an object store; leave them out")
        try:
            from fsspec import available_protocols
            from fsspec.core import url_to_fs

            files, root = url_to_fs(self._url, use_listings_cache=False)
        except ImportError:
            install = f"pip install 't2t_jax[{_EXTRAS[scheme]}]'" if scheme in _EXTRAS else "see fsspec's documentation"
            raise InputError(f"{self._field}: {self._url} needs another package: {install}") from None
        except Exception as error:  # of the client library, such as ValueError for what it is not told
            reason = f"can't be opened ({on_one_line(error)[:200]}); correct that, or choose another"
            if scheme not in available_protocols():
                reason = "no such kind of URL; s3:// and gs:// are known"
            raise InputError(f"{self._field}: {self._url}: {reason}") from None
        return files, root.rstrip("/")

    def names(self) -> set[str]:
        """The names in the store, without those of incomplete units."""
        return self._complete(self._list())

    def download(self, select: Select = everything) -> None:
        """Downloads the files that `select` chooses among `names()`."""
        for _ in range(_ATTEMPTS):
            names = sorted(select(self.names()))
            with self._errors():
                try:
                    self._get(names)
                except FileNotFoundError:  # the process that trains has replaced a checkpoint
                    remove_folder(self._local)  # what is left of it must not be uploaded as if it were new
                    continue
            self._stamps = {name: _stamp(self._local / name) for name in names}
            return
        raise InputError(f"{self._field}: what is in {self._url} changes faster than it is read; try again")

    def _get(self, names: list[str]) -> None:
        self._local.mkdir(parents=True, exist_ok=True)
        for name in names:
            (self._local / name).parent.mkdir(parents=True, exist_ok=True)
        if names:
            self._files.get([f"{self._root}/{name}" for name in names], [str(self._local / name) for name in names])

    def upload(self, exclusive: str = "") -> None:
        """Uploads what has changed in the copy since the last call or download, and deletes what has gone from it.

        Only the caller may write units below `exclusive`: those that others have completed there are an InputError;
        what interrupted uploads have left there is deleted. What fails is tried again, unless it is not permitted or
        not found; at last it is an InterruptedProcess.
        """
        for wait in (*_WAITS, None):
            try:
                return self._upload(exclusive)
            except InputError as error:
                if error.__cause__ is None or isinstance(error.__cause__, tuple(_REASONS)):
                    raise
                if wait is None:
                    raise InterruptedProcess(str(error)) from error
                logging.error("%s; the next try is in %d s", error, wait)
                time.sleep(wait)

    def _upload(self, exclusive: str) -> None:
        stamps = {name: _stamp(self._local / name) for name in self._local_names()}
        changed = {name for name in stamps if stamps[name] != self._stamps.get(name)}
        gone = self._stamps.keys() - stamps.keys()
        if not changed and not gone:
            return
        found = self._list()
        complete = self._complete(found)
        below = {name for name in found if exclusive and name.startswith(exclusive)}
        others = below & complete - self._stamps.keys() - self._sent
        if others:
            raise InputError(
                f"{self._field}: another process is writing to {self._url}: {min(others)} is not from here; "
                "choose another"
            )
        replaced = {self._unit_of(name) for name in changed} - {None}
        changed |= {name for name in stamps if self._unit_of(name) in replaced}
        stale = {name for name in found if self._unit_of(name) in replaced}
        stale |= below - complete
        manifests = {name for name in changed if self._is_manifest(name)}
        completed = max((stamps[name].changed for name in manifests), default=0)
        # What was written after the manifests may say that the units are there, as last_saved.json does.
        later = {name for name in changed if self._unit_of(name) is None and stamps[name].changed > completed}
        with self._errors():
            self._remove(stale)
            for names in (changed - manifests - later, manifests, later):
                self._put(sorted(names))
                # At once: if what follows fails, the next try must not replace a unit that is complete.
                self._stamps |= {name: stamps[name] for name in names}
            self._remove(gone & found - stale)
        self._stamps = stamps

    def _put(self, names: list[str]) -> None:
        if names:
            self._sent.update(names)
            self._files.put([str(self._local / name) for name in names], [f"{self._root}/{name}" for name in names])

    def _remove(self, names: set[str]) -> None:
        manifests = {name for name in names if self._is_manifest(name)}
        for part in (manifests, names - manifests):
            if part:
                self._files.rm([f"{self._root}/{name}" for name in sorted(part)])

    def _list(self) -> set[str]:
        with self._errors():
            found = self._files.find(self._root)
        names = {path[len(self._root) :].removeprefix("/") for path in found}
        files = {name for name in names if not f"/{name}".endswith("/")}  # consoles mark folders by empty files
        if outside := sorted(name for name in files if not _is_relative(name)):
            raise InputError(
                f"{self._field}: {self._url}: the name {shown(outside[0])} is not a path below it; delete that file"
            )
        return files

    def _complete(self, names: set[str]) -> set[str]:
        return {name for name in names if (unit := self._unit_of(name)) is None or f"{unit}{_MANIFEST}" in names}

    def _unit_of(self, name: str) -> str | None:
        """The folder of the unit of a file, with a slash at its end; None for a file outside of units."""
        found = self._unit.match(name)
        return found and found.group()

    def _is_manifest(self, name: str) -> bool:
        unit = self._unit_of(name)
        return unit is not None and name == f"{unit}{_MANIFEST}"

    def _local_names(self) -> list[str]:
        paths = (Path(folder) / name for folder, _, names in os.walk(self._local) for name in names)
        return [path.relative_to(self._local).as_posix() for path in paths if not path.name.startswith(".")]

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns the errors of the client libraries, which have types of their own, into an InputError."""
        try:
            yield
        except Exception as error:
            kind = next((text for of, text in _REASONS.items() if isinstance(error, of)), type(error).__name__)
            reason = on_one_line(error)[:200]
            raise InputError(
                f"{self._field}: {self._url}: {kind} ({reason}); correct that, and run the same command again"
            ) from error


def _is_relative(name: str) -> bool:
    """Whether the file of that name is below any folder it is copied to: stores take every name, ../../x too."""
    return "\\" not in name and not {"", ".", ".."} & set(name.split("/"))


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return Stamp(found.st_size, found.st_mtime_ns)


@contextlib.contextmanager
def mirrored(field: str, directory: str, folder: Path) -> Iterator[None]:
    """Where `directory` is a URL: downloads the unit of the name of `folder` from there, if it is complete.

    If it is not, `folder`, which the block makes, is uploaded after the block.
    """
    if not is_url(directory):
        yield
        return

    def remote(copy: Path) -> RemoteFolder:
        return RemoteFolder(field, f"{directory.rstrip('/')}/{folder.name}", copy, _WHOLE)

    is_there = bool(remote(folder).names())
    work = folder.with_name(f".{folder.name}.download")
    if is_there and (work.exists() or not folder.exists()):  # a killed process leaves it, unlocked
        with (
            folder_lock(work, f"another process downloads {folder.name}, to {work}"),
            signals.cleanup(functools.partial(remove_folder, work)),
        ):
            if not folder.exists():
                copy = work / folder.name
                remove_folder(copy)
                remote(copy).download()
                is_there = (copy / _MANIFEST).exists()  # if not, another machine has begun to replace it
                if is_there:
                    os.rename(copy, folder)
    yield
    if not is_there and not remote(folder).names():  # another machine may have uploaded it meanwhile
        remote(folder).upload()
