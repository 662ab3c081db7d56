"""§5.1: length bucketing: pairs of similar lengths are batched together, in a few static shapes.

Each pair of (source length, target length) belongs to one bucket, which pads it to the bucket's lengths.
"""

import dataclasses
from typing import NamedTuple, Protocol

import numpy as np

from t2t_jax.errors import InputError

ROWS_MULTIPLE = 8  # batches of 8 rows or more have a multiple of 8, which 2, 4 or 8 devices divide evenly


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """The shape of a batch: `rows` rows of these padded lengths (in subwords, EOS included).

    A row holds one pair, or several if `packed`.
    """

    source_length: int
    target_length: int
    rows: int
    packed: bool = False


class Plan(Protocol):
    """The assignment of pairs to the batches of one epoch; batch b has the shape `buckets[b]`."""

    buckets: np.ndarray

    def batch(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of a batch and the row of each; rows ascend."""
        ...


class Layout(Protocol):
    """What all epochs share: the shapes of the batches, and groups of interchangeable pairs.

    A pair belongs to the group `groups[source length, target length]`; group g has `group_sizes[g]` pairs. Epochs
    differ in the order of the pairs within their groups.
    """

    buckets: list[Bucket]
    per_epoch: int
    groups: np.ndarray
    group_sizes: np.ndarray

    def resize(self, group_sizes: np.ndarray) -> None:
        """Fixes how many pairs of each group an epoch holds, and with that the batches; called once."""
        ...

    def plan(self, pairs: np.ndarray, rng: np.random.Generator) -> Plan:
        """The plan of an epoch, given all pairs sorted by group and shuffled within each group."""
        ...


class Buckets(NamedTuple):
    """Padded lengths (source, target) of each bucket, and the bucket of each [source length, target length]."""

    lengths: list[tuple[int, int]]
    of_pair: np.ndarray


# --- The smallest shape that holds a pair ------------------------------------------------------------------

_UNFIT = np.iinfo(np.uint16).max  # more than the positions of any pair
_STEPS = (8, 4, 2, 1)  # by which the local search moves lengths


def smallest_shapes(counts: np.ndarray, num_buckets: int) -> Buckets:
    """At most `num_buckets` shapes; each pair of lengths with `counts[source, target] > 0` is in the smallest one.

    Local search: starts from the shapes of `partition`, and moves the lengths of one at a time as long as that saves
    padding.
    """
    source, target = np.nonzero(counts)
    pairs = counts[source, target].astype(float)  # sums of whole numbers: exact in any order

    def positions(shape: tuple[int, int]) -> np.ndarray:
        """What each pair takes in this shape."""
        return np.where((source <= shape[0]) & (target <= shape[1]), sum(shape), _UNFIT).astype(np.uint16)

    def moved(shape: tuple[int, int], step: int, others: np.ndarray) -> tuple[int, int]:
        """The best of `shape` and its neighbours, where the other shapes take `others` positions for each pair."""
        moves = ((0, 0), (step, 0), (-step, 0), (0, step), (0, -step), (step, step), (-step, -step))
        candidates = [(shape[0] + a, shape[1] + b) for a, b in moves]
        found = (np.minimum(others, positions(candidate)) for candidate in candidates)
        totals = [pairs @ x if x.max() < _UNFIT else np.inf for x in found]
        return candidates[int(np.argmin(totals))]

    shapes = partition(counts, num_buckets).lengths
    for step in _STEPS:
        before = None
        while shapes != before:
            before = list(shapes)
            taken = np.array([positions(shape) for shape in (*shapes, (0, 0))])
            later = np.minimum.accumulate(taken[::-1], axis=0)[::-1]  # of shapes k, k + 1, …
            earlier = taken[-1]
            for k, shape in enumerate(before):
                shapes[k] = moved(shape, step, np.minimum(earlier, later[k + 1]))
                earlier = np.minimum(earlier, positions(shapes[k]))
    smallest = np.argmin([positions(shape) for shape in shapes], axis=0)
    used, of_cell = np.unique(smallest, return_inverse=True)
    of_pair = np.zeros(counts.shape, np.uint16)
    of_pair[source, target] = of_cell
    return Buckets([shapes[k] for k in used], of_pair)


# --- A partition of the plane of lengths into rectangles ---------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rectangle:
    """A range of source and target lengths, [low, high) each."""

    source: tuple[int, int]
    target: tuple[int, int]


def partition(counts: np.ndarray, num_buckets: int) -> Buckets:
    """At most `num_buckets` buckets, each of which holds the pairs of one rectangle of `split_lengths`."""
    rectangles, of_pair = split_lengths(counts, num_buckets), np.zeros(counts.shape, np.uint16)
    for index, rectangle in enumerate(rectangles):
        _inside(of_pair, rectangle)[:] = index
    return Buckets([(part.source[1] - 1, part.target[1] - 1) for part in rectangles], of_pair)


def split_lengths(counts: np.ndarray, num_buckets: int) -> list[Rectangle]:
    """Divides the histogram `counts[source length, target length]` into at most `num_buckets` rectangles.

    Greedy: starts from one rectangle and repeatedly makes the cut that saves the most padding. A cut halves a single
    rectangle along one axis, so rectangles need not share boundaries.
    """
    parts = [_shrink(counts, Rectangle((0, counts.shape[0]), (0, counts.shape[1])))]
    cuts = [_best_cut(counts, parts[0])]
    while len(parts) < num_buckets:
        index = int(np.argmax([saved for saved, _ in cuts]))
        saved, halves = cuts[index]
        if saved <= 0:
            break
        parts[index : index + 1] = halves
        cuts[index : index + 1] = [_best_cut(counts, half) for half in halves]
    return parts


def _inside(counts: np.ndarray, part: Rectangle) -> np.ndarray:
    return counts[slice(*part.source), slice(*part.target)]


def _shrink(counts: np.ndarray, part: Rectangle) -> Rectangle:
    """The smallest rectangle that holds all pairs of `part`."""
    inside = _inside(counts, part)
    ranges = []
    for axis, (low, _) in ((1, part.source), (0, part.target)):
        used = np.flatnonzero(inside.any(axis=axis))
        ranges.append((low + int(used[0]), low + int(used[-1]) + 1) if len(used) else (low, low))
    return Rectangle(*ranges)


def _best_cut(counts: np.ndarray, part: Rectangle) -> tuple[int, list[Rectangle]]:
    """The number of padded positions that the best cut of a shrunk rectangle saves, and its two halves, shrunk."""
    inside = _inside(counts, part)
    by_source, by_target = _savings(inside, *part.source, *part.target), _savings(inside.T, *part.target, *part.source)
    savings = np.concatenate([by_source, by_target])
    if not len(savings):
        return 0, []
    best = int(np.argmax(savings))
    if best < len(by_source):
        at = part.source[0] + 1 + best
        halves = Rectangle((part.source[0], at), part.target), Rectangle((at, part.source[1]), part.target)
    else:
        at = part.target[0] + 1 + best - len(by_source)
        halves = Rectangle(part.source, (part.target[0], at)), Rectangle(part.source, (at, part.target[1]))
    return int(savings[best]), [_shrink(counts, half) for half in halves]


def _savings(inside: np.ndarray, low: int, high: int, across_low: int, across_high: int) -> np.ndarray:
    """The padded positions saved by a cut of the first axis before `low` + 1, …, `high` − 1, both halves shrunk."""
    pairs = inside.sum(axis=1)
    lengths = np.where(pairs > 0, np.arange(low, high), 0)
    across = np.where(inside > 0, np.arange(across_low, across_high), 0).max(axis=1)  # longest of the other side
    below = np.maximum.accumulate(lengths) + np.maximum.accumulate(across)
    above = high - 1 + np.maximum.accumulate(across[::-1])[::-1]
    shorter = np.cumsum(pairs)[:-1]
    total = pairs.sum()
    return total * (high + across_high - 2) - shorter * below[:-1] - (total - shorter) * above[1:]


# Values of `data.bucketing`.
BUCKETINGS = {"smallest_shape": smallest_shapes, "partition": partition}


# --- Batches -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BucketedPlan:
    """Batch b is `pairs[starts[b] : starts[b] + sizes[b]]`, one pair per row."""

    pairs: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    buckets: np.ndarray

    def batch(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        start, size = self.starts[index], self.sizes[index]
        return self.pairs[start : start + size], np.arange(size)


class Bucketed:
    """The layout of length-bucketed batches: the groups are the buckets."""

    def __init__(self, counts: np.ndarray, tokens_per_batch: int, num_buckets: int, bucketing: str):
        lengths, self.groups = BUCKETINGS[bucketing](counts, num_buckets)
        self.buckets = [_bucket(*pair, tokens_per_batch) for pair in lengths]
        sizes = np.bincount(self.groups.ravel(), weights=counts.ravel(), minlength=len(lengths))
        self.group_sizes = sizes.astype(np.int64)

    def resize(self, group_sizes: np.ndarray) -> None:
        self.group_sizes = group_sizes
        self._counts = -(-self.group_sizes // [bucket.rows for bucket in self.buckets])
        self.per_epoch = int(self._counts.sum())

    def plan(self, pairs: np.ndarray, rng: np.random.Generator) -> BucketedPlan:
        starts, sizes = [], []
        ends = np.cumsum(self.group_sizes)
        for bucket, end, size, count in zip(self.buckets, ends, self.group_sizes, self._counts, strict=True):
            starts.append(end - size + bucket.rows * np.arange(count))
            sizes.append(np.minimum(bucket.rows, end - starts[-1]))
        buckets = np.repeat(np.arange(len(self.buckets)), self._counts)
        order = rng.permutation(self.per_epoch)
        return BucketedPlan(pairs, *(x[order] for x in (np.concatenate(starts), np.concatenate(sizes), buckets)))


def _bucket(source: int, target: int, tokens_per_batch: int) -> Bucket:
    rows = rows_of(tokens_per_batch, max(source, target))
    return Bucket(source, target, rows - rows % ROWS_MULTIPLE if rows >= ROWS_MULTIPLE else rows)


def rows_of(tokens_per_batch: int, longest: int) -> int:
    """How many rows of the length `longest` fit into a batch; refuses a budget below one row."""
    rows = tokens_per_batch // longest
    if rows < 1:
        raise InputError(
            f"data.tokens_per_batch={tokens_per_batch} is less than the longest sentence ({longest} "
            "subwords); raise it or lower data.max_length"
        )
    return rows
