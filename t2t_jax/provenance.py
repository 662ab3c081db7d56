"""The code version and hardware that are recorded with every result."""

import contextlib
import functools
import os
import platform
import subprocess
from pathlib import Path

from t2t_jax import __version__

# With these, which git sets for its hooks, git answers for another repository than that of its folder.
_OTHER_REPOSITORY = (
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_QUARANTINE_PATH",
)  # fmt: skip


def code_version() -> str:
    """The commit of the checkout, with '+' if it has uncommitted changes; else the release."""
    file = Path(__file__)
    git = ["git", "-C", str(file.parent)]
    environment = {name: value for name, value in os.environ.items() if name not in _OTHER_REPOSITORY}
    run = functools.partial(subprocess.run, capture_output=True, text=True, env=environment)
    try:
        # Installed, this file may lie in a checkout of something else.
        if run([*git, "ls-files", "--error-unmatch", file.name]).returncode:
            return __version__
        commit = run([*git, "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"])  # not by its tags
        return commit.stdout.strip() or __version__
    except OSError:  # git is not installed
        return __version__


def cpu_name() -> str:
    """The processor's model name on Linux; elsewhere its architecture."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
