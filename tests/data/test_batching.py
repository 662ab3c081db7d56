import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t2t_jax.data.batching import Batches, Bucket, Rectangle, split_lengths
from t2t_jax.data.token_store import Sentences
from t2t_jax.errors import InputError


def batches_of(lengths, budget, buckets, seed):
    """Pairs of these lengths; sentence i is the number i + 2 repeated, so a row tells whose it is."""
    sides = [np.array(side) for side in zip(*lengths, strict=True)]
    sides = [Sentences(np.repeat(np.arange(len(side)) + 2, side), side.cumsum()) for side in sides]
    return Batches(*sides, tokens_per_batch=budget, num_buckets=buckets, seed=seed)


lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=150)


@given(lengths, st.integers(12, 200), st.integers(1, 8), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_every_pair_is_in_exactly_one_batch_of_an_epoch_within_its_budget(lengths, budget, buckets, seed):
    batches = batches_of(lengths, budget, buckets, seed)
    assert 1 <= len(batches.buckets) <= buckets
    for epoch in (0, 1):
        seen = []
        for step in range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch):
            batch, bucket = batches[step], batches.bucket(step)
            assert batch["inputs"].shape == (bucket.rows, bucket.source_length)
            assert batch["targets"].shape == (bucket.rows, bucket.target_length)
            assert 0 < batch["inputs"].size <= budget and 0 < batch["targets"].size <= budget
            rows = [(source, target) for source, target in zip(batch["inputs"], batch["targets"], strict=True)
                    if source.any()]  # fmt: skip
            assert rows, "a batch of nothing but padding"
            for source, target in rows:
                pair = source[0] - 2
                assert (np.count_nonzero(source), np.count_nonzero(target)) == lengths[pair]
                assert target[0] == source[0]
                seen.append(pair)
        assert sorted(seen) == list(range(len(lengths)))


def everything(batches, steps):
    return [(batch["inputs"].tobytes(), batch["targets"].tobytes()) for batch in (batches[s] for s in steps)]


def test_batches_are_a_pure_function_of_seed_and_step():
    pairs = [(1 + i % 9, 1 + i % 7) for i in range(200)]
    one, same, other = (batches_of(pairs, 60, 4, seed) for seed in (3, 3, 4))
    steps = range(2 * one.per_epoch)
    assert everything(one, steps) == everything(same, reversed(steps))[::-1]
    assert everything(one, steps) != everything(other, steps)


def test_each_epoch_has_its_own_order_and_its_own_batches():
    batches = batches_of([(1 + i % 9, 1 + i % 7) for i in range(200)], 60, 4, 0)
    epochs = [everything(batches, range(e * batches.per_epoch, (e + 1) * batches.per_epoch)) for e in (0, 1)]
    assert len(set(epochs[0]) & set(epochs[1])) < 5
    shapes = [[batches.bucket(e * batches.per_epoch + s) for s in range(batches.per_epoch)] for e in (0, 1)]
    assert shapes[0] != shapes[1], "buckets come in the same order in both epochs"


def test_reading_ahead_changes_nothing_and_starts_anywhere():
    batches = batches_of([(1 + i % 9, 1 + i % 7) for i in range(200)], 60, 4, 0)
    ahead = [(b["inputs"].tobytes(), b["targets"].tobytes()) for b in batches.iterate(5, 30)]
    assert ahead == everything(batches, range(5, 30))


def test_the_single_best_cut_by_hand():
    """Ten pairs of length 2 and one of 10 both ways: cutting off the long one saves the most."""
    counts = np.zeros((11, 11), np.int64)
    counts[2, 2], counts[10, 10] = 10, 1
    assert split_lengths(counts, 1) == [Rectangle((2, 11), (2, 11))]
    assert sorted(split_lengths(counts, 2), key=str) == [Rectangle((10, 11), (10, 11)), Rectangle((2, 3), (2, 3))]
    assert split_lengths(counts, 5) == split_lengths(counts, 2), "there is nothing more to save"


@given(lengths)
@settings(max_examples=30, deadline=None)
def test_more_buckets_never_pad_more(lengths):
    counts = np.zeros((13, 13), np.int64)
    np.add.at(counts, tuple(np.array(lengths).T), 1)

    def padded(parts):
        inside = lambda p: counts[slice(*p.source), slice(*p.target)].sum()
        assert sum(inside(p) for p in parts) == len(lengths)
        return sum(inside(p) * (p.source[1] - 1 + p.target[1] - 1) for p in parts)

    costs = [padded(split_lengths(counts, n)) for n in range(1, 8)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] >= sum(s + t for s, t in lengths)


def test_rows_divide_among_the_usual_device_counts():
    batches = batches_of([(5, 5)] * 100, 130, 1, 0)
    assert batches.buckets == [Bucket(5, 5, 24)]


def test_a_budget_below_the_longest_sentence_is_refused():
    with pytest.raises(InputError, match=r"data.tokens_per_batch=11 is less than the longest sentence \(12"):
        batches_of([(3, 12)], 11, 1, 0)
