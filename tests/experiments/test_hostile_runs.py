"""Damaged run folders and records: one line and exit code 4, and in a sweep no effect on the other trials."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments import records, table2_translation, table3_variations
from experiments.sweep import __main__ as sweep
from experiments.sweep.plan import CONFIGS, make_trials
from experiments.sweep.slurm import SlurmQueue
from experiments.sweep.trials import FINISHED, REFUSED
from experiments.table3_rows import make_table
from t2t_jax.errors import DamagedError, StopError
from tests.experiments.runs import record, result, run_folder
from tests.interop.hostile import make_folder, truncate
from tests.interop.test_hostile_marian import VALUES

BROKEN = {
    "empty": "",
    "half": '{"step": 3, "dev": {',
    "not JSON": "traceback",
    "binary": b"\x80\x02\xff",
    "nested": "[" * 100_000,
    "of 5,000 digits": '{"steps": 1' + "0" * 5000 + "}",
}
OTHERS = {"list": [1, 2], "string": "steps", "number": 3, "null": None, "object in a list": [{"steps": 3}]}
VALUE_OF_OTHER_TYPE = {
    "row": 3, "config": [], "init_from": 3, "seed": "../../evil", "steps": None, "averaged_steps": 5,
    "dev": None, "test": "good", "parameters": True, "training_seconds": "long", "target_tokens_per_second": [],
    "hardware": 8, "commit": None, "date": {}, "jax": 0.1, "training_flops": "all", "trained_on": "long",
    "vocab_size": 303.5,
}  # fmt: skip


def put(path, content):
    if isinstance(content, dict):
        content = {name: value for name, value in content.items() if name != "checksum"}  # earlier versions wrote none
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))


def refused(capsys, command, *arguments):
    """Exit code and the only line on standard error; standard output must be empty."""
    code = command([str(argument) for argument in arguments])
    output, errors = capsys.readouterr()
    assert output == "" and len(errors.splitlines()) == 1 and errors.startswith("error: "), errors
    return code, errors


@pytest.mark.parametrize("name", ["result.json", "config.json"])
@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_an_unreadable_file_of_a_run_gives_one_line_and_code_4(tmp_path, capsys, name, content):
    run = run_folder(tmp_path / "sweep/base/seed_0")
    put(run / name, content)
    for command, *arguments in [
        (records.main, tmp_path / "sweep", tmp_path / "out"),
        (table2_translation.main, run),
        (table3_variations.main, f"--workdir={tmp_path}/sweep"),
    ]:
        code, line = refused(capsys, command, *arguments)
        assert code == 4 and f"{run}/{name} is damaged" in line


@pytest.mark.parametrize("name", ["result.json", "config.json"])
@pytest.mark.parametrize("value", OTHERS.values(), ids=OTHERS)
def test_a_file_of_a_run_that_is_no_json_object_gives_one_line_and_code_4(tmp_path, capsys, name, value):
    run = run_folder(tmp_path / "sweep/base/seed_0")
    put(run / name, json.dumps(value))
    for command, *arguments in [
        (records.main, tmp_path / "sweep", tmp_path / "out"),
        (table2_translation.main, run),
        (table3_variations.main, f"--workdir={tmp_path}/sweep"),
    ]:
        code, line = refused(capsys, command, *arguments)
        assert code == 4 and f"{run}/{name} is damaged: " in line and "in place of an object" in line


@pytest.mark.parametrize(("field", "value"), VALUE_OF_OTHER_TYPE.items(), ids=VALUE_OF_OTHER_TYPE)
def test_a_field_of_the_wrong_type_is_named(tmp_path, capsys, field, value):
    made = record("base") | {field: value}
    put(tmp_path / "one.json", made)
    for command, *arguments in [
        (table2_translation.main, tmp_path / "one.json"),
        (table3_variations.main, f"--records={tmp_path}"),
    ]:
        code, line = refused(capsys, command, *arguments)
        assert code == 4 and f"one.json is damaged: {field} is " in line
    if field not in ("row", "config"):
        run = run_folder(tmp_path / "sweep/base/seed_0", **{field: value})
        code, line = refused(capsys, records.main, tmp_path / "sweep", tmp_path / "out")
        assert code == 4 and f"{run} is damaged: {field} is " in line and not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [None, "21.5", [21.5], float("nan"), float("inf"), 10**400, True, {}])
@pytest.mark.parametrize("score", ["dev__sacrebleu", "dev__perplexity", "test__paper_bleu", "test__sentences"])
def test_a_score_that_is_not_a_number_is_named(tmp_path, capsys, score, value):
    run = run_folder(tmp_path / "base/seed_0", **{score: value})
    split, field = score.split("__")
    code, line = refused(capsys, table2_translation.main, run)
    assert code == 4 and f"{split} is damaged: {field} is " in line


def test_a_missing_score_that_a_table_needs_is_named(tmp_path, capsys):
    for split, field, command in [
        ("test", "paper_bleu", lambda path: (table2_translation.main, path)),
        ("dev", "perplexity", lambda path: (table3_variations.main, f"--records={path.parent}")),
    ]:
        made = record("base")
        del made[split][field]
        put(tmp_path / "one.json", made)
        code, line = refused(capsys, *command(tmp_path / "one.json"))
        assert code == 4 and f"record: base, seed 0: {split} has no {field}" in line


@pytest.mark.parametrize("field", ["model.d_model", "data.vocab_size", "train.train_steps", "decode.alpha"])
@pytest.mark.parametrize("is_section", [True, False])
def test_a_missing_field_or_section_of_a_config_is_named(tmp_path, capsys, field, is_section):
    run = run_folder(tmp_path / "base/seed_0")
    config = json.loads((run / "config.json").read_text())
    section, _, name = field.partition(".")
    if is_section:
        del config[section]
    else:
        del config[section][name]
    put(run / "config.json", config)
    code, line = refused(capsys, table3_variations.main, f"--workdir={tmp_path}")
    assert code == 4 and "config.json" in line and f"has no {section if is_section else name}" in line


def test_extreme_numbers_are_shown(tmp_path, capsys):
    for number, value in enumerate((0, -5, 1e-20, 1e299, 3)):
        run = run_folder(tmp_path / f"run{number}", training_flops=value, training_seconds=value)
        assert table2_translation.main([str(run), "--sustained_tflops=H100=60"]) == 0
    capsys.readouterr()
    odd = {"long": {"hardware": "9" * 5000 + " × K80"}, "lines": {"commit": "a\nb"}, "half": {"date": "\ud800"}}
    for name, changes in odd.items():
        put(tmp_path / f"{name}.json", record("base", **changes))
        code, _ = refused(capsys, table2_translation.main, tmp_path / f"{name}.json")
        assert code in (2, 4)


def test_an_unwritable_output_gives_one_line(tmp_path, capsys):
    run_folder(tmp_path / "sweep/base/seed_0")
    (tmp_path / "file").write_text("")
    for command, *arguments in [
        (records.main, tmp_path / "sweep", tmp_path / "file"),
        (records.main, tmp_path / "sweep", tmp_path / "file/out"),
        (records.main, tmp_path / "sweep", "/proc/out"),
    ]:
        code, line = refused(capsys, command, *arguments)
        assert code == 2 and "can't be made" in line
    write_figure = [f"--workdir={tmp_path}/sweep", f"--figure={tmp_path}/none/a.png"]
    assert table3_variations.main(write_figure) == 2
    assert capsys.readouterr().err.count("\n") == 1


# --- In a sweep --------------------------------------------------------------------------------------------


@pytest.fixture
def trials(tmp_path):
    """Two finished trials."""
    found = make_trials("table3", tmp_path, "base,a_h1", 1, [])
    for trial in found:
        trial.folder.mkdir(parents=True)
        put(trial.folder / "config.json", trial.settings)
        put(trial.folder / "result.json", result())
    return found


def of_sweep(workdir, capsys):
    """Exit code and error lines of a sweep in which nothing is left to train."""
    code = sweep.main(["table3", f"--workdir={workdir}", "--rows=base,a_h1"])
    return code, capsys.readouterr().err.splitlines()


DAMAGE = {
    **{f"result {name}": ("result.json", content) for name, content in BROKEN.items()},
    **{f"result a {name}": ("result.json", json.dumps(value)) for name, value in OTHERS.items()},
    **{f"config {name}": ("config.json", content) for name, content in BROKEN.items()},
    **{f"config a {name}": ("config.json", json.dumps(value)) for name, value in OTHERS.items()},
    "scores that are null": ("result.json", json.dumps(result(dev=None))),
    "a score that is text": ("result.json", json.dumps(result(dev__perplexity="6"))),
    "missing scores": ("result.json", json.dumps(result(dev={}))),
    "a missing headline score": ("result.json", json.dumps(result(dev__headline="f1"))),
    "a headline that is text": ("result.json", json.dumps(result(dev__headline="signature"))),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_trial_is_refused_with_the_reason_and_the_others_finish(trials, tmp_path, capsys, name):
    for trial in trials:
        put(trial.folder / "result.json", result(test={"perplexity": 5.0, "sacrebleu": 20.0}))
    file, content = DAMAGE[name]
    put(trials[0].folder / file, content)
    before = (trials[0].folder / file).read_bytes()
    code, lines = of_sweep(tmp_path, capsys)
    assert code == 4 and lines[0].startswith(f"base/seed_0: refused, {trials[0].folder}/{file}")
    assert lines[1].startswith("a_h1/seed_0: finished, dev perplexity 6.25") and lines[2] == "1 finished, 1 refused"
    assert (trials[0].folder / file).read_bytes() == before


def test_a_result_without_a_config_is_damaged(trials):
    (trials[0].folder / "config.json").unlink()
    assert trials[0].outcome()[0] == REFUSED and "config.json" in trials[0].outcome()[1]
    (trials[0].folder / "config.json").mkdir()
    assert trials[0].outcome()[0] == REFUSED and "config.json" in trials[0].outcome()[1]
    make_folder(trials[0].folder / "result.json")
    assert not trials[0].is_done


def test_progress_is_taken_from_the_last_complete_line(trials):
    trial = trials[0]
    whole = {"step": 5, "loss": 2.5, "target_tokens_per_second": 1000.0}
    half = [
        '{"step": 6, "lo',
        '{"step": 6}',
        '{"step": 6, "loss": 1, "target_tokens_per_second": "x"}',
        "{}}",
        "{" * 99,
    ]
    others = [
        "[1]",
        "null",
        '{"loss": null}',
        '{"step": "6", "loss": 1.0, "target_tokens_per_second": 1.0}',
        '{"loss": []}',
    ]
    huge = [
        json.dumps(whole | {"loss": 10**400}),
        json.dumps(whole | {"loss": float("nan")}),
        '{"loss": ' + "[" * 5000 + "}",
    ]
    for bad in [*half, *others, *huge, "\udcff" * 20]:
        lines = f"{json.dumps(whole)}\n{bad}".encode("utf-8", "surrogateescape")
        put(trial.folder / "metrics.jsonl", lines)
        assert trial.progress() == "step 5/100,000, loss 2.500, 1,000 target tokens/s", bad
    put(trial.folder / "metrics.jsonl", "{" + "\n{".join(half))
    assert trial.progress() == ""


def test_a_damaged_file_of_job_ids_is_named(tmp_path):
    pytest.importorskip("submitit")
    for content in ("{", "[]", '{"base/seed_0": 12}', '{"base/seed_0": null}'):
        put(tmp_path / "slurm.json", content)
        with pytest.raises(DamagedError, match=r"slurm\.json"):
            SlurmQueue(tmp_path, {"time": "5"})


# --- Random values in random fields ------------------------------------------------------------------------


def table_2(run):
    runs = table2_translation.by_cell(records.load(str(run)))
    sustained = table2_translation.sustained_tflops(["H100=60"], list(runs.values()))
    return table2_translation.table(runs, sustained, "markdown"), table2_translation.notes(runs)


def table_3(workdir):
    table = make_table(records.sweep_records(workdir), str(CONFIGS / "table3"))
    return table3_variations.for_people(table), table3_variations.notes(table)


def replace_somewhere(draw, value):
    """A JSON value in which a random part is replaced."""
    if isinstance(value, dict) and value and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(value)))
        return value | {key: replace_somewhere(draw, value[key])}
    return draw(VALUES)


@given(st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("name", ["result.json", "config.json"])
def test_any_value_in_a_run_is_accepted_or_refused_in_one_line(fuzzed, name, data):
    run, trial = fuzzed
    valid = json.loads((run / name).read_text())
    put(run / name, json.dumps(replace_somewhere(data.draw, valid)))
    for show in (lambda: table_2(run), lambda: table_3(run.parents[1])):
        try:
            show()
        except StopError as error:
            assert len(str(error).splitlines()) == 1
    if trial.is_done:
        state, details = trial.outcome()
        assert state in (FINISHED, REFUSED) and len(details.splitlines()) <= 1
    put(run / name, json.dumps(valid))


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    """A run of a sweep, and its trial."""
    workdir = tmp_path_factory.mktemp("sweep")
    return run_folder(workdir / "base/seed_0"), make_trials("table3", workdir, "base", 1, [])[0]


def test_a_truncated_file_never_gives_a_traceback(tmp_path, capsys):
    run = run_folder(tmp_path / "base/seed_0")
    for part in (0.1, 0.5, 0.99):
        for name in ("result.json", "config.json"):
            whole = (run / name).read_bytes()
            truncate(run / name, part)
            assert refused(capsys, table2_translation.main, run)[0] == 4
            (run / name).write_bytes(whole)
