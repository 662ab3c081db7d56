import platform
import subprocess
from pathlib import Path

import pytest

from t2t_jax import provenance

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_the_commit_is_told_and_whether_the_code_was_changed():
    git = lambda *words: subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout
    changed = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    assert provenance.code_version() == git("rev-parse", "HEAD").strip() + changed


def test_outside_a_checkout_it_is_the_release(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    assert provenance.code_version() == provenance.__version__
    monkeypatch.setenv("PATH", str(tmp_path))  # no git at all
    assert provenance.code_version() == provenance.__version__


def test_the_processor_has_a_name():
    assert provenance.cpu_name() in Path("/proc/cpuinfo").read_text() + platform.machine()
    assert provenance.cpu_name()
