"""How fast it trains, against PyTorch with the same weights, and against itself with each optimisation off.

    python -m benchmarks.training [--output FILE.json] [--rounds 5] [--model base] [--tokens 1024]
                                  [--corpus PREFIX] [--only dense lengths ablations]

First table: steps of dense batches, `--tokens` positions a side, sentences of 32 subwords, vocabulary 32,000. Second:
sentences of WMT14's lengths, or of those of PREFIX.en and PREFIX.de, at most `--tokens` positions a side in a batch;
PyTorch's batches are sorted by length and cut at that number, as fairseq's are. Third: the dense step again, with one
thing changed at a time. Sentences are random ids; all batches lie on the device before the clock starts. On a GPU the
second and third table are bfloat16. Needs `pip install -e '.[interop]'`, all cores, and nothing else running.
"""

import argparse
import dataclasses
import functools
import os
import re
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure, training_batches
from benchmarks.data import default
from benchmarks.measure import System
from benchmarks.training_batches import Batch
from t2t_jax import huge_pages

VOCAB, LABEL_SMOOTHING = 32_000, 0.1
STEPS = {"cpu": 3, "gpu": 50}  # of a turn, in the first and third table
SAMPLE = {"cpu": 12, "gpu": 96}  # batches of a turn, in the second table
PRODUCTS = {"cpu": (2048, 8), "gpu": (8192, 20)}  # width and number of the matrix products that give the rate
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # relative, of the loss; ten times that of its gradient's norm
CHECK, STEP, TRAIN, MATMUL = "check", "step", "train", "matmul"


@dataclasses.dataclass(frozen=True)
class Ours:
    """A way to take our step; the defaults are those of training."""

    dtype: str
    all_logits: bool = False
    random_bits: str | None = None
    donate: bool = True
    fused_attention: bool = False
    huge_pages: bool = True
    plain_gradients: bool = False


@dataclasses.dataclass(frozen=True)
class Theirs:
    """A way to take PyTorch's: see `torch_transformer.Trainer`."""

    dtype: str
    tuned: bool = True
    compiled: bool = False


Ways = dict[str, Ours | Theirs]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all systems have in common: `shape` is `config.model`, `initial` the file of the initial weights."""

    shape: dict[str, Any]
    vocab_size: int
    tokens: int
    rounds: int
    device: str
    initial: str

    @property
    def dtype(self) -> str:
        """What one trains in on this device."""
        return "float32" if self.device == "cpu" else "bfloat16"

    def dense_batch(self) -> Batch:
        return training_batches.dense(self.tokens, self.vocab_size)

    def padded_batch(self) -> Batch:
        return training_batches.padded(self.tokens, self.vocab_size)

    def named(self, name: str) -> str:
        """The name of a result."""
        words = name if self.device == "cpu" else f"{self.device} {name}"
        return re.sub(r"\W+", "_", words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="where to write the numbers as JSON")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each system, taken in turns")
    parser.add_argument("--model", choices=["base", "big"], default="base", help="the paper's Table 2")
    parser.add_argument("--tokens", type=int, default=1024, help="positions of a batch on each side")
    parser.add_argument("--corpus", help="PREFIX of the text whose lengths the second table takes")
    parser.add_argument("--only", nargs="+", choices=["dense", "lengths", "ablations"], help="these tables")
    arguments = parser.parse_args()

    (device, kind), _, _ = measure.alone(accelerator)
    chosen = {name: getattr(arguments, name) for name in ("rounds", "model", "tokens", "corpus")}
    found_under = measure.conditions(["jax", "flax", "torch"]) | {"device": kind} | chosen
    print(found_under, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        initial = f"{directory}/initial.npz"
        setting = Setting(shape_of(arguments.model), VOCAB, arguments.tokens, arguments.rounds, device, initial)
        measure.alone(write_initial, setting)
        tables = {
            "dense": dense,
            "lengths": lambda setting: lengths(setting, *training_batches.sentences(arguments.corpus, VOCAB)),
            "ablations": ablations,
        }
        results = {}
        for name in arguments.only or tables:
            results |= tables[name](setting)
    measure.write(arguments.output, found_under, results)


def shape_of(model: str) -> dict[str, Any]:
    """`config.model` of the base or big model."""
    from configs import base_ende, big_ende

    return {"base": base_ende, "big": big_ende}[model].get_config().model.to_dict()


# --- The tables --------------------------------------------------------------------------------------------


def dense(setting: Setting) -> dict[str, float]:
    """The first table."""
    ways = {"ours float32": Ours("float32"), "ours bfloat16": Ours("bfloat16")}
    ways |= {"torch float32 plain": Theirs("float32", tuned=False)} | torch_ways("float32") | torch_ways("bfloat16")
    batch, steps = setting.dense_batch(), STEPS[setting.device]
    with measure.running(start(ways, setting, dict.fromkeys(ways, [batch] * steps))) as named:
        check(named, ways)
        seconds = per(train_in_turns(named, setting), dict.fromkeys(ways, steps))
        rates = matrix_rates(named, setting)
    operations, tokens = step_operations(setting, batch), int(np.count_nonzero(batch["targets"]))
    peers = best_torch(seconds, ways)
    print(f"\n{'':<26}{'seconds a step':>16}{'target tokens/s':>18}{'of matrix rate':>16}{'to best torch':>16}")
    results = {}
    for name, times in seconds.items():
        taken = statistics.median(times)
        used, ratio = operations / taken / rates[name], measure.ratio(seconds, name, peers[ways[name].dtype])
        print(f"{name:<26}{taken:>16.4f}{tokens / taken:>18,.0f}{used:>16.1%}{ratio:>16.3f}")
        results[setting.named(f"{name} seconds_per_step")] = taken
        results[setting.named(f"{name} tokens_per_second")] = tokens / taken
        results[setting.named(f"{name} flops_utilisation")] = used
    print("    best torch: " + ", ".join(f"{peer} for {dtype}" for dtype, peer in peers.items()), flush=True)
    return results | {
        setting.named("f32_step_time_vs_best_torch"): measure.ratio(seconds, "ours float32", peers["float32"]),
        setting.named("bf16_step_time_vs_best_torch"): measure.ratio(seconds, "ours bfloat16", peers["bfloat16"]),
    }


def lengths(setting: Setting, sources: Any, targets: Any) -> dict[str, float]:
    """The second table."""
    shapes, count, dtype = default("num_buckets"), SAMPLE[setting.device], setting.dtype
    plans = {f"ours {shapes} shapes": (shapes, False), "ours one shape": (1, False), "ours packed": (1, True)}
    work = {name: training_batches.ours(sources, targets, setting.tokens, *plan, count) for name, plan in plans.items()}
    ways = dict.fromkeys(plans, Ours(dtype)) | torch_ways(dtype)
    if dtype != "bfloat16":
        ways |= {f"ours {shapes} shapes bfloat16": Ours("bfloat16"), "torch bfloat16": Theirs("bfloat16")}
        work[f"ours {shapes} shapes bfloat16"] = work[f"ours {shapes} shapes"]
    theirs = training_batches.theirs(sources, targets, setting.tokens, count)
    work |= {name: theirs for name, way in ways.items() if isinstance(way, Theirs)}
    with measure.running(start(ways, setting, work)) as named:
        taken = train_in_turns(named, setting)
    tokens = {name: sum(int(np.count_nonzero(batch["targets"])) for batch in batches) for name, batches in work.items()}
    seconds = per(taken, tokens)
    peers = best_torch(seconds, ways)
    print(f"\n{'real lengths':<26}{'target tokens/s':>18}{'to best torch':>16}{'padding':>10}{'shapes':>10}")
    padding = {name: training_batches.padding(batches) for name, batches in work.items()}
    results = {}
    for name, times in seconds.items():
        speed, ratio = 1 / statistics.median(times), 1 / measure.ratio(seconds, name, peers[ways[name].dtype])
        met = len({(batch["inputs"].shape, batch["targets"].shape) for batch in work[name]})
        print(f"{name:<26}{speed:>18,.0f}{ratio:>16.3f}{padding[name]:>10.1%}{met:>10}")
        results[setting.named(f"{name} real_tokens_per_second")] = speed
        results[setting.named(f"{name} real_tokens_speed_vs_torch")] = ratio
        results[setting.named(f"{name} padding")] = padding[name]
    best = fastest(seconds, plans)
    print(f"    best torch: {peers}; ours in {dtype}: {best}", flush=True)
    return results | {
        setting.named("real_tokens_speed_vs_torch"): results[setting.named(f"{best} real_tokens_speed_vs_torch")]
    }


def ablations(setting: Setting) -> dict[str, float]:
    """The third table."""
    ours = Ours(setting.dtype)
    ways = {
        "as it is": ours,
        "all logits at once": dataclasses.replace(ours, all_logits=True),
        "dropout by threefry": dataclasses.replace(ours, random_bits="threefry2x32"),
        "dropout by rbg": dataclasses.replace(ours, random_bits="rbg"),
        "state not donated": dataclasses.replace(ours, donate=False),
        "fused attention": dataclasses.replace(ours, fused_attention=True),
        "small pages": dataclasses.replace(ours, huge_pages=False),
        "gradients by JAX": dataclasses.replace(ours, plain_gradients=True),
    }
    steps = STEPS[setting.device]
    with measure.running(start(ways, setting, dict.fromkeys(ways, [setting.dense_batch()] * steps))) as named:
        check(named, ways)
        seconds = per(train_in_turns(named, setting), dict.fromkeys(ways, steps))
    print(f"\n{'ours ' + setting.dtype:<26}{'seconds a step':>16}{'to as it is':>16}")
    ratios = {name: measure.ratio(seconds, name, "as it is") for name in ways}
    for name, times in seconds.items():
        print(f"{name:<26}{statistics.median(times):>16.4f}{ratios[name]:>16.3f}", flush=True)
    return {setting.named(f"step_time_{name}"): ratio for name, ratio in ratios.items() if name != "as it is"}


def torch_ways(dtype: str) -> Ways:
    """PyTorch at its best, which of the two is not known beforehand."""
    ways = {f"torch {dtype}": Theirs(dtype)}
    if shutil.which("g++"):
        return ways | {f"torch {dtype} compiled": Theirs(dtype, compiled=True)}
    print(f"no g++: torch {dtype} compiled is left out")
    return ways


def check(named: dict[str, System], ways: Ways) -> None:
    """That all compute the same: loss and gradients at the initial weights, dropout off, some positions padding."""
    found = {name: np.array(system.run(CHECK)[1]) for name, system in named.items()}
    first, expected = next(iter(found.items()))
    print("\nloss and norm of its gradient: " + ", ".join(f"{name} {a:.5f} {b:.5f}" for name, (a, b) in found.items()))
    for name, numbers in found.items():
        # The norms differ a little: PyTorch smooths over all ids, we over all but the true one.
        allowed = TOLERANCE[ways[name].dtype] * np.array([1, 10])
        if (abs(numbers / expected - 1) > allowed).any():
            raise RuntimeError(f"{name} computes {numbers}, {first} {expected}")


def train_in_turns(named: dict[str, System], setting: Setting) -> dict[str, list[float]]:
    """Seconds of each turn; says how long compiling took before."""
    first = {name: system.run(TRAIN)[0] for name, system in named.items()}
    # A step before each turn: the memory it frees may have gone back to the machine meanwhile, or to another system.
    seconds = measure.take_turns(named, TRAIN, setting.rounds, before=STEP)
    compiling = {name: taken - statistics.median(seconds[name]) for name, taken in first.items()}
    print("first turn, more: " + ", ".join(f"{name} {taken:.1f} s" for name, taken in compiling.items()), flush=True)
    return seconds


def matrix_rates(named: dict[str, System], setting: Setting) -> dict[str, float]:
    """Operations a second of large matrix products, by each system's library in its dtype."""
    width, count = PRODUCTS[setting.device]
    seconds = measure.take_turns(named, MATMUL, setting.rounds)
    rates = {name: 2 * width**3 * count / statistics.median(times) for name, times in seconds.items()}
    print("matrix products, TFLOP/s: " + ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in rates.items()))
    return rates


def per(seconds: dict[str, list[float]], amounts: dict[str, int]) -> dict[str, list[float]]:
    """Seconds of each round by the amount of work in it."""
    return {name: [taken / amounts[name] for taken in times] for name, times in seconds.items()}


def best_torch(seconds: dict[str, list[float]], ways: Ways) -> dict[str, str]:
    """What ours of each dtype is compared to; for bfloat16 the best of all, as float32 may be the faster one."""
    dtypes = {name: way.dtype for name, way in ways.items() if isinstance(way, Theirs)}
    in_full = [name for name, dtype in dtypes.items() if dtype == "float32"]
    return ({"float32": fastest(seconds, in_full)} if in_full else {}) | {"bfloat16": fastest(seconds, list(dtypes))}


def fastest(seconds: dict[str, list[float]], names: Sequence[str]) -> str:
    return min(names, key=lambda name: statistics.median(seconds[name]))


# --- What runs in processes of their own -------------------------------------------------------------------


def start(ways: Ways, setting: Setting, work: dict[str, list[Batch]]) -> list[System]:
    """The systems; ours with memory in pages of the size that `main.py` asks for."""

    def environment(way):
        return huge_pages.environment() if isinstance(way, Ours) and way.huge_pages else {}

    return [System(name, cases, way, setting, work[name], environment=environment(way)) for name, way in ways.items()]


def cases(way: Ours | Theirs, setting: Setting, batches: list[Batch]) -> dict[str, Callable[[], Any]]:
    """`CHECK` gives the loss and the norm of its gradient, `TRAIN` takes a step for each batch, `STEP` one."""
    return (our_cases if isinstance(way, Ours) else their_cases)(way, setting, batches)


def accelerator() -> tuple[str, str]:
    """What JAX calls its platform and its kind; on a CPU the latter says nothing."""
    import jax

    return jax.default_backend(), jax.devices()[0].device_kind


def config_of(setting: Setting, **changes: Any) -> Any:
    from t2t_jax.model.transformer import TransformerConfig

    return TransformerConfig(vocab_size=setting.vocab_size, **setting.shape | changes)


def step_operations(setting: Setting, batch: Batch) -> int:
    """Floating-point operations of the matrix products of a step."""
    from t2t_jax.model.flops import training_flops

    return training_flops(config_of(setting), *(np.count_nonzero(batch[name], 1) for name in ("inputs", "targets")))


def our_state(setting: Setting, optimizer: Any) -> Any:
    """The initial state, the same for every way."""
    import jax

    from t2t_jax.model.transformer import Transformer
    from t2t_jax.training.train_step import init_state

    return jax.jit(functools.partial(init_state, Transformer(config_of(setting)), optimizer))(jax.random.key(0))


def write_initial(setting: Setting) -> None:
    """The initial weights under the names that PyTorch's side reads."""
    import optax

    from t2t_jax.interop.torch_names import to_torch

    params = our_state(setting, optax.sgd(0.0)).params
    table = np.asarray(params["embedding"]["table"])
    np.savez(setting.initial, **to_torch(params, config_of(setting)), **{"embed_tokens.weight": table})


def our_cases(way: Ours, setting: Setting, batches: list[Batch]) -> dict[str, Callable[[], Any]]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the systems share the accelerator's memory
    import jax
    import jax.numpy as jnp

    from t2t_jax.model.einsum import matmul_output_dtype
    from t2t_jax.training.optimizer import adam, learning_rate_schedule

    change_library(way)
    optimizer = adam(learning_rate_schedule(setting.shape["d_model"], 4000), 0.9, 0.98, 1e-9)
    state, on_device = our_state(setting, optimizer), jax.device_put(batches)
    step = our_step(way, optimizer, config_of(setting))

    def train(batches):
        nonlocal state
        for batch in batches:
            state, metrics = step(state, batch)
        return float(jax.block_until_ready((state, metrics))[1]["loss"])

    def check():
        without_dropout = our_step(dataclasses.replace(way, donate=False), optimizer, config_of(setting, dropout=0.0))
        with jax.default_matmul_precision("highest" if way.dtype == "float32" else None):
            _, metrics = without_dropout(state, jax.device_put(setting.padded_batch()))
        return float(metrics["loss"]), float(metrics["gradient_norm"])

    width, count = PRODUCTS[setting.device]
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=matmul_output_dtype(x.dtype)))
    square = jax.random.normal(jax.random.key(0), (width, width)).astype(way.dtype)
    multiply = lambda: jax.block_until_ready([product(square) for _ in range(count)])[:0]
    return {
        TRAIN: lambda: train(on_device),
        STEP: lambda: train(on_device[:1]),
        CHECK: check,
        MATMUL: multiply,
    }


def our_step(way: Ours, optimizer: Any, config: Any) -> Callable[..., Any]:
    """`train_step` for one device."""
    import jax
    import jax.numpy as jnp

    from t2t_jax.model.transformer import Transformer
    from t2t_jax.training.train_step import train_step

    model = Transformer(config, jnp.dtype(way.dtype), fused_attention=way.fused_attention)
    key = jax.random.key(1, impl=way.random_bits)
    pure = functools.partial(train_step, model, optimizer, LABEL_SMOOTHING, 1, key)
    return jax.jit(pure, donate_argnums=0 if way.donate else ())


def change_library(way: Ours) -> None:
    """Puts in place what an ablation has instead of ours, for this process."""
    import jax

    from t2t_jax.model import attention, einsum, layers
    from t2t_jax.training import train_step

    if way.plain_gradients:
        attention.einsum = einsum.einsum = einsum.einsum.__wrapped__
    if way.all_logits:
        train_step.cross_entropy = cross_entropy_of_all_logits
    if way.random_bits:
        layers.keep_mask = lambda key, probability, shape, rows: jax.random.bernoulli(key, probability, shape)


def cross_entropy_of_all_logits(y: Any, table: Any, targets: Any, label_smoothing: float) -> tuple[Any, Any, Any]:
    """`t2t_jax.training.loss.cross_entropy` as one would write it first."""
    import jax
    import jax.numpy as jnp

    logits = jnp.einsum("btd,vd->btv", y, table.astype(y.dtype), preferred_element_type=jnp.float32)
    log_probs = jax.nn.log_softmax(logits)
    true = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    others = label_smoothing / (logits.shape[-1] - 1)
    smoothed = -(1 - label_smoothing) * true - others * (log_probs.sum(axis=-1) - true)
    weights = (targets != 0).astype(jnp.float32)
    return jnp.sum(weights * smoothed), -jnp.sum(weights * true), jnp.sum(weights)


def their_cases(way: Theirs, setting: Setting, batches: list[Batch]) -> dict[str, Callable[[], Any]]:
    from benchmarks.torch_transformer import Trainer, Transformer

    longest = max(batch[name].shape[1] for batch in batches for name in ("inputs", "targets"))
    model = Transformer(setting.shape, setting.vocab_size, max(longest, training_batches.LENGTH))
    with np.load(Path(setting.initial)) as state:
        model.read(state)
    trainer = Trainer(model, label_smoothing=LABEL_SMOOTHING, **dataclasses.asdict(way))
    on_device = [trainer.put(batch) for batch in batches]
    return {
        TRAIN: lambda: trainer.train(on_device),
        STEP: lambda: trainer.train(on_device[:1]),
        CHECK: lambda: trainer.check(trainer.put(setting.padded_batch())),
        MATMUL: lambda: trainer.products(*PRODUCTS[setting.device]),
    }


if __name__ == "__main__":
    main()
