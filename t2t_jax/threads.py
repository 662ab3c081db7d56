"""CPU cores, and iteration in several threads."""

import concurrent.futures
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def available_cores() -> int:
    """The number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def all_at_once(functions: Sequence[Callable[[], object]]) -> None:
    """Calls all functions, each in a thread of its own; raises what one of them raises, after all have ended."""
    with concurrent.futures.ThreadPoolExecutor(max(1, len(functions))) as executor:
        for called in [executor.submit(function) for function in functions]:
            called.result()


def in_threads(generators: Sequence[Generator[Item]], threads: int) -> Iterator[Item]:
    """The items of all generators as they come; a pool of so many threads runs the generators, in order.

    An exception in a generator is raised here. The others then end at their next item, as they do when this iterator is
    closed.
    """
    if min(threads, len(generators)) == 1:
        for generator in generators:
            yield from generator
        return
    found, is_over = queue.SimpleQueue(), threading.Event()

    def iterate(generator):
        try:
            with contextlib.closing(generator):
                for item in generator:
                    found.put((item,))
                    if is_over.is_set():
                        return
            found.put(())
        except BaseException as error:
            found.put(error)

    executor = concurrent.futures.ThreadPoolExecutor(threads)
    try:
        running = len([executor.submit(iterate, generator) for generator in generators])
        while running:
            match found.get():
                case (item,):
                    yield item
                case ():
                    running -= 1
                case error:
                    raise error
    finally:
        is_over.set()
        executor.shutdown(cancel_futures=True)
