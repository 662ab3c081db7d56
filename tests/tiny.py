"""A model and data small enough for tests; all sizes differ, so that a swapped axis fails."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from t2t_jax.model.transformer import Transformer, TransformerConfig

B, S, T, D, H, K, V, F, VOCAB = 2, 7, 5, 16, 4, 6, 3, 20, 11
SOURCE_VOCAB = 13  # where the source has a vocabulary of its own

CONFIG = TransformerConfig(
    vocab_size=VOCAB, num_layers=2, d_model=D, d_ff=F, num_heads=H, d_k=K, d_v=V, dropout=0.1, max_positions=9
)
TWO_VOCABULARIES = {"share_embeddings": False, "source_vocab_size": SOURCE_VOCAB}
VARIANTS = [
    {},
    {"norm": "pre"},
    {"attention_bias": True},
    {"positions": "t2t"},
    {"positions": "learned"},
    {"share_embeddings": False},
    TWO_VOCABULARIES,
    {"attention_window": 5},
    {"activation": "swish", "logits_bias": True},
    {"activation": "gelu"},
]


def model(**changes) -> Transformer:
    return Transformer(dataclasses.replace(CONFIG, **changes))


@functools.partial(jax.jit, static_argnums=0)
def _init(model: Transformer, key: jax.Array):
    ids = jnp.ones((1, 2), jnp.int32)
    return model.init(key, ids, ids)


def variables(model: Transformer, seed: int = 0):
    return _init(model, jax.random.key(seed))


@functools.partial(jax.jit, static_argnums=0, static_argnames=("train", "method"))
def apply(model: Transformer, variables, *arguments, **options):
    """`model.apply`, compiled."""
    return model.apply(variables, *arguments, **options)


def sharp_variables(model: Transformer, seed: int = 0):
    """Kernels and embeddings three times as large, so that predictions are far from uniform; a random softmax bias.

    Layer norms stay as they are: larger ones would amplify rounding errors from layer to layer.
    """

    def larger(path, x):
        name = jax.tree_util.keystr(path)
        if "logits_bias" in name:
            return jax.random.normal(jax.random.key(seed), x.shape)
        return x if "norm" in name else 3 * x

    return jax.tree.map_with_path(larger, variables(model, seed))


def sentences(lengths, padded_length: int, seed: int = 0, vocab_size: int = VOCAB) -> jax.Array:
    """Random ids that end with EOS, padded with 0: row b has `lengths[b]` ids."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((len(lengths), padded_length), np.int32)
    for row, length in enumerate(lengths):
        ids[row, : length - 1] = rng.integers(2, vocab_size, length - 1)
        ids[row, length - 1] = 1
    return jnp.asarray(ids)
