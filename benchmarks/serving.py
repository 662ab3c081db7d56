"""The demo server under load: 32 clients against one, over HTTP, each with one sentence at a time.

    python -m benchmarks.serving [--output FILE.json] [--rounds 5] [--workdir runs/quickstart] [--seconds 10]

The server is `main.py --mode=serve` in a process of its own, the clients are threads of another. Rounds with one client
and with 32 are interleaved; in a first round, not counted, the server compiles. Every client sends its next sentence
when it has the answer to the last one. Latencies are those of all counted rounds. Without a trained run at --workdir it
is a model of the quickstart's size with random weights, whose translations are about as long as their sources.
"""

import contextlib
import http.client
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import measure
from benchmarks.measure import at_least
from t2t_jax.errors import exit_code_of

ROOT = Path(__file__).parents[1]
CLIENTS = (1, 32)
GOAL = 5  # times the throughput of one client


class Load(NamedTuple):
    """What the clients ask for: one of the sentences at a time, all with the same options."""

    sentences: Sequence[str]
    options: Mapping[str, int]


class Round(NamedTuple):
    """What the clients of a round saw."""

    throughput: float  # answers a second
    latencies: list[float]  # seconds
    lost: int  # requests without an answer


def main() -> None:
    parser = measure.argument_parser("benchmarks.serving", __doc__)
    parser.add_argument(
        "--rounds", type=at_least(1), default=5, help="measurements with each number of clients, interleaved"
    )
    parser.add_argument("--seconds", type=at_least(0.1), default=10.0, help="length of each")
    parser.add_argument("--workdir", default="runs/quickstart", help="a trained run")
    arguments = parser.parse_args()

    conditions = measure.conditions(["jax", "flax", "starlette", "uvicorn"])
    conditions |= {"rounds": arguments.rounds, "seconds": arguments.seconds}
    with tempfile.TemporaryDirectory() as directory:
        run = Path(arguments.workdir)
        if (run / "config.json").exists():
            load = Load(measure.test_set(run)[0], {})
        else:
            print(f"no trained run at {run}: random weights; `make quickstart` trains one")
            run = Path(directory, "random")
            load = Load(write_random_run(run), {"max_extra_length": 0})
        conditions |= {"workdir": run.name, "sentences": len(load.sentences)} | load.options
        print(conditions)
        with server(run) as port:
            rounds = take_turns(port, load, arguments.rounds, arguments.seconds)
    results = summary(rounds)
    print_table(rounds, results)
    measure.write(arguments.output, conditions, results)


@contextlib.contextmanager
def server(run: Path) -> Iterator[int]:
    """The port of a server of a run, in a process of its own."""
    words = [sys.executable, str(ROOT / "main.py"), "--mode=serve", f"--workdir={run.absolute()}", "--port=0"]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            sys.stderr.write(line)
            if found := re.match(r"serving .* on http://127\.0\.0\.1:(\d+)/", line):
                break
        else:
            raise RuntimeError(f"the server ended with code {process.wait()}")
        threading.Thread(target=shutil.copyfileobj, args=(process.stderr, sys.stderr), daemon=True).start()
        wait_until_warm(int(found[1]))
        yield int(found[1])
    finally:
        process.terminate()
        process.wait()


def wait_until_warm(port: int) -> None:
    """Returns when the server has compiled its usual shapes."""
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
            if json.load(answer)["warm"]:
                return
        time.sleep(0.5)


def take_turns(port: int, load: Load, rounds: int, seconds: float) -> dict[int, list[Round]]:
    """The counted rounds of each number of clients, after one of each that is not."""
    counted = {clients: [] for clients in CLIENTS}
    if not is_answered(http.client.HTTPConnection("127.0.0.1", port), load.sentences[:1], load.options):
        raise RuntimeError("the server does not translate; see its log above")
    for clients in CLIENTS:
        ask(port, load, clients, seconds)
    for turn in range(rounds):
        for clients in CLIENTS:
            counted[clients].append(ask(port, load, clients, seconds))
        if sys.stderr.isatty():
            print(f"round {turn + 1} of {rounds}", end="\r", file=sys.stderr)
    return counted


def ask(port: int, load: Load, clients: int, seconds: float) -> Round:
    """A round in which so many clients ask, one sentence after another, for a time; answers under way are awaited."""
    latencies: list[float] = []
    lost: list[int] = []
    begun = time.perf_counter()

    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        order = np.random.default_rng(number).permutation(len(load.sentences))
        for turn in range(sys.maxsize):
            asked = time.perf_counter()
            if asked - begun > seconds:
                break
            source = load.sentences[order[turn % len(order)]]
            if is_answered(connection, source, load.options):
                latencies.append(time.perf_counter() - asked)
            else:
                lost.append(number)
        connection.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Round(len(latencies) / (time.perf_counter() - begun), latencies, len(lost))


def is_answered(connection: http.client.HTTPConnection, source: str | list[str], options: Mapping[str, int]) -> bool:
    """Whether the answer to a sentence, or to some, is a translation of it."""
    body = json.dumps({"source": source, **options})
    try:
        connection.request("POST", "/translate", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError):
        connection.close()  # the next request opens it again
        return False
    answers, sources = (value if isinstance(source, list) else [value] for value in (answer, source))
    return response.status == 200 and [each.get("source") for each in answers] == sources


def summary(rounds: dict[int, list[Round]]) -> dict[str, float]:
    """The numbers by name. The speedup is the median of the ratios of neighbouring rounds."""
    one, many = (rounds[clients] for clients in CLIENTS)
    ratios = [b.throughput / a.throughput for a, b in zip(one, many, strict=True)]
    results = {"clients_32_throughput_vs_one": statistics.median(ratios)}
    for clients, of_clients in rounds.items():
        latencies = [seconds for each in of_clients for seconds in each.latencies]
        results |= {
            f"clients_{clients}_requests_per_second": statistics.median(each.throughput for each in of_clients),
            **{f"clients_{clients}_p{p}_ms": 1000 * float(np.percentile(latencies, p)) for p in (50, 95, 99)},
        }
    results["requests"] = sum(len(each.latencies) + each.lost for of_clients in rounds.values() for each in of_clients)
    results["lost"] = sum(each.lost for of_clients in rounds.values() for each in of_clients)
    return results


def print_table(rounds: dict[int, list[Round]], results: dict[str, float]) -> None:
    print(f"\n{'clients':>8}{'requests/s':>12}{'p50 ms':>10}{'p95 ms':>10}{'p99 ms':>10}")
    for clients in rounds:
        cells = [results[f"clients_{clients}_{name}"] for name in ("requests_per_second", "p50_ms", "p95_ms", "p99_ms")]
        print(f"{clients:>8}{cells[0]:>12.1f}" + "".join(f"{cell:>10.0f}" for cell in cells[1:]))
    ratio = results["clients_32_throughput_vs_one"]
    print(f"throughput of 32 clients: {ratio:.1f} times that of one (goal: at least {GOAL})")
    print(f"requests: {results['requests']:,}; lost: {results['lost']:,}")


def write_random_run(path: Path) -> list[str]:
    """A run folder with random weights of configs/quickstart.py's model; returns sentences of its made-up words."""
    from benchmarks import decoding
    from configs import quickstart
    from t2t_jax.data.task import Vocabularies

    config = quickstart.get_config()
    size = config.data.vocab_size
    decoding.write_random_run(path, config.model, size, max_length=128)
    source, rng = Vocabularies.open(path).source, np.random.default_rng(0)
    return [source.decode(rng.integers(3, size, rng.integers(4, 15)).tolist()) for _ in range(200)]


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
