"""What the importers share: writing a run folder, and the command line."""

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from t2t_jax import signals
from t2t_jax.checkpoints import CheckpointWriter, named_leaves
from t2t_jax.data.task import Vocabularies
from t2t_jax.errors import DamagedError, InputError, exit_code_of
from t2t_jax.interop.torch_names import Params, State, from_torch, has_attention_bias
from t2t_jax.model.transformer import Transformer, TransformerConfig, param_shapes
from t2t_jax.run_folder import RunFolder

MAX_EXTRA_LENGTH = 50  # of a translation beyond its source (§6.1)


def assemble(config: TransformerConfig, state: State, embeddings: Params) -> tuple[TransformerConfig, Params]:
    """The config with the variants that the parameters show, and our parameters: `embeddings` and those in `state`."""
    config = dataclasses.replace(
        config,
        attention_bias=has_attention_bias(state),
        share_embeddings="embedding" in embeddings,
        logits_bias="logits_bias" in embeddings,
    )
    return config, from_torch(state, config) | embeddings


def write_run(
    folder: Path,
    config: TransformerConfig,
    params: Params,
    vocabularies: Mapping[str, bytes],
    *,
    origin: str,
    max_length: int,
    languages: tuple[str, str],
) -> None:
    """Writes a run folder with one checkpoint, for translation and scoring; training refuses to resume from it.

    `vocabularies` are the contents of its vocabulary files, by name.
    """
    model = dataclasses.asdict(config)
    del model["vocab_size"], model["source_vocab_size"]
    # An imported model has no corpus: with these empty prefixes `evaluate` asks for --source.
    data = {"corpus": "files", "directory": ".", **dict.fromkeys(("archives", "train", "dev", "test"), "")}
    data |= {"max_length": max_length, "source_language": languages[0], "target_language": languages[1]}
    decode = {"beam_size": 4, "alpha": 0.6, "max_extra_length": MAX_EXTRA_LENGTH}  # §6.1
    _check(config, params)
    run = RunFolder(folder)
    described = {"imported_from": origin, "model": model, "data": data, "decode": decode}
    run.describe(described, vocabularies)
    with contextlib.closing(CheckpointWriter(run.averaged, keep=1)) as checkpoints:
        metadata = {"vocabulary": Vocabularies.open(folder).checksum, "imported_from": origin}
        checkpoints.save(0, params, None, metadata)


def _check(config: TransformerConfig, params: Params) -> None:
    wanted, found = named_leaves(param_shapes(Transformer(config))), named_leaves(params)
    for name, leaf in wanted.items():
        if name not in found or found[name].shape != leaf.shape:
            shape = found[name].shape if name in found else None
            raise InputError(f"checkpoint: {name} is {shape}, its config and vocabulary say {leaf.shape}")
        if not np.isfinite(found[name]).all():
            raise DamagedError(f"checkpoint: {name} is not finite in float32 after conversion to our scaling")


def run_command(parser: argparse.ArgumentParser, command: Callable[..., None], argv: Sequence[str] | None) -> int:
    """Calls `command` with the parsed arguments; mistakes end it with one line and exit code 2, signals with 3."""

    def run() -> None:
        with signals.handled_by(signals.end_at_once):
            command(**vars(parser.parse_args(argv)))

    return exit_code_of(run)
