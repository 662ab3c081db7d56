"""§5.1: batch assembly: batch n is a pure function of the sentences, the settings, the seed and n."""

import dataclasses
import functools
import math
import threading
import zlib
from collections.abc import Callable, Iterator

import grain
import numpy as np

from t2t_jax.data.bucketing import Bucket, Bucketed, Layout, Plan
from t2t_jax.data.mixture import Mixture
from t2t_jax.data.packing import Packed
from t2t_jax.data.token_store import Sentences
from t2t_jax.errors import DamagedError

Batch = dict[str, np.ndarray]

_MIXERS = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)  # those of splitmix64
_THREADS, _PREFETCHED = 2, 8  # that read batches; batches that are read ahead
_CHUNK = 1 << 20  # pairs per indexing operation, because NumPy copies every index array to int64


class Batches:
    """The batches of a whole run, indexed by step, with length bucketing or sequence packing.

    `tokens_per_batch` bounds the positions of a global batch on each side, padding included. Step n belongs to
    epoch n // `per_epoch`. Each epoch holds every pair exactly once, or as often as `mixture` says, in a new random
    order; incomplete batches are filled up with padding. With `packing`, rows hold several pairs, and there
    are at most `packing_shapes` buckets instead of `num_buckets`.
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
        packing_shapes: int = 1,
        bucketing: str = "smallest_shape",
        mixture: Mixture | None = None,
    ):
        self._sources, self._targets, self._seed, self._mixture = sources, targets, seed, mixture
        source, target = sources.lengths(), targets.lengths()
        if mixture and packing:
            source, target = mixture.slot_lengths(source, target)
        counts = _count_lengths(source, target, mixture.occurrences(len(source)) if mixture else None)
        layout: Layout = (
            Packed(counts, tokens_per_batch, packing_shapes)
            if packing
            else Bucketed(counts, tokens_per_batch, num_buckets, bucketing)
        )
        self._layout = layout
        self._group_of_pair, group_sizes = _look_up(layout.groups, source, target), layout.group_sizes
        if mixture:
            group_sizes, groups = mixture.group(self._group_of_pair, len(group_sizes)), self._group_of_pair
            # The indices that `mixture` gives to empty slots belong to groups as those of pairs do.
            self._group_of_pair = np.concatenate([groups, np.arange(len(group_sizes), dtype=groups.dtype)])
        layout.resize(group_sizes)
        self.buckets, self.per_epoch = layout.buckets, layout.per_epoch
        # Threads ask for the plans of one epoch, or several tiny ones, at a time.
        self._plans = functools.lru_cache(maxsize=2 + (_PREFETCHED + _THREADS) // self.per_epoch)(self._once)
        self._lock = threading.Lock()

    def plan(self, epoch: int) -> Plan:
        """The batches of an epoch, planned by the first thread that asks; others wait only for the same epoch."""
        with self._lock:
            planned = self._plans(epoch)
        return planned()

    def _once(self, epoch: int) -> Callable[[], Plan]:
        lock, plan = threading.Lock(), functools.cache(self._plan)

        def planned() -> Plan:
            with lock:  # functools' caches do not hold back a second thread
                return plan(epoch)

        return planned

    def _plan(self, epoch: int) -> Plan:
        rng = np.random.default_rng([self._seed, epoch])
        pairs = self._mixture.epoch(epoch) if self._mixture else np.arange(len(self._sources), dtype=np.uint32)
        rng.shuffle(pairs)
        return self._layout.plan(_grouped(pairs, self._group_of_pair, self._layout.group_sizes), rng)

    def bucket(self, step: int) -> Bucket:
        """The shape of batch `step`."""
        epoch, index = divmod(step, self.per_epoch)
        return self.buckets[self.plan(epoch).buckets[index]]

    def pairs(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The indices of the pairs in batch `step` and the row of each; rows ascend."""
        epoch, index = divmod(step, self.per_epoch)
        pairs, rows = self.plan(epoch).batch(index)
        if not self._mixture:
            return pairs, rows
        is_pair = pairs < len(self._sources)  # and not an empty slot
        return pairs[is_pair], rows[is_pair]

    def pairs_checksum(self, step: int) -> int:
        """The CRC-32 of the pairs of batch `step`. It tells whether a seed still gives the same batches.

        NumPy does not promise the random numbers of a seed from version to version.
        """
        return zlib.crc32(np.ascontiguousarray(self.pairs(step)[0]))

    def lengths(self, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source lengths and the target lengths of these pairs, without reading them."""
        return self._sources.lengths_of(pairs), self._targets.lengths_of(pairs)

    def __getitem__(self, step: int) -> Batch:
        """`inputs` [rows, source_length] and `targets` [rows, target_length], int32, padded with 0.

        Packed rows also have `input_segments` and `target_segments` of the same shapes: the pairs of each row are
        numbered from 1, padding is 0.
        """
        return self.read(step, slice(self.bucket(step).rows))

    def read(self, step: int, rows: slice) -> Batch:
        """Batch `step`, of which only these rows are read; the others are padding."""
        pairs, row_of_pair = self.pairs(step)
        own = slice(*np.searchsorted(row_of_pair, [rows.start or 0, rows.stop]))
        pairs, row_of_pair = pairs[own], row_of_pair[own]
        batch = empty_batch(self.bucket(step))
        for side, sentences in (("input", self._sources), ("target", self._targets)):
            _write(batch, side, *sentences.concatenated(pairs), row_of_pair)
        return batch

    def iterate(self, first: int, last: int, rows: Callable[[int], slice] = slice) -> Iterator[Batch]:
        """Batches of steps `first` to `last` − 1, prefetched in the background by Grain.

        Of each batch only `rows(number of its rows)` are read, by default all. One of several processes needs those of
        its devices (`sharding.rows_of_process`).
        """
        source = _Steps(self, first, last, rows)
        options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_PREFETCHED)
        return iter(grain.MapDataset.source(source).to_iter_dataset(options))


@dataclasses.dataclass(frozen=True)
class _Steps:
    """A range of steps as a random-access data source for Grain."""

    batches: Batches
    first: int
    last: int
    rows: Callable[[int], slice]

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> Batch:
        step = self.first + index
        try:
            return self.batches.read(step, self.rows(self.batches.bucket(step).rows))
        except OSError as error:
            raise DamagedError(
                f"data: the batch of step {step + 1} cannot be made ({type(error).__name__}: {error}); "
                "the same command resumes from the last checkpoint"
            ) from error
        except Exception as error:  # a bug: raised in one of Grain's threads, it does not name the batch
            error.add_note(f"in the batch of step {step + 1}")
            raise


def empty_batch(bucket: Bucket) -> Batch:
    """A batch of this shape that holds only padding."""
    lengths = {"inputs": bucket.source_length, "targets": bucket.target_length}
    if bucket.packed:
        lengths |= {"input_segments": bucket.source_length, "target_segments": bucket.target_length}
    return {name: np.zeros((bucket.rows, length), np.int32) for name, length in lengths.items()}


def checksum(step: int, batch: Batch) -> int:
    """32 bits that depend on the step and on each token and its place.

    The checksums of a batch's rows, the others being padding, add up to that of the batch, modulo 2³².
    """
    total = 0
    for name in sorted(batch):
        ids = batch[name].ravel()
        where = np.flatnonzero(ids)
        seed = zlib.crc32(f"{name} {step}".encode()) << 32
        x = (where.astype(np.uint64) + np.uint64(seed)) * _MIXERS[0] ^ ids[where].astype(np.uint64)
        for multiplier in _MIXERS:  # each bit of the sum depends on each bit of x
            x = (x ^ (x >> np.uint64(31))) * multiplier
        total += int((x >> np.uint64(32)).sum())
    return total % 2**32


def _write(batch: Batch, side: str, ids: np.ndarray, lengths: np.ndarray, rows: np.ndarray) -> None:
    """Writes sentence i, the next `lengths[i]` of `ids`, into row `rows[i]`, after earlier sentences of that row."""
    starts = np.cumsum(lengths) - lengths
    first = np.searchsorted(rows, rows)  # the index of the first sentence in the same row
    columns = np.arange(len(ids)) - np.repeat(starts[first], lengths)
    where = np.repeat(rows, lengths), columns
    batch[f"{side}s"][where] = ids
    if f"{side}_segments" in batch:
        batch[f"{side}_segments"][where] = np.repeat(np.arange(len(rows)) - first + 1, lengths)


# --- Arrays over all pairs, processed in chunks ------------------------------------------------------------


def _chunks(length: int) -> Iterator[slice]:
    return (slice(start, start + _CHUNK) for start in range(0, length, _CHUNK))


def _count_lengths(source: np.ndarray, target: np.ndarray, occurrences: np.ndarray | None) -> np.ndarray:
    """The histogram of lengths: the number of pairs for each (source length, target length).

    A pair counts as often as it occurs; without `occurrences` once.
    """
    shape = int(source.max()) + 1, int(target.max()) + 1
    counts = np.zeros(math.prod(shape), np.int64)
    for part in _chunks(len(source)):
        cells = source[part].astype(np.int64) * shape[1] + target[part]
        weights = None if occurrences is None else occurrences[part]
        counts += np.bincount(cells, weights, minlength=len(counts)).astype(np.int64)
    return counts.reshape(shape)


def _look_up(table: np.ndarray, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """`table[source, target]`."""
    values = np.empty(len(source), table.dtype)
    for part in _chunks(len(source)):
        values[part] = table[source[part], target[part]]
    return values


def _grouped(pairs: np.ndarray, group_of_pair: np.ndarray, group_sizes: np.ndarray) -> np.ndarray:
    """The pairs sorted by group, stably: a counting sort."""
    grouped = np.empty_like(pairs)
    following = np.cumsum(group_sizes) - group_sizes  # the next index of each group
    for part in _chunks(len(pairs)):
        groups = group_of_pair[pairs[part]]
        sizes = np.bincount(groups, minlength=len(following))
        indices = np.repeat(following - (np.cumsum(sizes) - sizes), sizes) + np.arange(len(groups))
        grouped[indices] = pairs[part][np.argsort(groups, kind="stable")]
        following += sizes
    return grouped
