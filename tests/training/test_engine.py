from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2t_jax import sharding
from t2t_jax.training.engine import Engine, compiler_options, describe


@pytest.mark.parametrize(
    ("shapes", "mib", "expected"),
    [
        (1, 3, "; 3.00 MiB each (0.25 MiB parameters and optimiser); compiled 1 batch shape in 0 s"),
        (2, 1536, "; 1.50 GiB each (0.25 MiB parameters and optimiser); compiled 2 batch shapes in 0 s"),
    ],
)
def test_the_line_about_the_devices_has_sizes_that_can_be_read(shapes, mib, expected):
    mesh, state = sharding.make_mesh(jax.devices()[:1]), {"w": jnp.zeros(2**16)}
    model = SimpleNamespace(fused_attention=False, dtype=jnp.dtype("float32"))
    assert describe(Engine(None, 1, mib * 2**20, 0.0), shapes, state, mesh, model).endswith(expected)


@pytest.mark.parametrize(("platform", "expected"), [("gpu", [False, True]), ("tpu", [False, False])])
def test_replicas_of_a_gradient_that_gpus_compute_are_equal(platform, expected):
    """A scatter-add by atomic operations adds in any order, and copies that differ would count as damaged."""
    devices = np.array([SimpleNamespace(platform=platform)])
    meshes = [SimpleNamespace(devices=devices, shape={sharding.MODEL: size}) for size in (1, 2)]
    assert [compiler_options(mesh).get("xla_gpu_deterministic_ops", False) for mesh in meshes] == expected
