"""Exports the parameters under our own names, for any program that reads safetensors (docs/parameters.md)."""

import os
import re
from pathlib import Path

import numpy as np

from t2t_jax.checkpoints import named_leaves
from t2t_jax.decoding.trained_model import TrainedModel
from t2t_jax.files import write_json


def write_weights(path: Path, weights: dict[str, np.ndarray], origin: str) -> None:
    """Writes a safetensors file without a second copy of the weights in memory; `origin` is the format it names."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path.touch()
    permissions = path.stat().st_mode
    try:
        save_file(weights, path, metadata={"format": origin})
    except SafetensorError as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):  # as of a full disk
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
        raise
    path.chmod(permissions)  # those of `save_file` are for the owner alone


def write_safetensors(trained: TrainedModel, folder: Path) -> None:
    """Writes model.safetensors, config.json with the sizes of the vocabularies, and the SentencePiece models."""
    named = {name.replace("/", "."): np.asarray(x) for name, x in named_leaves(trained.params).items()}
    write_weights(folder / "model.safetensors", named, "t2t_jax")
    config = trained.run.config
    model = config["model"] | {name: size for name, size in trained.vocabularies.sizes.items() if size}
    write_json(folder / "config.json", config | {"model": model, "step": trained.step})
    trained.vocabularies.write(folder)
