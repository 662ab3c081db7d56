import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from t2t_jax import provenance

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_the_version_is_the_commit_marked_where_the_code_was_changed():
    git = lambda *words: subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout
    changed = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    assert provenance.code_version() == git("rev-parse", "HEAD").strip() + changed


def test_outside_its_checkout_the_version_is_the_release(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    assert provenance.code_version() == provenance.__version__
    monkeypatch.setenv("PATH", str(tmp_path))  # no git at all
    assert provenance.code_version() == provenance.__version__


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_a_tagged_version_is_its_commit_too(monkeypatch, tmp_path):
    git = lambda *words: subprocess.run(
        ["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x@x", *words], check=True, capture_output=True
    ).stdout.decode()
    (tmp_path / "provenance.py").touch()
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    for words in (["init"], ["add", "."], ["commit", "--message=ours"], ["tag", "--annotate", "v1", "--message=v1"]):
        git(*words)
    assert provenance.code_version() == git("rev-parse", "HEAD").strip()


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_in_a_checkout_of_something_else_the_version_is_the_release(monkeypatch, tmp_path):
    """An environment that lies in somebody's repository."""
    git = ["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x@x"]
    for words in (["init"], ["commit", "--allow-empty", "--message=theirs"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    (tmp_path / "provenance.py").touch()
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    assert provenance.code_version() == provenance.__version__


def test_the_processor_has_a_name():
    assert provenance.cpu_name() in Path("/proc/cpuinfo").read_text() + platform.machine()
    assert provenance.cpu_name()
