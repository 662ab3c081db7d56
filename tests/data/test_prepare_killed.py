"""Preparing a corpus, killed again and again, ends with the bytes of an uninterrupted preparation."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data import toy_corpus

ROOT = Path(__file__).parents[2]
UNGUARDED = """
import sys
from pathlib import Path
from t2t_jax.data.preparation import open_store
from tests.runs import tiny_config
config = tiny_config(Path(sys.argv[1]))
config.data.train += "," + config.data.dev
open_store(config.data)
"""
# As --mode=prepare, but with shards so small that this corpus has twelve. While a file `hold` lies beside the script, a
# worker that comes to one of them touches `held` and waits: nothing ends before what the test does meanwhile.
PREPARE = """
import main, sys, time
from pathlib import Path
from t2t_jax import signals
from t2t_jax.data import shards
shards.SHARD_SIZE = 500
write_shard = shards._write_shard

def write_or_wait(encoding, path, number, pairs):
    while number == 5 and Path(__file__).with_name("hold").exists():
        Path(__file__).with_name("held").touch()
        time.sleep(0.01)
    return write_shard(encoding, path, number, pairs)

shards._write_shard = write_or_wait
if __name__ == "__main__":
    signals.watch()
    sys.exit(main.main(sys.argv))
"""


def start(prefixes, directory, script):
    fields = {**prefixes, "corpus": "files", "directory": directory, "vocab_size": 340, "vocab_pairs": 1000}
    fields |= {"cleaning.drop_near_duplicates": True, "cleaning.max_ratio": 2.0}
    arguments = [f"--config.data.{name}={value}" for name, value in fields.items()]
    command = [sys.executable, str(script), "--mode=prepare", f"--config={ROOT}/configs/base_ende.py", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def stores(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def members(pgid):
    """The processes of a group; one that has ended is none, even if nobody waits for it, as in some containers."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, group = stat.read_bytes().rpartition(b")")[2].split()[:3]
            if int(group) == pgid and state != b"Z":
                yield int(stat.parent.name)


def group_ends(pgid, seconds=10):
    """Whether all processes of a process group end within some seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(members(pgid)):
            return True
        time.sleep(0.05)
    return False


def start_and_hold(prefixes, directory, script):
    """A preparation that has begun and does not go on to its end while `hold` exists."""
    script.with_name("hold").touch()
    process = start(prefixes, directory, script)
    while not script.with_name("held").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.001)
    return process


def workers(process):
    return [int(pid) for pid in subprocess.check_output(["pgrep", "-f", "spawn_main", "-P", str(process.pid)]).split()]


def interrupted(process):
    """What an interrupted preparation says before it ends, with all its processes."""
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 3 and group_ends(process.pid), errors
    return [line for line in errors.splitlines() if line.strip() and "preparing" not in line]


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "prepare.py"
    path.write_text(PREPARE)
    yield path
    path.with_name("hold").unlink(missing_ok=True)


@pytest.mark.slow
def test_ten_sigkills_midway_do_not_change_the_store(tmp_path, script):
    prefixes = toy_corpus.write_splits(tmp_path, train=6000)
    begun = time.monotonic()
    whole = start(prefixes, tmp_path / "whole", script)
    out, err = whole.communicate()
    assert whole.returncode == 0, err
    took = time.monotonic() - begun
    assert "6,000 training pairs kept" in out and "dropped: near-duplicates" in out
    rng, directory, midway = random.Random(0), tmp_path / "killed", 0
    while midway < 10:  # a machine that is faster now than it was above ends some of them before their kill
        process = start(prefixes, directory, script)
        try:
            process.communicate(timeout=rng.uniform(0.2, 1.0) * took)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            midway += 1
        assert group_ends(process.pid), "a worker outlives its parent"
        for final in directory.glob("files-*"):
            assert stores(final) == stores(next((tmp_path / "whole").iterdir()))
            shutil.rmtree(final)
    last = start(prefixes, directory, script)
    assert last.wait() == 0
    assert stores(directory) == stores(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_to_the_process_group_ends_the_preparation_with_one_line(tmp_path, script, number):
    """Ctrl-C and Slurm's warning signal reach the worker processes too."""
    prefixes = toy_corpus.write_splits(tmp_path, train=6000)
    process = start_and_hold(prefixes, tmp_path / "stores", script)
    os.killpg(process.pid, number)
    assert interrupted(process) == [f"stopped by {number.name}; run the same command again"]


@pytest.mark.slow
def test_a_sigterm_that_reaches_the_workers_first_ends_the_preparation_with_its_line(tmp_path, script):
    """As where a scheduler signals one process after the other, or a busy machine runs a worker first."""
    prefixes = toy_corpus.write_splits(tmp_path, train=6000)
    script.write_text(f"from t2t_jax.data import shards\nshards._SIGNAL_SECONDS *= 3600\n{PREPARE}")
    process = start_and_hold(prefixes, tmp_path / "stores", script)
    for pid in workers(process):
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.3)
    process.terminate()
    assert interrupted(process) == ["stopped by SIGTERM; run the same command again"]


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_preparation_with_one_line_and_the_same_command_goes_on(tmp_path, script):
    """As the kernel kills it where memory runs out."""
    prefixes = toy_corpus.write_splits(tmp_path, train=6000)
    process = start_and_hold(prefixes, tmp_path / "killed", script)
    os.kill(workers(process)[0], signal.SIGKILL)
    [line] = interrupted(process)
    assert line.startswith("error: data: a worker process was killed")
    script.with_name("hold").unlink()
    for directory in (tmp_path / "killed", tmp_path / "whole"):
        assert start(prefixes, directory, script).wait() == 0
    assert stores(tmp_path / "killed") == stores(tmp_path / "whole")


def test_a_script_without_the_guard_is_refused_and_does_not_wait_for_itself(tmp_path):
    (tmp_path / "script.py").write_text(UNGUARDED)
    command, environment = [sys.executable, tmp_path / "script.py", tmp_path], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "InputError: worker processes import the script that prepares data; put what it does under if" in done.stderr
    assert "or ended by the error above" in done.stderr.splitlines()[-1]
