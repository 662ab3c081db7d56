"""Temporary folders, and those that stand for what the user named: a URL, or a model in another system's format."""

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

from t2t_jax import signals
from t2t_jax.errors import StopError
from t2t_jax.files import remove_folder

_originals: dict[str, str] = {}  # of the temporary folders that are open


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder, deleted at the end of the block, also when a signal ends the process."""
    folder = Path(tempfile.mkdtemp(prefix="t2t_jax_"))
    with signals.cleanup(functools.partial(remove_folder, folder)):
        yield folder


def original_of(path: str | Path) -> str:
    """What the user named, if `path` is a temporary folder that stands for it; other paths as they are."""
    return _originals.get(str(path), str(path))


@contextlib.contextmanager
def standing_for(folder: Path, original: str) -> Iterator[None]:
    """For the time of the block, a temporary folder stands for `original`, which errors name in its place."""
    _originals[str(folder)] = original
    try:
        yield
    except StopError as error:
        raise type(error)(str(error).replace(str(folder), original)) from error
    finally:
        del _originals[str(folder)]
