"""TensorBoard event files: TFRecords of protocol buffers (tensorflow/core/util/event.proto), encoded here.

A writer such as tensorboardX's has a thread and a buffer, so a failing disk would go unnoticed. Importing it also
imports PyTorch where that is installed, which takes more than a second.
"""

import ctypes
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path


class EventFile:
    """A new event file in a folder; TensorBoard drops what earlier files there hold for `first_step` and later."""

    def __init__(self, folder: Path, first_step: int):
        folder.mkdir(exist_ok=True)
        self._path = folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
        session_log = b"\x08\x01"  # status: START
        self._append(_event(0, _part(3, b"brain.Event:2")), _event(first_step, _part(7, session_log)))

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Appends the scalars of a step."""
        values = [_part(1, _part(1, name.encode()) + _simple_value(value)) for name, value in numbers.items()]
        self._append(_event(step, _part(5, b"".join(values))))

    def _append(self, *events: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(b"".join(_record(event) for event in events))


def _event(step: int, what: bytes) -> bytes:
    """An Event: wall_time, step, and one of file_version (field 3), summary (5) and session_log (7)."""
    return b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + what


def _simple_value(value: float) -> bytes:
    """A number in single precision: infinite where that has no number so large."""
    return b"\x15" + bytes(ctypes.c_float.__ctype_le__(value))


def _part(field: int, data: bytes) -> bytes:
    """A field of a message that is a string or a message itself."""
    return bytes([field << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the highest bit of a byte says that another follows."""
    *more, last = ((value >> shift) & 0x7F for shift in range(0, max(value.bit_length(), 1), 7))
    return bytes([*(bits | 0x80 for bits in more), last])


def _record(data: bytes) -> bytes:
    """A record of a TFRecord file: the length and the data, each followed by its masked CRC-32C."""
    length = struct.pack("<Q", len(data))
    checked = lambda part: part + struct.pack("<I", _masked_crc32c(part))
    return checked(length) + checked(data)


def _masked_crc32c(data: bytes) -> int:
    """Castagnoli's CRC, reflected, bit by bit; rotated and shifted by a constant, as TensorFlow masks it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
