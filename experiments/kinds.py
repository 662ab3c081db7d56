"""What the values in a run's JSON files must be: such a file may be damaged, or not be what its name says."""

from collections.abc import Iterable, Mapping
from typing import Any

from t2t_jax.errors import DamagedError, shown

NUMBER, WHOLE, TEXT, LIST, OBJECT = "a number", "a whole number", "a line of text", "a list", "an object"


def is_number(value: Any) -> bool:
    """Whether it is a finite number, and none too large to be printed."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def is_plain(value: Any) -> bool:
    """Whether it can be shown in a line: a number, a line of text, true, false or null."""
    return value is None or isinstance(value, bool) or any(_is(kind, value) for kind in (NUMBER, TEXT))


def _is(kind: str, value: Any) -> bool:
    if kind in (NUMBER, WHOLE):
        return is_number(value) and (kind == NUMBER or isinstance(value, int))
    if kind == TEXT:
        return isinstance(value, str) and value.isprintable()
    return isinstance(value, {LIST: list, OBJECT: dict}[kind])


def check_kinds(values: Any, kinds: Mapping[str, str], where: str, needed: Iterable[str] = ()) -> dict[str, Any]:
    """Returns `values`, read from a file, if it is an object whose fields are of these kinds and has those needed."""
    if not isinstance(values, dict):
        raise DamagedError(f"{where} holds {shown(values)} in place of an object; it is damaged")
    for field in needed:
        if field not in values:
            raise DamagedError(f"{where} has no {field}; it is damaged, or not of this kind")
    for field, kind in kinds.items():
        if field in values and not _is(kind, values[field]):
            raise DamagedError(f"{where} is damaged: {field} is {shown(values[field])}; it must be {kind}")
    return values
