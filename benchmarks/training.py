"""Training speed, compared with PyTorch from the same initial parameters, and with single optimisations turned off.

    python -m benchmarks.training [--output FILE.json] [--rounds 5] [--model base] [--tokens 1024]
                                  [--corpus PREFIX] [--only dense lengths ablations]

The first table ("dense") times steps on batches without padding: `--tokens` positions per side in sentences of 32
subwords, with a vocabulary of 32,000. The second ("lengths") has sentences of WMT14's lengths, or of the lengths in
PREFIX.en and PREFIX.de, at most `--tokens` positions per side in a batch; PyTorch's batches are sorted by length and
cut at this number, as fairseq does. The third ("ablations") repeats the dense step with one change at a time.

Sentences are random ids; all batches are on the device before timing starts. On a GPU, the second and third table are
bfloat16. Needs `pip install -e '.[interop]'`, all cores, and an idle machine.
"""

import dataclasses
import shutil
import statistics
import sys
import tempfile
from typing import Any

import numpy as np

from benchmarks import measure, training_batches
from benchmarks.data import PACKED, default
from benchmarks.measure import at_least
from benchmarks.training_systems import (
    CHECK,
    MATMUL,
    MATMULS,
    STEP,
    TRAIN,
    JaxStep,
    Setting,
    TorchStep,
    Variants,
    accelerator,
    result_name,
    start,
    step_operations,
    write_initial,
)  # fmt: skip
from t2t_jax.errors import exit_code_of

VOCAB = 32_000
STEPS = {"cpu": 3, "gpu": 50}  # per measurement, in the first and third table
SAMPLE = {"cpu": 12, "gpu": 96}  # batches per measurement, in the second table
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # relative, of the loss; ten times as much for the gradient norm


def main() -> None:
    parser = measure.argument_parser("benchmarks.training", __doc__)
    parser.add_argument("--rounds", type=at_least(1), default=5, help="measurements per system, interleaved")
    parser.add_argument("--model", choices=["base", "big"], default="base", help="a model of the paper's Table 2")
    parser.add_argument(
        "--tokens",
        type=at_least(training_batches.LENGTH, training_batches.LENGTH),
        default=1024,
        help="positions per side in a batch",
    )
    parser.add_argument("--corpus", help="PREFIX of the text whose sentence lengths the second table has")
    parser.add_argument("--only", nargs="+", choices=["dense", "lengths", "ablations"], help="only these tables")
    arguments = parser.parse_args()

    (device, kind, _), _, _ = measure.run_in_process(accelerator)
    chosen = {name: getattr(arguments, name) for name in ("rounds", "model", "tokens", "corpus")}
    conditions = measure.conditions(["jax", "flax", "torch"]) | {"device": kind} | chosen
    print(conditions, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        initial = f"{directory}/initial.npz"
        shape = measure.paper_config(arguments.model).model.to_dict()
        setting = Setting(shape, VOCAB, arguments.tokens, arguments.rounds, device, initial)
        measure.run_in_process(write_initial, setting)
        tables = {
            "dense": dense,
            "lengths": lambda setting: lengths(setting, *training_batches.sentences(arguments.corpus, VOCAB)),
            "ablations": ablations,
        }
        results = {}
        for name in arguments.only or tables:
            results |= {result_name(device, key): number for key, number in tables[name](setting).items()}
    measure.write(arguments.output, conditions, results)


# --- The tables --------------------------------------------------------------------------------------------


def dense(setting: Setting) -> dict[str, float]:
    """The first table: dense batches."""
    variants = {"ours float32": JaxStep("float32"), "ours bfloat16": JaxStep("bfloat16")}
    variants |= (
        {"torch float32 plain": TorchStep("float32", tuned=False)}
        | torch_variants("float32")
        | torch_variants("bfloat16")
    )
    batch, steps = setting.dense_batch(), STEPS[setting.device]
    with measure.running(start(variants, setting, dict.fromkeys(variants, [batch] * steps))) as named:
        check(named, variants)
        seconds = per(train_in_turns(named, setting), dict.fromkeys(variants, steps))
        rates = matrix_rates(named, setting)
    operations, tokens = step_operations(setting, batch), int(np.count_nonzero(batch["targets"]))
    peers = best_torch(seconds, variants)
    print(f"\n{'':<26}{'seconds a step':>16}{'target tokens/s':>18}{'of matrix rate':>16}{'to best torch':>16}")
    results = {}
    for name, times in seconds.items():
        taken = statistics.median(times)
        utilisation, ratio = operations / taken / rates[name], measure.ratio(seconds, name, peers[variants[name].dtype])
        print(f"{name:<26}{taken:>16.4f}{tokens / taken:>18,.0f}{utilisation:>16.1%}{ratio:>16.3f}")
        results[f"{name} seconds_per_step"] = taken
        results[f"{name} tokens_per_second"] = tokens / taken
        results[f"{name} flops_utilisation"] = utilisation
    print("    best torch: " + ", ".join(f"{peer} for {dtype}" for dtype, peer in peers.items()), flush=True)
    return results | {
        "f32_step_time_vs_best_torch": measure.ratio(seconds, "ours float32", peers["float32"]),
        "bf16_step_time_vs_best_torch": measure.ratio(seconds, "ours bfloat16", peers["bfloat16"]),
    }


def lengths(setting: Setting, sources: Any, targets: Any) -> dict[str, float]:
    """The second table: real sentence lengths."""
    shapes, count, dtype = default("num_buckets"), SAMPLE[setting.device], setting.dtype
    packed = {"num_buckets": 1} | PACKED
    plans = {
        f"ours {shapes} shapes": {"num_buckets": shapes},
        "ours packed": packed,
        "ours packed 2 shapes": packed | {"packing_shapes": 2},
    }
    work = {name: training_batches.ours(sources, targets, setting.tokens, count, **of) for name, of in plans.items()}
    variants = dict.fromkeys(plans, JaxStep(dtype)) | torch_variants(dtype)
    if dtype != "bfloat16":
        variants |= {f"ours {shapes} shapes bfloat16": JaxStep("bfloat16")} | torch_variants("bfloat16")
        work[f"ours {shapes} shapes bfloat16"] = work[f"ours {shapes} shapes"]
    theirs = training_batches.theirs(sources, targets, setting.tokens, count)
    work |= {name: theirs for name, variant in variants.items() if isinstance(variant, TorchStep)}
    with measure.running(start(variants, setting, work)) as named:
        taken = train_in_turns(named, setting)
    tokens = {name: sum(int(np.count_nonzero(batch["targets"])) for batch in batches) for name, batches in work.items()}
    seconds = per(taken, tokens)
    peers = best_torch(seconds, variants)
    print(f"\n{'real lengths':<26}{'target tokens/s':>18}{'to best torch':>16}{'padding':>10}{'shapes':>10}")
    padding = {name: training_batches.padding(batches) for name, batches in work.items()}
    results = {}
    for name, times in seconds.items():
        speed, ratio = 1 / statistics.median(times), 1 / measure.ratio(seconds, name, peers[variants[name].dtype])
        num_shapes = len(set(map(training_batches.shape, work[name])))
        print(f"{name:<26}{speed:>18,.0f}{ratio:>16.3f}{padding[name]:>10.1%}{num_shapes:>10}")
        results[f"{name} real_tokens_per_second"] = speed
        results[f"{name} real_tokens_speed_vs_torch"] = ratio
        results[f"{name} padding"] = padding[name]
    best = measure.fastest(seconds, plans)
    print(f"    best torch: {peers}; ours in {dtype}: {best}", flush=True)
    return results | {"real_tokens_speed_vs_torch": results[f"{best} real_tokens_speed_vs_torch"]}


def ablations(setting: Setting) -> dict[str, float]:
    """The third table: one change at a time."""
    ours = JaxStep(setting.dtype)
    variants = {
        "as it is": ours,
        "all logits at once": dataclasses.replace(ours, all_logits=True),
        "dropout by threefry": dataclasses.replace(ours, random_bits="threefry2x32"),
        "dropout by rbg": dataclasses.replace(ours, random_bits="rbg"),
        "state not donated": dataclasses.replace(ours, donate=False),
        "fused attention": dataclasses.replace(ours, fused_attention=True),
        "small pages": dataclasses.replace(ours, huge_pages=False),
        "gradients by JAX": dataclasses.replace(ours, default_vjp=True),
    }
    steps = STEPS[setting.device]
    with measure.running(start(variants, setting, dict.fromkeys(variants, [setting.dense_batch()] * steps))) as named:
        check(named, variants)
        seconds = per(train_in_turns(named, setting), dict.fromkeys(variants, steps))
    print(f"\n{'ours ' + setting.dtype:<26}{'seconds a step':>16}{'to as it is':>16}")
    ratios = {name: measure.ratio(seconds, name, "as it is") for name in variants}
    for name, times in seconds.items():
        print(f"{name:<26}{statistics.median(times):>16.4f}{ratios[name]:>16.3f}", flush=True)
    return {f"step_time_{name}": ratio for name, ratio in ratios.items() if name != "as it is"}


def torch_variants(dtype: str, compiled: str = "whole") -> Variants:
    """PyTorch, tuned, without and with torch.compile: which one is faster depends on the machine."""
    variants = {f"torch {dtype}": TorchStep(dtype)}
    if shutil.which("g++"):
        return variants | {f"torch {dtype} compiled": TorchStep(dtype, compiled=compiled)}
    print(f"no g++: torch {dtype} compiled is left out")
    return variants


def check(named: dict[str, measure.System], variants: Variants) -> None:
    """Checks that all variants compute the same loss and gradient norm, without dropout, on a batch with padding."""
    found = {name: np.array(system.run(CHECK)[1]) for name, system in named.items()}
    first, expected = next(iter(found.items()))
    print("\nloss and norm of its gradient: " + ", ".join(f"{name} {a:.5f} {b:.5f}" for name, (a, b) in found.items()))
    for name, numbers in found.items():
        # The gradient norms differ a little: PyTorch smooths over all ids, we over all but the true one.
        allowed = TOLERANCE[variants[name].dtype] * np.array([1, 10])
        if (abs(numbers / expected - 1) > allowed).any():
            raise RuntimeError(f"{name} computes {numbers}, {first} {expected}")


def train_in_turns(named: dict[str, measure.System], setting: Setting) -> dict[str, list[float]]:
    """Seconds of each measurement; prints how much longer the first one took (compilation)."""
    first = {name: system.run(TRAIN)[0] for name, system in named.items()}
    # An uncounted step before each measurement, to get back memory that went to the system or to another process.
    seconds = measure.take_turns(named, TRAIN, setting.rounds, before=STEP)
    compiling = {name: taken - statistics.median(seconds[name]) for name, taken in first.items()}
    print("first turn, more: " + ", ".join(f"{name} {taken:.1f} s" for name, taken in compiling.items()), flush=True)
    return seconds


def matrix_rates(named: dict[str, measure.System], setting: Setting) -> dict[str, float]:
    """FLOP/s of large matrix products, in each system's library and dtype."""
    size, count = MATMULS[setting.device]
    seconds = measure.take_turns(named, MATMUL, setting.rounds)
    rates = {name: 2 * size**3 * count / statistics.median(times) for name, times in seconds.items()}
    print("matrix products, TFLOP/s: " + ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in rates.items()))
    return rates


def per(seconds: dict[str, list[float]], amounts: dict[str, int]) -> dict[str, list[float]]:
    """Seconds per unit of work, of each round."""
    return {name: [taken / amounts[name] for taken in times] for name, times in seconds.items()}


def best_torch(seconds: dict[str, list[float]], variants: Variants) -> dict[str, str]:
    """The fastest PyTorch variant to compare each dtype with; for bfloat16 of both dtypes, as float32 may be faster."""
    dtypes = {name: variant.dtype for name, variant in variants.items() if isinstance(variant, TorchStep)}
    full_precision = [name for name, dtype in dtypes.items() if dtype == "float32"]
    return ({"float32": measure.fastest(seconds, full_precision)} if full_precision else {}) | {
        "bfloat16": measure.fastest(seconds, list(dtypes))
    }


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
