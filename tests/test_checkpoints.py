import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath

from t2t_jax import sharding
from t2t_jax.checkpoints import Checkpoints, CheckpointWriter, average, average_last, average_run
from t2t_jax.errors import DamagedError, InputError, exit_code_of


def tree(value):
    return {"layer": {"kernel": jnp.full((3, 4), value), "bias": jnp.arange(4.0) * value}}


def shapes(value=0.0):
    return jax.eval_shape(lambda: tree(value))


@pytest.fixture
def checkpoints(tmp_path):
    checkpoints = CheckpointWriter(tmp_path / "checkpoints", keep=3)
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
    return [p for p in (checkpoints.directory / str(step)).rglob("*") if p.is_file()]


def everything(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_restore_returns_what_was_saved_and_only_the_newest_steps_are_kept(checkpoints):
    assert checkpoints.steps() == [20, 30, 40]
    found = checkpoints.restore_latest(shapes(), optimizer_shapes())
    assert found.step == 40 and found.metadata == {"seed": 40} and found.optimizer["count"] == 40
    jax.tree.map(np.testing.assert_array_equal, found.params, tree(40.0))
    jax.tree.map(np.testing.assert_array_equal, found.optimizer["mu"], tree(20.0))
    assert checkpoints.restore(20, shapes()).optimizer is None


def test_what_all_devices_hold_is_saved_whole_unless_it_is_large_and_restored_on_all_of_them(tmp_path):
    """A large array in slices of 1 MiB, one from each of eight devices."""
    everywhere = sharding.replicated(sharding.make_mesh(jax.devices()))
    params = {"small": jnp.arange(128.0).reshape(16, 8), "large": jnp.arange(2.0**21).reshape(-1, 512)}
    checkpoints = CheckpointWriter(tmp_path)
    checkpoints.save(1, jax.device_put(params, everywhere), None, {})
    saved = checkpoints._arrays["params"].metadata(epath.Path(tmp_path / "1/params")).tree
    assert {name: x.storage.chunk_shape for name, x in saved.items()} == {"small": (16, 8), "large": (512, 512)}
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), params)
    found = checkpoints.restore(1, wanted).params
    for name, x in params.items():
        assert found[name].sharding == everywhere and len(found[name].addressable_shards) == 8
        for shard in found[name].addressable_shards:
            np.testing.assert_array_equal(shard.data, x)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_of_an_optimiser_are_restored_as_keys(tmp_path, impl):
    """As in optax.add_noise; one on each device, and all of them on all."""
    mesh, checkpoints = sharding.make_mesh(jax.devices()), CheckpointWriter(tmp_path)
    keys = jax.random.split(jax.random.key(3, impl=impl), len(jax.devices()))
    for step, layout in enumerate((sharding.replicated(mesh), sharding.by_rows(mesh))):
        state = {"key": jax.device_put(keys, layout)}
        checkpoints.save(step, tree(1.0), state, {})
        key = checkpoints.restore_latest(shapes(), sharding.shapes_of(state, layout)).optimizer["key"]
        assert key.dtype == keys.dtype and key.sharding.is_equivalent_to(layout, key.ndim)
        assert jnp.all(key == keys)


def test_an_optimiser_without_state_is_restored(tmp_path):
    """Such as that of optax.scale."""
    checkpoints, state = CheckpointWriter(tmp_path), optax.EmptyState()
    checkpoints.save(1, tree(1.0), state, {})
    found = checkpoints.restore_latest(shapes(), state)
    assert found.optimizer == state
    jax.tree.map(np.testing.assert_array_equal, found.params, tree(1.0))
    with pytest.raises(InputError, match="another optimiser: count is None there, int32"):
        checkpoints.restore_latest(shapes(), optimizer_shapes())


def test_an_empty_folder_restores_none(tmp_path):
    assert Checkpoints(tmp_path / "none").restore_latest(shapes(), optimizer_shapes()) is None


def test_a_path_that_is_not_utf8_is_refused_before_any_training(tmp_path):
    """The libraries below Orbax refuse it when the first step is saved, perhaps hours later."""
    folder = Path(os.fsdecode(b"%s/caf\xe9" % os.fsencode(tmp_path)))
    with pytest.raises(InputError, match=r"^workdir: .*caf\udce9: is not UTF-8; rename the folder, or choose another"):
        CheckpointWriter(folder)


def test_a_flipped_bit_in_any_file_is_logged_and_the_step_before_is_restored(checkpoints, caplog):
    """Orbax alone would load wrong numbers: its large arrays have no checksum."""
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


def test_missing_files_and_manifests_restore_the_step_before(checkpoints):
    files(checkpoints, 40)[0].unlink()
    assert checkpoints.restore_latest(shapes(), optimizer_shapes()).step == 30
    (checkpoints.directory / "30" / "manifest.json").unlink()
    assert checkpoints.restore_latest(shapes(), optimizer_shapes()).step == 20
    (checkpoints.directory / "20" / "planted").write_text("not in the manifest")
    with pytest.raises(DamagedError, match="every checkpoint is damaged"):
        checkpoints.restore_latest(shapes(), optimizer_shapes())


def test_every_bit_of_a_manifest_is_checked(checkpoints):
    path = checkpoints.directory / "40" / "manifest.json"
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 7):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            checkpoints.verify(40)
        except DamagedError as error:
            assert "checkpoint 40 is damaged" in str(error)
        else:
            assert json.loads(data) == json.loads(whole), f"bit {bit} was not noticed"
    path.write_bytes(b"{}")
    with pytest.raises(DamagedError, match="does not match its checksum"):
        checkpoints.verify(40)


def test_reading_changes_nothing(checkpoints, tmp_path):
    """Orbax's CheckpointManager, even if opened to read, deletes what another process is writing."""
    for name in ("50.orbax-checkpoint-tmp", "50.unfinished.orbax-checkpoint-tmp", "50.unfinished", "10.removed"):
        (checkpoints.directory / name / "params").mkdir(parents=True)
    before = everything(checkpoints.directory)
    reader = Checkpoints(checkpoints.directory)
    assert reader.steps() == [20, 30, 40]
    reader.restore_latest(shapes(), optimizer_shapes())
    average(reader, [20, 30], CheckpointWriter(tmp_path / "averaged"))
    assert Checkpoints(tmp_path / "none").steps() == []
    assert everything(checkpoints.directory) == before and not (tmp_path / "none").exists()
    checkpoints.save(50, tree(50.0), {"mu": tree(1.0), "count": jnp.array(1)}, {})
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["30", "40", "50"]


SAVE = """
import os, sys
import jax.numpy as jnp
from t2t_jax import checkpoints
from tests.test_checkpoints import tree

name, count = sys.argv[2], 0

def die(event, arguments):  # at the n-th rename, or before anything is deleted
    global count
    if event == name and "checkpoints" in str(arguments[0]):
        count += 1
        if count == int(sys.argv[3]):
            os.kill(os.getpid(), 9)

writer = checkpoints.CheckpointWriter(checkpoints.Path(sys.argv[1]), keep=1)
sys.addaudithook(die)
writer.save(int(sys.argv[4]), tree(7.0), None, {})
print("saved", count)
"""


def test_no_listing_is_empty_while_a_trainer_replaces_the_only_step(tmp_path):
    (tmp_path / "0").mkdir()

    def train():
        for step in range(1, 2000):
            (tmp_path / str(step)).mkdir()
            (tmp_path / str(step - 1)).rmdir()

    trainer = threading.Thread(target=train)
    trainer.start()
    reader, listings = Checkpoints(tmp_path), []
    while trainer.is_alive():
        listings.append(reader.steps())
    assert all(listings) and len(listings) > 10


@pytest.mark.slow
@pytest.mark.parametrize("event", ["os.rename", "os.rmdir"])
def test_a_kill_at_any_point_of_a_save_leaves_a_complete_step(tmp_path, event):
    """With keep=1, and with a step that is saved again: there is always one whole step."""
    CheckpointWriter(tmp_path / "checkpoints", keep=1).save(1, tree(1.0), None, {})
    reached = 0
    for step in (1, 2):
        for count in range(1, 20):
            command = [sys.executable, "-c", SAVE, str(tmp_path / "checkpoints"), event, str(count), str(step)]
            root = Path(__file__).parents[1]
            done = subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True)
            good = Checkpoints(tmp_path / "checkpoints").newest_good(1)
            assert good in ([1], [step]), (count, done.stderr)
            if done.returncode == 0:
                break
            reached += 1
        assert done.returncode == 0 and good == [step], done.stderr
    assert reached >= 2


def test_a_full_disk_is_one_line_and_the_steps_before_are_intact(checkpoints):
    """Stands in for a full disk: a limit of 10,000 bytes a file."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, usual[1]))
    try:
        large = {"x": jnp.zeros(10_000) + jnp.arange(10_000)}
        with pytest.raises(
            InputError, match=r"checkpoint 50 could not be saved; .* intact.*File too large, on the disk"
        ):
            checkpoints.save(50, large, {"m": jnp.zeros(3)}, {})
        with pytest.raises(InputError, match=r"checkpoint 0 could not be saved \(File too large, on the disk of /"):
            checkpoints.save(0, large, None, {})  # of no run in training: an import, an average
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert checkpoints.newest_good(5) == [20, 30, 40]


FULL = """
import resource, sys
from pathlib import Path
import jax.numpy as jnp
from absl import logging
from t2t_jax.checkpoints import CheckpointWriter

writer = CheckpointWriter(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
try:
    writer.save(1, {f"x{n}": jnp.arange(20_000.0) * n for n in range(30)}, None, {})
except ValueError as error:
    print(error)
late = "from absl import logging; logging.error('of a thread that ended after the save')"
exec(compile(late, "site-packages/orbax/checkpoint/_src/futures/future.py", "exec"))
logging.error("ours")
"""


def test_an_error_in_a_save_is_raised_and_not_also_printed(tmp_path):
    """Orbax writes in many threads, each of which would print it."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], cwd=Path(__file__).parents[1], capture_output=True, text=True
    )
    assert done.stdout.startswith("workdir: checkpoint 1 could not be saved")
    assert done.stderr == "ERROR:absl:ours\n"


def test_a_step_becomes_the_newest_even_where_later_ones_were_damaged(checkpoints):
    """After a fallback to step 20, saving 25 deletes the damaged 30 and 40, not 25."""
    checkpoints.save(25, tree(25.0), None, {})
    assert checkpoints.steps() == [20, 25]


def test_a_provisional_step_is_kept_beside_the_others_until_the_next_save(checkpoints):
    checkpoints.save(42, tree(42.0), None, {}, provisional=True)
    assert checkpoints.steps() == [20, 30, 40, 42] == checkpoints.newest_good(9)
    checkpoints.save(44, tree(44.0), None, {}, provisional=True)
    assert checkpoints.steps() == [20, 30, 40, 44]
    checkpoints.save(50, tree(50.0), None, {})
    assert checkpoints.steps() == [30, 40, 50]


def test_a_provisional_step_is_averaged_only_by_name_or_alone_or_at_the_end_of_the_run(checkpoints, tmp_path):
    """So that a run that was stopped has the average of one that was not."""
    checkpoints.save(42, tree(42.0), None, {}, provisional=True)

    def averaged(last=None, steps=None, final=60):
        found = average_run(checkpoints.directory, tmp_path / "averaged", last=last, steps=steps, final=final)
        return found.metadata["averaged_steps"]

    assert averaged(last=2) == [30, 40] and averaged(steps=[40, 42]) == [40, 42]
    assert averaged(last=2, final=42) == [40, 42]
    with pytest.raises(InputError, match="last must be between 1 and the 3 checkpoints"):
        averaged(last=4)
    for step in (20, 30, 40):
        shutil.rmtree(checkpoints.directory / str(step))
    assert averaged(last=1) == [42]


def test_an_average_of_fewer_checkpoints_than_the_config_says_is_logged(checkpoints, tmp_path, caplog):
    averaged = average_last(checkpoints, 3, CheckpointWriter(tmp_path / "averaged"))
    assert averaged.metadata["averaged_steps"] == [20, 30, 40] and not caplog.records
    average_last(checkpoints, 5, CheckpointWriter(tmp_path / "averaged"))
    assert "has 3 checkpoints to average, not 5 as checkpoint.average_last says; with shorter intervals" in caplog.text


def test_averages_skip_damaged_steps_and_log_them(checkpoints, tmp_path, caplog):
    flip_bit(files(checkpoints, 30)[0])
    averaged = average_last(checkpoints, 2, CheckpointWriter(tmp_path / "averaged"))
    assert averaged.metadata["averaged_steps"] == [20, 40] and "checkpoint 30 is damaged" in caplog.text
    averaged = average_last(checkpoints, 3, CheckpointWriter(tmp_path / "averaged"))
    assert averaged.metadata["averaged_steps"] == [20, 40] and "2 undamaged checkpoints, not 3" in caplog.text
    with pytest.raises(DamagedError, match="checkpoint 30 is damaged"):
        average_run(checkpoints.directory, tmp_path / "averaged", last=None, steps=[30, 40])


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES])
def test_what_cannot_be_read_now_is_not_taken_for_damaged(checkpoints, monkeypatch, capsys, number):
    """Else training would resume from an older step, and its next save would delete the newer one."""

    def failing(path):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("t2t_jax.checkpoints.sha256", failing)
    assert exit_code_of(lambda: checkpoints.newest_good(1) and None) == 2
    assert os.strerror(number) in (line := capsys.readouterr().err) and len(line.splitlines()) == 1
    monkeypatch.undo()
    assert checkpoints.newest_good(1) == [40]


def restoring_raises(checkpoints, monkeypatch, error):
    def failing(*_, **__):
        raise error

    monkeypatch.setattr(checkpoints._orbax, "restore", failing)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 9 GiB"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Unable to allocate 9 GiB\non device 0"),
    ],
)
def test_a_checkpoint_larger_than_the_free_memory_is_not_called_damaged(checkpoints, monkeypatch, error):
    restoring_raises(checkpoints, monkeypatch, error)
    with pytest.raises(InputError, match="checkpoint 40 .* needs more memory than is free: Unable to allocate 9 GiB$"):
        checkpoints.restore(40, shapes())


def test_an_unknown_error_of_restoring_is_a_bug_and_not_damage(checkpoints, monkeypatch):
    """The checksums have shown that the bytes are those that were written."""
    restoring_raises(checkpoints, monkeypatch, TypeError("a bug"))
    with pytest.raises(TypeError, match="a bug"):
        checkpoints.restore_latest(shapes(), optimizer_shapes())


def test_a_step_that_is_deleted_while_it_is_read_is_absent_and_not_of_another_model(checkpoints, monkeypatch):
    metadata = checkpoints._arrays["params"].metadata

    def deleted_meanwhile(folder):
        shutil.rmtree(folder.parent)
        return metadata(folder)

    monkeypatch.setattr(checkpoints._arrays["params"], "metadata", deleted_meanwhile)
    with pytest.raises(InputError, match="has no checkpoint 40; it has 20, 30"):
        checkpoints.restore(40, shapes())


def test_a_step_that_is_deleted_just_after_it_was_found_is_absent(checkpoints, monkeypatch):
    stat = Path.stat

    def deleted_after(self, **options):
        found = stat(self, **options)
        if self == checkpoints.directory / "40":
            shutil.rmtree(self)
        return found

    def check_shapes(*_):
        monkeypatch.setattr(Path, "stat", deleted_after)

    monkeypatch.setattr(checkpoints, "_check_shapes", check_shapes)
    with pytest.raises(InputError, match="has no checkpoint 40; it has 20, 30"):
        checkpoints.restore(40, shapes())


def test_a_step_that_is_replaced_while_it_is_read_is_read_again(checkpoints, monkeypatch):
    """As an averaged checkpoint is, when it is averaged again."""
    restore = checkpoints._orbax.restore

    def replaced_meanwhile(folder, **options):
        monkeypatch.undo()
        shutil.copytree(folder, folder.with_name("new"))
        shutil.rmtree(folder)
        folder.with_name("new").rename(folder)
        raise ValueError("a file is not there")

    monkeypatch.setattr(checkpoints._orbax, "restore", replaced_meanwhile)
    assert checkpoints.read_newest(lambda: checkpoints.restore(40, shapes())).step == 40
    assert checkpoints._orbax.restore == restore


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"nu": shapes()}, r"nu/layer/bias is None there, float32\[4\] here"),
        (
            {"mu": jax.eval_shape(lambda: jax.tree.map(jnp.bfloat16, tree(1.0)))},
            r"mu/layer/bias is float32\[4\] there, bfloat16\[4\] here",
        ),
    ],
)
def test_the_state_of_another_optimiser_is_refused_by_name(checkpoints, other, message):
    """Orbax would cast the moments, and raise an error of its own for a missing one."""
    with pytest.raises(InputError, match=f"optimizer.name: checkpoint 40 is of another optimiser: {message}"):
        checkpoints.restore_latest(shapes(), optimizer_shapes() | other)


def test_a_checkpoint_without_optimiser_state_is_refused_where_that_is_wanted(checkpoints):
    checkpoints.save(50, tree(50.0), None, {})
    with pytest.raises(InputError, match="optimizer.name: checkpoint 50 .*: count is None there"):
        checkpoints.restore_latest(shapes(), optimizer_shapes())


def test_all_damaged_checkpoints_are_an_error_and_never_a_silent_restart(checkpoints):
    for step in checkpoints.steps():
        flip_bit(max(files(checkpoints, step), key=lambda p: p.stat().st_size))
    with pytest.raises(DamagedError, match="every checkpoint is damaged"):
        checkpoints.restore_latest(shapes(), optimizer_shapes())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"kernel": jnp.zeros((3, 5)), "bias": jnp.zeros(4)}, r"layer/kernel is float32\[3, 4\] there, float32"),
        ({"kernel": jnp.zeros((3, 4), jnp.bfloat16), "bias": jnp.zeros(4)}, r"layer/kernel is .* there, bfloat16"),
        ({"kernel": jnp.zeros((3, 4))}, r"layer/bias is float32\[4\] there, None here"),
    ],
)  # fmt: skip
def test_other_shapes_dtypes_or_parameters_are_refused_by_name(checkpoints, other, message):
    with pytest.raises(InputError, match=message):
        checkpoints.restore(40, jax.eval_shape(lambda: {"layer": other}))


def test_the_average_is_the_mean_in_float64(checkpoints, tmp_path):
    averaged = average(checkpoints, [20, 30, 40], CheckpointWriter(tmp_path / "averaged", keep=1))
    jax.tree.map(np.testing.assert_array_equal, averaged.params, tree(30.0))
    again = Checkpoints(tmp_path / "averaged").restore(40, shapes())
    jax.tree.map(np.testing.assert_array_equal, again.params, tree(30.0))
    assert again.metadata == {"seed": 40, "averaged_steps": [20, 30, 40]}


def test_the_average_of_equal_checkpoints_is_that_checkpoint(tmp_path):
    source = CheckpointWriter(tmp_path / "source")
    odd = {"x": jax.random.normal(jax.random.key(0), (50,))}
    for step in (1, 2, 3):
        source.save(step, odd, None, {})
    averaged = average(source, [1, 2, 3], CheckpointWriter(tmp_path / "averaged"))
    np.testing.assert_array_equal(averaged.params["x"], odd["x"])


def test_averages_are_chosen_by_count_or_by_step_and_replaced(checkpoints, tmp_path):
    averaged = tmp_path / "averaged"
    assert average_run(checkpoints.directory, averaged, last=2, steps=None).metadata["averaged_steps"] == [30, 40]
    done = average_run(checkpoints.directory, averaged, last=None, steps=[20, 40])
    jax.tree.map(np.testing.assert_array_equal, done.params, tree(30.0))
    assert Checkpoints(averaged).steps() == [40]
    for arguments, message in [
        ({"last": 4, "steps": None}, "last must be between 1 and the 3 checkpoints"),
        ({"last": None, "steps": None}, "give either"),
        ({"last": None, "steps": [20, 25]}, "has no checkpoint 25; it has 20, 30, 40"),
    ]:
        with pytest.raises(InputError, match=message):
            average_run(checkpoints.directory, averaged, **arguments)


def test_manifests_name_every_file(checkpoints):
    folder = checkpoints.directory / "40"
    named = json.loads((folder / "manifest.json").read_text())
    del named["checksum"]
    assert sorted([*named, "manifest.json"]) == sorted(str(p.relative_to(folder)) for p in files(checkpoints, 40))
