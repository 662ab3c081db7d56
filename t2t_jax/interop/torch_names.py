"""Conversion of parameters to and from the names and layouts that fairseq and Hugging Face Marian share.

The `weight` of a linear layer is [out, in], the transpose of our kernel flattened to a matrix. Heads are contiguous in
the `out` axis of the query, key and value projections, and in the `in` axis of the output projection.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from t2t_jax.errors import InputError
from t2t_jax.model.transformer import TransformerConfig

State = dict[str, np.ndarray]
Params = Any

_ATTENTIONS = {"self_attention": "self_attn", "cross_attention": "encoder_attn"}
_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
_FEED_FORWARD = {"hidden": "fc1", "output": "fc2"}
_NORMS = {
    "after_self_attention": "self_attn_layer_norm",
    "after_cross_attention": "encoder_attn_layer_norm",
    "after_feed_forward": "final_layer_norm",
}
# What is not of the layers: embeddings.py has its forms in other systems.
_OTHERS = (
    "embedding", "source_embedding", "target_embedding", "softmax", "logits_bias",
    "source_positions", "target_positions",
)  # fmt: skip


class _Entry(NamedTuple):
    """A parameter: its path in our tree, None for a zero bias that our model lacks; their name; our shape.

    The first `inputs` axes of a kernel are those of the linear layer's input; a vector has none.
    """

    path: tuple[str, ...] | None
    name: str
    shape: tuple[int, ...]
    inputs: int = 0

    @property
    def their_shape(self) -> tuple[int, ...]:
        sizes = math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs])
        return sizes if self.inputs else sizes[:1]


def to_torch(params: Params, config: TransformerConfig) -> State:
    """The parameters of all encoder and decoder layers; without `attention_bias` those biases are zeros.

    Refuses a model with parameters that only we have, those of a field of one's own.
    """
    ours, state, entries = flatten_dict(params), {}, list(_entries(config))
    known = {entry.path for entry in entries}
    if unknown := sorted(path for path in ours if path not in known and path[0] not in _OTHERS):
        raise InputError(
            f"model: {'/'.join(unknown[0])} has no name in the other system; --format=safetensors keeps it"
        )
    for entry in entries:
        value = np.zeros(entry.shape) if entry.path is None else np.asarray(ours[entry.path])
        state[entry.name] = np.ascontiguousarray(value.reshape(entry.their_shape[::-1]).T, np.float32)
    return state


def torch_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the entries that `from_torch` takes."""
    return {entry.name: entry.their_shape for entry in _entries(config)}


def from_torch(state: State, config: TransformerConfig) -> Params:
    """The parameters of all encoder and decoder layers, removed from `state`; shapes as in `torch_shapes(config)`."""
    taken = [(entry.path, take(state, entry.name).T.reshape(entry.shape)) for entry in _entries(config)]
    return unflatten_dict({path: value for path, value in taken if path is not None})


def _entries(config: TransformerConfig) -> Iterator[_Entry]:
    """All parameters of the layers and of the norms after them."""
    d, h, d_k, d_v = config.d_model, config.num_heads, config.d_k, config.d_v
    kernels = {"query": (d, h, d_k), "key": (d, h, d_k), "value": (d, h, d_v), "output": (h, d_v, d)}
    dense_kernels = {"hidden": (d, config.d_ff), "output": (config.d_ff, d)}
    for stack, index in itertools.product(("encoder", "decoder"), range(config.num_layers)):
        layer, theirs = f"{stack}_layers_{index}", f"{stack}.layers.{index}"
        for attention, module in _of_stack(stack, _ATTENTIONS):
            for projection, linear in _PROJECTIONS.items():
                kernel, inputs = kernels[projection], 2 if projection == "output" else 1
                bias = (layer, attention, f"{projection}_bias") if config.attention_bias else None
                name = f"{theirs}.{module}.{linear}"
                yield _Entry((layer, attention, f"{projection}_kernel"), f"{name}.weight", kernel, inputs)
                yield _Entry(bias, f"{name}.bias", kernel[inputs:])
        for dense, linear in _FEED_FORWARD.items():
            path, kernel = (layer, "feed_forward", dense), dense_kernels[dense]
            yield _Entry((*path, "kernel"), f"{theirs}.{linear}.weight", kernel, inputs=1)
            yield _Entry((*path, "bias"), f"{theirs}.{linear}.bias", kernel[1:])
        for sublayer, norm in _of_stack(stack, _NORMS):
            yield from _norm((layer, sublayer, "norm"), f"{theirs}.{norm}", d)
    for stack in ("encoder", "decoder") if config.norm == "pre" else ():
        yield from _norm((f"{stack}_norm",), f"{stack}.layer_norm", d)


def _of_stack(stack: str, names: dict[str, str]) -> list[tuple[str, str]]:
    """Those of a layer's parts that this stack has: only the decoder has cross-attention."""
    return [item for item in names.items() if stack == "decoder" or "cross_attention" not in item[0]]


def _norm(path: tuple[str, ...], name: str, d_model: int) -> Iterator[_Entry]:
    yield _Entry((*path, "scale"), f"{name}.weight", (d_model,))
    yield _Entry((*path, "bias"), f"{name}.bias", (d_model,))


def has_attention_bias(state: State) -> bool:
    """Whether any bias of an attention projection is not zero."""
    linears = tuple(f"{linear}.bias" for linear in _PROJECTIONS.values())
    return any(value.any() for name, value in state.items() if name.endswith(linears))


def permute_channels(state: State, order: np.ndarray) -> State:
    """Permutes the D axis of all parameters: channel i of the result is channel `order[i]` of `state`."""
    into = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "fc1.weight")
    tables = ("embed_tokens.weight", "shared.weight", "lm_head.weight")
    out_of = ("out_proj.weight", "fc2.weight", "out_proj.bias", "fc2.bias", "layer_norm.weight", "layer_norm.bias")

    def permute(name, value):
        if name.endswith(into + tables):
            return np.ascontiguousarray(value[:, order])  # safetensors writes the buffer, ignoring strides
        return value[order] if name.endswith(out_of) else value

    return {name: permute(name, value) for name, value in state.items()}


def take(state: State, name: str) -> np.ndarray:
    """Removes an entry from `state` and returns it; refuses a checkpoint that lacks it."""
    if name not in state:
        raise InputError(f"checkpoint: no parameter {name}; it must hold all parameters that its config implies")
    return state.pop(name)
