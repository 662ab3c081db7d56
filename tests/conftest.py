"""What holds in every test: 8 CPU devices, no silent rank promotion, no network; compilations are cheap and kept.

With T2T_JAX_TEST_DEVICE=1 the tests marked `accelerator`, and only these, run on the machine's GPU or TPU instead.
Shapes and dtypes of public signatures are checked by jaxtyping (see pytest's options in pyproject.toml).
"""
# ruff: noqa: E402 (JAX reads its environment when it is imported)

import os

from benchmarks.tiny_experiment import FAST_COMPILATION

ON_DEVICE = bool(os.environ.get("T2T_JAX_TEST_DEVICE"))
if not ON_DEVICE:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {FAST_COMPILATION}"
    os.environ["JAX_PLATFORMS"] = "cpu"
for name in [name for name in os.environ if name.startswith("GIT_") and not name.startswith("GIT_CONFIG")]:
    del os.environ[name]  # in a hook of git they name its repository, in which tests would commit

import gc
import io
import shutil
import socket
import sys
from pathlib import Path

import hypothesis
import jax
import pytest

import main
from t2t_jax import sharding
from t2t_jax.decoding import batch_shapes


def pytest_configure(config):
    hypothesis.settings.register_profile("any machine", deadline=None)  # times depend on the load of the machine
    hypothesis.settings.load_profile("any machine")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    folder = str(config.cache.mkdir("jax"))
    cached = {"jax_compilation_cache_dir": folder, "jax_persistent_cache_min_compile_time_secs": 0}
    for name, value in cached.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # for the processes that tests start


def pytest_collection_modifyitems(items):
    has_slurm = shutil.which("sbatch") is not None and "SLURM_CONF" in os.environ
    for item in items:
        if ON_DEVICE and "accelerator" not in item.keywords:
            item.add_marker(pytest.mark.skip(reason="runs on a CPU only"))
        if item.get_closest_marker("slurm") and not has_slurm:
            item.add_marker(pytest.mark.skip(reason="no Slurm: tests/slurm_up.sh up, then export SLURM_CONF"))


def pytest_collection_finish():
    """Python searches for garbage a twentieth of the time, mostly in what was imported."""
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(autouse=True, scope="module")
def few_compiled_programs():
    """Each takes memory, and some of the 65,530 maps that Linux lets a process have; without any left, XLA crashes."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 5_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    connect = socket.socket.connect

    def local_only(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost", "::1"):
            raise OSError(f"a test tried to reach {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs `main.py` with arguments and standard input; returns exit code, standard output and standard error."""

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["main.py", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        code = main.main(sys.argv)
        return code, *capsys.readouterr()

    monkeypatch.chdir(Path(__file__).parents[1])
    return run


@pytest.fixture(autouse=True, scope="session")
def few_devices_and_shapes():
    """Eight devices are for the tests that name them: a tiny model is slower on eight than on one, in children too."""
    make_mesh = sharding.make_mesh
    one = lambda devices=None, model_parallel=1: make_mesh(devices or jax.devices()[:model_parallel], model_parallel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "make_mesh", one)
        patch.setattr(batch_shapes, "_CPU_ROWS", ((4, 12), (16, 127)))  # fewer shapes to compile
        if not ON_DEVICE:
            assert len(jax.devices()) == 8  # which reads XLA_FLAGS
            patch.setenv("XLA_FLAGS", FAST_COMPILATION)
        yield
