import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t2t_jax.errors import InputError
from t2t_jax.model.transformer import Transformer
from t2t_jax.training.loss import cross_entropy, label_smoothed_loss
from t2t_jax.training.optimizer import adam, learning_rate_schedule
from t2t_jax.training.train_step import TrainState, init_state, train_step
from tests import tiny
from tests.tiny import S, T

BATCH = {"inputs": tiny.sentences([S, 3, 5, 2], S), "targets": tiny.sentences([T, 2, 4, 1], T, seed=1)}
DROPOUT = {"dropout": 0.3, "attention_dropout": 0.2}
SGD, STAY = optax.sgd(1.0), optax.sgd(0.0)


@functools.cache
def step_of(model, optimizer, microbatches=1, epsilon=0.1, r_drop=0.0, **options):
    loss_fn = label_smoothed_loss(model, epsilon, r_drop)
    return jax.jit(functools.partial(train_step, loss_fn, optimizer, microbatches, jax.random.key(7), **options))


@functools.cache
def start(model, optimizer):
    return jax.jit(functools.partial(init_state, model, optimizer))(jax.random.key(0))


def test_gradient_is_that_of_the_mean_over_all_real_tokens():
    """With SGD of rate 1 the parameters move by exactly the gradient."""
    model = tiny.model(num_layers=1, dropout=0.0)
    state = start(model, SGD)

    def mean_loss(params):
        y, table = model.apply({"params": params}, **BATCH, method=Transformer.before_softmax)
        loss, _, tokens = cross_entropy(y, table, BATCH["targets"], 0.1)
        return loss / tokens

    loss, gradient = jax.jit(jax.value_and_grad(mean_loss))(state.params)
    new, metrics = step_of(model, SGD)(state, BATCH)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    assert metrics["target_tokens"] == T + 2 + 4 + 1 and new.step == 1
    for moved, before, g in zip(*map(jax.tree.leaves, (new.params, state.params, gradient)), strict=True):
        np.testing.assert_allclose(moved, before - g, atol=1e-6)


def test_a_sum_of_a_loss_may_not_have_the_name_of_what_is_logged():
    loss_fn = lambda params, batch, key: (params.sum(), {"loss": 1.0, "target_tokens": 1.0, "tokens": 2.0})
    state = TrainState(0, jnp.ones(3), SGD.init(jnp.ones(3)))
    with pytest.raises(InputError, match="^train.loss: it returns a sum named tokens, which the log has already"):
        train_step(loss_fn, SGD, 1, jax.random.key(0), state, {"inputs": jnp.ones((1, 2), int)})


@pytest.mark.parametrize(("microbatches", "r_drop"), [(2, 0.0), (4, 0.0), (2, 5.0)])
def test_accumulated_microbatches_equal_one_batch(microbatches, r_drop):
    """Their numbers of tokens differ; dropout is on."""
    model = tiny.model(num_layers=1, **DROPOUT)
    state = start(model, SGD)
    whole, metrics = step_of(model, SGD, r_drop=r_drop)(state, BATCH)
    split, split_metrics = step_of(model, SGD, microbatches, r_drop=r_drop)(state, BATCH)
    for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(split.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    for name in metrics:
        np.testing.assert_allclose(metrics[name], split_metrics[name], rtol=1e-5)


def test_r_drop_is_the_loss_of_two_dropout_passes():
    """Without dropout the passes agree and the loss is the plain one; with dropout they diverge."""
    for options, same in [({"dropout": 0.0}, True), (DROPOUT, False)]:
        model = tiny.model(num_layers=1, **options)
        state = start(model, SGD)
        plain, weak, strong = (step_of(model, SGD, r_drop=r_drop)(state, BATCH)[1] for r_drop in (0.0, 1.0, 5.0))
        assert plain["target_tokens"] == weak["target_tokens"]
        np.testing.assert_allclose(weak["nll"], strong["nll"], rtol=1e-6)
        if same:
            np.testing.assert_allclose(strong["loss"], plain["loss"], rtol=1e-6)
        else:
            assert strong["loss"] > weak["loss"] + 1e-3


def test_rows_of_padding_change_nothing():
    model = tiny.model(num_layers=1, **DROPOUT)
    state = start(model, SGD)
    padded = {name: jnp.pad(x, ((0, 3), (0, 0))) for name, x in BATCH.items()}
    a, b = (step_of(model, SGD)(state, batch)[0].params for batch in (BATCH, padded))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


def test_a_batch_of_padding_alone_changes_no_parameter():
    model = tiny.model(num_layers=1, **DROPOUT)
    state = start(model, SGD)
    nothing = {name: np.zeros_like(ids) for name, ids in BATCH.items()}
    for r_drop in (0.0, 5.0):
        new, metrics = step_of(model, SGD, r_drop=r_drop)(state, nothing)
        jax.tree.map(np.testing.assert_array_equal, new.params, state.params)
        assert metrics["finite"] and metrics["loss"] == metrics["target_tokens"] == 0


def test_dropout_differs_from_step_to_step_and_not_from_run_to_run():
    model = tiny.model(num_layers=1, dropout=0.5)
    step, state = step_of(model, STAY), start(model, STAY)
    second, first_metrics = step(state, BATCH)
    _, second_metrics = step(second, BATCH)
    assert first_metrics["loss"] != second_metrics["loss"]
    assert first_metrics["loss"] == step(state, BATCH)[1]["loss"]


def test_remat_changes_neither_the_loss_nor_the_gradient():
    """With dropout on: what is computed again has the same masks."""
    model = tiny.model(num_layers=1, **DROPOUT)
    state = start(model, SGD)
    (kept, metrics), (again, found) = (
        step_of(dataclasses.replace(model, remat=remat), SGD)(state, BATCH) for remat in (False, True)
    )
    for name in metrics:
        np.testing.assert_allclose(found[name], metrics[name], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(again.params), jax.tree.leaves(kept.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.slow
def test_remat_takes_less_memory():
    model = tiny.model(num_layers=4)
    batch = {name: jnp.ones((4, 64), jnp.int32) for name in BATCH}
    state = start(model, SGD)

    def temporary(remat):
        # On CPU, XLA drops the barriers between the first and the second computation, and then joins the two.
        options = {"xla_disable_hlo_passes": "cse_barrier_expander"}
        lowered = step_of(dataclasses.replace(model, remat=remat), SGD).lower(state, batch)
        return lowered.compile(compiler_options=options).memory_analysis().temp_size_in_bytes

    assert temporary(True) < 0.4 * temporary(False)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_mapped_over_two_devices_the_update_is_that_of_the_whole_batch(accumulate):
    """Though the devices have different numbers of tokens, and with the same elements dropped."""
    model, optimizer = tiny.model(num_layers=1, **DROPOUT), SGD
    state = start(model, optimizer)
    whole, metrics = step_of(model, optimizer)(state, BATCH)
    found, found_metrics = mapped(model, optimizer, accumulate)(state, shares(BATCH))
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(whole.params), strict=True):
        for device in range(2):
            np.testing.assert_allclose(a[device], b, atol=1e-6)
    for name in metrics:
        np.testing.assert_allclose(found_metrics[name], [metrics[name]] * 2, rtol=1e-5)


def test_mapped_devices_have_masks_of_their_own():
    """Each of the two devices alone has the same pairs; together they have other masks than one twice."""
    model, optimizer = tiny.model(num_layers=1, dropout=0.5), STAY
    state = start(model, optimizer)
    step, pair = mapped(model, optimizer, 1), {name: x[:1] for name, x in BATCH.items()}
    losses = []
    for device in range(2):
        only = {name: jnp.zeros((2, *x.shape), jnp.int32).at[device].set(x) for name, x in pair.items()}
        losses.append(step(state, only)[1]["loss"][0])
    assert losses[0] != losses[1]


def mapped(model, optimizer, microbatches):
    loss_fn = label_smoothed_loss(model, 0.1)
    step = functools.partial(train_step, loss_fn, optimizer, microbatches, jax.random.key(7), axis="data")
    return jax.pmap(step, axis_name="data", in_axes=(None, 0), devices=jax.devices()[:2])


def shares(batch):
    return {name: x.reshape(2, -1, x.shape[1]) for name, x in batch.items()}


def skipping(optimizer):
    """A step with this optimiser that skips, and the state after an update and after a skipped one: its loss is NaN."""

    def loss_fn(params, batch, key):
        loss = (params["w"] * jnp.sqrt(batch["inputs"])).sum()
        return loss, {"loss": loss, "target_tokens": jnp.ones(())}

    params = {"w": jnp.ones((1, 3))}
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    step = functools.partial(train_step, loss_fn, optimizer, 1, jax.random.key(0), skip_nonfinite=True)
    state, good = step(state, {"inputs": jnp.ones((1, 3), jnp.int32)})
    new, bad = step(state, {"inputs": jnp.full((1, 3), -1)})
    assert (good["finite"], bad["finite"]) == (1, 0) and (state.step, new.step) == (1, 2)
    jax.tree.map(np.testing.assert_array_equal, new.params, state.params)
    return step, state, new


def test_a_skipped_update_leaves_all_of_adam_as_it_was_but_counts_as_a_step():
    """As with optax.apply_if_finite: Adam's bias correction counts the updates that its moments have seen."""
    _, state, new = skipping(adam(lambda count: 0.1 / (count + 1), 0.9, 0.98, 1e-9))
    jax.tree.map(np.testing.assert_array_equal, new.optimizer[0], state.optimizer[0])
    assert state.optimizer[0].count == 1 and new.optimizer[1].count == 2  # the schedule's


@pytest.mark.parametrize("is_bad", [False, True])
def test_a_skipped_update_counts_for_injected_hyperparameters(is_bad):
    """The third step has the third rate, also where the second rate is NaN; the wrapped Adam is as it was."""
    rate = lambda count: jnp.where(is_bad & (count == 1), jnp.nan, 0.1 / (count + 1))
    step, state, new = skipping(optax.inject_hyperparams(optax.adam)(rate))
    jax.tree.map(np.testing.assert_array_equal, new.optimizer.inner_state, state.optimizer.inner_state)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(new.optimizer)) and new.optimizer.count == 2
    third, _ = step(new, {"inputs": jnp.ones((1, 3), jnp.int32)})
    np.testing.assert_allclose(third.params["w"], new.params["w"] - 0.1 / 3, rtol=1e-5)


def test_an_optimiser_gets_the_loss_per_token():
    """As optax.contrib.reduce_on_plateau needs it."""
    by_value = lambda gradients, state, params, *, value, **_: (jax.tree.map(lambda g: -value * g, gradients), state)
    optimizer = optax.chain(STAY, optax.contrib.reduce_on_plateau(patience=1))
    scaled = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), by_value)
    model = tiny.model(num_layers=1, dropout=0.0)
    by_gradient, metrics = step_of(model, SGD)(start(model, SGD), BATCH)
    by_loss, _ = step_of(model, scaled, 2)(start(model, scaled), BATCH)
    moved = lambda new: jax.tree.map(jnp.subtract, new.params, start(model, SGD).params)
    expected = jax.tree.map(lambda x: metrics["loss"] * x, moved(by_gradient))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), moved(by_loss), expected)
    state, scales = start(model, optimizer), []
    for _ in range(2):
        state, _ = step_of(model, optimizer)(state, BATCH)
        scales.append(float(state.optimizer[1].scale))
    assert scales == pytest.approx([1, 0.1])  # the second loss is no improvement


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
