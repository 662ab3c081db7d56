"""--mode=prepare --launcher=slurm on a real Slurm, which tests/slurm_up.sh starts on this machine."""

import signal
import subprocess
import sys
import time

import pytest

from t2t_jax.data.preparation import open_store
from t2t_jax.errors import InputError
from t2t_jax.slurm import job_states, run_array
from tests.data import toy_corpus
from tests.test_resume import ROOT

pytest.importorskip("submitit")
pytestmark = pytest.mark.slurm


def start(directory, stores):
    """The launcher of three tasks, one core each, for 130,000 pairs: seven shards."""
    fields = {"corpus": "files", "directory": stores, "vocab_size": 340, "vocab_pairs": 300}
    fields |= {split: directory / split for split in ("train", "dev", "test")}
    command = [sys.executable, "main.py", "--mode=prepare", "--config=configs/base_ende.py"]
    command += [f"--config.data.{name}={value}" for name, value in fields.items()]
    command += ["--launcher=slurm", "--slurm=time=10,cpus_per_task=1,array_parallelism=3"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.02)


def content(store):
    return {path.name: path.read_bytes() for path in store.iterdir() if path.name != "manifest.json"}


def test_jobs_write_the_store_that_one_machine_writes_though_one_is_killed(tmp_path):
    toy_corpus.write_splits(tmp_path, train=130_000)
    shards = lambda: list(tmp_path.glob("stores/.*.unfinished/shard-*.npz"))

    process = start(tmp_path, tmp_path / "stores")
    wait(shards, process)
    process.send_signal(signal.SIGTERM)  # of the launcher: its jobs are cancelled, the shards stay
    assert process.wait(60) == 3, process.communicate()
    kept = {path.name: path.stat().st_mtime_ns for path in shards()}
    assert kept
    wait_until_idle()

    process = start(tmp_path, tmp_path / "stores")
    wait(lambda: "RUNNING" in job_states().values(), process)
    task = next(task for task, state in job_states().items() if state == "RUNNING")
    subprocess.run(["scancel", "--signal=KILL", task], check=True)
    output, errors = process.communicate(timeout=120)
    if process.returncode:  # unless it had already ended
        assert process.returncode == 3 and f"job {task} ended without a result" in errors, errors
        assert {path.name: path.stat().st_mtime_ns for path in shards()}.items() >= kept.items()
        wait_until_idle()
        process = start(tmp_path, tmp_path / "stores")
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and "130,000 of 130,000 training pairs kept" in output, errors

    [store] = (tmp_path / "stores").iterdir()
    data = dict(corpus="files", directory=str(tmp_path / "here"), vocab_size=340, vocab_pairs=300)
    data |= {split: str(tmp_path / split) for split in ("train", "dev", "test")}
    alone = open_store(base_data() | data)
    assert alone.directory.name == store.name and content(alone.directory) == content(store)


def refuse(index, count):
    if index == count - 1:
        raise InputError(f"data.train, line {index}: unreadable")


def test_the_error_of_a_job_is_the_error_of_the_launcher(tmp_path):
    with pytest.raises(InputError, match="^data.train, line 1: unreadable$"):
        run_array(refuse, tmp_path / "jobs", {"time": "10", "array_parallelism": "2"}, "test")
    with pytest.raises(InputError, match="--slurm: .*[Pp]artition"):
        run_array(refuse, tmp_path / "jobs", {"time": "10", "partition": "none"}, "test")
    with pytest.raises(InputError, match="--slurm: array_parallelism=0: must be the number of jobs"):
        run_array(refuse, tmp_path / "jobs", {"time": "10", "array_parallelism": "0"}, "test")
    wait_until_idle()


def base_data():
    from configs import base_ende

    return base_ende.get_config().data.to_dict()


def wait_until_idle():
    deadline = time.monotonic() + 60
    while job_states():
        assert time.monotonic() < deadline
        time.sleep(0.2)
