"""Exports to Hugging Face Transformers: a folder that `MarianMTModel` and `MarianTokenizer` load.

Marian's position encodings are the paper's sinusoids with all sines before all cosines, that is, with permuted
channels. The export applies this permutation to the D axis of every parameter; the network computes the same function.
Separate vocabularies become `vocab.json` and `target_vocab.json`, with `separate_vocabs` in the tokenizer's config.
"""

from pathlib import Path
from typing import Any

import numpy as np

from t2t_jax.data.tokenizer import EOS, PAD, Tokenizer
from t2t_jax.decoding.trained_model import TrainedModel
from t2t_jax.errors import InputError
from t2t_jax.files import write_bytes, write_json
from t2t_jax.interop.embeddings import check_layers, position_rows, special_pieces, tables
from t2t_jax.interop.to_safetensors import write_weights
from t2t_jax.interop.torch_names import permute_channels, to_torch
from t2t_jax.interop.vocabulary import with_white_space_rules
from t2t_jax.model.transformer import TransformerConfig

_SYMBOLS = {"pad_token_id": PAD, "decoder_start_token_id": PAD, "eos_token_id": EOS, "forced_eos_token_id": EOS}


def write_marian(trained: TrainedModel, folder: Path) -> None:
    """Writes model.safetensors, and the JSON and SentencePiece files that transformers expects with it."""
    config, run_config = trained.model.config, trained.run.config
    _check(config)
    pad, eos, unknown = special_pieces(trained.vocabularies, "Marian")
    embeddings = tables(trained.params, config)
    state = {f"model.{name}": value for name, value in to_torch(trained.params, config).items()}
    state["model.encoder.embed_tokens.weight"] = embeddings["source"]
    state["model.decoder.embed_tokens.weight"] = embeddings["target"]
    state["lm_head.weight"] = embeddings["softmax"]
    state = permute_channels(state, sines_first(config.d_model))
    bias = trained.params["logits_bias"] if config.logits_bias else np.zeros(config.vocab_size)
    state["final_logits_bias"] = np.asarray(bias, np.float32)[None]
    write_weights(folder / "model.safetensors", state, "pt")

    source, target = trained.vocabularies
    tokens = {"pad_token": pad, "eos_token": eos, "unk_token": unknown}
    rows = position_rows(run_config)
    write_json(folder / "config.json", _model_config(config, rows))
    write_json(folder / "generation_config.json", _generation_config(run_config))
    write_json(folder / "vocab.json", _ids(source))
    if not trained.vocabularies.is_joint:
        write_json(folder / "target_vocab.json", _ids(target))
    data = run_config["data"]
    languages = {"source_lang": data["source_language"], "target_lang": data["target_language"]}
    tokenizer = {"tokenizer_class": "MarianTokenizer", "model_max_length": rows}
    tokenizer["separate_vocabs"] = not trained.vocabularies.is_joint
    write_json(folder / "tokenizer_config.json", tokenizer | tokens | languages)
    for name, vocabulary in (("source.spm", source), ("target.spm", target)):
        write_bytes(folder / name, with_white_space_rules(vocabulary.model))


def _ids(vocabulary: Tokenizer) -> dict[str, int]:
    return {piece: i for i, piece in enumerate(vocabulary.pieces())}


def sines_first(d_model: int) -> np.ndarray:
    """The permutation of channels: Marian's channel i is our channel `sines_first(D)[i]`: 0, 2, 4, … then 1, 3, 5, …"""
    return np.concatenate([np.arange(0, d_model, 2), np.arange(1, d_model, 2)])


def _check(config: TransformerConfig) -> None:
    check_layers(config, "Marian")
    for field, value, wanted in (("positions", config.positions, "sinusoidal"), ("norm", config.norm, "post")):
        if value != wanted:
            raise InputError(f"model.{field}={value!r}: Marian has {wanted!r} only; --format=ctranslate2 has both")


def _model_config(config: TransformerConfig, rows: int) -> dict[str, Any]:
    sizes = {"layers": config.num_layers, "attention_heads": config.num_heads, "ffn_dim": config.d_ff}
    return {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in sizes.items()} | {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "torch_dtype": "float32",
        "activation_function": config.activation,
        "d_model": config.d_model,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "vocab_size": config.source_vocab_size or config.vocab_size,
        "decoder_vocab_size": config.vocab_size,
        "max_position_embeddings": rows,
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": False,
        "tie_word_embeddings": False,
        "static_position_embeddings": True,
        **_SYMBOLS,
        "bos_token_id": None,
    }


def _generation_config(run_config: dict[str, Any]) -> dict[str, Any]:
    """The run's beam size and α. Transformers' length penalty is |Y|^α, the paper's is ((5 + |Y|)/6)^α."""
    decode = run_config["decode"]
    return {
        "num_beams": decode["beam_size"],
        "length_penalty": decode["alpha"],
        "max_length": run_config["data"]["max_length"] + decode["max_extra_length"],
        "bad_words_ids": [[PAD]],
        **_SYMBOLS,
    }
