"""§5.1: parallel text of the user's own: two plain texts, tab-separated values or JSON lines, compressed or not."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from t2t_jax.errors import InputError, shown
from t2t_jax.files import COMPRESSIONS, compression, existing_file, expanded, lone_surrogate, unpacked, unpacked_lines


class ParallelText(NamedTuple):
    """Files of parallel text, and what streams their pairs (source, target).

    `check` refuses files that are empty or differ in their number of lines; it reads plain texts to their ends.
    """

    files: tuple[Path, ...]
    pairs: Callable[[], Iterator[tuple[str, str]]]
    check: Callable[[], None]


def parallel_text(field: str, name: str, languages: tuple[str, str]) -> ParallelText:
    """The text that `name` stands for; errors call it `field`.

    FILE.tsv has a pair a line, source and target separated by a tab; FILE.jsonl a JSON object a line,
    {"translation": {"en": …, "de": …}} or {"en": …, "de": …}. Any other name is a PREFIX: line n of PREFIX.en is
    translated by line n of PREFIX.de. Each file may be compressed: its name then ends with .gz, .bz2, .xz or .zst.
    """
    suffix, given = Path(name.removesuffix(compression(name))).suffix.lower(), f"{field}={name}"
    if suffix != ".tsv":  # which alone doesn't find its sides by their languages
        check_languages_differ(given, languages)
    parse = _PARSERS.get(suffix)
    if parse is None:
        sides = _sides(given, name, languages)
        check = functools.partial(_check_lines, given, sides)
        return ParallelText(sides, lambda: zip(*map(unpacked_lines, sides), strict=True), check)
    path = existing_file(field, name)
    return ParallelText(
        (path,), lambda: _parsed(parse, path, languages), functools.partial(_check_not_empty, given, path)
    )


def check_languages_differ(name: str, languages: tuple[str, str]) -> None:
    """Refuses one language for both sides of the corpus `name`, which would be the same text."""
    if languages[0] == languages[1]:
        raise InputError(
            f"data.source_language and data.target_language are both {languages[0]!r}, so that both sides of {name} "
            "would be one text; give two names of languages, or a .tsv file"
        )


# --- Two plain texts ---------------------------------------------------------------------------------------


def _sides(name: str, prefix: str, languages: tuple[str, str]) -> tuple[Path, Path]:
    """The files of both sides."""
    plain = [expanded(name, f"{prefix}.{language}") for language in languages]
    return tuple(_side(name, path, plain) for path in plain)


def _check_lines(name: str, sides: tuple[Path, Path]) -> None:
    """Refuses sides that are empty or have different numbers of lines."""
    source, target = map(_count_lines, sides)
    if source != target:
        raise InputError(
            f"{name}: {sides[0]} has {source} lines, {sides[1]} has {target}; line n must translate line n"
        )
    if source == 0:
        raise InputError(f"{name}: {sides[0]} is empty; give at least one sentence a side")


def _side(name: str, plain: Path, sides: list[Path]) -> Path:
    found = [path for suffix in ("", *COMPRESSIONS) if (path := Path(f"{plain}{suffix}")).is_file()]
    if not found:
        also = f"{', '.join([*COMPRESSIONS][:-1])} or {[*COMPRESSIONS][-1]}"
        advice = f"the PREFIX stands for {sides[0]} and {sides[1]}, each may also end with {also}"
        if (end := Path(plain.stem).suffix) and end in [side.suffix for side in sides]:
            advice = f"leave out {end}, the name is a PREFIX"
        raise InputError(f"{name}: no file {plain}; {advice}")
    if len(found) > 1:
        raise InputError(f"{name}: {found[0]} and {found[1]} are there; keep one of the two")
    return found[0]


def _count_lines(path: Path) -> int:
    count, last, has_returns = 0, b"\n", False
    with unpacked(path, str(path)) as file:
        while part := file.read(1 << 20):  # not line by line: a line may be of any length
            count, last, has_returns = count + part.count(b"\n"), part[-1:], has_returns or b"\r" in part
    if has_returns and not count:
        raise InputError(rf"{path}: lines end with CR alone, as on old Macs; end them with LF: tr '\r' '\n' < FILE")
    return count + (last != b"\n")


# --- A pair a line -----------------------------------------------------------------------------------------


def _check_not_empty(name: str, path: Path) -> None:
    if next(unpacked_lines(path), None) is None:
        raise InputError(f"{name}: {path} is empty; give at least one pair")


def _parsed(parse: Callable[..., Any], path: Path, languages: tuple[str, str]) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(unpacked_lines(path), start=1):
        yield parse(line, languages, f"{path}, line {number}")


def _columns(line: str, languages: tuple[str, str], where: str) -> tuple[str, str]:
    del languages
    columns = line.split("\t")
    if len(columns) != 2:
        raise InputError(f"{where}: {len(columns)} columns; a line must have two, the source, a tab and the target")
    return tuple(columns)


def _json_object(line: str, languages: tuple[str, str], where: str) -> tuple[str, str]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError(f"{where}: not JSON; {_like(languages)}") from None
    value = value.get("translation", value) if isinstance(value, dict) else None
    sides = [value.get(language) if isinstance(value, dict) else None for language in languages]
    for language, text in zip(languages, sides, strict=True):
        if not isinstance(text, str):
            raise InputError(f"{where}: {language} is {shown(text)}; {_like(languages)}")
        if (at := lone_surrogate(text)) is not None:  # JSON allows it: the text was cut between two UTF-16 units
            raise InputError(
                f"{where}: {text[at]!a} at character {at + 1} of {language} is a lone surrogate, half a character; "
                "remove it, or restore the other half"
            )
    return tuple(sides)


def _like(languages: tuple[str, str]) -> str:
    example = json.dumps({"translation": dict.fromkeys(languages, "…")}, ensure_ascii=False)
    return f"each line must be like {example}"


_PARSERS = {".tsv": _columns, ".jsonl": _json_object}
