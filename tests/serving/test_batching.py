"""How jobs share batches: the law of the queue, without a model. And which searches may be compiled."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="needs the extra `serve`")
from t2t_jax.serving.batching import Batcher, Full, Job
from t2t_jax.serving.limits import Limits
from t2t_jax.serving.searches import Searches

SECONDS = 60


class Worker:
    """Notes its batches, and works when `gate` is open."""

    def __init__(self, **options):
        self.batches, self.gate, self.begun = [], threading.Event(), threading.Event()
        self.batcher = Batcher(self.work, **{"batch_items": 4, "waiting_items": 100, "longest_wait": SECONDS} | options)

    def work(self, key, items, check):
        self.batches.append((key, list(items)))
        self.begun.set()
        while not self.gate.wait(0.01):
            check()
        if "bad" in items:
            raise ValueError("bad")
        return [(key, item) for item in items]

    def submit(self, key, *items):
        job = Job(key, items)
        self.batcher.submit(job)
        return job

    def busy(self):
        """Returns once the thread is at work on a job of its own."""
        job = self.submit("first", 0)
        assert self.begun.wait(SECONDS)
        return job


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.batcher.close()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6)), min_size=1, max_size=30), st.integers(1, 8))
@settings(max_examples=40)
def test_every_job_gets_its_own_results_in_full_batches_and_the_oldest_is_always_next(asked, batch_items):
    worker = Worker(batch_items=batch_items, waiting_items=1000)
    worker.busy()
    jobs = [worker.submit(key, *((number, n) for n in range(count))) for number, (key, count) in enumerate(asked)]
    worker.gate.set()
    for job in jobs:
        assert job.future.result(SECONDS) == [(job.key, item) for item in job.items]
    worker.batcher.close()
    missing = list(range(len(jobs)))
    for key, items in worker.batches[1:]:
        numbers = sorted({number for number, _ in items})
        assert numbers[0] == missing[0] and {jobs[number].key for number in numbers} == {key}
        assert len(items) <= batch_items or len(numbers) == 1
        same = [number for number in missing if jobs[number].key == key]
        assert numbers == same[: len(numbers)]  # in order, none left out
        if len(numbers) < len(same):
            assert len(items) + len(jobs[same[len(numbers)]].items) > batch_items
        missing = [number for number in missing if number not in numbers]
    assert not missing


def test_only_the_job_that_fails_fails(worker):
    worker.busy()
    good, bad, other = worker.submit("a", 1), worker.submit("a", "bad"), worker.submit("a", 2)
    worker.gate.set()
    assert good.future.result(SECONDS) == [("a", 1)] and other.future.result(SECONDS) == [("a", 2)]
    with pytest.raises(ValueError, match="bad"):
        bad.future.result(SECONDS)
    assert worker.submit("a", 3).future.result(SECONDS) == [("a", 3)]


def test_a_withdrawn_job_is_not_worked_on_and_a_batch_that_nobody_waits_for_ends(worker):
    first, second = worker.busy(), worker.submit("a", 1)
    worker.batcher.withdraw(second)
    worker.batcher.withdraw(first)  # the gate is closed: only being abandoned can end its batch
    third = worker.submit("b", 2)
    worker.gate.set()
    assert third.future.result(SECONDS) == [("b", 2)]
    assert worker.batches == [("first", [0]), ("b", [2])]


def test_more_than_the_queue_holds_is_refused_with_the_time_to_come_back():
    worker = Worker(waiting_items=3)
    first = worker.busy()
    worker.submit("a", 1, 2)
    with pytest.raises(Full) as full:
        worker.submit("b", 1, 2)
    assert 1 <= full.value.retry_after <= 60
    last = worker.submit("b", 1)
    worker.gate.set()
    assert last.future.result(SECONDS) and first.future.done()
    worker.batcher.close()
    with pytest.raises(Full):
        worker.submit("a", 1)


def test_a_job_that_would_wait_for_too_long_is_refused():
    now = [0.0]
    worker = Worker(batch_items=2, longest_wait=20.0, clock=lambda: now[0])
    idle = Job("idle", [1])
    for seconds, job, submit in (
        (10.0, Job("a", [1]), worker.batcher.submit),
        (1000.0, idle, lambda job: worker.batcher.submit_idle([job])),  # which may compile: no measure
    ):
        submit(job)
        assert worker.begun.wait(SECONDS)
        now[0] += seconds
        worker.gate.set()
        assert job.future.result(SECONDS)
        worker.gate.clear(), worker.begun.clear()
    worker.busy()
    for key in ("a", "b", "a", "a"):  # the last finds two batches ahead of it, of 10 s each
        worker.submit(key, 1)
    with pytest.raises(Full) as full:
        worker.submit("b", 1)
    assert full.value.retry_after == 30
    worker.batcher.close()


def test_one_slow_batch_that_may_have_compiled_refuses_nobody_and_two_do():
    now = [0.0]
    worker = Worker(longest_wait=20.0, clock=lambda: now[0])

    def work_on(seconds):
        worker.gate.clear(), worker.begun.clear()
        at_work, first = worker.busy(), worker.submit("a", 1)
        worker.batcher.withdraw(worker.submit("b", 1))  # finds one batch ahead of it
        worker.batcher.withdraw(first)
        now[0] += seconds
        worker.gate.set()
        at_work.future.result(SECONDS)

    for seconds in (1.0, 50.0, 50.0):
        work_on(seconds)
    with pytest.raises(Full):
        work_on(1.0)
    worker.batcher.close()


def test_closing_gives_up_what_waits_and_what_runs():
    worker = Worker()
    first, second = worker.busy(), worker.submit("a", 1)
    worker.batcher.close()
    assert first.future.cancelled() and second.future.cancelled()


def test_idle_jobs_run_one_by_one_and_only_while_no_others_wait(worker):
    worker.busy()
    worker.batcher.submit_idle(idle := [Job("idle", [1]), Job("idle", [2])])
    asked = [worker.submit("a", 1), worker.submit("b", 2)]
    assert worker.batcher.waiting() == 2 and worker.batcher.batch_age() > 0
    worker.gate.set()
    assert [job.future.result(SECONDS) for job in (*asked, *idle)]
    assert worker.batches[1:] == [("a", [1]), ("b", [2]), ("idle", [1]), ("idle", [2])]
    worker.gate.clear(), worker.begun.clear()
    worker.batcher.submit_idle(idle := [Job("idle", [3]), Job("idle", [4])])
    assert worker.begun.wait(SECONDS) and worker.batcher.batch_age() == 0, "health would fail during the warm-up"
    worker.batcher.close()
    assert all(job.future.cancelled() for job in idle) and not worker.batcher.is_running


def test_searches_are_admitted_from_a_bucket_that_refills(monkeypatch):
    now, dropped = [0.0], []
    monkeypatch.setattr("jax.clear_caches", lambda: dropped.append(now[0]))
    searches = Searches("own", Limits(searches=3, search_seconds=10.0), clock=lambda: now[0])
    try:
        assert [searches.admit(search) for search in ("own", "a", "b", "c", "a")] == [0] * 5
        now[0] = 4.0
        assert searches.admit("d") == pytest.approx(6.0) and searches.admit("own") == searches.admit("c") == 0
        searches.prepare("a")
        assert dropped == []
        now[0] = 10.0
        assert searches.admit("d") == 0 and searches.admit("e") == pytest.approx(10.0)
        searches.prepare("d")
        searches.prepare("d")
        assert dropped == [10.0]  # a, b and c were compiled; with d they would be more than three
        assert searches.admit("a") > 0
    finally:
        searches.close()


def test_only_the_search_of_the_run_is_kept_on_disk():
    import jax

    usual = jax.config.jax_persistent_cache_min_compile_time_secs
    searches = Searches("own", Limits(), clock=time.monotonic)
    searches.prepare("other")
    assert jax.config.jax_persistent_cache_min_compile_time_secs > 1e6
    searches.prepare("own")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == usual
    searches.prepare("other")
    searches.close()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == usual
