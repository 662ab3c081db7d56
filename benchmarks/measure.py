"""Shared by all benchmarks: systems in separate processes, interleaved measurements, conditions of a measurement."""

import argparse
import concurrent.futures
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from ml_collections import ConfigDict

from t2t_jax.argument_parser import argument_parser as plain_parser
from t2t_jax.files import write_json
from t2t_jax.provenance import code_version, cpu_name
from t2t_jax.threads import available_cores

_REST_SECONDS = 0.3  # before a measurement, until the threads of the previous system sleep


def argument_parser(module: str, description: str) -> argparse.ArgumentParser:
    """The parser of a benchmark, with --output, the path for `write`."""
    parser = plain_parser(module, description)
    parser.add_argument("--output", help="where to write the numbers as JSON")
    return parser


def at_least(least: float, multiple: int = 1) -> Callable[[str], float]:
    """The `type` of an argument: a number of the type of `least`, from it on, that is a `multiple` of another."""

    def number(text: str) -> float:
        value = type(least)(text)
        if not value >= least or (multiple > 1 and value % multiple):
            multiples = f" and a multiple of {multiple}" if multiple > 1 else ""
            raise argparse.ArgumentTypeError(f"must be at least {least}{multiples}; got {text}")
        return value

    return number


class System:
    """A system under test in a process of its own, so that the threads of one do not slow down another."""

    def __init__(
        self,
        name: str,
        build: Callable[..., dict[str, Callable[[], Any]]],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
    ):
        """`build(*arguments)` returns the cases by name; each call of a case is one measurement.

        `environment` has additional environment variables of the process. JAX takes memory of an accelerator as it
        needs it, since other systems need some too.
        """
        self.name = name
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | dict(environment or {})
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, build, arguments), daemon=True)
        _start(self._process, environment)

    def run(self, case: str) -> tuple[float, Any]:
        """(seconds, returned value) of a case."""
        time.sleep(_REST_SECONDS)
        try:
            self._pipe.send(case)
            seconds, answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError(f"{self.name} ended without an answer") from None
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


def _start(process: Any, environment: Mapping[str, str]) -> None:
    with mock.patch.dict(os.environ, environment):  # which it inherits
        process.start()


@contextlib.contextmanager
def running(systems: Sequence[System]) -> Iterator[dict[str, System]]:
    """The systems by name; their processes end with the block."""
    try:
        yield {system.name: system for system in systems}
    finally:
        for system in systems:
            system.close()


def run_at_once(systems: dict[str, System], case: str) -> None:
    """Runs a case of all systems at the same time: to compile, which is no measurement."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda system: system.run(case), systems.values()))


def take_turns(systems: dict[str, System], case: str, rounds: int, before: str | None = None) -> dict[str, list[float]]:
    """Seconds of each system in each round. Rounds are interleaved; a first round warms up and is not counted.

    `before` is a case that runs before each measurement, uncounted.
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
    """Median over the rounds of our time divided by the peer's; below 1 we are faster."""
    return statistics.median(a / b for a, b in zip(seconds[ours], seconds[peer], strict=True))


def fastest(seconds: Mapping[str, list[float]], names: Iterable[str]) -> str:
    """The name of these with the smallest median."""
    return min(names, key=lambda name: statistics.median(seconds[name]))


def paper_config(model: str) -> ConfigDict:
    """The config of the paper's base or big model (Table 2)."""
    from configs import base_ende, big_ende

    return {"base": base_ende, "big": big_ende}[model].get_config()


def test_set(run: Path) -> tuple[list[str], list[str]]:
    """Sources and references of a run's own test set."""
    from t2t_jax.data.preparation import open_store
    from t2t_jax.run_folder import RunFolder

    return open_store(RunFolder.open(run).config["data"]).held_out("test")


def run_in_process(
    function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
) -> tuple[Any, float, float]:
    """(returned value, seconds, peak memory in GiB) of a function in its own process, child processes included.

    `environment` has additional environment variables of the process.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(target=_measured, args=(sender, function, arguments))
    _start(process, environment or {})
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise RuntimeError(f"{function.__name__} ended without an answer") from None
    finally:
        process.join()


def _measured(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    begun = time.perf_counter()
    peak, ended = [0.0], threading.Event()

    def watch():
        while not ended.wait(0.05):
            peak[0] = max(peak[0], sum(map(_proportional_bytes, _process_tree(os.getpid()))))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    answer = function(*arguments)
    seconds = time.perf_counter() - begun
    ended.set()
    watcher.join()
    pipe.send((answer, seconds, max(_own_peak_bytes(), peak[0]) / 2**30))


def _own_peak_bytes() -> int:
    """Peak resident memory of this process, 0 where the kernel (gVisor) does not tell.

    `getrusage` is no use: its peak starts at that of the parent process.
    """
    return _bytes_in("/proc/self/status", "VmHWM:")


def _process_tree(pid: int) -> Iterator[int]:
    """The ids of a process and all its descendants."""
    yield pid
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for child in thread.read_text().split():
                yield from _process_tree(int(child))


def _proportional_bytes(pid: int) -> int:
    """Proportional set size: a page shared by n processes counts 1/n for each. 0 once the process has exited."""
    try:
        return _bytes_in(f"/proc/{pid}/smaps_rollup", "Pss:")
    except OSError:
        return 0


def _bytes_in(file: str | Path, field: str) -> int:
    lines = Path(file).read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def conditions(packages: Sequence[str]) -> dict[str, Any]:
    """Date, machine, versions and commit of a measurement."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "cores": available_cores(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "commit": code_version(),
    }


def write(path: str | None, conditions: dict[str, Any], results: dict[str, float]) -> None:
    """Writes the results as JSON, if a path is given."""
    if path:
        write_json(Path(path), {"conditions": conditions, "results": results})
