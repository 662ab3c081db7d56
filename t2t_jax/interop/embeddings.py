"""Embedding tables and position encodings in the form that other systems store, and what those systems lack."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from t2t_jax.data.task import Vocabularies
from t2t_jax.data.tokenizer import EOS, PAD, UNKNOWN
from t2t_jax.errors import InputError, shown
from t2t_jax.interop.torch_names import Params
from t2t_jax.model.layers import POSITIONS
from t2t_jax.model.transformer import TransformerConfig

ZERO_PROBABILITY = -1e4  # a logit; its softmax is 0 in float32
_ACTIVATIONS = ("relu", "swish", "gelu")  # by these names in both systems
# The fields of a model that an export writes, refuses or, as dropout, needs not.
_FIELDS = frozenset([
    "vocab_size", "source_vocab_size", "num_layers", "d_model", "d_ff", "activation", "num_heads", "d_k", "d_v",
    "dropout", "attention", "attention_dropout", "attention_window", "positions", "max_positions", "norm",
    "attention_bias", "share_embeddings", "logits_bias", "layer_norm_epsilon",
])  # fmt: skip
_LONGEST_INPUT = 1024  # CTranslate2's default max_input_length, in source tokens


def tables(params: Params, config: TransformerConfig) -> dict[str, np.ndarray]:
    """The `source`, `target` and `softmax` tables, [source vocab, D], [vocab, D] and [vocab, D].

    Our model embeds id 0 (padding and start symbol) as the zero vector whatever row 0 of the table holds, but the
    softmax uses row 0. The input tables are therefore copies with zeros in row 0, never tied to the softmax.
    """
    names = {side: "embedding" for side in ("source", "target", "softmax")}
    if not config.share_embeddings:
        names = {"source": "source_embedding", "target": "target_embedding", "softmax": "softmax"}
    found = {side: np.array(params[name]["table"], np.float32) for side, name in names.items()}
    found["source"][PAD] = found["target"][PAD] = 0
    return found


def from_tables(source: np.ndarray, target: np.ndarray, softmax: np.ndarray, may_share: bool = True) -> Params:
    """The parameters of our embeddings: one shared table where all three are equal, the unused row 0 aside."""
    if may_share and all(
        np.array_equal(np.delete(side, PAD, 0), np.delete(softmax, PAD, 0)) for side in (source, target)
    ):
        return {"embedding": {"table": softmax}}
    sides = {"source_embedding": source, "target_embedding": target, "softmax": softmax}
    return {name: {"table": table} for name, table in sides.items()}


def positions(params: Params, config: TransformerConfig, rows: int) -> dict[str, np.ndarray]:
    """The position encodings of positions 0 to `rows` − 1 for `source` and `target`, [rows, D] each (§3.5)."""
    encoding, index = POSITIONS[config.positions](config.max_positions, config.d_model), jnp.arange(rows)
    if not isinstance(encoding, nn.Module):
        return dict.fromkeys(("source", "target"), np.asarray(encoding(index)))
    params = {side: jax.tree.map(jnp.asarray, params.get(f"{side}_positions", {})) for side in ("source", "target")}
    return {side: np.asarray(encoding.apply({"params": params[side]}, index)) for side in params}


def position_rows(run_config: dict[str, Any]) -> int:
    """How many positions to write: the longest source, and `decode.max_extra_length` more for its translation."""
    return max(_LONGEST_INPUT, run_config["data"]["max_length"]) + run_config["decode"]["max_extra_length"]


def check_layers(config: TransformerConfig, system: str) -> None:
    """Refuses what `system` lacks: own activations, attention other than Eq. 1's, d_k or d_v other than d_model / h.

    A field of one's own, such as RoPE's, is refused unless it is at its default.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in _FIELDS and value != field.default:
            raise InputError(f"model.{field.name}={value!r}: {system} does not know it; give --format=safetensors")
    if config.activation not in _ACTIVATIONS:
        known = ", ".join(map(repr, _ACTIVATIONS))
        raise InputError(f"model.activation={config.activation!r}: {system} has one of {known} only")
    if config.attention != "dot_product":
        raise InputError(f"model.attention={config.attention!r}: {system} has 'dot_product' only")
    if config.attention_window:
        raise InputError(f"model.attention_window={config.attention_window}: {system} has unrestricted attention only")
    width = config.d_model / config.num_heads
    if not config.d_k == config.d_v == width:
        raise InputError(
            f"model.d_k={config.d_k}, model.d_v={config.d_v}: {system} has heads of d_model/num_heads = {width:g} only"
        )


def special_pieces(vocabularies: Vocabularies, system: str) -> tuple[str, str, str]:
    """The names of the padding, EOS and unknown pieces; `system` has one name for each, in both vocabularies."""
    source, target = (tuple(map(vocabulary.piece, (PAD, EOS, UNKNOWN))) for vocabulary in vocabularies)
    if source != target:
        theirs = [", ".join(map(shown, names)) for names in (source, target)]
        raise InputError(
            f"vocabularies: padding, EOS and unknown are {theirs[0]} in the source vocabulary, {theirs[1]} in the "
            f"target's; {system} has one name for each of them; --format=safetensors keeps both vocabularies"
        )
    return source
