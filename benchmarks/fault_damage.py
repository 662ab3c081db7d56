"""Fault trials of `benchmarks.faults`: damages one file of a finished run, its token store or its corpus at a time."""

import itertools
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fault_trials import SURVIVED, WRONG, Outcome, digest
from benchmarks.tiny_experiment import Command, Experiment
from t2t_jax.errors import StopError

Damage = Callable[[bytearray, random.Random], bytearray | None]  # None deletes the file


def flip_a_bit(data: bytearray, rng: random.Random) -> bytearray:
    """Flips one random bit."""
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def zero_a_page(data: bytearray, rng: random.Random) -> bytearray:
    """Overwrites 4 KiB, or all of a smaller file, with zeros."""
    start = rng.randrange(max(1, len(data) - 4095))
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    return data


def truncate(data: bytearray, rng: random.Random) -> bytearray:
    """Removes a random number of bytes at the end."""
    return data[: rng.randrange(len(data))]


def delete(data: bytearray, rng: random.Random) -> None:
    """Deletes the file."""


class DamagedRun:
    """A finished run with its token store and corpus, whose files are damaged and restored."""

    def __init__(self, folder: Path):
        self.folder = folder
        experiment = Experiment(folder, steps=6, keep=3)
        self._run = experiment.train("run")
        code, log = Command(["--mode=evaluate", f"--workdir={self._run}"], folder / "log").wait()
        assert code == 0, log
        self._expected = {name: read() for name, read in self._readers().items()}

    def kinds(self) -> dict[str, list[Path]]:
        """All files that the readers use, grouped by kind."""
        found: dict[str, list[Path]] = {}
        for path in sorted(self._run.rglob("*")) + sorted(self.folder.glob("stores/*/*")):
            if path.is_file() and path.stat().st_size:
                parts = path.relative_to(self.folder).parts
                kind = parts[1] if parts[0] == "run" else "store"
                found.setdefault(f"{kind}/{path.suffix or path.name}" if len(parts) > 2 else kind, []).append(path)
        return {kind: paths for kind, paths in found.items() if not kind.startswith(("tensorboard", ".lock"))}

    def try_damage(self, path: Path, damage: Damage, rng: random.Random) -> tuple[Outcome, str]:
        """Damages a file, runs all readers and restores it. Returns the outcome, and what went wrong, if anything.

        Each reader must raise StopError or return the same as before the damage.
        """
        original = path.read_bytes()
        damaged = damage(bytearray(original), rng)
        path.unlink() if damaged is None else path.write_bytes(damaged)
        try:
            for name, read in self._readers().items():
                try:
                    found = read()
                except StopError:
                    continue
                except Exception:
                    return WRONG, f"{path.relative_to(self.folder)}: {name}: {traceback.format_exc()}"
                expected = self._expected[name]
                if found != expected and not self._is_permitted(name, found):
                    return WRONG, f"{path.relative_to(self.folder)}: {name}: {found} in place of {expected}"
        finally:
            path.write_bytes(original)
        return SURVIVED, ""

    def _is_permitted(self, name: str, found: Any) -> bool:
        """Whether a result may differ: a missing evaluation, or, as a resumed run warns, an older checkpoint or a log
        without its last lines."""
        if name == "metrics":
            return found == self._expected[name][: len(found)]
        if name == "evaluations":
            return all(evaluation in self._expected[name] for evaluation in found)
        return name == "resume" and found == self._expected[f"step {found[0]}"]

    def _readers(self) -> dict[str, Callable[[], Any]]:
        """All functions that read a run, with results that can be compared."""
        import jax

        import t2t_jax
        from experiments.records import record_of, significance_against
        from t2t_jax.checkpoints import Checkpoints
        from t2t_jax.data.batching import Batches
        from t2t_jax.data.token_store import TokenStore
        from t2t_jax.decoding.trained_model import restore
        from t2t_jax.files import read_object
        from t2t_jax.run_folder import RunFolder

        run, checkpoints = RunFolder(self._run), Checkpoints(self._run / "checkpoints")
        (store,) = self.folder.glob("stores/*")

        def step(number):
            return number, digest(checkpoints.restore(number).params)

        def resume():
            run.check_found(next(iter(checkpoints.newest_good(1)), None))
            return step(checkpoints.newest_good(1)[0])

        def translate(which):
            translator = t2t_jax.load(self._run, which)
            return [h[0].text for h in translator.translate(["one two", "three"], **run.decode_options())]

        def data():
            found = TokenStore(store)
            batches = Batches(found.source, found.target, tokens_per_batch=128, num_buckets=2, seed=0)
            return found.fingerprint, found.held_out("test"), [batches[n]["targets"].tolist() for n in range(3)]

        def weights(which):
            trained = restore(self._run, which)
            return jax.tree.map(str, trained.run.config), digest(trained.params)

        stored = lambda: [read_object(path) for path in sorted((self._run / "evaluations").iterdir())]
        return {
            **{f"step {number}": lambda number=number: step(number) for number in (2, 4, 6)},
            "resume": resume,
            "averaged": lambda: (weights(None), translate(None)),
            "last": lambda: weights("last"),
            "data": data,
            "result": lambda: record_of(self._run),
            "comparison": lambda: significance_against(self._run, self._run),
            "evaluations": stored,
            "metrics": run.metrics,
        }


def damages(folder: Path, count: int, seed: int, kinds_of_damage: Sequence[Damage]) -> Outcome:
    """Damages `count` files, taking the kinds of files in turn; prints what went wrong."""
    rng, run, outcome = random.Random(seed), DamagedRun(folder), Outcome()
    kinds = run.kinds()
    for _, kind in zip(range(count), itertools.cycle(sorted(kinds)), strict=False):
        found, error = run.try_damage(rng.choice(kinds[kind]), rng.choice(kinds_of_damage), rng)
        outcome += found
        if error:
            print(error, file=sys.stderr)
    return outcome
