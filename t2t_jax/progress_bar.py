"""How far a long task is, on standard error."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def progress_bar(items: Iterable[Any] | None = None, **options: Any) -> tqdm:
    """A tqdm bar, once it takes more than a moment: for people several times a second, in a log once a minute."""
    interval = 0.2 if sys.stderr.isatty() else 60
    options = {"file": sys.stderr, "delay": 2, "dynamic_ncols": True, "unit_scale": True} | options
    return tqdm(items, mininterval=interval, maxinterval=interval, **options)
