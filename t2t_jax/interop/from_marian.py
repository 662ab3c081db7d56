"""Imports a Hugging Face Marian model: its folder becomes a run folder.

    python -m t2t_jax.interop.from_marian FOLDER RUN

The model must have the paper's architecture: ReLU, the zero vector as the embedding of the start symbol, no bias on the
logits, encoder and decoder of equal size. It must have one joint vocabulary.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from t2t_jax.data.tokenizer import PAD, read_model
from t2t_jax.errors import InputError, shown
from t2t_jax.files import existing_file
from t2t_jax.interop.embeddings import from_tables
from t2t_jax.interop.export import new_folder
from t2t_jax.interop.foreign import (
    MOST_CHANNELS,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_POSITIONS,
    MOST_SYMBOLS,
    Fields,
    foreign_json,
    heads,
    read_state,
    read_torch_file,
    safetensors_tensors,
    torch_tensors,
)
from t2t_jax.interop.imported import run_command, write_run
from t2t_jax.interop.to_marian import sines_first
from t2t_jax.interop.torch_names import State, from_torch, has_attention_bias, permute_channels, torch_shapes
from t2t_jax.interop.vocabulary import Vocabulary, in_our_order
from t2t_jax.model.transformer import TransformerConfig

LAYER_NORM_EPSILON = 1e-5  # PyTorch's default, which Marian always uses
_TABLES = ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")


def from_marian(folder: str | Path, run: str | Path) -> None:
    """Writes the run folder `run`; its model computes the same logits as `MarianMTModel`."""
    with new_folder("run", run) as target:
        folder = existing_file("folder", Path(folder) / "config.json").parent
        theirs = Fields("config.json", foreign_json("folder", folder / "config.json"))
        languages = _languages(folder)
        max_length = theirs.integer("max_position_embeddings", 1, MOST_POSITIONS, default=1024)
        shape = _shape(theirs)
        vocabulary = _vocabulary(folder)
        config = TransformerConfig(vocab_size=len(vocabulary.ids), **shape)
        state = permute_channels(_state(folder, config), np.argsort(sines_first(config.d_model)))
        embeddings = from_tables(*_tables(state, theirs, vocabulary.ids))
        config = dataclasses.replace(
            config, attention_bias=has_attention_bias(state), share_embeddings="embedding" in embeddings
        )
        params = from_torch(state, config) | embeddings
        write_run(target, config, params, vocabulary.model, origin="marian", max_length=max_length, languages=languages)


def _shape(theirs: Fields) -> dict[str, float]:
    """The fields of our `TransformerConfig`; refuses architectures that our model does not have."""
    theirs.must_be("model_type", "marian")
    theirs.must_be("activation_function", "relu")
    layers = theirs.in_both("layers", lambda name: theirs.integer(name, 1, MOST_LAYERS))
    num_heads = theirs.in_both("attention_heads", lambda name: theirs.integer(name, 1, MOST_HEADS))
    d_ff = theirs.in_both("ffn_dim", lambda name: theirs.integer(name, 1, MOST_CHANNELS))
    d_model = theirs.integer("d_model", 2, MOST_CHANNELS)
    return {
        "num_layers": layers,
        "d_model": d_model,
        "d_ff": d_ff,
        **heads("config.json", d_model, num_heads),
        "dropout": theirs.fraction("dropout", 0.1),
        "attention_dropout": theirs.fraction("attention_dropout", 0.0),
        "layer_norm_epsilon": LAYER_NORM_EPSILON,
    }


def _languages(folder: Path) -> tuple[str, str]:
    """The source and target language in tokenizer_config.json, where it names them."""
    theirs = _tokenizer_config(folder)
    return theirs.text("source_lang", "source"), theirs.text("target_lang", "target")


def _tokenizer_config(folder: Path) -> Fields:
    path = folder / "tokenizer_config.json"
    return Fields(path.name, foreign_json("folder", path) if path.exists() else {})


def _state(folder: Path, config: TransformerConfig) -> State:
    """All parameters but the sinusoidal position encodings, which our model computes."""
    path = folder / "model.safetensors"
    if path.exists():
        tensors = safetensors_tensors("folder", existing_file("folder", path))
    else:
        path = existing_file("folder", folder / "pytorch_model.bin")
        tensors = torch_tensors(f"folder: {path}", read_torch_file("folder", path))
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if "embed_positions" not in name}
    tables = {f"{name}.weight": (None, config.d_model) for name in _TABLES}
    shapes = torch_shapes(config) | tables | {"final_logits_bias": (1, None)}
    return read_state(f"folder: {path}", tensors, shapes, path.stat().st_size)


def _vocabulary(folder: Path) -> Vocabulary:
    """The joint SentencePiece model, and Marian's id of each piece."""
    if _tokenizer_config(folder).flag("separate_vocabs"):
        raise InputError(
            "tokenizer_config.json: separate_vocabs is True; only models with one joint vocabulary can be imported"
        )
    paths = [existing_file("folder", folder / f"{side}.spm") for side in ("source", "target")]
    source, target = (read_model(path, f"folder: {path}") for path in paths)
    if source != target:
        raise InputError(
            "folder: source.spm and target.spm differ; only models with one joint vocabulary, the same file twice, can "
            "be imported"
        )
    ids = foreign_json("folder", folder / "vocab.json")
    theirs, pieces = Fields("vocab.json", ids), {}
    for piece in ids:
        other = pieces.setdefault(theirs.integer(piece, 0, MOST_SYMBOLS), piece)
        if other != piece:
            raise InputError(
                f"vocab.json: {shown(other)} and {shown(piece)} have one id, {ids[piece]}; ids must be unique"
            )
    found = in_our_order(source, ids, field="source.spm", pad="<pad>", eos="</s>", unknown="<unk>")
    if -1 in found.ids:
        raise InputError(f"vocab.json lacks {np.sum(found.ids < 0)} pieces of source.spm; it must hold all of them")
    return found


def _tables(state: State, theirs: Fields, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The source, target and softmax tables in our order of ids and with our scaling."""
    for name in _TABLES:
        rows = len(state[f"{name}.weight"]) if f"{name}.weight" in state else np.inf
        if rows <= ids.max():
            raise InputError(f"folder: {name}.weight has {rows} rows, but vocab.json has ids up to {ids.max()}")
    shared = state.pop("shared.weight", None)
    source, target = (state.pop(f"{stack}.embed_tokens.weight", shared) for stack in ("encoder", "decoder"))
    softmax = state.pop("lm_head.weight", target)
    if source is None or target is None:
        raise InputError("folder: no embedding among the parameters (model.shared or model.encoder.embed_tokens)")
    if np.any(state.pop("final_logits_bias", 0)):
        raise InputError("folder: final_logits_bias is not zero; it must be, as our softmax has no bias")
    start = theirs.integer("decoder_start_token_id", 0, len(target) - 1)
    if start != ids[PAD] or target[start].any():
        raise InputError(
            f"config.json: decoder_start_token_id={start} must be <pad> ({ids[PAD]}) with a zero embedding"
        )
    scale = 1.0 if theirs.flag("scale_embedding") else source.shape[1] ** -0.5
    return scale * source[ids], scale * target[ids], softmax[ids]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m t2t_jax.interop.from_marian", description=__doc__)
    parser.add_argument("folder", help="written by save_pretrained of MarianMTModel and MarianTokenizer")
    parser.add_argument("run", help="the run folder to write")
    return run_command(parser, from_marian, argv)


if __name__ == "__main__":
    sys.exit(main())
