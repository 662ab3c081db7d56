"""Files that are broken or made to break a reader, and what a command must answer to them."""

import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Values that no field of a shape may have; each is wrong in another way.
BAD_SIZES = (10**30, -1, 0, "6", None, 1.5, True, [6], {"n": 6}, float("nan"), float("inf"))


def refused(command: Callable[[], int], capfd: Any, *said: str) -> None:
    """Runs a command, which must end with code 2 or 4 and one line that has all of `said` in it."""
    capfd.readouterr()
    code = command()
    output, errors = capfd.readouterr()
    assert code in (2, 4) and output == ""
    lines = errors.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and len(lines[0]) < 2000, errors
    for words in said:
        assert words in lines[0], lines[0]


def edit_json(path: Path, **changes: Any) -> None:
    """Changes fields of a JSON object; a field becomes absent with the value `...`."""
    value = json.loads(path.read_text("utf-8")) | changes
    path.write_text(json.dumps({name: x for name, x in value.items() if x is not ...}), "utf-8")


def flip(path: Path, *places: float) -> None:
    """Inverts the byte at each place, given as a part of the file's length."""
    content = bytearray(path.read_bytes())
    for place in places:
        content[int(place * (len(content) - 1))] ^= 0xFF
    path.write_bytes(content)


def truncate(path: Path, part: float) -> None:
    """Keeps the first `part` of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])


def make_folder(path: Path) -> None:
    """A folder in place of a file: what can't be read, even by root."""
    path.unlink()
    path.mkdir()


def link_loop(path: Path) -> None:
    """A symbolic link to itself in place of a file."""
    path.unlink()
    path.symlink_to(path.name)


def raw_safetensors(path: Path, header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> None:
    """A safetensors file with any header; `length` is what it says of the header's length."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


def compress(path: Path) -> None:
    """Writes a zip file again with its members compressed, as a zip bomb has them."""
    with zipfile.ZipFile(path) as file:
        members = [(name, file.read(name)) for name in file.namelist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members:
            file.writestr(name, content)
