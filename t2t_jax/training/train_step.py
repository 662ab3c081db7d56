"""§5: one training step, a pure function of (state, batch)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from t2t_jax.model.transformer import Transformer
from t2t_jax.training.loss import cross_entropy

Batch = dict[str, Int[Array, "B _"]]
Metrics = dict[str, Float[Array, ""]]


class TrainState(NamedTuple):
    """Everything that changes from step to step; `step` counts the updates made."""

    step: Int[Array, ""]
    params: Any
    optimizer: optax.OptState


def init_state(model: Transformer, optimizer: optax.GradientTransformation, key: Array) -> TrainState:
    """The state before the first step."""
    ids = jnp.ones((1, 2), jnp.int32)
    params = model.init(key, ids, ids)["params"]
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def train_step(
    model: Transformer,
    optimizer: optax.GradientTransformation,
    label_smoothing: float,
    accumulate: int,
    key: Array,
    state: TrainState,
    batch: Batch,
    *,
    axis: str | None = None,
    devices: int = 1,
    skip_nonfinite: bool = False,
) -> tuple[TrainState, Metrics]:
    """One update from one global batch, by gradient accumulation over `accumulate` microbatches of equally many rows.

    The loss is the sum over all non-padding target tokens divided by their number, over the whole batch:
    never a mean of means over devices or microbatches. `loss` is label-smoothed, `nll` is not (nats per token).
    The entries of the batch are the arguments of the model. Dropout is a function of the key, the step and an
    element's place in the global batch: devices and microbatches change no mask.

    `axis` names the mapped axis over whose devices the rows are divided, one after the other; without one, they lie
    in equal shares on `devices`.

    `finite` is whether the loss, the gradients and the new parameters are; if not, `skip_nonfinite` keeps the old
    parameters and moments (the step still counts).
    """
    key = jax.random.fold_in(key, state.step)
    rows = jnp.arange(len(batch["inputs"]))  # their numbers in the global batch
    if axis is not None:
        rows += jax.lax.axis_index(axis) * len(rows)

    def loss_sum(params, part, rows):
        method, rngs = Transformer.before_softmax, {"dropout": key}
        y, table = model.apply({"params": params}, **part, train=True, rows=rows, rngs=rngs, method=method)
        loss, nll, tokens = cross_entropy(y, table, part["targets"], label_smoothing, devices)
        return loss, (loss, nll, tokens)

    def add_part(total, part_and_rows):
        gradients, sums = jax.grad(loss_sum, has_aux=True)(state.params, *part_and_rows)
        return jax.tree.map(jnp.add, total, (gradients, sums)), None

    if accumulate == 1:
        gradients, sums = jax.grad(loss_sum, has_aux=True)(state.params, batch, rows)
    else:
        zeros = (jax.tree.map(jnp.zeros_like, state.params), (jnp.zeros(()),) * 3)
        parts = jax.tree.map(lambda x: _interleaved_parts(x, accumulate), (batch, rows))
        (gradients, sums), _ = jax.lax.scan(add_part, zeros, parts)
    if axis is not None:
        gradients, sums = jax.lax.psum((gradients, sums), axis)
    loss, nll, tokens = sums
    gradients = jax.tree.map(lambda g: g / tokens, gradients)
    updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    gradient_norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(loss) & jnp.isfinite(gradient_norm) & _all_finite(params)
    new_state = TrainState(state.step + 1, params, optimizer_state)
    if skip_nonfinite:
        is_count = lambda x: jnp.issubdtype(x.dtype, jnp.integer)
        new_state = jax.tree.map(
            lambda new, old: new if is_count(new) else jnp.where(finite, new, old), new_state, state
        )
    metrics = {"loss": loss / tokens, "nll": nll / tokens, "target_tokens": tokens}
    return new_state, metrics | {"gradient_norm": gradient_norm, "finite": finite.astype(jnp.float32)}


def _all_finite(tree: Any) -> Bool[Array, ""]:
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def _interleaved_parts(x: Int[Array, "B *n"], parts: int) -> Int[Array, "parts rows *n"]:
    """[rows, …] → [parts, rows / parts, …]; every part has rows of every device's share."""
    return x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)
