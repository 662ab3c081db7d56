"""Damaged and malicious files, and the check that a command refuses them."""

import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Invalid values for a size, each for another reason.
BAD_SIZES = (10**30, -1, 0, "6", None, 1.5, True, [6], {"n": 6}, float("nan"), float("inf"))


def refused(command: Callable[[], int], capfd: Any, *messages: str) -> None:
    """Runs a command, which must end with code 2 or 4 and one line that holds all of `messages`."""
    capfd.readouterr()
    code = command()
    output, errors = capfd.readouterr()
    assert code in (2, 4) and output == ""
    lines = errors.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and len(lines[0]) < 2000, errors
    for words in messages:
        assert words in lines[0], lines[0]


def edit_json(path: Path, **changes: Any) -> None:
    """Changes fields of a JSON object; a field becomes absent with the value `...`."""
    value = json.loads(path.read_text("utf-8")) | changes
    path.write_text(json.dumps({name: x for name, x in value.items() if x is not ...}), "utf-8")


def flip(path: Path, *positions: float) -> None:
    """Inverts the byte at each position, given as a fraction of the file's length."""
    content = bytearray(path.read_bytes())
    for position in positions:
        content[int(position * (len(content) - 1))] ^= 0xFF
    path.write_bytes(content)


def truncate(path: Path, part: float) -> None:
    """Keeps the first part of a file, a fraction of its length."""
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])


def make_folder(path: Path) -> None:
    """Replaces a file by a folder, which even root cannot read as a file."""
    path.unlink()
    path.mkdir()


def link_loop(path: Path) -> None:
    """Replaces a file by a symbolic link to itself."""
    path.unlink()
    path.symlink_to(path.name)


def raw_safetensors(path: Path, header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> None:
    """A safetensors file with any header; `length` is the declared length of the header."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


def compress(path: Path) -> None:
    """Compresses the members of a zip file, as in a zip bomb."""
    with zipfile.ZipFile(path) as file:
        members = [(name, file.read(name)) for name in file.namelist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members:
            file.writestr(name, content)
