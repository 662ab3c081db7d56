"""Progress of long tasks, on standard error."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def progress_bar(items: Iterable[Any] | None = None, **options: Any) -> tqdm:
    """A tqdm bar, shown after 2 seconds; updated five times a second on a terminal, once a minute in a log file."""
    interval = 0.2 if sys.stderr.isatty() else 60
    options = {"file": sys.stderr, "delay": 2, "dynamic_ncols": True, "unit_scale": True} | options
    return tqdm(items, mininterval=interval, maxinterval=interval, **options)
