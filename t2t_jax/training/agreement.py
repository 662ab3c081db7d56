"""§5.2: checks that all processes train the same: at the start, the same config in the same folder; before a save, that
the training state is finite and that all replicas of it are equal.
"""

import functools
import secrets
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, UInt
from ml_collections import ConfigDict

from t2t_jax import sharding
from t2t_jax.checkpoints import key_data, named_leaves
from t2t_jax.errors import DamagedError, InputError
from t2t_jax.files import flat
from t2t_jax.run_folder import FILE_FIELDS, RunFolder
from t2t_jax.training.train_step import TrainState

# Paths of files that each machine may have elsewhere: of what is in them, the checksums are compared.
_PATHS = {"data.directory", "data.archives", *FILE_FIELDS}


def check_same_config(config: ConfigDict) -> None:
    """Raises InputError, in all processes, where the config of one is not that of process 0."""
    own = {field: value for field, value in flat(config.to_dict()).items() if field not in _PATHS}
    first, *others = sharding.gather(own)
    for index, other in enumerate(others, start=1):
        for field in sorted(first.keys() | other.keys()):
            if other.get(field) != first.get(field):
                raise InputError(
                    f"{field} is {other.get(field)!r} in process {index}, but {first.get(field)!r} in process 0; start "
                    "all processes with the same config"
                )


def check_same_folder(run: RunFolder) -> None:
    """Raises InputError, in all processes, where they have run folders of their own, with a part of each checkpoint."""
    if jax.process_count() == 1:
        return
    mark = run.path / sharding.gather(f".{secrets.token_hex(8)}")[0]  # a new name, of which no file system has a cache
    with sharding.main_first("workdir"):
        if run.writes:
            mark.touch()
        is_there = mark.exists()
    seen = sharding.gather(is_there)
    if run.writes:
        mark.unlink()
    if not all(seen):
        raise InputError(
            f"workdir: process {seen.index(False)} does not find in {run.path} what process 0 writes to its --workdir; "
            "several processes need a folder that they share"
        )


def check_state(state: TrainState, mesh: Mesh, position: dict[str, Any]) -> None:
    """Raises DamagedError, in all processes, where a number is not finite or replicas or positions in the data differ.

    `position` is this process's position in the data. Each device reads its shards once; of each array, 32-bit digests
    are compared.
    """
    arrays = named_leaves(state)
    specs = [x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec() for x in arrays.values()]
    # One at a time: on CPU, programs that wait for a step's all-reduce would occupy the threads that it needs itself.
    found = [jax.block_until_ready(_inspect(spec, mesh)(x)) for spec, x in zip(specs, arrays.values(), strict=True)]
    digests, finite = ([_by_device(x) for x in of_arrays] for of_arrays in zip(*found, strict=True))
    processes = sharding.gather({"position": position, "digests": digests, "finite": finite})
    first = processes[0]["position"]
    for index, other in enumerate(processes):
        if other["position"] != first:
            raise DamagedError(
                f"process {index} is at {other['position']} in its data, process 0 at {first}; nothing was saved. The "
                "same command resumes from the last checkpoint"
            )
    for number, (name, spec) in enumerate(zip(arrays, specs, strict=True)):
        whole = lambda of, n=number: {index: x for other in processes for index, x in other[of][n].items()}
        if not all(whole("finite").values()):
            raise DamagedError(f"step {position['step']}: {name} holds a number that is not finite; it is not saved")
        if differing := _differing(whole("digests"), spec, mesh):
            raise DamagedError(
                f"step {position['step']}: {name} is not the same on {differing}; memory was damaged there. Nothing "
                "was saved; the same command resumes from the last checkpoint"
            )


@functools.cache
def _inspect(spec: PartitionSpec, mesh: Mesh) -> Callable[[Array], tuple[Array, Array]]:
    """A compiled function of an array sharded by `spec`: digest and finiteness of each device's shard, [data, model].

    Compiled once for each shape, of which a model has few; one function of all arrays would compile much longer.
    """

    def inspect(x):
        finite = _is_finite(_words(x.astype(jnp.float32))) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.array(True)
        return _digest(_words(x))[None, None], finite[None, None]

    by_device = PartitionSpec(*mesh.axis_names)
    return jax.jit(jax.shard_map(inspect, mesh=mesh, in_specs=spec, out_specs=by_device, check_vma=False))


def _words(x: Array) -> UInt[Array, "M N"]:
    """The bits of each number, as 32-bit words."""
    x = key_data(x)
    if x.dtype == bool:
        x = x.astype(jnp.uint8)  # XLA has no bits of a bool
    unsigned = f"uint{min(8 * x.dtype.itemsize, 32)}"  # a number of 64 bits becomes two words
    words = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    return words.reshape(-1, words.shape[-1] if words.ndim else 1)


def _digest(words: UInt[Array, "M N"]) -> UInt[Array, ""]:
    """A 32-bit digest that any change of one word changes: the sum of all words, word i times 2i + 1.

    Summed over rows first, which is fast on every backend.
    """
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) for axis in (0, 1))
    index = row * jnp.uint32(words.shape[1]) + column
    return (words * (2 * index + 1)).sum(axis=0, dtype=jnp.uint32).sum(dtype=jnp.uint32)


def _is_finite(words: UInt[Array, "M N"]) -> Bool[Array, ""]:
    """Whether no float32 of these bits is NaN or infinite, that is, has an exponent of all ones."""
    return (words & 0x7FFFFFFF).max(axis=0).max() < 0x7F800000


def _by_device(array: Array) -> dict[str, int | bool]:
    """The values on this process's devices, by their index in the mesh, "data model"."""
    index = lambda shard: " ".join(str(axis.start or 0) for axis in shard.index)
    return {index(shard): shard.data.item() for shard in array.addressable_shards}


def _differing(digests: dict[str, int], spec: PartitionSpec, mesh: Mesh) -> str | None:
    """Names two devices whose replicas of one shard differ; None where all are equal."""
    sharded = {axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)}
    first = {}
    for index in digests:
        position = dict(zip(mesh.axis_names, map(int, index.split()), strict=True))
        shard = tuple(position[axis] for axis in mesh.axis_names if axis in sharded)
        replica = first.setdefault(shard, index)
        if digests[index] != digests[replica]:
            device = lambda index: mesh.devices[tuple(map(int, index.split()))]
            described = (f"{device(i)} of process {device(i).process_index}" for i in (replica, index))
            return " and ".join(described)
    return None
