"""§5.1: sentence pairs → batches of about the same length, few static shapes, a pure plan of (seed, epoch).

A bucket is a shape: every pair whose sides fit it, and fit no smaller one, is batched with others of its bucket.
"""

import dataclasses
import functools
from collections.abc import Iterator

import grain
import numpy as np

from t2t_jax.data.token_store import Sentences
from t2t_jax.errors import InputError

Batch = dict[str, np.ndarray]

# Rows are a multiple of this where there are that many, so that the usual device counts divide a batch.
_ROWS_MULTIPLE = 8


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """The shape of a batch: `rows` pairs of up to these lengths (subwords, EOS included)."""

    source_length: int
    target_length: int
    rows: int


@dataclasses.dataclass(frozen=True)
class Rectangle:
    """A range of source and target lengths, [low, high) each."""

    source: tuple[int, int]
    target: tuple[int, int]


def split_lengths(counts: np.ndarray, num_buckets: int) -> list[Rectangle]:
    """Cuts the table `counts[source length, target length]` into rectangles that waste little padding.

    Starts from one rectangle and makes, again and again, the single cut that saves the most padded positions. Cuts
    along one axis of a part of the plane are what lets source and target lengths have their own boundaries.
    """
    parts = [_shrink(counts, Rectangle((0, counts.shape[0]), (0, counts.shape[1])))]
    while len(parts) < num_buckets:
        cuts = [(*_best_cut(counts, part), index) for index, part in enumerate(parts)]
        saved, halves, index = max(cuts, key=lambda cut: cut[0])
        if saved <= 0:
            break
        parts[index : index + 1] = halves
    return parts


def _cost(counts: np.ndarray, part: Rectangle) -> int:
    """Padded positions, source and target, of all pairs in a part that has been shrunk."""
    return int(_inside(counts, part).sum()) * (part.source[1] + part.target[1] - 2)


def _inside(counts: np.ndarray, part: Rectangle) -> np.ndarray:
    return counts[slice(*part.source), slice(*part.target)]


def _shrink(counts: np.ndarray, part: Rectangle) -> Rectangle:
    """The part without the empty lengths at its ends."""
    inside = _inside(counts, part)
    ranges = []
    for axis, (low, _) in ((1, part.source), (0, part.target)):
        used = np.flatnonzero(inside.any(axis=axis))
        ranges.append((low + int(used[0]), low + int(used[-1]) + 1) if len(used) else (low, low))
    return Rectangle(*ranges)


def _best_cut(counts: np.ndarray, part: Rectangle) -> tuple[int, tuple[Rectangle, ...]]:
    before, best = _cost(counts, part), (0, (part,))
    for at in range(part.source[0] + 1, part.source[1]):
        halves = (Rectangle((part.source[0], at), part.target), Rectangle((at, part.source[1]), part.target))
        best = max(best, _saving(counts, before, halves), key=lambda cut: cut[0])
    for at in range(part.target[0] + 1, part.target[1]):
        halves = (Rectangle(part.source, (part.target[0], at)), Rectangle(part.source, (at, part.target[1])))
        best = max(best, _saving(counts, before, halves), key=lambda cut: cut[0])
    return best


def _saving(counts: np.ndarray, before: int, halves: tuple[Rectangle, ...]) -> tuple[int, tuple[Rectangle, ...]]:
    halves = tuple(_shrink(counts, half) for half in halves)
    return before - sum(_cost(counts, half) for half in halves), halves


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which pairs make each batch of an epoch: batch b is `pairs[starts[b] : starts[b] + sizes[b]]`."""

    pairs: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    buckets: np.ndarray


class Batches:
    """The batches of a whole run, by step. Batch n is a pure function of the sentences, the settings and n.

    `tokens_per_batch` bounds the positions of a global batch on each side, padding included. Step n belongs to
    epoch n // `per_epoch`; each epoch holds every pair exactly once, in an order of its own, short batches padded
    with empty rows to the shape of their bucket.
    """

    def __init__(self, sources: Sentences, targets: Sentences, *, tokens_per_batch: int, num_buckets: int, seed: int):
        self._sources, self._targets, self._seed = sources, targets, seed
        source, target = sources.lengths(), targets.lengths()
        counts = np.zeros((source.max() + 1, target.max() + 1), np.int64)
        np.add.at(counts, (source, target), 1)
        rectangles = split_lengths(counts, num_buckets)
        self.buckets = [_bucket(rectangle, tokens_per_batch) for rectangle in rectangles]
        bucket_of_lengths = np.zeros(counts.shape, np.uint16)
        for index, rectangle in enumerate(rectangles):
            _inside(bucket_of_lengths, rectangle)[:] = index
        self._bucket_of_pair = bucket_of_lengths[source, target]
        sizes = np.bincount(self._bucket_of_pair, minlength=len(self.buckets))
        self._counts = [-(-int(size) // bucket.rows) for size, bucket in zip(sizes, self.buckets, strict=True)]
        self.per_epoch = sum(self._counts)
        self.plan = functools.lru_cache(maxsize=2)(self._plan)

    def _plan(self, epoch: int) -> Plan:
        rng = np.random.default_rng([self._seed, epoch])
        pairs = rng.permutation(np.arange(len(self._bucket_of_pair), dtype=np.uint32))
        pairs = pairs[np.argsort(self._bucket_of_pair[pairs], kind="stable")]
        ends = np.cumsum(np.bincount(self._bucket_of_pair, minlength=len(self.buckets)))
        starts, sizes, buckets = [], [], []
        for index, (bucket, end, count) in enumerate(zip(self.buckets, ends, self._counts, strict=True)):
            first = ends[index - 1] if index else 0
            begin = first + bucket.rows * np.arange(count)
            starts.append(begin)
            sizes.append(np.minimum(bucket.rows, end - begin))
            buckets.append(np.full(count, index))
        order = rng.permutation(self.per_epoch)
        return Plan(pairs, *(np.concatenate(x)[order] for x in (starts, sizes, buckets)))

    def bucket(self, step: int) -> Bucket:
        """The shape of batch `step`."""
        epoch, index = divmod(step, self.per_epoch)
        return self.buckets[self.plan(epoch).buckets[index]]

    def __getitem__(self, step: int) -> Batch:
        """`inputs` [rows, source_length] and `targets` [rows, target_length], int32, padded with 0."""
        epoch, index = divmod(step, self.per_epoch)
        plan, bucket = self.plan(epoch), self.bucket(step)
        start, size = plan.starts[index], plan.sizes[index]
        batch = empty_batch(bucket)
        for row, pair in enumerate(plan.pairs[start : start + size]):
            source, target = self._sources[pair], self._targets[pair]
            batch["inputs"][row, : len(source)] = source
            batch["targets"][row, : len(target)] = target
        return batch

    def iterate(self, first: int, last: int) -> Iterator[Batch]:
        """Batches of steps `first` to `last` − 1, read ahead in the background by Grain."""
        source = _Steps(self, first, last)
        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
        return iter(grain.MapDataset.source(source).to_iter_dataset(options))


@dataclasses.dataclass(frozen=True)
class _Steps:
    """A range of steps as the random-access source that Grain reads."""

    batches: Batches
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> Batch:
        return self.batches[self.first + index]


def empty_batch(bucket: Bucket) -> Batch:
    """A batch of this shape with nothing but padding."""
    lengths = {"inputs": bucket.source_length, "targets": bucket.target_length}
    return {name: np.zeros((bucket.rows, length), np.int32) for name, length in lengths.items()}


def _bucket(rectangle: Rectangle, tokens_per_batch: int) -> Bucket:
    source, target = rectangle.source[1] - 1, rectangle.target[1] - 1
    rows = tokens_per_batch // max(source, target)
    if rows < 1:
        raise InputError(
            f"data.tokens_per_batch={tokens_per_batch} is less than the longest sentence ({max(source, target)} "
            "subwords); raise it or lower data.max_length"
        )
    return Bucket(source, target, rows - rows % _ROWS_MULTIPLE if rows >= _ROWS_MULTIPLE else rows)
