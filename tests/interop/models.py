"""Run folders of random models in which every parameter matters: no bias is zero, no LayerNorm is the identity."""

import contextlib
import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
from sentencepiece import sentencepiece_model_pb2

from t2t_jax.checkpoints import CheckpointWriter
from t2t_jax.data.task import JOINT_FILE, SOURCE_FILE, TARGET_FILE, Vocabularies
from t2t_jax.data.tokenizer import EOS, Tokenizer, train_vocabulary
from t2t_jax.interop.imported import write_run
from t2t_jax.model.transformer import Transformer, TransformerConfig
from t2t_jax.run_folder import RunFolder
from tests import tiny
from tests.data import toy_corpus

CONFIG = TransformerConfig(num_layers=2, d_model=16, d_ff=20, num_heads=4, d_k=4, d_v=4, max_positions=9)
# Lines that other systems may hand to SentencePiece as they are.
WHITE_SPACE = [f"one{space}two \u00e4 {space}{space} three{space}" for space in "\t\n\v\f\r\x1c\x85\xa0\u2028\u3000 "]


@functools.cache
def vocabulary(size: int = 340) -> bytes:
    """A SentencePiece model of both sides of the toy corpus: bytes, letters and words."""
    return train_vocabulary([side for pair in toy_corpus.pairs(300, 0) for side in pair], size)


def separate_vocabularies() -> dict[str, bytes]:
    """A SentencePiece model for each side of the toy corpus, by file name; the two differ in size."""
    return {SOURCE_FILE: _vocabulary_of_side(0, 310), TARGET_FILE: _vocabulary_of_side(1, 325)}


@functools.cache
def _vocabulary_of_side(side: int, size: int) -> bytes:
    return train_vocabulary([pair[side] for pair in toy_corpus.pairs(300, 0)], size)


def with_eos_named(model: bytes, name: str) -> bytes:
    """The SentencePiece model with another name for EOS."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    proto.pieces[EOS].piece = proto.trainer_spec.eos_piece = name
    return proto.SerializeToString()


def random_params(config: TransformerConfig, seed: int = 0):
    """Kernels and tables 1.5 times their initial values, row 0 included; random LayerNorm scales and biases."""
    rng = np.random.default_rng(seed)
    fresh = tiny.variables(Transformer(config), seed)["params"]

    def change(path, x):
        name, noise = path[-1].key, rng.normal(size=x.shape)
        if name.endswith("kernel") or name == "table":
            return np.asarray(1.5 * x, np.float32)
        return np.asarray(0.3 * noise + (name == "scale"), np.float32)

    return jax.tree.map_with_path(change, fresh)


def random_run(folder: Path, seed: int = 0, **changes) -> Path:
    """A run folder with a joint vocabulary; `changes` are fields of the model."""
    pieces = vocabulary()
    config = dataclasses.replace(CONFIG, vocab_size=340, **changes)
    params = random_params(config, seed)
    write_run(folder, config, params, {JOINT_FILE: pieces}, origin="chance", max_length=256, languages=("en", "de"))
    assert len(Tokenizer(folder / "vocab.model")) == config.vocab_size
    return folder


def random_run_with_separate_vocabularies(
    folder: Path, seed: int = 0, vocabularies: dict[str, bytes] | None = None, **changes
) -> Path:
    """A run folder with a vocabulary for each side; `changes` are fields of the model."""
    run = RunFolder(random_run(folder, share_embeddings=False, **changes))  # the joint model is replaced
    (folder / "vocab.model").unlink()
    run.describe(run.config, vocabularies or separate_vocabularies())
    vocabularies = Vocabularies.open(folder)
    config = dataclasses.replace(CONFIG, share_embeddings=False, **vocabularies.sizes, **changes)
    with contextlib.closing(CheckpointWriter(run.averaged, keep=1)) as checkpoints:
        params = random_params(config, seed)
        checkpoints.save(1, params, None, {"vocabulary": vocabularies.checksum, "imported_from": "chance"})
    return folder


def batch(vocab_size: int, seed: int = 0, source_vocab_size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Random source and target ids [3, 9] and [3, 7], each row ended by EOS and padded."""
    rng = np.random.default_rng(seed)
    sides = []
    sizes = source_vocab_size or vocab_size, vocab_size
    for lengths, padded_length, size in zip(((9, 2, 6), (4, 7, 1)), (9, 7), sizes, strict=True):
        ids = np.zeros((3, padded_length), np.int32)
        for row, length in enumerate(lengths):
            ids[row, :length] = [*rng.integers(2, size, length - 1), 1]
        sides.append(ids)
    return tuple(sides)
