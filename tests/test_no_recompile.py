"""One trace for each batch shape, all before step 1."""

import pytest

from t2t_jax.training import loop, setup
from tests.runs import tiny_config

pytestmark = pytest.mark.slow


def test_train_step_is_traced_once_for_each_bucket(tmp_path, monkeypatch):
    traced = []
    original = setup.train_step

    def counting(*arguments, **options):
        traced.append(arguments[-1]["inputs"].shape + arguments[-1]["targets"].shape)
        return original(*arguments, **options)

    def compile_step(*arguments):
        step = original_compile(*arguments)
        assert len(traced) == 3, "a shape was left to be compiled during training"
        return step

    original_compile = loop.compile_step
    monkeypatch.setattr(setup, "train_step", counting)
    monkeypatch.setattr(loop, "compile_step", compile_step)
    config = tiny_config(tmp_path, data__num_buckets=3, train__train_steps=30, checkpoint__interval_steps=30)
    loop.train(config, str(tmp_path / "run"))
    assert len(traced) == len(set(traced)) == 3
