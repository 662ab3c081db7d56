"""§5.1: sentence pairs → batches of about the same length, few static shapes, a pure plan of (seed, epoch).

A bucket is a shape: every pair whose sides fit it, and fit no smaller one, is batched with others of its bucket. Or
pairs are packed, several in each row, and every batch has one shape.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Protocol

import grain
import numpy as np

from t2t_jax.data.token_store import Sentences
from t2t_jax.errors import DamagedError, InputError

Batch = dict[str, np.ndarray]

# Rows are a multiple of this where there are that many, so that the usual device counts divide a batch.
_ROWS_MULTIPLE = 8
# Widths of packed rows are a multiple of this where they can be, as accelerators like them.
_WIDTH_MULTIPLE = 8
_SPARE = 0.003  # rows opened for packing beyond those that the tokens would fill, as a share of these
_PACKED = 1.008  # rows that packing ends with, for each that the tokens would fill, where there are many
_CHUNK = 1 << 20  # pairs indexed at a time, as NumPy makes 64-bit numbers of any index


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """The shape of a batch: `rows` rows of up to these lengths (subwords, EOS included).

    A row is one pair or, where `packed`, several.
    """

    source_length: int
    target_length: int
    rows: int
    packed: bool = False


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
    """The part without the empty lengths at its ends."""
    inside = _inside(counts, part)
    ranges = []
    for axis, (low, _) in ((1, part.source), (0, part.target)):
        used = np.flatnonzero(inside.any(axis=axis))
        ranges.append((low + int(used[0]), low + int(used[-1]) + 1) if len(used) else (low, low))
    return Rectangle(*ranges)


def _best_cut(counts: np.ndarray, part: Rectangle) -> tuple[int, list[Rectangle]]:
    """The padded positions that the best cut of a shrunk part saves, and its two parts."""
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
    """What cutting the first axis of a shrunk part below `low` + 1, …, `high` − 1 saves, its halves shrunk again."""
    pairs = inside.sum(axis=1)
    lengths = np.where(pairs > 0, np.arange(low, high), 0)
    across = np.where(inside > 0, np.arange(across_low, across_high), 0).max(axis=1)  # longest of the other side
    below = np.maximum.accumulate(lengths) + np.maximum.accumulate(across)
    above = high - 1 + np.maximum.accumulate(across[::-1])[::-1]
    shorter = np.cumsum(pairs)[:-1]
    total = pairs.sum()
    return total * (high + across_high - 2) - shorter * below[:-1] - (total - shorter) * above[1:]


class Plan(Protocol):
    """Which pairs make each batch of an epoch; `buckets[b]` is the shape of batch b."""

    buckets: np.ndarray

    def batch(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of a batch, and the row of each of them, rows ascending."""
        ...


@dataclasses.dataclass(frozen=True)
class BucketedPlan:
    """Batch b is `pairs[starts[b] : starts[b] + sizes[b]]`, a pair a row."""

    pairs: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    buckets: np.ndarray

    def batch(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        start, size = self.starts[index], self.sizes[index]
        return self.pairs[start : start + size], np.arange(size)


@dataclasses.dataclass(frozen=True)
class PackedPlan:
    """Batch b is `rows[starts[b] : starts[b + 1]]`; row r is the pairs `places[row_starts[r] : row_starts[r + 1]]`.

    A place is an index of `pairs`.
    """

    pairs: np.ndarray
    places: np.ndarray
    row_starts: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    buckets: np.ndarray

    def batch(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self.rows[self.starts[index] : self.starts[index + 1]]
        places = [self.places[self.row_starts[row] : self.row_starts[row + 1]] for row in rows]
        return self.pairs[np.concatenate(places)], np.repeat(np.arange(len(rows)), [len(row) for row in places])


class Layout(Protocol):
    """What does not change from epoch to epoch.

    Pairs of one group may take each other's places: group g has `group_sizes[g]` of them, and a pair belongs to
    `groups[source length, target length]`.
    """

    buckets: list[Bucket]
    per_epoch: int
    groups: np.ndarray
    group_sizes: np.ndarray

    def plan(self, pairs: np.ndarray, rng: np.random.Generator) -> Plan:
        """The plan of an epoch in which the pairs come in this order, group by group."""
        ...


class Bucketed:
    """The layout of batches of similar lengths: a group is a bucket."""

    def __init__(self, counts: np.ndarray, tokens_per_batch: int, num_buckets: int):
        rectangles = split_lengths(counts, num_buckets)
        self.buckets = [_bucket(rectangle, tokens_per_batch) for rectangle in rectangles]
        self.groups = np.zeros(counts.shape, np.uint16)
        for index, rectangle in enumerate(rectangles):
            _inside(self.groups, rectangle)[:] = index
        self.group_sizes = np.array([_inside(counts, rectangle).sum() for rectangle in rectangles])
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


class Packed:
    """The layout of packed rows: a group is all pairs of the same two lengths.

    Rows are packed once, by lengths alone; which pair of these lengths comes where, and which rows make a batch,
    each epoch draws anew.
    """

    def __init__(self, counts: np.ndarray, tokens_per_batch: int):
        source, target = np.nonzero(counts)
        order = np.argsort(-(source + target), kind="stable")  # longest pairs first
        source, target = source[order], target[order]
        self.groups = np.zeros(counts.shape, np.min_scalar_type(len(order)))
        self.groups[source, target] = np.arange(len(order))
        self.group_sizes = counts[source, target]
        bucket = _packed_bucket(counts, tokens_per_batch)
        self.buckets = [bucket]
        dtype = np.min_scalar_type(-2 * max(bucket.source_length, bucket.target_length))  # sums and differences fit
        lengths = (np.repeat(length.astype(dtype), self.group_sizes) for length in (source, target))
        row_of_place = pack(*lengths, bucket.source_length, bucket.target_length)
        self._places = np.argsort(row_of_place, kind="stable").astype(np.uint32)
        self._row_starts = np.concatenate([[0], np.cumsum(np.bincount(row_of_place))])
        self._num_rows = len(self._row_starts) - 1
        self.per_epoch = -(-self._num_rows // bucket.rows)

    def plan(self, pairs: np.ndarray, rng: np.random.Generator) -> PackedPlan:
        starts = np.arange(self.per_epoch + 1) * self._num_rows // self.per_epoch
        buckets = np.zeros(self.per_epoch, np.uint8)
        return PackedPlan(pairs, self._places, self._row_starts, rng.permutation(self._num_rows), starts, buckets)


def pack(source: np.ndarray, target: np.ndarray, source_width: int, target_width: int) -> np.ndarray:
    """The row of each pair, given their lengths, longest pairs first; rows are numbered from 0, none is empty.

    The lengths' integer type must hold twice the widths, which must hold every pair.
    """
    rows, opened = np.full(len(source), -1, np.int32), 0
    left = np.arange(len(source), dtype=np.uint32)
    while len(left):
        found, used = _fill(source[left], target[left], source_width, target_width)
        rows[left] = np.where(found < 0, -1, found + opened)
        left, opened = left[found < 0], opened + used
    return rows


def _fill(source: np.ndarray, target: np.ndarray, source_width: int, target_width: int) -> tuple[np.ndarray, int]:
    """The row of each pair, −1 where none had room for it, and the number of rows.

    As many rows as the tokens need are open at once. In each round every open row is offered one pair, all of them of
    nearly the same length: to the row with the most room on the source side compared to the target side goes the
    pair that takes most of it. Longest pairs first, so that the short ones even out what is left.
    """
    needed = max(source.sum(dtype=np.int64) / source_width, target.sum(dtype=np.int64) / target_width)
    num_rows = min(len(source), math.ceil(needed) + int(_SPARE * needed))
    rows = np.full(len(source), -1, np.int32)
    source_room = np.full(num_rows, source_width, source.dtype)
    target_room = np.full(num_rows, target_width, target.dtype)
    shortest, following, deferred = (source.min(), target.min()), 0, np.zeros(0, np.int64)
    while following < len(source) or len(deferred):
        available = np.flatnonzero((source_room >= shortest[0]) & (target_room >= shortest[1]))
        new = max(0, min(len(available) - len(deferred), len(source) - following))
        pairs, deferred = deferred[: len(available)], deferred[len(available) :]
        pairs = np.concatenate([pairs, np.arange(following, following + new)])
        following += new
        if not len(pairs):
            break
        if len(pairs) < len(available):
            room = source_room[available] + target_room[available]
            available = np.sort(available[np.argsort(-room, kind="stable")[: len(pairs)]])
        pairs = pairs[np.argsort(source[pairs] - target[pairs], kind="stable")]
        offered = available[np.argsort(source_room[available] - target_room[available], kind="stable")]
        fits = (source[pairs] <= source_room[offered]) & (target[pairs] <= target_room[offered])
        placed, taken = pairs[fits], offered[fits]
        rows[placed] = taken
        source_room[taken] -= source[placed]
        target_room[taken] -= target[placed]
        if 8 * len(placed) >= len(pairs):  # otherwise the rows are too full for pairs of this length
            deferred = np.concatenate([np.sort(pairs[~fits]), deferred])
    return rows, num_rows


class Batches:
    """The batches of a whole run, by step. Batch n is a pure function of the sentences, the settings and n.

    `tokens_per_batch` bounds the positions of a global batch on each side, padding included. Step n belongs to
    epoch n // `per_epoch`; each epoch holds every pair exactly once, in an order of its own, short batches padded
    with empty rows to the shape of their bucket. With `packing`, rows hold several pairs and there is one bucket.
    """

    def __init__(
        self,
        sources: Sentences,
        targets: Sentences,
        *,
        tokens_per_batch: int,
        num_buckets: int,
        seed: int,
        packing: bool = False,
    ):
        self._sources, self._targets, self._seed = sources, targets, seed
        source, target = sources.lengths(), targets.lengths()
        counts = _count_lengths(source, target)
        layout = Packed(counts, tokens_per_batch) if packing else Bucketed(counts, tokens_per_batch, num_buckets)
        self._layout: Layout = layout
        self._group_of_pair = _look_up(layout.groups, source, target)
        self.buckets, self.per_epoch = layout.buckets, layout.per_epoch
        self.plan = functools.lru_cache(maxsize=2)(self._plan)

    def _plan(self, epoch: int) -> Plan:
        rng = np.random.default_rng([self._seed, epoch])
        pairs = np.arange(len(self._group_of_pair), dtype=np.uint32)
        rng.shuffle(pairs)
        return self._layout.plan(_grouped(pairs, self._group_of_pair, self._layout.group_sizes), rng)

    def bucket(self, step: int) -> Bucket:
        """The shape of batch `step`."""
        epoch, index = divmod(step, self.per_epoch)
        return self.buckets[self.plan(epoch).buckets[index]]

    def __getitem__(self, step: int) -> Batch:
        """`inputs` [rows, source_length] and `targets` [rows, target_length], int32, padded with 0.

        Where rows are packed, `input_segments` and `target_segments` of the same shapes number the pairs of each
        row from 1; padding is 0.
        """
        epoch, index = divmod(step, self.per_epoch)
        pairs, rows = self.plan(epoch).batch(index)
        batch = empty_batch(self.bucket(step))
        for side, sentences in (("input", self._sources), ("target", self._targets)):
            _write(batch, side, [sentences[pair] for pair in pairs.tolist()], rows)
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
        step = self.first + index
        try:
            return self.batches[step]
        except Exception as error:  # whatever it is, in Grain's thread nobody could tell which batch it was
            raise DamagedError(
                f"data: the batch of step {step + 1} cannot be made ({type(error).__name__}: {error}); "
                "the same command resumes from the last checkpoint"
            ) from error


def empty_batch(bucket: Bucket) -> Batch:
    """A batch of this shape with nothing but padding."""
    lengths = {"inputs": bucket.source_length, "targets": bucket.target_length}
    if bucket.packed:
        lengths |= {"input_segments": bucket.source_length, "target_segments": bucket.target_length}
    return {name: np.zeros((bucket.rows, length), np.int32) for name, length in lengths.items()}


def pair_lengths(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """The lengths of the pairs of a batch, source and target."""
    if "input_segments" not in batch:
        return tuple(np.count_nonzero(batch[f"{side}s"], axis=1) for side in ("input", "target"))
    rows = np.arange(len(batch["inputs"]))[:, None]
    return tuple(_runs(batch[f"{side}_segments"], rows) for side in ("input", "target"))


def _runs(segments: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """How many positions have each number in each row."""
    highest = segments.max() + 1
    return np.bincount((rows * highest + segments)[segments > 0], minlength=len(rows) * highest)


def _write(batch: Batch, side: str, sentences: list[np.ndarray], rows: np.ndarray) -> None:
    """Writes sentence i into row `rows[i]`, behind those before it."""
    lengths = np.array([len(sentence) for sentence in sentences])
    starts = np.cumsum(lengths) - lengths
    first = np.searchsorted(rows, rows)  # the first sentence of each one's row
    columns = np.arange(lengths.sum()) - np.repeat(starts[first], lengths)
    where = np.repeat(rows, lengths), columns
    batch[f"{side}s"][where] = np.concatenate(sentences)
    if f"{side}_segments" in batch:
        batch[f"{side}_segments"][where] = np.repeat(np.arange(len(rows)) - first + 1, lengths)


# --- Lengths of many pairs, a part of them at a time ---------------------------------------------------------


def _chunks(length: int) -> Iterator[slice]:
    return (slice(start, start + _CHUNK) for start in range(0, length, _CHUNK))


def _count_lengths(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The number of pairs of each two lengths, [source length, target length]."""
    shape = int(source.max()) + 1, int(target.max()) + 1
    counts = np.zeros(math.prod(shape), np.int64)
    for part in _chunks(len(source)):
        cells = source[part].astype(np.int64) * shape[1] + target[part]
        counts += np.bincount(cells, minlength=len(counts))
    return counts.reshape(shape)


def _look_up(table: np.ndarray, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """`table[source, target]`."""
    found = np.empty(len(source), table.dtype)
    for part in _chunks(len(source)):
        found[part] = table[source[part], target[part]]
    return found


def _grouped(pairs: np.ndarray, group_of_pair: np.ndarray, group_sizes: np.ndarray) -> np.ndarray:
    """The pairs stably sorted by their group."""
    grouped = np.empty_like(pairs)
    free = np.cumsum(group_sizes) - group_sizes  # the next place of each group
    for part in _chunks(len(pairs)):
        groups = group_of_pair[pairs[part]]
        sizes = np.bincount(groups, minlength=len(free))
        places = np.repeat(free - (np.cumsum(sizes) - sizes), sizes) + np.arange(len(groups))
        grouped[places] = pairs[part][np.argsort(groups, kind="stable")]
        free += sizes
    return grouped


# --- The shapes of batches -----------------------------------------------------------------------------------


def _bucket(rectangle: Rectangle, tokens_per_batch: int) -> Bucket:
    source, target = rectangle.source[1] - 1, rectangle.target[1] - 1
    rows = _rows_of(tokens_per_batch, max(source, target))
    return Bucket(source, target, rows - rows % _ROWS_MULTIPLE if rows >= _ROWS_MULTIPLE else rows)


def _rows_of(tokens_per_batch: int, longest: int) -> int:
    rows = tokens_per_batch // longest
    if rows < 1:
        raise InputError(
            f"data.tokens_per_batch={tokens_per_batch} is less than the longest sentence ({longest} "
            "subwords); raise it or lower data.max_length"
        )
    return rows


def _packed_bucket(counts: np.ndarray, tokens_per_batch: int) -> Bucket:
    """The shape of all packed batches: rows of about twice the longest sentence, or more, where eight of them fit.

    Within an eighth of that, the widths are those that leave the least empty after rounding them and the number of
    batches.
    """
    longest = np.array(counts.shape) - 1
    tokens = np.array([counts.sum(axis=1 - side) @ np.arange(length + 1) for side, length in enumerate(longest)])
    room = _rows_of(tokens_per_batch, int(longest.max()))
    rows = max(room // 2 // _ROWS_MULTIPLE * _ROWS_MULTIPLE, min(room, _ROWS_MULTIPLE))
    widest = tokens_per_batch // rows
    lowest = np.where(tokens < tokens.max(), longest, np.maximum(longest, 7 * widest // 8))
    sides = [[n for n in range(low, widest + 1) if n % _WIDTH_MULTIPLE == 0] or [widest] for low in lowest]

    def positions(widths):
        batches = math.ceil(max(_PACKED * tokens / widths) / rows)
        return batches * sum(widths), -sum(widths)

    return Bucket(*min(itertools.product(*sides), key=positions), rows, packed=True)
