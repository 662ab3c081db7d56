"""Imports a fairseq checkpoint of the `transformer` architectures: it becomes a run folder.

    python -m t2t_jax.interop.from_fairseq checkpoint_best.pt dict.en.txt dict.de.txt RUN --sentencepiece=spm.model

fairseq's position encodings are those of the paper's code (`model.positions='t2t'`) from position padding_idx + 1 on,
and its decoder input starts with the embedding of EOS, where ours starts with a zero vector. The imported model has
`model.positions='learned'` instead: tables of fairseq's encodings, the embedding of EOS added to the target's row 0.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from t2t_jax.argument_parser import argument_parser
from t2t_jax.data.task import JOINT_FILE
from t2t_jax.data.tokenizer import UNKNOWN, longest_whole, read_model
from t2t_jax.errors import InputError, shown
from t2t_jax.files import existing_file, new_folder, read_text
from t2t_jax.interop import foreign
from t2t_jax.interop.embeddings import ZERO_PROBABILITY, from_tables
from t2t_jax.interop.imported import MAX_EXTRA_LENGTH, assemble, run_command, write_run
from t2t_jax.interop.torch_names import Params, State, take, torch_shapes
from t2t_jax.interop.vocabulary import in_our_order
from t2t_jax.model.layers import t2t_positions
from t2t_jax.model.transformer import TransformerConfig

_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # fairseq.data.Dictionary: ids 0 to 3
_PAD, _EOS = 1, 2
_OVERWRITE = " #fairseq:overwrite"  # after the count of a symbol that is there already
_SOFTMAX = ("decoder.output_projection.weight", "decoder.embed_out")  # names in newer and in older versions

# The values that our model supports; they are also fairseq's defaults (base_architecture).
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


def from_fairseq(
    checkpoint: str | Path, dictionaries: Sequence[str | Path], run: str | Path, *, sentencepiece: str | Path
) -> None:
    """Writes the run folder `run`; its model computes the same logits as fairseq's."""
    with new_folder("run", run) as target:
        path = existing_file("checkpoint", checkpoint)
        spm = existing_file("sentencepiece", sentencepiece)
        ids = _dictionary(dictionaries)
        name = f"sentencepiece: {spm}"
        vocabulary = in_our_order(read_model(spm, name), ids, field=name)
        saved = foreign.plain_dict(foreign.read_torch_file("checkpoint", path))
        theirs = _arguments(saved)
        languages = theirs.text("source_lang", "source"), theirs.text("target_lang", "target")
        max_length = max(
            theirs.integer(f"max_{side}_positions", 1, foreign.MOST_POSITIONS, 1024) for side in ("source", "target")
        )
        shape, learned = _shape(theirs), theirs.in_both("learned_pos", theirs.flag)
        if not learned and shape["d_model"] % 2:
            raise InputError(f"checkpoint: embed_dim is {shape['d_model']}; it must be even for sinusoidal positions")
        rows = max_length if learned else longest_whole(max_length) + MAX_EXTRA_LENGTH
        config = TransformerConfig(
            vocab_size=len(vocabulary.ids), positions="learned", max_positions=rows, layer_norm_epsilon=1e-5, **shape
        )  # ε: PyTorch's default, which fairseq always uses
        state = _state(path, saved["model"], config, learned)
        tables, start = _tables(state, theirs, len(ids))
        positions = _positions(state, rows, learned, start)
        embeddings = _embeddings(tables, vocabulary.ids)
        config, params = assemble(config, state, embeddings)
        params, files = params | positions, {JOINT_FILE: vocabulary.model}
        write_run(target, config, params, files, origin="fairseq", max_length=max_length, languages=languages)


def _arguments(saved: dict[str, Any]) -> foreign.Fields:
    """The model's options: `args`, or `cfg['model']` in newer versions, with nested encoder and decoder flattened."""
    if not isinstance(saved.get("model"), dict):
        raise InputError("checkpoint: no 'model' in it; give a checkpoint that fairseq-train wrote")
    cfg = foreign.plain_dict(saved.get("cfg"))
    args = foreign.plain_dict(saved.get("args")) or foreign.plain_dict(cfg.get("model"))
    if not args:
        raise InputError("checkpoint: neither 'args' nor 'cfg' holds the model's options; it must hold one of them")
    for stack in ("encoder", "decoder"):
        args |= {f"{stack}_{field}": value for field, value in foreign.plain_dict(args.get(stack)).items()}
    return foreign.Fields("checkpoint", args)


def _shape(theirs: foreign.Fields) -> dict[str, Any]:
    """The fields of our `TransformerConfig`; refuses architectures that our model does not have."""
    for field, value in _REQUIRED.items():
        theirs.must_be(field, value, default=value)
    layers = theirs.in_both("layers", lambda name: theirs.integer(name, 1, foreign.MOST_LAYERS, 6))
    d_model = theirs.in_both("embed_dim", lambda name: theirs.integer(name, 2, foreign.MOST_CHANNELS, 512))
    d_ff = theirs.in_both("ffn_embed_dim", lambda name: theirs.integer(name, 1, foreign.MOST_CHANNELS, 2048))
    num_heads = theirs.in_both("attention_heads", lambda name: theirs.integer(name, 1, foreign.MOST_HEADS, 8))
    return {
        "num_layers": layers,
        "d_model": d_model,
        "d_ff": d_ff,
        **foreign.heads("checkpoint", d_model, num_heads),
        "dropout": theirs.fraction("dropout", 0.1),
        "attention_dropout": theirs.fraction("attention_dropout", 0.0),
        "norm": "pre" if theirs.in_both("normalize_before", theirs.flag) else "post",
    }


def _state(path: Path, saved: Any, config: TransformerConfig, learned: bool) -> State:
    """All parameters; buffers for version numbers and devices are skipped."""
    skipped = (".version", "embed_positions._float_tensor")
    tensors = foreign.torch_tensors(f"checkpoint: {path}", saved, skipped)
    names = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", *_SOFTMAX]
    names += [f"{stack}.embed_positions.weight" for stack in ("encoder", "decoder")] if learned else []
    shapes = torch_shapes(config) | dict.fromkeys(names, (None, config.d_model))
    return foreign.read_state(f"checkpoint: {path}", tensors, shapes, path.stat().st_size)


def _dictionary(paths: Sequence[str | Path]) -> dict[str, int]:
    """fairseq's id of each symbol of the joint dictionary."""
    read = [_symbols(foreign.text_file("dictionary", path)) for path in paths]
    if any(symbols != read[0] for symbols in read):
        raise InputError(
            f"dictionary: {' and '.join(map(str, paths))} differ; only models with one joint dictionary "
            "(fairseq-preprocess --joined-dictionary) can be imported"
        )
    return {symbol: index for index, symbol in enumerate(read[0])}


def _symbols(path: Path) -> list[str]:
    """The symbols in the order of their ids: four special ones, then one per line of `symbol count`."""
    symbols = dict.fromkeys(_SPECIAL)
    for number, line in enumerate(read_text("dictionary", path), start=1):
        symbol, _, count = line.removesuffix(_OVERWRITE).rpartition(" ")
        if not symbol or not count.isdecimal():
            raise InputError(
                f"dictionary: {path}, line {number}: {shown(line)} must be a symbol, a space and its count"
            )
        if symbol in symbols:
            remedy = "remove one"
            if line.endswith(_OVERWRITE):
                remedy = f"{_OVERWRITE.strip()} gives it a second id; a dictionary with it can't be imported"
            raise InputError(f"dictionary: {path}, line {number}: {shown(symbol)} is there already; {remedy}")
        symbols[symbol] = None
    return list(symbols)


def _tables(state: State, theirs: foreign.Fields, size: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The source, target and softmax tables in fairseq's order with our scaling, and the scaled embedding of EOS."""
    source, target = (take(state, f"{stack}.embed_tokens.weight") for stack in ("encoder", "decoder"))
    is_tied = theirs.flag("share_all_embeddings") or theirs.flag("share_decoder_input_output_embed")
    found = [state.pop(name) for name in _SOFTMAX if name in state]
    tables = [source, target, found[0] if found else target if is_tied else take(state, _SOFTMAX[0])]
    for table in tables:
        if len(table) != size:
            raise InputError(f"dictionary: {size} symbols with the four special ones, but embeddings of {len(table)}")
    d_model = source.shape[1]
    scale = d_model**-0.5 if theirs.flag("no_scale_embedding") else 1.0
    with np.errstate(over="ignore"):  # `write_run` refuses infinities
        return [scale * table for table in tables[:2]] + tables[2:], scale * target[_EOS] * d_model**0.5


def _positions(state: State, rows: int, learned: bool, start: np.ndarray) -> Params:
    """The tables of position encodings; `start`, the start symbol's vector, is added to the target's position 0."""
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


def _embeddings(tables: list[np.ndarray], ids: np.ndarray) -> Params:
    """Our embeddings in our order of ids.

    Pieces that the dictionary lacks are read as fairseq reads them, as the unknown symbol, and never written: a bias on
    the logits gives them probability 0.
    """
    missing = ids < 0
    embeddings = from_tables(*(table[np.where(missing, ids[UNKNOWN], ids)] for table in tables))
    bias = np.where(missing, ZERO_PROBABILITY, 0).astype(np.float32)
    return embeddings | ({"logits_bias": bias} if missing.any() else {})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser("t2t_jax.interop.from_fairseq", __doc__)
    parser.add_argument("checkpoint", help="a checkpoint of fairseq-train; no code in it is executed")
    parser.add_argument("dictionaries", nargs="+", metavar="dictionary", help="dict.*.txt of one joint dictionary")
    parser.add_argument("run", help="the run folder to write")
    parser.add_argument("--sentencepiece", required=True, help="the SentencePiece model that tokenised the text")
    return run_command(parser, from_fairseq, argv)


if __name__ == "__main__":
    sys.exit(main())
