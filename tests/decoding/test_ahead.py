"""Programs that are compiled at the same time, ahead of what runs them."""

import collections
import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from t2t_jax import sharding
from t2t_jax.decoding import batch_shapes, continuous_batching
from t2t_jax.decoding import translator as translator_module
from t2t_jax.decoding.ensemble import Ensemble
from t2t_jax.decoding.translator import Translator
from tests.decoding.compiled import programs_compiled

BUCKETS = ["one", " ".join(["one"] * 20)]  # of up to 16 subwords, and of up to 32


@pytest.fixture(params=[1, 8], ids=lambda count: f"{count}-devices")
def on_devices(request, translator):
    (module,), params = translator.ensemble
    config = dataclasses.replace(module.config, layer_norm_epsilon=1e-5)  # for which no other test compiles anything
    ensemble = Ensemble((dataclasses.replace(module, config=config),), params)
    mesh = sharding.make_mesh(jax.devices()[: request.param])
    return Translator(ensemble, translator.vocabularies, max_length=256, mesh=mesh)


@pytest.fixture
def ahead(monkeypatch):
    """What has been compiled when `all_at_once` has returned; it is compiled as ahead of a GPU."""
    counts = []
    with programs_compiled() as names:
        for module in (continuous_batching, translator_module):

            def all_at_once(functions, called=module.all_at_once):
                called(functions)
                counts.append(collections.Counter(names))
                names.clear()

            monkeypatch.setattr(module, "all_at_once", all_at_once)
        monkeypatch.setattr(batch_shapes, "capacities_ahead", lambda mesh: 2)
        yield SimpleNamespace(counts=counts, then=names)


@pytest.mark.slow
def test_a_search_compiles_none_of_the_programs_that_were_compiled_ahead(on_devices, ahead):
    lengths = map(len, on_devices.vocabularies.source.encode_many(BUCKETS))
    assert [batch_shapes.bucket_length(length) for length in lengths] == [16, 32]
    # Beyond the first capacity of the shorter bucket.
    options = {"beam_size": 3, "min_length": 20, "max_extra_length": 12}
    found = on_devices.translate(BUCKETS, **options)
    assert ahead.counts == [{"_source": 2, "_decode": 4}]
    assert "_resize" in ahead.then
    assert not {"_source", "_decode"} & set(ahead.then)
    ahead.then.clear()
    assert on_devices.translate(BUCKETS, **options) == found
    assert ahead.counts[1:] == [{}]
    assert not ahead.then


def test_scoring_compiles_all_its_shapes_ahead_and_none_afterwards(on_devices, ahead):
    pairs = [(text, text) for text in BUCKETS]
    found = on_devices.score(pairs)
    assert ahead.counts == [{"_token_log_probs": 2}]
    assert "_token_log_probs" not in ahead.then
    for score, pair in zip(found, pairs, strict=True):
        (alone,) = on_devices.score([pair])
        np.testing.assert_allclose(score.token_log_probs, alone.token_log_probs, atol=1e-4)
    assert len(ahead.counts) == 1, "a single shape is compiled by its call"


def test_only_beside_a_gpu_or_a_tpu_are_searches_compiled_ahead():
    mesh = lambda platform: SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
    assert [batch_shapes.capacities_ahead(mesh(platform)) for platform in ("cpu", "gpu", "tpu")] == [0, 2, 2]


def test_searches_that_start_together_compile_different_programs(translator, monkeypatch):
    started, run = [], continuous_batching._ContinuousBatch.run

    def recorded(self):
        started.append(self._shapes.source_length)
        return run(self)

    monkeypatch.setattr(continuous_batching._ContinuousBatch, "run", recorded)
    monkeypatch.setattr(batch_shapes, "available_cores", lambda: 2)
    assert len(translator.translate(BUCKETS * 5, max_extra_length=2)) == 10
    assert started == [32, 16, 32, 16]
