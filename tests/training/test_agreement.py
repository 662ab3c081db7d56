"""Planted differences between replicas, and numbers that are not finite, are found and named before a save."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t2t_jax import sharding
from t2t_jax.errors import DamagedError
from t2t_jax.training.agreement import check_state
from t2t_jax.training.train_step import TrainState

POSITION = {"step": 5, "batches": 123}


def state_on(mesh, shard_state=False):
    params = {"embedding": {"table": jnp.arange(64.0).reshape(16, 4)}, "bias": jnp.ones(3)}
    state = TrainState(jnp.asarray(5, jnp.int32), params, optax.adam(0.1).init(params))
    return jax.device_put(state, sharding.of_state(jax.eval_shape(lambda: state), mesh, shard_state))


def planted(x, device, change):
    """The same array with the replica of one device changed."""
    shards = [np.array(shard.data) for shard in x.addressable_shards]
    shards[device] = change(shards[device])
    arrays = [jax.device_put(data, shard.device) for data, shard in zip(shards, x.addressable_shards, strict=True)]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, arrays)


def flip_lowest_bit(data):
    words = data.view(np.uint32).ravel()
    words[words.size // 2] ^= 1
    return data


@pytest.mark.parametrize(("model_parallel", "shard_state"), [(1, False), (2, False), (1, True), (2, True)])
def test_equal_replicas_pass_however_the_state_is_sharded(model_parallel, shard_state):
    mesh = sharding.make_mesh(jax.devices(), model_parallel)
    check_state(state_on(mesh, shard_state), mesh, POSITION)


@pytest.mark.parametrize(("model_parallel", "name"), [(1, "bias"), (1, "embedding/table"), (2, "embedding/table")])
def test_one_flipped_bit_of_one_replica_is_found(model_parallel, name):
    """On eight devices a matrix sharded in two has four replicas of each half."""
    mesh = sharding.make_mesh(jax.devices(), model_parallel)
    state = state_on(mesh)
    *path, last = name.split("/")
    leaf = state.params[path[0]] if path else state.params
    leaf[last] = planted(leaf[last], 5, flip_lowest_bit)
    with pytest.raises(DamagedError, match=f"step 5: params/{name} is not the same on .* and .*"):
        check_state(state, mesh, POSITION)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(value):
    mesh = sharding.make_mesh(jax.devices())
    state = state_on(mesh, shard_state=True)
    moments = state.optimizer[0].mu["embedding"]
    moments["table"] = moments["table"].at[15, 3].set(value)
    with pytest.raises(DamagedError, match="optimizer/0/mu/embedding/table holds a number that is not finite"):
        check_state(state, mesh, POSITION)


def test_arrays_of_any_dtype_are_compared():
    """Moments in bfloat16, a random key and flags, as an optimiser of the user's own may hold."""
    mesh = sharding.make_mesh(jax.devices())
    state = state_on(mesh)
    odd = {
        "mu": jnp.ones(6, jnp.bfloat16),
        "half": jnp.ones((2, 3), jnp.float16),
        "count": jnp.ones((), jnp.uint8),
        "flag": jnp.ones(2, bool),
        "key": jax.random.key(1),
    }
    odd = jax.device_put(odd, sharding.replicated(mesh))
    check_state(state._replace(optimizer=odd), mesh, POSITION)
    for name, word in (("mu", np.uint16), ("half", np.uint16), ("count", np.uint8), ("flag", np.uint8)):
        flipped = planted(odd[name], 5, lambda data, word=word: (data.view(word) ^ 1).view(data.dtype))
        with pytest.raises(DamagedError, match=f"step 5: optimizer/{name} is not the same on"):
            check_state(state._replace(optimizer=odd | {name: flipped}), mesh, POSITION)
    for name in ("mu", "half"):
        infinite = odd | {name: odd[name].at[..., 0].set(jnp.inf)}
        with pytest.raises(DamagedError, match=f"optimizer/{name} holds a number that is not finite"):
            check_state(state._replace(optimizer=infinite), mesh, POSITION)


def test_processes_at_different_positions_in_the_data_are_found(monkeypatch):
    mesh = sharding.make_mesh(jax.devices()[:1])
    other = lambda mine: [mine, mine | {"position": {"step": 5, "batches": 124}}]
    monkeypatch.setattr(sharding, "gather", other)
    with pytest.raises(DamagedError, match="process 1 is at .*124.*, process 0 at .*123"):
        check_state(state_on(mesh), mesh, POSITION)
