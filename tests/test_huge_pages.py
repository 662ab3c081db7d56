import platform
import subprocess
import sys
from pathlib import Path

import pytest

from t2t_jax import huge_pages

OFFERS = {kind: "always madvise never\n".replace(kind, f"[{kind}]") for kind in ("madvise", "always", "never")}


@pytest.fixture
def offer(monkeypatch, tmp_path):
    """Sets what Linux reports as its setting for huge pages."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setattr(huge_pages, "_SETTING", tmp_path / "enabled")
    return lambda kind: (tmp_path / "enabled").write_text(OFFERS[kind])


def test_huge_pages_are_requested_only_where_that_has_an_effect(offer):
    assert huge_pages.environment() == {}, "not Linux"
    offer("always")
    assert huge_pages.environment() == {}
    offer("never")
    assert huge_pages.environment() == {}
    offer("madvise")
    assert huge_pages.environment() == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def test_tunables_set_by_the_user_are_kept(offer, monkeypatch):
    offer("madvise")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    assert huge_pages.environment() == {"GLIBC_TUNABLES": "glibc.malloc.check=1:glibc.malloc.hugetlb=1"}
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    assert huge_pages.environment() == {}


PROGRAM = """
import os, sys
from t2t_jax import huge_pages
huge_pages.enable()
memory = bytearray(b"x") * 2**26
lines = open("/proc/self/smaps_rollup").read().splitlines()
print(os.getpid(), *sys.argv[1:], *(line.split()[1] for line in lines if line.startswith("AnonHugePages")))
"""


def test_a_program_is_re_executed_with_its_arguments_and_gets_huge_pages():
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split("."))) < (2, 35) or not huge_pages.environment():
        pytest.skip("needs Linux with transparent huge pages set to madvise, and glibc 2.35")
    command = [sys.executable, "-W", "error", "-c", PROGRAM, "--flag=a b", "*"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    found, _ = process.communicate(timeout=60)
    kibibytes = int(found.split()[-1])
    assert found == f"{process.pid} --flag=a b * {kibibytes}\n"
    assert kibibytes >= 2**15, "half of the 64 MiB"
