"""What holds in every test: 8 CPU devices, no silent rank promotion, no network; compilations are kept on disk.

Shapes and dtypes of public signatures are checked by jaxtyping (see pytest's options in pyproject.toml).
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import socket

import jax
import pytest


def pytest_configure(config):
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    connect = socket.socket.connect

    def local_only(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost", "::1"):
            raise OSError(f"a test tried to reach {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)
