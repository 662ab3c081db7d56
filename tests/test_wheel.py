"""The wheel holds the package alone, and works where there is no checkout."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import t2t_jax
from tests.interop import models

ROOT = Path(__file__).parents[1]

USE = """
import sys
import t2t_jax

run, site = sys.argv[1:]
assert t2t_jax.__file__.startswith(site), t2t_jax.__file__
translator = t2t_jax.load(run)
(hypothesis, *_), = translator.translate(["one two"])
score, = translator.score([("one two", hypothesis.text)])
assert score.num_tokens > 0 > score.log_prob
slow_imports = {"tensorboardX", "tensorflow_datasets", "matplotlib", "torch"}  # no translation needs them
assert not slow_imports & sys.modules.keys()
from t2t_jax.visualization.page import page
assert page(translator.attention(["one two"]), "one two").startswith("<!DOCTYPE html>")
"""
EXPORT = """
import sys
from safetensors.numpy import load_file
from t2t_jax.interop.export import export_run

run, output = sys.argv[1:]
export_run(run, format="safetensors", output=output, step=None)
assert "embedding.table" in load_file(f"{output}/model.safetensors")
"""
NO_CHECKOUT = """
assert not {"configs", "experiments", "main"} & sys.modules.keys()
"""


def python(*arguments, **options):
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr


def pip(*arguments):
    python("-m", "pip", "--disable-pip-version-check", *arguments, "--no-deps", "--no-index")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built without network, from a copy: setuptools writes into the folder that it builds."""
    if not all(importlib.util.find_spec(name) for name in ("pip", "setuptools")):
        pytest.skip("needs pip and setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("t2t_jax", "configs", "experiments"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("main.py", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    pip("wheel", str(folder), "--no-build-isolation", f"--wheel-dir={folder}")
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    paths = [path for path in (ROOT / "t2t_jax").rglob("*.*") if path.suffix != ".pyc"]
    files = {str(path.relative_to(ROOT)) for path in paths}
    metadata = f"t2t_jax-{t2t_jax.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(metadata)} == files


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs a program in an empty folder, with the installed wheel and no checkout."""
    site, cwd = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("cwd")
    pip("install", str(wheel), f"--target={site}")
    environment = os.environ | {"PYTHONPATH": str(site)}
    return site, lambda program, *words: python("-c", program + NO_CHECKOUT, *words, cwd=cwd, env=environment)


@pytest.mark.slow
def test_the_installed_wheel_translates_scores_and_shows_attention(installed, tmp_path):
    site, run = installed
    run(USE, models.random_run(tmp_path / "run"), site)


def test_the_installed_wheel_exports(installed, tmp_path):
    pytest.importorskip("safetensors")
    run = installed[1]
    run(EXPORT, models.random_run(tmp_path / "run"), tmp_path / "out")
