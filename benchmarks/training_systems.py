"""The training steps that `benchmarks.training` compares, ours and PyTorch's, each built in a process of its own."""

import concurrent.futures
import dataclasses
import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import training_batches
from benchmarks.measure import System
from benchmarks.training_batches import Batch
from t2t_jax import huge_pages

LABEL_SMOOTHING = 0.1
MATMULS = {"cpu": (2048, 8), "gpu": (8192, 20)}  # size and number of the matrix products that measure peak FLOP/s
CHECK, STEP, TRAIN, MATMUL = "check", "step", "train", "matmul"  # cases of a system


@dataclasses.dataclass(frozen=True)
class JaxStep:
    """Options of our training step; the defaults are those of training."""

    dtype: str
    all_logits: bool = False  # without the chunked cross-entropy
    random_bits: str | None = None  # PRNG implementation for dropout
    donate: bool = True
    fused_attention: bool = False
    huge_pages: bool = True
    default_vjp: bool = False  # without our custom VJP of einsum
    compiler_options: bool = True  # those that training compiles with on this platform


@dataclasses.dataclass(frozen=True)
class TorchStep:
    """Options of PyTorch's training step: see `torch_transformer.Trainer`."""

    dtype: str
    tuned: bool = True
    compiled: str = ""


Variants = dict[str, JaxStep | TorchStep]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all systems share: `shape` is `config.model`, `initial` the file of the initial parameters."""

    shape: dict[str, Any]
    vocab_size: int
    tokens: int
    rounds: int
    device: str
    initial: str

    @property
    def dtype(self) -> str:
        """The usual dtype for training on this device."""
        return "float32" if self.device == "cpu" else "bfloat16"

    def dense_batch(self) -> Batch:
        return training_batches.dense(self.tokens, self.vocab_size)

    def padded_batch(self) -> Batch:
        return training_batches.padded(self.tokens, self.vocab_size)


def result_name(device: str, name: str) -> str:
    """The key of a result on a device in the JSON output."""
    return re.sub(r"\W+", "_", name if device == "cpu" else f"{device} {name}")


def start(variants: Variants, setting: Setting, work: dict[str, list[Batch]]) -> list[System]:
    """Starts a system for each variant."""
    return [system(name, variant, setting, work[name]) for name, variant in variants.items()]


def system(name: str, variant: JaxStep | TorchStep, setting: Setting, batches: list[Batch]) -> System:
    """Starts the system of a variant."""
    return System(name, cases, variant, setting, batches, environment=environment(variant))


def environment(variant: JaxStep | TorchStep) -> dict[str, str]:
    """Huge pages, as `main.py` has them, for PyTorch too: its allocations go through the same malloc."""
    return huge_pages.environment() if getattr(variant, "huge_pages", True) else {}


def cases(variant: JaxStep | TorchStep, setting: Setting, batches: list[Batch]) -> dict[str, Callable[[], Any]]:
    """The cases of a system.

    `CHECK` returns the loss and the gradient norm, `TRAIN` takes a step for each batch, `STEP` takes one step, `MATMUL`
    multiplies large matrices.
    """
    return (jax_cases if isinstance(variant, JaxStep) else torch_cases)(variant, setting, batches)


def accelerator() -> tuple[str, str, float]:
    """JAX's names of the platform and of the device kind, and the GiB of memory that it may use, 0 if unknown."""
    import jax

    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    return jax.default_backend(), device.device_kind, limit / 2**30


def config_of(setting: Setting, **changes: Any) -> Any:
    from t2t_jax.model.transformer import TransformerConfig

    return TransformerConfig(vocab_size=setting.vocab_size, **setting.shape | changes)


def step_operations(setting: Setting, batch: Batch) -> int:
    """Floating-point operations in the matrix products of a step."""
    from t2t_jax.model.flops import training_flops

    return training_flops(config_of(setting), *training_batches.lengths(batch))


def our_state(setting: Setting, optimizer: Any) -> Any:
    """The initial state, the same for all variants."""
    import jax

    from t2t_jax.model.transformer import Transformer
    from t2t_jax.training.train_step import init_state

    return jax.jit(functools.partial(init_state, Transformer(config_of(setting)), optimizer))(jax.random.key(0))


def write_initial(setting: Setting) -> None:
    """Writes the initial parameters, under the names that `torch_transformer` reads."""
    import optax

    from t2t_jax.interop.torch_names import to_torch

    params = our_state(setting, optax.sgd(0.0)).params
    table = np.asarray(params["embedding"]["table"])
    np.savez(setting.initial, **to_torch(params, config_of(setting)), **{"embed_tokens.weight": table})


def jax_cases(variant: JaxStep, setting: Setting, batches: list[Batch]) -> dict[str, Callable[[], Any]]:
    import jax
    import jax.numpy as jnp

    from t2t_jax.model.einsum import matmul_output_dtype
    from t2t_jax.training.optimizer import adam, learning_rate_schedule

    patch_library(variant)
    optimizer = adam(learning_rate_schedule(setting.shape["d_model"], 4000), 0.9, 0.98, 1e-9)
    state, on_device = our_state(setting, optimizer), jax.device_put(batches)
    step = our_step(variant, optimizer, config_of(setting))

    @functools.cache
    def programs():
        """The step of each batch shape, compiled at the same time."""
        by_shape = {training_batches.shape(batch): batch for batch in on_device}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            compiled = pool.map(lambda batch: step.lower(state, batch).compile(), by_shape.values())
            return dict(zip(by_shape, compiled, strict=True))

    def train(batches):
        nonlocal state
        for batch in batches:
            state, metrics = programs()[training_batches.shape(batch)](state, batch)
        return float(jax.block_until_ready((state, metrics))[1]["loss"])

    def check():
        without_dropout = our_step(
            dataclasses.replace(variant, donate=False), optimizer, config_of(setting, dropout=0.0)
        )
        with jax.default_matmul_precision("highest" if variant.dtype == "float32" else None):
            _, metrics = without_dropout(state, jax.device_put(setting.padded_batch()))
        return float(metrics["loss"]), float(metrics["gradient_norm"])

    size, count = MATMULS[setting.device]
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=matmul_output_dtype(x.dtype)))
    square = jax.random.normal(jax.random.key(0), (size, size)).astype(variant.dtype)
    multiply = lambda: jax.block_until_ready([product(square) for _ in range(count)])[:0]
    return {TRAIN: lambda: train(on_device), STEP: lambda: train(on_device[:1]), CHECK: check, MATMUL: multiply}


def our_step(variant: JaxStep, optimizer: Any, config: Any) -> Callable[..., Any]:
    """`train_step` for one device."""
    import jax
    import jax.numpy as jnp

    from t2t_jax import sharding
    from t2t_jax.model.transformer import Transformer
    from t2t_jax.training.engine import compiler_options
    from t2t_jax.training.loss import label_smoothed_loss
    from t2t_jax.training.train_step import train_step

    model = Transformer(config, jnp.dtype(variant.dtype), fused_attention=variant.fused_attention)
    key = jax.random.key(1, impl=variant.random_bits)
    pure = functools.partial(train_step, label_smoothed_loss(model, LABEL_SMOOTHING), optimizer, 1, key)
    options = compiler_options(sharding.make_mesh(jax.devices()[:1])) if variant.compiler_options else None
    return jax.jit(pure, donate_argnums=0 if variant.donate else (), compiler_options=options)


def patch_library(variant: JaxStep) -> None:
    """Replaces parts of the library in this process, as the ablation asks."""
    import jax

    from t2t_jax.model import attention, einsum, layers
    from t2t_jax.training import loss

    if variant.default_vjp:
        attention.einsum = einsum.einsum = einsum._einsum.__wrapped__
    if variant.all_logits:
        loss.tokens_per_chunk = lambda: math.inf
    if variant.random_bits:
        layers.keep_mask = lambda key, probability, shape, rows: jax.random.bernoulli(key, probability, shape)


def torch_cases(variant: TorchStep, setting: Setting, batches: list[Batch]) -> dict[str, Callable[[], Any]]:
    from benchmarks.torch_transformer import Trainer, Transformer

    longest = max(batch[name].shape[1] for batch in batches for name in ("inputs", "targets"))
    model = Transformer(setting.shape, setting.vocab_size, max(longest, training_batches.LENGTH))
    with np.load(Path(setting.initial)) as state:
        model.read(state)
    several = len(set(map(training_batches.shape, batches))) > 1
    trainer = Trainer(model, label_smoothing=LABEL_SMOOTHING, several_shapes=several, **dataclasses.asdict(variant))
    on_device = [trainer.put(batch) for batch in batches]
    return {
        TRAIN: lambda: trainer.train(on_device),
        STEP: lambda: trainer.train(on_device[:1]),
        CHECK: lambda: trainer.check(trainer.put(setting.padded_batch())),
        MATMUL: lambda: trainer.multiply_matrices(*MATMULS[setting.device]),
    }
