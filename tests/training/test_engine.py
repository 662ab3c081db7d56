from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from t2t_jax import sharding
from t2t_jax.training.engine import Engine, describe


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
