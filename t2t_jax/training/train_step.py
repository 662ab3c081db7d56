"""§5: one training step, a pure function of (state, batch)."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from t2t_jax import sharding
from t2t_jax.errors import InputError
from t2t_jax.model.transformer import Transformer, init_params

Batch = dict[str, Int[Array, "B ..."]]
Metrics = dict[str, Float[Array, ""]]
# (params, batch, key) → (the loss, sums): sums over the target tokens of a part of a global batch, with at least "loss"
# and "target_tokens"; all are logged, per target token, under names that are not in `LOGGED`. The batch has `inputs`,
# `targets` and the `rows` that they are in the global batch.
LossFn = Callable[[Any, Batch, Array], tuple[Float[Array, ""], Metrics]]

# What is logged of an interval of steps besides the sums of the loss, and what is counted for it (progress.py).
LOGGED = frozenset(["step", "steps", "tokens", "source_tokens", "positions", "padding", "flops", "flops_utilisation",
                    "gradient_norm", "learning_rate", "finite", "skipped_steps", "target_tokens_per_second",
                    "batches_checksum", "input_seconds", "step_seconds", "evaluation_seconds", "save_seconds",
                    "crc32"])  # fmt: skip
_INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)  # schedules of any hyperparameter


class TrainState(NamedTuple):
    """Everything that changes from step to step; `step` counts the updates made."""

    step: Int[Array, ""]
    params: Any
    optimizer: optax.OptState


def init_state(model: Transformer, optimizer: optax.GradientTransformation, key: Array) -> TrainState:
    """The state before the first step, with random parameters."""
    return state_of(optimizer, init_params(model, key))


def state_of(optimizer: optax.GradientTransformation, params: Any) -> TrainState:
    """The state before the first step with these parameters, which the state of some optimisers holds too."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    microbatches: int,
    key: Array,
    state: TrainState,
    batch: Batch,
    *,
    mesh: Mesh | None = None,
    axis: str | None = None,
    skip_nonfinite: bool = False,
) -> tuple[TrainState, Metrics]:
    """One update from one global batch, by gradient accumulation over `microbatches` of equally many rows.

    The loss is the sum over all target tokens divided by their number, over the whole batch: never a mean of means over
    devices or microbatches. Dropout is a function of the key, the step and an element's index in the global batch, so
    that devices and microbatches do not change it.

    Data parallelism: the rows are divided, in order, over the data axis of `mesh`. Each device computes the gradients
    of its rows; their sum is all-reduced once, after the last microbatch, in the parameters' dtype. `axis` is for a
    caller that has mapped this function over the devices itself (`jax.pmap`): the name of that axis.

    The metrics are the sums of `loss_fn` per target token, and `target_tokens`; `gradient_norm`; and `finite`: whether
    the loss, the gradients and the new parameters are finite. If they are not, `skip_nonfinite` keeps the old
    parameters and optimiser state, but the step still counts, for the learning rate too.

    An optimiser that depends on the loss gets it per target token, as `value`.
    """
    key = jax.random.fold_in(key, state.step)
    total = functools.partial(_gradients_and_sums, loss_fn, microbatches)
    if mesh is None or mesh.shape[sharding.DATA] == 1:
        gradients, sums = total(axis, key, state.params, batch)
    else:
        whole, by_rows = PartitionSpec(), PartitionSpec(sharding.DATA)
        # With tensor parallelism, the compiler divides what is mapped over the data axis once more, by heads and so on.
        axes = {sharding.DATA} if mesh.shape[sharding.MODEL] > 1 else set(mesh.axis_names)
        mapped = jax.shard_map(
            functools.partial(total, sharding.DATA, key),
            mesh=mesh, in_specs=(whole, by_rows), out_specs=whole, axis_names=axes, check_vma=False,
        )  # fmt: skip
        gradients, sums = mapped(state.params, batch)
    if taken := sorted(LOGGED & sums.keys()):
        raise InputError(f"train.loss: it returns a sum named {taken[0]}, which the log has already; name it otherwise")
    tokens = sums["target_tokens"]
    divisor = jnp.maximum(tokens, 1)  # a batch may hold nothing but padding
    gradients = jax.tree.map(lambda g: g / divisor, gradients)
    metrics = {name: total / divisor for name, total in sums.items()} | {"target_tokens": tokens}
    update = optax.with_extra_args_support(optimizer).update  # `value` is for optax.contrib.reduce_on_plateau and such
    updates, optimizer_state = update(gradients, state.optimizer, state.params, value=metrics["loss"])
    params = optax.apply_updates(state.params, updates)
    gradient_norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(sums["loss"]) & jnp.isfinite(gradient_norm) & _all_finite(params)
    new_state = TrainState(state.step + 1, params, optimizer_state)
    if skip_nonfinite:
        kept = _where_unless_schedule(finite, new_state, state)
        new_state = kept._replace(step=new_state.step)
    return new_state, metrics | {"gradient_norm": gradient_norm, "finite": finite.astype(jnp.float32)}


def _gradients_and_sums(loss_fn, microbatches, axis, key, params, batch):
    """The gradients of the loss, and the sums of `loss_fn`; with an `axis`, over all its devices."""
    rows = jnp.arange(len(batch["inputs"]))
    if axis is not None:
        rows += jax.lax.axis_index(axis) * len(rows)
    batch = batch | {"rows": rows}

    def gradients_and_sums(batch):
        return jax.grad(loss_fn, has_aux=True)(params, batch, key)

    def add_microbatch(total, batch):
        return jax.tree.map(jnp.add, total, gradients_and_sums(batch)), None

    if microbatches == 1:
        total = gradients_and_sums(batch)
    else:
        zeros = optax.tree.zeros_like(jax.eval_shape(gradients_and_sums, batch))
        split = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
        total, _ = jax.lax.scan(add_microbatch, zeros, split)
    return total if axis is None else jax.lax.psum(total, axis)


def _where_unless_schedule(condition: Bool[Array, ""], new: Any, old: Any) -> Any:
    """`new` where the condition holds, else `old`; but always the new counts of schedules, which are those of steps."""
    is_schedule = lambda x: isinstance(x, (optax.ScaleByScheduleState, *_INJECTED))

    def choose(new, old):
        if isinstance(new, _INJECTED):  # keeps the values of the last update, which may have been the bad numbers
            values = optax.tree.where(condition, new.hyperparams, old.hyperparams)
            inner = _where_unless_schedule(condition, new.inner_state, old.inner_state)
            return new._replace(hyperparams=values, inner_state=inner)
        return new if is_schedule(new) else jnp.where(condition, new, old)

    return jax.tree.map(choose, new, old, is_leaf=is_schedule)


def _all_finite(tree: Any) -> Bool[Array, ""]:
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()
