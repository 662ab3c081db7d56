"""Checks of the values that users give: a name of several, a number in a range; each mistake is one InputError."""

import ctypes
import dataclasses
import difflib
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from t2t_jax.errors import InputError, shown


def choice(field: str, value: str, allowed: Iterable[str], is_open: bool = False) -> str:
    """Returns `value` if it is one of `allowed`, to which a script may add if `is_open`; else raises InputError.

    The message suggests the nearest.
    """
    allowed = list(allowed)
    if value in allowed:
        return value
    near = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    own = "; one of your own needs the script that adds it, to read its runs too (CONTRIBUTING.md)" if is_open else ""
    raise InputError(f"{field}: unknown value {value!r}; {hint}known: {', '.join(allowed)}{own}")


@dataclasses.dataclass(frozen=True)
class Range:
    """The finite numbers from `least` to `most`; both ends belong to it unless declared open.

    To an open end belongs what float32, in which devices compute, does not tell from it.
    `hint` says what a value outside it may have been meant for.
    """

    least: float
    most: float | None = None
    open_below: bool = False
    open_above: bool = False
    hint: str = ""

    def __contains__(self, value: Any) -> bool:
        if isinstance(value, float) and not math.isfinite(value):
            return False
        rounded = _in_float32(value) if isinstance(value, float) else value
        if (self.open_below and rounded <= self.least) or (self.open_above and rounded >= self.most):
            return False
        return value >= self.least and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        least = f"{'above' if self.open_below else 'at least'} {self.least}"
        return least if self.most is None else f"{least} and {'below' if self.open_above else 'at most'} {self.most}"

    def check(self, field: str, value: Any) -> None:
        """Raises InputError where the value of `field` is not in the range."""
        if value not in self:
            finite = "finite, " if isinstance(value, float) and not math.isfinite(value) else ""
            hint = self.hint and f" ({self.hint})"
            ends = (self.least, self.most)
            is_rounded = not finite and isinstance(value, float) and value not in ends and _in_float32(value) in ends
            rounded = f", which is {_in_float32(value):g} in float32" if is_rounded else ""
            raise InputError(f"{field} must be {finite}{self}{hint}; got {shown(value)}{rounded}")


def _in_float32(value: float) -> float:
    """The value in float32, where XLA replaces subnormal numbers with 0."""
    rounded = ctypes.c_float(value).value
    return rounded if abs(rounded) >= 2**-126 else 0.0


def check_ranges(ranges: Mapping[str, Range], values: Any, prefix: str = "") -> None:
    """Raises InputError for the first field of a dataclass that is out of its range, named `prefix` + its name."""
    types = {field.name: field.type for field in dataclasses.fields(values)}
    for name, allowed in ranges.items():
        check_number(prefix + name, getattr(values, name), allowed, types[name] is int)


def check_number(field: str, value: Any, allowed: Range, is_whole: bool) -> None:
    """Raises InputError where the value of `field` is not a number, if need be a whole one, of the range `allowed`."""
    if not isinstance(value, numbers.Integral if is_whole else numbers.Real):
        raise InputError(f"{field} must be a {'whole ' * is_whole}number; got {shown(value)}")
    allowed.check(field, value)
