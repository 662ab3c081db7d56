"""What the importers share: writing a run folder, and the command line."""

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from t2t_jax import signals
from t2t_jax.checkpoints import CheckpointWriter
from t2t_jax.data.task import Vocabularies
from t2t_jax.errors import DamagedError, InputError, exit_code_of
from t2t_jax.interop.foreign import foreign_json
from t2t_jax.interop.torch_names import Params
from t2t_jax.model.transformer import Transformer, TransformerConfig, param_shapes
from t2t_jax.remote_run import local_runs, needed_to_read
from t2t_jax.run_folder import RunFolder
from t2t_jax.temporary_folders import standing_for, temporary_folder


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
    data = {
        "corpus": "files",
        "directory": ".",
        "archives": "",
        "train": "",
        "dev": "",
        "test": "",
        "max_length": max_length,
    }
    data |= dict(zip(("source_language", "target_language"), languages, strict=True))
    decode = {"beam_size": 4, "alpha": 0.6, "max_extra_length": 50}  # §6.1
    _check(config, params)
    run = RunFolder(folder)
    described = {"imported_from": origin, "model": model, "data": data, "decode": decode}
    run.describe(described, vocabularies)
    with contextlib.closing(CheckpointWriter(run.averaged, keep=1)) as checkpoints:
        metadata = {"vocabulary": Vocabularies.open(folder).checksum, "imported_from": origin}
        checkpoints.save(0, params, None, metadata)


@contextlib.contextmanager
def run_folders(workdir: str | Path, step: int | str | None = None) -> Iterator[str]:
    """`workdir` with a temporary run folder, for the time of the block, for each URL or Marian model in it.

    `workdir` is a run folder or several with commas between, as `load` takes it; of a URL, checkpoint `step` is read.
    """
    from t2t_jax.interop.from_marian import from_marian  # which imports this module

    with contextlib.ExitStack() as stack:
        paths = stack.enter_context(local_runs(str(workdir), needed_to_read(step))).split(",")
        temporary = stack.enter_context(temporary_folder())
        for index, path in enumerate(paths):
            if is_marian(path):
                folder = temporary / str(index) / Path(path).resolve().name  # of "." and ".." too
                folder.parent.mkdir()
                from_marian(path, folder)
                stack.enter_context(standing_for(folder, path))
                paths[index] = str(folder)
        yield ",".join(paths)


def is_marian(path: str | Path) -> bool:
    """Whether a folder holds a model of Hugging Face's MarianMTModel."""
    try:
        return foreign_json("workdir", Path(path) / "config.json").get("model_type") == "marian"
    except (InputError, DamagedError):  # whoever opens it as a run folder says what is wrong with it
        return False


def _check(config: TransformerConfig, params: Params) -> None:
    wanted, found = _leaves(param_shapes(Transformer(config))), _leaves(params)
    for name, leaf in wanted.items():
        if name not in found or found[name].shape != leaf.shape:
            shape = found[name].shape if name in found else None
            raise InputError(f"checkpoint: {name} is {shape}, its config and vocabulary say {leaf.shape}")
        if not np.isfinite(found[name]).all():
            raise DamagedError(f"checkpoint: {name} is not finite in float32 after conversion to our scaling")


def _leaves(tree: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def run_command(parser: argparse.ArgumentParser, command: Callable[..., None], argv: Sequence[str] | None) -> int:
    """Calls `command` with the parsed arguments; mistakes end it with one line and exit code 2, signals with 3."""

    def run() -> None:
        with signals.handled_by(signals.end_at_once):
            command(**vars(parser.parse_args(argv)))

    return exit_code_of(run)
