"""§5.2: the devices and processes of a run, and how arrays lie on them. Nothing else knows how many there are."""

import collections
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # the address of process 0, and the texts it keeps for all
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t2t_jax import peers
from t2t_jax.errors import InputError, Range

DATA, MODEL = "data", "model"
PEER_TIMEOUT_SECONDS = Range(5, 86_400)  # a busy machine may well be silent for a second or two

# The axis that tensor parallelism divides, by the last two parts of a parameter's name: heads, d_ff, the vocabulary.
# Whatever is not named here is whole on every device of the model axis.
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
    """All devices of all processes; each row of `model_parallel` of them holds one model and a share of every batch."""
    devices = np.array(jax.devices() if devices is None else devices)
    if model_parallel < 1 or devices.size % model_parallel:
        raise InputError(f"machine.model_parallel={model_parallel} must divide the number of devices, {devices.size}")
    return Mesh(devices.reshape(-1, model_parallel), (DATA, MODEL))


def local_mesh(mesh: Mesh) -> Mesh:
    """The devices of `mesh` that belong to this process, for what each process does by itself."""
    return Mesh(np.array(mesh.local_devices)[:, None], (DATA, MODEL))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    """The first axis divided over the data axis: batches."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def of_state(shapes: Any, mesh: Mesh, shard_state: bool) -> Any:
    """The sharding of each parameter, and of what the optimiser keeps of each, which has the same name.

    Divided over the model axis as `_MODEL_AXES` says, where that divides evenly; with `shard_state` (ZeRO) also
    over the data axis, along the longest axis left that divides evenly.
    """

    def sharding(path, x):
        spec: list[str | None] = [None] * len(x.shape)
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        axis = _MODEL_AXES.get(names[-2], {}).get(names[-1]) if len(names) > 1 else None
        if axis is not None and x.shape[axis] % mesh.shape[MODEL] == 0:
            spec[axis] = MODEL
        if shard_state:
            free = [a for a, n in enumerate(x.shape) if spec[a] is None and n % mesh.shape[DATA] == 0]
            if free:
                spec[max(free, key=lambda a: x.shape[a])] = DATA
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map_with_path(sharding, shapes)


def put_rows(arrays: dict[str, np.ndarray], mesh: Mesh, multiple: int = 1) -> dict[str, jax.Array]:
    """Arrays with equal numbers of rows, put on the devices in equal shares; every process gives the whole arrays.

    Rows of zeros, which are padding everywhere in this code, are added up to the next multiple of
    `multiple` × the length of the data axis.
    """
    rows = next(iter(arrays.values())).shape[0]
    added = -rows % (mesh.shape[DATA] * multiple)
    padded = {name: np.pad(x, ((0, added),) + ((0, 0),) * (x.ndim - 1)) for name, x in arrays.items()}
    if jax.process_count() == 1:
        return jax.device_put(padded, by_rows(mesh))
    return {name: jax.make_array_from_callback(x.shape, by_rows(mesh), x.__getitem__) for name, x in padded.items()}


def gather_arrays(tree: Any, mesh: Mesh) -> Any:
    """The whole of each array on all devices of this process."""
    whole = jax.device_put(tree, replicated(mesh))
    return jax.device_put(jax.tree.map(lambda x: x.addressable_data(0), whole), replicated(local_mesh(mesh)))


# --- Several processes -------------------------------------------------------------------------------------


@contextlib.contextmanager
def joined_processes(
    coordinator: str | None, num_processes: int | None, process_id: int | None, timeout_seconds: float
) -> Iterator[None]:
    """Makes this process one of those of a run; to be entered before any device is used.

    `coordinator` is HOST:PORT of process 0. Without it the cluster's own manager is asked (Slurm, the cloud's).
    Where one process is lost, or has not been heard for so long, the others end with exit code 3.
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if 0 < len(missing) < 3:
        raise InputError(f"several processes need {' and '.join(missing)} too, or --distributed alone under Slurm")
    if not missing:
        _check_processes(coordinator, num_processes, process_id)
    PEER_TIMEOUT_SECONDS.check("machine.peer_timeout_seconds", timeout_seconds)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    try:
        # JAX's heartbeats, which abort without naming the lost process, only end what our own cannot.
        jax.distributed.initialize(
            coordinator, num_processes, process_id, heartbeat_timeout_seconds=int(2 * timeout_seconds) + 10
        )
    except ValueError as error:
        raise InputError(f"--distributed: {error}; give --coordinator, --num_processes and --process_id") from None
    # Gloo, which connects the processes of CPUs, says so on standard output: that is for results.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
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


def is_main() -> bool:
    """Whether this process is the one that writes and speaks for all."""
    return jax.process_index() == 0


def wait_for_all(name: str) -> None:
    """Returns when every process has come to the point of this name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


@contextlib.contextmanager
def main_first(name: str) -> Iterator[None]:
    """The main process goes through the block before the others do."""
    if not is_main():
        wait_for_all(name)
    yield
    if is_main():
        wait_for_all(name)


def gather(value: Any) -> list[Any]:
    """The values, plain ones as in JSON, that each process gives."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array(len(data)))
    rows = multihost_utils.process_allgather(np.pad(data, (0, lengths.max() - len(data))))
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]


def share_out(function: Callable[[list[Any]], list[Any]], items: Sequence[Any]) -> list[Any]:
    """`function(items)`, item by item, of which each process computes a part."""
    count = jax.process_count()
    parts = gather(function(list(items[jax.process_index() :: count])))
    return [parts[index % count][index // count] for index in range(len(items))]


class Ballot:
    """Lets every process do the same at the same step: what any of them asks for.

    With several processes the answer is that of the vote cast `delay` steps ago, so that no step waits for it.
    """

    def __init__(self, mesh: Mesh, delay: int):
        self._mesh, self._delay = mesh, delay
        self._cast = collections.deque()
        self._any = jax.jit(lambda votes: votes.any(axis=0), out_shardings=replicated(mesh))

    def vote(self, *asked: bool) -> tuple[bool, ...]:
        """Which of these any process has asked for."""
        if jax.process_count() == 1:
            return asked
        votes = np.array([asked] * self._mesh.shape[DATA])
        self._cast.append(self._any(jax.make_array_from_callback(votes.shape, by_rows(self._mesh), votes.__getitem__)))
        if len(self._cast) <= self._delay:
            return (False,) * len(asked)
        return tuple(np.asarray(self._cast.popleft()).tolist())
