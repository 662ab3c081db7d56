"""Fine-tuning: training that starts from the weights of another run, with a fresh optimiser (`--init_from`)."""

import contextlib
import copy
import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from t2t_jax import sharding
from t2t_jax.checkpoints import Checkpoints
from t2t_jax.data import cleaning
from t2t_jax.data.preparation import local_directory
from t2t_jax.data.ready_vocabulary import MIN_COUNT, ready_vocabulary
from t2t_jax.data.task import Vocabularies
from t2t_jax.data.tokenizer import add_normalization
from t2t_jax.decoding.trained_model import restore
from t2t_jax.errors import InputError
from t2t_jax.files import flat, is_url, sha256, write_bytes
from t2t_jax.interop.workdir import is_marian, run_folders
from t2t_jax.run_folder import RunFolder

_KEPT = ("dropout", "attention_dropout")  # fields of the model that may change between runs
_SIZES = ("data.vocab_size", "data.source_vocab_size")


class Pretrained(NamedTuple):
    """What training starts from: the parameters of `checkpoint` of the run `path`; none where a run is resumed."""

    path: str
    checkpoint: str = ""
    params: Any = None

    @property
    def name(self) -> str:
        return f"{self.path}, {self.checkpoint}"

    def is_in(self, name: str) -> bool:
        """Whether `name` is that of a checkpoint of the same run, however its path was written."""
        return bool(name) and _resolved(name.rpartition(", ")[0]) == _resolved(self.path)


def _resolved(path: str) -> str:
    return path.rstrip("/") if is_url(path) else str(Path(path).expanduser().resolve())


def starting_point(
    config: ConfigDict, path: str, run: RunFolder, overrides: Collection[str]
) -> tuple[ConfigDict, Pretrained]:
    """The config of a fine-tuning run, and the weights it starts from.

    The sizes and vocabularies are those of the run at `path`; of `run` itself once it has a checkpoint, as `path` may
    be gone when it is resumed. A config that names other vocabularies is refused, and so are other sizes in the fields
    `overrides`.
    """
    if Checkpoints(run.checkpoints).steps():
        sizes = run.section("model", config.model.keys())
        fitted, start = _fitted(config, sizes, Vocabularies.open(run.path), path), Pretrained(path)
    else:
        fitted, start = pretrained(config, path)
    _check_overrides(overrides, config, fitted, path)
    return fitted, start


def _check_overrides(overrides: Collection[str], config: ConfigDict, fitted: ConfigDict, path: str) -> None:
    """Refuses what the user asked for and would not get."""
    given, used = flat(config.to_dict()), flat(fitted.to_dict())
    for field in overrides:
        if (field.startswith("model.") or field in _SIZES) and given[field] != used[field]:
            raise InputError(
                f"--config.{field}={given[field]}: the run of --init_from={path} has {used[field]}; leave out "
                f"--config.{field}, or --init_from to train from random weights"
            )


def pretrained(config: ConfigDict, path: str) -> tuple[ConfigDict, Pretrained]:
    """The trained model in a run folder or a Marian folder, and `config` with its sizes and its vocabularies."""
    if jax.process_count() > 1 and is_marian(path):  # only the main process writes checkpoints, in a folder of its own
        raise InputError(
            f"--init_from={path}: several processes start from a run folder only; convert the model first, with "
            f"python -m t2t_jax.interop.from_marian {path} RUN"
        )
    try:
        with run_folders(path) as folder:
            found = restore(folder)
            vocabularies, model = found.vocabularies, found.run.config["model"]
    except InputError as error:
        raise InputError(f"--init_from: {str(error).removeprefix('workdir: ')}") from None
    return _fitted(config, model, vocabularies, path), Pretrained(path, found.checkpoint, found.params)


def _fitted(config: ConfigDict, model: Mapping[str, Any], vocabularies: Vocabularies, path: str) -> ConfigDict:
    """`config` with the sizes of `model` and these vocabularies, which are copied below `data.directory`.

    The copies have the normalisation rules of `data.cleaning`, as the run's own vocabularies will: when it is resumed,
    the names of the copies, and so that of the token store, are the same. Dropout alone stays that of `config`.
    """
    config = copy.deepcopy(config)
    config.model.update({name: value for name, value in model.items() if name not in _KEPT})
    directory = local_directory(config.data.directory) / "vocabularies"
    replace = cleaning.replacements(cleaning.Rules.of(config.data.cleaning))
    sides = {"vocabulary": vocabularies.target, "source_vocabulary": vocabularies.source}
    with sharding.main_first("vocabularies"):
        for field, side in sides.items():
            normalizing = add_normalization(side.model, replace, f"the vocabulary of --init_from={path}")
            _check_same(f"data.{field}", config.data[field], normalizing, side.pieces(), replace, path)
            digest = hashlib.sha256(normalizing).hexdigest()
            copied = directory / f"{digest[:16]}.model"
            config.data[field] = str(copied)
            if not copied.is_file() or sha256(copied) != digest:
                directory.mkdir(parents=True, exist_ok=True)
                write_bytes(copied, normalizing)
    config.data.vocab_size, config.data.source_vocab_size = len(vocabularies.target), len(vocabularies.source)
    if vocabularies.is_joint:
        config.data.source_vocabulary, config.data.source_vocab_size = "", 0
    return config


def _check_same(
    field: str, given: str, wanted: bytes, pieces: Sequence[str], replace: Mapping[str, str], path: str
) -> None:
    """Refuses a vocabulary of the config that is not, with the rules `replace`, the one that the weights belong to.

    With BPE codes, that has the characters of the run's corpus, too: they are among its `pieces`.
    """
    text = [piece * MIN_COUNT for piece in pieces if len(piece) == 1]
    with contextlib.suppress(InputError):  # no file, or no vocabulary
        if not given or ready_vocabulary(Path(given).expanduser(), text, field, replace) == wanted:
            return
    raise InputError(f"{field}={given} is not the vocabulary of --init_from={path}; leave {field} empty")
