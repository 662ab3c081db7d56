"""§5.1: worker processes clean and encode the training pairs shard by shard; then the shards are joined.

A shard is written atomically and depends on nothing but its pairs and its number: a resumed preparation keeps the
existing ones.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import threading
import time
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np

from t2t_jax import signals
from t2t_jax.data import cleaning
from t2t_jax.data.plain_text import Pair
from t2t_jax.data.task import Vocabularies
from t2t_jax.data.token_store import SIDES, Sentences
from t2t_jax.data.tokenizer import UNKNOWN
from t2t_jax.errors import DamagedError, InputError, InterruptedProcess
from t2t_jax.files import replacing
from t2t_jax.progress_bar import progress_bar
from t2t_jax.threads import available_cores

SHARD_SIZE = 20_000  # pairs
_SIGNAL_SECONDS = 1.0  # schedulers and init systems send a SIGTERM to one process after the other


class Encoding(NamedTuple):
    """How a training pair becomes ids. It is pickled for the worker processes.

    `vocabularies` is their folder; `held_out` is the `leak_index` of the dev and test sentences. `bpe_dropout` is the
    rate of `Tokenizer.sample_many`; None: the best segmentation.
    """

    vocabularies: Path
    preprocess_source: Callable[[str], str]
    preprocess_target: Callable[[str], str]
    rules: cleaning.Rules
    languages: tuple[str, str]
    held_out: Collection[str]
    max_length: int
    bpe_dropout: float | None = None


def write_shards(
    texts: Iterable[Iterator[Pair]], encoding: Encoding, folder: Path, share: tuple[int, int] = (0, 1)
) -> list[list[Path]]:
    """Writes the shards that `folder` does not hold yet, on all cores; returns the paths of those of each text.

    `share` (i, n): only every n-th shard, from number i on.
    """
    paths, numbers = [], itertools.count()

    def missing() -> Iterator[tuple[Path, int, list[Pair]]]:
        for text in texts:
            paths.append([])
            for chunk in chunks(text, SHARD_SIZE):
                number = next(numbers)
                path = folder / f"shard-{number:05}.npz"
                paths[-1].append(path)
                if path.exists() or number % share[1] != share[0]:
                    bar.update(len(chunk))
                else:
                    yield path, number, chunk

    try:
        with progress_bar(unit=" pairs", desc="preparing") as bar:
            for count in _on_all_cores(functools.partial(_write_shard, encoding), missing()):
                bar.update(count)
    except BrokenProcessPool:
        time.sleep(_SIGNAL_SECONDS)  # if a signal ended the worker process, ours ends this one with its own line
        raise InterruptedProcess(
            "data: a worker process was killed, as the kernel does where memory runs out, or ended by the error above; "
            "the same command does what is missing, with less memory on fewer cores"
        ) from None
    return paths


def _on_all_cores(write: Callable[..., int], jobs: Iterator[tuple[Path, int, list[Pair]]]) -> Iterator[int]:
    """The results of `write(*job)`, computed by worker processes; a single job runs in this process."""
    first = list(itertools.islice(jobs, 2))
    if len(first) < 2:
        yield from (write(*job) for job in first)
        return
    cores = available_cores()
    context = multiprocessing.get_context("spawn")  # not fork: the caller may have threads
    with concurrent.futures.ProcessPoolExecutor(cores, context, _end_with_parent) as pool:
        running = set()
        for job in itertools.chain(first, jobs):
            with signals.left_to_parent():  # the first call starts the worker processes
                running.add(pool.submit(write, *job))
            if len(running) > 2 * cores:
                done, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                yield from (future.result() for future in done)
        yield from (future.result() for future in concurrent.futures.as_completed(running))


def refuse_unguarded_script() -> None:
    """Refuses to go on in a worker process that is importing the user's script, which would wait for its parent."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing finds it out itself
        raise InputError(
            'worker processes import the script that prepares data; put what it does under if __name__ == "__main__":'
        )


def _end_with_parent() -> None:
    """Starts a thread that ends this worker process when its parent has died, even by SIGKILL."""

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


_open_vocabularies = functools.cache(Vocabularies.open)  # once in each worker process


def _write_shard(encoding: Encoding, path: Path, number: int, pairs: list[Pair]) -> int:
    """Cleans and encodes training pairs into shard `number`, and returns how many pairs were read.

    The file holds, for each side, the concatenated ids and the lengths of the sentences; the keys for deduplication
    (empty if that is off); and the cleaning report.
    """
    rules, report = encoding.rules, cleaning.Report()
    cleaned = cleaning.clean(pairs, rules, encoding.languages, encoding.held_out, report)
    vocabularies = _open_vocabularies(encoding.vocabularies)
    texts_of_sides = (
        [encoding.preprocess_source(source) for source, _ in cleaned],
        [encoding.preprocess_target(target) for _, target in cleaned],
    )
    if encoding.bpe_dropout is None:
        sources, targets = vocabularies.encode_many(*texts_of_sides, num_threads=1)
    else:
        sources, targets = vocabularies.sample_many(*texts_of_sides, encoding.bpe_dropout, seed=number)
    kept, texts = [], []
    for *ids, text in zip(sources, targets, cleaned, strict=True):
        if cleaning.is_too_long(*ids, encoding.max_length):
            report.drop("too_long", *text)
        else:
            kept.append(ids)
            texts.append(text)
    arrays = {}
    for side, name in enumerate(SIDES):
        lengths = np.array([len(ids[side]) for ids in kept], np.int32)
        flat = itertools.chain.from_iterable(ids[side] for ids in kept)
        arrays |= {f"{name}_ids": np.fromiter(flat, np.int32, lengths.sum()), f"{name}_lengths": lengths}
    for name, key, on in (
        ("exact_keys", cleaning.exact_key, rules.drop_duplicates),
        ("near_keys", cleaning.near_key, rules.drop_near_duplicates),
    ):
        arrays[name] = np.array([key(*text) for text in texts] if on else [], np.uint64)
    arrays["report"] = np.frombuffer(json.dumps(dataclasses.asdict(report)).encode(), np.uint8)
    with replacing(path) as partial, partial.open("wb") as file:  # a requeued job may write it too
        np.savez(file, **arrays)
    return len(pairs)


def _read_shard(path: Path, *names: str) -> Mapping[str, np.ndarray]:
    """The named arrays of a shard, or all of them; NumPy verifies their checksums."""
    try:
        with np.load(path) as arrays:
            return {name: arrays[name] for name in names or arrays.files}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:  # EOFError: it is empty
        raise DamagedError(f"{path} is damaged ({error}); delete it and run again") from None


def join_shards(
    texts: list[list[Path]], vocabularies: Vocabularies, dtype: np.dtype, directory: Path
) -> cleaning.Report:
    """Writes the training files of a store: the pairs of all shards of all texts, deduplicated."""
    report, position = cleaning.Report(texts=[0] * len(texts)), [0, 0]
    shards = [path for paths in texts for path in paths]
    text_of_shard = [text for text, paths in enumerate(texts) for _ in paths]
    keys = {"duplicate": "exact_keys", "near_duplicate": "near_keys"}
    repeated = {rule: again for rule, name in keys.items() if len(again := _repeated(shards, name))}
    first = 0
    with contextlib.ExitStack() as stack:
        open_all = lambda end: [stack.enter_context((directory / f"train.{side}.{end}").open("wb")) for side in SIDES]
        ids_files, ends_files = open_all("ids"), open_all("ends")
        for text, path in zip(text_of_shard, shards, strict=True):
            shard = _read_shard(path)
            report.add(cleaning.Report(**json.loads(shard["report"].tobytes())))
            count = len(shard["source_lengths"])
            keep = np.ones(count, bool)
            for rule, again in repeated.items():
                drop = again[first : first + count] & keep
                keep &= ~drop
                _report_repeated(report, rule, drop, shard, vocabularies)
            first += count
            report.texts[text] += int(keep.sum())
            report.unknown += int((_has_unknown(shard) & keep).sum())
            for side, name in enumerate(SIDES):
                lengths = shard[f"{name}_lengths"]
                # Not `tofile`: its errors have no errno, and it ignores that of its last flush.
                ids_files[side].write(shard[f"{name}_ids"][np.repeat(keep, lengths)].astype(dtype))
                ends_files[side].write(position[side] + lengths[keep].cumsum(dtype=np.int64))
                position[side] += int(lengths[keep].sum())
    return report


def _has_unknown(shard: Mapping[str, np.ndarray]) -> np.ndarray:
    """For each pair of a shard, whether a side has text that is not in the vocabulary."""
    found = np.zeros(len(shard["source_lengths"]), bool)
    for name in SIDES:
        pair_of_id = np.repeat(np.arange(len(found)), shard[f"{name}_lengths"])
        found[pair_of_id[shard[f"{name}_ids"] == UNKNOWN]] = True
    return found


def _repeated(shards: list[Path], name: str) -> np.ndarray:
    """For each pair of all shards, whether an earlier pair has the same key; empty if there are no keys."""
    keys = np.concatenate([np.zeros(0, np.uint64), *(_read_shard(path, name)[name] for path in shards)])
    return cleaning.repeated(keys)


def _report_repeated(
    report: cleaning.Report, rule: str, drop: np.ndarray, shard: Mapping[str, np.ndarray], vocabularies: Vocabularies
) -> None:
    """Counts the dropped pairs, and decodes the first of them as examples."""
    sides = [Sentences(shard[f"{name}_ids"], shard[f"{name}_lengths"].cumsum()) for name in SIDES]
    for count, index in enumerate(np.flatnonzero(drop)):
        decoded = (v.decode(side[index]) for v, side in zip(vocabularies, sides, strict=True))
        report.drop(rule, *(decoded if count < cleaning.EXAMPLES else ("", "")))


def chunks(pairs: Iterator[Pair], size: int) -> Iterator[list[Pair]]:
    """The pairs in lists of `size`; the last may be shorter."""
    while chunk := list(itertools.islice(pairs, size)):
        yield chunk
