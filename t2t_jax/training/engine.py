"""§5.2: ahead-of-time compilation of the training step for each batch shape.

It chooses the number of microbatches for gradient accumulation: the fewest with which every shape fits the memory.
"""

import concurrent.futures
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from t2t_jax import errors, sharding
from t2t_jax.data.batching import Bucket, empty_batch
from t2t_jax.errors import InputError
from t2t_jax.model.transformer import Transformer
from t2t_jax.threads import available_cores
from t2t_jax.training.train_step import Batch, Metrics, TrainState

Shape = tuple[tuple[int, ...], ...]  # of a batch's inputs and targets
# (state, a batch on the host) → (state, metrics)
TakeStep = Callable[[TrainState, dict[str, np.ndarray]], tuple[TrainState, Metrics]]
_GIB = 2**30
# On GPU: the products for q, k and v are not joined, which would cost more bytes for copying the parts than it saves;
# and all products are cuBLASLt's, whose kernels add the bias and compute ReLU; Triton's would leave both to others.
_GPU_OPTIONS = {"xla_disable_hlo_passes": "dot-merger", "xla_gpu_enable_triton_gemm": False}
_USABLE = 0.95  # of what a device reports: temporaries lie in one piece between all other arrays


class Machine(NamedTuple):
    """How the devices are used, which changes losses and gradients by rounding errors alone.

    `microbatches` for gradient accumulation, 0 for the fewest that fit the memory. `memory_gib` is that of a device, 0
    for what the device reports. `engine` is 'jit' or 'pmap'.
    """

    microbatches: int
    memory_gib: float
    engine: str


class Engine(NamedTuple):
    """A compiled training step, its number of microbatches, the largest memory need of any batch shape on a device."""

    take_step: TakeStep
    microbatches: int
    bytes: int
    seconds: float  # of compilation


def build(
    step: Callable[..., tuple[TrainState, Metrics]],
    shapes: Sequence[Bucket],
    key: Array,
    state: TrainState,
    mesh: Mesh,
    machine: Machine,
) -> Engine:
    """Compiles `step(microbatches, key, state, batch, mesh=…, axis=…)`, like `train_step`, for these batch shapes.

    The new state has the shardings of `state`. All shapes have the same number of microbatches. The key is an argument
    of the programs, so that runs with other seeds find them in the compilation cache.
    """
    started = time.monotonic()
    rows = _most_rows([shape.rows for shape in shapes], mesh)
    if machine.microbatches > rows:
        raise InputError(
            f"train.accumulate={machine.microbatches}: a device has at most {rows} rows of a batch; lower it, or set "
            "it to 0"
        )
    if machine.engine == "pmap":
        return Engine(_pmap(step, key, mesh, machine.microbatches or 1), machine.microbatches or 1, 0, 0.0)
    positions = lambda bucket: bucket.rows * (bucket.source_length + bucket.target_length)
    empty = [empty_batch(bucket) for bucket in sorted(shapes, key=positions, reverse=True)]
    microbatches, programs = _fit(functools.partial(_lower, step, key, state, mesh), empty, mesh, machine)

    def take_step(state, batch):
        return programs[_shape(batch)].run(key, state, sharding.put_rows(batch, mesh, microbatches))

    return Engine(take_step, microbatches, max(x.bytes for x in programs.values()), time.monotonic() - started)


def _lower(step, key, state, mesh, batch, microbatches):
    layout = jax.tree.map(lambda x: x.sharding, state), sharding.replicated(mesh)
    jitted = jax.jit(functools.partial(step, microbatches, mesh=mesh), donate_argnums=1, out_shardings=layout)
    return jitted.lower(key, state, sharding.put_rows(batch, mesh, microbatches))


class _Program(NamedTuple):
    """A compiled step and the bytes that it needs on a device; infinitely many where it could not be compiled."""

    run: Any
    bytes: float


def _fit(lower: Callable, batches: Sequence[Batch], mesh: Mesh, machine: Machine) -> tuple[int, dict[Shape, _Program]]:
    """The fewest microbatches, of 1, 2, 4, …, with which every batch fits the memory, and the compiled steps.

    The first of `batches` should need the most memory: where that has a limit, the others are compiled only if it fits.
    For the next number of microbatches, the batches are sorted by the memory that they needed.
    """
    limit = machine.memory_gib * _GIB or _memory_of(mesh)
    first = 1 if math.isfinite(limit) else len(batches)
    fits = lambda programs: all(math.isfinite(x.bytes) and x.bytes <= limit for x in programs.values())
    rows = _most_rows([len(batch["inputs"]) for batch in batches], mesh)
    choices = [machine.microbatches] if machine.microbatches else [2**n for n in range((rows - 1).bit_length() + 1)]
    for microbatches in choices:
        programs = _compile(lower, batches[:first], microbatches, mesh)
        if fits(programs):
            programs |= _compile(lower, batches[first:], microbatches, mesh)
        if fits(programs):
            return microbatches, programs
        need_of = lambda batch, programs=programs: programs.get(_shape(batch), _Program(None, 0)).bytes
        batches = sorted(batches, key=need_of, reverse=True)
    need = max(x.bytes for x in programs.values())
    needed = f"{_size(need)}, more than the {_size(limit)}" if need < math.inf else "more than the memory"
    given = f" (machine.memory_gib={machine.memory_gib})" * bool(machine.memory_gib)
    need_of_step = f"with {microbatches} microbatches, a step needs {needed} of a device{given}"
    raise InputError(f"data.tokens_per_batch: {need_of_step}; {_REMEDIES}")


def _most_rows(rows: Sequence[int], mesh: Mesh) -> int:
    """The most rows that a device has of any of the batches, which have so many rows in all."""
    return -(-max(rows) // mesh.shape[sharding.DATA])


def _compile(lower: Callable, batches: Sequence[Batch], microbatches: int, mesh: Mesh) -> dict[Shape, _Program]:
    """The step compiled for each batch, several at a time, while the next ones are traced."""

    def compile_step(step):
        try:
            compiled = step.compile(compiler_options=compiler_options(mesh))
        except Exception as error:  # on a TPU, whose compiler runs out of device memory
            if errors.memory_reason(error) is None:
                raise
            return _Program(None, math.inf)
        return _Program(compiled, bytes_of(compiled))  # asked once: for a large program XLA takes a quarter of a second

    lowered = (lower(batch, microbatches) for batch in batches)
    with concurrent.futures.ThreadPoolExecutor(available_cores()) as pool:
        return dict(zip(map(_shape, batches), pool.map(compile_step, lowered), strict=True))


def compiler_options(mesh: Mesh) -> dict[str, str | bool]:
    """XLA's options for the training step on these devices."""
    if mesh.devices.flat[0].platform != "gpu":
        return {}
    # Without it, devices that compute the same gradient of a replicated table would add its rows in different orders.
    deterministic = {"xla_gpu_deterministic_ops": True} if mesh.shape[sharding.MODEL] > 1 else {}
    return _GPU_OPTIONS | deterministic


_REMEDIES = (
    "lower data.tokens_per_batch, leave train.accumulate at 0 (with a lower machine.memory_gib, if a step fails that "
    "was to fit; with a higher one, if it was too low), or set machine.remat or machine.shard_state to True"
)


def _memory_of(mesh: Mesh) -> float:
    """Bytes that a step may need on every device; infinite for CPUs, for which JAX does not report it.

    It is that of the smallest device of all processes, so that all of them compile the same program.
    """
    local = [(device.memory_stats() or {}).get("bytes_limit", math.inf) for device in mesh.local_devices]
    return _USABLE * min(sharding.gather(min(local)))


def bytes_of(compiled: Any) -> int:
    """Memory that a compiled program needs on each device: arguments, results and temporaries."""
    sizes = compiled.memory_analysis()
    results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.argument_size_in_bytes + results + sizes.temp_size_in_bytes


# For what training computes: an out-of-memory error of a device becomes a line that says which field to lower.
out_of_memory = functools.partial(errors.out_of_memory, "data.tokens_per_batch", _REMEDIES)
# For its evaluations.
search_out_of_memory = functools.partial(
    errors.out_of_memory, "decode.beam_size", "lower it, or set evaluate.dtype to bfloat16"
)


def _shape(batch: Batch) -> Shape:
    return batch["inputs"].shape, batch["targets"].shape


def _pmap(step: Callable, key: Array, mesh: Mesh, microbatches: int) -> TakeStep:
    """The same step by `jax.pmap`: each device computes its rows, gradients and sums are all-reduced."""
    devices = mesh.shape[sharding.DATA]
    step = functools.partial(step, microbatches, axis=sharding.DATA)
    mapped = jax.pmap(
        step, axis_name=sharding.DATA, in_axes=(None, None, 0), out_axes=None, devices=list(mesh.devices.ravel())
    )

    def take_step(state, batch):
        rows = sharding.put_rows(batch, mesh, microbatches)
        return mapped(key, state, jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), rows))

    return take_step


def describe(engine: Engine, shapes: int, state: TrainState, mesh: Mesh, model: Transformer) -> str:
    """A line about the devices, what was chosen for them, the model, what was compiled and how much memory it needs."""
    fused = " with fused attention" * model.fused_attention
    devices = f"{mesh.devices.size} × {mesh.devices.flat[0].device_kind}, {model.dtype.name}{fused}"
    chosen = f"{devices}; {_describe_parameters(state, model)}"
    if engine.bytes == 0:
        return f"{chosen}; pmap: each batch shape is compiled when it first comes"
    held = sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(state))
    in_microbatches = f", each in {engine.microbatches} microbatches" if engine.microbatches > 1 else ""
    return (
        f"{chosen}; {_size(engine.bytes)} each ({_size(held)} parameters and optimiser); compiled "
        f"{shapes} batch shape{'s' * (shapes > 1)}{in_microbatches} in {engine.seconds:.0f} s"
    )


def _describe_parameters(state: TrainState, model: Transformer) -> str:
    """Their number, and heads that are wider or narrower together than usual: d_k is a field of its own (Table 3)."""
    width, d_model = model.config.num_heads * model.config.d_k, model.config.d_model
    unusual = f" (num_heads · d_k = {width}, d_model = {d_model})" if width != d_model else ""
    return f"{sum(x.size for x in jax.tree.leaves(state.params)):,} parameters{unusual}"


def _size(count: int) -> str:
    """A number of bytes for people to read."""
    return f"{count / _GIB:.2f} GiB" if count >= _GIB / 10 else f"{count / 2**20:.2f} MiB"
