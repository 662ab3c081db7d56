"""SIGTERM, Ctrl-C and Slurm's SIGUSR2 at any moment: exit code 3, nothing damaged, the same command resumes."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.tiny_experiment import FAST_COMPILATION
from t2t_jax import signals
from t2t_jax.training.loop import train
from tests.interop import models
from tests.runs import tiny_config
from tests.test_resume import assert_same_run, saved_steps, start

ROOT = Path(__file__).parents[1]
TERM, INT, USR2 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR2


@pytest.mark.parametrize(
    ("came", "requests"),
    [
        ([(TERM, 0)], 1),
        ([(USR2, 0)], 1),
        ([(TERM, 0), (TERM, 0.9)], 1),
        ([(TERM, 0), (INT, 0.1), (USR2, 0.2)], 1),
        ([(TERM, 0), (TERM, 1.1)], 2),
        ([(INT, 0), (INT, 0.6), (INT, 1.2)], 2),
        ([(USR2, 0), (TERM, 60)], 1),
        ([(USR2, 0), (USR2, 60)], 1),
        ([(TERM, 0), (USR2, 60)], 1),
        ([(USR2, 0), (TERM, 60), (TERM, 90)], 2),
    ],
)
def test_what_slurm_and_wrappers_send_together_is_one_request(monkeypatch, came, requests):
    counted = signals.Requests()
    for number, seconds in came:
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: seconds)
        counted.add(number)
    assert counted.count == requests


# --- Small programs ----------------------------------------------------------------------------------------

# Python runs no signal handler meanwhile. A signal ends the C function early, so it is called again.
SLEEP_IN_C = "import ctypes; print('ready', flush=True); list(map(ctypes.CDLL(None).sleep, [30] * 9))"


def run(program, first="ready"):
    """Starts a program and waits for its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == f"{first}\n", process.stderr.read()
    return process


@pytest.mark.parametrize("number", [TERM, INT, USR2])
def test_a_signal_is_handled_at_once_while_the_main_thread_is_in_c(number):
    process = run(f"from t2t_jax import signals; signals.watch(); {SLEEP_IN_C}")
    process.send_signal(number)
    assert process.wait(5) == 3
    assert process.stderr.read().strip() == f"stopped by {number.name}; run the same command again"


def test_a_signal_after_the_last_check_of_the_block_ends_the_program_after_it():
    program = """
import sys, time
from t2t_jax import errors, signals
def block():
    with signals.deferred(print):
        print('ready', flush=True)
        time.sleep(1)
    print('went on')
sys.exit(errors.exit_code_of(block))
"""
    process = run(program)
    process.send_signal(INT)
    assert process.wait(5) == 3 and "went on" not in process.stdout.read()
    assert "stopped by SIGINT; run the same command again" in process.stderr.read()


def test_outside_the_main_thread_no_signal_comes():
    block = "with signals.deferred(print) as stopped: print('ready', stopped(), flush=True)"
    program = f"import threading; from t2t_jax import signals\ndef train():\n    {block}\n"
    process = run(program + "thread = threading.Thread(target=train); thread.start(); thread.join()", "ready False")
    assert process.wait(5) == 0, process.stderr.read()


def test_an_ignored_warning_stays_ignored():
    """As `experiments/sweep/trial_process.py` starts a trial."""
    process = run(
        "import signal; signal.signal(signal.SIGUSR2, signal.SIG_IGN); "
        f"from t2t_jax import signals; signals.watch(); {SLEEP_IN_C}"
    )
    process.send_signal(USR2)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.kill()
    process.wait()


def test_a_signal_to_a_forked_child_does_not_reach_its_parent():
    fork = "import os, signal, time; child = os.fork()\nif not child: time.sleep(3); os._exit(0)"
    kill = "time.sleep(0.5); os.kill(child, signal.SIGTERM); print('child', os.wait()[1]); time.sleep(0.5)"
    process = run(f"from t2t_jax import signals; signals.watch(); print('ready', flush=True)\n{fork}\n{kill}")
    assert process.wait(5) == 0, process.stderr.read()
    assert process.stdout.read() == f"child {int(TERM)}\n"


def test_a_cleanup_runs_before_a_signal_ends_the_program_and_when_its_block_ends(tmp_path):
    program = """
import pathlib
from t2t_jax import signals
signals.watch()
remove = lambda name: signals.cleanup(pathlib.Path({folder!r}, name).unlink)
for name in ("outer", "inner", "ended"):
    pathlib.Path({folder!r}, name).touch()
with remove("ended"):
    pass
print(pathlib.Path({folder!r}, "ended").exists())
with remove("outer"), remove("inner"):
    {sleep}
""".format(folder=str(tmp_path), sleep=SLEEP_IN_C)
    process = run(program, first="False")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(TERM)
    assert process.wait(5) == 3 and not list(tmp_path.iterdir())


def test_an_error_in_a_cleanup_block_does_not_outrun_a_signal():
    """A clean-up may remove what the block works with; the error that follows must not end the program first."""
    program = """
import time
from t2t_jax import signals
signals.watch()
removed = []
def remove():
    removed.append(1)
    time.sleep(len(removed) == 1)
with signals.cleanup(remove):
    print("ready", flush=True)
    while not removed:
        pass
    1 / 0
"""
    process = run(program)
    process.send_signal(TERM)
    assert process.wait(5) == 3
    assert process.stderr.read().strip() == "stopped by SIGTERM; run the same command again"


def test_a_script_with_entries_of_its_own_is_stopped_as_main_is(tmp_path):
    """The script of CONTRIBUTING.md, while it reads a config."""
    (tmp_path / "config.py").write_text(f"def get_config():\n    {SLEEP_IN_C}\n")
    [script] = re.findall(r"^```python\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE)
    process = run(f"import sys; sys.argv = ['script.py', '--config={tmp_path}/config.py']\n{script}")
    process.send_signal(TERM)
    assert process.wait(5) == 3
    assert process.stderr.read().strip() == "stopped by SIGTERM; run the same command again"


# Each writes a file into the unfinished folder and then sleeps where no Python handler would run.
EXPORT = """
import runpy, sys
from t2t_jax.interop import export

def write(trained, folder):
    (folder / "file").write_text("half")
    {sleep}

export.need = lambda package: None
export._WRITERS["safetensors"] = (write, "safetensors")
sys.argv = ["main.py", "--mode=export", "--workdir={run}", "--format=safetensors", "--output={output}"]
runpy.run_path("main.py", run_name="__main__")
"""
IMPORT = """
import pathlib, runpy, sys
from t2t_jax import files

def existing_file(*_):
    pathlib.Path("{output}.partial/file").write_text("half")
    {sleep}

files.existing_file = existing_file
sys.argv = ["from_marian", "{run}", "{output}"]
runpy.run_module("t2t_jax.interop.from_marian", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [EXPORT, IMPORT], ids=["export", "import"])
def test_a_stopped_export_or_import_leaves_nothing_behind(tmp_path, program):
    models.random_run(tmp_path / "run")
    output = tmp_path / "new/out"
    process = run(program.format(run=tmp_path / "run", output=output, sleep=SLEEP_IN_C))
    assert [path.name for path in output.parent.rglob("*")] == ["out.partial", "file"]
    process.send_signal(TERM)
    _, errors = process.communicate(timeout=5)
    assert process.returncode == 3, errors
    assert errors.splitlines()[-1] == "stopped by SIGTERM; run the same command again" and "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# These write into a folder that nobody has named.
OPEN_MARIAN = """
from pathlib import Path
from t2t_jax import signals
from t2t_jax.interop import workdir

def write(path, folder):
    folder.mkdir()
    (folder / "weights").write_text("half")
    {sleep}

workdir.is_marian = lambda path: True
workdir.from_marian = write
signals.watch()
with workdir.run_folders("model"):
    pass
"""
DOWNLOAD = """
from pathlib import Path
from fsspec.implementations.memory import MemoryFileSystem
from t2t_jax import signals
from t2t_jax.object_store import mirrored

def get(system, names, paths):
    Path(paths[0]).write_text("half")
    {sleep}

MemoryFileSystem().pipe("/bucket/store/manifest.json", b"all")
MemoryFileSystem.get = get
signals.watch()
with mirrored("data.directory", "memory://bucket", Path("{folder}/store")):
    pass
"""


@pytest.mark.parametrize("program", [OPEN_MARIAN, DOWNLOAD], ids=["open", "download"])
def test_a_stopped_reader_leaves_no_temporary_folder_behind(tmp_path, monkeypatch, program):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = run(program.format(folder=tmp_path, sleep=SLEEP_IN_C))
    assert [path.read_text() for path in tmp_path.rglob("*") if path.is_file()] == ["half"]
    process.send_signal(TERM)
    assert process.wait(5) == 3, process.stderr.read()
    assert not list(tmp_path.iterdir())


# --- main.py -----------------------------------------------------------------------------------------------


def line_of(process, word):
    """Reads standard error up to a line with this word."""
    for line in process.stderr:
        if word in line:
            return
    raise AssertionError(f"{word!r} was never printed")


def catches_signals(process):
    """Whether the process has installed its handlers, as main.py does after its few imports."""
    mask = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())[1]
    return int(mask, 16) >> (USR2 - 1) & 1


@pytest.mark.slow
def test_a_start_can_be_stopped_anywhere_and_the_same_command_goes_on(tmp_path):
    """While importing, preparing data, compiling: at once, with a line and exit code 3."""
    run, moments = tmp_path / "run", []
    (tmp_path / "stores").mkdir()
    preparing = lambda _: any((tmp_path / "stores").iterdir())
    for number, moment in ((INT, catches_signals), (TERM, preparing), (USR2, "pieces;"), (TERM, "pieces;")):
        process = start(tmp_path, run)
        if callable(moment):
            while not moment(process):
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.001)
        else:
            line_of(process, moment)
        process.send_signal(number)
        begun = time.monotonic()
        _, errors = process.communicate(timeout=30)
        moments.append(time.monotonic() - begun)
        assert process.returncode == 3, errors
        assert errors.strip().splitlines()[-1] == f"stopped by {number.name}; run the same command again"
        assert "Traceback" not in errors
    assert max(moments) < 5
    process = start(tmp_path, run)
    assert process.wait(300) == 0, process.stderr.read()
    (tmp_path / "other").mkdir()
    whole = start(tmp_path / "other", tmp_path / "whole")
    assert whole.wait(300) == 0, whole.stderr.read()
    assert_same_run(run, tmp_path / "whole", 200)


# main.py, with a save that stops short of its manifest. Signals are listed in a file, and come together until a file
# `later` exists, however slowly the test sends them.
SLOW_SAVE = """
import pathlib, runpy, time
from t2t_jax import checkpoints, signals
folder, write, add = pathlib.Path({folder!r}), checkpoints.write_object, signals.Requests.add

def slow(path, value):
    if int(path.parent.stem) > 20:
        (folder / "saving").touch()
        time.sleep(60)
    write(path, value)

def listed(self, number):
    signals._ONE_REQUEST_SECONDS = 0 if (folder / "later").exists() else 3600
    count = add(self, number)
    with (folder / "signals").open("a") as file:
        print(number, file=file)
    return count

checkpoints.write_object, signals.Requests.add = slow, listed
runpy.run_path("main.py", run_name="__main__")
"""


@pytest.mark.slow
def test_a_second_signal_ends_a_save_and_the_checkpoint_before_it_is_intact(tmp_path):
    whole = start(tmp_path, tmp_path / "whole")
    assert whole.wait(300) == 0, whole.stderr.read()

    run, script, received = tmp_path / "run", tmp_path / "slow.py", tmp_path / "signals"
    script.write_text(SLOW_SAVE.format(folder=str(tmp_path)))
    process = start(tmp_path, run, program=str(script))

    def wait_until(condition):
        while not condition():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)

    wait_until((tmp_path / "saving").exists)
    burst = [USR2, TERM, TERM]  # one request
    for count, number in enumerate(burst, 1):
        process.send_signal(number)
        wait_until(lambda count=count: received.exists() and received.read_text().count("\n") == count)
    time.sleep(0.2)
    assert process.poll() is None
    (tmp_path / "later").touch()
    process.send_signal(TERM)
    assert process.wait(5) == 3
    assert [*map(int, received.read_text().split())] == [*burst, TERM]
    assert "stopped by SIGTERM; run the same command again" in process.stderr.read()
    assert saved_steps(run) == [20]

    process = start(tmp_path, run)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0 and "resuming from step 20" in errors, errors
    assert_same_run(tmp_path / "whole", run, 200)


@pytest.mark.slow
def test_a_stopped_translation_prints_a_line_and_keeps_what_was_translated(tmp_path):
    train(tiny_config(tmp_path), str(tmp_path / "run"))
    command = [sys.executable, "main.py", "--mode=translate", f"--workdir={tmp_path}/run"]
    environment = os.environ | {"XLA_FLAGS": FAST_COMPILATION, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    process.stdin.write("\n" * 2000 + "one two\n"), process.stdin.flush()
    assert process.stdout.readline() == "\n"
    process.send_signal(TERM)
    assert process.wait(5) == 3, "standard input is still open: nothing else ends it"
    _, errors = process.communicate(timeout=5)
    assert errors.splitlines()[-1] == "stopped by SIGTERM; run the same command again" and "Traceback" not in errors
