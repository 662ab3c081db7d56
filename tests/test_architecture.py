"""The levels of docs/architecture.md: a file imports only from lower levels or from its own package."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LEVELS = {
    "t2t_jax.errors": -4,
    "t2t_jax.validation": -3,
    "t2t_jax.argument_parser": 0,
    "t2t_jax.command_line": 0,
    "t2t_jax.signals": -3,
    "t2t_jax.slurm": 0,
    "t2t_jax.peers": -1,
    "t2t_jax.event_file": 0,
    "t2t_jax.files": -2,
    "t2t_jax.object_store": 0,
    "t2t_jax.huge_pages": 0,
    "t2t_jax.progress_bar": 0,
    "t2t_jax.temporary_folders": -1,
    "t2t_jax.threads": 0,
    "t2t_jax": 0,
    "t2t_jax.sharding": 0,
    "t2t_jax.provenance": 1,
    "t2t_jax.remote_run": 1,
    "t2t_jax.run_folder": 1,
    "t2t_jax.checkpoints": 1,
    "t2t_jax.model": 1,
    "t2t_jax.data": 1,
    "t2t_jax.decoding": 2,
    "t2t_jax.evaluation": 3,
    "t2t_jax.interop": 3,
    "t2t_jax.visualization": 3,
    "t2t_jax.serving": 4,
    "t2t_jax.training": 4,
    "configs": 5,
    "benchmarks": 8,
    "main": 6,
    "experiments": 6,
}
NO_JAX = (
    "t2t_jax.argument_parser", "t2t_jax.command_line", "t2t_jax.errors", "t2t_jax.event_file", "t2t_jax.files",
    "t2t_jax.huge_pages", "t2t_jax.object_store", "t2t_jax.peers", "t2t_jax.progress_bar", "t2t_jax.provenance",
    "t2t_jax.remote_run", "t2t_jax.run_folder", "t2t_jax.signals", "t2t_jax.slurm", "t2t_jax.temporary_folders",
    "t2t_jax.threads", "t2t_jax.validation", "t2t_jax.data",
)  # fmt: skip
JAX = {"jax", "flax", "optax", "orbax", "jaxtyping", "chex"}

PACKAGES = ("t2t_jax", "configs", "benchmarks", "experiments")
FILES = sorted([*(path for package in PACKAGES for path in ROOT.glob(f"{package}/**/*.py")), ROOT / "main.py"])


def module(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(name):
    """The longest known prefix of a module's name."""
    known = [package for package in LEVELS if name == package or name.startswith(package + ".")]
    return max(known, key=len)


def imports(path, top_only=False):
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=module)
def test_arrows_point_down(path):
    name = module(path)
    if name == "t2t_jax":
        return  # `load` and `restore` are the names it lends from above
    for imported in imports(path):
        if imported.split(".")[0] in ("t2t_jax", "configs", "main", "benchmarks", "experiments", "tests"):
            below, here = package_of(imported), package_of(name)
            assert below == here or LEVELS[below] < LEVELS[here], f"{name} imports {imported}"


@pytest.mark.parametrize("path", [p for p in FILES if package_of(module(p)) in NO_JAX], ids=module)
def test_host_code_knows_no_jax(path):
    assert JAX.isdisjoint(name.split(".")[0] for name in imports(path))


@pytest.mark.parametrize("path", [p for p in FILES if package_of(module(p)) == "configs"], ids=module)
def test_configs_import_ml_collections_and_other_configs_only(path):
    assert {name.split(".")[0] for name in imports(path)} <= {"ml_collections", "configs"}


def test_importing_the_package_is_light():
    assert not list(imports(ROOT / "t2t_jax/__init__.py", top_only=True))


@pytest.mark.parametrize("package", sorted({path.parent for path in FILES}), ids=lambda path: path.name)
def test_files_do_not_import_one_another_in_a_circle(package):
    """Also not inside functions, which would hide the circle."""
    below = {}
    for path in package.glob("*.py"):
        found = set(imports(path))
        below[module(path)] = found | {imported.rpartition(".")[0] for imported in found}
    while below:
        lowest = {name for name in below if not below[name] & (below.keys() - {name})}
        assert lowest, f"a circle among {sorted(below)}"
        below = {name: found for name, found in below.items() if name not in lowest}


def test_nothing_is_named_for_nothing():
    assert not [p for p in FILES if p.stem in ("utils", "helpers", "common", "misc")]
