"""Type checks of JSON that runs wrote: the file may be damaged, or be another file than its name says."""

from collections.abc import Iterable, Mapping
from typing import Any

from t2t_jax.errors import DamagedError, shown

NUMBER, INTEGER, BOOLEAN, TEXT = "a number", "a whole number", "true or false", "a line of text"
LIST, OBJECT = "a list", "an object"

_LARGEST = 1e300  # larger numbers overflow when they are scaled for printing


def is_number(value: Any) -> bool:
    """Whether the value is a finite number that can be printed."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LARGEST


def is_scalar(value: Any) -> bool:
    """Whether the value is a number, one line of text, true, false or null."""
    return value is None or isinstance(value, bool) or any(_has_type(value, type_) for type_ in (NUMBER, TEXT))


def _has_type(value: Any, type_: str) -> bool:
    if type_ in (NUMBER, INTEGER):
        return is_number(value) and (type_ == NUMBER or isinstance(value, int))
    if type_ == TEXT:
        return isinstance(value, str) and value.isprintable()
    return isinstance(value, {BOOLEAN: bool, LIST: list, OBJECT: dict}[type_])


def check_types(values: Any, types: Mapping[str, str], where: str, required: Iterable[str] = ()) -> dict[str, Any]:
    """Returns `values` if it is an object that has the required fields, and fields of these types.

    Raises DamagedError otherwise; `where` names the file in its message.
    """
    if not isinstance(values, dict):
        raise DamagedError(f"{where} holds {shown(values)} in place of an object; it is damaged")
    for field in required:
        if field not in values:
            raise DamagedError(f"{where} has no {field}; it is damaged, or a file of another kind")
    for field, type_ in types.items():
        if field in values and not _has_type(values[field], type_):
            raise DamagedError(f"{where} is damaged: {field} is {shown(values[field])}; it must be {type_}")
    return values


def check_names(values: Mapping[str, Any], where: str) -> None:
    """Refuses an object one of whose names can't be printed on one line."""
    for name in values:
        if not _has_type(name, TEXT):
            raise DamagedError(f"{where} is damaged: it has a field {shown(name)}")
