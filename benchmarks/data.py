"""Speed and memory of the data pipeline, from text to batches, and the fraction of padding in batches.

    python -m benchmarks.data [--output FILE.json] [--pairs 2000000] [--directory DIR] [--only text|batches]

The text is synthetic, with the word frequencies and lengths of WMT14, and is prepared with all cleaning rules on.
Batches are planned for the lengths of 36 million pairs, the size of WMT14 English–French. Each part runs in its own
process, whose peak memory is printed. Needs about 2 GB of disk and an idle machine.
"""

import dataclasses
import functools
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.measure import at_least
from t2t_jax.errors import exit_code_of

WMT14 = {"English-German": 4_508_785, "English-French": 36_000_000}
TOKENS_PER_BATCH = 25_000
SHAPES = (12, 24, 48, 96, 256)
PACKED, PACKED_SHAPES = {"packing": True}, (1, 2, 4)
WORDS = 300_000
CHUNK = 100_000  # sentences generated at a time


def main() -> None:
    parser = measure.argument_parser("benchmarks.data", __doc__)
    parser.add_argument("--pairs", type=at_least(1), default=2_000_000, help="number of pairs to prepare")
    parser.add_argument("--directory", help="where to write the text and the store; by default a temporary folder")
    parser.add_argument("--only", choices=["text", "batches"], help="from text to loaded batches, or plans and padding")
    arguments = parser.parse_args()

    conditions = measure.conditions(["numpy", "sentencepiece", "grain"]) | {"pairs": arguments.pairs}
    print(conditions, flush=True)
    results = {}
    if arguments.only != "batches":
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            results |= preparing(Path(directory), arguments.pairs) | loading(Path(directory))
    if arguments.only != "text":
        results |= plans() | padding()
    measure.write(arguments.output, conditions, results)


def preparing(directory: Path, count: int) -> dict[str, float]:
    """Two text files → a token store."""
    measure.run_in_process(write_text, directory, count)
    (kept, vocabulary_seconds), seconds, gib = measure.run_in_process(prepare, directory)
    seconds_per_pair = (seconds - vocabulary_seconds) / count
    print(f"\npreparing {count:,} pairs, all rules on: {count / seconds:,.0f} pairs/s, {gib:.2f} GiB; {kept:,} kept")
    print(f"    {vocabulary_seconds:.0f} s for the vocabulary, then {1 / seconds_per_pair:,.0f} pairs/s")
    for name, pairs in WMT14.items():
        minutes = (vocabulary_seconds + pairs * seconds_per_pair) / 60
        print(f"    {name}, {pairs:,} pairs, at this speed: {minutes:.0f} minutes")
    _, taken, keys_gib = measure.run_in_process(find_duplicates, WMT14["English-French"])
    print(f"    duplicates among {WMT14['English-French']:,} pairs: {taken:.0f} s, {keys_gib:.2f} GiB", flush=True)
    return {"prepare_pairs_per_second": count / seconds, "prepare_gib": gib, "duplicates_36m_gib": keys_gib}


def loading(directory: Path) -> dict[str, float]:
    """A token store in the page cache → batches, on one core."""
    (speed, digest), _, _ = measure.run_in_process(load, directory)
    (_, again), _, _ = measure.run_in_process(load, directory)
    print(f"\nloading: {speed:,.0f} target tokens/s on one core; the same batches again: {digest == again}", flush=True)
    return {"load_target_tokens_per_second": speed}


def plans() -> dict[str, float]:
    """Lengths of 36 million pairs → the batch plan of an epoch."""
    results = {}
    layouts = {"plan_36m": {}, "packed_plan_36m": PACKED, "packed_2_shapes_plan_36m": PACKED | {"packing_shapes": 2}}
    for name, layout in layouts.items():
        _, seconds, gib = measure.run_in_process(plan, WMT14["English-French"], layout)
        print(f"{name}: {seconds:.1f} s, {gib:.2f} GiB", flush=True)
        results |= {f"{name}_seconds": seconds, f"{name}_gib": gib}
    return results


def padding() -> dict[str, float]:
    """The fraction of padding in the batches of an epoch."""
    print(f"\npadding at {TOKENS_PER_BATCH:,} tokens a batch\n{'compiled shapes':>16}{'padding':>10}")
    layouts = {f"{shapes} shapes": {"num_buckets": shapes} for shapes in SHAPES}
    layouts |= {f"packed {shapes} shapes": PACKED | {"packing_shapes": shapes} for shapes in PACKED_SHAPES}
    results = {}
    for name, layout in layouts.items():
        fraction, _, _ = measure.run_in_process(padded, WMT14["English-French"], layout)
        print(f"{name:>16}{fraction:>10.2%}", flush=True)
        results[f"padding_{name.replace(' ', '_')}"] = fraction
    configured = {
        "padding_bucketed": f"padding_{default('num_buckets')}_shapes",
        "padding_packed": f"padding_packed_{default('packing_shapes')}_shapes",
    }
    return results | {name: results[layout] for name, layout in configured.items()}


# --- Functions that run in processes of their own ----------------------------------------------------------


def write_text(directory: Path, count: int) -> None:
    """Writes train, dev and test: sentences of 26 words on average, drawn by Zipf's law; some pairs are duplicates."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkqjxzäöüß"))
    words = ["".join(letters[rng.zipf(1.3, 3 + n % 9) % 30]) for n in range(WORDS)]
    for split, pairs in (("train", count), ("dev", 1000), ("test", 1000)):
        with (directory / f"{split}.en").open("w") as source, (directory / f"{split}.de").open("w") as target:
            for first in range(0, pairs, CHUNK):
                size = min(CHUNK, pairs - first)
                lengths = wmt_lengths(size, rng)
                for file, side in ((source, lengths[0]), (target, lengths[1])):
                    drawn = rng.zipf(1.15, side.sum()) % WORDS
                    ends = side.cumsum()
                    for start, end in zip(ends - side, ends, strict=True):
                        file.write(" ".join([words[n] for n in drawn[start:end]]) + ".\n")


def wmt_lengths(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Source and target lengths like WMT14's: log-normal, 26 on average, the target a little longer."""
    source = np.clip(np.exp(rng.normal(3.1, 0.58, count)), 2, 256)
    target = np.clip(source * rng.normal(1.05, 0.13, count), 2, 256)
    return source.round().astype(np.int32), target.round().astype(np.int32)


def data_fields(directory: Path) -> dict[str, Any]:
    """`config.data` of the base model, for the text in this directory, with all cleaning rules on."""
    data = measure.paper_config("base").data.to_dict()
    data |= {"corpus": "files", "directory": str(directory / "stores")}
    data |= {split: str(directory / split) for split in ("train", "dev", "test")}
    limits = {"max_words": 175, "max_ratio": 1.5}
    return data | {"cleaning": {name: limits.get(name, True) for name in data["cleaning"]}}


def default(field: str) -> Any:
    """The value of a field in `config.data` of the base model."""
    return measure.paper_config("base").data[field]


def prepare(directory: Path) -> tuple[int, float]:
    """(number of pairs kept, seconds of training the vocabulary)"""
    from t2t_jax.data import preparation

    train, taken = preparation._vocabulary, []

    def timed(*arguments):
        begun = time.perf_counter()
        vocabulary = train(*arguments)
        taken.append(time.perf_counter() - begun)
        return vocabulary

    preparation._vocabulary = timed
    store = preparation.open_store(data_fields(directory))
    print(store.describe())
    return store.report.kept, taken[0]


def find_duplicates(count: int) -> int:
    from t2t_jax.data.cleaning import repeated

    keys = np.random.default_rng(0).integers(0, 2**64, count, np.uint64)
    return int(repeated(keys).sum())


def load(directory: Path) -> tuple[float, str]:
    """(target tokens per second, digest of the batches)"""
    from t2t_jax.data.preparation import open_store

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    store = open_store(data_fields(directory))  # verifies checksums, which reads all files into the page cache
    batches = make_batches(store.source, store.target, {})
    batches.plan(0)
    digest, tokens, begun = hashlib.sha256(), 0, time.perf_counter()
    loaded = list(batches.iterate(0, min(1000, batches.per_epoch)))
    seconds = time.perf_counter() - begun
    for batch in loaded:
        tokens += int(np.count_nonzero(batch["targets"]))
        digest.update(batch["inputs"].tobytes() + batch["targets"].tobytes())
    return tokens / seconds, digest.hexdigest()


@dataclasses.dataclass
class Lengths:
    """Stands for sentences where only their lengths are needed."""

    values: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def lengths(self) -> np.ndarray:
        return self.values


@functools.cache
def wmt_sentences(count: int) -> tuple[Lengths, Lengths]:
    rng, sides = np.random.default_rng(0), np.empty((2, count), np.int32)
    for first in range(0, count, CHUNK):
        part = sides[:, first : first + CHUNK]
        part[:] = wmt_lengths(part.shape[1], rng)
    return Lengths(sides[0]), Lengths(sides[1])


def make_batches(sources: Any, targets: Any, layout: Mapping[str, Any]) -> Any:
    """Batches in length buckets, or in the layout of these fields of `config.data`."""
    from t2t_jax.data.batching import Batches

    settings = {"tokens_per_batch": TOKENS_PER_BATCH, "num_buckets": default("num_buckets"), "seed": 0}
    return Batches(sources, targets, **settings | dict(layout))


def plan(count: int, layout: Mapping[str, Any]) -> None:
    make_batches(*wmt_sentences(count), layout).plan(0)


def padded(count: int, layout: Mapping[str, Any]) -> float:
    sides = wmt_sentences(count)
    batches = make_batches(*sides, layout)
    positions = sum(
        bucket.rows * (bucket.source_length + bucket.target_length)
        for bucket in map(batches.bucket, range(batches.per_epoch))
    )
    return 1 - sum(int(side.lengths().sum()) for side in sides) / positions


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
