import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t2t_jax.data import batching
from t2t_jax.data.batching import Batches, checksum, empty_batch
from t2t_jax.data.bucketing import Bucket, Rectangle, partition, smallest_shapes, split_lengths
from t2t_jax.data.packing import pack
from t2t_jax.data.token_store import Sentences
from t2t_jax.errors import InputError


def batches_of(lengths, budget, buckets, seed, packing=0):
    """Pairs of these lengths; sentence i repeats the id i + 2, which identifies it in a batch."""
    sides = [np.array(side) for side in zip(*lengths, strict=True)]
    sides = [Sentences(np.repeat(np.arange(len(side)) + 2, side), side.cumsum()) for side in sides]
    shapes = {"packing": packing > 0, "packing_shapes": max(1, packing)}
    return Batches(*sides, tokens_per_batch=budget, num_buckets=buckets, seed=seed, **shapes)


all_layouts = pytest.mark.parametrize("packing", [0, 1, 3], ids=["bucketed", "packed", "packed in three shapes"])
lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=150)


@given(lengths, st.integers(12, 200), st.integers(1, 8), st.integers(0, 99))
@settings(max_examples=100)
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
            assert rows, "a batch that holds only padding"
            for source, target in rows:
                pair = source[0] - 2
                assert (np.count_nonzero(source), np.count_nonzero(target)) == lengths[pair]
                assert target[0] == source[0]
                seen.append(pair)
        assert sorted(seen) == list(range(len(lengths)))


def pairs_of_row(batch, row):
    """The pairs of a packed row, after checking that it holds nothing else."""
    sides = []
    for side in ("input", "target"):
        ids, segments = batch[f"{side}s"][row], batch[f"{side}_segments"][row]
        used = np.count_nonzero(ids)
        assert ids[:used].all() and np.array_equal(segments != 0, ids != 0), "a gap between pairs"
        assert not used or set(np.diff(segments[:used], prepend=0)) <= {0, 1}, "pairs are not numbered from 1"
        sides.append([ids[segments == number] for number in range(1, segments.max() + 1)])
    return list(zip(*sides, strict=True))


@given(lengths, st.integers(12, 200), st.integers(0, 99), st.integers(1, 4))
@settings(max_examples=200)
def test_every_pair_is_packed_once_per_epoch_and_never_split(lengths, budget, seed, shapes):
    batches = batches_of(lengths, budget, 1, seed, packing=shapes)
    assert len(set(batches.buckets)) == len(batches.buckets) <= shapes
    for bucket in batches.buckets:
        assert bucket.packed and max(bucket.source_length, bucket.target_length) * bucket.rows <= budget
    for epoch in (0, 1):
        seen = []
        for step in range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch):
            batch, bucket = batches[step], batches.bucket(step)
            for side, length in (("input", bucket.source_length), ("target", bucket.target_length)):
                assert batch[f"{side}s"].shape == batch[f"{side}_segments"].shape == (bucket.rows, length)
            pairs = [pair for row in range(bucket.rows) for pair in pairs_of_row(batch, row)]
            assert pairs, "a batch that holds only padding"
            for source, target in pairs:
                assert np.unique(np.concatenate([source, target])).tolist() == [source[0]]
                assert (len(source), len(target)) == lengths[source[0] - 2]
                seen.append(source[0] - 2)
        assert sorted(seen) == list(range(len(lengths)))


@all_layouts
def test_pair_lengths_are_those_of_the_pairs_of_a_batch(packing):
    lengths = [(3, 2), (5, 7), (1, 1), (2, 9), (4, 4), (6, 3)]
    batches = batches_of(lengths, 40, 2, 0, packing)
    found = [
        pair for step in range(batches.per_epoch) for pair in zip(*batches.lengths(batches.pairs(step)[0]), strict=True)
    ]
    assert sorted(found) == sorted(lengths)


@all_layouts
@given(st.data())
def test_the_rows_of_any_number_of_processes_make_the_batch_and_its_checksum(packing, data):
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=40))
    batches = batches_of(lengths, 40, 2, 0, packing)
    step = data.draw(st.integers(0, 2 * batches.per_epoch - 1))
    whole, rows = batches[step], batches.bucket(step).rows
    bounds = sorted(data.draw(st.lists(st.integers(0, rows), max_size=3)))
    parts = [batches.read(step, slice(*ends)) for ends in itertools.pairwise([0, *bounds, rows])]
    for name, array in whole.items():
        np.testing.assert_array_equal(sum(part[name] for part in parts), array)
    assert sum(checksum(step, part) for part in parts) % 2**32 == checksum(step, whole)


def test_a_checksum_depends_on_the_step_and_on_each_token_and_its_place():
    batch = {"inputs": np.array([[5, 6, 0], [7, 0, 0]]), "targets": np.array([[5, 0], [8, 9]])}
    changed = [{**batch, "inputs": np.array(ids)} for ids in (
        [[5, 6, 0], [7, 1, 0]], [[6, 5, 0], [7, 0, 0]], [[7, 0, 0], [5, 6, 0]], [[5, 0, 6], [7, 0, 0]],
        [[5, 6, 0], [0, 7, 0]],
    )]  # fmt: skip
    swapped = {"inputs": batch["targets"], "targets": batch["inputs"]}
    found = [checksum(0, x) for x in (batch, *changed, swapped)] + [checksum(1, batch), 0]
    assert len(set(found)) == len(found) and all(0 <= x < 2**32 for x in found)
    assert checksum(0, empty_batch(Bucket(3, 2, 2))) == 0


def test_a_packed_row_by_hand():
    """Two pairs fill a row; the longer one comes first."""
    batches = batches_of([(2, 3), (4, 2)], 6, 1, 0, packing=1)
    batch = batches[0]
    assert batches.per_epoch == 1 and batches.buckets == [Bucket(6, 6, 1, packed=True)]
    np.testing.assert_array_equal(batch["inputs"], [[3, 3, 3, 3, 2, 2]])
    np.testing.assert_array_equal(batch["input_segments"], [[1, 1, 1, 1, 2, 2]])
    np.testing.assert_array_equal(batch["targets"], [[3, 3, 2, 2, 2, 0]])
    np.testing.assert_array_equal(batch["target_segments"], [[1, 1, 2, 2, 2, 0]])


def test_pairs_that_fit_into_no_open_row_open_new_rows():
    """Each of three pairs fills more than half of a row, though two rows could hold their tokens."""
    assert sorted(pack(*np.array([[6, 6, 6], [1, 1, 1]], np.int8), 10, 10)) == [0, 1, 2]


def wmt_like(count, seed=0):
    """Lengths of 27 subwords on average, log-normal, a target about 1.05 times as long as its source."""
    rng = np.random.default_rng(seed)
    source = rng.lognormal(np.log(27) - 0.6**2 / 2, 0.6, count)
    target = 1.05 * source * rng.lognormal(0, 0.18, count)
    return [np.clip(np.rint(side), 2, 256).astype(np.int64) for side in (source, target)]


@pytest.mark.parametrize(("shapes", "most"), [(1, 0.015), (2, 0.05)])
def test_packed_rows_hold_little_padding(shapes, most):
    batches = batches_of(list(zip(*wmt_like(50_000), strict=True)), 25_000, 1, 0, packing=shapes)
    tokens = positions = 0
    for step in range(batches.per_epoch):
        batch = batches[step]
        tokens += np.count_nonzero(batch["inputs"]) + np.count_nonzero(batch["targets"])
        positions += batch["inputs"].size + batch["targets"].size
    assert tokens == sum(side.sum() for side in wmt_like(50_000))
    assert 1 - tokens / positions <= most
    assert len(batches.buckets) == shapes and all(bucket.rows % 8 == 0 for bucket in batches.buckets)
    assert batches.buckets[-1].source_length >= 256 and batches.buckets[-1].target_length >= 256


def test_short_pairs_are_packed_into_short_rows_and_fill_the_gaps_of_long_ones():
    """By hand: 100 pairs of length 8, nine of 12 and one of 20, in rows of 16 and of 20."""
    batches = batches_of([(8, 8)] * 100 + [(12, 12)] * 9 + [(20, 20)], 640, 1, 0, packing=2)
    assert batches.buckets == [Bucket(16, 16, 40, packed=True), Bucket(20, 20, 32, packed=True)]
    rows = {20: [], 16: []}
    for step in range(batches.per_epoch):
        batch = batches[step]
        rows[batches.bucket(step).source_length] += [row for row in batch["inputs"] if row.any()]
    assert [np.count_nonzero(row) for row in rows[20]] == [20] * 10, "one of 12 and one of 8 in nine of them"
    assert len(rows[16]) == 46, "91 pairs, two a row"


def test_which_pairs_share_a_row_differs_between_epochs():
    batches = batches_of([(1 + i % 5, 1 + i % 3) for i in range(200)], 60, 1, 0, packing=1)
    together = []
    for epoch in (0, 1):
        steps = range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch)
        rows = [row for step in steps for row in batches[step]["inputs"]]
        together.append({frozenset(row[row != 0].tolist()) for row in rows})
    assert len(together[0] & together[1]) < len(together[0]) / 4


def everything(batches, steps):
    return [tuple(array.tobytes() for array in batches[step].values()) for step in steps]


@all_layouts
def test_batches_are_a_pure_function_of_seed_and_step(packing):
    pairs = [(1 + i % 9, 1 + i % 7) for i in range(200)]
    one, same, other = (batches_of(pairs, 60, 4, seed, packing) for seed in (3, 3, 4))
    steps = range(2 * one.per_epoch)
    assert everything(one, steps) == everything(same, reversed(steps))[::-1]
    assert everything(one, steps) != everything(other, steps)


@all_layouts
def test_plans_do_not_depend_on_the_chunk_size(packing, monkeypatch):
    pairs = [(1 + i % 9, 1 + i % 7) for i in range(200)]
    expected = batches_of(pairs, 60, 4, 0, packing)
    expected = everything(expected, range(expected.per_epoch))
    monkeypatch.setattr(batching, "_CHUNK", 7)
    found = batches_of(pairs, 60, 4, 0, packing)
    assert everything(found, range(found.per_epoch)) == expected


@all_layouts
def test_epochs_differ_in_order_and_in_batches(packing):
    batches = batches_of([(1 + i % 9, 1 + i % 7) for i in range(200)], 60, 4, 0, packing)
    epochs = [everything(batches, range(e * batches.per_epoch, (e + 1) * batches.per_epoch)) for e in (0, 1)]
    assert len(set(epochs[0]) & set(epochs[1])) < 5
    shapes = [[batches.bucket(e * batches.per_epoch + s) for s in range(batches.per_epoch)] for e in (0, 1)]
    assert packing == 1 or shapes[0] != shapes[1], "buckets come in the same order in both epochs"
    lengths = [
        sorted(zip(*batches.lengths(batches.pairs(epoch * batches.per_epoch)[0]), strict=True)) for epoch in (0, 1)
    ]
    assert lengths[0] != lengths[1], "the first batch has pairs of the same lengths in both epochs"


@all_layouts
def test_prefetching_yields_the_same_batches_from_any_step(packing):
    batches = batches_of([(1 + i % 9, 1 + i % 7) for i in range(200)], 60, 4, 0, packing)
    ahead = [tuple(array.tobytes() for array in batch.values()) for batch in batches.iterate(5, 30)]
    assert ahead == everything(batches, range(5, 30))


def test_the_single_best_cut_by_hand():
    """Ten pairs of lengths (2, 2) and one of (10, 10): cutting off the long one saves the most."""
    counts = np.zeros((11, 11), np.int64)
    counts[2, 2], counts[10, 10] = 10, 1
    assert split_lengths(counts, 1) == [Rectangle((2, 11), (2, 11))]
    assert sorted(split_lengths(counts, 2), key=str) == [Rectangle((10, 11), (10, 11)), Rectangle((2, 3), (2, 3))]
    assert split_lengths(counts, 5) == split_lengths(counts, 2), "no further cut saves padding"


def padded_after(pairs, axis, at):
    """The number of positions after a cut, by definition: each part is padded to its longest source and target."""
    halves = [[pair for pair in pairs if (pair[axis] < at) == below] for below in (True, False)]
    return sum(len(half) * (max(s for s, _ in half) + max(t for _, t in half)) for half in halves if half)


@given(lengths)
@settings(max_examples=100)
def test_the_first_cut_is_the_best_of_all(lengths):
    counts = np.zeros((13, 13), np.int64)
    np.add.at(counts, tuple(np.array(lengths).T), 1)
    parts = split_lengths(counts, 2)
    inside = lambda part: counts[slice(*part.source), slice(*part.target)].sum()
    found = sum(inside(part) * (part.source[1] - 1 + part.target[1] - 1) for part in parts)
    assert found == min(padded_after(lengths, axis, at) for axis in (0, 1) for at in range(13))


@given(lengths)
@settings(max_examples=30)
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


def counted(lengths, longest=12):
    counts = np.zeros((longest + 1, longest + 1), np.int64)
    np.add.at(counts, tuple(np.array(lengths).T), 1)
    return counts


def padded_lengths(buckets, lengths):
    """The positions that the pairs take in their buckets."""
    return sum(sum(buckets.lengths[buckets.of_pair[pair]]) for pair in lengths)


@given(lengths, st.integers(1, 8))
@settings(max_examples=100)
def test_each_pair_is_in_the_smallest_shape_that_holds_it_and_padding_is_no_more_than_in_a_partition(lengths, number):
    buckets, plain = (of(counted(lengths), number) for of in (smallest_shapes, partition))
    assert 1 <= len(buckets.lengths) <= number
    for source, target in lengths:
        holding = [sum(shape) for shape in buckets.lengths if source <= shape[0] and target <= shape[1]]
        chosen = buckets.lengths[buckets.of_pair[source, target]]
        assert source <= chosen[0] and target <= chosen[1] and sum(chosen) == min(holding)
    assert padded_lengths(buckets, lengths) <= padded_lengths(plain, lengths)


def test_smallest_shapes_by_hand():
    """A partition into two must cut off the long source or the long target; a shape need not be a rectangle of it."""
    lengths = [(2, 2)] * 10 + [(2, 8)] * 4 + [(8, 2)] * 4 + [(8, 8)]
    assert sorted(smallest_shapes(counted(lengths), 2).lengths) == [(2, 2), (8, 8)]
    assert padded_lengths(smallest_shapes(counted(lengths), 2), lengths) == 10 * 4 + 9 * 16
    assert sorted(smallest_shapes(counted(lengths), 4).lengths) == [(2, 2), (2, 8), (8, 2), (8, 8)]


def test_padding_of_sentences_like_those_of_wmt14():
    source, target = wmt_like(50_000)
    lengths = list(zip(source.tolist(), target.tolist(), strict=True))
    tokens, counts = (source + target).sum(), counted(lengths, 256)
    found = {n: 1 - tokens / padded_lengths(smallest_shapes(counts, n), lengths) for n in (12, 48)}
    assert found[12] < 0.17 and found[48] < 0.08
    assert found[12] < 0.8 * (1 - tokens / padded_lengths(partition(counts, 12), lengths))


def test_the_number_of_rows_is_a_multiple_of_8():
    batches = batches_of([(5, 5)] * 100, 130, 1, 0)
    assert batches.buckets == [Bucket(5, 5, 24)]


def test_the_number_of_packed_rows_is_a_multiple_of_8_and_rows_hold_two_sentences():
    for budget, rows, length in ((79, 7, 11), (80, 8, 10), (159, 8, 16), (320, 16, 20)):
        (bucket,) = batches_of([(10, 10)] * 500, budget, 1, 0, packing=1).buckets
        assert (bucket.rows, bucket.target_length) == (rows, length)


@all_layouts
def test_a_budget_below_the_longest_sentence_is_refused(packing):
    with pytest.raises(InputError, match=r"data.tokens_per_batch=11 is less than the longest sentence \(12"):
        batches_of([(3, 12)], 11, 1, 0, packing)


def test_a_bug_in_the_loader_is_not_taken_for_damaged_data_and_names_the_batch(monkeypatch):
    monkeypatch.setattr(Batches, "read", lambda batches, step, rows: None + step)
    with pytest.raises(TypeError) as bug:
        list(batches_of([(5, 5)] * 10, 20, 1, 0).iterate(1, 2))
    assert "in the batch of step 2" in bug.value.__notes__


@pytest.mark.parametrize("budget", [120, 3000])
def test_each_epoch_is_planned_once_though_several_threads_read_ahead_over_tiny_epochs(monkeypatch, budget):
    planned, plan = [], Batches._plan

    def plan_slowly(batches, epoch):
        planned.append(epoch)
        time.sleep(0.05)
        return plan(batches, epoch)

    monkeypatch.setattr(Batches, "_plan", plan_slowly)
    batches = batches_of([(5, 5)] * 100, budget, 1, 0)
    steps = 12 * batches.per_epoch
    for step, _ in enumerate(batches.iterate(0, steps)):
        batches.pairs(step)  # as the loop asks for them
    assert sorted(planned) == list(range(12)), f"{batches.per_epoch} batches an epoch"
