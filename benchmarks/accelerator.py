"""Everything to be known about one accelerator, by one command in under nine minutes: equalities first, then speed.

    python -m benchmarks.accelerator --output DIR [--only PART …] [--tiny] [-- FLAG …]

Each part is a process with a time limit, to which is added what the parts before it left of theirs. It writes
DIR/PART.json, again and again where it has several numbers, so that what an interrupted run has measured is there:

laws        the tests marked `accelerator`, on the device
rates       TFLOP/s of large matrix products in bfloat16, TB/s of a copy
training    steps of base and big at 25,000 + 25,000 tokens of packed rows: attention fused or not, base also without
            our compiler options and in buckets, in turns; then of PyTorch (scaled_dot_product_attention, fused Adam),
            with and without torch.compile
projection  hours of the paper's 100,000 and 300,000 steps, by the fastest of ours in DIR/training.json
decoding    sentences a second of base, beam 4, 64 forced steps, beside Hugging Face's MarianMTModel.generate
quickstart  seconds to the quickstart's BLEU, with --preset=gpu and the FLAGs: a corpus, where there is no network

PyTorch and transformers are left out where they are missing. `--tiny` is a rehearsal of the same code, on any machine.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import decoding, measure, training, training_batches
from benchmarks.data import default
from benchmarks.decoding import random_sources
from benchmarks.measure import System
from benchmarks.training_batches import Batch
from benchmarks.training_systems import TRAIN, JaxStep, Setting, TorchStep, accelerator, start, write_initial
from experiments import paper
from t2t_jax.errors import exit_code_of
from t2t_jax.files import write_json

ROOT = Path(__file__).parents[1]
CONDITIONS = "conditions.json"

Group = dict[str, tuple[JaxStep | TorchStep, list[Batch]]]  # training steps by name, each with its batches


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured; `seconds` are the time limits of the parts."""

    seconds: Mapping[str, int]
    matrix: int = 8192
    copied_gib: float = 2.0
    models: tuple[str, ...] = ("base", "big")
    shape: Mapping[str, int] = dataclasses.field(default_factory=dict)  # what is changed of them
    tokens: int = 25_000
    batches: int = 8
    bucket_shapes: int = 3  # of all buckets: each has to be compiled
    rounds: int = 3
    vocab_size: int = 32_000
    laws: tuple[str, ...] = ()  # pytest's options
    decoding_rows: tuple[int, ...] = (64, 256, 512, 1024)
    decoding_steps: int = 64
    quickstart: tuple[str, ...] = ()


WHOLE = Sizes({"laws": 110, "rates": 25, "training": 215, "projection": 5, "decoding": 90, "quickstart": 95})
TINY = Sizes(
    dict.fromkeys(WHOLE.seconds, 240), matrix=64, copied_gib=0.001, models=("base",),
    shape={"num_layers": 1, "d_model": 32, "d_ff": 64, "num_heads": 4, "d_k": 8, "d_v": 8},
    tokens=512, batches=2, rounds=1, vocab_size=400, decoding_rows=(4,), decoding_steps=4,
    laws=("-k", "twice"),
    quickstart=tuple(
        f"--config.{field}"
        for field in (
            "train.train_steps=4", "evaluate.interval_steps=0", "model.num_layers=1", "decode.beam_size=1",
            "decode.max_extra_length=0",
        )
    ),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, metavar="DIR", help="where the numbers are written as JSON")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="only these parts")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: a rehearsal")
    parser.add_argument("--here", action="store_true", help="run the one part in this process, without a time limit")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="after --: flags of main.py for the quickstart")
    arguments = parser.parse_args()
    folder, sizes = Path(arguments.output), TINY if arguments.tiny else WHOLE
    if arguments.here:
        (part,) = arguments.only
        sizes = dataclasses.replace(sizes, quickstart=(*sizes.quickstart, *arguments.flags))
        PARTS[part](Report(folder / f"{part}.json"), sizes)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONDITIONS, conditions())
    given, failed, deadline = [*["--tiny"] * arguments.tiny, "--", *arguments.flags], [], time.monotonic()
    for part in arguments.only:
        deadline += sizes.seconds[part]
        if not run_part(part, folder, deadline - time.monotonic(), given):
            failed.append(part)
    if failed:
        print(f"failed: {', '.join(failed)}; what they had measured is in {folder}", file=sys.stderr)
    return 1 if failed else 0


def conditions() -> dict[str, Any]:
    """What all parts are measured under."""
    # In a process of its own: here JAX would take the memory of the device that the systems under test need.
    (platform, kind), _, _ = measure.run_in_process(accelerator)
    packages = ["jax", "flax"] + [name for name in ("torch", "transformers") if importlib.util.find_spec(name)]
    return measure.conditions(packages) | {"platform": platform, "device": kind}


def run_part(part: str, folder: Path, limit: float, given: Sequence[str]) -> bool:
    """Runs a part in a process group of its own, within its time limit; returns whether it came to its end."""
    path, begun = folder / f"{part}.json", time.monotonic()
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.accelerator", f"--output={folder}", "--only", part, "--here"]
    print(f"=== {part}, at most {limit:.0f} s", flush=True)
    process = subprocess.Popen([*command, *given], cwd=ROOT, start_new_session=True)
    try:
        ended = f"exit code {code}" if (code := process.wait(limit)) else None
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        ended = f"not finished within {limit:.0f} s"
    measured = json.loads(path.read_text()) if path.exists() else {}
    seconds = round(time.monotonic() - begun, 1)
    write_json(path, measured | {"part_seconds": seconds} | ({"error": ended} if ended else {}))
    print(f"=== {part}: {ended or 'done'}, {seconds} s", flush=True)
    return ended is None


class Report:
    """The file of a part, beside that of the conditions."""

    def __init__(self, path: Path):
        self.path, self.conditions = path, json.loads(path.with_name(CONDITIONS).read_text())

    def write(self, results: Mapping[str, Any]) -> None:
        """Writes what has been measured so far."""
        write_json(self.path, {"conditions": self.conditions, "results": dict(results)})


# --- The parts ---------------------------------------------------------------------------------------------


def laws(report: Report, sizes: Sizes) -> None:
    """Equalities that must hold on any device."""
    command = [sys.executable, "-u", "-m", "pytest", "-vv", "tests/test_accelerator.py", *sizes.laws]
    environment, outcomes = os.environ | {"T2T_JAX_TEST_DEVICE": "1"}, {}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as tests:
        for line in tests.stdout:
            print(line, end="", flush=True)
            if outcome := re.match(r"\S+::(\S+) ([A-Z]+) ", line):
                outcomes[outcome[1]] = outcome[2].lower()
                report.write(outcomes)
    if tests.returncode:
        raise SystemExit(1)


def rates(report: Report, sizes: Sizes) -> None:
    """What the device can do, by which the other numbers are judged."""
    import jax
    import jax.numpy as jnp

    square = jax.random.normal(jax.random.key(0), (sizes.matrix, sizes.matrix)).astype(jnp.bfloat16)
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.bfloat16))
    numbers = jnp.zeros(int(sizes.copied_gib * 2**28), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    report.write(
        {
            "matrix_tflops": 2 * sizes.matrix**3 / seconds_of(product, square) / 1e12,
            "copy_tb_per_second": 2 * numbers.nbytes / seconds_of(copy, numbers) / 1e12,
        }
    )


def seconds_of(function: Callable[[Any], Any], argument: Any, calls: int = 20) -> float:
    """Median over five measurements of the seconds of a call, after one that compiles."""
    import jax

    jax.block_until_ready(function(argument))
    found = []
    for _ in range(5):
        begun = time.perf_counter()
        jax.block_until_ready([function(argument) for _ in range(calls)][-1])
        found.append((time.perf_counter() - begun) / calls)
    return statistics.median(found)


def train(report: Report, sizes: Sizes) -> None:
    """Seconds of a step and real target tokens a second, of a group of steps after another."""
    results, failed = {}, False
    for model, group in groups_of(sizes):
        try:
            results |= steps_of(model, group, sizes, report.conditions["platform"])
            report.write(results)
        except Exception:  # without memory for one group there may be enough for the next
            traceback.print_exc()
            failed = True
    if failed:
        raise SystemExit(1)


def groups_of(sizes: Sizes) -> list[tuple[str, Group]]:
    """Each model's steps: ours, which are in memory together, then each of PyTorch's alone."""
    sides = training_batches.sentences(None, sizes.vocab_size)
    ours = functools.partial(training_batches.ours, *sides, sizes.tokens)
    packed = ours(sizes.batches, num_buckets=1, packing=True)
    buckets = ours(sizes.bucket_shapes, num_buckets=default("num_buckets"))
    fused = JaxStep("bfloat16", fused_attention=True)
    both = {"fused": (fused, packed), "unfused": (JaxStep("bfloat16"), packed)}
    base_alone = {
        "fused, no compiler options": (dataclasses.replace(fused, compiler_options=False), packed),
        "fused, buckets": (fused, buckets),
    }
    groups = [(model, both | base_alone if model == "base" else both) for model in sizes.models]
    if importlib.util.find_spec("torch"):
        theirs = training_batches.theirs(*sides, sizes.tokens, sizes.batches)
        variants = training.torch_variants("bfloat16").items()
        groups += [(model, {name: (variant, theirs)}) for model in sizes.models for name, variant in variants]
    return groups


def steps_of(model: str, group: Group, sizes: Sizes, platform: str) -> dict[str, float]:
    """The numbers of a group, which is compiled at once and then takes turns."""
    shape, work = training.shape_of(model) | sizes.shape, {name: batches for name, (_, batches) in group.items()}
    with tempfile.TemporaryDirectory() as directory:
        setting = Setting(shape, sizes.vocab_size, sizes.tokens, sizes.rounds, platform, f"{directory}/initial.npz")
        measure.run_in_process(write_initial, setting)
        systems = start({name: variant for name, (variant, _) in group.items()}, setting, work)
        with measure.running(systems) as named:
            with concurrent.futures.ThreadPoolExecutor() as pool:
                list(pool.map(lambda system: system.run(TRAIN), named.values()))  # compiles
            taken = measure.take_turns(named, TRAIN, sizes.rounds)
    results = {}
    for name, seconds in taken.items():
        tokens = sum(int(np.count_nonzero(batch["targets"])) for batch in work[name])
        key = setting.result_name(f"{model} {name}")
        results[f"{key}_step_seconds"] = statistics.median(seconds) / len(work[name])
        results[f"{key}_target_tokens_per_second"] = tokens / statistics.median(seconds)
        print(f"{key}: {results[f'{key}_target_tokens_per_second']:,.0f} target tokens/s", flush=True)
    return results


def project(report: Report, sizes: Sizes) -> None:
    """Hours of the paper's steps, at the most tokens a second of ours; of a model without steps, nothing."""
    measured = json.loads(report.path.with_name("training.json").read_text())["results"]
    results = {}
    for model in sizes.models:
        rates = [
            rate for name, rate in measured.items()
            if f"{model}_" in name and "torch" not in name and name.endswith("tokens_per_second")
        ]  # fmt: skip
        if rates:
            hours = paper.train_steps(model) * sizes.tokens / max(rates) / 3600
            results[f"{model}_hours_of_the_papers_steps"] = hours
    report.write(results)


def decode(report: Report, sizes: Sizes) -> None:
    """Sentences a second at several numbers of rows, of one system after the other."""
    searches = {"ours": our_searches}
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        searches["transformers"] = their_searches
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        folders = {name: Path(directory, name) for name in searches}
        measure.run_in_process(write_models, folders, sizes)
        for name, build in searches.items():
            with measure.running([System(name, build, folders[name], sizes)]) as named:
                for rows in sizes.decoding_rows:
                    (seconds,) = measure.take_turns(named, str(rows), sizes.rounds).values()
                    results[f"{name}_{rows}_rows_sentences_per_second"] = rows / statistics.median(seconds)
                    report.write(results)


def write_models(folders: Mapping[str, Path], sizes: Sizes) -> None:
    """The same random model for each system, in its folder."""
    from t2t_jax.interop.export import export_run

    run = folders["ours"]
    decoding.write_random_run(run, sizes.shape, sizes.vocab_size, max_length=decoding.SOURCE)
    if "transformers" in folders:
        export_run(str(run), format="marian", output=str(folders["transformers"]), step=None)


def our_searches(run: Path, sizes: Sizes) -> dict[str, Callable[[], Any]]:
    from t2t_jax import load

    translator = load(str(run), dtype="bfloat16")

    def search(rows):
        decoding.forced_search(translator, random_sources(rows, sizes.vocab_size), 4, sizes.decoding_steps)

    return {str(rows): functools.partial(search, rows) for rows in sizes.decoding_rows}


def their_searches(folder: Path, sizes: Sizes) -> dict[str, Callable[[], Any]]:
    import torch
    from transformers import MarianMTModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = MarianMTModel.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    length = {"min_new_tokens": sizes.decoding_steps, "max_new_tokens": sizes.decoding_steps}

    @torch.inference_mode()
    def search(rows):
        ids = np.pad(
            random_sources(rows, sizes.vocab_size), ((0, 0), (0, 1)), constant_values=model.config.eos_token_id
        )
        ids = torch.as_tensor(ids, device=device)
        model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=4, length_penalty=0.0, **length)
        if device == "cuda":
            torch.cuda.synchronize()

    return {str(rows): functools.partial(search, rows) for rows in sizes.decoding_rows}


def quickstart(report: Report, sizes: Sizes) -> None:
    """The whole way: corpus, training, evaluation."""
    with tempfile.TemporaryDirectory() as directory:
        begun = time.monotonic()
        command = [sys.executable, "main.py", "--config=configs/quickstart.py", f"--workdir={directory}/run"]
        subprocess.run(
            [*command, "--preset=gpu", *sizes.quickstart], cwd=ROOT, stdout=subprocess.DEVNULL, check=True,
            env=os.environ | {"PIP_RETRIES": "0"},  # or it would take minutes to find that there is no network
        )  # fmt: skip
        seconds = time.monotonic() - begun
        result = json.loads(Path(directory, "run", "result.json").read_text())
        found = {name: result[name] for name in ("training_seconds", "target_tokens_per_second", "steps")}
        report.write({"seconds": seconds, "bleu": result["test"]["sacrebleu"]} | found)


PARTS = {
    "laws": laws, "rates": rates, "training": train, "projection": project, "decoding": decode,
    "quickstart": quickstart,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
