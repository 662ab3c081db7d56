"""Exports a run as a folder that another system loads directly (`main.py --mode=export`)."""

from collections.abc import Callable
from pathlib import Path

from t2t_jax.decoding.trained_model import TrainedModel, restore
from t2t_jax.files import new_folder
from t2t_jax.interop.optional_packages import need
from t2t_jax.interop.to_ctranslate2 import write_ctranslate2
from t2t_jax.interop.to_marian import write_marian
from t2t_jax.interop.to_safetensors import write_safetensors
from t2t_jax.validation import choice

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
