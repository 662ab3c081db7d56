"""§5.1: sequence packing: each row holds several pairs, so a few batch shapes have hardly any padding."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from t2t_jax.data.bucketing import ROWS_MULTIPLE, Bucket, rows_of

_LENGTH_MULTIPLE = 8  # row lengths are a multiple of this where possible, which suits the tiles of accelerators
_SPARE = 0.003  # extra rows that `_fill` opens, as a fraction of the rows that the tokens alone would fill
_FILLERS = 8  # short pairs, of all lengths, that are offered to a row of long ones
_WASTE = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0)]  # source and target positions left free by a last pair
_PACKED = 1.008  # rows after packing a large corpus, divided by the rows that the tokens alone would fill


@dataclasses.dataclass(frozen=True)
class PackedPlan:
    """Batch b is `rows[starts[b] : ends[b]]`; row r holds `pairs[indices[row_starts[r] : row_starts[r + 1]]]`."""

    pairs: np.ndarray
    indices: np.ndarray
    row_starts: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    buckets: np.ndarray

    def batch(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self.rows[self.starts[index] : self.ends[index]]
        indices = [self.indices[self.row_starts[row] : self.row_starts[row + 1]] for row in rows]
        return self.pairs[np.concatenate(indices)], np.repeat(np.arange(len(rows)), [len(row) for row in indices])


class Packed:
    """The layout of packed batches: a group is all pairs with the same source length and the same target length.

    Rows are packed once, by lengths alone. Each epoch randomly assigns pairs to the slots of their lengths, and rows to
    batches. With several shapes, short pairs are packed into short rows, in which attention costs less.
    """

    def __init__(self, counts: np.ndarray, tokens_per_batch: int, num_shapes: int):
        source, target = np.nonzero(counts)
        order = np.argsort(-(source + target), kind="stable")  # longest pairs first
        self._source, self._target = source, target = source[order], target[order]
        self.groups = np.zeros(counts.shape, np.min_scalar_type(len(order)))
        self.groups[source, target] = np.arange(len(order))
        self._tokens_per_batch, self._num_shapes = tokens_per_batch, num_shapes
        self.group_sizes = counts[source, target]

    def resize(self, group_sizes: np.ndarray) -> None:
        self.group_sizes = group_sizes
        counts = np.zeros(self.groups.shape, np.int64)
        counts[self._source, self._target] = group_sizes
        buckets, limits = packed_buckets(counts, self._tokens_per_batch, self._num_shapes)
        longest = max(max(bucket.source_length, bucket.target_length) for bucket in buckets)
        dtype = np.min_scalar_type(-2 * longest)  # sums and differences fit
        lengths = (np.repeat(side.astype(dtype), group_sizes) for side in (self._source, self._target))
        row_of_index, num_rows = pack_shapes(*lengths, buckets, limits)
        self._indices = np.argsort(row_of_index, kind="stable").astype(np.uint32)
        self._row_starts = np.concatenate([[0], np.cumsum(np.bincount(row_of_index))])
        self._num_rows = num_rows[num_rows > 0]
        self.buckets = [bucket for bucket, count in zip(buckets, num_rows, strict=True) if count]
        self._num_batches = -(-self._num_rows // [bucket.rows for bucket in self.buckets])
        self.per_epoch = int(self._num_batches.sum())

    def plan(self, pairs: np.ndarray, rng: np.random.Generator) -> PackedPlan:
        sizes, counts = self._num_rows, self._num_batches
        first = np.cumsum(sizes) - sizes
        rows = np.concatenate([start + rng.permutation(size) for start, size in zip(first, sizes, strict=True)])
        shares = [np.arange(count + 1) * size // count for count, size in zip(counts, sizes, strict=True)]
        bounds = [start + share for start, share in zip(first, shares, strict=True)]
        starts, ends = (np.concatenate([bound[part] for bound in bounds]) for part in (slice(-1), slice(1, None)))
        buckets = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
        # With one shape the batches are in random order as they are.
        order = rng.permutation(self.per_epoch) if len(counts) > 1 else slice(None)
        return PackedPlan(pairs, self._indices, self._row_starts, rows, starts[order], ends[order], buckets[order])


def pack_shapes(
    source: np.ndarray, target: np.ndarray, buckets: Sequence[Bucket], limits: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """The row of each pair, given the pairs' lengths, longest first, and the number of rows of each bucket.

    Rows of the first bucket come first. Pairs with a side longer than `limits[k]` are in rows of the buckets after k;
    shorter ones fill the gaps that they leave.
    """
    if len(buckets) == 1:
        row = pack(source, target, buckets[0].source_length, buckets[0].target_length)
        return row, np.array([row.max() + 1])
    longest = np.maximum(source, target)
    bucket, row = np.zeros(len(source), np.uint8), np.full(len(source), -1, np.int32)
    counts = np.zeros(len(buckets), np.int64)
    for index in range(len(buckets) - 1, 0, -1):
        lengths, limit = (buckets[index].source_length, buckets[index].target_length), limits[index - 1]
        while len(long := np.flatnonzero((row < 0) & (longest > limit))):
            num_rows = _rows_needed(source[long], target[long], *lengths)
            short = np.flatnonzero((row < 0) & (longest <= limit))
            offered = np.concatenate([long, short[:: 1 + len(short) // (_FILLERS * num_rows)]])
            found = _fill(source[offered], target[offered], *lengths, num_rows, exactly=True)
            placed = offered[found >= 0]
            row[placed], bucket[placed] = found[found >= 0] + counts[index], index
            counts[index] += num_rows
    left = np.flatnonzero(row < 0)
    if len(left):
        shortest = buckets[0].source_length, buckets[0].target_length
        row[left] = pack(source[left], target[left], *shortest, exactly=True)
        counts[0] = row[left].max() + 1
    return row + (np.cumsum(counts) - counts).astype(np.int32)[bucket], counts


def pack(
    source: np.ndarray, target: np.ndarray, source_length: int, target_length: int, exactly: bool = False
) -> np.ndarray:
    """Bin packing: the row of each pair, given the pairs' lengths, longest first. Rows are 0, 1, …; none is empty.

    A row holds `source_length` and `target_length` subwords, no fewer than any pair has. The integer type of the
    lengths must be able to hold twice these. `exactly` as for `_fill`.
    """
    rows, opened = np.full(len(source), -1, np.int32), 0
    left = np.arange(len(source), dtype=np.uint32)
    while len(left):
        num_rows = _rows_needed(source[left], target[left], source_length, target_length)
        found = _fill(source[left], target[left], source_length, target_length, num_rows, exactly)
        rows[left] = np.where(found < 0, -1, found + opened)
        left, opened = left[found < 0], opened + num_rows
    return rows


def _rows_needed(source: np.ndarray, target: np.ndarray, source_length: int, target_length: int) -> int:
    """How many rows to open for these pairs: as many as their tokens would fill, and a few."""
    needed = max(source.sum(dtype=np.int64) / source_length, target.sum(dtype=np.int64) / target_length)
    return min(len(source), math.ceil(needed) + int(_SPARE * needed))


def _fill(
    source: np.ndarray, target: np.ndarray, source_length: int, target_length: int, num_rows: int, exactly: bool
) -> np.ndarray:
    """The row of each pair, −1 if it fitted into none of `num_rows` rows.

    The rows are filled in rounds. Each round offers one pair to every row, longest pairs first, so that short pairs
    fill the gaps at the end; the pairs of a round have nearly equal lengths. Rows sorted by free source minus free
    target positions meet pairs sorted by source minus target length. `exactly`: before each round but the first, rows
    get a pair that fills what is free, or nearly; pairs of the same lengths must then be neighbours.
    """
    queue = _Queue(source, target)
    rows = np.full(len(source), -1, np.int32)
    source_free = np.full(num_rows, source_length, source.dtype)
    target_free = np.full(num_rows, target_length, target.dtype)
    shortest, following, deferred = (source.min(), target.min()), 0, np.zeros(0, np.int64)

    def place(pairs, taken):
        rows[pairs] = taken
        source_free[taken] -= source[pairs]
        target_free[taken] -= target[pairs]

    while following < len(source) or len(deferred):
        if exactly and following:
            for waste in _WASTE:
                place(*queue.take(source_free - waste[0], target_free - waste[1], following))
        available = np.flatnonzero((source_free >= shortest[0]) & (target_free >= shortest[1]))
        new, following = queue.next(following, len(available) - len(deferred))
        pairs, deferred = np.concatenate([deferred[: len(available)], new]), deferred[len(available) :]
        if not len(pairs):
            break
        if len(pairs) < len(available):
            free = source_free[available] + target_free[available]
            available = np.sort(available[np.argsort(-free, kind="stable")[: len(pairs)]])
        pairs = pairs[np.argsort(source[pairs] - target[pairs], kind="stable")]
        offered = available[np.argsort(source_free[available] - target_free[available], kind="stable")]
        fits = (source[pairs] <= source_free[offered]) & (target[pairs] <= target_free[offered])
        place(pairs[fits], offered[fits])
        if 8 * fits.sum() >= len(pairs):  # otherwise the rows are too full for pairs of this length
            deferred = np.concatenate([np.sort(pairs[~fits]), deferred])
    return rows


class _Queue:
    """Pairs that are taken one after the other, or by their lengths: the last of those with these lengths."""

    def __init__(self, source: np.ndarray, target: np.ndarray):
        begins = np.flatnonzero(np.append(True, (source[1:] != source[:-1]) | (target[1:] != target[:-1])))
        self._begins, self._ends = begins, np.append(begins[1:], len(source))
        self._cells = np.full((int(source.max()) + 1, int(target.max()) + 1), -1)  # by the two lengths; -1: no pair
        self._cells[source[begins], target[begins]] = np.arange(len(begins))
        self._cell_of_pair = np.repeat(np.arange(len(begins), dtype=np.uint32), self._ends - begins)

    def next(self, following: int, count: int) -> tuple[np.ndarray, int]:
        """At most `count` pairs from the index `following` on that have not been taken, and the index after them."""
        found = [np.zeros(0, np.int64)]
        while count > 0 and following < len(self._cell_of_pair):
            part = np.arange(following, min(following + count, len(self._cell_of_pair)))
            following += len(part)
            found.append(part[part < self._ends[self._cell_of_pair[part]]])
            count -= len(found[-1])
        return np.concatenate(found), following

    def take(self, source: np.ndarray, target: np.ndarray, following: int) -> tuple[np.ndarray, np.ndarray]:
        """Pairs from the index `following` on with these lengths, and for which of the lengths each is."""
        known = (source > 0) & (target > 0) & (source < self._cells.shape[0]) & (target < self._cells.shape[1])
        wanted = np.flatnonzero(known)
        cells = self._cells[source[wanted], target[wanted]]
        order = np.argsort(cells, kind="stable")
        wanted, cells = wanted[order], cells[order]
        rank = np.arange(len(cells)) - np.searchsorted(cells, cells)
        has = (cells >= 0) & (rank < self._ends[cells] - np.maximum(self._begins[cells], following))
        wanted, cells, rank = wanted[has], cells[has], rank[has]
        pairs = self._ends[cells] - 1 - rank
        self._ends -= np.bincount(cells, minlength=len(self._ends))
        return pairs, wanted


def packed_buckets(counts: np.ndarray, tokens_per_batch: int, num_shapes: int) -> tuple[list[Bucket], list[int]]:
    """At most `num_shapes` shapes, from short rows to long ones, and the longest sentences of all but the last.

    Rows of the first shape hold two of its longest sentences, those of the others one, and shorter pairs fill the gaps.
    Attention costs each token in proportion to the length of its row: dynamic programming over multiples of 8 finds the
    limits for which the longest sentences of the tokens' shapes are shortest. Each shape has more rows than the next.
    """
    sides = np.indices(counts.shape)
    tokens = np.bincount(np.maximum(*sides).ravel(), (counts * sides.sum(axis=0)).ravel())
    ends = np.array([*range(0, len(tokens) - 1, _LENGTH_MULTIPLE), len(tokens) - 1])
    below = np.cumsum(tokens)[ends]
    cost = np.where(ends[:, None] <= ends, (below - below[:, None]) * ends, np.inf)  # of the pairs between two ends
    total, choices = cost[0], []
    for _ in range(num_shapes - 1):
        through = total[:, None] + cost
        choices.append(through.argmin(axis=0))
        total = through.min(axis=0)
    limits, end = [int(ends[-1])], len(ends) - 1
    for choice in reversed(choices):
        end = choice[end]
        limits.append(int(ends[end]))
    limits = [limit for limit in sorted(set(limits)) if counts[: limit + 1, : limit + 1].any()]
    buckets = [
        _packed_bucket(counts[: limit + 1, : limit + 1], tokens_per_batch, sentences=2 if limit == limits[0] else 1)
        for limit in limits
    ]
    if any(shorter.rows <= longer.rows for shorter, longer in itertools.pairwise(buckets)):
        return packed_buckets(counts, tokens_per_batch, num_shapes - 1)
    return buckets, limits[:-1]


def _packed_bucket(counts: np.ndarray, tokens_per_batch: int, sentences: int) -> Bucket:
    """A shape for packed batches: rows that hold so many of the longest sentences, or one if else 8 rows do not fit.

    The row lengths are those with the least padding, the incomplete last batch included; on the side with more tokens,
    only lengths of at least 7/8 of the largest possible one are tried.
    """
    longest = np.array(counts.shape) - 1
    tokens = np.array([counts.sum(axis=1 - side) @ np.arange(length + 1) for side, length in enumerate(longest)])
    most_rows = rows_of(tokens_per_batch, int(longest.max()))
    rows = max(most_rows // sentences // ROWS_MULTIPLE * ROWS_MULTIPLE, min(most_rows, ROWS_MULTIPLE))
    highest = tokens_per_batch // rows
    lowest = np.where(tokens < tokens.max(), longest, np.maximum(longest, 7 * highest // 8))
    sides = [[n for n in range(low, highest + 1) if n % _LENGTH_MULTIPLE == 0] or [highest] for low in lowest]

    def positions(lengths):
        batches = math.ceil(max(_PACKED * tokens / lengths) / rows)
        return batches * sum(lengths), -sum(lengths)

    return Bucket(*min(itertools.product(*sides), key=positions), rows, packed=True)
