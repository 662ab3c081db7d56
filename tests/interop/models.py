"""Runs of random models, every parameter of which matters: no zero biases, no normalisation that is the identity."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from t2t_jax.data.tokenizer import Tokenizer, train_vocabulary
from t2t_jax.interop.imported import write_run
from t2t_jax.model.transformer import Transformer, TransformerConfig
from tests import tiny
from tests.data import toy_corpus

CONFIG = TransformerConfig(num_layers=2, d_model=16, d_ff=20, num_heads=4, d_k=4, d_v=4, max_positions=9)


def vocabulary(size: int = 340) -> bytes:
    """Pieces of the toy corpus: bytes, letters and words."""
    return train_vocabulary([side for pair in toy_corpus.pairs(300, 0) for side in pair], size)


def random_params(config: TransformerConfig, seed: int = 0):
    """Kernels 1.5 times as large as at the start of training; scales, biases and row 0 of tables like any other."""
    rng = np.random.default_rng(seed)
    fresh = tiny.variables(Transformer(config), seed)["params"]

    def change(path, x):
        name, noise = path[-1].key, rng.normal(size=x.shape)
        if name.endswith("kernel") or name == "table":
            return np.asarray(1.5 * x, np.float32)
        return np.asarray(0.3 * noise + (name == "scale"), np.float32)

    return jax.tree.map_with_path(change, fresh)


def random_run(folder: Path, seed: int = 0, **changes) -> Path:
    """A run folder; `changes` are fields of the model."""
    pieces = vocabulary()
    config = dataclasses.replace(CONFIG, vocab_size=340, **changes)
    params = random_params(config, seed)
    write_run(folder, config, params, pieces, origin="chance", max_length=256, languages=("en", "de"))
    assert len(Tokenizer(folder / "vocab.model")) == config.vocab_size
    return folder


def batch(vocab_size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Source and target ids [3, 9] and [3, 7], padded, that between them hold any id but 0."""
    rng = np.random.default_rng(seed)
    sides = []
    for lengths, width in (((9, 2, 6), 9), ((4, 7, 1), 7)):
        ids = np.zeros((3, width), np.int32)
        for row, length in enumerate(lengths):
            ids[row, :length] = [*rng.integers(2, vocab_size, length - 1), 1]
        sides.append(ids)
    return tuple(sides)
