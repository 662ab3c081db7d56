"""§5.2: the training step compiled for the devices at hand: every batch shape before step 1, in the memory there is."""

import concurrent.futures
import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from t2t_jax import sharding
from t2t_jax.data.batching import Bucket, empty_batch
from t2t_jax.errors import InputError
from t2t_jax.training.train_step import Batch, Metrics, TrainState

Shape = tuple[tuple[int, ...], ...]  # of a batch's inputs and targets
# (state, a batch on the host) → (state, metrics)
TakeStep = Callable[[TrainState, dict[str, np.ndarray]], tuple[TrainState, Metrics]]
_GIB = 2**30


class Machine(NamedTuple):
    """How the devices are used. None of it changes the experiment: losses and gradients are the same up to rounding.

    Gradients are accumulated over `parts` microbatches, as few as the memory allows where that is 0. `memory_gib` is a
    device's, 0 for what it says it has. `engine` is 'jit' or 'pmap'.
    """

    parts: int
    memory_gib: float
    engine: str


class Engine(NamedTuple):
    """A compiled training step, its number of microbatches, and the most memory that any batch needs of a device."""

    take_step: TakeStep
    parts: int
    bytes: int
    seconds: float  # of compiling


def build(
    step: Callable[..., tuple[TrainState, Metrics]],
    shapes: Sequence[Bucket],
    state: TrainState,
    mesh: Mesh,
    machine: Machine,
) -> Engine:
    """The pure `step(parts, axis, state, batch)` compiled for batches of these shapes and a state laid out as `state`.

    Ahead of time, all shapes in one number of microbatches, in which each of them fits the memory.
    """
    started = time.monotonic()
    if machine.engine == "pmap":
        return Engine(_pmap(step, mesh, machine.parts or 1), machine.parts or 1, 0, 0.0)
    positions = lambda bucket: bucket.rows * (bucket.source_length + bucket.target_length)
    empty = [empty_batch(bucket) for bucket in sorted(shapes, key=positions, reverse=True)]
    parts, compiled = _fit(functools.partial(_lower, step, state, mesh), empty, mesh, machine)

    def take_step(state, batch):
        return compiled[_shape(batch)](state, sharding.put_rows(batch, mesh, parts))

    return Engine(take_step, parts, max(map(bytes_of, compiled.values())), time.monotonic() - started)


def _lower(step, state, mesh, batch, parts):
    layout = jax.tree.map(lambda x: x.sharding, state), sharding.replicated(mesh)
    jitted = jax.jit(functools.partial(step, parts, None), donate_argnums=0, out_shardings=layout)
    return jitted.lower(state, sharding.put_rows(batch, mesh, parts))


def _fit(lower: Callable, batches: Sequence[Batch], mesh: Mesh, machine: Machine) -> tuple[int, dict[Shape, Any]]:
    """The least number of microbatches, of 1, 2, 4, …, in which every batch fits the memory, and the compiled steps.

    The first of `batches`, likely to need the most, is compiled before the others, and these only where it fits. From
    then on the one that needed the most is the first.
    """
    limit = machine.memory_gib * _GIB or _memory_of(mesh)
    rows = -(-max(len(batch["inputs"]) for batch in batches) // mesh.shape[sharding.DATA])
    choices = [machine.parts] if machine.parts else [2**n for n in range(rows.bit_length())]
    for parts in choices:
        compiled = _compile(lower, batches[:1], parts)
        if bytes_of(compiled[_shape(batches[0])]) <= limit:
            compiled |= _compile(lower, batches[1:], parts)
        needs = {shape: bytes_of(step) for shape, step in compiled.items()}
        if max(needs.values()) <= limit:
            return parts, compiled
        batches = sorted(batches, key=lambda batch: needs.get(_shape(batch), 0), reverse=True)
    raise InputError(
        f"data.tokens_per_batch: in {parts} parts, a step needs {max(needs.values()) / _GIB:.2f} GiB of the "
        f"{limit / _GIB:.2f} GiB of a device; {_REMEDIES}"
    )


def _compile(lower: Callable, batches: Sequence[Batch], parts: int) -> dict[Shape, Any]:
    """The step compiled for each batch, several at a time."""
    lowered = {_shape(batch): lower(batch, parts) for batch in batches}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(lowered, pool.map(lambda step: step.compile(), lowered.values()), strict=True))


_REMEDIES = (
    "lower data.tokens_per_batch, leave train.accumulate at 0, or set machine.remat or machine.shard_state to True"
)


def _memory_of(mesh: Mesh) -> float:
    """Bytes a device may use; those of a CPU are not known to JAX."""
    statistics = mesh.local_devices[0].memory_stats() or {}
    return statistics.get("bytes_limit", math.inf)


def bytes_of(compiled: Any) -> int:
    """What a compiled program needs on each device: arguments, results and what lives in between."""
    sizes = compiled.memory_analysis()
    results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.argument_size_in_bytes + results + sizes.temp_size_in_bytes


@contextlib.contextmanager
def out_of_memory() -> Iterator[None]:
    """Says what to lower where a device has no memory left."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0].partition("RESOURCE_EXHAUSTED:")[2].strip()
        raise InputError(f"data.tokens_per_batch: out of memory ({reason}); {_REMEDIES}") from None


def _shape(batch: Batch) -> Shape:
    return batch["inputs"].shape, batch["targets"].shape


def _pmap(step: Callable, mesh: Mesh, parts: int) -> TakeStep:
    """The same step by `jax.pmap`: each device takes its rows, and what they give is added up among them."""
    devices = mesh.shape[sharding.DATA]
    mapped = jax.pmap(
        functools.partial(step, parts, sharding.DATA), axis_name=sharding.DATA, in_axes=(None, 0), out_axes=None,
        devices=list(mesh.devices.ravel()),
    )  # fmt: skip

    def take_step(state, batch):
        rows = sharding.put_rows(batch, mesh, parts)
        return mapped(state, jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), rows))

    return take_step


def describe(engine: Engine, shapes: int, state: TrainState, mesh: Mesh) -> str:
    """What was compiled and what it needs, in a line."""
    if engine.bytes == 0:
        return "pmap: each batch shape is compiled when it first comes"
    devices = f"{mesh.devices.size} device{'s' * (mesh.devices.size > 1)}"
    held = sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(state))
    in_parts = f", each in {engine.parts} parts" if engine.parts > 1 else ""
    return (
        f"{devices}, {engine.bytes / _GIB:.2f} GiB each ({held / _GIB:.2f} parameters and optimiser); compiled "
        f"{shapes} batch shapes{in_parts} in {engine.seconds:.0f} s"
    )
