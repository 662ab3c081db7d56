"""What the importers share: reading another system's files without running them, and writing a run folder."""

import argparse
import dataclasses
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from t2t_jax.checkpoints import CheckpointWriter
from t2t_jax.data.tokenizer import Tokenizer
from t2t_jax.errors import InputError, exit_code_of
from t2t_jax.interop.export import need, new_folder
from t2t_jax.interop.torch_names import Params
from t2t_jax.model.transformer import Transformer, TransformerConfig, param_shapes
from t2t_jax.run_folder import RunFolder


def read_torch_file(field: str, path: Path) -> Any:
    """What `torch.save` wrote: tensors, plain values and `argparse.Namespace`. Nothing else is ever constructed."""
    need("torch")
    import torch

    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise InputError(
            f"{field}: {path} holds {name[1] if name else 'something'}, neither a tensor nor a plain value nor an "
            "argparse.Namespace; nothing in it was run. Save it again with less in it"
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise InputError(f"{field}: {path} can't be read as a PyTorch file ({type(error).__name__})") from None


def existing(field: str, path: str | Path) -> Path:
    """The path of a file that must be there."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise InputError(f"{field}: no file {path}")
    return path


def write_run(
    path: str | Path,
    config: TransformerConfig,
    params: Params,
    vocabulary: bytes,
    *,
    origin: str,
    max_length: int,
    languages: tuple[str, str],
) -> None:
    """A run folder of one checkpoint that translates and scores; training refuses to resume from it."""
    model = dataclasses.asdict(config)
    del model["vocab_size"]
    # It has no corpus; empty prefixes make `evaluate` without --source say so.
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
    _check_shapes(config, params)
    with new_folder("workdir", path) as folder:
        run = RunFolder(folder)
        run.describe({"imported_from": origin, "model": model, "data": data, "decode": decode}, vocabulary)
        checkpoints = CheckpointWriter(run.averaged, keep=1)
        metadata = {"vocabulary": Tokenizer(run.vocabulary).checksum, "imported_from": origin}
        checkpoints.save(0, params, None, metadata)
        checkpoints.close()


def _check_shapes(config: TransformerConfig, params: Params) -> None:
    wanted, found = (_shapes(tree) for tree in (param_shapes(Transformer(config)), params))
    for name, shape in wanted.items():
        if found.get(name) != shape:
            raise InputError(f"checkpoint: {name} is {found.get(name)}, its config and vocabulary say {shape}")


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}


def run_command(parser: argparse.ArgumentParser, command: Callable[..., None], argv: Sequence[str] | None) -> int:
    """Calls `command` with the arguments; what is wrong with them is one line and exit code 2."""
    options = vars(parser.parse_args(argv))
    return exit_code_of(lambda: command(**options))
