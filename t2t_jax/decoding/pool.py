"""§6.1: continuous batching: many sentences through one search; finished rows are refilled while the others go on.

Sentences are bucketed by source length. The batch of a bucket has a fixed number of rows. The device decodes until an
eighth of them have finished; the host then reads their results and refills these rows with the next sentences, so that
short translations do not wait for long ones.

All array shapes come from a few shape buckets, each compiled once, when it is first needed: bucket lengths of sources
and capacities for target tokens double, numbers of rows quadruple.
"""

import collections
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from t2t_jax import sharding
from t2t_jax.decoding import beam_search
from t2t_jax.decoding.beam_search import Hypotheses, Search, SearchOptions
from t2t_jax.model.kv_cache import admit_to_cache, reorder_cache, resize_cache
from t2t_jax.model.transformer import Transformer

_SHORTEST_BUCKET = 16  # subwords of the source; longer buckets double
_LINEAR_FROM = 1024  # bucket lengths above this do not double: they are its multiples
_SMALLEST_CAPACITY = 32  # target tokens; larger capacities double
_MAX_ROWS = 64  # on each device, as are the next two
_SOURCE_POSITIONS = 2048  # rows × source length
_HYPOTHESIS_POSITIONS = 16 * _SOURCE_POSITIONS  # rows × source length × beam width: wide beams have fewer rows


class Ensemble(NamedTuple):
    """One model, or several with the same vocabulary whose probabilities are averaged."""

    modules: tuple[Transformer, ...]
    params: tuple[Any, ...]


class Request(NamedTuple):
    """A sentence to translate, with the limit and the forced beginning of its target tokens, and its sampling seed."""

    ids: Sequence[int]
    max_length: int
    prefix: Sequence[int] = ()
    seed: int = 0


class State(NamedTuple):
    """The search of all rows, and the KV cache of each model."""

    search: Search
    caches: tuple[Any, ...]


def search_all(
    ensemble: Ensemble, requests: Sequence[Request], options: SearchOptions, mesh: Mesh
) -> Iterator[tuple[int, Hypotheses]]:
    """(index of the request, its hypotheses `[W, …]` as NumPy arrays), in the order in which the searches finish."""
    buckets = collections.defaultdict(list)
    for index, request in enumerate(requests):
        buckets[bucket_length(len(request.ids))].append((index, request))
    for source_length in sorted(buckets, reverse=True):
        rows = bucket_rows(source_length, len(buckets[source_length]), mesh, options.width)
        yield from _ContinuousBatch(ensemble, source_length, rows, buckets[source_length], options, mesh).run()


def bucket_length(length: int) -> int:
    """The length that a source of this many subwords is padded to."""
    return min(max(_SHORTEST_BUCKET, 1 << (length - 1).bit_length()), -(-length // _LINEAR_FROM) * _LINEAR_FROM)


def bucket_rows(source_length: int, count: int, mesh: Mesh, beam_width: int = 1) -> int:
    """The number of rows of a batch for `count` sentences: a multiple of the number of devices."""
    devices = mesh.devices.size
    full = min(_MAX_ROWS, _SOURCE_POSITIONS // source_length, _HYPOTHESIS_POSITIONS // (source_length * beam_width))
    most = max(1, full) * devices
    rows = next((4**n for n in range(10) if 4**n >= count), most)
    return -(-min(rows, most) // devices) * devices


def bucket_capacities(max_length: int) -> list[int]:
    """The capacities for target tokens, in increasing order; the last one holds `max_length` tokens."""
    capacities = [_SMALLEST_CAPACITY]
    while capacities[-1] < max_length:
        capacities.append(2 * capacities[-1])
    return [*capacities[:-1], min(capacities[-1], -(-max_length // _SMALLEST_CAPACITY) * _SMALLEST_CAPACITY)]


class _ContinuousBatch:
    """The host's side of one bucket: a queue of requests, and which request is in each row of the batch."""

    def __init__(self, ensemble, source_length, rows, requests, options, mesh):
        self._ensemble, self._options, self._mesh = ensemble, options, mesh
        self._source_length, self._rows = source_length, rows
        self._queue = collections.deque(sorted(requests, key=lambda item: -item[1].max_length))
        self._request_of_row = [None] * rows  # indices; None where a row is free
        self._lengths = np.zeros(rows, int)  # target tokens so far
        self._prefix_length = max((bucket_length(len(r.prefix)) for _, r in requests if len(r.prefix)), default=0)
        self._capacities = bucket_capacities(max(request.max_length for _, request in requests))
        self._capacity = self._capacities[0]
        self._state = _start(ensemble.modules, options, rows, source_length, self._capacity, self._prefix_length, mesh)

    def run(self) -> Iterator[tuple[int, Hypotheses]]:
        """Yields the results of all requests, as `search_all` does."""
        while True:
            self._refill()
            if not (occupied := self._occupied_rows()):
                return
            longest = max(self._lengths[row] for row in occupied)
            self._fit_capacity(longest)
            # While requests wait, return once an eighth of the rows has finished, otherwise when all have.
            enough = max(1, self._rows // 8) if self._queue else len(occupied)
            self._state, found, running, lengths = _advance(
                self._ensemble.modules, self._options, self._mesh, self._ensemble.params, self._state,
                max_steps=self._capacity - longest, min_running=len(occupied) - enough + 1,
            )  # fmt: skip
            running, self._lengths = np.asarray(running), np.array(lengths)
            finished = [row for row in occupied if not running[row]]
            found = jax.tree.map(np.asarray, found) if finished else None
            for row in finished:
                yield self._request_of_row[row], jax.tree.map(lambda x, row=row: x[row], found)
                self._request_of_row[row] = None

    @property
    def _refill_size(self) -> int:
        """The number of rows that `_admit` is compiled for: about a quarter, the same number on each device."""
        devices = self._mesh.devices.size
        return devices * max(1, self._rows // devices // 4)

    def _occupied_rows(self) -> list[int]:
        return [row for row, request in enumerate(self._request_of_row) if request is not None]

    def _free_rows(self) -> list[int]:
        return [row for row, request in enumerate(self._request_of_row) if request is None]

    def _refill(self) -> None:
        """Admits requests from the queue to free rows: at once where all are free, else `_refill_size` at a time."""
        while self._queue and (free := self._free_rows()):
            size = self._rows if len(free) == self._rows else self._refill_size
            admitted = [self._queue.popleft() for _ in range(min(size, len(free), len(self._queue)))]
            rows = np.full(size, self._rows)  # beyond the last row: ignored
            rows[: len(admitted)] = free[: len(admitted)]
            for row, (index, _) in zip(free, admitted, strict=False):
                self._request_of_row[row], self._lengths[row] = index, 0
            requests = [request for _, request in admitted]
            inputs = {"inputs": pad([r.ids for r in requests], size, self._source_length)}
            source = _source(*self._ensemble, **sharding.put_rows(inputs, self._mesh))
            self._state = _admit(
                self._options, self._mesh, self._state, source,
                rows=rows,
                max_lengths=pad([[r.max_length] for r in requests], size, 1)[:, 0],
                prefixes=pad([r.prefix for r in requests], size, self._prefix_length),
                seeds=pad([[r.seed] for r in requests], size, 1)[:, 0],
            )  # fmt: skip

    def _fit_capacity(self, longest: int) -> None:
        """Resizes to the smallest capacity with 8 free positions, bucket by bucket: only these resizes are compiled."""
        last = len(self._capacities) - 1
        wanted = next((i for i, capacity in enumerate(self._capacities) if capacity >= longest + 8), last)
        while (now := self._capacities.index(self._capacity)) != wanted:
            self._capacity = self._capacities[now + (1 if wanted > now else -1)]
            self._state = _resize(self._mesh, self._state, self._capacity)


def pad(lists: Sequence[Sequence[int]], rows: int, length: int) -> np.ndarray:
    """Lists of ids as the rows of an array `[rows, length]`, padded with 0."""
    padded = np.zeros((rows, length), np.int32)
    for row, ids in enumerate(lists):
        padded[row, : len(ids)] = ids
    return padded


@functools.partial(
    jax.jit, static_argnames=("modules", "options", "rows", "source_length", "capacity", "prefix_length", "mesh")
)
def _start(
    modules: tuple[Transformer, ...],
    options: SearchOptions,
    rows: int,
    source_length: int,
    capacity: int,
    prefix_length: int,
    mesh: Mesh,
) -> State:
    """A state whose rows are all free."""
    prefixes = jnp.zeros((rows, prefix_length), jnp.int32)
    search = beam_search.start(jnp.zeros(rows, jnp.int32), options, capacity, prefixes)
    caches = tuple(module.init_cache(rows, source_length, options.width, capacity) for module in modules)
    return _shard(State(search, caches), mesh)


@functools.partial(jax.jit, static_argnames="modules")
def _source(modules: tuple[Transformer, ...], params: tuple[Any, ...], inputs: Int[Array, "A S"]) -> tuple[Any, ...]:
    """Encodes sources: what each model's KV cache holds of them."""
    return tuple(
        module.apply({"params": p}, inputs, method=Transformer.encode_source)
        for module, p in zip(modules, params, strict=True)
    )


@functools.partial(jax.jit, static_argnames=("options", "mesh"), donate_argnames="state")
def _admit(
    options: SearchOptions,
    mesh: Mesh,
    state: State,
    source: tuple[Any, ...],
    rows: Int[Array, " A"],
    max_lengths: Int[Array, " A"],
    prefixes: Int[Array, "A P"],
    seeds: Int[Array, " A"],
) -> State:
    """The state with new sentences in these rows."""
    capacity = state.search.alive.tokens.shape[2]
    new = beam_search.start(max_lengths, options, capacity, prefixes, seeds)
    caches = tuple(admit_to_cache(*pair, rows) for pair in zip(state.caches, source, strict=True))
    return _shard(State(beam_search.admit(state.search, new, rows), caches), mesh)


@functools.partial(jax.jit, static_argnames=("modules", "options", "mesh"), donate_argnames="state")
def _advance(
    modules: tuple[Transformer, ...],
    options: SearchOptions,
    mesh: Mesh,
    params: tuple[Any, ...],
    state: State,
    *,
    max_steps: int,
    min_running: int,
) -> tuple[State, Hypotheses, Bool[Array, " B"], Int[Array, " B"]]:
    """The state some steps later; the results, valid for rows that have finished; which rows still run; all lengths."""

    def step(tokens, positions, caches):
        outputs = [
            module.apply({"params": p}, tokens, positions, cache, method=Transformer.decode_step)
            for module, p, cache in zip(modules, params, caches, strict=True)
        ]
        logits, caches = zip(*outputs, strict=True)
        return average_probabilities(logits), caches

    def reorder(caches, parents):
        return tuple(reorder_cache(cache, parents) for cache in caches)

    search, caches = beam_search.advance(
        step, reorder, state.search, state.caches, options, max_steps=max_steps, min_running=min_running
    )
    found = beam_search.results(search, options)
    return _shard(State(search, caches), mesh), found, search.running, search.lengths


@functools.partial(jax.jit, static_argnames=("mesh", "capacity"))
def _resize(mesh: Mesh, state: State, capacity: int) -> State:
    caches = tuple(resize_cache(cache, capacity) for cache in state.caches)
    return _shard(State(beam_search.resize(state.search, capacity), caches), mesh)


def average_probabilities(logits: Sequence[Float[Array, "*n vocab"]]) -> Float[Array, "*n vocab"]:
    """The logits of an ensemble: the logarithm of the mean of its members' probabilities."""
    if len(logits) == 1:
        return logits[0]
    log_probs = jnp.stack([jax.nn.log_softmax(x) for x in logits])
    return jax.nn.logsumexp(log_probs, axis=0) - jnp.log(len(logits))


def _shard(state: State, mesh: Mesh) -> State:
    """The state with its rows divided among the devices, the same after every call, so that nothing is recompiled."""
    constrain = lambda x: jax.lax.with_sharding_constraint(
        x, sharding.by_rows(mesh) if x.ndim else sharding.replicated(mesh)
    )
    return jax.tree.map(constrain, state)
