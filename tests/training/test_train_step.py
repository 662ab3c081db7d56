import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t2t_jax.training.loss import cross_entropy
from t2t_jax.training.optimizer import adam, learning_rate_schedule
from t2t_jax.training.train_step import init_state, train_step
from tests import tiny
from tests.tiny import S, T

BATCH = {"inputs": tiny.sentences([S, 3, 5, 2], S), "targets": tiny.sentences([T, 2, 4, 1], T, seed=1)}


def step_of(model, optimizer, accumulate=1, epsilon=0.1):
    return jax.jit(functools.partial(train_step, model, optimizer, epsilon, accumulate, jax.random.key(7)))


def start(model, optimizer):
    return jax.jit(functools.partial(init_state, model, optimizer))(jax.random.key(0))


def test_gradient_is_that_of_the_mean_over_all_real_tokens():
    """With SGD of rate 1 the parameters move by exactly the gradient."""
    model = tiny.model(dropout=0.0)
    state = start(model, optax.sgd(1.0))

    def mean_loss(params):
        loss, _, tokens = cross_entropy(model.apply({"params": params}, **BATCH), BATCH["targets"], 0.1)
        return loss / tokens

    loss, gradient = jax.jit(jax.value_and_grad(mean_loss))(state.params)
    new, metrics = step_of(model, optax.sgd(1.0))(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    assert metrics["target_tokens"] == T + 2 + 4 + 1 and new.step == 1
    for moved, before, g in zip(*map(jax.tree.leaves, (new.params, state.params, gradient)), strict=True):
        np.testing.assert_allclose(moved, before - g, atol=1e-6)


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulated_parts_equal_one_batch(parts):
    """Though their token counts differ."""
    model = tiny.model(dropout=0.0)
    state = start(model, optax.sgd(1.0))
    whole, metrics = step_of(model, optax.sgd(1.0))(state, BATCH)
    split, split_metrics = step_of(model, optax.sgd(1.0), parts)(state, BATCH)
    for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(split.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    for name in metrics:
        np.testing.assert_allclose(metrics[name], split_metrics[name], rtol=1e-5)


def test_rows_of_padding_change_nothing():
    model = tiny.model(dropout=0.0)
    state = start(model, optax.sgd(1.0))
    padded = {name: jnp.pad(x, ((0, 3), (0, 0))) for name, x in BATCH.items()}
    a, b = (step_of(model, optax.sgd(1.0))(state, batch)[0].params for batch in (BATCH, padded))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


def test_dropout_differs_from_step_to_step_and_not_from_run_to_run():
    model = tiny.model(dropout=0.5)
    step = step_of(model, optax.sgd(0.0))
    state = start(model, optax.sgd(0.0))
    second, first_metrics = step(state, BATCH)
    _, second_metrics = step(second, BATCH)
    assert first_metrics["loss"] != second_metrics["loss"]
    assert first_metrics["loss"] == step(state, BATCH)[1]["loss"]


def test_one_step_of_the_tiny_model_golden():
    """Few numbers, for noticing. If a change to the model, loss, optimiser or initialisation is meant to move them,
    write down the new ones; if not, the change did more than you think."""
    model = tiny.model()
    optimizer = adam(learning_rate_schedule(tiny.D, 10), 0.9, 0.98, 1e-9)
    state = start(model, optimizer)
    state, metrics = step_of(model, optimizer)(state, BATCH)
    found = [float(metrics[name]) for name in ("loss", "nll", "gradient_norm")]
    np.testing.assert_allclose(found, GOLDEN, rtol=2e-4)


GOLDEN = [2.709191, 2.672893, 3.455081]
