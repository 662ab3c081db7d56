"""Decoding speed, against CTranslate2 with the same weights (from our own exporter).

    python -m benchmarks.decoding [--output FILE.json] [--rounds 5] [--workdir runs/quickstart]

First table: Transformer-base with random weights, vocabulary 32,000, sources of 32 subwords, 64 forced steps, no
length penalty. Second table: the test set of a trained run, from text to text, as --mode=translate does it. Needs
`pip install -e '.[interop]'`, all cores, and no other load on the machine.
"""

import argparse
import functools
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.measure import System

VOCAB, SOURCE, STEPS = 32_000, 32, 64
BATCHES = {"b16 beam 4": (16, 4), "b64 beam 4": (64, 4), "b16 greedy": (16, 1)}
REAL_TEXT = "real text"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="where to write the numbers as JSON")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each system, interleaved")
    parser.add_argument("--workdir", default="runs/quickstart", help="a trained run, for the second table")
    arguments = parser.parse_args()

    conditions = measure.conditions(["jax", "flax", "ctranslate2"]) | {"rounds": arguments.rounds}
    print({name: value for name, value in conditions.items()})
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory, "base")
        write_random_run(base)
        results = forced_steps(base, arguments.rounds)
        if Path(arguments.workdir, "config.json").exists():
            results |= real_text(Path(arguments.workdir), arguments.rounds)
        else:
            print(f"no trained run at {arguments.workdir}, so no second table; `make quickstart` trains one")
    measure.write(arguments.output, conditions, results)


def forced_steps(run: Path, rounds: int) -> dict[str, float]:
    """The first table: random weights, a fixed number of decoding steps."""
    systems = [
        System("ours float32", our_batches, run, "float32"),
        System("ours bfloat16", our_batches, run, "bfloat16"),
        System("CTranslate2 float32", their_batches, export(run), "float32"),
        System("CTranslate2 int8", their_batches, export(run), "int8"),
    ]
    print(f"\n{'seconds a batch, ratio to CTranslate2 float32':<46}" + "".join(f"{s.name:>28}" for s in systems))
    by_case = {}
    with measure.running(systems) as named:
        for case in BATCHES:
            first = {name: system.run(case)[0] for name, system in named.items()}
            by_case[case] = seconds = measure.take_turns(named, case, rounds)
            cells = (
                f"{statistics.median(times):>20.2f} · {measure.ratio(seconds, name, 'CTranslate2 float32'):.2f}"
                for name, times in seconds.items()
            )
            print(f"{case:<46}" + "".join(f"{cell:>28}" for cell in cells))
            ours = {name: first[name] - statistics.median(seconds[name]) for name in first if name.startswith("ours")}
            print("    compiling: " + ", ".join(f"{name} {taken:.1f} s" for name, taken in ours.items()))
    return {
        "f32_b16_time_vs_ct2_f32": measure.ratio(by_case["b16 beam 4"], "ours float32", "CTranslate2 float32"),
        "f32_b64_time_vs_ct2_f32": measure.ratio(by_case["b64 beam 4"], "ours float32", "CTranslate2 float32"),
        "bf16_b16_time_vs_ct2_int8": measure.ratio(by_case["b16 beam 4"], "ours bfloat16", "CTranslate2 int8"),
        "bf16_b64_time_vs_ct2_int8": measure.ratio(by_case["b64 beam 4"], "ours bfloat16", "CTranslate2 int8"),
        "greedy_f32_b16_time_vs_ct2_f32": measure.ratio(by_case["b16 greedy"], "ours float32", "CTranslate2 float32"),
    }


def real_text(run: Path, rounds: int) -> dict[str, float]:
    """The second table: a trained run, from text to text."""
    import sacrebleu

    from t2t_jax.data.preparation import open_store
    from t2t_jax.run_folder import RunFolder

    sources, references = open_store(RunFolder.open(run).config["data"]).held_out("test")
    systems = [
        System("ours float32", our_text, run, "float32", sources),
        System("ours bfloat16", our_text, run, "bfloat16", sources),
        System("CTranslate2 float32", their_text, export(run), "float32", sources),
        System("CTranslate2 int8", their_text, export(run), "int8", sources),
    ]
    print(f"\n{len(sources)} sentences of {run}, beam 4, from text to text")
    print(f"{'':<24}{'sentences/s':>14}{'speed ratio':>14}{'BLEU':>8}")
    with measure.running(systems) as named:
        texts = {name: system.run(REAL_TEXT)[1] for name, system in named.items()}
        seconds = measure.take_turns(named, REAL_TEXT, rounds)
    speed = {name: 1 / measure.ratio(seconds, name, "CTranslate2 float32") for name in seconds}
    for name, times in seconds.items():
        bleu = sacrebleu.corpus_bleu(texts[name], [references]).score
        print(f"{name:<24}{len(sources) / statistics.median(times):>14.0f}{speed[name]:>14.2f}{bleu:>8.2f}")
    return {
        "real_text_speed_vs_ct2_f32": speed["ours float32"],
        "real_text_bf16_speed_vs_ct2_f32": speed["ours bfloat16"],
    }


def write_random_run(path: Path) -> None:
    """A run folder of the base model with random weights and a vocabulary of made-up words."""
    import jax

    from t2t_jax.interop.imported import write_run
    from t2t_jax.model.transformer import Transformer, TransformerConfig

    config = TransformerConfig(vocab_size=VOCAB)
    ids = np.ones((1, 2), np.int32)
    params = jax.jit(Transformer(config).init)(jax.random.key(0), ids, ids)["params"]
    write_run(
        path, config, params, made_up_vocabulary(), origin="random", max_length=SOURCE, languages=("en", "de")
    )  # fmt: skip


def made_up_vocabulary() -> bytes:
    """A SentencePiece model of `VOCAB` words."""
    from sentencepiece import sentencepiece_model_pb2

    from t2t_jax.data.tokenizer import EOS, PAD, UNKNOWN

    model = sentencepiece_model_pb2.ModelProto()
    kinds = {"<pad>": model.SentencePiece.CONTROL, "</s>": model.SentencePiece.CONTROL,
             "<unk>": model.SentencePiece.UNKNOWN}  # fmt: skip
    for piece, kind in kinds.items():
        model.pieces.add(piece=piece, score=0.0, type=kind)
    for index in range(VOCAB - len(kinds)):
        model.pieces.add(piece=f"▁w{index}", score=-float(index))
    spec = model.trainer_spec
    spec.pad_id, spec.eos_id, spec.unk_id, spec.bos_id = PAD, EOS, UNKNOWN, -1
    spec.pad_piece, spec.eos_piece, spec.unk_piece = kinds
    spec.vocab_size = VOCAB
    return model.SerializeToString()


@functools.cache
def export(run: Path) -> Path:
    """The run, exported for CTranslate2."""
    from t2t_jax.interop.export import export_run

    folder = Path(tempfile.mkdtemp()) / "ctranslate2"
    export_run(str(run), format="ctranslate2", output=str(folder), step=None)
    return folder


def random_sources(count: int) -> np.ndarray:
    """Ids of random sentences without EOS, the same for every system."""
    return np.random.default_rng(0).integers(3, VOCAB, (count, SOURCE - 1))


def our_batches(run: Path, dtype: str) -> dict[str, Callable[[], Any]]:
    """The cases of the first table, as `Translator.translate` runs them."""
    from t2t_jax import load
    from t2t_jax.data.tokenizer import EOS
    from t2t_jax.decoding.beam_search import SearchOptions
    from t2t_jax.decoding.pool import Request, search_all

    translator = load(str(run), dtype=dtype)

    def search(count, beam_size):
        options = SearchOptions(beam_size=beam_size, alpha=0.0, min_length=STEPS)
        requests = [Request([*map(int, ids), EOS], STEPS) for ids in random_sources(count)]
        found = list(search_all(translator.ensemble, requests, options, translator.mesh))
        assert len(found) == count and all(h.lengths[0] == STEPS for _, h in found)

    return {case: functools.partial(search, *shape) for case, shape in BATCHES.items()}


def their_batches(folder: Path, compute_type: str) -> dict[str, Callable[[], Any]]:
    """The cases of the first table for CTranslate2."""
    model = their_model(folder, compute_type)
    words = lambda ids: [f"▁w{index - 3}" for index in ids]

    def search(count, beam_size):
        found = model.translate_batch(
            [words(ids) for ids in random_sources(count)], beam_size=beam_size,
            min_decoding_length=STEPS, max_decoding_length=STEPS, max_batch_size=0,
        )  # fmt: skip
        assert all(len(answer.hypotheses[0]) == STEPS for answer in found)

    return {case: functools.partial(search, *shape) for case, shape in BATCHES.items()}


def our_text(run: Path, dtype: str, sources: list[str]) -> dict[str, Callable[[], Any]]:
    """The only case of the second table."""
    from t2t_jax import load

    translator = load(str(run), dtype=dtype)
    return {REAL_TEXT: lambda: [hypotheses[0].text for hypotheses in translator.translate(sources)]}


def their_text(folder: Path, compute_type: str, sources: list[str]) -> dict[str, Callable[[], Any]]:
    """The same for CTranslate2, with batches of as many rows as ours; it sorts sentences by length itself."""
    import sentencepiece

    model, pieces = their_model(folder, compute_type), sentencepiece.SentencePieceProcessor()
    pieces.Load(str(folder / "vocab.model"))

    def translate():
        found = model.translate_batch(
            pieces.encode(sources, out_type=str), beam_size=4, length_penalty=0.6, max_batch_size=64
        )
        return [pieces.decode(answer.hypotheses[0]) for answer in found]

    return {REAL_TEXT: translate}


def their_model(folder: Path, compute_type: str) -> Any:
    """The model in CTranslate2, on the accelerator if there is one, else on all cores."""
    import os

    import ctranslate2

    device = "cuda" if ctranslate2.get_cuda_device_count() else "cpu"
    threads = len(os.sched_getaffinity(0))
    return ctranslate2.Translator(
        str(folder), device=device, compute_type=compute_type, inter_threads=1, intra_threads=threads
    )


if __name__ == "__main__":
    main()
