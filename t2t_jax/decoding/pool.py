"""§6.1: many sentences through one search. A sentence that has ended makes room for the next one.

All sentences of similar length share a pool of rows. The device takes steps until an eighth of the rows has ended;
the host reads their answers and fills them anew. So short answers never wait for long ones, and each shape, of which
there are few, is compiled once: widths of the source and rooms for the answer double, numbers of rows quadruple.
"""

import collections
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from t2t_jax import sharding
from t2t_jax.decoding import beam_search
from t2t_jax.decoding.beam_search import Hypotheses, Search, SearchOptions
from t2t_jax.model.kv_cache import admit_to_cache, reorder_cache, resize_cache
from t2t_jax.model.transformer import Transformer

_NARROWEST = 16  # subwords of the source; widths double
_LONG = 1024  # from here on, widths are multiples of this
_SMALLEST_ROOM = 32  # tokens of the answer; larger rooms double
_SOURCE_POSITIONS = 2048  # rows × width of a full pool, on each device
_MOST_ROWS = 64
_HYPOTHESIS_POSITIONS = 16 * _SOURCE_POSITIONS  # rows × width × hypotheses of each: wide beams have fewer rows


class Models(NamedTuple):
    """One model, or several with the same vocabulary whose probabilities are averaged."""

    modules: tuple[Transformer, ...]
    params: tuple[Any, ...]


class Request(NamedTuple):
    """A sentence to translate: its ids, the longest allowed answer, how it must begin, the seed of its samples."""

    ids: Sequence[int]
    max_length: int
    prefix: Sequence[int] = ()
    seed: int = 0


class State(NamedTuple):
    """The search of all rows, and the cache of each model."""

    search: Search
    caches: tuple[Any, ...]


def search_all(
    models: Models, requests: Sequence[Request], options: SearchOptions, mesh: Mesh
) -> Iterator[tuple[int, Hypotheses]]:
    """(index of the request, its hypotheses `[W, …]` as NumPy arrays) in the order in which they end."""
    by_width = collections.defaultdict(list)
    for index, request in enumerate(requests):
        by_width[width_of(len(request.ids))].append((index, request))
    for width in sorted(by_width, reverse=True):
        rows = rows_of(width, len(by_width[width]), mesh, options.width)
        pool = _Pool(models, width, rows, by_width[width], options, mesh)
        yield from pool.run()


def width_of(length: int) -> int:
    """The width of the pool for a source of this many subwords."""
    return min(max(_NARROWEST, 1 << (length - 1).bit_length()), -(-length // _LONG) * _LONG)


def rows_of(width: int, count: int, mesh: Mesh, hypotheses: int = 1) -> int:
    """How many sentences a pool holds, when `count` are waiting that have so many hypotheses each."""
    devices = mesh.devices.size
    full = min(_MOST_ROWS, _SOURCE_POSITIONS // width, _HYPOTHESIS_POSITIONS // (width * hypotheses))
    most = max(1, full) * devices
    rows = next((4**n for n in range(10) if 4**n >= count), most)
    return -(-min(rows, most) // devices) * devices


def rooms_of(longest: int) -> list[int]:
    """The rooms for answers, the last of which holds one of `longest` tokens."""
    rooms = [_SMALLEST_ROOM]
    while rooms[-1] < longest:
        rooms.append(2 * rooms[-1])
    return [*rooms[:-1], min(rooms[-1], -(-longest // _SMALLEST_ROOM) * _SMALLEST_ROOM)]


class _Pool:
    """The rows of one width, on the host: who is where, and who waits."""

    def __init__(self, models, width, rows, waiting, options, mesh):
        self._models, self._options, self._mesh = models, options, mesh
        self._width, self._rows = width, rows
        self._waiting = collections.deque(sorted(waiting, key=lambda item: -item[1].max_length))
        self._owners = [None] * rows  # the index of the request in each row
        self._lengths = np.zeros(rows, int)  # of the answers so far
        self._prefix_room = max((width_of(len(r.prefix)) for _, r in waiting if len(r.prefix)), default=0)
        self._rooms = rooms_of(max(request.max_length for _, request in waiting))
        self._room = self._rooms[0]
        self._state = _start(models.modules, options, rows, width, self._room, self._prefix_room, mesh)

    def run(self) -> Iterator[tuple[int, Hypotheses]]:
        while True:
            self._fill()
            if not self._busy():
                return
            oldest = max(self._lengths[row] for row in self._busy())
            self._make_room(oldest)
            # As long as someone waits, come back when an eighth of the rows is free; then only when all is done.
            spare = max(1, self._rows // 8) - 1 if self._waiting else len(self._busy()) - 1
            self._state, found, running, lengths = _advance(
                self._models.modules, self._options, self._mesh, self._models.params, self._state,
                max_steps=self._room - oldest, min_running=len(self._busy()) - spare,
            )  # fmt: skip
            running, self._lengths = np.asarray(running), np.array(lengths)
            ended = [row for row in self._busy() if not running[row]]
            found = jax.tree.map(np.asarray, found) if ended else None
            for row in ended:
                yield self._owners[row], jax.tree.map(lambda x, row=row: x[row], found)
                self._owners[row] = None

    @property
    def _share(self) -> int:
        """How many rows are filled at a time, in equal shares for the devices."""
        devices = self._mesh.devices.size
        return devices * max(1, self._rows // devices // 4)

    def _busy(self) -> list[int]:
        return [row for row, owner in enumerate(self._owners) if owner is not None]

    def _fill(self) -> None:
        """Gives empty rows to those who wait: all at once in the beginning, then a share at a time."""
        while self._waiting and len(free := [row for row, owner in enumerate(self._owners) if owner is None]):
            size = self._rows if len(free) == self._rows else self._share
            chosen = [self._waiting.popleft() for _ in range(min(size, len(free), len(self._waiting)))]
            rows = np.full(size, self._rows)  # beyond the last: left out
            rows[: len(chosen)] = free[: len(chosen)]
            for row, (index, _) in zip(free, chosen, strict=False):
                self._owners[row], self._lengths[row] = index, 0
            requests = [request for _, request in chosen]
            inputs = {"inputs": pad([r.ids for r in requests], size, self._width)}
            source = _source(*self._models, **sharding.put_rows(inputs, self._mesh))
            self._state = _admit(
                self._options, self._mesh, self._state, source,
                rows=rows,
                max_lengths=pad([[r.max_length] for r in requests], size, 1)[:, 0],
                prefixes=pad([r.prefix for r in requests], size, self._prefix_room),
                seeds=pad([[r.seed] for r in requests], size, 1)[:, 0],
            )  # fmt: skip

    def _make_room(self, oldest: int) -> None:
        """Changes rooms step by step, so that every change is between neighbours, to be compiled once."""
        wanted = next((i for i, room in enumerate(self._rooms) if room >= oldest + 8), len(self._rooms) - 1)
        while (now := self._rooms.index(self._room)) != wanted:
            self._room = self._rooms[now + (1 if wanted > now else -1)]
            self._state = _resize(self._mesh, self._state, self._room)


def pad(lists: Sequence[Sequence[int]], rows: int, width: int) -> np.ndarray:
    """Lists of ids as rows of an array, filled up with 0."""
    padded = np.zeros((rows, width), np.int32)
    for row, ids in enumerate(lists):
        padded[row, : len(ids)] = ids
    return padded


@functools.partial(jax.jit, static_argnames=("modules", "options", "rows", "width", "room", "prefix_room", "mesh"))
def _start(
    modules: tuple[Transformer, ...],
    options: SearchOptions,
    rows: int,
    width: int,
    room: int,
    prefix_room: int,
    mesh: Mesh,
) -> State:
    """Rows without a sentence."""
    prefixes = jnp.zeros((rows, prefix_room), jnp.int32)
    search = beam_search.start(jnp.zeros(rows, jnp.int32), options, room, prefixes)
    caches = tuple(module.init_cache(rows, width, options.width, room) for module in modules)
    return _by_rows(State(search, caches), mesh)


@functools.partial(jax.jit, static_argnames="modules")
def _source(modules: tuple[Transformer, ...], params: tuple[Any, ...], inputs: Int[Array, "A S"]) -> tuple[Any, ...]:
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
    room = state.search.alive.tokens.shape[2]
    new = beam_search.start(max_lengths, options, room, prefixes, seeds)
    caches = tuple(admit_to_cache(*pair, rows) for pair in zip(state.caches, source, strict=True))
    return _by_rows(State(beam_search.admit(state.search, new, rows), caches), mesh)


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
) -> tuple[State, Hypotheses, Any, Any]:
    """The state some steps later, the answers as far as they are known, and who is still running, how far."""

    def step(tokens, positions, caches):
        said = [
            module.apply({"params": p}, tokens, positions, cache, method=Transformer.decode_step)
            for module, p, cache in zip(modules, params, caches, strict=True)
        ]
        logits, caches = zip(*said, strict=True)
        return average_probabilities(logits), caches

    def reorder(caches, parents):
        return tuple(reorder_cache(cache, parents) for cache in caches)

    search, caches = beam_search.advance(
        step, reorder, state.search, state.caches, options, max_steps=max_steps, min_running=min_running
    )
    found = beam_search.results(search, options)
    return _by_rows(State(search, caches), mesh), found, search.running, search.lengths


@functools.partial(jax.jit, static_argnames=("mesh", "room"))
def _resize(mesh: Mesh, state: State, room: int) -> State:
    caches = tuple(resize_cache(cache, room) for cache in state.caches)
    return _by_rows(State(beam_search.resize(state.search, room), caches), mesh)


def average_probabilities(logits: Sequence[Float[Array, "*n vocab"]]) -> Float[Array, "*n vocab"]:
    """The logits of an ensemble: of the mean of its members' probabilities."""
    if len(logits) == 1:
        return logits[0]
    log_probs = jnp.stack([jax.nn.log_softmax(x) for x in logits])
    return jax.nn.logsumexp(log_probs, axis=0) - jnp.log(len(logits))


def _by_rows(state: State, mesh: Mesh) -> State:
    """The state as it always lies on the devices: rows divided among them."""
    lay = lambda x: jax.lax.with_sharding_constraint(x, sharding.by_rows(mesh) if x.ndim else sharding.replicated(mesh))
    return jax.tree.map(lay, state)
