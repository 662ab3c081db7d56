"""Exports the parameters under our own names, for any program that reads safetensors (docs/parameters.md)."""

from pathlib import Path

import jax
import numpy as np

from t2t_jax.decoding.trained_model import TrainedModel
from t2t_jax.files import write_bytes, write_json


def write_safetensors(trained: TrainedModel, folder: Path) -> None:
    """Writes model.safetensors, config.json with the sizes of the vocabularies, and the SentencePiece models."""
    from safetensors.numpy import save  # its save_file makes a file that its owner alone can read

    leaves = jax.tree.leaves_with_path(trained.params)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in leaves}
    write_bytes(folder / "model.safetensors", save(named, metadata={"format": "t2t_jax"}))
    config = trained.run.config
    model = config["model"] | {name: size for name, size in trained.vocabularies.sizes.items() if size}
    write_json(folder / "config.json", config | {"model": model, "step": trained.step})
    trained.vocabularies.write(folder)
