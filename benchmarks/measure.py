"""What every benchmark shares: systems in processes of their own, taking turns, and the machine's description."""

import contextlib
import datetime
import importlib.metadata
import multiprocessing
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from t2t_jax.files import write_json
from t2t_jax.provenance import code_version, cpu_name

_REST = 0.3  # seconds between turns, for the threads of the last one to go to sleep


class System:
    """One system in a process of its own, so that none's threads are in another's way."""

    def __init__(
        self,
        name: str,
        build: Callable[..., dict[str, Callable[[], Any]]],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
    ):
        """`build(*arguments)` makes the cases by name; each call of one is a measurement.

        `environment` is added to that of the process.
        """
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, build, arguments), daemon=True)
        with mock.patch.dict(os.environ, environment or {}):  # which it inherits
            self._process.start()

    def run(self, case: str) -> tuple[float, Any]:
        """(seconds, what the case returned)."""
        time.sleep(_REST)
        self._pipe.send(case)
        seconds, answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return seconds, answer

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def _serve(pipe: Any, build: Callable[..., dict[str, Callable[[], Any]]], arguments: tuple[Any, ...]) -> None:
    cases = build(*arguments)
    while True:
        case = pipe.recv()
        try:
            begun = time.perf_counter()
            answer = cases[case]()
            pipe.send((time.perf_counter() - begun, answer))
        except Exception as error:
            pipe.send((0.0, error))


@contextlib.contextmanager
def running(systems: Sequence[System]) -> Iterator[dict[str, System]]:
    """The systems by name, ended together."""
    try:
        yield {system.name: system for system in systems}
    finally:
        for system in systems:
            system.close()


def take_turns(systems: dict[str, System], case: str, rounds: int, before: str | None = None) -> dict[str, list[float]]:
    """Seconds of each system in each round, one system after the other; the first round warms up and is left out.

    `before` is a case that goes before each measurement, uncounted.
    """
    seconds = {name: [] for name in systems}
    for round_ in range(rounds + 1):
        for name, system in systems.items():
            if before:
                system.run(before)
            taken, _ = system.run(case)
            if round_:
                seconds[name].append(taken)
        if sys.stderr.isatty():
            print(f"{case}, round {round_} of {rounds}", end="\r", file=sys.stderr)
    return seconds


def ratio(seconds: dict[str, list[float]], ours: str, peer: str) -> float:
    """The median over the rounds of our time by theirs: below 1 is faster."""
    return statistics.median(a / b for a, b in zip(seconds[ours], seconds[peer], strict=True))


def alone(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float, float]:
    """(what it returned, seconds, peak memory in GiB) of a function in a process of its own, with its children."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measured, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise RuntimeError(f"{function.__name__} ended without an answer") from None
    finally:
        process.join()


def _measured(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    begun = time.perf_counter()
    peak, ended = [0.0], threading.Event()

    def watch():
        while not ended.wait(0.05):
            peak[0] = max(peak[0], sum(map(_resident_bytes, _family(os.getpid()))))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    answer = function(*arguments)
    seconds = time.perf_counter() - begun
    ended.set()
    watcher.join()
    pipe.send((answer, seconds, max(_own_peak_bytes(), peak[0]) / 2**30))


def _own_peak_bytes() -> int:
    """The most memory this process has had. What `getrusage` says begins with what the one that started it had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _family(pid: int) -> Iterator[int]:
    """A process and all that came from it."""
    yield pid
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in thread.read_text().split():
            yield from _family(int(child))


def _resident_bytes(pid: int) -> int:
    """Its own share of memory: what two processes have in common is counted half for each; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def conditions(packages: Sequence[str]) -> dict[str, Any]:
    """Where and when."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "commit": code_version(),
    }


def write(path: str | None, found_under: dict[str, Any], results: dict[str, float]) -> None:
    """The file other programs read, if one is asked for."""
    if path:
        write_json(Path(path), {"conditions": found_under, "results": results})
