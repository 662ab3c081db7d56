"""§5.2: what is about to be saved is finite, and the same on every device and process that holds a copy of it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, UInt

from t2t_jax import sharding
from t2t_jax.errors import DamagedError
from t2t_jax.training.train_step import TrainState


def check_state(state: TrainState, mesh: Mesh, position: dict[str, Any]) -> None:
    """Refuses numbers that are not finite, and copies that differ; all processes decide alike.

    `position` is where each process is in its data. Each device reads what it holds once, and four bytes of each
    parameter are compared.
    """
    names, specs = _names_and_specs(state)
    found = [_inspect(spec, mesh)(x) for spec, x in zip(specs, jax.tree.leaves(state), strict=True)]
    digests, finite = ([_by_place(array) for array in arrays] for arrays in zip(*found, strict=True))
    mine = {"position": position, "digests": digests, "finite": finite}
    processes = sharding.gather(mine)
    first = processes[0]["position"]
    for index, other in enumerate(processes):
        if other["position"] != first:
            raise DamagedError(
                f"process {index} is at {other['position']} in its data, process 0 at {first}; nothing was saved. The "
                "same command resumes from the last checkpoint"
            )
    for number, (name, spec) in enumerate(zip(names, specs, strict=True)):
        whole = lambda of, n=number: {place: x for other in processes for place, x in other[of][n].items()}
        if not all(whole("finite").values()):
            raise DamagedError(f"step {position['step']}: {name} holds a number that is not finite; it is not saved")
        if differing := _differing(whole("digests"), spec, mesh):
            raise DamagedError(
                f"step {position['step']}: {name} is not the same on {differing}; memory was damaged there. Nothing "
                "was saved; the same command resumes from the last checkpoint"
            )


def _names_and_specs(state: TrainState) -> tuple[list[str], list[PartitionSpec]]:
    """Of each array: its name, and along which axes of the mesh it is divided."""
    leaves = jax.tree.leaves_with_path(state)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    divided = lambda x: x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
    return names, [divided(x) for _, x in leaves]


@functools.cache
def _inspect(spec: PartitionSpec, mesh: Mesh) -> Callable[[Array], tuple[Array, Array]]:
    """A function of an array divided like this: its digest, and whether it is finite, [data, model] for each device.

    Compiled once for each shape, of which a model has few; one function of all arrays would take long to compile.
    """

    def inspect(x):
        words = jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(-1, x.shape[-1] if x.ndim else 1)
        return jax.tree.map(lambda of: of(words)[None, None], (_digest, _is_finite if x.dtype == jnp.float32 else _yes))

    by_device = PartitionSpec(*mesh.axis_names)
    return jax.jit(jax.shard_map(inspect, mesh=mesh, in_specs=spec, out_specs=by_device, check_vma=False))


def _digest(words: UInt[Array, "M N"]) -> UInt[Array, ""]:
    """32 bits that any change of one word changes: the sum of all words, each times an odd number of its own.

    By columns first, which is fast on every backend.
    """
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) for axis in (0, 1))
    index = row * jnp.uint32(words.shape[1]) + column
    return (words * (2 * index + 1)).sum(axis=0, dtype=jnp.uint32).sum(dtype=jnp.uint32)


def _is_finite(words: UInt[Array, "M N"]) -> Bool[Array, ""]:
    """Whether no float32 of these bits is infinite or NaN: those have an exponent of ones."""
    return (words & 0x7FFFFFFF).max(axis=0).max() < 0x7F800000


def _yes(words: UInt[Array, "M N"]) -> Bool[Array, ""]:
    return jnp.ones((), bool)


def _by_place(array: Array) -> dict[str, int | bool]:
    """The values of this process's devices, by their place in the mesh, "data model"."""
    place = lambda shard: " ".join(str(axis.start or 0) for axis in shard.index)
    return {place(shard): shard.data.item() for shard in array.addressable_shards}


def _differing(digests: dict[str, int], spec: PartitionSpec, mesh: Mesh) -> str | None:
    """Two devices that should hold the same share of an array and do not."""
    divided = {axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)}
    first = {}
    for place in digests:
        where = dict(zip(mesh.axis_names, map(int, place.split()), strict=True))
        share = tuple(where[axis] for axis in mesh.axis_names if axis in divided)
        same = first.setdefault(share, place)
        if digests[place] != digests[same]:
            device = lambda place: mesh.devices[tuple(map(int, place.split()))]
            described = (f"{device(p)} of process {device(p).process_index}" for p in (same, place))
            return " and ".join(described)
    return None
