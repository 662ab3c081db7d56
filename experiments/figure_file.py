"""The file that a figure is written to: what may be given is checked before any work is done."""

from pathlib import Path
from typing import Any

from t2t_jax.errors import InputError
from t2t_jax.files import check_output

_SUFFIXES = (".png", ".svg")


def figure_file(flag: str, path: str) -> Path:
    """The path given as `flag`; refuses one that no figure could be written to."""
    if Path(path).suffix not in _SUFFIXES:
        raise InputError(f"{flag}={path}: must end in {' or '.join(_SUFFIXES)}")
    return check_output(flag, path, in_place=True)


def save(figure: Any, flag: str, path: Path, dots_per_inch: int) -> None:
    """Writes the figure to the file given as `flag`."""
    try:
        figure.savefig(path, dpi=dots_per_inch)
    except OSError as error:
        raise InputError(f"{flag}={path} can't be written: {error.strerror}") from None
