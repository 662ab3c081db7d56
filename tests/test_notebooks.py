"""The notebooks: clean in git, one cell that installs, no name that does not exist; they run from top to bottom."""

import ast
import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import main
from benchmarks.tiny_experiment import FAST_COMPILATION
from configs import quickstart

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
NAMES = ("quickstart", "attention", "paper_tour")  # in the order in which they run: the second uses the first's run
STEPS = 24  # of training: enough for every cell to have something to show
MOST_SECONDS = 900  # of one notebook, on a busy machine; paper_tour takes 40 s of one core
PICTURES = {"quickstart": 2, "attention": 4, "paper_tour": 11}  # cells that show one

books = pytest.mark.parametrize("name", NAMES)


def path(name):
    return FOLDER / f"{name}.ipynb"


def sources(name, kind):
    """The text of each cell of a kind: 'code' or 'markdown'."""
    cells = json.loads(path(name).read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def test_there_are_no_other_notebooks():
    assert sorted(FOLDER.iterdir()) == sorted(map(path, NAMES))


@books
def test_a_notebook_is_stored_without_outputs_and_one_line_of_code_a_line(name):
    text = path(name).read_text()
    book = json.loads(text)
    nbformat.validate(book)
    assert text == json.dumps(book, indent=1, ensure_ascii=False) + "\n"
    for cell in book["cells"]:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None and cell["metadata"] == {}
        lines = cell["source"]
        assert lines and all(line.endswith("\n") and line.count("\n") == 1 for line in lines[:-1])
        assert lines[-1].strip() and "\n" not in lines[-1]
        assert max(map(len, lines)) <= 121
    assert (
        book["metadata"].keys() == {"kernelspec", "language_info"}
        and book["metadata"]["kernelspec"]["name"] == "python3"
    )


def test_the_notebooks_install_in_one_cell_the_first_and_all_alike():
    (install,) = {sources(name, "code")[0] for name in NAMES}
    assert '"pip", "install"' in install
    for name in NAMES:
        later = "\n".join(sources(name, "code")[1:])
        assert not re.search(r"\bpip\b|subprocess|os\.system|^[!%]", later, flags=re.MULTILINE)


@books
def test_every_code_cell_has_a_text_before_it_and_shows_something(name):
    cells = json.loads(path(name).read_text())["cells"]
    assert cells[0]["cell_type"] == "markdown" and "".join(cells[0]["source"]).startswith("# ")
    for before, cell in itertools.pairwise(cells):
        if cell["cell_type"] == "code":
            last = ast.parse("".join(cell["source"])).body[-1]
            training = ast.unparse(last).startswith("result = train(")  # which prints what it does
            assert training or isinstance(last, ast.Expr | ast.For), "".join(cell["source"])
            assert before["cell_type"] == "markdown"


def resolved(name):
    """{name in the notebook: object} of its imports, each of which must exist; and the syntax tree of its code."""
    tree = ast.parse("\n".join(sources(name, "code")))
    found = {"config": quickstart.get_config()}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                found[alias.asname or alias.name] = getattr(module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = importlib.import_module(
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
    return found, tree


@books
def test_every_import_and_every_attribute_of_an_import_exists_and_is_public(name):
    found, tree = resolved(name)
    assert found.keys() >= {"config", "sys"} and len(found) > 8
    chains = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain = ast.unparse(node)
            assert not re.search(r"(^|\.)_", chain), chain
            if re.fullmatch(r"\w+(\.\w+)+", chain) and chain.partition(".")[0] in found:
                chains.add(chain)
        if isinstance(node, ast.ImportFrom):
            assert not re.search(r"\b_", f"{node.module} {' '.join(alias.name for alias in node.names)}")
    assert len(chains) > 3
    for chain in chains:
        first, *rest = chain.split(".")
        value = found[first]
        for attribute in rest:
            assert hasattr(value, attribute), chain
            value = getattr(value, attribute)


@books
def test_every_command_and_path_in_the_text_exists(name, capsys):
    spans = re.findall(r"`([^`]+)`", "\n".join(sources(name, "markdown")))
    assert spans
    for span in spans:
        words = span.split()
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        elif words[:2] == ["python", "main.py"]:
            given = dict(word.removeprefix("--").split("=") for word in words[2:])
            assert given.keys() - {"mode"} <= set(main.FLAGS_OF[given.get("mode", "train")]), span
            assert all((ROOT / value).exists() for flag, value in given.items() if flag == "config")
        elif words[:2] == ["python", "-m"]:
            with pytest.raises(SystemExit, match="0"):
                importlib.import_module(words[2]).main(["--help"])
            usage = capsys.readouterr().out
            assert all(word.partition("=")[0] in usage for word in words[3:] if word.startswith("--")), span
        elif span.endswith(".ipynb"):
            assert (FOLDER / span).exists(), span
        elif "/" in span:
            assert (ROOT / span).exists(), span


def outside(folder):
    """The environment of a notebook: one device, and the packages of the checkout alone."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"XLA_FLAGS": FAST_COMPILATION}
    return kept | {"NOTEBOOK_STEPS": str(STEPS), "JUPYTER_PREFER_ENV_PATH": "1", "IPYTHONDIR": str(folder / "ipython")}


@pytest.fixture
def checkout(tmp_path):
    """A checkout that notebooks may write into: links to the parts of this one, and an empty notebooks/ to run in."""
    for part in ("t2t_jax", "configs", "experiments", "main.py"):
        (tmp_path / part).symlink_to(ROOT / part)
    (tmp_path / "notebooks").mkdir()
    return tmp_path


def test_the_tour_shows_the_multiply_adds_and_paths_that_it_announces():
    """By hand: 2·n²·d and k·n·d² at n = 64, d = 256 and k = 3; paths at n = 9 and k = r = 3."""
    (code,) = [source for source in sources("paper_tour", "code") if "measured_path(" in source]
    shown = {"Markdown": str}
    exec(code, shown)
    rows = {name: cells for name, *cells in (row.strip("| ").split(" | ") for row in shown["rows"])}
    assert rows["Self-attention"][1:] == ["2,097,152", "O(1)", "1", "O(1)", "1"]
    assert rows["Recurrent"][1:] == ["8,388,608", "O(n)", "64", "O(n)", "9"]
    assert rows["Convolutional, contiguous"][1] == "12,582,912" and rows["Self-attention (restricted)"][-1] == "8"


@pytest.mark.slow
def test_the_notebooks_run_from_top_to_bottom_and_every_cell_shows_something(checkout):
    """One after the other, in a kernel each; the corpus of the quickstart is downloaded if it is not there."""
    for name in NAMES:
        book = nbformat.read(path(name), as_version=4)
        start = time.monotonic()
        where = {"metadata": {"path": str(checkout / "notebooks")}}
        NotebookClient(book, kernel_name="python3", timeout=MOST_SECONDS, resources=where).execute(
            env=outside(checkout)
        )
        assert time.monotonic() - start < MOST_SECONDS
        code = [cell for cell in book.cells if cell.cell_type == "code"]
        assert all(cell.outputs for cell in code), [cell.source for cell in code if not cell.outputs]
        pictures = [any("image/png" in output.get("data", {}) for output in cell.outputs) for cell in code]
        assert sum(pictures) == PICTURES[name]
    assert (checkout / f"runs/notebook_{STEPS}_steps/result.json").is_file()
    assert sorted(file.name for file in (checkout / "notebooks").iterdir()) == []


@pytest.mark.slow
def test_where_there_is_no_checkout_the_install_cell_clones_and_installs(tmp_path):
    """As in Colab, but for the network: this repository is cloned, and dependencies are left out."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("needs git, and a checkout to clone")
    install = sources(NAMES[0], "code")[0]
    clone = install.replace("https://github.com/OWNER/t2t_jax", f"file://{ROOT}")
    assert clone != install
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    import setuptools

    (tmp_path / "site").mkdir()
    packages = Path(setuptools.__file__).parents[1]
    for package in [*packages.glob("setuptools*"), packages / "_distutils_hack"]:  # the second: Python 3.12 and later
        (tmp_path / "site" / package.name).symlink_to(package)
    offline = {
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PYTHONPATH": str(tmp_path / "site"),
    }
    cell = tmp_path / "cell.py"
    cell.write_text(clone + "\nimport configs, t2t_jax\nprint(configs.__file__, t2t_jax.__file__, sep='\\n')")
    for _ in range(2):  # run again, it finds what is there
        done = subprocess.run(
            [tmp_path / "venv/bin/python", cell],
            cwd=tmp_path,
            env=outside(tmp_path) | offline,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert all(line.startswith(f"{tmp_path}/checkout/") for line in done.stdout.splitlines()[-2:]), done.stdout
    installed = subprocess.run(
        [tmp_path / "venv/bin/python", "-m", "pip", "show", "t2t_jax"], capture_output=True, text=True
    )
    assert "Name: t2t_jax" in installed.stdout
