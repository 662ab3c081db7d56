"""Batches for `benchmarks.training`: without padding, and with real sentence lengths, batched as we and fairseq do."""

import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.data import wmt_lengths
from t2t_jax.data.batching import Batches
from t2t_jax.data.preparation import open_store
from t2t_jax.data.token_store import Sentences

LENGTH = 32  # of the sentences without padding
PAIRS = 1_000_000  # sentence pairs of WMT14's lengths, from whose batches a sample is taken

Batch = dict[str, np.ndarray]


def dense(tokens: int, vocab_size: int) -> Batch:
    """Random ids without padding: `tokens` per side in rows of `LENGTH`."""
    rng, shape = np.random.default_rng(0), (tokens // LENGTH, LENGTH)
    return {name: rng.integers(3, vocab_size, shape, np.int32) for name in ("inputs", "targets")}


def padded(tokens: int, vocab_size: int) -> Batch:
    """The same with padding: row n is shorter by n positions, at most by a half."""
    missing = np.arange(tokens // LENGTH)[:, None] % (LENGTH // 2)
    return {name: np.where(np.arange(LENGTH) < LENGTH - missing, x, 0) for name, x in dense(tokens, vocab_size).items()}


def sentences(corpus: str | None, vocab_size: int) -> tuple[Sentences, Sentences]:
    """Source and target sentences of random ids, with the lengths of WMT14 or of PREFIX.en and PREFIX.de."""
    rng = np.random.default_rng(0)
    sides = wmt_lengths(PAIRS, rng) if corpus is None else corpus_lengths(corpus, vocab_size)
    return tuple(random_sentences(side, vocab_size, rng) for side in sides)


def corpus_lengths(prefix: str, vocab_size: int) -> list[np.ndarray]:
    """Subword lengths of both sides of a corpus, with a vocabulary trained on it."""
    with tempfile.TemporaryDirectory() as directory:
        fields = {"corpus": "files", "directory": directory, "vocab_size": vocab_size}
        fields |= dict.fromkeys(("train", "dev", "test"), prefix)
        store = open_store(measure.paper_config("base").data.to_dict() | fields)
        return [side.lengths() for side in (store.source, store.target)]


def random_sentences(lengths: np.ndarray, vocab_size: int, rng: np.random.Generator) -> Sentences:
    """Sentences of random ids with these lengths."""
    ends = lengths.cumsum(dtype=np.int64)
    return Sentences(rng.integers(3, vocab_size, ends[-1], np.int32), ends)


def ours(sources: Sentences, targets: Sentences, tokens: int, count: int, **layout: Any) -> list[Batch]:
    """`count` batches of one epoch of our training; `layout` are fields of `config.data`."""
    batches = Batches(sources, targets, tokens_per_batch=tokens, seed=0, **layout)
    return [batches[step] for step in sample(sorted(range(batches.per_epoch), key=batches.bucket), count)]


def theirs(sources: Sentences, targets: Sentences, tokens: int, count: int) -> list[Batch]:
    """`count` batches as fairseq makes them: of pairs sorted by length, cut where padding would exceed `tokens`."""
    source, target = sources.lengths(), targets.lengths()
    order = np.lexsort((target, source))
    longest = np.maximum(source, target)[order].tolist()
    starts, padded_length = [0], 0
    for index, length in enumerate(longest):
        padded_length = max(padded_length, length)
        if padded_length * (index + 1 - starts[-1]) > tokens:
            starts.append(index)
            padded_length = length
    groups = np.split(order, starts[1:])
    return [{"inputs": pad(sources, group), "targets": pad(targets, group)} for group in sample(groups, count)]


def sample(batches: Sequence[Any], count: int) -> list[Any]:
    """A representative sample of batches that are sorted by length, taken at even distances."""
    return [batches[(2 * index + 1) * len(batches) // (2 * count)] for index in range(count)]


def pad(side: Sentences, pairs: np.ndarray) -> np.ndarray:
    rows = [side[pair] for pair in pairs]
    longest = max(map(len, rows))
    return np.stack([np.pad(row, (0, longest - len(row))) for row in rows])


def shape(batch: Batch) -> tuple[tuple[int, ...], ...]:
    """The shapes of both sides, for which a step is compiled."""
    return batch["inputs"].shape, batch["targets"].shape


def lengths(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Source and target tokens of each sentence pair, those of packed rows too."""
    sides = [batch.get(f"{side}_segments", batch[f"{side}s"] != 0).astype(np.int64) for side in ("input", "target")]
    rows, most = len(sides[0]), max(int(segments.max()) for segments in sides) + 1
    first = np.arange(rows)[:, None] * most  # of the row's segments, in an enumeration of all
    source, target = (np.bincount((first + of)[of > 0], minlength=rows * most) for of in sides)
    used = (source > 0) | (target > 0)
    return source[used], target[used]


def padding(batches: list[Batch]) -> float:
    """The fraction of positions, of both sides, that are padding."""
    sides = [batch[name] for batch in batches for name in ("inputs", "targets")]
    return 1 - sum(int(np.count_nonzero(side)) for side in sides) / sum(side.size for side in sides)
