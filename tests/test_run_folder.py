import contextlib
import itertools
import json
import os

import pytest

from t2t_jax.errors import DamagedError, InputError
from t2t_jax.files import read_object, write_object
from t2t_jax.run_folder import RunFolder, with_later_fields

CONFIG = {
    "model": {"d_model": 16},
    "data": {"corpus": "files", "max_length": 9, "source_language": "en", "target_language": "de"},
    "train": {"train_steps": 5, "seed": 0},
    "decode": {"beam_size": 4, "alpha": 0.6, "max_extra_length": 4},
}


@pytest.fixture
def begin(tmp_path):
    """Starts a run in tmp_path/run and begins it at a step."""

    def begin(step=0, config=CONFIG, logged_step=0):
        run = RunFolder.start(tmp_path / "run", config)
        run.begin(config, {"vocab.model": b"pieces"}, step, logged_step)
        return run

    return begin


def test_metrics_after_the_resumed_step_are_dropped_and_a_torn_line_with_a_warning(tmp_path, begin, caplog):
    run = begin()
    for step in (1, 2, 3):
        run.log(step, loss=float(step))
    run.close()
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    run = begin(2)
    assert "dropped an unfinished last line of 15 bytes" in caplog.text
    run.log(3, loss=30.0)
    run.close()
    assert [record for _, record in run._read_metrics()] == [
        {"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 30.0}
    ]  # fmt: skip


def test_a_log_that_has_lost_lines_is_reported(tmp_path, begin, caplog):
    run = begin()
    for step in (10, 20, 30):
        run.log(step, loss=1.0)
    run.close()
    begin(35, logged_step=30).close()
    begin(25, logged_step=20).close()
    assert not caplog.messages
    begin(35, logged_step=30).close()
    assert "has lost what was logged after step 20, up to step 30" in caplog.text
    (tmp_path / "run/metrics.jsonl").unlink()
    begin(35, logged_step=30).close()
    assert "has lost what was logged after step 0, up to step 30" in caplog.text


def test_a_flipped_bit_anywhere_in_the_metrics_is_noticed(tmp_path, begin):
    run = begin()
    run.log(1, loss=1.25, nll=0.5)
    run.log(2, loss=1.5, nll=0.25)
    run.close()
    path = tmp_path / "run/metrics.jsonl"
    whole, expected = path.read_bytes(), list(run._read_metrics())
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            found = list(run._read_metrics())
        except DamagedError as error:
            assert f"{path}, line" in str(error)
        else:
            # A torn last line, or the name of the checksum itself.
            assert len(found) == 1 or [record["loss"] for _, record in found] == [1.25, 1.5]
    path.write_bytes(whole)
    assert list(run._read_metrics()) == expected


@pytest.mark.parametrize("line", ["{", "[]", "null", '{"loss": 1}', '{"step": "1"}', "\udc80", "[" * 100_000])
def test_a_damaged_line_of_metrics_is_refused_by_number_and_nothing_is_written(tmp_path, begin, line):
    begin().close()
    (tmp_path / "run/metrics.jsonl").write_bytes(f'{{"step": 1}}\n{line}\n'.encode(errors="surrogateescape"))
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    run = RunFolder.start(tmp_path / "run", CONFIG)
    with pytest.raises(DamagedError, match=r"metrics.jsonl, line 2: not a record"):
        run.begin(CONFIG | {"decode": {}}, {"vocab.model": b"pieces"}, 1)
    run.close()
    assert before == {path: path.read_bytes() for path in before}


def test_a_start_that_is_killed_while_it_writes_loses_no_log_and_no_vocabulary(tmp_path, begin, monkeypatch):
    """The files are replaced whole: whatever has been written before that, the old ones are there."""
    run = begin()
    run.log(1, loss=1.0)
    run.log(2, loss=2.0)
    run.close()
    names = ("config.json", "vocab.model", "metrics.jsonl")
    old, replace = {name: (tmp_path / "run" / name).read_bytes() for name in names}, os.replace
    for killed_at in range(3):
        calls = itertools.count()

        def kill(*arguments, calls=calls, killed_at=killed_at):
            if next(calls) == killed_at:
                raise KeyboardInterrupt
            replace(*arguments)

        monkeypatch.setattr("os.replace", kill)
        with pytest.raises(KeyboardInterrupt):
            RunFolder(tmp_path / "run").begin(CONFIG, {"vocab.model": b"pieces"}, 2)
        assert old == {name: (tmp_path / "run" / name).read_bytes() for name in names}


def test_only_fields_that_do_not_change_the_weights_may_change(tmp_path, begin):
    begin().close()
    longer = CONFIG | {"train": {"train_steps": 9, "seed": 0}, "decode": CONFIG["decode"] | {"alpha": 1.0}}
    run = begin(0, longer)
    assert run.config == with_later_fields(longer)
    run.close()
    with pytest.raises(InputError, match="train.seed is 1, but .* was trained with 0"):
        RunFolder.start(tmp_path / "run", CONFIG | {"train": {"train_steps": 5, "seed": 1}})
    assert run.config == with_later_fields(longer)


@pytest.mark.parametrize(
    ("packing", "field", "values"),
    [(True, "packing_shapes", (1, 2)), (False, "num_buckets", (2, 3)), (False, "bucketing", ("partition", "other"))],
)
def test_a_field_that_only_packed_batches_or_only_others_use_may_change_where_it_is_not_used(
    tmp_path, packing, field, values
):
    of = lambda packing, value: CONFIG | {"data": CONFIG["data"] | {"packing": packing, field: value}}
    for run, trained in (("unused", of(not packing, values[0])), ("used", of(packing, values[0]))):
        with contextlib.closing(RunFolder.start(tmp_path / run, trained)) as folder:
            folder.begin(trained, {}, 0)
    RunFolder.start(tmp_path / "unused", of(not packing, values[1])).close()
    with pytest.raises(InputError, match=f"data.packing is {packing}, but .* was trained with {not packing}"):
        RunFolder.start(tmp_path / "unused", of(packing, values[1]))
    with pytest.raises(InputError, match=f"data.{field} is {values[1]!r}, but .* was trained with {values[0]!r}"):
        RunFolder.start(tmp_path / "used", of(packing, values[1]))


def test_a_flipped_bit_anywhere_in_config_json_is_noticed(tmp_path, begin):
    begin().close()
    path = tmp_path / "run/config.json"
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            found = RunFolder(tmp_path / "run").config
        except DamagedError as error:
            assert str(path) in str(error)
        else:
            # The name of the checksum itself was hit, or nothing that JSON means.
            assert {name: found[name] for name in CONFIG} == with_later_fields(CONFIG)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", '{"model": 3}', "\0", '{"a":' * 100_000])
def test_a_broken_config_is_one_line(tmp_path, begin, content):
    begin().close()
    (tmp_path / "run/config.json").write_text(content)
    with pytest.raises(DamagedError, match="config.json is damaged"):
        RunFolder.open(tmp_path / "run").decode_options()
    with pytest.raises(DamagedError, match="config.json is damaged"):
        RunFolder.start(tmp_path / "run", CONFIG)


def test_fields_that_reading_needs_are_checked(tmp_path):
    for field, value in {
        "decode.beam_size": "4",
        "decode.alpha": None,
        "data.max_length": 1.5,
        "model.d_model": True,
    }.items():
        section, name = field.split(".")
        write_object(tmp_path / "config.json", CONFIG | {section: CONFIG[section] | {name: value}})
        with pytest.raises(DamagedError, match=f"{field} is {value!r}"):
            RunFolder.open(tmp_path).decode_options()


def test_a_trained_run_never_starts_over_by_itself(tmp_path, begin):
    run = begin()
    run.check_found(None)  # killed before its first checkpoint
    run.note_saved(20)
    run.check_found(20)
    with pytest.raises(DamagedError, match=r"no checkpoint, but one of step 20 .* to start anew on purpose, delete"):
        run.check_found(None)
    run.close()
    (tmp_path / "run/config.json").unlink()
    with pytest.raises(DamagedError, match=r"config.json is missing, but the run has begun"):
        RunFolder.start(tmp_path / "run", CONFIG)


def test_a_newest_checkpoint_older_than_the_last_saved_is_reported(begin, caplog):
    run = begin()
    run.note_saved(20)
    run.check_found(10)
    assert "the last checkpoint was of step 20; going on from step 10" in caplog.text
    run.close()


def test_evaluations_never_overwrite_the_result_or_one_another(tmp_path, begin):
    run = begin()
    write_object(run.result, {"test": {"sacrebleu": 30.0}})
    paths = {run.keep_evaluation({"sacrebleu": 1.0}, {"step": 7, "dtype": dtype}) for dtype in ("float32", "bfloat16")}
    assert len(paths) == 2 and {path.parent.name for path in paths} == {"evaluations"}
    assert read_object(run.result) == {"test": {"sacrebleu": 30.0}}
    run.close()


@pytest.mark.parametrize("workdir", ["file", "file/inside", "loop/inside", "n" * 300])
def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path, workdir):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match="workdir: can't write to .*; choose another folder"):
        RunFolder.start(tmp_path / workdir, CONFIG)


def test_a_tuple_is_the_list_that_config_json_has_of_it(begin):
    config = CONFIG | {"optimizer": {"options": {"boundaries": (2, 4)}}}
    begin(config=config).close()
    begin(2, config).close()
    with pytest.raises(InputError, match="optimizer.options.boundaries is .2, 5., but .* was trained with .2, 4.;"):
        begin(2, CONFIG | {"optimizer": {"options": {"boundaries": (2, 5)}}})


def test_scores_that_other_settings_gave_do_not_stay_beside_the_new_ones(tmp_path, begin):
    """The call that changes them may be interrupted before it has scores of its own."""
    begin().close()
    result = tmp_path / "run/result.json"
    result.write_text("{}")
    more_steps = {"train": {"train_steps": 9, "seed": 0}}
    begin(5, CONFIG | more_steps).close()
    assert result.exists()  # of a run of fewer steps, as it says
    begin(5, CONFIG | more_steps | {"checkpoint": {"average_last": 1, "interval_minutes": 9.0}}).close()
    begin(5, CONFIG | more_steps | {"checkpoint": {"average_last": 1, "interval_minutes": 5.0}}).close()
    assert result.exists()  # nothing is averaged
    begin(5, CONFIG | more_steps | {"decode": CONFIG["decode"] | {"beam_size": 1}}).close()
    assert not result.exists()


def test_two_processes_cannot_train_in_one_folder(tmp_path):
    run = RunFolder.start(tmp_path, CONFIG)
    with pytest.raises(InputError, match="another process is training"):
        RunFolder.start(tmp_path, CONFIG)
    run.close()
    RunFolder.start(tmp_path, CONFIG).close()


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("empty", "train one with --config=…"),
        ("base/seed_1/checkpoints/40", "give its run, {root}/base/seed_1"),
        ("base", "give one of its runs, such as {root}/base/seed_0"),
    ],
)
def test_a_folder_without_config_json_is_refused_with_the_run_that_may_be_meant(tmp_path, path, advice):
    for folder in ("empty", "base/seed_0", "base/seed_1/checkpoints/40"):
        (tmp_path / folder).mkdir(parents=True)
    for seed in ("seed_0", "seed_1"):
        (tmp_path / "base" / seed / "config.json").write_text("{}")
    with pytest.raises(InputError) as refused:
        RunFolder.open(tmp_path / path)
    expected = f"workdir: {tmp_path}/{path} is not a run folder (no config.json); {advice.format(root=tmp_path)}"
    assert str(refused.value) == expected


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(InputError, match=f"^workdir: no folder {tmp_path}/none; train a run there with --config=…$"):
        RunFolder.open(tmp_path / "none")


@pytest.mark.parametrize(
    ("kind", "advice"),
    [("t5", "of these, only marian can be read"), ("marian", "make a run of it with python -m t2t_jax.interop.from")],
)
def test_a_model_of_hugging_face_is_named_with_what_can_be_done(tmp_path, kind, advice):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(InputError, match=f"is a model of Hugging Face's type '{kind}'; {advice}"):
        _ = RunFolder(tmp_path).config
