"""Exports to CTranslate2: a folder that `ctranslate2.Translator` loads.

CTranslate2 stores position encodings as a table, so all kinds of `model.positions` can be exported; so can pre-norm
models, separate embeddings and separate vocabularies. d_k and d_v must be d_model / num_heads.
"""

from pathlib import Path
from typing import Any

import numpy as np

from t2t_jax.decoding.trained_model import TrainedModel
from t2t_jax.files import write_bytes
from t2t_jax.interop.embeddings import check_layers, position_rows, positions, special_pieces, tables
from t2t_jax.interop.torch_names import State, to_torch
from t2t_jax.interop.vocabulary import with_white_space_rules
from t2t_jax.model.transformer import TransformerConfig


def write_ctranslate2(trained: TrainedModel, folder: Path) -> None:
    """Writes model.bin, config.json, the vocabularies as lists of pieces, and their SentencePiece models."""
    config = trained.model.config
    check_layers(config, "CTranslate2")
    pad, eos, unknown = special_pieces(trained.vocabularies, "CTranslate2")
    rows = position_rows(trained.run.config)
    spec = _spec(config, to_torch(trained.params, config))
    for stack, side in ((spec.encoder, "source"), (spec.decoder, "target")):
        stack.position_encodings.encodings = positions(trained.params, config, rows)[side]
    embeddings = tables(trained.params, config)
    spec.encoder.embeddings[0].weight = embeddings["source"]
    spec.decoder.embeddings.weight = embeddings["target"]
    spec.decoder.projection.weight = embeddings["softmax"]
    if config.logits_bias:
        spec.decoder.projection.bias = np.asarray(trained.params["logits_bias"], np.float32)

    spec.register_source_vocabulary(trained.vocabularies.source.pieces())
    spec.register_target_vocabulary(trained.vocabularies.target.pieces())
    spec.config.unk_token, spec.config.eos_token = unknown, eos
    spec.config.bos_token = spec.config.decoder_start_token = pad
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = config.layer_norm_epsilon
    spec.validate()
    spec.optimize(None)
    spec.save(str(folder))
    for name, model in trained.vocabularies.files.items():
        write_bytes(folder / name, with_white_space_rules(model))


def _spec(config: TransformerConfig, state: State) -> Any:
    """CTranslate2's model specification with the weights of all encoder and decoder layers."""
    from ctranslate2.specs import common_spec, transformer_spec

    spec = transformer_spec.TransformerSpec.from_config(
        (config.num_layers, config.num_layers),
        config.num_heads,
        pre_norm=config.norm == "pre",
        activation=common_spec.Activation[config.activation.upper()],
    )
    for stack in ("encoder", "decoder"):
        layers = getattr(spec, stack)
        for index, layer in enumerate(layers.layer):
            name = f"{stack}.layers.{index}"
            _set_linear(layer.self_attention.linear[0], state, *(f"{name}.self_attn.{x}_proj" for x in "qkv"))
            _set_linear(layer.self_attention.linear[1], state, f"{name}.self_attn.out_proj")
            _set_norm(layer.self_attention.layer_norm, state, f"{name}.self_attn_layer_norm")
            if stack == "decoder":
                _set_linear(layer.attention.linear[0], state, f"{name}.encoder_attn.q_proj")
                _set_linear(layer.attention.linear[1], state, *(f"{name}.encoder_attn.{x}_proj" for x in "kv"))
                _set_linear(layer.attention.linear[2], state, f"{name}.encoder_attn.out_proj")
                _set_norm(layer.attention.layer_norm, state, f"{name}.encoder_attn_layer_norm")
            _set_linear(layer.ffn.linear_0, state, f"{name}.fc1")
            _set_linear(layer.ffn.linear_1, state, f"{name}.fc2")
            _set_norm(layer.ffn.layer_norm, state, f"{name}.final_layer_norm")
        if config.norm == "pre":
            _set_norm(layers.layer_norm, state, f"{stack}.layer_norm")
    return spec


def _set_linear(linear: Any, state: State, *names: str) -> None:
    """Sets one linear layer, or the concatenation of several along their output axis."""
    linear.weight = np.concatenate([state[f"{name}.weight"] for name in names])
    linear.bias = np.concatenate([state[f"{name}.bias"] for name in names])


def _set_norm(norm: Any, state: State, name: str) -> None:
    norm.gamma, norm.beta = state[f"{name}.weight"], state[f"{name}.bias"]
