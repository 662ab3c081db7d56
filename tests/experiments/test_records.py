import pytest

from configs import base_ende
from configs.table3 import a_h4
from experiments.conditions import conditions
from experiments.records import (
    fields_of,
    main,
    read_records,
    record_of,
    significance_against,
    sweep_records,
    write_records,
)
from experiments.scores import headline
from t2t_jax.errors import DamagedError, InputError
from t2t_jax.evaluation.significance import paired_bootstrap
from t2t_jax.files import sha256, write_object
from t2t_jax.run_folder import changes
from tests.experiments.runs import record, result, run_folder

REFERENCES = ["the house stands by the river", "nobody knows who built it", "it has been there for a long time"] * 5
WORSE = ["the house is by the river", "nobody knows who has it", "it was there for a long time"] * 5


def compared(hypotheses, baseline):
    found = paired_bootstrap(hypotheses, baseline, REFERENCES, resamples=10_000)
    return found._asdict() | {"interval": list(found.interval)}


def test_a_record_has_the_scores_and_their_conditions(tmp_path):
    numbers = {"seed": 7, "steps": 3000, "training_flops": 10**18, "init_from": "runs/other, checkpoint 6"}
    run = run_folder(tmp_path / "a_h4/seed_7", a_h4.get_config(), **numbers)
    found = record_of(run)
    assert (found["row"], found["seed"], found["steps"]) == ("a_h4", 7, 3000)
    assert (found["config"]["model.num_heads"], found["config"]["model.d_k"]) == (4, 128)
    assert found["config"]["data.corpus"] == "wmt14_ende" and found["config"]["train.label_smoothing"] == 0.1
    assert found["dev"]["perplexity"] == 6.25 and found["test"]["paper_bleu"] == 22.75
    assert (found["training_flops"], found["init_from"]) == (10**18, "runs/other, checkpoint 6")
    own = base_ende.get_config()
    own.optimizer.options = {"boundaries": (2, 4)}
    lists = record_of(run_folder(tmp_path / "lists", own, skipped_steps=3))
    assert lists["config"]["optimizer.options.boundaries"] == [2, 4] and lists["skipped_steps"] == 3
    assert "; 3 updates skipped; " in conditions(lists, 1, {}, [])
    other = record_of(run_folder(tmp_path / "mine", init_from="", vocab_size=303, source_vocab_size=None))
    assert other["vocab_size"] == 303 and "source_vocab_size" not in other and "vocab_size" not in found
    assert other["row"] == "mine" and "training_flops" not in other and "init_from" not in other


def test_a_record_has_every_field_that_affects_the_scores():
    same = fields_of(base_ende.get_config().to_dict())
    for section, field, value in [
        ("data", "max_length", 32), ("data", "vocab_kind", "unigram"), ("data", "packing", False),
        ("optimizer", "beta2", 0.999), ("decode", "early_stop", "beam_full"), ("evaluate", "dtype", "bfloat16"),
        ("checkpoint", "interval_steps", 100), ("checkpoint", "average_last", 1),
    ]:  # fmt: skip
        config = base_ende.get_config()
        config[section][field] = value
        assert changes(fields_of(config.to_dict()), same) == {f"{section}.{field}": value}
    config = base_ende.get_config()
    config.checkpoint.interval_minutes = 5.0
    assert fields_of(config.to_dict()) == same  # as checkpoints are saved by steps
    assert not any(field.startswith("checkpoint.interval") for field in fields_of(a_h4.get_config().to_dict()))
    assert changes({"model.later": 1} | same, same) == changes(same, {"model.later": 1} | same) == {}


def test_shapes_of_packed_rows_and_of_buckets_are_changes_only_where_batches_have_them():
    packed = fields_of(base_ende.get_config().to_dict())
    other = {"data.num_buckets": 8, "data.bucketing": "partition", "data.packing_shapes": 1}
    assert changes(packed | other, packed) == {"data.packing_shapes": 1}
    bucketed = {"data.packing": False, "data.num_buckets": 8, "data.bucketing": "partition"}
    assert changes(packed | other | bucketed, packed) == bucketed
    assert changes(packed | other, packed | bucketed) == {"data.packing": True, "data.packing_shapes": 1}


def test_records_are_read_as_they_were_written(tmp_path):
    records = [record("base"), record("base", seed=1), record("a_h1", steps=5)]
    paths = write_records(tmp_path / "records", records)
    assert [path.name for path in paths] == ["base_seed_0.json", "base_seed_1.json", "a_h1_seed_0.json"]
    assert read_records(tmp_path / "records") == [records[2], records[0], records[1]]
    write_records(tmp_path / "records", [record("base", steps=6)])
    assert [r["steps"] for r in read_records(tmp_path / "records")] == [5, 6, 100_000]


def test_significance_is_the_paired_bootstrap_of_two_runs(tmp_path):
    base = run_folder(tmp_path / "base/seed_0", None, WORSE, REFERENCES)
    row = run_folder(tmp_path / "a_h1/seed_0", None, REFERENCES, REFERENCES)
    found = significance_against(base, row)
    assert found == compared(REFERENCES, WORSE)
    assert found["difference"] > 0 and found["score"] == pytest.approx(100)
    assert significance_against(row, base)["difference"] == -found["difference"]


def test_hypotheses_that_do_not_match_their_checksum_are_refused(tmp_path):
    base, run = (run_folder(tmp_path / name, hypotheses=["a b"], references=["a b"]) for name in ("base", "run"))
    path = run / "dev.hypotheses.txt"
    write_object(run / "result.json", result(sha256={path.name: sha256(path)}))
    significance_against(base, run)
    path.write_text("a c\n")
    with pytest.raises(DamagedError, match="dev.hypotheses.txt does not match its checksum in result.json"):
        significance_against(base, run)


def test_finished_trials_of_a_sweep_are_compared_with_the_base_of_the_same_seed(tmp_path):
    half = REFERENCES[:8] + WORSE[8:]
    run_folder(tmp_path / "base/seed_0", None, WORSE, REFERENCES)
    run_folder(tmp_path / "base/seed_1", None, half, REFERENCES, seed=1)
    run_folder(tmp_path / "a_h1/seed_0", None, REFERENCES, REFERENCES)
    run_folder(tmp_path / "a_h1/seed_1", None, REFERENCES, REFERENCES, seed=1)
    run_folder(tmp_path / "a_h1/seed_2", None, REFERENCES, REFERENCES, seed=2)
    (run_folder(tmp_path / "a_h4/seed_0") / "result.json").unlink()
    found = {(r["row"], r["seed"]): r for r in sweep_records(tmp_path)}
    assert list(found) == [("a_h1", 0), ("a_h1", 1), ("a_h1", 2), ("base", 0), ("base", 1)]
    assert [key for key, r in found.items() if "against_base" in r] == [("a_h1", 0), ("a_h1", 1)]
    assert found["a_h1", 0]["against_base"] == {"row": "base", **compared(REFERENCES, WORSE)}
    assert found["a_h1", 1]["against_base"] == {"row": "base", **compared(REFERENCES, half)}
    assert found["a_h1", 0]["against_base"]["p_value"] < 0.05


def test_trials_that_are_not_finished_are_named(tmp_path, capsys):
    for trial in ("base/seed_0", "base/seed_1", "failed/seed_0"):
        run_folder(tmp_path / trial, None, WORSE, REFERENCES)
    for trial in ("base/seed_1", "failed/seed_0"):
        (tmp_path / trial / "result.json").unlink()
    assert [record["row"] for record in sweep_records(tmp_path)] == ["base"]
    assert capsys.readouterr().err == "not finished, so left out: base/seed_1, failed/seed_0\n"


def test_more_rows_leave_a_comparison_as_it_is(tmp_path):
    run_folder(tmp_path / "base/seed_0", None, WORSE, REFERENCES)
    run_folder(tmp_path / "a_h1/seed_0", None, REFERENCES, REFERENCES)
    before = sweep_records(tmp_path)
    for row in range(20):
        run_folder(tmp_path / f"later_{row}/seed_1", None, REFERENCES, REFERENCES, seed=1)
    assert [found for found in sweep_records(tmp_path) if found["seed"] == 0] == before


def test_trials_are_compared_with_the_row_that_is_named(tmp_path, capsys):
    run_folder(tmp_path / "sweep/plain/seed_0", None, WORSE, REFERENCES)
    run_folder(tmp_path / "sweep/a_h1/seed_0", None, REFERENCES, REFERENCES)
    compared_with_plain, plain = sweep_records(tmp_path / "sweep", "plain")
    assert compared_with_plain["against_base"] == {"row": "plain", **compared(REFERENCES, WORSE)}
    assert "against_base" not in plain
    command = [str(tmp_path / "sweep"), str(tmp_path / "records")]
    assert main([*command, "--base=plain"]) == 0 and capsys.readouterr().err == ""
    assert read_records(tmp_path / "records") == [compared_with_plain, plain]
    assert main(command) == 0 and "no trial of a row base" in capsys.readouterr().err
    assert main([*command, "--base=plane"]) == 2 and "did you mean 'plain'?" in capsys.readouterr().err
    one_run = [str(tmp_path / "sweep/plain/seed_0"), str(tmp_path / "records")]
    assert main([*one_run, "--base=plain"]) == 2 and "is one run" in capsys.readouterr().err


def test_a_trial_that_is_a_link_is_of_the_row_that_it_stands_in(tmp_path, monkeypatch):
    (tmp_path / "sweep/base").mkdir(parents=True)
    (tmp_path / "sweep/base/seed_0").symlink_to(run_folder(tmp_path / "scratch/x1", None, WORSE, REFERENCES))
    run = run_folder(tmp_path / "sweep/a_h1/seed_0", None, REFERENCES, REFERENCES)
    row, base = sweep_records(tmp_path / "sweep")
    assert base["row"] == "base" and "against_base" not in base
    assert row["row"] == "a_h1" and row["against_base"] == {"row": "base", **compared(REFERENCES, WORSE)}
    monkeypatch.chdir(run)
    assert record_of(".") == record_of(run)


def test_trials_of_other_tasks_are_not_compared_by_bleu(tmp_path):
    for row in ("base", "a_h1"):
        run_folder(tmp_path / f"{row}/seed_0", None, WORSE, REFERENCES, dev__headline="f1", dev__f1=0.5)
    assert not [found for found in sweep_records(tmp_path) if "against_base" in found]


def test_the_headline_is_the_named_score_and_sacrebleu_where_none_is_named():
    assert headline({"sacrebleu": 21.55, "f1": 0.875}, "dev") == ("sacrebleu", 21.55)
    assert headline({"sacrebleu": 21.55, "f1": 0.875, "headline": "f1"}, "dev") == ("f1", 0.875)
    assert str(headline({"sacrebleu": 21.55}, "dev")) == "BLEU 21.6"
    assert str(headline({"exact_match": 100.0, "headline": "exact_match"}, "dev")) == "exact_match 100"
    for scores, message in [
        ({}, "dev has no sacrebleu"),
        ({"sacrebleu": 21.5, "headline": "f1"}, "dev has no f1"),
        ({"sacrebleu": "21.5"}, "sacrebleu is '21.5'; it must be a number"),
        ({"headline": 3}, "headline is 3; it must be a line of text"),
    ]:
        with pytest.raises(DamagedError, match=message):
            headline(scores, "dev")


def test_the_command_writes_the_records_of_a_sweep_or_of_a_run(tmp_path, capsys):
    run_folder(tmp_path / "sweep/base/seed_0", None, WORSE, REFERENCES)
    run_folder(tmp_path / "sweep/c_n2/seed_0", None, REFERENCES, REFERENCES)
    assert main([str(tmp_path / "sweep"), str(tmp_path / "records")]) == 0
    names = [line.rpartition("/")[2] for line in capsys.readouterr().out.splitlines()]
    assert names == ["base_seed_0.json", "c_n2_seed_0.json"]
    assert read_records(tmp_path / "records") == sweep_records(tmp_path / "sweep")
    assert main([str(tmp_path / "sweep/base/seed_0"), str(tmp_path / "one")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/one/base_seed_0.json\n"
    assert read_records(tmp_path / "one") == [record_of(tmp_path / "sweep/base/seed_0")]
    assert main([str(tmp_path / "absent"), str(tmp_path / "records")]) == 2
    assert capsys.readouterr().err == f"error: workdir: no folder {tmp_path}/absent\n"


def test_unfinished_runs_and_incomplete_records_are_refused_with_the_missing_field(tmp_path):
    with pytest.raises(InputError, match="not a run folder"):
        record_of(tmp_path)
    unfinished = run_folder(tmp_path / "unfinished")
    (unfinished / "result.json").write_text("{}")
    with pytest.raises(InputError, match=r"run: no seed in .*unfinished/result\.json; train it to its end"):
        record_of(unfinished)
    write_object(unfinished / "config.json", base_ende.get_config().to_dict() | {"imported_from": "marian"})
    with pytest.raises(InputError, match=r"run: no seed in .*unfinished/result\.json; an imported model has no rec"):
        record_of(unfinished)
    with pytest.raises(InputError, match="records: no folder"):
        read_records(tmp_path / "absent")
    incomplete = record("base")
    del incomplete["dev"]
    write_records(tmp_path / "records", [incomplete])
    with pytest.raises(InputError, match=r"record: no dev in .*base_seed_0\.json"):
        read_records(tmp_path / "records")
    (tmp_path / "records/base_seed_0.json").write_text("{")
    with pytest.raises(DamagedError, match="base_seed_0.json is damaged: not JSON"):
        read_records(tmp_path / "records")


def test_runs_with_different_dev_sets_are_not_compared(tmp_path):
    one = run_folder(tmp_path / "one", None, WORSE, REFERENCES)
    with pytest.raises(InputError, match=r"dev sets of .*one and .*two differ"):
        significance_against(one, run_folder(tmp_path / "two", None, WORSE, WORSE))
    with pytest.raises(InputError, match=r"three: 2 translations but 15 references"):
        significance_against(one, run_folder(tmp_path / "three", None, WORSE[:2], REFERENCES))
