"""Runs and token stores in a bucket of an S3-compatible server, moto's, that these tests start."""

import json
import signal
import threading
import time
from pathlib import Path

import jax
import pytest

import t2t_jax
from t2t_jax import object_store
from t2t_jax.data.preparation import open_store
from t2t_jax.errors import DamagedError, InputError, InterruptedRun
from t2t_jax.remote_run import local_run
from t2t_jax.training.loop import train
from tests.runs import tiny_config
from tests.test_resume import assert_same_run, start

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("flask")
moto_core, moto_server = pytest.importorskip("moto.core"), pytest.importorskip("moto.server")
serving = pytest.importorskip("werkzeug.serving")

RUN = "s3://bucket/folder/run"
TEN_STEPS = "train__train_steps=10"


class Silent(serving.WSGIRequestHandler):
    def log_request(self, *_):
        pass


class Server:
    """moto's server; `before(method, path)` is called before each request."""

    def __init__(self):
        self._moto = moto_server.DomainDispatcherApplication(moto_server.create_backend_app)
        self._server = serving.make_server("127.0.0.1", 0, self._application, threaded=True, request_handler=Silent)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.before = lambda method, path: None

    def _application(self, environ, start_response):
        self.before(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        return self._moto(environ, start_response)

    def close(self):
        self._server.shutdown()


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A server with an empty bucket, whose address and keys are in the environment."""
    started = Server()
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    places = {"AWS_ENDPOINT_URL": started.url, "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    for name, value in (keys | places).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(object_store, "_WAITS", ())
    monkeypatch.setattr("tempfile.tempdir", None)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("bucket")
    yield started
    s3fs.S3FileSystem().rm("bucket", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()
    started.close()


def stored(folder="bucket/folder/run"):
    return {path.removeprefix(f"{folder}/") for path in s3fs.S3FileSystem(use_listings_cache=False).find(folder)}


def steps(names, folder="checkpoints"):
    return sorted({int(name.split("/")[1]) for name in names if name.startswith(f"{folder}/")})


def fetched(directory, url=RUN):
    """A copy of a run, to be looked into."""
    s3fs.S3FileSystem(use_listings_cache=False).get(url, str(directory), recursive=True)
    return directory


@pytest.mark.slow
def test_a_run_in_a_bucket_is_the_run_of_a_folder_and_all_modes_read_it(server, tmp_path, command, monkeypatch):
    """Trained for 6 steps, resumed on another machine to 10; its data are in the bucket as well."""
    config = tiny_config(tmp_path, train__train_steps=10)
    expected = train(config, str(tmp_path / "run"))
    config.data.directory = "s3://bucket/data"
    config.train.train_steps = 6
    train(config, RUN)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    config.train.train_steps = 10
    found = train(config, RUN)
    assert found["test"] == expected["test"] and found["averaged_steps"] == expected["averaged_steps"]
    assert_same_run(fetched(tmp_path / "copy"), tmp_path / "run", 10)
    assert steps(stored()) == [6, 8, 10] and steps(stored(), "averaged") == [10]
    there, here = stored(), {p.relative_to(tmp_path / "run").as_posix() for p in (tmp_path / "run").rglob("*")}
    top = lambda names: {name for name in names if "/" not in name and not name.startswith(".")}
    assert top(there) == top(here) - {"checkpoints", "averaged", "tensorboard"}
    assert len([name for name in there if name.startswith("tensorboard/")]) == 2, "one file of each process"
    assert not list(tmp_path.glob("t2t_jax_*")), "no copy is left"

    texts = ["one two", "three"]
    assert t2t_jax.load(RUN).translate(texts) == t2t_jax.load(str(tmp_path / "run")).translate(texts)
    code, output, errors = command("--mode=translate", f"--workdir={RUN}", "--step=6", stdin=b"one two\n")
    assert code == 0 and output.count("\n") == 1 and f"{RUN}: checkpoint 6" in errors
    both = f"--workdir={RUN},{tmp_path}/run"
    assert command("--mode=translate", both, "--step=last", stdin=b"one\n")[0] == 0
    code, output, errors = command("--mode=evaluate", f"--workdir={RUN}")
    kept = [name for name in stored() if name.startswith("evaluations/")]
    assert code == 0 and len(kept) == 1 and f"stored in {RUN}/{kept[0]}" in errors
    assert json.loads(output) == json.loads(command("--mode=evaluate", f"--workdir={tmp_path}/run")[1])
    evaluation = json.loads(s3fs.S3FileSystem().cat(f"bucket/folder/run/{kept[0]}"))
    assert evaluation["checkpoints"] == {RUN: "averaged checkpoint 10"}
    code, output, errors = command("--mode=average", f"--workdir={RUN}", "--steps=6,8")
    assert code == 0 and output == f"{RUN}/averaged/8: average of [6, 8]\n" and steps(stored(), "averaged") == [8]
    assert command("--mode=translate", f"--workdir={RUN}", "--step=4")[0] == 2


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    process = start(directory, directory / "run", fields=TEN_STEPS)
    assert process.wait(300) == 0, process.stderr.read()
    return directory / "run"


@pytest.mark.slow
@pytest.mark.parametrize("at", ["/checkpoints/4/params", "/checkpoints/4/manifest.json", "/last_saved.json"])
def test_a_trainer_killed_in_the_middle_of_a_save_resumes_from_a_whole_checkpoint(server, uninterrupted, tmp_path, at):
    """SIGKILL, sent by the server when a file of checkpoint 4, or the one after these, arrives there."""
    puts = []

    def kill(method, path):
        if method == "PUT" and puts.count("/bucket/folder/run/last_saved.json") == 1 and at in path:
            process.kill()
        puts.append(path)

    server.before = kill
    process = start(tmp_path, RUN, fields=TEN_STEPS)
    assert process.wait(300) == -signal.SIGKILL, process.stderr.read()
    server.before = lambda method, path: None
    time.sleep(1)  # for requests under way
    with local_run(RUN) as (copy, _):
        whole = sorted(int(path.name) for path in Path(copy, "checkpoints").iterdir())
    assert whole in ([2], [2, 4]) and (at == "/last_saved.json") <= (whole == [2, 4])
    process = start(tmp_path, RUN, fields=TEN_STEPS)
    assert process.wait(300) == 0, process.stderr.read()
    assert_same_run(fetched(tmp_path / "copy"), uninterrupted, 10)
    assert steps(stored()) == [6, 8, 10]


@pytest.mark.slow
def test_an_error_of_the_server_ends_the_run_in_one_line_and_it_resumes(server, tmp_path, monkeypatch):
    class Refused(Exception):
        pass

    def refuse(method, path):
        if method == "PUT" and "/checkpoints/4/" in path:
            raise Refused

    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    config = tiny_config(tmp_path)
    server.before = refuse
    with pytest.raises(InterruptedRun, match=f"workdir: {RUN}: .*; correct that, and run the same command again"):
        train(config, RUN)
    assert {name.split("/")[1] for name in stored() if name.endswith("/manifest.json")} == {"2"}
    server.before = lambda method, path: None
    train(config, RUN)
    train(config, str(tmp_path / "whole"))
    assert_same_run(fetched(tmp_path / "copy"), tmp_path / "whole", 6)


def test_a_run_whose_loss_is_no_number_leaves_its_log_in_the_bucket(server):
    with pytest.raises(DamagedError, match="nan"), local_run(RUN, trains=True) as (copy, _):
        Path(copy, "metrics.jsonl").write_text("its steps on the way there\n")
        raise DamagedError("step 7: the loss is nan")
    assert stored() == {"metrics.jsonl"}


@pytest.mark.parametrize("mode", ["train", "translate"])
def test_a_bucket_that_does_not_exist_or_may_not_be_used_is_one_line(server, tmp_path, mode, monkeypatch):
    def refused(url):
        with pytest.raises(InputError) as caught:
            train(tiny_config(tmp_path), url) if mode == "train" else t2t_jax.load(url)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    again = "correct that, and run the same command again"
    assert refused("s3://nowhere/run") == (
        f"workdir: s3://nowhere/run: not found (The specified bucket does not exist); {again}"
    )
    error = moto_core.set_initial_no_auth_action_count(0)(refused)(RUN)  # from then on, keys are checked
    assert error.startswith(f"workdir: {RUN}: no permission (")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    assert refused(RUN) == f"workdir: {RUN}: NoCredentialsError (Unable to locate credentials); {again}"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_folder_in_a_bucket_that_is_no_run_is_named_by_its_url(server):
    with pytest.raises(InputError, match=f"workdir: {RUN} is not a run folder"):
        t2t_jax.load(RUN)


def test_what_needs_a_shared_folder_refuses_a_url(server, tmp_path, command, monkeypatch):
    config = tiny_config(tmp_path, data__directory="s3://bucket/data")
    with pytest.raises(InputError, match=r"data.directory=s3://bucket/data: --launcher=slurm needs a folder"):
        open_store(config.data, on_slurm={"time": "60"})
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InputError, match=f"workdir: {RUN}: several processes need a folder that they share"):
        train(config, RUN)
