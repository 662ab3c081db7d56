import errno
import io
import json
import multiprocessing
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2t_jax import files
from t2t_jax.errors import InputError
from t2t_jax.files import (
    folder_lock,
    read_json,
    read_lines,
    read_object,
    try_lock,
    without_line_ends,
    write_bytes,
    write_json,
    write_lines,
    write_object,
)


@given(st.binary(max_size=200), st.integers(1, 50))
def test_any_bytes_are_read_as_lines_or_refused_with_the_line_number(data, longest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "LONGEST_LINE", longest)
        try:
            lines = list(read_lines(io.BytesIO(data), "input"))
        except InputError as error:
            number = int(str(error).partition("input, line ")[2].partition(":")[0])
            bad = data.split(b"\n")[number - 1]
            assert len(bad) > longest - 1 or bad.decode(errors="replace").encode() != bad
            return
    assert len(lines) == data.count(b"\n") + (not data.endswith(b"\n") and data != b"")
    assert "\n".join(lines) == data.removeprefix(b"\xef\xbb\xbf").decode().replace("\r\n", "\n").removesuffix("\n") or (
        b"\r" in data
    )


@pytest.mark.parametrize("folder", ["run/checkpoints", "/"])
def test_the_error_of_a_disk_names_it_even_where_nothing_there_can_be_asked_for(folder, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "stat", fail)
    refused = pytest.raises(InputError, match=r"^workdir: it failed \(Input/output error, on the disk of /.*\)$")
    with refused, files.storage_errors("it failed", Path(folder)):
        fail()


def test_a_byte_order_mark_is_dropped_at_the_beginning_and_nowhere_else():
    lines = list(read_lines(io.BytesIO("\ufeffone\n\ufefftwo \ufeff\n".encode()), "input"))
    assert lines == ["one", "\ufefftwo \ufeff"]


def test_an_endless_line_is_refused_at_the_length_limit():
    class Endless(io.RawIOBase):
        count = 0

        def readline(self, size=-1):
            assert 0 < size <= files.LONGEST_LINE + 1
            self.count += 1
            return b"one\n" if self.count == 1 else b"x" * size

    lines = read_lines(Endless(), "standard input")
    assert next(lines) == "one"
    with pytest.raises(InputError, match="standard input, line 2: more than 10,485,760 bytes"):
        next(lines)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_each_line_written_is_one_line_to_every_reader(tmp_path_factory, lines):
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    write_lines(path, lines)
    text = path.read_bytes().decode()
    assert text.splitlines() == text.split("\n")[:-1] == [without_line_ends(line) for line in lines]
    with path.open(encoding="utf-8") as file:
        assert len(list(file)) == len(lines)


def test_json_is_read_back_as_written(tmp_path):
    value = {"text": "a\u2028b\nc", "list": [1, 2.5]}
    write_json(tmp_path / "value.json", value)
    assert read_json(tmp_path / "value.json") == value
    assert (tmp_path / "value.json").read_text() == json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def test_a_path_that_is_not_utf8_is_read_back_from_json(tmp_path):
    """As configs and evaluations hold them; the file is UTF-8 all the same."""
    value = {"é": os.fsdecode(b"caf\xe9.de")}
    write_object(tmp_path / "value.json", value)
    assert read_object(tmp_path / "value.json") == value
    assert '"é": "caf\\udce9.de"' in (tmp_path / "value.json").read_text("utf-8")


def _remove_in_turn(folder: Path) -> None:
    """Takes the lock fifty times; each holder finds an empty folder, fills it, and removes it."""
    for _ in range(50):
        with folder_lock(folder):
            assert not list(folder.iterdir())
            (folder / "held").touch(exist_ok=False)
            shutil.rmtree(folder)


def test_processes_that_write_one_file_at_once_do_not_truncate_each_other(tmp_path, monkeypatch):
    """The second process writes while the first is about to rename what it has written."""
    replace = os.replace

    def interrupted(source, target):
        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        write_bytes(target, b"second")
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    write_bytes(tmp_path / "file", b"first")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"first"}


def test_a_folder_whose_holder_removes_it_is_locked_by_one_process_at_a_time(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_remove_in_turn, args=(tmp_path / "new" / "work",)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4


def test_a_folder_that_the_file_system_refuses_is_not_waited_for():
    with pytest.raises(FileNotFoundError), folder_lock(Path("/proc/none/folder")):
        pass


@pytest.mark.parametrize(
    "lock", [lambda folder: try_lock(folder / ".lock"), lambda folder: folder_lock(folder).__enter__()]
)
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, lock):
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(InputError, match=f"^{tmp_path}: its file system has no file locks .No locks available.; mount"):
        lock(tmp_path)


@pytest.mark.parametrize("path_of", [files.expanded, files.existing_file, files.check_output])
def test_a_path_in_the_home_folder_of_nobody_is_refused_by_field(path_of):
    with pytest.raises(InputError, match="^--output: '~nobody_at_all/x': no home directory is known for it; write ~/"):
        path_of("--output", "~nobody_at_all/x")


def test_an_output_that_no_file_can_be_is_refused_by_field(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for name, number in (("loop", errno.ELOOP), ("x" * 300, errno.ENAMETOOLONG)):
        with pytest.raises(InputError, match=f"^--output: .*: {os.strerror(number)}$"):
            files.check_output("--output", tmp_path / name)
