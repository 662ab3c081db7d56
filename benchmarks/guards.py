"""Cost of the integrity checks: those of every training step and those of every checkpoint save.

    python -m benchmarks.guards [--output FILE.json] [--rounds 7] [--model base|big]

Steps of 1,024 + 1,024 tokens with and without the checks (finite parameters, checksum of the batch) are interleaved in
one process. The checks of a save are the comparison of the replicas (`check_state`) and the SHA-256 of each file; they
are given as a fraction of the paper's ten minutes between saves.
"""

import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import measure
from benchmarks.measure import at_least
from t2t_jax import sharding
from t2t_jax.checkpoints import CheckpointWriter
from t2t_jax.data.batching import checksum
from t2t_jax.errors import exit_code_of
from t2t_jax.files import sha256
from t2t_jax.model.transformer import Transformer, TransformerConfig
from t2t_jax.training import train_step
from t2t_jax.training.agreement import check_state
from t2t_jax.training.loss import label_smoothed_loss
from t2t_jax.training.setup import make_optimizer, make_schedule

VOCAB, ROWS, LENGTH = 37_000, 32, 32
SECONDS_BETWEEN_SAVES = 600.0  # §6.1


def main() -> None:
    parser = measure.argument_parser("benchmarks.guards", __doc__)
    parser.add_argument("--rounds", type=at_least(1), default=7, help="steps of each kind, interleaved")
    parser.add_argument("--model", choices=["base", "big"], default="base")
    arguments = parser.parse_args()

    conditions = measure.conditions(["jax", "orbax-checkpoint"]) | {"model": arguments.model}
    state, steps, batch = _training(measure.paper_config(arguments.model))
    results = _of_a_save(state) | _of_a_step(state, steps, batch, arguments.rounds)
    for name, value in results.items():
        print(f"{name:<32}{value:12.4f}")
    measure.write(arguments.output, conditions, results)


def _training(config: Any) -> tuple[train_step.TrainState, dict[str, Callable], dict[str, np.ndarray]]:
    """A new state, the compiled step with and without checks, and a batch without padding."""
    model = Transformer(TransformerConfig(vocab_size=VOCAB, **config.model))
    optimizer, key = make_optimizer(config, make_schedule(config)), jax.random.key(0)
    mesh = sharding.make_mesh(jax.devices()[:1])
    init = functools.partial(train_step.init_state, model, optimizer)
    layout = sharding.of_state(jax.eval_shape(init, key), mesh, False)
    state = jax.jit(init, out_shardings=layout)(key)
    batch = {
        name: np.random.default_rng(0).integers(3, VOCAB, (ROWS, LENGTH), np.int32) for name in ("inputs", "targets")
    }
    loss_fn = label_smoothed_loss(model, config.train.label_smoothing, config.train.r_drop)

    def compiled():
        # A new function each time: for one that it knows, JAX would take the program that it has traced.
        take = functools.partial(train_step.train_step, loss_fn, optimizer, 1, key)
        return jax.jit(take).lower(state, batch).compile()

    steps = {"checked": compiled()}
    with mock.patch.object(train_step, "_all_finite", lambda tree: jnp.ones((), bool)):
        steps["unchecked"] = compiled()
    return state, steps, batch


def _of_a_save(state: train_step.TrainState) -> dict[str, float]:
    """Seconds of the checks and of the whole save, and the fraction that the checks take of the time between saves."""
    mesh = state.step.sharding.mesh
    seconds = [_seconds(lambda: check_state(state, mesh, {"step": 0})) for _ in range(4)][1:]  # the first compiles
    with tempfile.TemporaryDirectory() as folder:
        writer = CheckpointWriter(Path(folder))
        saving = _seconds(lambda: writer.save(0, state.params, state.optimizer, {}))
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        hashing = _seconds(lambda: [sha256(path) for path in files])
    checks = statistics.median(seconds)
    return {
        "check_state_seconds": checks,
        "sha256_seconds": hashing,
        "save_seconds": saving,
        "gib": sum(x.nbytes for x in jax.tree.leaves(state)) / 2**30,
        "share_of_ten_minutes": (checks + hashing) / SECONDS_BETWEEN_SAVES,
    }


def _of_a_step(
    state: train_step.TrainState, steps: dict[str, Callable], batch: dict[str, np.ndarray], rounds: int
) -> dict[str, float]:
    """Seconds of a step, and the fraction that its checks add."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds + 1):
        for name, step in list(steps.items())[:: 1 if round_ % 2 else -1]:
            taken = _seconds(lambda step=step: jax.block_until_ready(step(state, batch)))
            if round_:
                seconds[name].append(taken)
    summing = statistics.median(_seconds(lambda: checksum(0, batch)) for _ in range(100))
    step = statistics.median(seconds["unchecked"])
    return {
        "step_seconds": step,
        "checksum_share_of_step": summing / step,
        "finite_share_of_step": measure.ratio(seconds, "checked", "unchecked") - 1,
    }


def _seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
