"""§5.2: the device mesh, the sharding of every array, and collective operations between processes.

All sharding rules are in this file.
"""

import collections
import contextlib
import itertools
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # the address of process 0, its key-value store and its barriers
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t2t_jax import peers, signals
from t2t_jax.errors import InputError
from t2t_jax.validation import Range

DATA, MODEL = "data", "model"
_JOIN_SECONDS = 300
_ANY_TIME_MS = 10**10  # four months: peers.py ends the processes that wait for a lost one
PEER_TIMEOUT_SECONDS = Range(5, 86_400)  # a busy machine may miss heartbeats for a second or two

# The axis that tensor parallelism shards (heads, d_ff or vocabulary), by the last two parts of a parameter's name.
# Parameters that are not named here are replicated over the model axis.
_MODEL_AXES = {
    "self_attention": {"query_kernel": 1, "key_kernel": 1, "value_kernel": 1, "output_kernel": 0,
                       "query_bias": 0, "key_bias": 0, "value_bias": 0},
    "hidden": {"kernel": 1, "bias": 0},
    "output": {"kernel": 0},
    "embedding": {"table": 0},
}  # fmt: skip
_MODEL_AXES["cross_attention"] = _MODEL_AXES["self_attention"]
_MODEL_AXES |= dict.fromkeys(("source_embedding", "target_embedding", "softmax"), _MODEL_AXES["embedding"])


def make_mesh(devices: Sequence[jax.Device] | None = None, model_parallel: int = 1) -> Mesh:
    """A data × model mesh of all devices of all processes; `model_parallel` devices hold one copy of the model."""
    check_32_bit()
    devices = np.array(jax.devices() if devices is None else devices)
    if model_parallel < 1 or devices.size % model_parallel:
        raise InputError(f"machine.model_parallel={model_parallel} must divide the number of devices, {devices.size}")
    return Mesh(devices.reshape(-1, model_parallel), (DATA, MODEL))


def check_32_bit() -> None:
    """Refuses JAX's 64-bit mode, in which new parameters would be float64 and a search fails to compile."""
    if jax.config.jax_enable_x64:
        raise InputError("jax_enable_x64 must be False, as parameters are float32; got True; unset JAX_ENABLE_X64")


def local_mesh(mesh: Mesh) -> Mesh:
    """The devices of `mesh` that belong to this process, for computation without other processes."""
    return make_mesh(mesh.local_devices)


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    """Batches: the first array axis sharded over the data axis."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def of_state(shapes: Any, mesh: Mesh, shard_state: bool) -> Any:
    """The sharding of each parameter and of its optimiser state, which has the same name.

    Tensor parallelism: sharded over the model axis by `_MODEL_AXES`, where that divides evenly. ZeRO (`shard_state`):
    sharded over the data axis too, along the longest remaining array axis that divides evenly.
    """

    def sharding(path, x):
        spec: list[str | None] = [None] * len(x.shape)
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        axis = _MODEL_AXES.get(names[-2], {}).get(names[-1]) if len(names) > 1 else None
        # Adafactor keeps sums over one of the axes under the parameter's name.
        if axis is not None and axis < x.ndim and x.shape[axis] % mesh.shape[MODEL] == 0:
            spec[axis] = MODEL
        if shard_state:
            free = [a for a, n in enumerate(x.shape) if spec[a] is None and n % mesh.shape[DATA] == 0]
            if free:
                spec[max(free, key=lambda a: x.shape[a])] = DATA
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map_with_path(sharding, shapes)


def shapes_of(tree: Any, layout: Any) -> Any:
    """The shapes and dtypes of arrays that have the shardings `layout`, or one sharding all of them."""
    with_sharding = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    return jax.tree.map(with_sharding, tree, jax.tree.broadcast(layout, tree))


def rows_of_process(mesh: Mesh, rows: int, multiple: int) -> slice:
    """The slice of `rows` rows that `put_rows` puts on the devices of this process."""
    padded = rows + _added_rows(mesh, rows, multiple)
    parts = [index[0].indices(padded) for index in by_rows(mesh).addressable_devices_indices_map((padded,)).values()]
    return slice(min(start for start, *_ in parts), min(rows, max(stop for _, stop, _ in parts)))


def first_copies(batch: dict[str, np.ndarray], mesh: Mesh, multiple: int) -> dict[str, np.ndarray]:
    """The batch with only those rows of which this process holds the first copy; the others are zeros.

    Each row has a copy on every device of the model axis, so several processes may read it.
    """
    if jax.process_count() == 1:
        return batch
    count = next(iter(batch.values())).shape[0]
    owners = [device.process_index for device in mesh.devices[:, 0]]
    rows_each = (count + _added_rows(mesh, count, multiple)) // len(owners)
    is_own = np.repeat(np.array(owners) == jax.process_index(), rows_each)[:count]
    return {name: x * is_own[:, None] for name, x in batch.items()}


def _added_rows(mesh: Mesh, rows: int, multiple: int) -> int:
    return -rows % (mesh.shape[DATA] * multiple)


def put_rows(arrays: dict[str, np.ndarray], mesh: Mesh, multiple: int = 1) -> dict[str, jax.Array]:
    """Puts arrays with equal numbers of rows on the devices, sharded by rows.

    Only the rows of this process matter (`rows_of_process`). Rows of zeros (padding) are added up to the next multiple
    of `multiple` × the length of the data axis.
    """
    added = _added_rows(mesh, next(iter(arrays.values())).shape[0], multiple)
    padded = {name: np.pad(x, ((0, added),) + ((0, 0),) * (x.ndim - 1)) for name, x in arrays.items()}
    if jax.process_count() == 1:
        return jax.device_put(padded, by_rows(mesh))
    return {name: jax.make_array_from_callback(x.shape, by_rows(mesh), x.__getitem__) for name, x in padded.items()}


def gather_arrays(tree: Any, mesh: Mesh) -> Any:
    """All-gathers each array: a whole copy on every device of this process."""
    whole = jax.device_put(tree, replicated(mesh))
    return jax.device_put(jax.tree.map(lambda x: x.addressable_data(0), whole), replicated(local_mesh(mesh)))


# --- Several processes -------------------------------------------------------------------------------------


@contextlib.contextmanager
def joined_processes(
    coordinator: str | None, num_processes: int | None, process_id: int | None, timeout_seconds: float
) -> Iterator[None]:
    """Joins the processes of a run with `jax.distributed`; to be entered before any device is used.

    `coordinator` is HOST:PORT of process 0; without it, all three come from the cluster manager (Slurm, a cloud).
    Where a process ends, or is silent for `timeout_seconds`, the others end with exit code 3.
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if 0 < len(missing) < 3:
        raise InputError(f"several processes need {' and '.join(missing)} too, or --distributed alone under Slurm")
    if not missing:
        _check_processes(coordinator, num_processes, process_id)
    PEER_TIMEOUT_SECONDS.check("machine.peer_timeout_seconds", timeout_seconds)
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM
    try:
        # JAX aborts where a process does not join or is lost, without naming it: its time limits are a fallback.
        with signals.time_limit(_JOIN_SECONDS, "error: not all processes have joined; start them all again"):
            jax.distributed.initialize(
                coordinator,
                num_processes,
                process_id,
                # All devices that this process may see: by default, Slurm's local rank would choose one.
                local_device_ids=None if "JAX_LOCAL_DEVICE_IDS" in os.environ else [],
                initialization_timeout=_JOIN_SECONDS + 60,
                heartbeat_timeout_seconds=int(2 * timeout_seconds) + 10,
            )
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise InputError(f"--distributed: {reason}; give --coordinator, --num_processes and --process_id") from None
    # Gloo, JAX's collectives on CPUs, prints to standard output, which is for results alone.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="surrogateescape")
    os.dup2(2, 1)
    joined = distributed.global_state
    others = peers.connect(
        joined.process_id, joined.num_processes, joined.coordinator_address, joined.client, timeout_seconds
    )
    with others.together():
        yield


def _check_processes(coordinator: str, num_processes: int, process_id: int) -> None:
    Range(1, 1_000_000).check("--num_processes", num_processes)
    Range(0, num_processes - 1).check("--process_id", process_id)
    host, _, port = coordinator.rpartition(":")
    if not (host and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536):
        raise InputError(f"--coordinator={coordinator}: must be HOST:PORT of process 0, as in 10.0.0.1:1234")
    # JAX would abort in C++ on these.
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
    except OSError as error:
        raise InputError(f"--coordinator={coordinator}: no host {host} ({error.strerror})") from None
    if process_id == 0:
        try:
            peers.listen_everywhere(int(port)).close()
        except OSError as error:
            reason = os.strerror(error.errno)
            raise InputError(f"--coordinator={coordinator}: port {port}: {reason}; give a free one") from None


def is_main() -> bool:
    """Whether this is process 0, the only one that writes the run folder and prints results."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """A barrier: returns when every process has called it with this name, however long that takes.

    It is one of JAX's coordination service, not of the devices: these are connected by their first collective
    operation, in which Gloo waits 30 s for the other processes, and preparing data takes longer.
    """
    if jax.process_count() > 1:
        distributed.global_state.client.wait_at_barrier(f"{name} {next(_barriers)}", _ANY_TIME_MS)


_barriers = itertools.count()  # the name of a barrier holds once


@contextlib.contextmanager
def main_first(name: str) -> Iterator[None]:
    """The main process runs the block first; the others run it when that has ended."""
    if not is_main():
        wait_for_all(name)
    yield
    if is_main():
        wait_for_all(name)


def gather(value: Any) -> list[Any]:
    """All-gathers a JSON value: those of all processes, by process index."""
    if jax.process_count() == 1:
        return [value]
    wait_for_all("gather")
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array(len(data)))
    rows = multihost_utils.process_allgather(np.pad(data, (0, lengths.max() - len(data))))
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]


def share_out(function: Callable[[list[Any]], list[Any]], items: Sequence[Any]) -> list[Any]:
    """`function(items)`, one result an item; each process computes a share, and all get the whole list."""
    count = jax.process_count()
    parts = gather(function(list(items[jax.process_index() :: count])))
    return [parts[index % count][index // count] for index in range(len(items))]


class FlagReducer:
    """All-reduces per-process flags with `or`, `delay` steps late, so that no step waits for the communication.

    All processes get the same result at the same step. A single process gets its flags at once.
    """

    def __init__(self, mesh: Mesh, delay: int):
        self._mesh, self._delay = mesh, delay
        self._pending = collections.deque()
        self._any = jax.jit(lambda rows: rows.any(axis=0), out_shardings=replicated(mesh))

    def reduce(self, *flags: bool) -> tuple[bool, ...]:
        """Starts the all-reduce of this step's flags; returns the result of `delay` steps ago, at first False."""
        if jax.process_count() == 1:
            return flags
        rows = np.array([flags] * self._mesh.size)  # a row a device: processes may share a row of the data axis
        by_device = NamedSharding(self._mesh, PartitionSpec((DATA, MODEL)))
        self._pending.append(self._any(jax.make_array_from_callback(rows.shape, by_device, rows.__getitem__)))
        if len(self._pending) <= self._delay:
            return (False,) * len(flags)
        return tuple(np.asarray(self._pending.popleft()).tolist())
