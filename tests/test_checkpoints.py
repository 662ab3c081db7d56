import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2t_jax.checkpoints import Checkpoints, average, average_run
from t2t_jax.errors import DamagedError, InputError


def tree(value):
    return {"layer": {"kernel": jnp.full((3, 4), value), "bias": jnp.arange(4.0) * value}}


def shapes(value=0.0):
    return jax.eval_shape(lambda: tree(value))


@pytest.fixture
def checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    for step in (10, 20, 30, 40):
        checkpoints.save(step, tree(float(step)), {"mu": tree(step / 2), "count": jnp.array(step)}, {"seed": step})
    return checkpoints


def optimizer_shapes():
    return {"mu": shapes(), "count": jax.ShapeDtypeStruct((), jnp.int32)}


def flip_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def files(checkpoints, step):
    return [p for p in (checkpoints.directory / str(step)).rglob("*") if p.is_file() and p.name != "manifest.json"]


def test_what_is_saved_comes_back_and_only_the_newest_are_kept(checkpoints):
    assert checkpoints.steps() == [20, 30, 40]
    found = checkpoints.restore_latest(shapes(), optimizer_shapes())
    assert found.step == 40 and found.metadata == {"seed": 40} and found.optimizer["count"] == 40
    jax.tree.map(np.testing.assert_array_equal, found.params, tree(40.0))
    jax.tree.map(np.testing.assert_array_equal, found.optimizer["mu"], tree(20.0))
    assert checkpoints.restore(20, shapes()).optimizer is None


def test_nothing_saved_is_none(tmp_path):
    assert Checkpoints(tmp_path / "none").restore_latest(shapes(), optimizer_shapes()) is None


def test_a_flipped_bit_in_any_file_falls_back_to_the_step_before_loudly(checkpoints, caplog):
    """Orbax alone would load wrong numbers: its large arrays carry no checksum."""
    damaged = files(checkpoints, 40)
    assert len(damaged) > 5
    for path in damaged:
        kept = path.read_bytes()
        flip_bit(path) if kept else path.write_bytes(b"x")
        caplog.clear()
        assert checkpoints.restore_latest(shapes(), optimizer_shapes()).step == 30
        assert "checkpoint 40 is damaged" in caplog.text and path.name in caplog.text
        path.write_bytes(kept)
    assert checkpoints.restore_latest(shapes(), optimizer_shapes()).step == 40


def test_missing_files_and_manifests_fall_back_too(checkpoints):
    files(checkpoints, 40)[0].unlink()
    assert checkpoints.restore_latest(shapes(), optimizer_shapes()).step == 30
    (checkpoints.directory / "30" / "manifest.json").unlink()
    assert checkpoints.steps() == [20, 40]
    assert checkpoints.restore_latest(shapes(), optimizer_shapes()).step == 20


def test_all_damaged_is_an_error_never_a_silent_new_start(checkpoints):
    for step in checkpoints.steps():
        flip_bit(max(files(checkpoints, step), key=lambda p: p.stat().st_size))
    with pytest.raises(DamagedError, match="every checkpoint is damaged"):
        checkpoints.restore_latest(shapes(), optimizer_shapes())


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"kernel": jnp.zeros((3, 5)), "bias": jnp.zeros(4)}, r"layer/kernel is float32\[3, 4\] there, float32"),
        ({"kernel": jnp.zeros((3, 4), jnp.bfloat16), "bias": jnp.zeros(4)}, r"layer/kernel is .* there, bfloat16"),
        ({"kernel": jnp.zeros((3, 4))}, r"layer/bias is float32\[4\] there, None here"),
    ],
)  # fmt: skip
def test_other_shapes_dtypes_or_parameters_are_refused_by_name(checkpoints, other, said):
    with pytest.raises(InputError, match=said):
        checkpoints.restore(40, jax.eval_shape(lambda: {"layer": other}))


def test_the_average_is_the_mean_in_float64(checkpoints, tmp_path):
    averaged = average(checkpoints, [20, 30, 40], Checkpoints(tmp_path / "averaged", keep=1))
    jax.tree.map(np.testing.assert_array_equal, averaged.params, tree(30.0))
    again = Checkpoints(tmp_path / "averaged").restore(40, shapes())
    jax.tree.map(np.testing.assert_array_equal, again.params, tree(30.0))
    assert again.metadata == {"seed": 40, "averaged_steps": [20, 30, 40]}


def test_the_average_of_equal_checkpoints_is_that_checkpoint(tmp_path):
    source = Checkpoints(tmp_path / "source")
    odd = {"x": jax.random.normal(jax.random.key(0), (50,))}
    for step in (1, 2, 3):
        source.save(step, odd, None, {})
    averaged = average(source, [1, 2, 3], Checkpoints(tmp_path / "averaged"))
    np.testing.assert_array_equal(averaged.params["x"], odd["x"])


def test_averages_are_chosen_by_count_or_by_step_and_replaced(checkpoints, tmp_path):
    averaged = tmp_path / "averaged"
    assert average_run(checkpoints.directory, averaged, last=2, steps=None).metadata["averaged_steps"] == [30, 40]
    done = average_run(checkpoints.directory, averaged, last=None, steps=[20, 40])
    jax.tree.map(np.testing.assert_array_equal, done.params, tree(30.0))
    assert Checkpoints(averaged).steps() == [40]
    for arguments, said in [
        ({"last": 4, "steps": None}, "last must be between 1 and the 3 checkpoints"),
        ({"last": None, "steps": None}, "give either"),
        ({"last": None, "steps": [20, 25]}, "has no checkpoint 25; it has 20, 30, 40"),
    ]:
        with pytest.raises(InputError, match=said):
            average_run(checkpoints.directory, averaged, **arguments)


def test_manifests_name_every_file(checkpoints):
    folder = checkpoints.directory / "40"
    named = json.loads((folder / "manifest.json").read_text())
    assert sorted(named) == sorted(str(p.relative_to(folder)) for p in files(checkpoints, 40))
