"""The programs that XLA compiles for an H100, on a machine without one: kernels, bytes, operations, estimated times.

    pip install --no-deps --target ~/gpu_aot jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 nvidia-cuda-nvcc-cu12
    python -m benchmarks.h100_program [--output FILE.json] [--models base big] [--decoding_rows 64 512]

The plugins' version must be that of jax; another folder than ~/gpu_aot is given by the environment variable GPU_AOT.
A training step in bfloat16 of `--rows` sentence pairs of `--length` tokens a side is compiled with one and with two
layers, and extrapolated to the model's six, as is a decoding step. What this cannot show: autotuning, cuDNN's plans,
measured time. A kernel is estimated to take the longest of: its bytes at 2.6 TB/s, its operations at 80 % (or 70 %) of
798 TFLOP/s, and 2.5 µs.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks import measure
from t2t_jax.errors import InputError, exit_code_of

PLUGINS = Path(os.environ.get("GPU_AOT", "~/gpu_aot")).expanduser()
TARGET = Path(__file__).with_name("h100.txtpb")  # what XLA knows of the chip
MATRIX_RATE, BANDWIDTH, LAUNCH_SECONDS = 798e12, 2.6e12, 2.5e-6  # FLOP/s in bfloat16, bytes/s, of the smallest kernel
EFFICIENCIES = (0.8, 0.7)  # of matrix products: the optimistic and the cautious estimate
VOCAB = 32_000


def main() -> None:
    parser = measure.argument_parser("benchmarks.h100_program", __doc__)
    parser.add_argument("--models", nargs="*", choices=["base", "big"], default=["base", "big"])
    parser.add_argument("--rows", type=int, default=776, help="sentence pairs of a batch")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sentence")
    parser.add_argument("--decoding_rows", type=int, nargs="*", default=[64, 512])
    arguments = parser.parse_args()
    if (reason := missing()) is not None:
        raise InputError(reason)
    results = {}
    for model, fused in itertools.product(arguments.models, (False, True)):
        size = {"rows": arguments.rows, "length": arguments.length}
        programs = [training_step(shape_of(model, layers), **size, fused=fused) for layers in (1, 2)]
        results |= report(f"{model} {'fused' if fused else 'unfused'}", programs)
    for rows in arguments.decoding_rows:
        programs = [decoding_step(shape_of("base", layers), rows=rows) for layers in (1, 2)]
        results |= report(f"decoding {rows} rows", programs)
    chosen = {name: value for name, value in vars(arguments).items() if name != "output"}
    measure.write(arguments.output, measure.conditions(["jax"]) | chosen, results)


# --- Compiling ---------------------------------------------------------------------------------------------


def missing() -> str | None:
    """What is missing for `compile_for_h100`, with the command that installs it."""
    version = importlib.metadata.version("jax")
    if not list(PLUGINS.glob(f"jax_cuda12_plugin-{version}.dist-info")):
        return (
            f"no CUDA plugin of jax {version} in {PLUGINS}: pip install --no-deps --target {PLUGINS} "
            f"jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version} nvidia-cuda-nvcc-cu12"
        )
    return None


@functools.cache
def devices() -> list[jax.Device]:
    """Eight H100 that programs can be compiled for, not run on."""
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")  # without it, the plugin would look for a GPU
    jax.devices()  # JAX looks for plugins once, now; later it would find this one a second time
    jax.config.update("jax_enable_compilation_cache", False)  # what it reads, it would load onto a GPU
    sys.path.append(str(PLUGINS))
    os.environ["PATH"] += f":{PLUGINS}/nvidia/cuda_nvcc/bin"
    importlib.import_module("jax_plugins.xla_cuda12").initialize()
    return topologies.get_topology_desc("h100", "cuda", target_config=TARGET.read_text(), topology="1x1x8").devices


def mesh_of(count: int) -> Mesh:
    """A mesh of this many of the devices, as `sharding.make_mesh` makes it."""
    from t2t_jax import sharding

    return sharding.make_mesh(devices()[:count])


@contextlib.contextmanager
def tracing_for_h100() -> Iterator[None]:
    """What is traced inside is a program for an H100 with cuDNN 9.13, whatever this machine has."""
    import jax._src.cudnn.fused_attention_stablehlo as cudnn

    from t2t_jax.model.platform import tracing_for

    with (
        tracing_for("gpu"),
        mock.patch.object(cudnn, "check_cudnn_version", lambda: 91300),
        mock.patch.object(cudnn, "check_compute_capability", lambda capability: True),
        mock.patch.object(cudnn, "is_cuda_compute_capability_equal", lambda capability: False),
    ):
        yield


def compile_for_h100(lowered: Any, options: Mapping[str, Any]) -> str:
    """The optimised program as HLO text; `options` are XLA's."""
    fixed = {"xla_gpu_autotune_level": 0, "xla_gpu_cuda_data_dir": f"{PLUGINS}/nvidia/cuda_nvcc"}
    return lowered.compile(compiler_options=fixed | dict(options)).as_text()


def training_step(
    config: Any,
    *,
    rows: int,
    length: int,
    count: int = 1,
    fused: bool = False,
    packed: bool = False,
    microbatches: int = 1,
    shard_state: bool = False,
) -> str:
    """The bfloat16 training step of a model for `count` devices, as `engine.build` compiles it."""
    from t2t_jax import sharding
    from t2t_jax.model.transformer import Transformer
    from t2t_jax.training import engine
    from t2t_jax.training.loss import label_smoothed_loss
    from t2t_jax.training.optimizer import adam, learning_rate_schedule
    from t2t_jax.training.train_step import init_state, train_step

    mesh = mesh_of(count)
    model = Transformer(config, jnp.bfloat16, fused)
    optimizer = adam(learning_rate_schedule(config.d_model, 4000), 0.9, 0.98, 1e-9)
    names = ["inputs", "targets"] + ["input_segments", "target_segments"] * packed
    batch = {name: jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=sharding.by_rows(mesh)) for name in names}
    with tracing_for_h100():
        key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=sharding.replicated(mesh))
        shapes = jax.eval_shape(functools.partial(init_state, model, optimizer), key)
        layout = sharding.of_state(shapes, mesh, shard_state)
        state = sharding.shapes_of(shapes, layout)
        loss_fn = label_smoothed_loss(model, 0.1)
        step = functools.partial(train_step, loss_fn, optimizer, microbatches, mesh=mesh)
        jitted = jax.jit(step, donate_argnums=1, out_shardings=(layout, sharding.replicated(mesh)))
        return compile_for_h100(jitted.lower(key, state, batch), engine.compiler_options(mesh))


def decoding_step(config: Any, *, rows: int) -> str:
    """The loop of decoding steps of continuous batching, beam 4, in bfloat16 on one device."""
    from t2t_jax import sharding
    from t2t_jax.decoding import continuous_batching
    from t2t_jax.decoding.ensemble import computed_shapes
    from t2t_jax.decoding.search_options import SearchOptions
    from t2t_jax.model.transformer import Transformer

    mesh, search = mesh_of(1), SearchOptions()
    modules, whole = (Transformer(config, jnp.bfloat16),), sharding.replicated(mesh)
    with tracing_for_h100():
        shapes = continuous_batching.Shapes(rows, rows, source_length=32, prefix_length=0, num_features=0)
        start = functools.partial(continuous_batching._start.__wrapped__, modules, search, shapes, 64, mesh)
        state = sharding.shapes_of(jax.eval_shape(start), whole)
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
        steps = jax.jit(continuous_batching._advance, static_argnames="modules", donate_argnames="state")
        params = computed_shapes(modules, mesh)
        lowered = steps.lower(modules, search, params, state, max_steps=number, min_running=number)
        return compile_for_h100(lowered, {})


def shape_of(model: str, layers: int) -> Any:
    """The `TransformerConfig` of base or big with this many layers."""
    from t2t_jax.model.transformer import TransformerConfig

    return TransformerConfig(vocab_size=VOCAB, **measure.paper_config(model).model.to_dict() | {"num_layers": layers})


# --- Reading the compiled program ----------------------------------------------------------------------------


class Instruction(NamedTuple):
    """One instruction of an HLO computation: `type` is its result's, `operands` are names."""

    name: str
    type: str
    opcode: str
    operands: list[str]
    line: str


class Kernel(NamedTuple):
    """A kernel that the program launches, `count` times; bytes and operations are those of one launch."""

    name: str
    opcode: str
    kind: str
    type: str
    count: int
    bytes: int
    flops: int
    op_name: str

    def seconds(self, efficiency: float) -> float:
        """Estimated time of all launches."""
        busy = max(self.bytes / BANDWIDTH, self.flops / (efficiency * MATRIX_RATE))
        return self.count * max(busy, LAUNCH_SECONDS)


_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2,
          "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}  # fmt: skip
_INSTRUCTION = re.compile(r"(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)")
_NO_KERNEL = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all", "partition-id"}
_SLICES = {"gather", "dynamic-slice", "slice"}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def computations(text: str) -> dict[str, list[Instruction]]:
    """The computations of an HLO module by name; 'ENTRY' is the first that runs."""
    found: dict[str, list[Instruction]] = {}
    current = None
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            current = found["ENTRY" if header[1] else header[2]] = []
        elif current is not None and (match := _INSTRUCTION.match(line.strip())):
            operands = re.findall(r"%([\w.\-]+)", match[4].split("), ")[0])
            current.append(Instruction(match[1], match[2], match[3], operands, line.strip()))
    return found


def kernels(text: str) -> list[Kernel]:
    """The kernels of a compiled program, those of loops as often as the loop is known to turn."""
    return list(_kernels(computations(text), "ENTRY", 1))


def _kernels(modules, name, count):
    types = {instruction.name: instruction.type for instruction in modules[name]}
    for instruction in modules[name]:
        opcode, line = instruction.opcode, instruction.line
        if opcode == "while":
            turns = re.search(r'known_trip_count[^}]*?"n":"(\d+)"', line)
            yield from _kernels(modules, _called(line, "body"), count * int(turns[1] if turns else 1))
        elif opcode == "call":
            yield from _kernels(modules, _called(line, "to_apply"), count)
        elif opcode not in _NO_KERNEL and not opcode.endswith("-done"):
            yield _kernel(modules, instruction, types, count)


def _called(line, attribute):
    match = re.search(rf"{attribute}=%?([\w.\-]+)", line)
    return match and match[1]


def _kernel(modules, instruction, types, count):
    line = instruction.line
    inner = modules.get(_called(line, "calls"), [])
    flops = _flops(instruction, types, inner)
    op_name = re.search(r'op_name="([^"]*)"', line)
    op_name = op_name[1] if op_name else ""
    if instruction.opcode.startswith(COLLECTIVES):
        kind = "collective"
    elif flops:
        kind = "attention" if "fmha" in line or re.search("bh[tk]", op_name) else "matmul"
    else:
        kind = "other"
    moved = _bytes_moved(instruction, types, inner)
    return Kernel(instruction.name, instruction.opcode, kind, instruction.type, count, moved, flops, op_name)


def size_of(type_text: str) -> int:
    """Bytes of an array type such as `bf16[8,16]{1,0}`, or of all arrays of a tuple."""
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", type_text)
    return sum(_BYTES.get(dtype, 0) * int(np.prod(_dims(dims))) for dtype, dims in arrays)


def _dims(text):
    return [int(n) for n in text.split(",")] if text else []


def _shape(type_text):
    return _dims(re.search(r"\[([\d,]*)\]", type_text)[1])


def _bytes_moved(instruction, types, inner):
    """Results and operands; of an operand that is only sliced or gathered from, what is taken."""
    result = instruction.type
    if instruction.opcode == "custom-call":
        result = re.sub(r"[su]8\[\d+\]\{0\}", "", result)  # scratch memory
    written = size_of(result)
    parameters = {x.name: int(x.line.split("parameter(")[1].split(")")[0]) for x in inner if x.opcode == "parameter"}
    taken = {}
    for name, number in parameters.items():
        name, users = _users(name, inner)
        if users and all(x.opcode in _SLICES and x.operands[0] == name for x in users):
            taken[number] = sum(size_of(x.type) for x in users)
        elif users and all(x.opcode == "dynamic-update-slice" and x.operands[0] == name for x in users):
            taken[number] = 0
            updates = {y.name: size_of(y.type) for y in inner}
            written = min(written, sum(updates.get(x.operands[1], 0) for x in users))
    read = sum(taken.get(n, size_of(types.get(name, ""))) for n, name in enumerate(instruction.operands))
    if instruction.opcode in _SLICES:
        read = written
    return read + written


def _users(name, inner):
    """The instructions that use a value, in another view or dtype perhaps, and their name for it."""
    users = [x for x in inner if name in x.operands]
    while len(users) == 1 and users[0].opcode in ("bitcast", "convert"):
        name = users[0].name
        users = [x for x in inner if name in x.operands]
    return name, users


def _flops(instruction, types, inner):
    line = instruction.line
    if "fmha" in line:  # two matrix products forward, five backward
        batch, length, heads, head_dim = _shape(types[instruction.operands[0]])
        keys = _shape(types[instruction.operands[1]])[1]
        return (10 if "Backward" in line else 4) * batch * heads * length * keys * head_dim
    if instruction.opcode == "custom-call" and "matmul" in line:
        contracted = re.search(r'"lhs_contracting_dimensions":\["?([\d",]+)\]', line)[1]
        return _dot_flops(instruction.type, types[instruction.operands[0]], contracted.replace('"', ""))
    inner_types = {x.name: x.type for x in inner}
    return sum(
        _dot_flops(x.type, inner_types[x.operands[0]], re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.line)[1])
        for x in inner
        if x.opcode == "dot"
    )


def _dot_flops(result, left, contracted):
    shape = _shape(left)
    return 2 * int(np.prod(_shape(result))) * int(np.prod([shape[axis] for axis in _dims(contracted)]))


# --- The table -------------------------------------------------------------------------------------------------


class Totals(NamedTuple):
    """Sums over kernels."""

    kernels: float
    gigabytes: float
    teraflops: float
    best_ms: float  # at the first of `EFFICIENCIES`
    cautious_ms: float


def totals(found: Sequence[Kernel]) -> Totals:
    """The sums over these kernels."""
    return Totals(
        sum(k.count for k in found),
        sum(k.count * k.bytes for k in found) / 1e9,
        sum(k.count * k.flops for k in found) / 1e12,
        *(sum(k.seconds(efficiency) for k in found) * 1e3 for efficiency in EFFICIENCIES),
    )


def extrapolated(programs: Sequence[str], layers: int = 6) -> dict[str, Totals]:
    """By kind of kernel and altogether: one layer's program plus `layers` − 1 times what the second layer added."""
    one, two = (kernels(text) for text in programs)

    def grow(kind):
        first, second = (totals([k for k in found if k.kind == kind]) for found in (one, two))
        return Totals(*(a + (layers - 1) * (b - a) for a, b in zip(first, second, strict=True)))

    rows = {kind: grow(kind) for kind in sorted({k.kind for k in one + two})}
    return rows | {"total": Totals(*map(sum, zip(*rows.values(), strict=True)))}


def report(name: str, programs: Sequence[str]) -> dict[str, float]:
    """Prints the table of a program extrapolated to six layers; its numbers by name."""
    print(f"\n{name:<24}{'kernels':>9}{'GB':>9}{'TFLOP':>9}{'ms, 80 %':>10}{'70 %':>8}{'of 798 TFLOP/s':>20}")
    results = {}
    for kind, row in extrapolated(programs).items():
        shares = [row.teraflops / MATRIX_RATE * 1e15 / ms for ms in (row.best_ms, row.cautious_ms)]
        used = f"{shares[0]:.1%} – {shares[1]:.1%}" if kind == "total" else ""
        print(
            f"  {kind:<22}{row.kernels:>9.0f}{row.gigabytes:>9.2f}{row.teraflops:>9.2f}{row.best_ms:>10.2f}"
            f"{row.cautious_ms:>8.2f}{used:>20}", flush=True,
        )  # fmt: skip
        results |= {f"{name} {kind} {field}": value for field, value in row._asdict().items()}
    return results


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
