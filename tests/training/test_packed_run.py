"""Training with sequence packing, through the real loop."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from t2t_jax import sharding
from t2t_jax.checkpoints import Checkpoints
from t2t_jax.training import loop, setup
from t2t_jax.training.train_step import train_step
from tests import tiny
from tests.model.test_packing import ROWS, apart, together
from tests.runs import tiny_config
from tests.training.test_train_step import SGD, start, step_of

pytestmark = pytest.mark.slow


def updated(batch, accumulate=1):
    """Parameters after one step of SGD, and its metrics."""
    model = tiny.model(num_layers=1, dropout=0.0)
    state, metrics = step_of(model, SGD, accumulate)(start(model, SGD), batch)
    return state.params, metrics


def test_an_update_from_packed_rows_is_that_of_their_pairs_with_microbatches_and_on_two_devices_too():
    expected, expected_metrics = updated(apart())
    packed = together(apart(), ROWS)
    mesh = sharding.make_mesh(jax.devices()[:2])
    for batch, accumulate in ((packed, 1), (packed, 2), (sharding.put_rows(packed, mesh), 1)):
        params, metrics = updated(batch, accumulate)
        for name in metrics:
            np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-5)
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6)


def packed_config(directory, train_steps):
    return tiny_config(directory, data__packing=True, train__train_steps=train_steps, checkpoint__interval_steps=4)


def records(run):
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in found if "loss" in record]


def weights(run, step):
    checkpoints = Checkpoints(Path(run) / "checkpoints")
    return checkpoints.restore(step).params


def test_a_packed_run_has_one_shape_and_resumes_to_the_last_bit(tmp_path, monkeypatch):
    traced = []

    def counting(*arguments, **options):
        traced.append({name: x.shape for name, x in arguments[-1].items()})
        return train_step(*arguments, **options)

    monkeypatch.setattr(setup, "train_step", counting)
    loop.train(packed_config(tmp_path, 12), str(tmp_path / "whole"))
    assert len(traced) == 1 and set(traced[0]) == {"inputs", "targets", "input_segments", "target_segments"}
    for steps in (4, 12):
        loop.train(packed_config(tmp_path, steps), str(tmp_path / "parts"))
    jax.tree.map(np.testing.assert_array_equal, *(weights(tmp_path / name, 12) for name in ("whole", "parts")))
    losses = [[record["loss"] for record in records(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert losses[0][-1] < losses[0][0]
