"""What `benchmarks.faults` does to runs: kills their process, damages their files, and looks at what is left."""

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from t2t_jax.errors import StopError

# A Transformer of a few thousand parameters on number words, saved at every second step.
_MODEL = {"num_layers": 1, "d_model": 16, "d_ff": 24, "num_heads": 2, "d_k": 8, "d_v": 8}
_WORDS = {
    "en": ["one", "two", "three", "four", "five", "six", "seven", "eight"],
    "de": ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht"],
}
_CONFIG = """
from configs import base_ende

def get_config():
    config = base_ende.get_config()
    for section, fields in {fields!r}.items():
        config[section].update(fields)
    return config
"""


class Outcome(NamedTuple):
    """Of some trials: how many ended as they should, how many lost something, and how many were wrong or a bug."""

    trials: int = 0
    survived: int = 0
    lost: int = 0
    wrong: int = 0

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(*(a + b for a, b in zip(self, other, strict=True)))


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
SURVIVED, LOST, WRONG = Outcome(1, 1), Outcome(1, 0, 1), Outcome(1, 0, 0, 1)


class Experiment:
    """A tiny experiment in a folder: its corpus, its config, and the processes that train it."""

    def __init__(self, folder: Path, steps: int = 60, keep: int = 2):
        self.folder, self.steps, self._keep = folder, steps, keep
        folder.mkdir(parents=True)
        rng = random.Random(0)
        for split, count in (("train", 300), ("dev", 12), ("test", 20)):
            numbers = [[rng.randrange(8) for _ in range(rng.randint(1, 6))] for _ in range(count)]
            for language, words in _WORDS.items():
                lines = [" ".join(words[n] for n in (line if language == "en" else line[::-1])) for line in numbers]
                (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n", "utf-8")
        (folder / "config.py").write_text(_CONFIG.format(fields=self._fields()))

    def _fields(self) -> dict[str, dict[str, Any]]:
        data = {split: str(self.folder / split) for split in ("train", "dev", "test")}
        data |= {"corpus": "files", "directory": str(self.folder / "stores"), "vocab_size": 340}
        return {
            "model": _MODEL,
            "data": data | {"tokens_per_batch": 128, "num_buckets": 2},
            "optimizer": {"warmup_steps": 10},
            "train": {"train_steps": self.steps, "log_interval": 1},
            "checkpoint": {"interval_minutes": 0.0, "interval_steps": 2, "keep": self._keep, "average_last": 1},
            "decode": {"max_extra_length": 4},
            "evaluate": {"interval_steps": 0, "samples": 0},
        }

    def start(self, run: str) -> "Command":
        """Trains in a process of its own; the same call resumes."""
        return Command([f"--config={self.folder}/config.py", f"--workdir={self.folder / run}"], self.folder / "log")

    def train(self, run: str) -> Path:
        """Trains to the end."""
        code, log = self.start(run).end()
        if code:
            raise RuntimeError(f"the run without a fault ended with {code}: {log}")
        return self.folder / run


class Command:
    """`main.py` in a process of its own, which has imported everything when it begins."""

    def __init__(self, arguments: Sequence[str], log: Path):
        self._log = log
        log.write_text("")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["main", "t2t_jax.training.loop"])
        self._process = context.Process(target=_main, args=(["main.py", *arguments], str(log)))
        self._process.start()

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    def signal(self, number: int) -> None:
        if self.is_running:
            os.kill(self._process.pid, number)

    def end(self, seconds: float = 300) -> tuple[int, str]:
        """The exit code, and what the process wrote."""
        self._process.join(seconds)
        if self.is_running:
            self._process.kill()
            self._process.join()
            return 124, "it hung"
        return self._process.exitcode, self._log.read_text(errors="replace")


def _main(arguments: list[str], log: str) -> None:
    import main
    from t2t_jax import signals

    signals.watch()  # as main.py does when it is the program
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os._exit(main.main(arguments))


# --- What a run holds --------------------------------------------------------------------------------------


def digest(tree: Any) -> str:
    """SHA-256 of all arrays of a tree."""
    import jax
    import numpy as np

    found = hashlib.sha256()
    for path, x in jax.tree.leaves_with_path(tree):
        found.update(jax.tree_util.keystr(path).encode() + np.ascontiguousarray(x).tobytes())
    return found.hexdigest()


def trained_to(run: Path) -> dict[str, Any]:
    """All that must be the same after a kill as without one: parameters, order of the batches, losses, scores."""
    from t2t_jax.checkpoints import Checkpoints

    checkpoints = Checkpoints(run / "checkpoints")
    step = checkpoints.newest_good(1)[0]
    saved = checkpoints.restore(step, checkpoints.param_shapes(step))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "step": step,
        "params": digest(saved.params),
        "batches": saved.metadata["progress"]["batches_crc32"],
        "losses": [(record["step"], record["loss"]) for record in records if "loss" in record],
        "result": json.loads((run / "result.json").read_text())["test"],
    }


# --- Kills -------------------------------------------------------------------------------------------------


def kills(folder: Path, count: int, seed: int, moment: str) -> Outcome:
    """Runs killed by SIGKILL `count` times in all, 'during a save' or at 'any moment', and resumed until they end.

    After each kill the newest complete checkpoint must be there and no older than before; at the end of a run, all must
    be as in a run that nobody killed.
    """
    rng, experiment = random.Random(seed), Experiment(folder)
    begun = time.monotonic()
    expected = trained_to(experiment.train("whole"))
    usual, outcome, number = time.monotonic() - begun, Outcome(), 0
    while outcome.trials < count:
        run, newest, number = folder / f"killed_{number}", 0, number + 1
        while True:
            process = experiment.start(run.name)
            if outcome.trials < count:
                wait_for_save(process, run, rng) if moment == "during a save" else time.sleep(rng.uniform(0, usual))
                process.signal(signal.SIGKILL)
            code, log = process.end()
            if code != -signal.SIGKILL:
                break
            good = newest_good(run)
            outcome += LOST if good < newest else _wrong(log) if "Traceback" in log else SURVIVED
            newest = good
        outcome += Outcome(0, -1, 0, 1) if code else _compared(run, expected)
        shutil.rmtree(run)
    return outcome


def wait_for_save(process: Command, run: Path, rng: random.Random) -> None:
    """Until a save has begun, and a random moment longer."""
    skipped = rng.randrange(12)
    while process.is_running:
        writing = [path for path in run.glob("checkpoints/*") if not path.name.isdecimal()]
        if writing and skipped == 0:
            time.sleep(rng.uniform(0, 0.05))
            return
        skipped -= bool(writing) and skipped > 0
        time.sleep(0.001)


def newest_good(run: Path) -> int:
    """The newest undamaged step; 0 without one."""
    from t2t_jax.checkpoints import Checkpoints

    return next(iter(Checkpoints(run / "checkpoints").newest_good(1)), 0)


def stops(folder: Path, count: int, seed: int, twice: bool) -> Outcome:
    """Runs asked to stop at random moments, or twice, the second time while they save; the same command resumes."""
    rng, experiment = random.Random(seed), Experiment(folder)
    begun = time.monotonic()
    expected = trained_to(experiment.train("whole"))
    usual, outcome, number = time.monotonic() - begun, Outcome(), 0
    while outcome.trials < count:
        run, number = folder / f"stopped_{number}", number + 1
        while True:
            process = experiment.start(run.name)
            if outcome.trials < count:
                time.sleep(rng.uniform(0.2, usual))  # not before it listens
                process.signal(rng.choice(_SIGNALS))
                if twice:  # more than a second later, as those within a second are one request
                    time.sleep(rng.uniform(1, 1.5))
                    process.signal(rng.choice(_SIGNALS))
            code, log = process.end()
            if code == 0:
                break
            outcome += SURVIVED if code == 3 and "Traceback" not in log else _wrong(f"exit code {code}: {log}")
        outcome += _compared(run, expected)
        shutil.rmtree(run)
    return outcome


def full_disks(folder: Path, count: int, seed: int) -> Outcome:
    """Disks that fill up while a run trains: one line, and with room again the same command ends the run.

    Needs the right to mount a file system, a small one in memory; without it nothing is tried.
    """
    rng, experiment = random.Random(seed), Experiment(folder)
    expected, outcome = trained_to(experiment.train("whole")), Outcome()
    run = folder / "disk" / "run"
    run.parent.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(run.parent)], capture_output=True)
    for _ in range(0 if mounted.returncode else count):
        process = experiment.start("disk/run")
        while process.is_running and not (run / "last_saved.json").exists():
            time.sleep(0.01)
        wait_for_save(process, run, rng)
        with contextlib.suppress(OSError), (run.parent / "filler").open("wb", buffering=0) as filler:
            while process.is_running:
                filler.write(bytes(1 << 12))
        code, log = process.end()
        is_one_line = code == 2 and "No space left on device" in log.splitlines()[-1] and "Traceback" not in log
        outcome += LOST if newest_good(run) == 0 else SURVIVED if is_one_line else _wrong(log)
        (run.parent / "filler").unlink()
        experiment.train("disk/run")
        outcome += _compared(run, expected)
        shutil.rmtree(run)
    if not mounted.returncode:
        subprocess.run(["umount", "--lazy", str(run.parent)], check=True)
    return outcome


def _compared(run: Path, expected: dict[str, Any]) -> Outcome:
    """Turns the last trial of a run into a wrong one if the run did not end as one without a fault."""
    found = trained_to(run)
    if found == expected:
        return Outcome()
    _wrong(f"{run}: {found} in place of {expected}")
    return Outcome(0, -1, 0, 1)


def _wrong(what: str) -> Outcome:
    print(what, file=sys.stderr)
    return WRONG


# --- Damage ------------------------------------------------------------------------------------------------

Damage = Callable[[bytearray, random.Random], bytearray | None]  # None: the file is deleted


def flip_a_bit(data: bytearray, rng: random.Random) -> bytearray:
    """One bit somewhere."""
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def zero_a_page(data: bytearray, rng: random.Random) -> bytearray:
    """4 KiB, or the whole of a smaller file."""
    start = rng.randrange(max(1, len(data) - 4095))
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    return data


def truncate(data: bytearray, rng: random.Random) -> bytearray:
    """Any number of bytes missing at the end."""
    return data[: rng.randrange(len(data))]


def delete(data: bytearray, rng: random.Random) -> None:
    """The file is gone."""


class Patient:
    """A finished run, its store and its corpus, each file of which can be damaged and healed."""

    def __init__(self, folder: Path):
        self.folder = folder
        experiment = Experiment(folder, steps=6, keep=3)
        self._run = experiment.train("run")
        code, log = Command(["--mode=evaluate", f"--workdir={self._run}"], folder / "log").end()
        assert code == 0, log
        self._clean = {name: probe() for name, probe in self._probes().items()}

    def kinds(self) -> dict[str, list[Path]]:
        """All files that anything is read from, by what they are."""
        found: dict[str, list[Path]] = {}
        for path in sorted(self._run.rglob("*")) + sorted(self.folder.glob("stores/*/*")):
            if path.is_file() and path.stat().st_size:
                inside = path.relative_to(self.folder).parts
                where = inside[1] if inside[0] == "run" else "store"
                found.setdefault(f"{where}/{path.suffix or path.name}" if len(inside) > 2 else where, []).append(path)
        return {kind: paths for kind, paths in found.items() if not kind.startswith(("tensorboard", ".lock"))}

    def try_damage(self, path: Path, damage: Damage, rng: random.Random) -> tuple[Outcome, str]:
        """Damages a file, reads everything, and heals it: whatever is still read must be what was read before."""
        whole = path.read_bytes()
        damaged = damage(bytearray(whole), rng)
        path.unlink() if damaged is None else path.write_bytes(damaged)
        try:
            for name, probe in self._probes().items():
                try:
                    found = probe()
                except StopError:
                    continue
                except Exception:
                    return WRONG, f"{path.relative_to(self.folder)}: {name}: {traceback.format_exc()}"
                if found != self._clean[name] and not self._is_less(name, found):
                    return WRONG, f"{path.relative_to(self.folder)}: {name}: {found} in place of {self._clean[name]}"
        finally:
            path.write_bytes(whole)
        return SURVIVED, ""

    def _is_less(self, name: str, found: Any) -> bool:
        """Whether it is an older checkpoint, or a log without its last lines, which a resumed run both says; or an
        evaluation that is not there."""
        if name == "metrics":
            return found == self._clean[name][: len(found)]
        if name == "evaluations":
            return all(evaluation in self._clean[name] for evaluation in found)
        return name == "resume" and found == self._clean[f"step {found[0]}"]

    def _probes(self) -> dict[str, Callable[[], Any]]:
        """Everything that reads a run, and what it makes of it."""
        import jax

        import t2t_jax
        from experiments.records import record_of, significance_against
        from t2t_jax.checkpoints import Checkpoints
        from t2t_jax.data.batching import Batches
        from t2t_jax.data.token_store import TokenStore
        from t2t_jax.decoding.translator import restore
        from t2t_jax.files import read_object
        from t2t_jax.run_folder import RunFolder

        run, checkpoints = RunFolder(self._run), Checkpoints(self._run / "checkpoints")
        (store,) = self.folder.glob("stores/*")

        def step(number):
            return number, digest(checkpoints.restore(number, checkpoints.param_shapes(number)).params)

        def resume():
            run.check_found(next(iter(checkpoints.newest_good(1)), None))
            good = checkpoints.newest_good(1)
            return step(good[0])

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
            "metrics": lambda: list(run._read_metrics()),
        }


def damages(folder: Path, count: int, seed: int, kinds_of_damage: Sequence[Damage]) -> Outcome:
    """`count` damaged files, the kinds of files in turn; says what was wrong."""
    rng, patient, outcome = random.Random(seed), Patient(folder), Outcome()
    kinds = patient.kinds()
    for _, kind in zip(range(count), itertools.cycle(sorted(kinds)), strict=False):
        found, what = patient.try_damage(rng.choice(kinds[kind]), rng.choice(kinds_of_damage), rng)
        outcome += found
        if what:
            print(what, file=sys.stderr)
    return outcome
