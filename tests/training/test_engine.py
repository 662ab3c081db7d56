from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2t_jax import sharding
from t2t_jax.model.transformer import Transformer, TransformerConfig
from t2t_jax.training.engine import Engine, compiler_options, describe
from t2t_jax.training.train_step import TrainState


@pytest.mark.parametrize(
    ("shapes", "mib", "expected"),
    [
        (1, 3, "; 3.00 MiB each (0.25 MiB parameters and optimiser); compiled 1 batch shape in 0 s"),
        (2, 1536, "; 1.50 GiB each (0.25 MiB parameters and optimiser); compiled 2 batch shapes in 0 s"),
    ],
)
def test_the_line_about_the_devices_has_sizes_that_can_be_read(shapes, mib, expected):
    mesh, model = sharding.make_mesh(jax.devices()[:1]), Transformer(TransformerConfig(), jnp.dtype("float32"))
    state = TrainState(jnp.zeros(()), {"w": jnp.zeros(2**14)}, {"w": jnp.zeros(3 * 2**14)})
    assert describe(Engine(None, 1, mib * 2**20, 0.0), shapes, state, mesh, model).endswith(expected)


@pytest.mark.parametrize(
    ("num_heads", "expected"),
    [(8, "; 16,384 parameters; pmap"), (16, "; 16,384 parameters (num_heads · d_k = 1024, d_model = 512); pmap")],
)
def test_it_has_the_number_of_parameters_and_says_where_more_heads_are_not_narrower(num_heads, expected):
    mesh, state = sharding.make_mesh(jax.devices()[:1]), TrainState(jnp.zeros(()), {"w": jnp.zeros(2**14)}, {})
    model = Transformer(TransformerConfig(num_heads=num_heads), jnp.dtype("float32"))
    assert expected in describe(Engine(None, 1, 0, 0.0), 1, state, mesh, model)


@pytest.mark.parametrize(("platform", "expected"), [("gpu", [False, True]), ("tpu", [False, False])])
def test_replicas_of_a_gradient_that_gpus_compute_are_equal(platform, expected):
    """A scatter-add by atomic operations adds in any order, and copies that differ would count as damaged."""
    devices = np.array([SimpleNamespace(platform=platform)])
    meshes = [SimpleNamespace(devices=devices, shape={sharding.MODEL: size}) for size in (1, 2)]
    assert [compiler_options(mesh).get("xla_gpu_deterministic_ops", False) for mesh in meshes] == expected
