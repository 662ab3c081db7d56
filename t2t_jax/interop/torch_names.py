"""Conversion of parameters to and from the names and layouts that fairseq and Hugging Face Marian share.

The `weight` of a linear layer is [out, in], the transpose of our kernel flattened to a matrix. Heads are contiguous in
the `out` axis of the query, key and value projections, and in the `in` axis of the output projection.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

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


def to_torch(params: Params, config: TransformerConfig) -> State:
    """The parameters of all encoder and decoder layers; without `attention_bias` those biases are zeros."""
    state = {}
    for name, theirs in _layers(config):
        layer = params[name]
        for attention, prefix in _attentions(name, theirs):
            for projection, linear in _PROJECTIONS.items():
                kernel = np.asarray(layer[attention][f"{projection}_kernel"])
                weight = kernel.reshape(math.prod(kernel.shape[: _in_axes(projection)]), -1).T
                bias = layer[attention].get(f"{projection}_bias", np.zeros(len(weight), np.float32))
                state[f"{prefix}.{linear}.weight"] = weight
                state[f"{prefix}.{linear}.bias"] = np.asarray(bias).reshape(-1)
        for dense, linear in _FEED_FORWARD.items():
            state[f"{theirs}.{linear}.weight"] = np.asarray(layer["feed_forward"][dense]["kernel"]).T
            state[f"{theirs}.{linear}.bias"] = np.asarray(layer["feed_forward"][dense]["bias"])
        for sublayer, norm in _norms(name):
            state |= _norm_to_torch(f"{theirs}.{norm}", layer[sublayer]["norm"])
    for stack in _final_norms(config):
        state |= _norm_to_torch(f"{stack}.layer_norm", params[f"{stack}_norm"])
    return {name: np.ascontiguousarray(value, np.float32) for name, value in state.items()}


def torch_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the entries that `from_torch` takes."""
    d, shapes = config.d_model, {}
    inner = {"query": config.num_heads * config.d_k, "key": config.num_heads * config.d_k}
    inner |= dict.fromkeys(("value", "output"), config.num_heads * config.d_v)
    for name, theirs in _layers(config):
        for _, prefix in _attentions(name, theirs):
            for projection, linear in _PROJECTIONS.items():
                rows, columns = (d, inner[projection]) if projection == "output" else (inner[projection], d)
                shapes |= {f"{prefix}.{linear}.weight": (rows, columns), f"{prefix}.{linear}.bias": (rows,)}
        shapes |= {f"{theirs}.fc1.weight": (config.d_ff, d), f"{theirs}.fc1.bias": (config.d_ff,)}
        shapes |= {f"{theirs}.fc2.weight": (d, config.d_ff), f"{theirs}.fc2.bias": (d,)}
        shapes |= {f"{theirs}.{norm}.{part}": (d,) for _, norm in _norms(name) for part in ("weight", "bias")}
    return shapes | {
        f"{stack}.layer_norm.{part}": (d,) for stack in _final_norms(config) for part in ("weight", "bias")
    }


def from_torch(state: State, config: TransformerConfig) -> Params:
    """The parameters of all encoder and decoder layers, removed from `state`; shapes as in `torch_shapes(config)`."""
    params = {}
    for name, theirs in _layers(config):
        layer = params[name] = {"feed_forward": {}}
        for attention, prefix in _attentions(name, theirs):
            layer[attention] = {}
            for projection, linear in _PROJECTIONS.items():
                shape = _kernel_shape(projection, config)
                weight, bias = take(state, f"{prefix}.{linear}.weight"), take(state, f"{prefix}.{linear}.bias")
                layer[attention][f"{projection}_kernel"] = np.ascontiguousarray(weight.T).reshape(shape)
                if config.attention_bias:
                    layer[attention][f"{projection}_bias"] = bias.reshape(shape[_in_axes(projection) :])
        for dense, linear in _FEED_FORWARD.items():
            layer["feed_forward"][dense] = {
                "kernel": take(state, f"{theirs}.{linear}.weight").T,
                "bias": take(state, f"{theirs}.{linear}.bias"),
            }
        for sublayer, norm in _norms(name):
            layer[sublayer] = {"norm": _norm_from_torch(state, f"{theirs}.{norm}")}
    for stack in _final_norms(config):
        params[f"{stack}_norm"] = _norm_from_torch(state, f"{stack}.layer_norm")
    return params


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


def _layers(config: TransformerConfig) -> Iterator[tuple[str, str]]:
    for stack in ("encoder", "decoder"):
        for index in range(config.num_layers):
            yield f"{stack}_layers_{index}", f"{stack}.layers.{index}"


def _attentions(layer: str, theirs: str) -> Iterator[tuple[str, str]]:
    for attention, prefix in _ATTENTIONS.items():
        if attention == "self_attention" or layer.startswith("decoder"):
            yield attention, f"{theirs}.{prefix}"


def _norms(layer: str) -> Iterator[tuple[str, str]]:
    return (item for item in _NORMS.items() if item[0] != "after_cross_attention" or layer.startswith("decoder"))


def _final_norms(config: TransformerConfig) -> tuple[str, ...]:
    return ("encoder", "decoder") if config.norm == "pre" else ()


def _in_axes(projection: str) -> int:
    """The number of input axes of our kernel: [D] of query, key and value, [H, V] of the output projection."""
    return 2 if projection == "output" else 1


def _kernel_shape(projection: str, config: TransformerConfig) -> tuple[int, int, int]:
    if projection == "output":
        return config.num_heads, config.d_v, config.d_model
    return config.d_model, config.num_heads, config.d_v if projection == "value" else config.d_k


def _norm_to_torch(name: str, norm: Params) -> State:
    return {f"{name}.weight": np.asarray(norm["scale"]), f"{name}.bias": np.asarray(norm["bias"])}


def _norm_from_torch(state: State, name: str) -> Params:
    return {"scale": take(state, f"{name}.weight"), "bias": take(state, f"{name}.bias")}
