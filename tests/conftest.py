"""What holds in every test: 8 CPU devices, no silent rank promotion, no network; compilations are cheap and kept.

Shapes and dtypes of public signatures are checked by jaxtyping (see pytest's options in pyproject.toml).
"""

import os

# Tiny models take longer to optimise than to run.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["JAX_PLATFORMS"] = "cpu"

import socket

import hypothesis
import jax
import pytest

from t2t_jax import sharding


def pytest_configure(config):
    hypothesis.settings.register_profile("any machine", deadline=None)  # times depend on the load of the machine
    hypothesis.settings.load_profile("any machine")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(config.cache.mkdir("jax"))  # for the processes that tests start
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture(autouse=True, scope="module")
def few_compiled_programs():
    """Each takes some of the 65,530 memory maps that Linux lets a process have; without any left, XLA crashes."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    connect = socket.socket.connect

    def local_only(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost", "::1"):
            raise OSError(f"a test tried to reach {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)


@pytest.fixture(autouse=True, scope="session")
def one_device_unless_asked():
    """Eight devices are for the tests that name them: a tiny model is slower on eight than on one."""
    make_mesh = sharding.make_mesh
    one = lambda devices=None, model_parallel=1: make_mesh(devices or jax.devices()[:model_parallel], model_parallel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "make_mesh", one)
        yield
