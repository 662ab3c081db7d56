"""A folder that `ctranslate2.Translator` loads.

Every layout of ours can be written: positions are a table, so the sinusoids, the layout of the paper's code and
learned positions are alike; pre-norm, separate embeddings and separate vocabularies are supported. d_k and d_v must be
d_model / num_heads.
"""

from pathlib import Path
from typing import Any

import numpy as np

from t2t_jax.data.tokenizer import EOS, PAD, UNKNOWN
from t2t_jax.decoding.trained_model import TrainedModel
from t2t_jax.files import write_bytes
from t2t_jax.interop.embeddings import check_attention, position_rows, positions, tables
from t2t_jax.interop.torch_names import State, to_torch
from t2t_jax.model.transformer import TransformerConfig


def write_ctranslate2(trained: TrainedModel, folder: Path) -> None:
    """model.bin, config.json, the pieces of the vocabularies, and the SentencePiece models that cut text into them."""
    config = trained.model.config
    check_attention(config, "CTranslate2")
    rows = position_rows(trained.run.config)
    spec = _spec(config, to_torch(trained.params, config))
    for stack, side in ((spec.encoder, "source"), (spec.decoder, "target")):
        stack.position_encodings.encodings = positions(trained.params, config, rows)[side]
    embeddings = tables(trained.params, config)
    spec.encoder.embeddings[0].weight = embeddings["source"]
    spec.decoder.embeddings.weight = embeddings["target"]
    spec.decoder.projection.weight = embeddings["softmax"]

    source, pieces = (vocabulary.pieces() for vocabulary in trained.vocabularies)
    spec.register_source_vocabulary(source)
    spec.register_target_vocabulary(pieces)
    spec.config.unk_token, spec.config.eos_token = pieces[UNKNOWN], pieces[EOS]
    spec.config.bos_token = spec.config.decoder_start_token = pieces[PAD]
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = config.layer_norm_epsilon
    spec.validate()
    spec.optimize(None)
    spec.save(str(folder))
    for name, content in trained.vocabularies.files.items():
        write_bytes(folder / name, content)


def _spec(config: TransformerConfig, state: State) -> Any:
    """The layers of both stacks."""
    from ctranslate2.specs import common_spec, transformer_spec

    spec = transformer_spec.TransformerSpec.from_config(
        (config.num_layers, config.num_layers),
        config.num_heads,
        pre_norm=config.norm == "pre",
        activation=common_spec.Activation.RELU,
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
    """One layer, or several fused along their outputs."""
    linear.weight = np.concatenate([state[f"{name}.weight"] for name in names])
    linear.bias = np.concatenate([state[f"{name}.bias"] for name in names])


def _set_norm(norm: Any, state: State, name: str) -> None:
    norm.gamma, norm.beta = state[f"{name}.weight"], state[f"{name}.bias"]
