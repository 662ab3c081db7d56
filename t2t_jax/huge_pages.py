"""Memory in large pages, where Linux gives them only to programs that ask for them.

On CPU, XLA takes the memory of a step from the system and hands it back behind it, 0.9 GiB for the base model at 1,024
tokens. In pages of 4 KiB those are 230,000 faults a step, one tenth of its time; in pages of 2 MiB they are hundreds.
"""

import os
import sys
from pathlib import Path

_OFFER = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TUNABLE = "glibc.malloc.hugetlb"


def environment() -> dict[str, str]:
    """What makes glibc ask, as an addition to a program's environment; nothing where that is no use or decided."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if _TUNABLE in tunables or not _OFFER.exists() or "[madvise]" not in _OFFER.read_text():
        return {}
    return {"GLIBC_TUNABLES": ":".join(filter(None, [tunables, f"{_TUNABLE}=1"]))}


def ask() -> None:
    """Starts this program anew, as it was called, if it has yet to ask: glibc reads its tunables only then."""
    if added := environment():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | added)
