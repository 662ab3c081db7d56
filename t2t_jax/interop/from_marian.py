"""A Hugging Face Marian folder as a run folder.

    python -m t2t_jax.interop.from_marian FOLDER RUN

Models with the paper's parts: ReLU, one SentencePiece model for both languages, a start symbol that is the zero
vector, no bias on the logits, as many layers, heads and inner units in one stack as in the other.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t2t_jax.data.tokenizer import PAD
from t2t_jax.errors import InputError
from t2t_jax.files import read_json
from t2t_jax.interop.embeddings import from_tables
from t2t_jax.interop.export import need
from t2t_jax.interop.imported import existing, read_torch_file, run_command, write_run
from t2t_jax.interop.to_marian import sines_first
from t2t_jax.interop.torch_names import State, from_torch, has_attention_bias, permute_channels, refuse_rest
from t2t_jax.interop.vocabulary import Vocabulary, in_our_order
from t2t_jax.model.transformer import TransformerConfig

LAYER_NORM_EPSILON = 1e-5  # PyTorch's; Marian's layers have no other


def from_marian(folder: str | Path, run: str | Path) -> None:
    """Writes the run folder `run`; the model computes what `MarianMTModel` does."""
    folder = Path(folder).expanduser()
    theirs = read_json(existing("folder", folder / "config.json"))
    _check(theirs)
    vocabulary = _vocabulary(folder)
    state = _state(folder)
    order = np.argsort(sines_first(theirs["d_model"]))
    state = permute_channels({name.removeprefix("model."): value for name, value in state.items()}, order)
    embeddings = from_tables(*_tables(state, theirs, vocabulary.ids))
    config = _config(theirs, len(vocabulary.ids), has_attention_bias(state), shared="embedding" in embeddings)
    params = from_torch(state, config) | embeddings
    refuse_rest({name: value for name, value in state.items() if "embed_positions" not in name and value.any()})
    tokenizer = folder / "tokenizer_config.json"
    tokenizer = read_json(tokenizer) if tokenizer.is_file() else {}
    languages = (tokenizer.get("source_lang") or "source", tokenizer.get("target_lang") or "target")
    max_length = theirs.get("max_position_embeddings", 1024)
    write_run(run, config, params, vocabulary.model, origin="marian", max_length=max_length, languages=languages)


def _check(theirs: dict[str, Any]) -> None:
    wanted = {"model_type": "marian", "activation_function": "relu"}
    for field, value in wanted.items():
        if theirs.get(field) != value:
            raise InputError(f"config.json: {field} is {theirs.get(field)!r}; our model has {value!r} only")
    for field in ("layers", "attention_heads", "ffn_dim"):
        encoder, decoder = (theirs[f"{stack}_{field}"] for stack in ("encoder", "decoder"))
        if encoder != decoder:
            raise InputError(f"config.json: encoder_{field}={encoder}, decoder_{field}={decoder}; ours must be equal")


def _config(theirs: dict[str, Any], vocab_size: int, attention_bias: bool, shared: bool) -> TransformerConfig:
    width = theirs["d_model"] // theirs["encoder_attention_heads"]
    return TransformerConfig(
        vocab_size=vocab_size,
        num_layers=theirs["encoder_layers"],
        d_model=theirs["d_model"],
        d_ff=theirs["encoder_ffn_dim"],
        num_heads=theirs["encoder_attention_heads"],
        d_k=width,
        d_v=width,
        dropout=float(theirs.get("dropout", 0.1)),
        attention_dropout=float(theirs.get("attention_dropout", 0.0)),
        attention_bias=attention_bias,
        share_embeddings=shared,
        layer_norm_epsilon=LAYER_NORM_EPSILON,
    )


def _state(folder: Path) -> State:
    """All parameters, float32."""
    if (folder / "model.safetensors").is_file():
        need("safetensors")
        from safetensors.numpy import load_file

        state = load_file(folder / "model.safetensors")
    else:
        tensors = read_torch_file("folder", existing("folder", folder / "pytorch_model.bin"))
        state = {name: tensor.float().numpy() for name, tensor in tensors.items()}
    return {name: np.asarray(value, np.float32) for name, value in state.items()}


def _vocabulary(folder: Path) -> Vocabulary:
    """One SentencePiece model for both languages, and Marian's id of each piece."""
    source, target = (existing("folder", folder / f"{side}.spm").read_bytes() for side in ("source", "target"))
    if source != target:
        raise InputError("source.spm and target.spm differ; our model has one vocabulary for both languages")
    found = in_our_order(
        source, read_json(existing("folder", folder / "vocab.json")), pad="<pad>", eos="</s>", unknown="<unk>"
    )
    if -1 in found.ids:
        raise InputError(f"vocab.json lacks {np.sum(found.ids < 0)} pieces of source.spm; it must hold all of them")
    return found


def _tables(state: State, theirs: dict[str, Any], ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Source, target and softmax embeddings in our order of ids, scaled as ours are."""
    shared = state.pop("shared.weight", None)
    source, target = (state.pop(f"{stack}.embed_tokens.weight", shared) for stack in ("encoder", "decoder"))
    softmax = state.pop("lm_head.weight", target)
    if source is None or target is None:
        raise InputError("folder: no embedding among the parameters (model.shared or model.encoder.embed_tokens)")
    if np.any(state.pop("final_logits_bias", 0)):
        raise InputError("folder: final_logits_bias is not zero; our softmax has no bias")
    start = theirs.get("decoder_start_token_id")
    if start != ids[PAD] or target[start].any():
        raise InputError(
            f"config.json: decoder_start_token_id={start} must be <pad> ({ids[PAD]}) with a zero embedding; ours is"
        )
    scale = 1.0 if theirs.get("scale_embedding") else theirs["d_model"] ** -0.5
    return scale * source[ids], scale * target[ids], softmax[ids]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m t2t_jax.interop.from_marian", description=__doc__)
    parser.add_argument("folder", help="what MarianMTModel.save_pretrained and MarianTokenizer.save_pretrained wrote")
    parser.add_argument("run", help="the run folder to write")
    return run_command(parser, from_marian, argv)


if __name__ == "__main__":
    sys.exit(main())
