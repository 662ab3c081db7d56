"""§5.1: sequence packing: each row holds several pairs, so all batches have one shape and hardly any padding."""

import dataclasses
import itertools
import math

import numpy as np

from t2t_jax.data.bucketing import ROWS_MULTIPLE, Bucket, rows_of

_LENGTH_MULTIPLE = 8  # row lengths are a multiple of this where possible, which suits the tiles of accelerators
_SPARE = 0.003  # extra rows that `_fill` opens, as a fraction of the rows that the tokens alone would fill
_PACKED = 1.008  # rows after packing a large corpus, divided by the rows that the tokens alone would fill


@dataclasses.dataclass(frozen=True)
class PackedPlan:
    """Batch b is `rows[starts[b] : starts[b + 1]]`; row r holds `pairs[indices[row_starts[r] : row_starts[r + 1]]]`."""

    pairs: np.ndarray
    indices: np.ndarray
    row_starts: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    buckets: np.ndarray

    def batch(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self.rows[self.starts[index] : self.starts[index + 1]]
        indices = [self.indices[self.row_starts[row] : self.row_starts[row + 1]] for row in rows]
        return self.pairs[np.concatenate(indices)], np.repeat(np.arange(len(rows)), [len(row) for row in indices])


class Packed:
    """The layout of packed batches: a group is all pairs with the same source length and the same target length.

    Rows are packed once, by lengths alone. Each epoch randomly assigns pairs to the slots of their lengths, and rows to
    batches.
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
        row_of_index = pack(*lengths, bucket.source_length, bucket.target_length)
        self._indices = np.argsort(row_of_index, kind="stable").astype(np.uint32)
        self._row_starts = np.concatenate([[0], np.cumsum(np.bincount(row_of_index))])
        self._num_rows = len(self._row_starts) - 1
        self.per_epoch = -(-self._num_rows // bucket.rows)

    def plan(self, pairs: np.ndarray, rng: np.random.Generator) -> PackedPlan:
        starts = np.arange(self.per_epoch + 1) * self._num_rows // self.per_epoch
        buckets = np.zeros(self.per_epoch, np.uint8)
        return PackedPlan(pairs, self._indices, self._row_starts, rng.permutation(self._num_rows), starts, buckets)


def pack(source: np.ndarray, target: np.ndarray, source_length: int, target_length: int) -> np.ndarray:
    """Bin packing: the row of each pair, given the pairs' lengths, longest first. Rows are 0, 1, …; none is empty.

    A row holds `source_length` and `target_length` subwords, no fewer than any pair has. The integer type of the
    lengths must be able to hold twice these.
    """
    rows, opened = np.full(len(source), -1, np.int32), 0
    left = np.arange(len(source), dtype=np.uint32)
    while len(left):
        found, used = _fill(source[left], target[left], source_length, target_length)
        rows[left] = np.where(found < 0, -1, found + opened)
        left, opened = left[found < 0], opened + used
    return rows


def _fill(source: np.ndarray, target: np.ndarray, source_length: int, target_length: int) -> tuple[np.ndarray, int]:
    """The row of each pair, −1 if it fitted into none, and the number of rows.

    Opens as many rows as the tokens need and fills them in rounds. Each round offers one pair to every row, longest
    pairs first, so that short pairs fill the gaps at the end; the pairs of a round have nearly equal lengths. Rows
    sorted by free source minus free target positions meet pairs sorted by source minus target length.
    """
    needed = max(source.sum(dtype=np.int64) / source_length, target.sum(dtype=np.int64) / target_length)
    num_rows = min(len(source), math.ceil(needed) + int(_SPARE * needed))
    rows = np.full(len(source), -1, np.int32)
    source_free = np.full(num_rows, source_length, source.dtype)
    target_free = np.full(num_rows, target_length, target.dtype)
    shortest, following, deferred = (source.min(), target.min()), 0, np.zeros(0, np.int64)
    while following < len(source) or len(deferred):
        available = np.flatnonzero((source_free >= shortest[0]) & (target_free >= shortest[1]))
        new = max(0, min(len(available) - len(deferred), len(source) - following))
        pairs, deferred = deferred[: len(available)], deferred[len(available) :]
        pairs = np.concatenate([pairs, np.arange(following, following + new)])
        following += new
        if not len(pairs):
            break
        if len(pairs) < len(available):
            free = source_free[available] + target_free[available]
            available = np.sort(available[np.argsort(-free, kind="stable")[: len(pairs)]])
        pairs = pairs[np.argsort(source[pairs] - target[pairs], kind="stable")]
        offered = available[np.argsort(source_free[available] - target_free[available], kind="stable")]
        fits = (source[pairs] <= source_free[offered]) & (target[pairs] <= target_free[offered])
        placed, taken = pairs[fits], offered[fits]
        rows[placed] = taken
        source_free[taken] -= source[placed]
        target_free[taken] -= target[placed]
        if 8 * len(placed) >= len(pairs):  # otherwise the rows are too full for pairs of this length
            deferred = np.concatenate([np.sort(pairs[~fits]), deferred])
    return rows, num_rows


def _packed_bucket(counts: np.ndarray, tokens_per_batch: int) -> Bucket:
    """The shape of all packed batches: rows at least twice as long as the longest sentence if 8 of them fit.

    The row lengths are those with the least padding, the incomplete last batch included; on the side with more tokens,
    only lengths of at least 7/8 of the largest possible one are tried.
    """
    longest = np.array(counts.shape) - 1
    tokens = np.array([counts.sum(axis=1 - side) @ np.arange(length + 1) for side, length in enumerate(longest)])
    most_rows = rows_of(tokens_per_batch, int(longest.max()))
    rows = max(most_rows // 2 // ROWS_MULTIPLE * ROWS_MULTIPLE, min(most_rows, ROWS_MULTIPLE))
    highest = tokens_per_batch // rows
    lowest = np.where(tokens < tokens.max(), longest, np.maximum(longest, 7 * highest // 8))
    sides = [[n for n in range(low, highest + 1) if n % _LENGTH_MULTIPLE == 0] or [highest] for low in lowest]

    def positions(lengths):
        batches = math.ceil(max(_PACKED * tokens / lengths) / rows)
        return batches * sum(lengths), -sum(lengths)

    return Bucket(*min(itertools.product(*sides), key=positions), rows, packed=True)
