"""Whatever happens to one of several processes, the others end within the time limit, with a line that names it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from t2t_jax import peers
from t2t_jax.errors import InterruptedRun

ROOT = Path(__file__).parents[1]
LIMIT = 2.0

# What a process does once all are connected. "wait" sleeps in C, where Python runs no signal handler.
MEMBER = """
import ctypes, sys, time
from pathlib import Path
from t2t_jax import peers
from t2t_jax.errors import InputError, InterruptedProcess, InterruptedRun

class Files:
    def key_value_set(self, key, text):
        Path("new").write_text(text)
        Path("new").rename("address")
    def blocking_key_value_get(self, key, milliseconds):
        while not Path("address").exists():
            time.sleep(0.01)
        return Path("address").read_text()

number, count, act = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
others = peers.connect(number, count, "127.0.0.1:1", Files(), float(sys.argv[4]))
print("ready", flush=True)
with others.together():
    if act == "wait":
        ctypes.CDLL(None).sleep(60)
    elif act == "stop early":
        raise InterruptedRun("stopped by a signal")
    elif act != "leave":
        time.sleep(0.5)
        raise {"bad input": InputError, "lost worker": InterruptedProcess, "bug": RuntimeError}[act](act)
time.sleep(0.7 * (1 + (number + 1) % count))  # after they have left, the last one ends first, then 0, then 1
"""


@pytest.fixture
def start(tmp_path):
    """Starts one process for each act; kills those that are left at the end."""
    processes = []

    def start(*acts, limit=LIMIT):
        for number, act in enumerate(acts):
            command = [sys.executable, "-c", MEMBER, str(number), str(len(acts)), act, str(limit)]
            processes.append(
                subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            )  # fmt: skip
        for process in processes:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
        return processes

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def end_within(processes, seconds):
    """Exit code and standard error of each process; all must end within so many seconds."""
    deadline = time.monotonic() + seconds
    codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
    return [(code, process.stderr.read().strip()) for code, process in zip(codes, processes, strict=True)]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_process_is_detected_at_once(start, lost):
    processes = start("wait", "wait", "wait")
    processes.pop(lost).kill()
    for code, error in end_within(processes, 1.5):
        assert code == 3 and error.startswith(f"error: process {lost} on ") and "is gone" in error
        assert len(error.splitlines()) == 1


@pytest.mark.parametrize("lost", [0, 1])
def test_a_stopped_process_is_detected_after_the_time_limit_and_ends_when_it_continues(start, lost):
    processes = start("wait", "wait", "wait")
    stopped = processes.pop(lost)
    begun = time.monotonic()
    stopped.send_signal(signal.SIGSTOP)
    for code, error in end_within(processes, LIMIT + 2):
        assert code == 3 and f"error: process {lost} on " in error and "silent for 2 s (machine.peer_timeout" in error
    assert time.monotonic() - begun > 0.7 * LIMIT
    stopped.send_signal(signal.SIGCONT)
    assert end_within([stopped], 2)[0][0] == 3


def test_processes_that_are_all_stopped_for_a_while_continue(start):
    """A suspended job: time during which a process is stopped is not counted as silence of the others."""
    processes = start("wait", "wait", "wait")
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in processes:
            process.send_signal(number)
        time.sleep(1.5 * LIMIT)
    assert all(process.poll() is None for process in processes)


@pytest.mark.parametrize(("act", "code"), [("bad input", 2), ("lost worker", 3), ("bug", 1)])
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_one_process_ends_it_with_its_own_code_and_the_others_as_resumable(start, act, code, failing):
    acts = ["wait"] * 3
    acts[failing] = act
    ended = end_within(start(*acts), 8)
    for number, (found, error) in enumerate(ended):
        if number == failing:
            assert found == code and (error == f"error: {act}" if code != 1 else error.endswith(f"RuntimeError: {act}"))
        else:
            assert found == 3 and f"process {failing} on " in error and "stopped with an error of its own" in error


def test_an_error_that_stops_all_processes_is_printed_by_all(start):
    assert end_within(start("bad input", "bad input", "bad input"), 8) == [(2, "error: bad input")] * 3


def test_an_error_caused_by_a_lost_process_is_reported_as_the_lost_process(start):
    processes = start("bug", "bug", "wait")
    time.sleep(1.2)  # they have had the error by now
    processes.pop().kill()
    for code, error in end_within(processes, 4):
        assert code == 3 and "process 2 on " in error and "Traceback" not in error


def test_a_process_that_finishes_is_not_reported_as_lost(start):
    assert end_within(start("leave", "leave", "leave"), 8) == [(0, "")] * 3


def test_processes_that_all_stop_early_are_not_reported_as_lost(start):
    for code, error in end_within(start("stop early", "stop early"), 8):
        assert code == 1 and error.endswith("InterruptedRun: stopped by a signal")  # which main.py prints as a line


def test_a_port_that_cannot_be_reached_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    address = json.dumps({"port": port, "token": "t", "host": "h"})
    store = SimpleNamespace(blocking_key_value_get=lambda *_: address)
    with pytest.raises(InterruptedRun, match=rf"process 0 can't be reached at 127.0.0.1:{port} \(Connection refused\)"):
        peers.connect(1, 2, "127.0.0.1:1", store, 1.0)


@pytest.mark.parametrize(
    "hello", [b'{"token": "guess", "process": 1, "host": "x"}', '{"token": "é"}'.encode(), b"[" * 4000, b"\xff"]
)
def test_a_connection_without_the_token_is_refused(hello):
    """It does not keep the processes from connecting either."""
    with peers._listen("127.0.0.1") as listening:
        address = listening.getsockname()
        stranger, member = (socket.create_connection(address) for _ in range(2))
        stranger.sendall(hello + b"\n")
        member.sendall(b'{"token": "secret", "process": 1, "host": "y"}\n')
        found = []
        thread = threading.Thread(target=lambda: found.extend(peers._accept(listening, "secret", 1)))
        thread.start()
        thread.join(10)
        assert [peer.name for peer in found] == ["process 1 on y"]
        assert stranger.recv(1) == b"", "the stranger was let in"
        for connection in (stranger, member, found[0].connection):
            connection.close()
