"""Temporary folders that stand for what the user named: a URL, or a model in another system's format."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from t2t_jax.errors import StopError

_originals: dict[str, str] = {}  # of the temporary folders that are open


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
