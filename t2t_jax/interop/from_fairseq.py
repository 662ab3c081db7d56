"""A fairseq checkpoint of the `transformer` family as a run folder.

    python -m t2t_jax.interop.from_fairseq checkpoint_best.pt dict.en.txt dict.de.txt RUN --sentencepiece=spm.model

fairseq's sinusoids are those of the paper's code (`model.positions='t2t'`) but start at position padding_idx + 1, and
its decoder starts from the embedding of EOS. Neither is a layout of ours, and both are a table: the model becomes one
of `model.positions='learned'`, whose rows are fairseq's positions, the start symbol added to the target's first.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from t2t_jax.data.tokenizer import UNKNOWN, read_model
from t2t_jax.errors import InputError, shown
from t2t_jax.files import existing_file, read_text
from t2t_jax.interop.embeddings import from_tables
from t2t_jax.interop.export import new_folder
from t2t_jax.interop.foreign import (
    MOST_CHANNELS,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_POSITIONS,
    Fields,
    heads,
    plain_dict,
    read_state,
    read_torch_file,
    torch_tensors,
)
from t2t_jax.interop.imported import run_command, write_run
from t2t_jax.interop.torch_names import Params, State, from_torch, has_attention_bias, take, torch_shapes
from t2t_jax.interop.vocabulary import in_our_order
from t2t_jax.model.layers import t2t_positions
from t2t_jax.model.transformer import TransformerConfig

_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # fairseq.data.Dictionary: ids 0 to 3
_PAD, _EOS = 1, 2
_NEVER = -1e4  # a logit whose probability is 0 in float32
_SOFTMAX = ("decoder.output_projection.weight", "decoder.embed_out")  # newer and older name

# What a field must be, and is where the checkpoint does not say (fairseq's base_architecture).
_REQUIRED = {
    "activation_fn": "relu",
    "adaptive_input": False,
    "adaptive_softmax_cutoff": None,
    "cross_self_attention": False,
    "layernorm_embedding": False,
    "no_cross_attention": False,
    "no_decoder_final_norm": False,
    "no_token_positional_embeddings": False,
}
_MOST_DICTIONARY = 1 << 24  # bytes


def from_fairseq(
    checkpoint: str | Path, dictionaries: Sequence[str | Path], run: str | Path, *, sentencepiece: str | Path
) -> None:
    """Writes the run folder `run`; the model computes what fairseq's does."""
    with new_folder("run", run) as target:
        path = existing_file("checkpoint", checkpoint)
        spm = existing_file("sentencepiece", sentencepiece)
        ids = _dictionary(dictionaries)
        vocabulary = in_our_order(
            read_model(spm, f"sentencepiece: {spm}"), ids, field=f"sentencepiece: {spm}", pad="<pad>", eos="</s>",
            unknown="<unk>",
        )  # fmt: skip
        saved = plain_dict(read_torch_file("checkpoint", path))
        theirs = _arguments(saved)
        languages = theirs.text("source_lang", "source"), theirs.text("target_lang", "target")
        rows = max(theirs.integer(f"max_{side}_positions", 1, MOST_POSITIONS, 1024) for side in ("source", "target"))
        shape, learned = _shape(theirs), theirs.in_both("learned_pos", theirs.flag)
        if not learned and shape["d_model"] % 2:
            raise InputError(f"checkpoint: embed_dim is {shape['d_model']}; it must be even for sinusoidal positions")
        config = TransformerConfig(
            vocab_size=len(vocabulary.ids), positions="learned", max_positions=rows, layer_norm_epsilon=1e-5, **shape
        )  # PyTorch's epsilon, which fairseq never changes
        state = _state(path, saved["model"], config, learned)
        tables, start = _tables(state, theirs, len(ids))
        positions = _positions(state, rows, learned, start)
        embeddings = from_tables(*_reorder(tables, vocabulary.ids, _final_norm(state, shape)))
        config = dataclasses.replace(
            config, attention_bias=has_attention_bias(state), share_embeddings="embedding" in embeddings
        )
        params = from_torch(state, config) | embeddings | positions
        write_run(target, config, params, vocabulary.model, origin="fairseq", max_length=rows, languages=languages)


def _arguments(saved: dict[str, Any]) -> Fields:
    """The model's fields, flat: of `args`, or of `cfg['model']` where newer versions keep them."""
    if not isinstance(saved.get("model"), dict):
        raise InputError("checkpoint: no 'model' in it; give a checkpoint that fairseq-train wrote")
    args = plain_dict(saved.get("args")) or plain_dict(plain_dict(saved.get("cfg")).get("model"))
    if not args:
        raise InputError("checkpoint: neither 'args' nor 'cfg' says how the model is built")
    for stack in ("encoder", "decoder"):
        args |= {f"{stack}_{field}": value for field, value in plain_dict(args.get(stack)).items()}
    return Fields("checkpoint", args)


def _shape(theirs: Fields) -> dict[str, Any]:
    """The fields of our config; refuses what our model does not have."""
    for field, value in _REQUIRED.items():
        theirs.must_be(field, value, default=value)
    layers = theirs.in_both("layers", lambda name: theirs.integer(name, 1, MOST_LAYERS, 6))
    d_model = theirs.in_both("embed_dim", lambda name: theirs.integer(name, 2, MOST_CHANNELS, 512))
    d_ff = theirs.in_both("ffn_embed_dim", lambda name: theirs.integer(name, 1, MOST_CHANNELS, 2048))
    num_heads = theirs.in_both("attention_heads", lambda name: theirs.integer(name, 1, MOST_HEADS, 8))
    return {
        "num_layers": layers,
        "d_model": d_model,
        "d_ff": d_ff,
        **heads("checkpoint", d_model, num_heads),
        "dropout": theirs.fraction("dropout", 0.1),
        "attention_dropout": theirs.fraction("attention_dropout", 0.0),
        "norm": "pre" if theirs.in_both("normalize_before", theirs.flag) else "post",
    }


def _state(path: Path, saved: Any, config: TransformerConfig, learned: bool) -> State:
    """All parameters; of those that count versions or say where a table lies, none."""
    skipped = (".version", "embed_positions._float_tensor")
    tensors = torch_tensors(f"checkpoint: {path}", saved, skipped)
    names = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", *_SOFTMAX]
    names += [f"{stack}.embed_positions.weight" for stack in ("encoder", "decoder")] if learned else []
    shapes = torch_shapes(config) | dict.fromkeys(names, (None, config.d_model))
    return read_state(f"checkpoint: {path}", tensors, shapes, path.stat().st_size)


def _dictionary(paths: Sequence[str | Path]) -> dict[str, int]:
    """fairseq's id of each symbol; both languages must share one dictionary."""
    read = [_symbols(existing_file("dictionary", path)) for path in paths]
    if any(symbols != read[0] for symbols in read):
        raise InputError(
            f"dictionary: {' and '.join(map(str, paths))} differ; only models with one joint dictionary "
            "(fairseq-preprocess --joined-dictionary) can be imported"
        )
    return {symbol: index for index, symbol in enumerate(read[0])}


def _symbols(path: Path) -> list[str]:
    """The four special symbols, and the one of each line, which its count follows."""
    size = path.stat().st_size
    if size > _MOST_DICTIONARY:
        raise InputError(f"dictionary: {path} has {size:,} bytes; at most {_MOST_DICTIONARY:,} are read")
    symbols = dict.fromkeys(_SPECIAL)
    for number, line in enumerate(read_text("dictionary", path), start=1):
        symbol, _, count = line.removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not symbol or not count.isdecimal():
            raise InputError(
                f"dictionary: {path}, line {number}: {shown(line)} must be a symbol, a space and its count"
            )
        if symbol in symbols:
            raise InputError(f"dictionary: {path}, line {number}: {shown(symbol)} is there already; remove one")
        symbols[symbol] = None
    return list(symbols)


def _tables(state: State, theirs: Fields, size: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Source, target and softmax embeddings in fairseq's order, scaled as ours are; and the start symbol's vector."""
    source, target = (take(state, f"{stack}.embed_tokens.weight") for stack in ("encoder", "decoder"))
    found = [state.pop(name) for name in _SOFTMAX if name in state]
    tables = [source, target, *(found[:1] or [target])]
    for table in tables:
        if len(table) != size:
            raise InputError(f"dictionary: {size} symbols with the four special ones, but embeddings of {len(table)}")
    d_model = source.shape[1]
    scale = d_model**-0.5 if theirs.flag("no_scale_embedding") else 1.0
    with np.errstate(over="ignore"):  # infinities are refused when the run is written
        return [scale * table for table in tables[:2]] + tables[2:], scale * target[_EOS] * d_model**0.5


def _positions(state: State, rows: int, learned: bool, start: np.ndarray) -> Params:
    """The vector of each position, the start symbol's own added to the target's position 0, where it always is."""
    tables = {}
    for stack, side in (("encoder", "source"), ("decoder", "target")):
        if learned:
            known = take(state, f"{stack}.embed_positions.weight")[_PAD + 1 :]
            if not len(known):
                raise InputError(f"checkpoint: {stack}.embed_positions.weight has no position; it needs 3 rows or more")
            table = known[np.minimum(np.arange(rows), len(known) - 1)]
        else:
            table = np.array(t2t_positions(jnp.arange(rows) + _PAD + 1, len(start)))
        tables[f"{side}_positions"] = {"table": table}
    tables["target_positions"]["table"][0] += start
    return tables


def _final_norm(state: State, shape: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Scale and bias of the layer normalisation before the softmax."""
    name = f"decoder.layers.{shape['num_layers'] - 1}.final_layer_norm"
    name = "decoder.layer_norm" if shape["norm"] == "pre" else name
    return tuple(take(dict(state), f"{name}.{part}") for part in ("weight", "bias"))


def _reorder(tables: list[np.ndarray], ids: np.ndarray, norm: tuple[np.ndarray, np.ndarray]) -> list[np.ndarray]:
    """The tables in our order of ids. A piece that the dictionary lacks is never read, and must never be written."""
    missing = ids < 0
    tables = [table[np.where(missing, ids[UNKNOWN], ids)] for table in tables]
    if missing.any():
        for table in tables:
            table[missing] = _never(*norm)
    return tables


def _never(scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """A row of the softmax whose logit is always `_NEVER`.

    y = scale·n + bias with Σn = 0 after layer normalisation, so Σ y/scale = Σ bias/scale whatever the sentence.
    """
    with np.errstate(all="ignore"):
        total = np.sum(bias / scale)
        row = (_NEVER / total / scale).astype(np.float32)
    if not abs(total) > 1e-3 or not np.isfinite(row).all():
        raise InputError(
            "sentencepiece: it has pieces that the dictionary lacks, and the last layer normalisation has no bias to "
            "give them probability 0; add them to the dictionary and the embeddings"
        )
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m t2t_jax.interop.from_fairseq", description=__doc__)
    parser.add_argument("checkpoint", help="what fairseq-train wrote; no code in it is run")
    parser.add_argument("dictionaries", nargs="+", metavar="dictionary", help="dict.*.txt, both the same")
    parser.add_argument("run", help="the run folder to write")
    parser.add_argument("--sentencepiece", required=True, help="the SentencePiece model that cut the text")
    return run_command(parser, from_fairseq, argv)


if __name__ == "__main__":
    sys.exit(main())
