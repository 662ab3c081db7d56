"""Decoding speed, against CTranslate2 with the same weights (from our own exporter), at the faster of two settings.

    python -m benchmarks.decoding [--output FILE.json] [--rounds 5] [--workdir runs/quickstart]
        [--parser runs/parsing_craft]

First table: Transformer-base with random weights, vocabulary 32,000, sources of 32 subwords, 64 forced steps, no
length penalty. Second table: the test set of a trained run, from text to text, as --mode=translate does it, and the
latency of its first sentences, each translated alone. The other tables are of parsing (decoding_parsing.py). Needs
`pip install -e '.[interop]'`, all cores, and no other load on the machine.
"""

import atexit
import functools
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import decoding_parsing, measure
from benchmarks.measure import at_least
from t2t_jax.decoding.ensemble import DTYPES
from t2t_jax.errors import exit_code_of
from t2t_jax.threads import available_cores

VOCAB, SOURCE, STEPS = 32_000, 32, 64
BATCHES = {"b1 beam 4": (1, 4), "b16 beam 4": (16, 4), "b64 beam 4": (64, 4), "b16 greedy": (16, 1)}
REAL_TEXT, ONE_BY_ONE = "real text", "one by one"
SINGLE = 100  # sentences translated one by one


def main() -> None:
    parser = measure.argument_parser("benchmarks.decoding", __doc__)
    parser.add_argument("--rounds", type=at_least(1), default=5, help="measurements of each system, interleaved")
    parser.add_argument("--workdir", default="runs/quickstart", help="a trained run, for the second table")
    parser.add_argument("--parser", default="runs/parsing_craft", help="a trained parser, for the last table")
    arguments = parser.parse_args()

    conditions = measure.conditions(["jax", "flax", "ctranslate2"]) | {"rounds": arguments.rounds}
    print(conditions)
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory, "base")
        write_random_run(base, {}, VOCAB, max_length=SOURCE)
        results = forced_steps(base, arguments.rounds)
        if Path(arguments.workdir, "config.json").exists():
            results |= real_text(Path(arguments.workdir), arguments.rounds)
        else:
            print(f"no trained run at {arguments.workdir}, so no second table; `make quickstart` trains one")
    results |= decoding_parsing.forced_steps(arguments.rounds)
    if Path(arguments.parser, "config.json").exists():
        results |= decoding_parsing.real_trees(Path(arguments.parser), arguments.rounds)
    else:
        print(f"no trained parser at {arguments.parser}, so no last table; configs/parsing_craft.py trains one")
    measure.write(arguments.output, conditions, results)


def forced_steps(run: Path, rounds: int) -> dict[str, float]:
    """The first table: random weights, a fixed number of decoding steps."""
    systems = [
        *(measure.System(f"ours {dtype}", our_batches, run, dtype) for dtype in DTYPES),
        *their_systems(their_batches, run),
    ]
    print(f"\n{'seconds a batch, ratio to CTranslate2 float32':<46}" + "".join(f"{s.name:>32}" for s in systems))
    by_case = {}
    with measure.running(systems) as named:
        for case in BATCHES:
            first = {name: system.run(case)[0] for name, system in named.items()}
            by_case[case] = seconds = measure.take_turns(named, case, rounds)
            baseline = fastest(seconds, "float32")
            cells = (
                f"{statistics.median(times):>20.2f} · {measure.ratio(seconds, name, baseline):.2f}"
                for name, times in seconds.items()
            )
            print(f"{case:<46}" + "".join(f"{cell:>32}" for cell in cells))
            ours = {name: first[name] - statistics.median(seconds[name]) for name in first if name.startswith("ours")}
            print("    compiling: " + ", ".join(f"{name} {taken:.1f} s" for name, taken in ours.items()))

    def ratio(case, dtype, compute_type):
        return measure.ratio(by_case[case], f"ours {dtype}", fastest(by_case[case], compute_type))

    return {
        "f32_b16_time_vs_ct2_f32": ratio("b16 beam 4", "float32", "float32"),
        "f32_b64_time_vs_ct2_f32": ratio("b64 beam 4", "float32", "float32"),
        "bf16_b16_time_vs_ct2_int8": ratio("b16 beam 4", "bfloat16", "int8"),
        "bf16_b64_time_vs_ct2_int8": ratio("b64 beam 4", "bfloat16", "int8"),
        "int8_b1_time_vs_ct2_int8": ratio("b1 beam 4", "int8", "int8"),
        "int8_b16_time_vs_ct2_int8": ratio("b16 beam 4", "int8", "int8"),
        "int8_b64_time_vs_ct2_int8": ratio("b64 beam 4", "int8", "int8"),
        "greedy_f32_b16_time_vs_ct2_f32": ratio("b16 greedy", "float32", "float32"),
    }


def their_systems(start: Callable[..., Any], run: Path, *arguments: Any) -> list[measure.System]:
    """CTranslate2 in float32 and int8, each with one worker that uses all cores and with a worker for each core."""
    cores = available_cores()
    return [
        measure.System(
            f"CTranslate2 {compute_type}, {workers} × {cores // workers}",
            start,
            export(run),
            compute_type,
            workers,
            *arguments,
        )
        for compute_type in ("float32", "int8")
        for workers in sorted({1, cores})
    ]


def fastest(seconds: Mapping[str, list[float]], compute_type: str) -> str:
    """The name of CTranslate2's fastest setting in this compute type."""
    return measure.fastest(seconds, [name for name in seconds if name.startswith(f"CTranslate2 {compute_type}")])


def real_text(run: Path, rounds: int) -> dict[str, float]:
    """The second table: a trained run, from text to text."""
    import sacrebleu

    sources, references = measure.test_set(run)
    systems = [
        *(
            measure.System(f"ours {dtype}, {rule}", our_text, run, dtype, rule, sources)
            for dtype in DTYPES
            for rule in ("exact", "beam_full")
        ),
        *their_systems(their_text, run, sources),
    ]
    print(f"\n{len(sources)} sentences of {run}, beam 4, from text to text")
    print(f"{'':<28}{'sentences/s':>14}{'speed ratio':>14}{'BLEU':>8}{'p50 ms':>10}{'p95 ms':>10}")
    with measure.running(systems) as named:
        texts = {name: system.run(REAL_TEXT)[1] for name, system in named.items()}
        seconds = measure.take_turns(named, REAL_TEXT, rounds)
        measure.take_turns(named, ONE_BY_ONE, 0)  # warms up
        latencies = {name: system.run(ONE_BY_ONE)[1] for name, system in named.items()}
    baseline = fastest(seconds, "float32")
    speed = {name: 1 / measure.ratio(seconds, name, baseline) for name in seconds}
    percentiles = {name: np.percentile(times, [50, 95]) * 1000 for name, times in latencies.items()}
    theirs = np.min([both for name, both in percentiles.items() if name.startswith("CTranslate2 float32")], axis=0)
    for name, times in seconds.items():
        bleu = sacrebleu.corpus_bleu(texts[name], [references]).score
        cells = f"{len(sources) / statistics.median(times):>14.0f}{speed[name]:>14.2f}{bleu:>8.2f}"
        print(f"{name:<28}{cells}" + "".join(f"{percentile:>10.1f}" for percentile in percentiles[name]))
    return {
        "latency_p50_ms": float(percentiles["ours float32, exact"][0]),
        "latency_p95_ms": float(percentiles["ours float32, exact"][1]),
        "ct2_latency_p50_ms": float(theirs[0]),
        "ct2_latency_p95_ms": float(theirs[1]),
        "real_text_speed_vs_ct2_f32": speed["ours float32, exact"],
        "real_text_bf16_speed_vs_ct2_f32": speed["ours bfloat16, exact"],
        "real_text_int8_speed_vs_ct2_f32": speed["ours int8, exact"],
        "real_text_beam_full_speed_vs_ct2_f32": speed["ours float32, beam_full"],
        "real_text_beam_full_bf16_speed_vs_ct2_f32": speed["ours bfloat16, beam_full"],
        "real_text_beam_full_int8_speed_vs_ct2_f32": speed["ours int8, beam_full"],
    }


def write_random_run(path: Path, model: Mapping[str, Any], vocab_size: int, *, max_length: int) -> None:
    """A run folder with random weights and a vocabulary of made-up words; `model` departs from the base model."""
    import jax

    from t2t_jax.data.task import JOINT_FILE
    from t2t_jax.interop.imported import write_run
    from t2t_jax.model.transformer import Transformer, TransformerConfig, init_params

    config = TransformerConfig(**model, vocab_size=vocab_size)
    params = jax.jit(functools.partial(init_params, Transformer(config)))(jax.random.key(0))
    files = {JOINT_FILE: made_up_vocabulary(vocab_size)}
    write_run(path, config, params, files, origin="random", max_length=max_length, languages=("en", "de"))


def made_up_vocabulary(size: int) -> bytes:
    """A SentencePiece model of `size` words."""
    from sentencepiece import sentencepiece_model_pb2

    from t2t_jax.data.tokenizer import set_special_pieces

    model = sentencepiece_model_pb2.ModelProto()
    kinds = {"<pad>": model.SentencePiece.CONTROL, "</s>": model.SentencePiece.CONTROL,
             "<unk>": model.SentencePiece.UNKNOWN}  # fmt: skip
    for piece, kind in kinds.items():
        model.pieces.add(piece=piece, score=0.0, type=kind)
    for index in range(size - len(kinds)):
        model.pieces.add(piece=f"▁w{index}", score=-float(index))
    spec = model.trainer_spec
    set_special_pieces(spec, list(kinds))
    spec.vocab_size = size
    return model.SerializeToString()


@functools.cache
def export(run: Path) -> Path:
    """The run, exported for CTranslate2."""
    from t2t_jax.interop.export import export_run

    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    export_run(str(run), format="ctranslate2", output=str(folder / "ctranslate2"), step=None)
    return folder / "ctranslate2"


def random_sources(count: int, vocab_size: int = VOCAB) -> np.ndarray:
    """Ids of random sentences without EOS, the same for every system."""
    return np.random.default_rng(0).integers(3, vocab_size, (count, SOURCE - 1))


def forced_search(translator: Any, sources: np.ndarray, beam_size: int, steps: int) -> None:
    """A beam search of so many steps for these sentences, as `Translator.translate` runs it, without length penalty."""
    from t2t_jax.data.tokenizer import EOS
    from t2t_jax.decoding.continuous_batching import Request, search_all
    from t2t_jax.decoding.search_options import SearchOptions

    options = SearchOptions(beam_size=beam_size, alpha=0.0, min_length=steps)
    requests = [Request([*map(int, ids), EOS], steps) for ids in sources]
    searches = search_all(translator.ensemble, requests, options, translator.mesh)
    found = [hypotheses for results in searches for _, hypotheses in results]
    assert len(found) == len(sources) and all(hypotheses.lengths[0] == steps for hypotheses in found)


def our_batches(run: Path, dtype: str) -> dict[str, Callable[[], Any]]:
    """The cases of the first table."""
    from t2t_jax import load

    translator = load(str(run), dtype=dtype)
    return {
        case: functools.partial(forced_search, translator, random_sources(count), beam_size, STEPS)
        for case, (count, beam_size) in BATCHES.items()
    }


def their_batches(folder: Path, compute_type: str, workers: int) -> dict[str, Callable[[], Any]]:
    """The cases of the first table for CTranslate2, whose workers share the sentences evenly."""
    model = their_model(folder, compute_type, workers)
    words = lambda ids: [f"▁w{index - 3}" for index in ids]

    def search(count, beam_size):
        found = model.translate_batch(
            [words(ids) for ids in random_sources(count)], beam_size=beam_size,
            min_decoding_length=STEPS, max_decoding_length=STEPS, max_batch_size=-(-count // workers),
        )  # fmt: skip
        assert all(len(answer.hypotheses[0]) == STEPS for answer in found)

    return {case: functools.partial(search, *shape) for case, shape in BATCHES.items()}


def our_text(run: Path, dtype: str, early_stop: str, sources: list[str]) -> dict[str, Callable[[], Any]]:
    """The cases of the second table; CTranslate2 stops a sentence as 'beam_full' does."""
    from t2t_jax import load

    translator = load(str(run), dtype=dtype)

    def translate(sentences):
        return [hypotheses[0].text for hypotheses in translator.translate(sentences, early_stop=early_stop)]

    return text_cases(translate, sources)


def text_cases(translate: Callable[[list[str]], list[str]], sources: list[str]) -> dict[str, Callable[[], Any]]:
    """All sentences at once, which returns their translations; the first ones alone, which returns seconds."""

    def one_by_one():
        seconds = []
        for source in sources[:SINGLE]:
            begun = time.perf_counter()
            translate([source])
            seconds.append(time.perf_counter() - begun)
        return seconds

    return {REAL_TEXT: lambda: translate(sources), ONE_BY_ONE: one_by_one}


def their_text(folder: Path, compute_type: str, workers: int, sources: list[str]) -> dict[str, Callable[[], Any]]:
    """The same for CTranslate2, in batches of 64 sentences, which it sorts by length itself."""
    import sentencepiece

    model, pieces = their_model(folder, compute_type, workers), sentencepiece.SentencePieceProcessor()
    pieces.Load(str(folder / "vocab.model"))

    def translate(sentences):
        found = model.translate_batch(
            pieces.encode(sentences, out_type=str), beam_size=4, length_penalty=0.6, max_batch_size=64
        )
        return [pieces.decode(answer.hypotheses[0]) for answer in found]

    return text_cases(translate, sources)


def their_model(folder: Path, compute_type: str, workers: int) -> Any:
    """The model in CTranslate2, on the accelerator if there is one, else on all cores, which the workers share."""
    import ctranslate2

    device = "cuda" if ctranslate2.get_cuda_device_count() else "cpu"
    threads = {"inter_threads": workers, "intra_threads": available_cores() // workers}
    return ctranslate2.Translator(str(folder), device=device, compute_type=compute_type, **threads)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
