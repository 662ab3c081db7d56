"""Measures one accelerator in under nine minutes: speed, then tests of correctness.

    python -m benchmarks.accelerator --output DIR [--only PART …] [--tiny] [-- FLAG …]

Each part is a process with a time limit, to which is added what the parts before it left of theirs. It writes
DIR/PART.json, again and again where it has several numbers, so that what an interrupted run has measured is there:

rates       TFLOP/s of large matrix products in bfloat16, TB/s of a copy
training    steps of base and big at 25,000 + 25,000 tokens: ours in packed rows; then PyTorch's, compiled
            (scaled_dot_product_attention, fused Adam, sentences sorted by length)
projection  from DIR/training.json and DIR/rates.json: the share of the matrix rate that ours sustains, and the hours
            of the paper's 100,000 and 300,000 steps
decoding    sentences a second of base, beam 4, 64 forced steps, beside Hugging Face's MarianMTModel.generate
laws        the tests marked `accelerator`, on the device
quickstart  seconds to the quickstart's BLEU, with --preset=gpu and the FLAGs: a corpus, where there is no network
ablations   steps of base with XLA's attention, without our compiler options, in buckets of equal lengths; PyTorch's
            not compiled; only if named

PyTorch and transformers are left out where they are missing. `--tiny` is a rehearsal of the same code, on any machine.
"""

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
from typing import Any, NamedTuple

import numpy as np

from benchmarks import decoding, measure, training, training_batches
from benchmarks.data import PACKED, default
from benchmarks.training_batches import Batch
from benchmarks.training_systems import (
    TRAIN,
    JaxStep,
    Setting,
    TorchStep,
    accelerator,
    result_name,
    step_operations,
    system,
    write_initial,
)
from experiments import paper
from t2t_jax.argument_parser import argument_parser
from t2t_jax.errors import exit_code_of
from t2t_jax.files import write_json
from t2t_jax.threads import all_at_once

ROOT = Path(__file__).parents[1]
CONDITIONS = "conditions.json"
WARM_UP = "warm up"  # the case of a system that compiles the others
WITHOUT_DEVICE = {"JAX_PLATFORMS": "cpu"}  # environment variables


class Case(NamedTuple):
    """A training step and its batches."""

    model: str
    variant: JaxStep | TorchStep
    batches: list[Batch]


Group = dict[str, Case]  # by name: steps that are in memory together and take turns


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured; `seconds` are the time limits of the parts."""

    seconds: Mapping[str, int]
    matrix: int = 8192
    copied_gib: float = 2.0
    models: tuple[str, ...] = ("base", "big")
    shape: Mapping[str, int] = dataclasses.field(default_factory=dict)  # what is changed of them
    tokens: int = 25_000
    batches: int = 32  # of a measurement, which also has the launch of its first step
    bucket_shapes: int = 3  # of all buckets: each has to be compiled
    rounds: int = 3
    vocab_size: int = 32_000
    laws: tuple[str, ...] = ()  # pytest's options
    decoding_rows: tuple[int, ...] = (64, 256, 512, 1024)
    decoding_steps: int = 64
    quickstart: tuple[str, ...] = ()


WHOLE = Sizes(
    {
        "rates": 20, "training": 230, "projection": 5, "decoding": 120, "laws": 95, "quickstart": 70, "ablations": 160,
    }
)  # fmt: skip
TINY = Sizes(
    dict.fromkeys(WHOLE.seconds, 240), matrix=64, copied_gib=0.001, models=("base",),
    shape={"num_layers": 1, "d_model": 32, "d_ff": 64, "num_heads": 4, "d_k": 8, "d_v": 8},
    tokens=512, batches=2, rounds=1, vocab_size=400, decoding_rows=(4,), decoding_steps=4,
    laws=("-k", "twice or odd-bfloat16"),
    quickstart=tuple(
        f"--config.{field}"
        for field in (
            "train.train_steps=4", "evaluate.interval_steps=0", "model.num_layers=1", "decode.beam_size=1",
            "decode.max_extra_length=0",
        )
    ),
)  # fmt: skip


def main() -> int:
    parser = argument_parser("benchmarks.accelerator", __doc__)
    parser.add_argument("--output", required=True, metavar="DIR", help="where the numbers are written as JSON")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=USUAL, help="only these parts")
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
    (platform, kind, memory), _, _ = measure.run_in_process(accelerator)
    packages = ["jax", "flax"] + [name for name in ("torch", "transformers") if importlib.util.find_spec(name)]
    return measure.conditions(packages) | {"platform": platform, "device": kind, "memory_gib": memory}


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
        ended = f"not finished within {limit:.0f} s"
    finally:
        if process.poll() is None:  # after Ctrl-C too, which the terminal sends to this process group alone
            os.killpg(process.pid, 9)
            process.wait()
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
    pytest = ["-u", "-m", "pytest", "-vv", "-n", "4", "--tb=short", "-m", "accelerator", "tests/test_accelerator.py"]
    command = [sys.executable, *pytest, *sizes.laws]
    environment = os.environ | {"T2T_JAX_TEST_DEVICE": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    outcomes = {}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as tests:
        for line in tests.stdout:
            print(line, end="", flush=True)
            if outcome := re.match(r"\[gw\d+\] \[ *\d+%\] ([A-Z]+) \S+::(\S+)", line):
                outcomes[outcome[2]] = outcome[1].lower()
                report.write(outcomes)
    if tests.returncode:
        raise SystemExit(1)


def rates(report: Report, sizes: Sizes) -> None:
    """What the device can do, by which the other numbers are judged."""
    import jax
    import jax.numpy as jnp

    square = jax.random.normal(jax.random.key(0), (sizes.matrix, sizes.matrix)).astype(jnp.bfloat16)
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.bfloat16))
    results = {"matrix_tflops": 2 * sizes.matrix**3 / seconds_of(product, square) / 1e12}
    report.write(results)
    numbers = jnp.zeros(int(sizes.copied_gib * 2**28), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    report.write(results | {"copy_tb_per_second": 2 * numbers.nbytes / seconds_of(copy, numbers) / 1e12})


def seconds_of(function: Callable[[Any], Any], argument: Any, calls: int = 20) -> float:
    """Median over five measurements of the seconds of a call, after one that compiles."""
    import jax

    jax.block_until_ready(function(argument))
    found = []
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(calls):
            result = function(argument)  # the last alone is kept: 20 copies of 2 GiB need not fit
        jax.block_until_ready(result)
        found.append((time.perf_counter() - begun) / calls)
    return statistics.median(found)


def train(report: Report, sizes: Sizes) -> None:
    """Our training steps and PyTorch's, one group after another."""
    measure_groups(report, sizes, training_groups(sizes))


def ablate(report: Report, sizes: Sizes) -> None:
    """Training steps of base: ours with one thing changed, and PyTorch's not compiled."""
    ours = JaxStep("bfloat16", fused_attention=True)
    packed, shapes = packed_batches(sizes), default("num_buckets")
    # Without packing, a few of the shapes.
    buckets = training_batches.ours(*sentences(sizes.vocab_size), sizes.tokens, sizes.bucket_shapes, num_buckets=shapes)
    group = {
        "base unfused": Case("base", dataclasses.replace(ours, fused_attention=False), packed),
        "base no compiler options": Case("base", dataclasses.replace(ours, compiler_options=False), packed),
        "base buckets": Case("base", ours, buckets),
    }
    *not_compiled, _ = torch_groups(sizes, ["base"])
    measure_groups(report, sizes, [group, *not_compiled])


def training_groups(sizes: Sizes) -> list[Group]:
    """All of ours, then PyTorch's compiled steps."""
    packed, ours = packed_batches(sizes), JaxStep("bfloat16", fused_attention=True)
    *_, compiled = torch_groups(sizes, sizes.models)
    return [{model: Case(model, ours, packed) for model in sizes.models}, compiled]


def torch_groups(sizes: Sizes, models: Sequence[str]) -> list[Group]:
    """PyTorch's steps of these models: not compiled, then, where that is possible, compiled; without it, none."""
    if not importlib.util.find_spec("torch"):
        return [{}]
    batches = training_batches.theirs(*sentences(sizes.vocab_size), sizes.tokens, sizes.batches)
    variants = training.torch_variants("bfloat16", compiled="regions")
    return [
        {f"{model} {name}": Case(model, variant, batches) for model in models} for name, variant in variants.items()
    ]


@functools.cache
def sentences(vocab_size: int) -> tuple[Any, Any]:
    """Random ids with the lengths of WMT14's sentences."""
    return training_batches.sentences(None, vocab_size)


def packed_batches(sizes: Sizes) -> list[Batch]:
    """Of our training with --preset=gpu."""
    layout = PACKED | {"num_buckets": 1, "packing_shapes": default("packing_shapes")}
    return training_batches.ours(*sentences(sizes.vocab_size), sizes.tokens, sizes.batches, **layout)


def measure_groups(report: Report, sizes: Sizes, groups: Sequence[Group]) -> None:
    """Seconds of a step, real target tokens a second and TFLOP/s of each case."""
    results, failed = {}, False
    for group in filter(None, groups):
        try:
            results |= steps_of(group, sizes, report.conditions["platform"])
            report.write(results)
        except Exception:  # without memory for one group there may be enough for the next
            traceback.print_exc()
            failed = True
    if failed:
        raise SystemExit(1)


def steps_of(group: Group, sizes: Sizes, platform: str) -> dict[str, float]:
    """The numbers of a group, which is compiled at once and then takes turns."""
    with tempfile.TemporaryDirectory() as directory:
        settings = {
            model: Setting(
                measure.paper_config(model).model.to_dict() | sizes.shape, sizes.vocab_size, sizes.tokens, sizes.rounds,
                platform, f"{directory}/{model}.npz",
            )
            for model in {case.model for case in group.values()}
        }  # fmt: skip
        for model in {case.model for case in group.values() if isinstance(case.variant, TorchStep)}:
            measure.run_in_process(write_initial, settings[model], environment=WITHOUT_DEVICE)
        begun = time.monotonic()
        systems = [system(name, case.variant, settings[case.model], case.batches) for name, case in group.items()]
        with measure.running(systems) as named:
            measure.run_at_once(named, TRAIN)  # compiles
            print(f"{', '.join(named)}: started and compiled in {time.monotonic() - begun:.0f} s", flush=True)
            taken = measure.take_turns(named, TRAIN, sizes.rounds)
    results = {}
    for name, seconds in taken.items():
        model, _, batches = group[name]
        tokens = sum(int(np.count_nonzero(batch["targets"])) for batch in batches)
        operations = sum(step_operations(settings[model], batch) for batch in batches)
        key, median = result_name(platform, name), statistics.median(seconds)
        results[f"{key}_step_seconds"] = median / len(batches)
        results[f"{key}_target_tokens_per_second"] = tokens / median
        results[f"{key}_tflops"] = operations / median / 1e12
        print(f"{key}: {tokens / median:,.0f} target tokens/s", flush=True)
    return results


def project(report: Report, sizes: Sizes) -> None:
    """Of our steps of each model: their share of the matrix rate, and the hours of the paper's; of none, nothing."""
    rates, measured = (read_results(report, part) for part in ("rates", "training"))
    results = {}
    for model in sizes.models:
        prefix = result_name(report.conditions["platform"], model)
        if f"{prefix}_tflops" not in measured:
            continue
        tokens = paper.train_steps(model) * sizes.tokens
        results[f"{model}_hours_of_the_papers_steps"] = tokens / measured[f"{prefix}_target_tokens_per_second"] / 3600
        if "matrix_tflops" in rates:
            results[f"{model}_share_of_the_matrix_rate"] = measured[f"{prefix}_tflops"] / rates["matrix_tflops"]
    report.write(results)


def read_results(report: Report, part: str) -> dict[str, float]:
    """What another part has measured."""
    path = report.path.with_name(f"{part}.json")
    return json.loads(path.read_text()).get("results", {}) if path.exists() else {}


def decode(report: Report, sizes: Sizes) -> None:
    """Sentences a second at several numbers of rows, in turns."""
    searches = {"ours": our_searches}
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        searches["transformers"] = their_searches
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        folders = {name: Path(directory, name) for name in searches}
        measure.run_in_process(write_models, folders, sizes, environment=WITHOUT_DEVICE)
        systems = [measure.System(name, build, folders[name], sizes) for name, build in searches.items()]
        with measure.running(systems) as named:
            measure.run_at_once(named, WARM_UP)
            for rows in sizes.decoding_rows:
                for name, seconds in measure.take_turns(named, str(rows), sizes.rounds).items():
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
        decoding.forced_search(translator, decoding.random_sources(rows, sizes.vocab_size), 4, sizes.decoding_steps)

    cases = {str(rows): functools.partial(search, rows) for rows in sizes.decoding_rows}
    return cases | {WARM_UP: functools.partial(all_at_once, list(cases.values()))}  # which compiles them


def their_searches(folder: Path, sizes: Sizes) -> dict[str, Callable[[], Any]]:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()  # it would warn at every call that one length overrides another
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.MarianMTModel.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    length = {"min_new_tokens": sizes.decoding_steps, "max_new_tokens": sizes.decoding_steps}

    @torch.inference_mode()
    def search(rows):
        ids = np.pad(
            decoding.random_sources(rows, sizes.vocab_size), ((0, 0), (0, 1)), constant_values=model.config.eos_token_id
        )
        ids = torch.as_tensor(ids, device=device)
        model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=4, length_penalty=0.0, **length)
        if device == "cuda":
            torch.cuda.synchronize()

    cases = {str(rows): functools.partial(search, rows) for rows in sizes.decoding_rows}
    return cases | {WARM_UP: cases[str(sizes.decoding_rows[0])]}


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
    "rates": rates, "training": train, "projection": project, "decoding": decode, "laws": laws,
    "quickstart": quickstart, "ablations": ablate,
}  # fmt: skip
USUAL = [part for part in PARTS if part != "ablations"]


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
