"""Our own parameters under our own names, for any program that reads safetensors (docs/parameters.md)."""

import shutil
from pathlib import Path

import jax
import numpy as np

from t2t_jax.decoding.translator import TrainedModel
from t2t_jax.files import write_json


def write_safetensors(trained: TrainedModel, folder: Path) -> None:
    """model.safetensors, config.json with the vocabulary's size, vocab.model."""
    from safetensors.numpy import save_file

    leaves = jax.tree.leaves_with_path(trained.params)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in leaves}
    save_file(named, folder / "model.safetensors", metadata={"format": "t2t_jax"})
    config = trained.run.config
    model = config["model"] | {"vocab_size": len(trained.tokenizer)}
    write_json(folder / "config.json", config | {"model": model, "step": trained.step})
    shutil.copyfile(trained.run.vocabulary, folder / "vocab.model")
