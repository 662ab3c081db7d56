"""§5.1: which training pairs are left out, and the report that says so.

Held-out pairs are never cleaned.
"""

import dataclasses
from collections.abc import Sequence


def is_empty(source: str, target: str) -> bool:
    """A side has nothing but white space."""
    return not source.strip() or not target.strip()


def is_too_long(source: Sequence[int], target: Sequence[int], max_length: int) -> bool:
    """A side has more than `max_length` subwords, EOS included."""
    return max(len(source), len(target)) > max_length


@dataclasses.dataclass
class Report:
    """How many training pairs were read, and how many each rule dropped."""

    read: int = 0
    empty: int = 0
    too_long: int = 0

    @property
    def kept(self) -> int:
        return self.read - self.empty - self.too_long

    def __str__(self) -> str:
        return (
            f"{self.kept:,} of {self.read:,} training pairs kept; "
            f"dropped {self.empty:,} with an empty side, {self.too_long:,} over data.max_length"
        )
