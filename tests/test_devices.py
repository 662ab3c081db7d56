"""One experiment, whatever the number of devices."""

import jax
import numpy as np
import optax

from t2t_jax import sharding
from t2t_jax.data.batching import Batches
from t2t_jax.data.token_store import open_store
from t2t_jax.training.loop import compile_step, make_model
from t2t_jax.training.train_step import init_state
from tests.runs import tiny_config


def train(config, store, devices, steps=4):
    """Parameters after `steps` steps of SGD, which shows a scaled gradient where Adam would hide it."""
    mesh = sharding.make_mesh(jax.devices()[:devices])
    model, optimizer = make_model(config, store), optax.sgd(0.3)
    batches = Batches(store.source, store.target, tokens_per_batch=64, num_buckets=2, seed=0)
    init = jax.jit(lambda key: init_state(model, optimizer, key), out_shardings=sharding.replicated(mesh))
    state = init(jax.random.key(0))
    step = compile_step(config, model, optimizer, batches, state, mesh)
    losses = []
    for index in range(steps):
        batch = sharding.put_rows(batches[index], mesh, config.train.accumulate)
        assert {shard.data.shape[0] for shard in batch["inputs"].addressable_shards} == {
            len(batch["inputs"]) // devices
        }
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, jax.tree.map(np.asarray, state.params)


def assert_same(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for a, b in zip(*(jax.tree.leaves(params) for _, params in (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_eight_devices_equal_one_with_unequal_token_counts_and_dropout_on(tmp_path):
    config = tiny_config(tmp_path)
    store = open_store(config.data)
    tokens = Batches(store.source, store.target, tokens_per_batch=64, num_buckets=2, seed=0)[0]["targets"] != 0
    assert len(set(tokens.sum(axis=1))) > 1, "every device had the same number of tokens"
    expected = train(config, store, 1)
    for devices in (2, 8):
        assert_same(train(config, store, devices), expected)


def test_parts_on_four_devices_equal_the_whole_on_one(tmp_path):
    config = tiny_config(tmp_path, model__dropout=0.0)
    store = open_store(config.data)
    expected = train(config, store, 1)
    config.train.accumulate = 2
    assert_same(train(config, store, 4), expected)


def test_rows_are_padded_to_whole_shares():
    mesh = sharding.make_mesh(jax.devices())
    put = sharding.put_rows({"x": np.ones((3, 2), np.int32)}, mesh, multiple=2)["x"]
    assert put.shape == (16, 2) and put.sum() == 6
    assert len(put.sharding.device_set) == 8
