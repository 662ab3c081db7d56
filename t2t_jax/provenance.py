"""What a number was obtained with: without it no number means anything."""

import contextlib
import platform
import subprocess
from pathlib import Path

from t2t_jax import __version__


def code_version() -> str:
    """The commit of this code where it is a checkout, '+' appended if it was changed; else the release."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        done = subprocess.run(
            [*git, "describe", "--always", "--abbrev=40", "--dirty=+"], capture_output=True, text=True
        )
    except OSError:
        return __version__
    return done.stdout.strip() or __version__


def cpu_name() -> str:
    """The processor's model as Linux names it; elsewhere its architecture."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
