"""The three embedding tables and the positions of a model, as other systems want them written out."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from t2t_jax.data.tokenizer import PAD
from t2t_jax.errors import InputError
from t2t_jax.interop.torch_names import Params
from t2t_jax.model.layers import sinusoidal_positions, t2t_positions
from t2t_jax.model.transformer import TransformerConfig

_LONGEST_INPUT = 1024  # CTranslate2 reads at most this many source pieces unless told otherwise


def tables(params: Params, config: TransformerConfig) -> dict[str, np.ndarray]:
    """`source`, `target` and `softmax`, [vocab, D] each.

    Padding and the start symbol are the zero vector whatever the table holds for id 0, while the softmax uses that
    row as it is: so the input tables get zeros there and can't be the softmax's own array.
    """
    names = {side: "embedding" for side in ("source", "target", "softmax")}
    if not config.share_embeddings:
        names = {"source": "source_embedding", "target": "target_embedding", "softmax": "softmax"}
    found = {side: np.array(params[name]["table"], np.float32) for side, name in names.items()}
    found["source"][PAD] = found["target"][PAD] = 0
    return found


def from_tables(source: np.ndarray, target: np.ndarray, softmax: np.ndarray) -> Params:
    """The parameters of our embeddings: one matrix where the three agree, the unused rows for id 0 aside."""
    if all(np.array_equal(np.delete(side, PAD, 0), np.delete(softmax, PAD, 0)) for side in (source, target)):
        return {"embedding": {"table": softmax}}
    sides = {"source_embedding": source, "target_embedding": target, "softmax": softmax}
    return {name: {"table": table} for name, table in sides.items()}


def positions(params: Params, config: TransformerConfig, rows: int) -> dict[str, np.ndarray]:
    """The vectors of positions 0, 1, … of `source` and `target`, [rows, D] each."""
    if config.positions == "learned":
        index = np.minimum(np.arange(rows), config.max_positions - 1)
        return {side: np.asarray(params[f"{side}_positions"]["table"])[index] for side in ("source", "target")}
    layout = {"sinusoidal": sinusoidal_positions, "t2t": t2t_positions}[config.positions]
    return dict.fromkeys(("source", "target"), np.asarray(layout(jnp.arange(rows), config.d_model)))


def position_rows(run_config: dict[str, Any]) -> int:
    """Positions to write: the longest input, however long in training, and what a translation may have more."""
    return max(_LONGEST_INPUT, run_config["data"]["max_length"]) + run_config["decode"]["max_extra_length"]


def check_attention(config: TransformerConfig, system: str) -> None:
    """Refuses attention that other systems do not have: of another kind, within a window, or with d_k of its own."""
    if config.attention != "dot_product":
        raise InputError(f"model.attention={config.attention!r}: {system} has 'dot_product' only")
    if config.attention_window:
        raise InputError(f"model.attention_window={config.attention_window}: {system} has unrestricted attention only")
    width = config.d_model / config.num_heads
    if not config.d_k == config.d_v == width:
        raise InputError(
            f"model.d_k={config.d_k}, model.d_v={config.d_v}: {system} has heads of d_model/num_heads = {width:g} only"
        )
