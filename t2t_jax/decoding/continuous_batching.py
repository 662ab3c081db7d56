"""§6.1: continuous batching: many sentences through one search; finished rows are refilled while the others go on.

Sentences are bucketed by source length. The batch of a bucket has a fixed number of rows. The host sends windows of
encoded sources to the device, which admits them to the rows that become free, so that short translations do not wait
for long ones. The host is needed again when the window is used up, or when the KV cache is full and must be enlarged.

On CPU several searches take their windows from the same queue, each in a thread: most operations of a decoding step are
too small for more than one core.

All array shapes come from a few shape buckets (batch_shapes.py), each compiled once, when it is first needed; on a GPU
the programs of all buckets are compiled before, at the same time.
"""

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from t2t_jax import sharding
from t2t_jax.decoding import batch_shapes, beam_search, search_state
from t2t_jax.decoding.batch_shapes import bucket_length, num_searches, pad
from t2t_jax.decoding.ensemble import Ensemble, average_probabilities, computed_shapes
from t2t_jax.decoding.search_options import SearchOptions
from t2t_jax.decoding.search_state import Hypotheses, Search, where_rows
from t2t_jax.model.kv_cache import SourceCache, admit_to_cache, reorder_cache, resize_cache
from t2t_jax.model.transformer import Transformer
from t2t_jax.threads import all_at_once, in_threads


class Request(NamedTuple):
    """A sentence to translate, with the limit and the forced beginning of its target tokens, and its sampling seed.

    `features` is what the constraint knows of it, as many integers for each sentence.
    """

    ids: Sequence[int]
    max_length: int
    prefix: Sequence[int] = ()
    seed: int = 0
    features: Sequence[int] = ()


class Shapes(NamedTuple):
    """The lengths of the array axes in the searches of a bucket, but for the capacity of the KV cache."""

    window: int  # Q
    rows: int  # B
    source_length: int  # S
    prefix_length: int  # P
    num_features: int  # F


class State(NamedTuple):
    """The search of all rows, the KV cache of each model, and the index of the request in each row (−1: free)."""

    search: Search
    caches: tuple[Any, ...]
    owners: Int[Array, " B"]

    @property
    def occupied(self) -> Bool[Array, " B"]:
        """True for rows that have a request."""
        return self.owners >= 0

    @property
    def longest(self) -> Int[Array, ""]:
        """Tokens of the longest hypothesis in an occupied row."""
        return jnp.where(self.occupied, self.search.lengths, 0).max()


class Window(NamedTuple):
    """Encoded sentences that wait to be admitted, and their requests; the first `count` are valid."""

    source: tuple[SourceCache, ...]  # of each model
    owners: Int[Array, " Q"]  # indices of the requests
    max_lengths: Int[Array, " Q"]
    prefixes: Int[Array, "Q P"]
    seeds: Int[Array, " Q"]
    features: Int[Array, "Q F"]
    count: Int[Array, ""]


class Finished(NamedTuple):
    """The results of finished sentences and the indices of their requests; the first `count` are valid."""

    owners: Int[Array, " N"]
    hypotheses: Hypotheses
    count: Int[Array, ""]


def search_all(
    ensemble: Ensemble, requests: Sequence[Request], options: SearchOptions, mesh: Mesh
) -> Iterator[list[tuple[int, Hypotheses]]]:
    """What has finished, if anything, each time the host is needed: (index of the request, hypotheses `[W, …]`)."""
    options = jax.tree.map(np.float32, options)  # always of the same type: other values compile nothing
    buckets = []
    for source_length, indices in batch_shapes.by_bucket([len(request.ids) for request in requests]):
        count = num_searches(len(indices), mesh)
        longest = max(requests[index].max_length for index in indices)
        window = batch_shapes.window_rows(source_length, len(indices), mesh, options.width, longest)
        queue = collections.deque(sorted(((i, requests[i]) for i in indices), key=lambda item: -item[1].max_length))
        batch = functools.partial(_ContinuousBatch, ensemble, source_length, window, queue, options, mesh)
        buckets.append([batch() for _ in range(count)])
    if capacities := batch_shapes.capacities_ahead(mesh):
        all_at_once([program for bucket in buckets for program in bucket[0].programs(capacities)])
    # The first search of each bucket before the second of any: what runs at the same time compiles different programs.
    in_order = filter(None, itertools.chain.from_iterable(itertools.zip_longest(*buckets)))
    searches = [batch.run() for batch in in_order]  # generators, which free their memory when they end
    yield from in_threads(searches, num_searches(len(requests), mesh))


class _ContinuousBatch:
    """The host's side of a search: the queue of its bucket's requests, the window on the device, and the state.

    Several may share a queue, which nobody refills.
    """

    def __init__(self, ensemble, source_length, window, queue, options, mesh):
        self._ensemble, self._options, self._mesh, self._queue = ensemble, options, mesh, queue
        requests = [request for _, request in queue]
        self._shapes = Shapes(
            window=window,
            rows=batch_shapes.searched_rows(window, options.width, mesh),
            source_length=source_length,
            prefix_length=max((bucket_length(len(r.prefix)) for r in requests if len(r.prefix)), default=0),
            num_features=len(requests[0].features),
        )
        self._capacities = batch_shapes.bucket_capacities(source_length, max(r.max_length for r in requests))

    def programs(self, capacities: int) -> list[Callable[[], None]]:
        """Functions that each compile a program: the encoder, and the decoder for so many of its capacities."""
        modules, shapes, mesh = self._ensemble.modules, self._shapes, self._mesh
        structure = jax.tree.structure(self._options)
        return [
            functools.partial(_compile_source, modules, shapes, mesh),
            *(
                functools.partial(_compile_decode, modules, structure, shapes, capacity, mesh)
                for capacity in self._capacities[:capacities]
            ),
        ]

    def run(self) -> Generator[list[tuple[int, Hypotheses]]]:
        """Yields the results of the requests it takes, as `search_all` does, each while the device decodes others."""
        if not self._queue:  # other searches have taken all
            return
        self._capacity = self._capacities[0]
        self._state = _start(self._ensemble.modules, self._options, self._shapes, self._capacity, self._mesh)
        window, results, admitted, occupied, longest = self._next_window(), [], 0, False, 0
        waiting = int(window.count)
        while waiting or occupied or self._queue:
            self._fit_capacity(int(longest))
            if not waiting and self._queue:
                window, admitted = self._next_window(), 0
            self._state, found, admitted, occupied, longest = _decode(
                self._ensemble.modules, self._options, self._mesh, self._ensemble.params, self._state, window,
                admitted=np.int32(admitted), more=bool(self._queue),  # always of the same type: compiled once
            )  # fmt: skip
            yield results
            results, admitted = list(_results(found)), int(admitted)
            waiting = int(window.count) - admitted
        yield results

    def _next_window(self) -> Window:
        """Takes requests from the queue, none if it is empty by now, and encodes their sources."""
        shapes, taken = self._shapes, []
        with contextlib.suppress(IndexError):  # another search may take the last ones
            while len(taken) < shapes.window:
                taken.append(self._queue.popleft())
        inputs = {"inputs": pad([request.ids for _, request in taken], shapes.window, shapes.source_length)}
        source = _source(*self._ensemble, **sharding.put_rows(inputs, self._mesh), mesh=self._mesh)
        return _window(source, taken, shapes)

    def _fit_capacity(self, longest: int) -> None:
        """Resizes to the smallest capacity with 8 free positions, bucket by bucket: only these resizes are compiled."""
        last = len(self._capacities) - 1
        wanted = next((i for i, capacity in enumerate(self._capacities) if capacity >= longest + 8), last)
        while (now := self._capacities.index(self._capacity)) != wanted:
            self._capacity = self._capacities[now + (1 if wanted > now else -1)]
            self._state = _resize(self._mesh, self._state, self._capacity)


def _window(source: tuple[SourceCache, ...], taken: Sequence[tuple[int, Request]], shapes: Shapes) -> Window:
    """The window of the requests `taken`, with their indices, whose encoded sources are the first of `source`."""
    rows, requests = shapes.window, [request for _, request in taken]
    column = lambda values: pad([values], 1, rows)[0]  # a number for each row
    return Window(
        source=source,
        owners=column([index for index, _ in taken]),
        max_lengths=column([r.max_length for r in requests]),
        prefixes=pad([r.prefix for r in requests], rows, shapes.prefix_length),
        seeds=column([r.seed for r in requests]),
        features=pad([r.features for r in requests], rows, shapes.num_features),
        count=np.int32(len(taken)),
    )


def _results(found: Finished) -> Iterator[tuple[int, Hypotheses]]:
    """The valid results as NumPy arrays."""
    owners, hypotheses, count = jax.device_get(found)
    for row in range(count):
        yield int(owners[row]), jax.tree.map(lambda x, row=row: x[row], hypotheses)


@functools.partial(jax.jit, static_argnames=("modules", "shapes", "capacity", "mesh"))
def _start(
    modules: tuple[Transformer, ...], options: SearchOptions, shapes: Shapes, capacity: int, mesh: Mesh
) -> State:
    """A state whose rows are all free."""
    rows = shapes.rows
    prefixes, features = (jnp.zeros((rows, n), jnp.int32) for n in (shapes.prefix_length, shapes.num_features))
    search = search_state.start(jnp.zeros(rows, jnp.int32), options, capacity, prefixes, features=features)
    caches = tuple(module.init_cache(rows, shapes.source_length, options.width, capacity) for module in modules)
    return _shard(State(search, caches, jnp.full(rows, -1, jnp.int32)), mesh)


@functools.partial(jax.jit, static_argnames=("modules", "mesh"))
def _source(
    modules: tuple[Transformer, ...], params: tuple[Any, ...], inputs: Int[Array, "Q S"], mesh: Mesh
) -> tuple[SourceCache, ...]:
    """Encodes sources: what each model's KV cache holds of them; every device has all, as any may admit any."""
    source = tuple(
        module.apply({"params": p}, inputs, method=Transformer.encode_source)
        for module, p in zip(modules, params, strict=True)
    )
    return _replicate(source, mesh)


@functools.partial(jax.jit, static_argnames=("modules", "mesh"), donate_argnames="state")
def _decode(
    modules: tuple[Transformer, ...],
    options: SearchOptions,
    mesh: Mesh,
    params: tuple[Any, ...],
    state: State,
    window: Window,
    *,
    admitted: Int[Array, ""],
    more: Bool[Array, ""],
) -> tuple[State, Finished, Int[Array, ""], Bool[Array, ""], Int[Array, ""]]:
    """Decodes the sentences in the rows and those of the window, of which `admitted` are in the rows already.

    Ends when all have finished; or when a hypothesis fills the cache; or, if `more` sentences are to come, when the
    window is used up and an eighth of the rows is free. Returns the state, what has finished, the new `admitted`,
    whether a row is occupied, and the number of tokens of the longest hypothesis.
    """
    rows, capacity = state.owners.shape[0], state.search.alive.tokens.shape[2]
    enough = max(1, rows // 8)

    def going_on(carry):
        is_first, state, _, admitted = carry
        occupied = state.occupied.sum()
        needs_more = more & (admitted == window.count) & (occupied <= rows - enough)
        return is_first | (occupied > 0) & (state.longest < capacity) & ~needs_more

    def body(carry):
        is_first, state, finished, admitted = carry
        occupied = state.occupied.sum()
        # While sentences wait, until an eighth of the rows has finished, otherwise until all have.
        awaited = jnp.where(more | (admitted < window.count), jnp.minimum(enough, occupied), occupied)
        # The first round only admits: admitting before the loop as well would take a quarter more time to compile.
        max_steps = jnp.where(is_first, 0, capacity - state.longest)
        state = _advance(modules, options, params, state, max_steps=max_steps, min_running=occupied - awaited + 1)
        ended = state.occupied & ~state.search.running
        finished = _append(finished, ended, state.owners, beam_search.results(state.search, options))
        state, admitted = _admit(options, state._replace(owners=jnp.where(ended, -1, state.owners)), window, admitted)
        return jnp.zeros((), bool), _shard(state, mesh), _replicate(finished, mesh), admitted

    shapes = jax.eval_shape(lambda search: beam_search.results(search, options), state.search)
    results = jax.tree.map(lambda x: jnp.zeros((rows + len(window.owners), *x.shape[1:]), x.dtype), shapes)
    none = Finished(jnp.zeros(rows + len(window.owners), jnp.int32), results, jnp.zeros((), jnp.int32))
    start = jnp.ones((), bool), _shard(state, mesh), _replicate(none, mesh), admitted
    _, state, finished, admitted = jax.lax.while_loop(going_on, body, start)
    return state, finished, admitted, state.occupied.any(), state.longest


def _advance(
    modules: tuple[Transformer, ...],
    options: SearchOptions,
    params: tuple[Any, ...],
    state: State,
    *,
    max_steps: Int[Array, ""],
    min_running: Int[Array, ""],
) -> State:
    """Up to `max_steps` decoding steps, while at least `min_running` sentences are running."""

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
    return state._replace(search=search, caches=caches)


def _admit(
    options: SearchOptions, state: State, window: Window, admitted: Int[Array, ""]
) -> tuple[State, Int[Array, ""]]:
    """Puts the next sentences of the window into the free rows."""
    is_free = ~state.occupied
    index = admitted + jnp.cumsum(is_free) - 1
    picks = jnp.where(is_free & (index < window.count), index, -1)
    is_new, picked = picks >= 0, lambda x: x[picks]
    capacity = state.search.alive.tokens.shape[2]
    new = search_state.start(
        picked(window.max_lengths), options, capacity, picked(window.prefixes), picked(window.seeds),
        picked(window.features),
    )  # fmt: skip
    search = where_rows(is_new, new, state.search)
    caches = tuple(admit_to_cache(*pair, picks) for pair in zip(state.caches, window.source, strict=True))
    owners = jnp.where(is_new, picked(window.owners), state.owners)
    return State(search, caches, owners), admitted + is_new.sum()


def _append(finished: Finished, ended: Bool[Array, " B"], owners: Int[Array, " B"], results: Hypotheses) -> Finished:
    """`finished` and the results of the rows that have `ended`."""
    out_of_bounds = len(finished.owners)
    indices = jnp.where(ended, finished.count + jnp.cumsum(ended) - 1, out_of_bounds)
    write = lambda old, new: old.at[indices].set(new, mode="drop")
    hypotheses = jax.tree.map(write, finished.hypotheses, results)
    return Finished(write(finished.owners, owners), hypotheses, finished.count + ended.sum())


@functools.partial(jax.jit, static_argnames=("mesh", "capacity"))
def _resize(mesh: Mesh, state: State, capacity: int) -> State:
    caches = tuple(resize_cache(cache, capacity) for cache in state.caches)
    return _shard(State(search_state.resize(state.search, capacity), caches, state.owners), mesh)


def _shard(state: State, mesh: Mesh) -> State:
    """The state with its rows divided among the devices, the same after every call, so that nothing is recompiled."""
    return jax.lax.with_sharding_constraint(state, _shardings(state, mesh))


def _shardings(state: State, mesh: Mesh) -> State:
    """By rows, but for numbers and arrays without elements, of which JAX puts a copy on every device."""
    return jax.tree.map(lambda x: sharding.by_rows(mesh) if x.ndim and x.size else sharding.replicated(mesh), state)


def _replicate(tree: Any, mesh: Mesh) -> Any:
    """A whole copy on every device."""
    return jax.lax.with_sharding_constraint(tree, sharding.replicated(mesh))


# --- Ahead of a search, without memory for what its programs compute ----------------------------------------


@functools.lru_cache(maxsize=256)
def _compile_source(modules: tuple[Transformer, ...], shapes: Shapes, mesh: Mesh) -> None:
    _source.lower(modules, computed_shapes(modules, mesh), inputs=_inputs(shapes, mesh), mesh=mesh).compile()


@functools.lru_cache(maxsize=256)
def _compile_decode(
    modules: tuple[Transformer, ...], options: jax.tree_util.PyTreeDef, shapes: Shapes, capacity: int, mesh: Mesh
) -> None:
    """Compiles `_decode` for options of this structure, whatever their numbers."""
    numbers = jax.tree.unflatten(options, [np.float32(0)] * options.num_leaves)
    params = computed_shapes(modules, mesh)
    source = jax.eval_shape(functools.partial(_source, modules, mesh=mesh), params, inputs=_inputs(shapes, mesh))
    window = _window(sharding.shapes_of(source, sharding.replicated(mesh)), [], shapes)
    state = jax.eval_shape(functools.partial(_start, modules, shapes=shapes, capacity=capacity, mesh=mesh), numbers)
    state = sharding.shapes_of(state, _shardings(state, mesh))
    _decode.lower(modules, numbers, mesh, params, state, window, admitted=np.int32(0), more=True).compile()


def _inputs(shapes: Shapes, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((shapes.window, shapes.source_length), np.int32, sharding=sharding.by_rows(mesh))
