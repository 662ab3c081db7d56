"""A Transformer of a few thousand parameters on number words, for tests and fault trials that need many runs."""

import multiprocessing
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# XLA's flags on a CPU: code of a tiny model takes longer to optimise than to run, half of the time to compile it would
# go into XLA's newer emitters of fused loops, and a third of the rest into 32 LLVM modules instead of one.
FAST_COMPILATION = (
    "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE --xla_cpu_parallel_codegen_split_count=1"
)
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


def config_source(fields: dict[str, dict[str, Any]]) -> str:
    """The source of a config file: the base model with other values of `fields`, {section: {field: value}}."""
    return _CONFIG.format(fields=fields)


class Experiment:
    """A folder with a tiny corpus, its config, and runs; a checkpoint is saved at every second step."""

    def __init__(self, folder: Path, steps: int = 60, keep: int = 2):
        self.folder, self.steps, self._keep = folder, steps, keep
        folder.mkdir(parents=True)
        rng = random.Random(0)
        for split, count in (("train", 300), ("dev", 12), ("test", 20)):
            numbers = [[rng.randrange(8) for _ in range(rng.randint(1, 6))] for _ in range(count)]
            for language, words in _WORDS.items():
                lines = [" ".join(words[n] for n in (line if language == "en" else line[::-1])) for line in numbers]
                (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n", "utf-8")
        (folder / "config.py").write_text(config_source(self._fields()))

    def _fields(self) -> dict[str, dict[str, Any]]:
        data = {split: str(self.folder / split) for split in ("train", "dev", "test")}
        data |= {"corpus": "files", "directory": str(self.folder / "stores"), "vocab_size": 340}
        return {
            "model": _MODEL,
            "data": data | {"tokens_per_batch": 128, "packing": False, "num_buckets": 2},
            "optimizer": {"warmup_steps": 10},
            "train": {"train_steps": self.steps, "log_interval": 1},
            "checkpoint": {"interval_minutes": 0.0, "interval_steps": 2, "keep": self._keep, "average_last": 1},
            "decode": {"max_extra_length": 4},
            "evaluate": {"interval_steps": 0, "samples": 0},
        }

    def start(self, run: str) -> "Command":
        """Starts a process that trains; called again, it resumes."""
        return Command([f"--config={self.folder}/config.py", f"--workdir={self.folder / run}"], self.folder / "log")

    def train(self, run: str) -> Path:
        """Trains to the last step and returns the run folder."""
        code, log = self.start(run).wait()
        if code:
            raise RuntimeError(f"the run without a fault exited with {code}: {log}")
        return self.folder / run


class Command:
    """`main.py` in a process forked from a server that has imported everything already."""

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

    def run_for(self, seconds: float) -> None:
        """Waits until it has run so long, or has ended."""
        self._process.join(seconds)

    def wait(self, seconds: float = 300) -> tuple[int, str]:
        """Exit code and output of the process; kills it after `seconds`."""
        self.run_for(seconds)
        if self.is_running:
            self._process.kill()
            self._process.join()
            return 124, "it hung"
        return self._process.exitcode, self._log.read_text(errors="replace")


def _main(arguments: list[str], log: str) -> None:
    import main
    from t2t_jax import signals

    signals.watch()  # as main.py does when it is run as a program
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os._exit(main.main(arguments))
