"""Sampling weights of training texts: what each epoch holds, through preparation and batches."""

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2t_jax.data import corpora
from t2t_jax.data.batching import Batches
from t2t_jax.data.mixture import Mixture
from t2t_jax.data.preparation import open_store
from t2t_jax.data.token_store import Sentences
from t2t_jax.errors import InputError
from t2t_jax.training.loop import train
from t2t_jax.training.setup import make_batches
from tests.data import toy_corpus
from tests.runs import tiny_config

WEIGHTS = st.sampled_from([0.1, 0.25, 0.5, 1.0, 1.1, 1.5, 2.0, 3.75])


@given(st.lists(st.tuples(st.integers(1, 40), WEIGHTS), min_size=1, max_size=4), st.integers(1, 5), st.data())
def test_a_pair_occurs_as_often_as_its_weight_says(texts, num_groups, data):
    """Of each text and group, on average and never one pair off; pairs of one text and group differ by at most one."""
    sizes, weights = zip(*texts, strict=True)
    groups = np.array(data.draw(st.lists(st.integers(0, num_groups - 1), min_size=sum(sizes), max_size=sum(sizes))))
    mixture = Mixture(sizes, weights, seed=3)
    expected = mixture.group(groups, num_groups)
    most, total = mixture.occurrences(sum(sizes)), collections.Counter()
    for epoch in range(5):
        slots = mixture.epoch(epoch)
        np.testing.assert_array_equal(mixture.epoch(epoch), slots)
        pairs, empty = slots[slots < sum(sizes)], slots[slots >= sum(sizes)] - sum(sizes)
        of_slots = np.concatenate([groups[pairs], empty])
        np.testing.assert_array_equal(np.bincount(of_slots, minlength=num_groups), expected)
        assert (np.bincount(pairs, minlength=sum(sizes)) <= most).all()
        total.update(pairs.tolist())
    end = 0
    for size, weight in texts:
        end += size
        for group in range(num_groups):
            members = [pair for pair in range(end - size, end) if groups[pair] == group]
            counts = [total[pair] for pair in members]
            if members:
                assert max(counts) - min(counts) <= 1
                assert abs(sum(counts) - 5 * weight * len(members)) < 1


def mixed(directory, weights, **changes):
    """The config of a tiny experiment with two training texts of 300 and 40 pairs."""
    config = tiny_config(directory, **changes)
    more = toy_corpus.write(directory / "more", toy_corpus.pairs(40, 7))
    config.data.train = f"{config.data.train}{weights[0]},{more}{weights[1]}"
    return config


def epoch_pairs(config, epoch):
    """How often each pair of the store occurs in an epoch of batches."""
    store = open_store(config.data)
    batches = make_batches(config, store)
    steps = range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch)
    found = np.concatenate([batches.pairs(step)[0] for step in steps])
    return np.bincount(found, minlength=len(store.source)), batches.per_epoch


def test_batches_hold_the_mixture(tmp_path):
    counts, per_epoch = epoch_pairs(mixed(tmp_path, ("", ":3")), 0)
    assert (counts[:300] == 1).all() and (counts[300:] == 3).all()

    config = mixed(tmp_path, (":0.5", ":1"))
    counts, per_epoch = epoch_pairs(config, 0)
    assert 148 <= counts[:300].sum() <= 152 and (counts[300:] == 1).all()
    again, same = epoch_pairs(config, 1)
    assert same == per_epoch and ((counts + again)[:300] == 1).mean() > 0.97 and (counts != again).any()
    plain, _ = epoch_pairs(mixed(tmp_path, (":1", ":1.0")), 0)
    assert (plain == 1).all()


def test_weights_belong_to_the_identity_of_the_data_but_not_to_the_store(tmp_path):
    stores = [open_store(mixed(tmp_path, weights).data) for weights in (("", ""), (":1", ":1"), (":1", ":0.5"))]
    assert len({store.directory for store in stores}) == 1
    assert stores[0].fingerprint == stores[1].fingerprint != stores[2].fingerprint
    assert "300 of" in stores[2].describe() and "40 of" in stores[2].describe()
    assert "more, weight 0.5" in stores[2].describe()


@pytest.mark.slow
def test_a_run_with_weights_resumes_with_the_same_weights_only(tmp_path):
    whole = train(mixed(tmp_path, (":0.5", ":2"), train__train_steps=12), str(tmp_path / "whole"))
    train(mixed(tmp_path, (":0.5", ":2"), train__train_steps=5), str(tmp_path / "parts"))
    with pytest.raises(InputError, match="data"):
        train(mixed(tmp_path, (":0.5", ":1"), train__train_steps=12), str(tmp_path / "parts"))
    parts = train(mixed(tmp_path, (":0.5", ":2"), train__train_steps=12), str(tmp_path / "parts"))
    assert parts["batches_checksum"] == whole["batches_checksum"] and parts["test"] == whole["test"]


@pytest.mark.parametrize("shapes", [1, 2])
def test_packed_batches_hold_the_mixture(tmp_path, shapes):
    """Half of the pairs of each two lengths; one that is the only one of its lengths comes in every second epoch."""
    packed = {"data__packing": True, "data__packing_shapes": shapes}
    counts, _ = epoch_pairs(mixed(tmp_path, ("", ":2"), **packed), 3)
    assert (counts[:300] == 1).all() and (counts[300:] == 2).all()
    config = mixed(tmp_path, (":0.5", ":1"), **packed)
    epochs = [epoch_pairs(config, epoch) for epoch in range(10)]
    counts, lengths = zip(*epochs, strict=True)
    assert len(set(lengths)) == 1 and all((found[300:] == 1).all() for found in counts)
    total = sum(counts)[:300]
    assert total.min() >= 4 and total.max() <= 6 and 1450 < total.sum() < 1550


def test_a_small_weight_is_kept_with_packing():
    """Of 2,000 pairs of few equal lengths a tenth comes in each epoch, the longest as seldom as the others."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3, 0.5, (2, 4000)).astype(int), 2, 90)
    sides = [Sentences(np.ones(side.sum(), np.uint16), np.cumsum(side)) for side in lengths]
    batches = Batches(
        *sides, tokens_per_batch=2000, num_buckets=4, seed=0, packing=True, mixture=Mixture([2000, 2000], [1, 0.1], 0)
    )
    found = np.concatenate([batches.pairs(step)[0] for step in range(10 * batches.per_epoch)])
    counts = np.bincount(found, minlength=4000)
    assert (counts[:2000] == 10).all() and set(counts[2000:]) <= {0, 1, 2}
    longest = lengths[0, 2000:] > np.quantile(lengths[0], 0.9)
    assert 0.95 < counts[2000:].mean() < 1.05 and 0.9 < counts[2000:][longest].mean() < 1.1


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=60), WEIGHTS)
def test_slots_hold_their_pairs_and_share_lengths_only_with_a_fractional_weight(lengths, weight):
    given = [np.array(side, np.uint16) for side in zip(*lengths, strict=True)]
    slots = Mixture([len(lengths)], [weight], 0).slot_lengths(*given)
    assert all((slot >= length).all() for slot, length in zip(slots, given, strict=True))
    if weight % 1 == 0:
        np.testing.assert_array_equal(slots, given)


@pytest.mark.parametrize("weight", [0.1, 0.3, 0.9, 1.05])
def test_packed_batches_of_a_mixture_have_hardly_any_padding(weight):
    """Though most pairs are the only ones of their two lengths; in batches of one text alone 4 % is padding."""
    rng = np.random.default_rng(0)
    source = rng.lognormal(3, 0.6, 9000)
    sides = [np.clip(x.astype(int), 2, 100) for x in (source, source * rng.lognormal(0, 0.2, 9000))]
    texts = [Sentences(np.ones(side.sum(), np.uint16), np.cumsum(side)) for side in sides]
    mixture = Mixture([3000, 6000], [1, weight], 0)
    batches = Batches(*texts, tokens_per_batch=4000, num_buckets=4, seed=0, packing=True, mixture=mixture)
    steps = range(batches.per_epoch)
    tokens = sum(side[batches.pairs(step)[0]].sum() for step in steps for side in sides)
    buckets = [batches.bucket(step) for step in steps]
    assert tokens > 0.92 * sum(bucket.rows * (bucket.source_length + bucket.target_length) for bucket in buckets)


@pytest.mark.parametrize(
    ("text", "name", "weight"),
    [("at 12:30/news", "at 12:30/news", 1), ("a:b/news:2", "a:b/news", 2), ("12:3:1", "12:3", 1)],
)
def test_a_weight_follows_the_last_colon_of_a_name_so_that_a_path_may_have_others(text, name, weight):
    assert corpora._weighted(f"{text},more") == ([name, "more"], [weight, 1])


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "x", "", "1e3", "0.0", "12345"])
def test_weights_that_are_not_positive_are_refused(tmp_path, weight):
    with pytest.raises(InputError, match=r"data.train=.*after the colon, the weight of .*more must be a positive"):
        open_store(mixed(tmp_path, ("", f":{weight}")).data)
    config = tiny_config(tmp_path)
    config.data.train += ":2"
    with pytest.raises(InputError, match="the weight of a single text changes nothing; leave it out"):
        open_store(config.data)
