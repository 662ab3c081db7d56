"""A model and data small enough for tests; all sizes differ, so that a swapped axis fails."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from t2t_jax.model.transformer import Transformer, TransformerConfig, param_shapes

B, S, T, D, H, K, V, F, VOCAB = 2, 7, 5, 16, 4, 6, 3, 20, 11
SOURCE_VOCAB = 13  # where the source has a vocabulary of its own

CONFIG = TransformerConfig(
    vocab_size=VOCAB, num_layers=2, d_model=D, d_ff=F, num_heads=H, d_k=K, d_v=V, dropout=0.1, max_positions=9
)
TWO_VOCABULARIES = {"share_embeddings": False, "source_vocab_size": SOURCE_VOCAB}
VARIANTS = [  # one with several layers is enough for what goes from layer to layer
    {},
    {"num_layers": 1, "norm": "pre"},
    {"num_layers": 1, "attention_bias": True},
    {"num_layers": 1, "positions": "t2t"},
    {"num_layers": 1, "positions": "learned"},
    {"num_layers": 1, "share_embeddings": False},
    {"num_layers": 1, **TWO_VOCABULARIES},
    {"num_layers": 1, "attention_window": 5},
    {"num_layers": 1, "activation": "swish", "logits_bias": True},
    {"num_layers": 1, "activation": "gelu"},
]


def model(**changes) -> Transformer:
    return Transformer(dataclasses.replace(CONFIG, **changes))


def variables(model: Transformer, seed: int = 0):
    """About as large as those of `model.init`, but drawn by NumPy: to compile `model.init` takes more than a second."""
    rng = np.random.default_rng(seed)
    d_model = model.config.d_model

    def draw(path, x):
        if path[-1].key.endswith(("scale", "bias")):
            return jnp.full(x.shape, path[-1].key.endswith("scale"), x.dtype)
        variance = 1 / d_model if path[-1].key == "table" else 2 / (d_model + x.size / d_model)
        return jnp.asarray(rng.normal(0, variance**0.5, x.shape), x.dtype)

    return {"params": jax.tree.map_with_path(draw, param_shapes(model))}


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
