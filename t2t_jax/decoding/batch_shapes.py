"""The shapes of batches in decoding: few, each compiled once, when it is first needed.

Bucket lengths, of sources and as capacities for target tokens, double; numbers of rows double or quadruple.
"""

import collections
from collections.abc import Iterator, Sequence

import numpy as np
from jax.sharding import Mesh

from t2t_jax.threads import available_cores

_SHORTEST_BUCKET = 16  # subwords of the source, or capacity for target tokens; longer buckets double
_LINEAR_FROM = 1024  # bucket lengths above this do not double: they are its multiples
# On each device: the most rows; the most source positions (rows × source length). A KV cache has at most 16 times as
# many target positions (rows × beam width × capacity). More on a GPU, where a small step takes as long.
_MOST_ON_CPU, _MOST_ELSEWHERE = (64, 2048), (512, 16_384)
# On CPU, where each row of a batch takes its time even when it has finished: (rows, the most sentences for them).
_CPU_ROWS = ((1, 1), (4, 6), (8, 12), (16, 127))
_CPU_HYPOTHESES = 64  # of a search on each CPU device: more are no faster, but fill its caches
_FEWEST_ROWS = 4  # of a search, however wide its beam; there is a second search for more sentences than these
_MOST_SEARCHES = 8  # at a time: each has its own KV cache


def by_bucket(lengths: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """(bucket length, indices of the sentences in the bucket), the longest bucket first."""
    buckets = collections.defaultdict(list)
    for index, length in enumerate(lengths):
        buckets[bucket_length(length)].append(index)
    yield from sorted(buckets.items(), reverse=True)


def bucket_length(length: int) -> int:
    """The length that a source of this many subwords is padded to."""
    if length > _LINEAR_FROM:
        return -(-length // _LINEAR_FROM) * _LINEAR_FROM
    return max(_SHORTEST_BUCKET, 1 << (length - 1).bit_length())  # the next power of two


def bucket_rows(source_length: int, count: int, mesh: Mesh, beam_width: int = 1, max_length: int = 1) -> int:
    """The number of rows of a batch for `count` sentences: a multiple of the number of devices.

    A search gives its beam width, and the most tokens that it may write.
    """
    devices = mesh.devices.size
    rows, positions = _MOST_ON_CPU if _on_cpu(mesh) else _MOST_ELSEWHERE
    written = beam_width * bucket_capacities(source_length, max_length)[-1]
    most = max(1, min(rows, positions // source_length, 16 * positions // written)) * devices
    sizes = _CPU_ROWS if _on_cpu(mesh) else [(4**n, 4**n) for n in range(10)]
    rows = next((rows for rows, sentences in sizes if sentences >= count), most)
    return -(-min(rows, most) // devices) * devices


def window_rows(source_length: int, count: int, mesh: Mesh, beam_width: int = 1, max_length: int = 1) -> int:
    """The rows of the windows of each of the searches among which `count` sentences are divided."""
    return bucket_rows(source_length, -(-count // num_searches(count, mesh)), mesh, beam_width, max_length)


def bucket_capacities(source_length: int, max_length: int) -> list[int]:
    """The capacities for target tokens: the source's bucket length and those after it, until one holds `max_length`.

    Requests of other lengths have the same ones, or fewer: they are compiled once.
    """
    capacities = [source_length]
    while capacities[-1] < max_length:
        capacities.append(bucket_length(capacities[-1] + 1))
    return capacities


def num_searches(count: int, mesh: Mesh) -> int:
    """The number of searches among which `count` sentences are divided, each in a thread of its own."""
    if mesh.devices.size > 1 or not _on_cpu(mesh):
        return 1
    return min(available_cores(), _MOST_SEARCHES, -(-count // _FEWEST_ROWS)) or 1


def capacities_ahead(mesh: Mesh) -> int:
    """How many of a bucket's capacities, the smallest ones, are compiled before any search begins.

    A program takes seconds to compile, on one core. Beside a GPU the others are idle, on CPU they have other searches.
    """
    return 0 if _on_cpu(mesh) else 2


def searched_rows(window: int, beam_width: int, mesh: Mesh) -> int:
    """The number of rows of a search that takes its sentences from windows of this size."""
    if not _on_cpu(mesh):
        return window
    return min(window, max(_FEWEST_ROWS, _CPU_HYPOTHESES // beam_width) * mesh.devices.size)


def _on_cpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu"


def pad_pairs(
    indices: Sequence[int], sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], rows: int, length: int
) -> dict[str, np.ndarray]:
    """The pairs with these indices as a batch: `inputs` and `targets`, `[rows, length]` each, padded with 0."""
    sides = {"inputs": sources, "targets": targets}
    return {name: pad([side[index] for index in indices], rows, length) for name, side in sides.items()}


def pad(lists: Sequence[Sequence[int]], rows: int, length: int) -> np.ndarray:
    """Lists of ids as the rows of an array `[rows, length]`, padded with 0."""
    padded = np.zeros((rows, length), np.int32)
    for row, ids in enumerate(lists):
        padded[row, : len(ids)] = ids
    return padded
