"""§6.1: saving, restoring and averaging checkpoints, with Orbax and a checksum of every file.

Orbax makes a save all-or-nothing but keeps no checksum of large arrays. Each step's folder therefore gets a
manifest of SHA-256 sums as its last file; a step without one is an unfinished save and is not used.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint.checkpoint_managers import preservation_policy

from t2t_jax import sharding
from t2t_jax.errors import DamagedError, InputError
from t2t_jax.files import read_json, sha256, write_json

_MANIFEST = "manifest.json"

Tree = Any


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One step as it was saved; `optimizer` is None where only the parameters were asked for or kept."""

    step: int
    params: Tree
    optimizer: Tree | None
    metadata: dict[str, Any]


class Checkpoints:
    """The checkpoints in one folder, the newest `keep` of them kept."""

    def __init__(self, directory: Path, keep: int | None = None):
        self.directory = directory.absolute()
        policy = preservation_policy.LatestN(keep) if keep else None
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy, cleanup_tmp_directories=True, enable_async_checkpointing=False
        )
        handlers = {name: ocp.StandardCheckpointHandler() for name in ("params", "optimizer")}
        handlers["metadata"] = ocp.JsonCheckpointHandler()
        self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)

    def steps(self) -> list[int]:
        """Steps with a manifest, ascending; their files are checked when one is restored."""
        return sorted(s for s in self._manager.all_steps() if (self._folder(s) / _MANIFEST).is_file())

    def save(self, step: int, params: Tree, optimizer: Tree | None, metadata: dict[str, Any]) -> None:
        """Writes a step, then its manifest; returns when both are on disk. Replaces the step if it is there."""
        if step in self._manager.all_steps():
            self._manager.delete(step)
        items = {"params": ocp.args.StandardSave(params), "metadata": ocp.args.JsonSave(metadata)}
        if optimizer is not None:
            items["optimizer"] = ocp.args.StandardSave(optimizer)
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        self._manager.wait_until_finished()
        folder = self._folder(step)
        if sharding.is_main():
            sums = {str(path.relative_to(folder)): sha256(path) for path in _files(folder)}
            write_json(folder / _MANIFEST, sums)
        sharding.wait_for_all(f"manifest of {folder}")

    def restore_latest(self, params: Tree, optimizer: Tree) -> Checkpoint | None:
        """The newest undamaged step, or None where nothing was saved; says so when it had to go back.

        `params` and `optimizer` give shapes, dtypes and shardings (`jax.ShapeDtypeStruct` leaves).
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self.restore(step, params, optimizer)
            except DamagedError as error:
                logging.error("%s; trying the checkpoint before it", error)
        if steps:
            raise DamagedError(f"{self.directory}: every checkpoint is damaged; nothing can be resumed from it")
        return None

    def restore(self, step: int, params: Tree, optimizer: Tree | None = None) -> Checkpoint:
        """One step, its files checked against the manifest; NumPy arrays where no sharding is given."""
        self._check_shapes(step, params)
        items = {"params": ocp.args.StandardRestore(_placed(params)), "metadata": ocp.args.JsonRestore()}
        if optimizer is not None:
            items["optimizer"] = ocp.args.StandardRestore(_placed(optimizer))
        restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        return Checkpoint(step, restored.params, restored.get("optimizer"), restored.metadata)

    def _verify(self, step: int) -> None:
        folder = self._folder(step)
        if not (folder / _MANIFEST).is_file():
            known = ", ".join(map(str, self.steps())) or "none"
            raise InputError(f"step: {self.directory} has no checkpoint {step}; it has {known}")
        sums = read_json(folder / _MANIFEST)
        for name, expected in sums.items():
            path = folder / name
            if not path.is_file() or sha256(path) != expected:
                raise DamagedError(f"checkpoint {step} is damaged: {path} does not match its checksum")

    def param_shapes(self, step: int) -> Tree:
        """Shapes and dtypes of the parameters saved at `step`."""
        self._verify(step)
        saved = self._manager.item_metadata(step)["params"]
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), saved.tree)

    def _check_shapes(self, step: int, params: Tree) -> None:
        """Orbax casts silently and reports a wrong shape as a missing entry: name the difference instead."""
        found, wanted = _described(self.param_shapes(step)), _described(params)
        for name in sorted(wanted.keys() | found.keys()):
            if found.get(name) != wanted.get(name):
                raise InputError(
                    f"checkpoint {step} does not fit the config and vocabulary: {name} is {found.get(name)} there, "
                    f"{wanted.get(name)} here; use the run's own config.json and vocab.model"
                )

    def _folder(self, step: int) -> Path:
        return self.directory / str(step)

    def close(self) -> None:
        """Ends Orbax's threads."""
        self._manager.close()


def _placed(shapes: Tree) -> Tree:
    """What Orbax takes for "an array on the host" where a shape has no sharding; it would else want the saved one's."""
    host = lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape)
    return jax.tree.map(lambda x: x if getattr(x, "sharding", None) else host(x), shapes)


def _described(tree: Tree) -> dict[str, str]:
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def average(source: Checkpoints, steps: Sequence[int], target: Checkpoints) -> Checkpoint:
    """Saves the arithmetic mean of the parameters at `steps`, summed in float64 (§6.1), as a step of `target`.

    It has no optimiser state, so nothing can be trained on from it.
    """
    shapes = source.param_shapes(steps[-1])
    total = jax.tree.map(lambda x: np.zeros(x.shape, np.float64), shapes)
    for step in steps:
        checkpoint = source.restore(step, shapes)
        total = jax.tree.map(lambda t, x: t + np.asarray(x, np.float64), total, checkpoint.params)
    params = jax.tree.map(lambda t, x: (t / len(steps)).astype(x.dtype), total, shapes)
    metadata = checkpoint.metadata | {"averaged_steps": list(steps)}
    target.save(steps[-1], params, None, metadata)
    return Checkpoint(steps[-1], params, None, metadata)


def average_run(checkpoints: Path, averaged: Path, *, last: int | None, steps: Sequence[int] | None) -> Checkpoint:
    """Averages the `last` checkpoints in one folder, or those at `steps`, into another, replacing what it held."""
    source = Checkpoints(checkpoints)
    known = source.steps()
    if (last is None) == (steps is None):
        raise InputError("give either --last=N or --steps=a,b,c")
    if last is not None:
        if not 1 <= last <= len(known):
            raise InputError(f"last must be between 1 and the {len(known)} checkpoints in {checkpoints}; got {last}")
        steps = known[-last:]
    return average(source, steps, Checkpoints(averaged, keep=1))
