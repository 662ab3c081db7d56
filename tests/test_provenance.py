import os
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


@pytest.fixture
def git(monkeypatch, tmp_path):
    """Runs git in a new repository in which the code lies, whatever the user's configuration, which may ask to sign."""
    if not shutil.which("git"):
        pytest.skip("needs git")
    for name in ("GIT_CONFIG_COUNT", "GIT_CONFIG_PARAMETERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    (tmp_path / "provenance.py").touch()
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    git = ["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x@x"]
    run = lambda *words: subprocess.run([*git, *words], check=True, capture_output=True, text=True).stdout.strip()
    run("init")
    return run


def test_a_tagged_version_is_its_commit_too(git):
    for words in (["add", "."], ["commit", "--message=ours"], ["tag", "--annotate", "v1", "--message=v1"]):
        git(*words)
    assert provenance.code_version() == git("rev-parse", "HEAD")


def test_in_a_hook_of_another_repository_the_version_is_still_the_commit(git, monkeypatch, tmp_path):
    """As where an experiment is started by a hook: git tells its children which repository and index it works on."""
    git("add", "."), git("commit", "--message=ours")
    commit = git("rev-parse", "HEAD")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    assert provenance.code_version() == commit


def test_in_a_checkout_of_something_else_the_version_is_the_release(git):
    """An environment that lies in somebody's repository."""
    git("commit", "--allow-empty", "--message=theirs")
    assert provenance.code_version() == provenance.__version__


def test_the_processor_has_a_name():
    assert provenance.cpu_name() in Path("/proc/cpuinfo").read_text() + platform.machine()
    assert provenance.cpu_name()
