"""§5.1: sequence packing: several pairs in each row, so that every batch has one shape and next to no padding."""

import dataclasses
import itertools
import math

import numpy as np

from t2t_jax.data.bucketing import ROWS_MULTIPLE, Bucket, rows_of

# Lengths of packed rows are a multiple of this where they can be, as accelerators like them.
_LENGTH_MULTIPLE = 8
_SPARE = 0.003  # rows opened beyond those that the tokens would fill, as a share of these
_PACKED = 1.008  # rows that packing ends with, for each that the tokens would fill, where there are many


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
    """The layout of packed rows: a group is all pairs of the same two lengths.

    Rows are packed once, by lengths alone. Each epoch draws anew which pair of these lengths goes into which row, and
    which rows make a batch.
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
    """The row of each pair, given their lengths, longest pairs first; rows are numbered from 0, none is empty.

    A row holds `source_length` and `target_length` subwords, at least those of any pair. The integer type of the
    lengths must hold twice these.
    """
    rows, opened = np.full(len(source), -1, np.int32), 0
    left = np.arange(len(source), dtype=np.uint32)
    while len(left):
        found, used = _fill(source[left], target[left], source_length, target_length)
        rows[left] = np.where(found < 0, -1, found + opened)
        left, opened = left[found < 0], opened + used
    return rows


def _fill(source: np.ndarray, target: np.ndarray, source_length: int, target_length: int) -> tuple[np.ndarray, int]:
    """The row of each pair, −1 where it fitted into none, and the number of rows.

    As many rows as the tokens need are filled at once. Each round offers one pair to every row, longest pairs first,
    so that short ones fill the gaps; all pairs of a round have nearly the same length. The row with the most free
    source positions, compared to its free target positions, is offered the pair with the longest source, compared to
    its target.
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
    """The shape of all packed batches: rows of about twice the longest sentence, or more, where eight of them fit.

    Row lengths from 7/8 of that are tried; those with the least padding, the last batch's included, are taken.
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
