"""TensorBoard event files.

Only tensorboardX's file format is used: its writer has a thread and a buffer, so a failing disk would go unnoticed. It
is imported where something is written: where PyTorch is installed, it imports that, which takes three seconds.
"""

import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class EventFile:
    """A new event file in a folder; TensorBoard drops what earlier files there hold for `first_step` and later."""

    def __init__(self, folder: Path, first_step: int):
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder.mkdir(exist_ok=True)
        self._path = folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
        self._append(
            Event(file_version="brain.Event:2"),
            Event(step=first_step, session_log=SessionLog(status=SessionLog.START)),
        )

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Appends the scalars of a step."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._append(Event(step=step, summary=Summary(value=values)))

    def _append(self, *events: Any) -> None:
        for event in events:
            event.wall_time = time.time()
        with self._path.open("ab") as file:
            file.write(b"".join(_record(event.SerializeToString()) for event in events))


def _record(data: bytes) -> bytes:
    """A record of a TFRecord file: the length and the data, each followed by its masked CRC-32C."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(data))
    checked = lambda part: part + struct.pack("<I", masked_crc32c(part))
    return checked(length) + checked(data)
