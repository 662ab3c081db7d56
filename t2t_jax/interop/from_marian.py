"""Imports a Hugging Face Marian model: its folder becomes a run folder.

    python -m t2t_jax.interop.from_marian FOLDER RUN

FOLDER is what `save_pretrained` of MarianMTModel and MarianTokenizer writes, such as a published Opus-MT model. Encoder
and decoder must be of equal size, and the embedding of the start symbol the zero vector. Where source and target have
SentencePiece models of their own, they become separate vocabularies.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from t2t_jax.argument_parser import argument_parser
from t2t_jax.data.task import JOINT_FILE, SOURCE_FILE, TARGET_FILE
from t2t_jax.data.tokenizer import LANGUAGE_CODE, PAD, read_model
from t2t_jax.errors import InputError, shown
from t2t_jax.files import existing_file, new_folder
from t2t_jax.interop import foreign
from t2t_jax.interop.embeddings import ZERO_PROBABILITY, from_tables
from t2t_jax.interop.imported import assemble, run_command, write_run
from t2t_jax.interop.to_marian import sines_first
from t2t_jax.interop.torch_names import Params, State, permute_channels, torch_shapes
from t2t_jax.interop.vocabulary import Vocabulary, in_our_order, of_source, of_target
from t2t_jax.model.transformer import TransformerConfig

_TABLES = ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
_DICTIONARY = "vocab.json"  # of both sides, or of the source alone
_ACTIVATIONS = {"relu": "relu", "swish": "swish", "silu": "swish", "gelu": "gelu"}


def from_marian(folder: str | Path, run: str | Path) -> None:
    """Writes the run folder `run`; its model computes the same logits as `MarianMTModel`."""
    with new_folder("run", run) as new:
        folder = existing_file("folder", Path(folder) / "config.json").parent
        theirs = foreign.Fields("config.json", foreign.json_object("folder", folder / "config.json"))
        languages = _languages(folder)
        max_length = theirs.integer("max_position_embeddings", 1, foreign.MOST_POSITIONS, default=1024)
        shape = _shape(theirs)
        target_file = "target_vocab.json" if _tokenizer_config(folder).flag("separate_vocabs") else _DICTIONARY
        source, target = _vocabularies(folder, target_file)
        is_joint = source is target
        sizes = {"vocab_size": len(target.ids), "source_vocab_size": None if is_joint else len(source.ids)}
        config = TransformerConfig(**sizes, share_embeddings=is_joint, **shape)
        state = permute_channels(_state(folder, config), np.argsort(sines_first(config.d_model)))
        embeddings = _embeddings(state, theirs, source.ids, target.ids, target_file)
        config, params = assemble(config, state, embeddings)
        files = {JOINT_FILE: target.model} if is_joint else {SOURCE_FILE: source.model, TARGET_FILE: target.model}
        write_run(new, config, params, files, origin="marian", max_length=max_length, languages=languages)


def _shape(theirs: foreign.Fields) -> dict[str, Any]:
    """The fields of our `TransformerConfig`; refuses architectures that our model does not have."""
    theirs.must_be("model_type", "marian")
    for field in ("normalize_before", "normalize_embedding", "add_final_layer_norm"):  # in older configs
        theirs.must_be(field, False, default=False)
    layers = theirs.in_both("layers", lambda name: theirs.integer(name, 1, foreign.MOST_LAYERS))
    num_heads = theirs.in_both("attention_heads", lambda name: theirs.integer(name, 1, foreign.MOST_HEADS))
    d_ff = theirs.in_both("ffn_dim", lambda name: theirs.integer(name, 1, foreign.MOST_CHANNELS))
    d_model = theirs.integer("d_model", 2, foreign.MOST_CHANNELS)
    return {
        "num_layers": layers,
        "d_model": d_model,
        "d_ff": d_ff,
        **foreign.heads("config.json", d_model, num_heads),
        "activation": theirs.one_of("activation_function", _ACTIVATIONS),
        "dropout": theirs.fraction("dropout", 0.1),
        "attention_dropout": theirs.fraction("attention_dropout", 0.0),
        "layer_norm_epsilon": 1e-5,  # PyTorch's default, which Marian always uses
    }


def _languages(folder: Path) -> tuple[str, str]:
    """The source and target language in tokenizer_config.json, where it names them."""
    theirs = _tokenizer_config(folder)
    return theirs.text("source_lang", "source"), theirs.text("target_lang", "target")


def _tokenizer_config(folder: Path) -> foreign.Fields:
    path = folder / "tokenizer_config.json"
    return foreign.Fields(path.name, foreign.json_object("folder", path) if path.exists() else {})


def _state(folder: Path, config: TransformerConfig) -> State:
    """All parameters but the sinusoidal position encodings, which our model computes."""
    path = folder / "model.safetensors"
    if path.exists():
        tensors = foreign.safetensors_tensors("folder", existing_file("folder", path))
    else:
        path = folder / "pytorch_model.bin"
        if not path.exists():
            raise InputError(
                f"folder: no file model.safetensors or pytorch_model.bin in {folder}; weights in several files must be "
                "saved again as one (save_pretrained with a larger max_shard_size)"
            )
        path = existing_file("folder", path)
        tensors = foreign.torch_tensors(f"folder: {path}", foreign.read_torch_file("folder", path))
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if "embed_positions" not in name}
    tables = {f"{name}.weight": (None, config.d_model) for name in _TABLES}
    shapes = torch_shapes(config) | tables | {"final_logits_bias": (1, None)}
    return foreign.read_state(f"folder: {path}", tensors, shapes, path.stat().st_size)


def _vocabularies(folder: Path, target_file: str) -> tuple[Vocabulary, Vocabulary]:
    """One joint vocabulary where both sides have the same files and no language codes; otherwise one of each side."""
    paths = [existing_file("folder", folder / f"{side}.spm") for side in ("source", "target")]
    source, target = (read_model(path, f"folder: {path}") for path in paths)
    ids = _dictionary(folder / _DICTIONARY)
    if target_file != _DICTIONARY or source != target or any(map(LANGUAGE_CODE.fullmatch, ids)):
        target_ids = _dictionary(folder / target_file)
        writes = of_target(target, target_ids, field="target.spm", dictionary=target_file)
        return of_source(source, ids, field="source.spm"), writes
    found = in_our_order(source, ids, field="source.spm")
    if -1 in found.ids:
        raise InputError(f"{_DICTIONARY} lacks {np.sum(found.ids < 0)} pieces of source.spm; it must hold all of them")
    return found, found


def _dictionary(path: Path) -> dict[str, int]:
    """The id of each piece."""
    ids = foreign.json_object("folder", path)
    theirs, pieces = foreign.Fields(path.name, ids), {}
    for piece in ids:
        other = pieces.setdefault(theirs.integer(piece, 0, foreign.MOST_SYMBOLS), piece)
        if other != piece:
            raise InputError(
                f"{path.name}: {shown(other)} and {shown(piece)} have one id, {ids[piece]}; ids must be unique"
            )
    return ids


def _embeddings(
    state: State, theirs: foreign.Fields, source_ids: np.ndarray, target_ids: np.ndarray, target_file: str
) -> Params:
    """Our embeddings and the softmax's bias, if it is not zero, in our order of ids and with our scaling.

    Padding whose logit is always 0 was never trained: Marian has none, its conversion to transformers adds the symbol,
    and generation forbids it (bad_words_ids). Here its probability is 0.
    """
    ends = (source_ids.max(), _DICTIONARY), (target_ids.max(), target_file)
    highest = dict.fromkeys(_TABLES, ends[1]) | {"encoder.embed_tokens": ends[0], "shared": max(ends)}
    for name, (last, file) in highest.items():
        rows = len(state[f"{name}.weight"]) if f"{name}.weight" in state else np.inf
        if rows <= last:
            raise InputError(f"folder: {name}.weight has {rows} rows, but {file} has ids up to {last}")
    shared = state.pop("shared.weight", None)
    if not theirs.flag("share_encoder_decoder_embeddings", default=True):
        shared = None
    source, target = (state.pop(f"{stack}.embed_tokens.weight", shared) for stack in ("encoder", "decoder"))
    is_tied = theirs.flag("tie_word_embeddings", default=True)
    softmax = state.pop("lm_head.weight", target if is_tied else None)
    if any(table is None for table in (source, target, softmax)):
        raise InputError(
            "folder: no embedding among the parameters (model.shared, or model.encoder.embed_tokens and "
            "model.decoder.embed_tokens; lm_head unless tie_word_embeddings); give all weights that config.json implies"
        )
    start = theirs.integer("decoder_start_token_id", 0, len(target) - 1)
    if start != target_ids[PAD] or target[start].any():
        raise InputError(
            f"config.json: decoder_start_token_id={start} must be <pad> ({target_ids[PAD]}) with a zero embedding"
        )
    scale = 1.0 if theirs.flag("scale_embedding") else source.shape[1] ** -0.5
    tables = scale * source[source_ids], scale * target[target_ids], softmax[target_ids]
    embeddings = from_tables(*tables, may_share=source_ids is target_ids)
    bias = state.pop("final_logits_bias", np.zeros((1, len(softmax)), np.float32))[0]
    if len(bias) <= target_ids.max():
        raise InputError(
            f"folder: final_logits_bias has {len(bias)} entries, {target_file} ids up to {target_ids.max()}"
        )
    bias = bias[target_ids]
    if not (softmax[start].any() or bias[PAD]):
        bias[PAD] = ZERO_PROBABILITY
    return embeddings | ({"logits_bias": bias} if bias.any() else {})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser("t2t_jax.interop.from_marian", __doc__)
    parser.add_argument("folder", help="of a model in the format of MarianMTModel, such as a published Opus-MT model")
    parser.add_argument("run", help="the run folder to write")
    return run_command(parser, from_marian, argv)


if __name__ == "__main__":
    sys.exit(main())
