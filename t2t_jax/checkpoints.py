"""§6.1: saving, restoring and averaging checkpoints, with Orbax and a checksum of every file.

Orbax keeps no checksum of large arrays. Each step is therefore written to a temporary folder whose last file is a
manifest of SHA-256 sums; then the folder is renamed to the number of the step, and only then older steps are deleted.
So a folder whose name is a number is complete, and one that does not match its manifest is damaged.
"""

import contextlib
import dataclasses
import errno
import logging as std_logging
import os
import shutil
import stat
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from orbax.checkpoint.type_handlers import ArrayHandler, NumpyHandler, create_type_handler_registry

from t2t_jax import sharding
from t2t_jax.errors import DamagedError, InputError, InterruptedRun, memory_reason, on_one_line
from t2t_jax.files import folder_lock, lone_surrogate, read_object, replace_folder, sha256, storage_errors, write_object

_MANIFEST = "manifest.json"
_PROVISIONAL = "provisional"  # an empty file in a step that the next save deletes
_UNFINISHED, _REMOVED = ".unfinished", ".removed"  # suffixes of folders being written or deleted
_SLICE_BYTES = 2**20  # smaller slices of replicated arrays take Orbax longer to cut and write than whole arrays
_ORBAX_UNFINISHED = ".orbax-checkpoint-tmp"  # in the names of folders that Orbax is writing

# Errors of reading that say nothing about the bytes: what cannot be read now must not be taken for damaged.
_NOT_DAMAGE = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE)

_ATTEMPTS = 20  # to read the newest step while a trainer deletes old ones

Tree = Any
Read = TypeVar("Read")


class AbsentError(InputError):
    """The step does not exist, or was deleted."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A restored step; `optimizer` is None where it was not requested or not saved."""

    step: int
    params: Tree
    optimizer: Tree | None
    metadata: dict[str, Any]


class Checkpoints:
    """The checkpoints in one folder, read-only: another process may be writing there."""

    def __init__(self, directory: Path):
        self.directory = directory.absolute()
        if lone_surrogate(str(self.directory)) is not None:  # which the C++ below Orbax does not take
            raise InputError(f"workdir: {directory}: is not UTF-8; rename the folder, or choose another")
        self._arrays = {item: _array_tree_handler() for item in ("params", "optimizer")}
        handler = ocp.CompositeCheckpointHandler(**self._arrays, metadata=ocp.JsonCheckpointHandler())
        self._orbax = ocp.Checkpointer(handler)

    def steps(self) -> list[int]:
        """All steps, ascending, damaged ones included: files are verified when a step is restored."""
        if not self.directory.is_dir():
            return []
        # The listing says what is a folder: asking afterwards would miss a step that a trainer has replaced meanwhile.
        with os.scandir(self.directory) as entries:
            return sorted(int(entry.name) for entry in entries if entry.name.isdecimal() and entry.is_dir())

    def steps_to_average(self, final: int | None) -> list[int]:
        """`steps` without a provisional one, unless there is no other or it is the `final` one, the last of its run."""
        steps = self.steps()
        return [step for step in steps if step == final or not self._is_provisional(step)] or steps

    def _is_provisional(self, step: int) -> bool:
        return (self._folder(step) / _PROVISIONAL).exists()

    def newest_good(self, count: int, steps: Sequence[int] | None = None) -> list[int]:
        """The newest `count` undamaged steps of these or of all, ascending; logs the damaged ones that it skips.

        Raises `AbsentError` where the process that trains has meanwhile deleted all steps found.
        """
        good, absent = [], None
        for step in reversed(self.steps() if steps is None else steps):
            if len(good) == count:
                break
            try:
                self.verify(step)
                good.insert(0, step)
            except DamagedError as error:
                logging.error("%s; using the checkpoint before it", error)
            except AbsentError as error:
                absent = error
        if absent and not good:
            raise absent
        return good

    def restore_latest(self, params: Tree, optimizer: Tree) -> Checkpoint | None:
        """Restores the newest undamaged step; None where there is no step.

        `params` and `optimizer` give shapes, dtypes and shardings (`jax.ShapeDtypeStruct` leaves).
        """
        if good := self.newest_good(1):
            return self._restore(good[0], params, optimizer)
        if self.steps():
            raise DamagedError(f"{self.directory}: every checkpoint is damaged; nothing can be resumed from it")
        return None

    def restore(self, step: int, params: Tree | None = None) -> Checkpoint:
        """Verifies a step and restores its parameters: as saved, or as `params`; NumPy arrays without a sharding."""
        self.verify(step)
        return self._restore(step, self._saved_shapes(step, "params") if params is None else params)

    def _saved_shapes(self, step: int, item: str) -> Tree:
        """Shapes and dtypes of the item "params" or "optimizer"; an empty tree where the step has none."""
        with self._reading(step):
            if not (folder := epath.Path(self._folder(step)) / item).is_dir():
                if not self._folder(step).is_dir():
                    raise self._absent(step)
                return {}
            saved = self._arrays[item].metadata(folder).tree
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), saved)

    def _restore(self, step: int, params: Tree, optimizer: Tree | None = None) -> Checkpoint:
        self._check_shapes(step, params, optimizer)
        wanted = _items(params, optimizer)
        arrays = {item: _restore_args(tree) for item, tree in wanted.items()}
        with self._reading(step):
            args = ocp.args.Composite(**arrays, metadata=ocp.args.JsonRestore())
            restored = self._orbax.restore(self._folder(step), args=args)
            placed = {item: jax.tree.map(_on_devices, restored[item], tree) for item, tree in wanted.items()}
        if "optimizer" in placed:
            optimizer = jax.tree.map(_with_keys, placed["optimizer"], optimizer)
        return Checkpoint(step, placed["params"], optimizer, restored.metadata)

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Raises AbsentError where the step is not there (any more), InputError where it does not fit the memory.

        No error is taken for damage: only `verify` detects that.
        """
        before = _inode(self._folder(step))
        try:
            yield
        except InterruptedRun:
            raise
        except Exception as error:  # Orbax raises whatever its parts do
            # Another folder of this name is there where the checkpoint has been averaged again.
            if not _is_passing(error) and (before is None or _inode(self._folder(step)) != before):
                raise self._absent(step) from None
            reason = error if isinstance(error, MemoryError) else memory_reason(error)
            if reason is None:
                raise
            where = f"checkpoint {step} of {self.directory}"
            raise InputError(f"{where} needs more memory than is free: {reason}") from None

    def read_newest(self, read: Callable[[], Read]) -> Read:
        """Returns `read()`, retried where a process that trains deletes the step before it is read."""
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(AbsentError):
                return read()
        raise InputError(f"step: the checkpoints in {self.directory} are replaced faster than read; give a step number")

    def _absent(self, step: int) -> AbsentError:
        known = ", ".join(map(str, self.steps())) or "none"
        return AbsentError(f"step: {self.directory} has no checkpoint {step}; it has {known}")

    def verify(self, step: int) -> None:
        """Compares the SHA-256 of every file of a step with its manifest."""
        with self._reading(step):
            try:
                _check_sums(self._folder(step))
            except (DamagedError, OSError) as error:
                if _is_passing(error):
                    raise
                raise DamagedError(f"checkpoint {step} is damaged: {on_one_line(error)[:300]}") from error

    def _check_shapes(self, step: int, params: Tree, optimizer: Tree | None) -> None:
        """Names the first difference: Orbax casts dtypes silently and reports a wrong shape as a missing entry."""
        if difference := _difference(self._saved_shapes(step, "params"), params):
            raise InputError(
                f"checkpoint {step} does not fit the config and vocabulary: {difference}; use the run's own "
                "config.json and vocab.model"
            )
        if optimizer is not None and (difference := _difference(self._saved_shapes(step, "optimizer"), optimizer)):
            raise InputError(
                f"optimizer.name: checkpoint {step} is of another optimiser: {difference}; resume with the one that it "
                "was trained with"
            )

    def _folder(self, step: int) -> Path:
        return self.directory / str(step)

    def close(self) -> None:
        """Ends Orbax's threads."""
        self._orbax.close()


class CheckpointWriter(Checkpoints):
    """Saves checkpoints to one folder and keeps the newest `keep` and a provisional one; for the processes that train.

    A provisional checkpoint is one to resume from, not one to average, unless the run ends there: the next save deletes
    it.
    """

    def __init__(self, directory: Path, keep: int | None = None):
        super().__init__(directory)
        self._keep = keep

    def save(
        self, step: int, params: Tree, optimizer: Tree | None, metadata: dict[str, Any], *, provisional: bool = False
    ) -> None:
        """Writes a step and returns when it is complete. It becomes the newest: later steps are deleted."""
        arrays = {item: ocp.args.PyTreeSave(tree) for item, tree in _items(params, optimizer).items()}
        unfinished = self.directory / f"{step}{_UNFINISHED}"
        failed = f"checkpoint {step} could not be saved"
        if optimizer is not None:  # of a run in training
            failed += "; those before it are intact, the same command resumes"
        num_bytes = sum(x.nbytes for x in jax.tree.leaves((params, optimizer)))
        with storage_errors(failed, self.directory), self._alone(num_bytes):
            with _quiet():
                args = ocp.args.Composite(**arrays, metadata=ocp.args.JsonSave(metadata))
                self._orbax.save(unfinished, args=args)
            if sharding.is_main():
                if provisional:
                    (unfinished / _PROVISIONAL).touch()
                sums = {str(path.relative_to(unfinished)): sha256(path) for path in _files(unfinished)}
                write_object(unfinished / _MANIFEST, sums)
                replace_folder(unfinished, self._folder(step), self.directory / f"{step}{_REMOVED}")
                self._delete_old(step)
        sharding.wait_for_all(f"checkpoint {step}")  # without the path, which may be another on each machine

    @contextlib.contextmanager
    def _alone(self, num_bytes: int) -> Iterator[None]:
        """For the main process: locks the folder, deletes what a killed save left, checks for `num_bytes` of disk."""
        if not sharding.is_main():
            yield
            return
        with folder_lock(self.directory):
            for path in self.directory.iterdir():
                if path.name.endswith((_UNFINISHED, _REMOVED)) or _ORBAX_UNFINISHED in path.name:
                    shutil.rmtree(path)
            # On a full disk Orbax would fail in several threads, each with a traceback.
            if shutil.disk_usage(self.directory).free < num_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory))
            yield

    def _delete_old(self, newest: int) -> None:
        steps = self.steps()
        lasting = [step for step in steps if step <= newest and not self._is_provisional(step)]
        for step in set(steps) - set(lasting[-self._keep if self._keep else None :]) - {newest}:
            removed = self.directory / f"{step}{_REMOVED}"
            os.rename(self._folder(step), removed)  # renamed first: no reader finds half of it
            shutil.rmtree(removed)


def _inode(folder: Path) -> int | None:
    """The identity of a folder; None where there is none. Asked once: between two questions a trainer may delete it."""
    try:
        status = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino if stat.S_ISDIR(status.st_mode) else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences what Orbax prints about errors in the block: they are raised, and reported once, by us.

    Each of its threads that fails logs a traceback, and asyncio reports the abandoned tasks of the other arrays, Python
    those that never started. That may be after the block, so they stay silenced after an error.
    """
    usual, loggers = sys.unraisablehook, (logging.get_absl_logger(), std_logging.getLogger("asyncio"))

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            usual(unraisable)

    def ours(record: std_logging.LogRecord) -> bool:
        return "orbax/checkpoint" not in record.pathname and "exception was never retrieved" not in record.getMessage()

    sys.unraisablehook = hook
    # For good: these warnings come when the tasks are freed, often at the end of the process.
    warnings.filterwarnings("ignore", r"coroutine '.*_serialize_from_host.* was never awaited", RuntimeWarning)
    for logger in loggers:
        logger.addFilter(ours)
    yield
    sys.unraisablehook = usual
    for logger in loggers:
        logger.removeFilter(ours)


def _items(params: Tree, optimizer: Tree | None) -> dict[str, Tree]:
    """The trees of arrays in a step, by the names of their folders: Orbax saves no tree without arrays."""
    trees = {"params": params, "optimizer": optimizer}
    return {item: jax.tree.map(key_data, tree) for item, tree in trees.items() if jax.tree.leaves(tree)}


def key_data(x: Any) -> Any:
    """An array or its shape; random keys as the integers that they consist of, as Orbax restores no keys."""
    if not _is_of_keys(x):
        return x
    if isinstance(x, jax.Array):
        return jax.random.key_data(x)
    data = jax.eval_shape(jax.random.key_data, x)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)


def _is_of_keys(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _array_tree_handler() -> ocp.PyTreeCheckpointHandler:
    """Orbax's handler of a tree of arrays; each device writes a part of a large array that all of them hold."""
    of_type = {np.ndarray: NumpyHandler(), jax.Array: ArrayHandler(min_slice_bytes_for_replica_parallel=_SLICE_BYTES)}
    return ocp.PyTreeCheckpointHandler(type_handler_registry=create_type_handler_registry(*of_type.items()))


def _restore_args(shapes: Tree) -> ocp.args.PyTreeRestore:
    """What Orbax restores: arrays with a sharding that divides them as such, the others as NumPy arrays.

    Orbax would read a replicated array once for each device, and give an array without a sharding the saved sharding.
    """
    host = lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape)
    templates = jax.tree.map(lambda x: x if _is_divided(x) else host(x), shapes)
    return ocp.args.PyTreeRestore(templates, ocp.checkpoint_utils.construct_restore_args(templates))


def _is_divided(shape: Any) -> bool:
    return shape.sharding is not None and not shape.sharding.is_fully_replicated


def _on_devices(x: Any, shape: Any) -> Any:
    """The restored array, copied to every device where `shape` has a sharding that replicates it."""
    if shape.sharding is None or _is_divided(shape):
        return x
    return jax.make_array_from_callback(shape.shape, shape.sharding, x.__getitem__)


def _with_keys(x: Any, shape: Any) -> Any:
    """The restored array; random keys where `shape` is theirs: the inverse of `key_data`."""
    if not _is_of_keys(shape):
        return x
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(jnp.empty((), shape.dtype)))


def named_leaves(tree: Tree) -> dict[str, Any]:
    """The leaves of a tree, in its order, by names such as "encoder_layers_0/feed_forward/hidden/kernel"."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _described(tree: Tree) -> dict[str, str]:
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in named_leaves(jax.tree.map(key_data, tree)).items()}


def _is_passing(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _NOT_DAMAGE


def _difference(found: Tree, wanted: Tree) -> str:
    """The first array of which the shapes and dtypes of a checkpoint and those wanted differ; "" if none does."""
    there, here = _described(found), _described(wanted)
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            return f"{name} is {there.get(name)} there, {here.get(name)} here"
    return ""


def _check_sums(folder: Path) -> None:
    """Raises DamagedError where the files of a step are not those of its manifest."""
    sums = read_object(folder / _MANIFEST)
    found = {str(path.relative_to(folder)): path for path in _files(folder) if path.name != _MANIFEST}
    for name in sorted(sums.keys() | found.keys()):
        if name not in found or sha256(found[name]) != sums.get(name):
            raise DamagedError(f"{folder / name} does not match its checksum")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def average(source: Checkpoints, steps: Sequence[int], target: CheckpointWriter) -> Checkpoint:
    """Saves the arithmetic mean of the parameters at `steps`, summed in float64 (§6.1), as a step of `target`.

    Without optimiser state, so training cannot resume from it. The caller has verified the steps.
    """
    shapes = source._saved_shapes(steps[-1], "params")
    total = jax.tree.map(lambda x: np.zeros(x.shape, np.float64), shapes)
    for step in steps:
        checkpoint = source._restore(step, shapes)
        total = jax.tree.map(lambda t, x: t + np.asarray(x, np.float64), total, checkpoint.params)
    params = jax.tree.map(lambda t, x: (t / len(steps)).astype(x.dtype), total, shapes)
    metadata = checkpoint.metadata | {"averaged_steps": list(steps)}
    target.save(steps[-1], params, None, metadata)
    return Checkpoint(steps[-1], params, None, metadata)


def average_last(source: Checkpoints, count: int, target: CheckpointWriter, final: int | None = None) -> Checkpoint:
    """`average` of the newest `count` undamaged checkpoints, or of as many as there are, with a warning.

    Of the provisional ones only that of the run's `final` step counts, so that no stop changes the average.
    """

    def read() -> Checkpoint:
        known = source.steps_to_average(final)
        steps = source.newest_good(count, known)
        if not steps:
            raise DamagedError(f"{source.directory}: no undamaged checkpoint; there is nothing to average")
        if len(steps) < min(count, len(known)):
            logging.warning("%s has %d undamaged checkpoints, not %d", source.directory, len(steps), count)
        elif len(known) < count:
            logging.warning(
                "%s has %d checkpoint%s to average, not %d as checkpoint.average_last says; with shorter intervals "
                "(checkpoint.interval_steps, or interval_minutes if it is 0) there are more",
                source.directory, len(known), "s" * (len(known) > 1), count,
            )  # fmt: skip
        return average(source, steps, target)

    return source.read_newest(read)


def average_run(
    checkpoints: Path, averaged: Path, *, last: int | None, steps: Sequence[int] | None, final: int | None = None
) -> Checkpoint:
    """Averages the last `last` checkpoints, or those at `steps`, into the folder `averaged`, replacing what it held.

    A provisional checkpoint is averaged only where it is named, the only one, or that of the run's `final` step.
    """
    source, target = Checkpoints(checkpoints), CheckpointWriter(averaged, keep=1)
    if (last is None) == (steps is None):
        raise InputError("give either --last=N or --steps=a,b,c")
    if steps is not None:
        for step in steps:
            source.verify(step)
        return average(source, sorted(steps), target)
    known = len(source.steps_to_average(final))
    if not known:
        raise InputError(f"workdir: {checkpoints.parent} has no checkpoints to average")
    if not 1 <= last <= known:
        raise InputError(f"last must be between 1 and the {known} checkpoints in {checkpoints}; got {last}")
    return average_last(source, last, target, final)
