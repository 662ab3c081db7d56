"""Copies of folders in an object store: what each interrupted upload leaves is as it was before, or as it is after."""

import os
import re
import threading
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from t2t_jax import object_store
from t2t_jax.errors import InputError, InterruptedRun
from t2t_jax.files import folder_lock
from t2t_jax.object_store import RemoteFolder, local_copy, mirrored
from t2t_jax.remote_run import local_run, needed_to_read
from t2t_jax.temporary_folders import original_of

UNIT = re.compile("checkpoints/([0-9]+)/")
URL = "memory://bucket/run"


class Interrupted(Exception):
    """The process ended here."""


class InterruptedFileSystem(MemoryFileSystem):
    """Raises at a file to write or to delete, and ever after: `left` is how many come before it."""

    cachable = False
    left = None

    def count(self):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Interrupted

    def put_file(self, lpath, rpath, **options):
        self.count()
        super().put_file(lpath, rpath, **options)

    def rm_file(self, path):
        self.count()
        super().rm_file(path)

    def rm(self, path, recursive=False, maxdepth=None):
        for one in path:
            self.rm_file(one)


@pytest.fixture(autouse=True)
def empty_store(monkeypatch):
    monkeypatch.setattr(object_store, "_WAITS", ())
    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


@pytest.fixture
def interrupted(monkeypatch):
    """The number of files after which uploads end; None for never."""
    system = InterruptedFileSystem()
    connect = RemoteFolder._connect
    monkeypatch.setattr(RemoteFolder, "_connect", lambda folder: (system, connect(folder)[1]))
    return system


def write(folder, step, content, files=("manifest.json", "metadata", "params/d/one")):
    for name in files:
        path = folder / "checkpoints" / str(step) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content} {name}")
        os.utime(path, (step - step % 3, step - step % 3))  # 2 → 0, 4 → 3, 6 → 6


def remove(folder, step):
    for path in sorted((folder / "checkpoints" / str(step)).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def first_state(folder):
    write(folder, 2, "two")
    write(folder, 4, "four")
    (folder / ".lock").write_text("")
    for name, seconds in (("metrics.jsonl", 2), ("last_saved.json", 4)):  # before and after the checkpoint
        (folder / name).write_text("4 steps")
        os.utime(folder / name, (seconds, seconds))


def second_state(folder):
    """What the next save makes of it; checkpoint 4 is written again, with other files."""
    remove(folder, 4)
    write(folder, 4, "four again", files=("manifest.json", "metadata", "params/d/another"))
    write(folder, 6, "six")
    for name, seconds in (("metrics.jsonl", 5), ("last_saved.json", 7)):
        (folder / name).write_text("6 steps, longer")
        os.utime(folder / name, (seconds, seconds))
    remove(folder, 2)


def files_in(folder):
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def checkpoints(files):
    """{step: {name: content}}"""
    found = {}
    for name, content in files.items():
        if match := UNIT.match(name):
            found.setdefault(int(match[1]), {})[name] = content
    return found


def downloaded(folder):
    RemoteFolder("workdir", URL, folder, UNIT).download()
    return files_in(folder)


def test_every_interrupted_upload_leaves_whole_checkpoints_and_is_mended_by_the_next(tmp_path, interrupted):
    states = []
    for number, make in enumerate((first_state, second_state)):
        folder = tmp_path / f"state_{number}"
        first_state(folder)
        make(folder)
        states.append(files_in(folder))
    before, after = map(checkpoints, states)
    for count in range(100):
        MemoryFileSystem.store.clear()
        folder = tmp_path / f"trainer_{count}"
        first_state(folder)
        remote = RemoteFolder("workdir", URL, folder, UNIT)
        remote.upload("checkpoints/")
        second_state(folder)
        interrupted.left = count
        try:
            remote.upload("checkpoints/")
            break
        except InterruptedRun:
            interrupted.left = None
        found = downloaded(tmp_path / f"reader_{count}")
        for step, files in checkpoints(found).items():
            assert files in (before.get(step), after.get(step)), f"after {count} files"
        assert checkpoints(found) and found["metrics.jsonl"] in ("4 steps", "6 steps, longer")
        if 6 in checkpoints(found):
            assert found["metrics.jsonl"] == "6 steps, longer", "logged before the checkpoint"
        if found["last_saved.json"] == "6 steps, longer":
            assert 6 in checkpoints(found), "noted after the checkpoint"

        resumed = tmp_path / f"resumed_{count}"
        remote = RemoteFolder("workdir", URL, resumed, UNIT)
        remote.download()
        for step in checkpoints(files_in(resumed)):
            remove(resumed, step)
        second_state(resumed)
        remote.upload("checkpoints/")
        assert downloaded(tmp_path / f"later_{count}") == states[1]
        stored = {name.removeprefix("/bucket/run/") for name in MemoryFileSystem.store}
        assert stored == states[1].keys(), "nothing of the interrupted upload is left"
    assert count == 14, "3 of 4 deleted, 3 + 3 uploaded, two others, 3 of 2 deleted"


def test_only_what_has_changed_is_uploaded(tmp_path, interrupted):
    first_state(tmp_path / "run")
    remote = RemoteFolder("workdir", URL, tmp_path / "run", UNIT)
    remote.upload()
    interrupted.left = 0
    remote.upload()  # nothing
    interrupted.left = 1
    (tmp_path / "run" / "metrics.jsonl").write_text("longer than before")
    remote.upload()


def test_an_upload_that_fails_is_tried_again_unless_it_is_not_permitted(tmp_path, monkeypatch, interrupted):
    waits, errors = [], [ConnectionError("no network"), Interrupted("at last")]
    monkeypatch.setattr(object_store, "_WAITS", (10, 60))
    monkeypatch.setattr(object_store.time, "sleep", waits.append)

    def fail():
        if errors:
            raise errors.pop(0)

    monkeypatch.setattr(interrupted, "count", fail)
    first_state(tmp_path / "run")
    remote = RemoteFolder("workdir", URL, tmp_path / "run", UNIT)
    remote.upload()
    assert waits == [10, 60] and downloaded(tmp_path / "copy") == files_in(tmp_path / "run")

    (tmp_path / "run" / "metrics.jsonl").write_text("longer than before")
    errors.append(PermissionError("read only"))
    with pytest.raises(InputError, match=r"workdir: memory://bucket/run: no permission \(read only\); correct that"):
        remote.upload()
    errors += [ConnectionError("no network")] * 3
    with pytest.raises(InterruptedRun, match="no network"):  # exit code 3: a scheduler may start the command again
        remote.upload()
    assert len(waits) == 4


def test_a_run_outlives_an_outage_between_its_saves_and_is_uploaded_when_it_stops(monkeypatch, interrupted, caplog):
    network = True

    def check():
        if not network:
            raise ConnectionError("no network")

    monkeypatch.setattr(interrupted, "count", check)
    with pytest.raises(InterruptedRun, match="stopped"), local_run(URL, trains=True) as (path, publish):
        write(Path(path), 2, "two")
        publish()
        network = False
        write(Path(path), 4, "four")
        publish()
        assert "no network" in caplog.text and "the run goes on" in caplog.text
        network = True
        raise InterruptedRun("stopped by a signal")
    with local_run(URL) as (path, _):
        assert checkpoints(files_in(Path(path))).keys() == {2, 4}

    with pytest.raises(InterruptedRun, match="no network"), local_run(URL, trains=True) as (path, _):
        write(Path(path), 6, "six")
        network = False


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_an_error_of_any_operation_is_mended_by_the_next_try(tmp_path, monkeypatch, interrupted, lost):
    monkeypatch.setattr(object_store, "_WAITS", (0,))
    left = -1

    def failing(operation):
        def call(*arguments, **options):
            nonlocal left
            left -= 1
            if left == 0 and lost == "request":
                raise ConnectionError(f"{lost} lost")
            operation(*arguments, **options)
            manifests = [name for name in MemoryFileSystem.store if "checkpoints" in name and "manifest" in name]
            assert left < 0 or manifests, "there is always a complete checkpoint"
            if left == 0:
                raise ConnectionError(f"{lost} lost")

        return call

    for name in ("put_file", "rm_file"):
        monkeypatch.setattr(interrupted, name, failing(getattr(interrupted, name)))
    for number in range(1, 15):  # the second upload has 14 operations
        left = -1
        MemoryFileSystem.store.clear()
        folder = tmp_path / str(number)
        first_state(folder)
        remote = RemoteFolder("workdir", URL, folder, UNIT)
        remote.upload("checkpoints/")
        second_state(folder)
        left = number
        remote.upload("checkpoints/")
        assert left <= 0, "the error came"
        assert downloaded(tmp_path / f"copy_{number}") == files_in(folder)


def test_a_second_process_that_trains_is_refused(tmp_path):
    one, other = (RemoteFolder("workdir", URL, tmp_path / name, UNIT) for name in ("one", "other"))
    write(tmp_path / "one", 2, "mine")
    one.upload("checkpoints/")
    write(tmp_path / "other", 3, "mine")
    with pytest.raises(InputError, match=r"workdir: another process is writing to memory://bucket/run: checkpoints/2/"):
        other.upload("checkpoints/")
    assert checkpoints(downloaded(tmp_path / "reader")).keys() == {2}


def test_a_checkpoint_deleted_while_it_is_read_is_read_again_as_what_replaced_it(tmp_path, monkeypatch):
    first_state(tmp_path / "trainer")
    trainer = RemoteFolder("workdir", URL, tmp_path / "trainer", UNIT)
    trainer.upload()
    reader = RemoteFolder("workdir", URL, tmp_path / "reader", UNIT)
    calls = []

    def select(names):
        chosen = needed_to_read("last")(names)
        if not calls:
            calls.append(chosen)
            remove(tmp_path / "trainer", 4)
            write(tmp_path / "trainer", 6, "six")
            trainer.upload()
        return chosen

    reader.download(select)
    assert any("checkpoints/4/" in name for name in calls[0])
    assert set(reader._stamps) == {f"checkpoints/6/{n}" for n in ("manifest.json", "metadata", "params/d/one")} | {
        "metrics.jsonl",
        "last_saved.json",
    }


def test_a_reader_uploads_nothing_of_a_checkpoint_that_was_deleted_while_it_was_downloaded(tmp_path, monkeypatch):
    first_state(tmp_path / "trainer")
    trainer = RemoteFolder("workdir", URL, tmp_path / "trainer", UNIT)
    trainer.upload()
    download = MemoryFileSystem.get_file

    def replaced_meanwhile(self, remote, local, **options):
        download(self, remote, local, **options)
        if remote.endswith("checkpoints/4/manifest.json"):
            remove(tmp_path / "trainer", 4)
            write(tmp_path / "trainer", 6, "six")
            trainer.upload()

    monkeypatch.setattr(MemoryFileSystem, "get_file", replaced_meanwhile)
    with local_run(URL, needed_to_read("last")) as (folder, _):
        assert checkpoints(files_in(Path(folder))).keys() == {6}
    assert not any("checkpoints/4/" in name for name in MemoryFileSystem.store)


@pytest.mark.parametrize(
    ("step", "folder"),
    [(None, "averaged/6"), ("averaged", "averaged/6"), ("last", "checkpoints/10"), (4, "checkpoints/4")],
)
def test_readers_download_the_one_checkpoint_they_read(step, folder):
    checkpoints = ("averaged/6", "checkpoints/4", "checkpoints/8", "checkpoints/10")
    names = {f"{of}/{name}" for of in checkpoints for name in ("manifest.json", "params/x")}
    others = {"config.json", "vocab.model"}
    wanted = {f"{folder}/manifest.json", f"{folder}/params/x"} | others
    assert set(needed_to_read(step)(names | others | {"tensorboard/events"})) == wanted
    assert set(needed_to_read(None)(others)) == others


@pytest.mark.parametrize(
    "name", ["checkpoints/5/../../../../EVIL", "../x", "a/../x", "checkpoints/5/./x", "a//x", "//x", "..\\x"]
)
def test_names_that_lead_out_of_the_copy_are_refused_before_anything_is_written(tmp_path, name):
    for key in (name, "checkpoints/5/manifest.json", "config.json"):
        MemoryFileSystem.store[f"/bucket/run/{key}"] = MemoryFile(MemoryFileSystem(), f"/bucket/run/{key}", b"evil")
    remote = RemoteFolder("workdir", URL, tmp_path / "one" / "two" / "copy", UNIT)
    with pytest.raises(InputError, match=f"workdir: {URL}: the name .*(x|EVIL)' is not a path below it; delete"):
        remote.download()
    assert not any(tmp_path.iterdir())


def test_what_consoles_mark_folders_by_is_not_a_file(tmp_path, monkeypatch):
    first_state(tmp_path / "run")
    RemoteFolder("workdir", URL, tmp_path / "run", UNIT).upload()
    find = MemoryFileSystem.find
    markers = [f"/bucket/run/{name}" for name in ("", "checkpoints/", "checkpoints/2/")]
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *arguments: [*find(*arguments), *markers])
    assert downloaded(tmp_path / "copy") == files_in(tmp_path / "run")


def test_errors_name_the_url_and_the_copy_does_not_outlive_them():
    with pytest.raises(InputError, match=f"^workdir: {URL}/x is bad$"), local_copy(URL) as folder:
        folder.mkdir()
        assert original_of(folder) == URL
        raise InputError(f"workdir: {folder}/x is bad")
    assert not folder.parent.exists() and original_of(folder) == str(folder)


def test_a_store_is_made_once_and_taken_from_there_by_others(tmp_path, interrupted):
    for name in ("first", "second", "first"):
        folder = tmp_path / name / "store"
        interrupted.left = None if name == "first" and not folder.exists() else 0
        with mirrored("data.directory", "memory://bucket/data", folder):
            if not folder.exists():
                folder.mkdir(parents=True)
                (folder / "ids").write_text(f"made by the {name}")
                (folder / "manifest.json").write_text("all")
        assert files_in(folder) == {"ids": "made by the first", "manifest.json": "all"}
    assert not list((tmp_path / "second").glob(".*"))


def test_what_a_killed_download_leaves_is_removed_and_a_running_one_is_waited_for(tmp_path, capsys):
    MemoryFileSystem().pipe({f"/bucket/data/store/{name}": b"whole" for name in ("ids", "manifest.json")})
    left = tmp_path / ".store.download" / "store"
    left.mkdir(parents=True)
    (left / "older").write_text("half")

    def use():
        with mirrored("data.directory", "memory://bucket/data", tmp_path / "store"):
            found.append(files_in(tmp_path / "store"))

    found, thread = [], threading.Thread(target=use)
    with folder_lock(left.parent):
        thread.start()
        thread.join(1)
        assert thread.is_alive() and not found and list(left.iterdir()), "it may be in use"
    thread.join(60)
    left.mkdir(parents=True)  # of another process, killed after this one had begun to wait
    use()
    assert found == [{"ids": "whole", "manifest.json": "whole"}] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert "another process downloads store, to " in capsys.readouterr().err


def test_a_store_without_a_manifest_is_made_and_uploaded_again(tmp_path):
    MemoryFileSystem().pipe("/bucket/data/store/half", b"of it")
    folder = tmp_path / "store"
    with mirrored("data.directory", "memory://bucket/data", folder):
        assert not folder.exists()
        folder.mkdir()
        (folder / "manifest.json").write_text("all")
    assert list(MemoryFileSystem.store) == ["/bucket/data/store/manifest.json"]


def test_a_store_of_two_machines_is_uploaded_once_and_not_taken_while_it_is_deleted(tmp_path, monkeypatch):
    def prepared(machine):
        """A machine that has begun with an empty object store, and has made the token store."""
        mirror = mirrored("data.directory", "memory://bucket/data", tmp_path / machine / "store")
        mirror.__enter__()
        (tmp_path / machine / "store").mkdir(parents=True)
        for name in ("ids", "manifest.json"):
            (tmp_path / machine / "store" / name).write_text(f"made by the {machine} machine")
        return mirror

    first, second = prepared("first"), prepared("second")
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert set(MemoryFileSystem.store) == {"/bucket/data/store/ids", "/bucket/data/store/manifest.json"}
    assert MemoryFileSystem().cat("/bucket/data/store/ids") == b"made by the first machine"

    download = MemoryFileSystem.get_file

    def deleted_meanwhile(self, remote, local, **options):
        download(self, remote, local, **options)
        MemoryFileSystem.store.clear()

    monkeypatch.setattr(MemoryFileSystem, "get_file", deleted_meanwhile)
    folder = tmp_path / "third" / "store"
    with mirrored("data.directory", "memory://bucket/data", folder):
        assert not folder.exists(), "half of it"
        folder.mkdir()
        (folder / "manifest.json").write_text("all")
    assert set(MemoryFileSystem.store) == {"/bucket/data/store/manifest.json"}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("foo://bucket/run", "workdir: foo://bucket/run: no such kind of URL; s3:// and gs:// are known"),
        ("s3://bucket/run", r"workdir: s3://bucket/run needs another package: pip install 't2t_jax\[s3\]'"),
        ("abfs://bucket/run", r"workdir: abfs://bucket/run: can't be opened \(as fsspec does\)"),
        ("file:///bucket/run", "workdir: file:///bucket/run: give the path of the folder, /bucket/run"),
        ("S3://bucket/run", "workdir: S3://bucket/run: write s3:// or gs://, in lower case, with two slashes"),
        ("s3:/bucket/run", "workdir: s3:/bucket/run: write s3:// or gs://, in lower case, with two slashes"),
        ("memory://bucket/..", r"workdir: memory://bucket/..: . and .. are names in an object store; leave them out"),
    ],
)
def test_a_url_that_cannot_be_opened_is_one_line(url, message, tmp_path, monkeypatch):
    def url_to_fs(url, **options):
        raise (ImportError if url.startswith("s3") else ValueError)("as fsspec does")

    monkeypatch.setattr("fsspec.core.url_to_fs", url_to_fs)
    with pytest.raises(InputError, match=message), local_run(url):
        pass


def test_attempts_to_read_come_to_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "_ATTEMPTS", 3)
    first_state(tmp_path / "run")
    RemoteFolder("workdir", URL, tmp_path / "run", UNIT).upload()
    with pytest.raises(InputError, match="changes faster than it is read"):
        RemoteFolder("workdir", URL, tmp_path / "copy", UNIT).download(lambda names: [*names, "gone"])
