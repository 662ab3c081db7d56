"""Iteration in several threads: every item, at the same time, errors, and an end before the last item."""

import functools
import threading

import pytest

from t2t_jax.threads import all_at_once, available_cores, in_threads


def numbers(start):
    yield from range(start, start + 5)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_item_comes_once(threads):
    found = list(in_threads([numbers(start) for start in (0, 10, 20, 30)], threads))
    assert sorted(found) == [start + i for start in (0, 10, 20, 30) for i in range(5)]
    assert threads > 1 or found == sorted(found), "one thread takes them in order"
    assert list(in_threads([], threads)) == []


def test_generators_run_at_the_same_time():
    both = threading.Barrier(2, timeout=20)

    def meet(name):
        both.wait()
        yield name

    assert sorted(in_threads([meet("a"), meet("b")], 2)) == ["a", "b"]


def test_functions_are_called_at_once_and_their_error_is_raised():
    all_three, called = threading.Barrier(3, timeout=20), []

    def meet(name):
        all_three.wait()
        called.append(name)
        if name == "b":
            raise KeyError(name)

    with pytest.raises(KeyError, match="b"):
        all_at_once([functools.partial(meet, name) for name in "abc"])
    assert sorted(called) == ["a", "b", "c"]
    all_at_once([])


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_is_raised_and_ends_the_others(threads):
    begun, ended = threading.Event(), threading.Event()

    def endless():
        try:
            while True:
                begun.set()
                yield 0
        finally:
            ended.set()

    def failing():
        if threads > 1:
            assert begun.wait(20)
        raise ValueError("of a thread")
        yield

    with pytest.raises(ValueError, match="of a thread"):
        list(in_threads([failing(), endless()][:: 1 if threads == 1 else -1], threads))
    assert threads == 1 or ended.wait(20)


def test_closing_the_iterator_ends_all_threads():
    def endless():
        while True:
            yield threading.current_thread()

    items = in_threads([endless(), endless()], 2)
    worker = next(items)
    items.close()
    assert worker is not threading.current_thread() and not worker.is_alive()


def test_cores_that_are_available_are_counted():
    assert available_cores() >= 1
