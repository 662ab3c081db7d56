"""A run as a folder that another system loads as it is (`main.py --mode=export`)."""

import contextlib
import importlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from t2t_jax.decoding.trained_model import TrainedModel, restore
from t2t_jax.errors import InputError, InterruptedRun, choice, shown
from t2t_jax.interop.to_ctranslate2 import write_ctranslate2
from t2t_jax.interop.to_marian import write_marian
from t2t_jax.interop.to_safetensors import write_safetensors

# What writes each format, and the optional package it needs.
_WRITERS: dict[str, tuple[Callable[[TrainedModel, Path], None], str]] = {
    "marian": (write_marian, "safetensors"),
    "ctranslate2": (write_ctranslate2, "ctranslate2"),
    "safetensors": (write_safetensors, "safetensors"),
}
FORMATS = tuple(_WRITERS)


def export_run(workdir: str, *, format: str, output: str, step: int | str | None) -> None:
    """Writes the model of a run into the new folder `output`, whole or not at all."""
    write, package = _WRITERS[choice("format", format, FORMATS)]
    need(package)
    with new_folder("output", output) as folder:
        write(restore(workdir, step), folder)


def need(package: str) -> None:
    """Refuses to go on without an optional package."""
    try:
        importlib.import_module(package)
    except ImportError:
        raise InputError(f"this needs the package {package}; pip install 't2t_jax[interop]'") from None


@contextlib.contextmanager
def new_folder(field: str, path: str | Path) -> Iterator[Path]:
    """A folder to fill that bears its name only once it is complete; refuses one that holds anything.

    It is filled under the name PATH.partial, which is removed if anything fails or SIGTERM comes, with the parents that
    were made for it.
    """
    with _refusals(field, path):
        folder = Path(path).expanduser().resolve()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"{field}: {path} exists and is not an empty folder; choose a new one")
        partial = folder.with_name(folder.name + ".partial")
        made = [parent for parent in partial.parents if not parent.exists()]
    try:
        with _refusals(field, path):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        with _ended_by_sigterm(field, path):
            yield partial
        with _refusals(field, path):  # something may have taken its place meanwhile
            os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):  # it is not empty, as it should be if nothing failed
                parent.rmdir()


@contextlib.contextmanager
def _ended_by_sigterm(field: str, path: str | Path) -> Iterator[None]:
    """Makes of SIGTERM an exception, so that what was begun is removed; in other threads than the main one, nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_) -> None:
        raise InterruptedRun(f"{field}: stopped by a signal, nothing is left of {path}; the same command begins again")

    usual = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


@contextlib.contextmanager
def _refusals(field: str, path: str | Path) -> Iterator[None]:
    """Says in one line why the operating system does not let a folder be made."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, or a ~user that is nobody
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{field}: no folder {shown(str(path))} can be made: {reason}; choose another") from None
