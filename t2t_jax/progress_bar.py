"""Progress of long tasks, on standard error."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def is_live() -> bool:
    """Whether standard error shows a bar in place, as terminals and notebooks do, or is a log file."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def progress_bar(items: Iterable[Any] | None = None, **options: Any) -> tqdm:
    """A tqdm bar, shown after 2 seconds; updated five times a second where it is live, once a minute in a log file."""
    interval = 0.2 if is_live() else 60
    options = {"file": sys.stderr, "delay": 2, "dynamic_ncols": True, "unit_scale": True} | options
    return tqdm(items, mininterval=interval, maxinterval=interval, **options)
