"""Exports a run as a folder that another system loads directly (`main.py --mode=export`)."""

import contextlib
import functools
import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from t2t_jax import signals
from t2t_jax.decoding.trained_model import TrainedModel, restore
from t2t_jax.errors import InputError, choice, shown
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
_ATTEMPTS = 100  # to remove a folder in which another thread is still writing


def export_run(workdir: str, *, format: str, output: str, step: int | str | None) -> None:
    """Writes the model of a run into the new folder `output`, whole or not at all."""
    write, package = _WRITERS[choice("format", format, FORMATS)]
    need(package)
    with new_folder("output", output) as folder:
        write(restore(workdir, step), folder)


def need(package: str) -> None:
    """Raises InputError where an optional package is not installed."""
    try:
        importlib.import_module(package)
    except ImportError:
        raise InputError(f"this needs the package {package}; pip install 't2t_jax[interop]'") from None


@contextlib.contextmanager
def new_folder(field: str, path: str | Path) -> Iterator[Path]:
    """Yields a folder to fill, which gets the name `path` once it is complete; refuses a `path` that holds anything.

    Until then its name is PATH.partial. On an error, or when a signal ends the process (`signals.watch`), it is removed
    together with the parents that were made for it.
    """
    with _refusals(field, path):
        folder = Path(path).expanduser().resolve()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"{field}: {path} exists and is not an empty folder; choose a new one")
        partial = folder.with_name(folder.name + ".partial")
        made = [parent for parent in partial.parents if not parent.exists()]
    with signals.cleanup(functools.partial(_remove, partial, made)):
        with _refusals(field, path):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        yield partial
        with _refusals(field, path):  # something may have taken its place meanwhile
            os.replace(partial, folder)


def _remove(partial: Path, parents: list[Path]) -> None:
    """Removes a folder, and those of `parents` that are then empty."""
    for _ in range(_ATTEMPTS):
        if not partial.is_dir():
            break
        shutil.rmtree(partial, ignore_errors=True)
    for parent in parents:
        with contextlib.suppress(OSError):  # it is not empty, as it should be if nothing failed
            parent.rmdir()


@contextlib.contextmanager
def _refusals(field: str, path: str | Path) -> Iterator[None]:
    """Turns the operating system's refusal to make a folder into a one-line InputError."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, or a ~user that is nobody
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{field}: no folder {shown(str(path))} can be made: {reason}; choose another") from None
