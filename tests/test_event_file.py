import math
import struct
import time

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from t2t_jax.event_file import EventFile


def events(path):
    """The events of a file, every length and every event against its CRC."""
    data, found = path.read_bytes(), []
    while data:
        (length,), body = struct.unpack("<Q", data[:8]), data[12:]
        assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(data[:8])
        assert struct.unpack("<I", body[length : length + 4])[0] == masked_crc32c(body[:length])
        found.append(Event.FromString(body[:length]))
        data = body[length + 4 :]
    return found


def test_numbers_are_in_the_file_as_soon_as_they_are_added(tmp_path):
    file = EventFile(tmp_path / "tensorboard", 7)
    file.add(7, {"loss": 2.5, "nll": 2.0})
    file.add(300, {"loss": 1.5, "perplexity": 1e300})
    (path,) = (tmp_path / "tensorboard").iterdir()
    version, start, *logged = events(path)
    assert version.file_version == "brain.Event:2"
    assert start.step == 7 and start.session_log.status == SessionLog.START
    assert start.wall_time == pytest.approx(time.time(), abs=60)
    assert [(e.step, {v.tag: v.simple_value for v in e.summary.value}) for e in logged] == [
        (7, {"loss": 2.5, "nll": 2.0}),
        (300, {"loss": 1.5, "perplexity": math.inf}),
    ]


def test_a_folder_that_cannot_be_written_to_is_an_error_at_once(tmp_path):
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(OSError):
        EventFile(tmp_path / "tensorboard", 1)
