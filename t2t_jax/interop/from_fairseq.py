"""A fairseq checkpoint of the `transformer` family as a run folder.

    python -m t2t_jax.interop.from_fairseq checkpoint_best.pt dict.en.txt dict.de.txt RUN --sentencepiece=spm.model

fairseq's sinusoids are those of the paper's code (`model.positions='t2t'`) but start at position padding_idx + 1, and
its decoder starts from the embedding of EOS. Neither is a layout of ours, and both are a table: the model becomes one
of `model.positions='learned'`, whose rows are fairseq's positions, the start symbol added to the target's first.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from t2t_jax.data.tokenizer import UNKNOWN
from t2t_jax.errors import InputError
from t2t_jax.files import read_text
from t2t_jax.interop.embeddings import from_tables
from t2t_jax.interop.imported import existing, read_torch_file, run_command, write_run
from t2t_jax.interop.torch_names import Params, State, from_torch, has_attention_bias, refuse_rest, take
from t2t_jax.interop.vocabulary import in_our_order
from t2t_jax.model.layers import t2t_positions
from t2t_jax.model.transformer import TransformerConfig

_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # fairseq.data.Dictionary: ids 0 to 3
_PAD, _EOS = 1, 2
_NEVER = -1e4  # a logit whose probability is 0 in float32

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
_SAME_IN_BOTH = ("layers", "embed_dim", "ffn_embed_dim", "attention_heads", "normalize_before", "learned_pos")
_DEFAULTS = {"layers": 6, "embed_dim": 512, "ffn_embed_dim": 2048, "attention_heads": 8}


def from_fairseq(
    checkpoint: str | Path, dictionaries: Sequence[str | Path], run: str | Path, *, sentencepiece: str | Path
) -> None:
    """Writes the run folder `run`; the model computes what fairseq's does."""
    saved = read_torch_file("checkpoint", existing("checkpoint", checkpoint))
    theirs = _arguments(saved)
    shape = _shape(theirs)
    ids = _dictionary(dictionaries)
    spm = existing("sentencepiece", sentencepiece).read_bytes()
    vocabulary = in_our_order(spm, ids, pad="<pad>", eos="</s>", unknown="<unk>")
    state = {name: tensor.float().numpy() for name, tensor in saved["model"].items() if ".version" not in name}
    tables, start = _tables(state, theirs, len(ids))
    positions = _positions(state, theirs, start)
    embeddings = from_tables(*_reorder(tables, vocabulary.ids, _final_norm(state, shape)))
    config = TransformerConfig(
        vocab_size=len(vocabulary.ids),
        attention_bias=has_attention_bias(state),
        share_embeddings="embedding" in embeddings,
        positions="learned",
        max_positions=len(positions["source_positions"]["table"]),
        layer_norm_epsilon=1e-5,  # PyTorch's, which fairseq never changes
        **shape,
    )
    params = from_torch(state, config) | embeddings | positions
    refuse_rest(state)
    languages = (theirs.get("source_lang") or "source", theirs.get("target_lang") or "target")
    write_run(
        run, config, params, vocabulary.model, origin="fairseq", max_length=config.max_positions, languages=languages
    )


def _arguments(saved: Any) -> dict[str, Any]:
    """The model's fields, flat: of `args`, or of `cfg['model']` where newer versions keep them."""
    if not isinstance(saved, dict) or not isinstance(saved.get("model"), dict):
        raise InputError("checkpoint: no 'model' in it; give a checkpoint that fairseq-train wrote")
    args = saved.get("args") or (saved.get("cfg") or {}).get("model")
    args = dict(vars(args)) if isinstance(args, argparse.Namespace) else args
    if not isinstance(args, dict):
        raise InputError("checkpoint: neither 'args' nor 'cfg' says how the model is built")
    for stack in ("encoder", "decoder"):
        if isinstance(args.get(stack), dict):
            args = args | {f"{stack}_{field}": value for field, value in args[stack].items()}
    return args


def _shape(theirs: dict[str, Any]) -> dict[str, Any]:
    """The fields of our config; refuses what our model does not have."""
    for field, value in _REQUIRED.items():
        if theirs.get(field, value) != value:
            raise InputError(f"checkpoint: {field} is {theirs[field]!r}; our model has {value!r} only")
    found = {}
    for field in _SAME_IN_BOTH:
        encoder, decoder = (
            theirs.get(f"{stack}_{field}", _DEFAULTS.get(field, False)) for stack in ("encoder", "decoder")
        )
        if encoder != decoder:
            raise InputError(f"checkpoint: encoder_{field}={encoder}, decoder_{field}={decoder}; ours must be equal")
        found[field] = encoder
    width = found["embed_dim"] // found["attention_heads"]
    return {
        "num_layers": found["layers"],
        "d_model": found["embed_dim"],
        "d_ff": found["ffn_embed_dim"],
        "num_heads": found["attention_heads"],
        "d_k": width,
        "d_v": width,
        "dropout": float(theirs.get("dropout", 0.1)),
        "attention_dropout": float(theirs.get("attention_dropout", 0.0)),
        "norm": "pre" if found["normalize_before"] else "post",
    }


def _dictionary(paths: Sequence[str | Path]) -> dict[str, int]:
    """fairseq's id of each symbol; both languages must share one dictionary."""
    read = [read_text("dictionary", path) for path in paths]
    if any(lines != read[0] for lines in read):
        raise InputError(f"dictionary: {' and '.join(map(str, paths))} differ; our model has one vocabulary for both")
    symbols = [*_SPECIAL, *(line.removesuffix(" #fairseq:overwrite").rpartition(" ")[0] for line in read[0])]
    return {symbol: index for index, symbol in enumerate(symbols)}


def _tables(state: State, theirs: dict[str, Any], size: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Source, target and softmax embeddings in fairseq's order, scaled as ours are; and the start symbol's vector."""
    source, target = (take(state, f"{stack}.embed_tokens.weight") for stack in ("encoder", "decoder"))
    softmax = state.pop("decoder.output_projection.weight", state.pop("decoder.embed_out", target))
    for table in (source, target, softmax):
        if len(table) != size:
            raise InputError(f"dictionary: {size} symbols with the four special ones, but embeddings of {len(table)}")
    d_model = source.shape[1]
    scale = d_model**-0.5 if theirs.get("no_scale_embedding") else 1.0
    return [scale * source, scale * target, softmax], scale * target[_EOS] * d_model**0.5


def _positions(state: State, theirs: dict[str, Any], start: np.ndarray) -> Params:
    """The vector of each position, the start symbol's own added to the target's position 0, where it always is."""
    lengths = [theirs.get(f"max_{side}_positions") or 1024 for side in ("source", "target")]
    rows = max(lengths)
    tables = {}
    for stack, side in (("encoder", "source"), ("decoder", "target")):
        state.pop(f"{stack}.embed_positions._float_tensor", None)
        if theirs.get(f"{stack}_learned_pos"):
            learned = take(state, f"{stack}.embed_positions.weight")[_PAD + 1 :]
            table = learned[np.minimum(np.arange(rows), len(learned) - 1)]
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
    total = np.sum(bias / scale)
    if not abs(total) > 1e-3:
        raise InputError(
            "sentencepiece: it has pieces that the dictionary lacks, and the last layer normalisation has no bias to "
            "give them probability 0; add them to the dictionary and the embeddings"
        )
    return (_NEVER / total / scale).astype(np.float32)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m t2t_jax.interop.from_fairseq", description=__doc__)
    parser.add_argument("checkpoint", help="what fairseq-train wrote; no code in it is run")
    parser.add_argument("dictionaries", nargs="+", metavar="dictionary", help="dict.*.txt, both the same")
    parser.add_argument("run", help="the run folder to write")
    parser.add_argument("--sentencepiece", required=True, help="the SentencePiece model that cut the text")
    return run_command(parser, from_fairseq, argv)


if __name__ == "__main__":
    sys.exit(main())
