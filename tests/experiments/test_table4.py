import csv
import io
import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs import base_ende, parsing_semi, parsing_wsj
from experiments import paper, parsing_records, table2_translation, table4_parsing
from experiments.parsing_records import parsing_record_of, read_parsing_record, run_of, write_parsing_records
from experiments.records import fields_of, write_records
from experiments.table4_parsing import HEADER, notes, table
from t2t_jax.errors import InputError, StopError
from t2t_jax.files import write_object
from tests.experiments.runs import record as translation_record
from tests.experiments.runs import run_folder
from tests.experiments.test_hostile_runs import BROKEN, put, refused, replace_somewhere

SCORES = {
    "f1": 82.125, "precision": 83.5, "recall": 80.8, "exact_match": 25.0, "error_sentences": 0, "skip_sentences": 0,
    "headline": "f1", "sentences": 2000, "constrained": False, "invalid": 25,
    "repairs": {"missing_word": 4, "unclosed": 1030},
}  # fmt: skip


def craft_config():
    config = base_ende.get_config()
    config.model.update(num_layers=3, d_model=256, d_ff=1024, num_heads=4, share_embeddings=False)
    config.data.update(task="parsing", corpus="trees", train="/home/me/my trees/craft.train.mrg.gz",
                       dev="/home/me/craft.dev.mrg.gz", test="/home/me/craft.test.mrg.gz")  # fmt: skip
    config.decode.update(alpha=0.3, max_extra_length=300)
    return config


def parsing_run(path, config=None, scores=None, **changes):
    """A finished run of a parser, with these test scores in its result.json."""
    changes = {"training_pairs": 25_095, "steps": 9000, "averaged_steps": [7000, 8000, 9000]} | changes
    return run_folder(path, config or craft_config(), test=SCORES | (scores or {}), **changes)


def stored_evaluation(run, name="step_9000_01234567", options=None, **changes):
    """A stored evaluation of a run, as `--mode=evaluate` writes it."""
    options = {"beam_size": 21, "alpha": 0.3, "max_extra_length": 300, "constrained": True} | (options or {})
    conditions = {"step": 9000, "checkpoints": {str(run): "averaged checkpoint 9000"}, "dtype": "float32",
                  "options": options, "files": {"data": "0a1b"}}  # fmt: skip
    (run / "evaluations").mkdir(exist_ok=True)
    path = run / "evaluations" / f"{name}.json"
    write_object(path, SCORES | {"constrained": True, "invalid": 0, "repairs": {}} | conditions | changes)
    return path


def record(tmp_path, config=None, scores=None, **changes):
    return parsing_record_of(parsing_run(tmp_path / "parser", config, scores, **changes))


def row_of(record):
    """The cells of the only record, by column."""
    [cells] = [row for row in table([record]) if "ours" in row[0] and row[5]]
    return dict(zip(HEADER, cells, strict=True))


# --- Records -----------------------------------------------------------------------------------------------


def test_a_record_has_the_scores_of_one_evaluation_and_the_conditions_of_its_run(tmp_path):
    run = parsing_run(tmp_path / "parsing_craft/seed_7", seed=7)
    found = parsing_record_of(stored_evaluation(run, f1=81.5, recall=79.75))
    assert (found["f1"], found["precision"], found["recall"], found["exact_match"]) == (81.5, 83.5, 79.75, 25.0)
    assert (found["sentences"], found["constrained"], found["invalid"], found["repairs"]) == (2000, True, 0, {})
    assert (found["row"], found["seed"], found["steps"], found["training_pairs"]) == ("parsing_craft", 7, 9000, 25_095)
    assert found["averaged_steps"] == [7000, 8000, 9000]
    assert found["commit"].startswith("01234567") and found["training_seconds"] == 43_200.0
    assert found["hardware"].startswith("8 × NVIDIA H100") and found["jax"] == "0.10.2"
    assert found["config"]["model.d_model"] == 256 and found["config"]["optimizer.warmup_steps"] == 4000
    assert found["evaluation"] == {"checkpoint": "averaged checkpoint 9000", "dtype": "float32", "files": []}


def test_result_json_gives_the_record_of_the_end_of_training(tmp_path):
    run = parsing_run(tmp_path / "run")
    found = parsing_record_of(run)
    assert found == parsing_record_of(run / "result.json")
    assert (found["f1"], found["constrained"], found["invalid"]) == (82.125, False, 25)
    assert (found["config"]["decode.beam_size"], found["averaged_steps"]) == (4, [7000, 8000, 9000])


def test_the_options_of_a_record_are_those_of_its_evaluation(tmp_path):
    run = parsing_run(tmp_path / "run")
    found = parsing_record_of(stored_evaluation(run, options={"beam_size": 7, "alpha": 0.0}))
    assert (found["config"]["decode.beam_size"], found["config"]["decode.alpha"]) == (7, 0.0)
    assert found["config"]["decode.constrained"] is True


def test_a_checkpoint_that_is_no_average_is_recorded_alone(tmp_path):
    run = parsing_run(tmp_path / "run")
    found = parsing_record_of(stored_evaluation(run, checkpoints={"elsewhere/run": "checkpoint 9000"}))
    assert found["averaged_steps"] == [9000]


def test_a_later_average_is_recorded_with_the_checkpoints_that_it_is_of(tmp_path):
    run = parsing_run(tmp_path / "run")
    assert parsing_record_of(stored_evaluation(run))["averaged_steps"] == [7000, 8000, 9000]  # of earlier versions
    found = parsing_record_of(stored_evaluation(run, averaged_steps=[[8000, 9000]]))
    assert found["averaged_steps"] == [8000, 9000]


def test_a_record_names_files_without_their_folders(tmp_path):
    config = craft_config()
    config.data.train = "/secret/one.mrg.gz:10, /secret/some trees/two.mrg"
    config.data.archives = "/secret/archives"
    run = parsing_run(tmp_path / "run", config)
    other = stored_evaluation(run, files={"/secret/a.txt": "00", "/secret/b.mrg": "11"})
    for path in (run, other):
        assert "secret" not in json.dumps(parsing_record_of(path))
    assert parsing_record_of(run)["config"]["data.train"] == "one.mrg.gz:10,two.mrg"
    assert parsing_record_of(other)["evaluation"]["files"] == ["a.txt", "b.mrg"]


def test_both_decodings_of_a_run_are_written_and_read_as_they_were(tmp_path, capsys):
    run = parsing_run(tmp_path / "parsing_craft/seed_0")
    constrained = stored_evaluation(run)
    assert parsing_records.main([str(run), str(constrained), str(tmp_path / "records")]) == 0
    names = ["parsing_craft_seed_0_repaired.json", "parsing_craft_seed_0_constrained.json"]
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "records" / name) for name in names]
    for name, evaluation in zip(names, (run, constrained), strict=True):
        found = read_parsing_record(tmp_path / "records" / name)
        assert found == parsing_record_of(evaluation) == json.loads((tmp_path / "records" / name).read_text())


def test_two_records_of_one_name_are_refused(tmp_path):
    run = parsing_run(tmp_path / "run")
    sizes = {"a": 4, "b": 21}
    paths = [stored_evaluation(run, name, {"beam_size": size}) for name, size in sizes.items()]
    records = [parsing_record_of(path) for path in paths]
    with pytest.raises(InputError, match="two records are both run_seed_0_constrained.json"):
        write_parsing_records(tmp_path / "records", records)


def test_an_evaluation_belongs_to_the_run_folder_it_lies_in(tmp_path, monkeypatch):
    run = parsing_run(tmp_path / "run")
    evaluation = stored_evaluation(run)
    assert run_of(run) == run_of(run / "result.json") == run_of(evaluation) == run
    assert run_of(tmp_path / "result.json") is None and run_of(tmp_path) is None
    monkeypatch.chdir(run)
    assert parsing_record_of("result.json") == parsing_record_of(run)
    assert parsing_record_of(f"evaluations/{evaluation.name}") == parsing_record_of(evaluation)


# --- The table ---------------------------------------------------------------------------------------------


def as_csv(capsys, *arguments):
    """(header, rows, notes)"""
    assert table4_parsing.main([*map(str, arguments), "--format=csv"]) == 0
    out, errors = capsys.readouterr()
    header, *rows = csv.reader(io.StringIO(out))
    assert all(len(row) == len(header) for row in rows)
    return header, rows, errors


def test_without_runs_the_table_has_the_rows_of_the_paper_and_empty_rows_of_ours(capsys):
    header, rows, errors = as_csv(capsys)
    assert header[:3] == ["parser", "training", "WSJ 23 F1"] and len(rows) == 14 and errors == ""
    best = {
        training: max(float(row[2]) for row in rows[:12] if row[1] == training) for training in {r[1] for r in rows}
    }
    assert best == {paper.WSJ_ONLY: 91.7, paper.SEMI_SUPERVISED: 92.7, "multi-task": 93.0, "generative": 93.3}
    assert [row[:3] for row in rows if row[0] == "Transformer (4 layers)"] == [
        ["Transformer (4 layers)", "WSJ only, discriminative", "91.3"],
        ["Transformer (4 layers)", "semi-supervised", "92.7"],
    ]
    assert [row[0] for row in rows[12:]] == ["Transformer (4 layers), ours"] * 2 and not any(rows[12][2:])
    table4_parsing.main([])
    assert "| parser | training | WSJ 23 F1 |\n" in capsys.readouterr().out


@pytest.mark.parametrize("config", [parsing_wsj, parsing_semi])
def test_a_run_of_the_paper_fills_its_row_of_section_23(tmp_path, capsys, config):
    run = parsing_run(tmp_path / "run", config.get_config(), {"sentences": 2416, "f1": 91.304})
    _, rows, _ = as_csv(capsys, run)
    setting = paper.WSJ_ONLY if config is parsing_wsj else paper.SEMI_SUPERVISED
    assert len(rows) == 14
    [ours] = [row for row in rows[12:] if row[1] == setting]
    assert ours[:6] == ["Transformer (4 layers), ours", setting, "91.30", "", "", "83.50"]
    assert all(row[2] == "" for row in rows[12:] if row is not ours)


def test_f1_on_other_trees_is_never_in_the_column_of_section_23(tmp_path):
    run = parsing_run(tmp_path / "wsj", parsing_wsj.get_config(), {"sentences": 2416})
    part = parsing_run(tmp_path / "part", parsing_wsj.get_config(), {"sentences": 241})
    craft = parsing_run(tmp_path / "craft", scores={"sentences": 2416})
    files = stored_evaluation(run, sentences=2416, files={"craft.txt": "00", "/data/craft.test.mrg": "11"})
    for path, name in [
        (part, "WSJ 23, 241 of 2,416 sentences"),
        (craft, "craft.test.mrg.gz"),
        (files, "craft.test.mrg"),
    ]:
        row = row_of(parsing_record_of(path))
        assert (row["WSJ 23 F1"], row["other test set"], row["F1 there"]) == ("", name, "82.12")
    assert row_of(parsing_record_of(run))["WSJ 23 F1"] == "82.12"


def test_a_parser_of_another_treebank_has_a_row_with_its_name_and_number_of_trees(tmp_path, capsys):
    _, rows, _ = as_csv(capsys, parsing_run(tmp_path / "run"))
    assert len(rows) == 15
    assert rows[-1] == ["Transformer (3 layers), ours", "craft.train.mrg.gz, 25,095 trees", "", "craft.test.mrg.gz",
                        "82.12", "83.50", "80.80", "25.00", "2000", "repaired", "1.25"]  # fmt: skip
    older = record(tmp_path)
    del older["training_pairs"]
    assert row_of(older)["training"] == "craft.train.mrg.gz"


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ("", paper.WSJ_ONLY),
        ("wsj", paper.WSJ_ONLY),
        ("wsj:3", paper.WSJ_ONLY),
        ("wsj:10,/data/parsed.mrg.gz", paper.SEMI_SUPERVISED),
        ("/data/parsed.mrg.gz , wsj", paper.SEMI_SUPERVISED),
        ("/data/parsed.mrg.gz:2", "parsed.mrg.gz:2, 25,095 trees"),
    ],
)
def test_the_training_setting_follows_from_the_parts_of_the_training_set(tmp_path, train, expected):
    config = parsing_wsj.get_config()
    config.data.train = train
    assert row_of(record(tmp_path, config))["training"] == expected
    config.data.corpus = "trees"
    assert row_of(record(tmp_path / "trees", config))["training"] not in (paper.WSJ_ONLY, paper.SEMI_SUPERVISED)


def test_records_give_the_same_table_as_their_evaluations(tmp_path, capsys):
    run = parsing_run(tmp_path / "run")
    constrained = stored_evaluation(run)
    from_run = as_csv(capsys, run, constrained)
    parsing_records.main([str(run), str(constrained), str(tmp_path / "records")])
    files = sorted((tmp_path / "records").glob("*.json"), reverse=True)
    capsys.readouterr()
    assert from_run == as_csv(capsys, *files)
    assert sorted(from_run[1]) == sorted(as_csv(capsys, tmp_path / "records")[1])
    assert [row[-2:] for row in from_run[1][-2:]] == [["repaired", "1.25"], ["constrained", "0.00"]]


def test_notes_give_the_conditions_of_each_row(tmp_path):
    [rules, note] = notes([record(tmp_path)])
    assert "EVALB's rules with COLLINS.prm" in rules
    for part in [
        "Transformer (3 layers), ours, craft.train.mrg.gz, 25,095 trees, repaired: 9,000 steps; "
        "average of the last 3 checkpoints; seed 0; N=3, d_model=256, d_ff=1024, h=4, 63,045,632 parameters",
        "2,000 sentences, beam size 4, α 0.3, input + 300 pieces, float32",
        "25 invalid outputs (unclosed 1,030, missing_word 4); 12.0 hours of training on 8 × NVIDIA H100",
        "2026-11-21 12:00 UTC, commit 0123456789ab",
    ]:
        assert part in note
    assert "in no total" not in note and "departs" not in note
    left_out = record(tmp_path / "other", scores={"error_sentences": 3})
    assert "3 error sentences in no total, which raises the scores" in notes([left_out])[1]


def test_notes_compare_a_run_with_the_config_of_its_setting(tmp_path):
    config = parsing_wsj.get_config()
    config.data.archives, config.train.train_steps = "/data/ptb", 2000
    [_, note] = notes([record(tmp_path / "a", config, steps=2000)])
    assert "departs" not in note and "2,000 steps, a shortened run: 100,000 are the whole" in note
    config.model.num_layers = 1
    [_, note] = notes([record(tmp_path / "b", config)])
    assert "Transformer (1 layer), ours" in note and "departs from its config in model.num_layers=1;" in note
    assert "25,095 training trees of wsj;" in note
    semi = parsing_semi.get_config()
    semi.data.train = "wsj:10,/data/mine.mrg"
    [_, note] = notes([record(tmp_path / "c", semi)])
    assert "departs" not in note and "25,095 training trees of wsj:10,mine.mrg" in note


def test_runs_of_one_size_and_training_set_are_told_apart_by_row_and_seed(tmp_path):
    runs = [parsing_run(tmp_path / f"{row}/seed_{seed}", seed=seed) for row, seed in [("deep", 0), ("deep", 1)]]
    records = [*map(parsing_record_of, runs), parsing_record_of(stored_evaluation(runs[1]))]
    names = [f"Transformer (3 layers), ours, deep, seed {seed}" for seed in (0, 1, 1)]
    assert [row[0] for row in table(records)[-3:]] == names
    assert [note.startswith(name) for note, name in zip(notes(records)[1:], names, strict=True)] == [True] * 3
    alone = records[1:]  # both evaluations are of one run
    assert [row[0] for row in table(alone)[-2:]] == ["Transformer (3 layers), ours"] * 2


def test_a_ready_vocabulary_and_tags_as_targets_are_noted(tmp_path):
    for config in (craft_config(), parsing_wsj.get_config()):
        config.data.task, config.data.vocabulary = "parsing_with_tags", "/data/ready.model"
        [_, note] = notes([record(tmp_path / config.data.corpus, config)])
        assert "data.task=parsing_with_tags" in note
    assert "departs from its config in data.task=parsing_with_tags, data.vocabulary=ready.model;" in note


def test_notes_stand_in_the_order_of_their_rows(tmp_path):
    configs = [craft_config(), parsing_semi.get_config(), parsing_wsj.get_config()]
    records = [record(tmp_path / str(number), config) for number, config in enumerate(configs)]
    rows = [", ".join(row[:2]) for row in table(records)[len(paper.TABLE_4) :]]
    assert [note.partition(", repaired: ")[0] for note in notes(records)[1:]] == rows and len(rows) == 3


def test_markdown_and_latex_escape_what_file_names_may_hold(tmp_path, capsys):
    config = craft_config()
    config.data.train = "a|b_{c}$~^\\&.mrg"
    run = str(parsing_run(tmp_path / "run", config))
    assert table4_parsing.main([run]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| Transformer (3 layers)")]
    assert r"| a\|b_{c}$~^\&.mrg, 25,095 trees |" in row
    assert len(re.findall(r"(?<!\\)\|", row)) == len(HEADER) + 1
    assert table4_parsing.main([run, "--format=latex"]) == 0
    out = capsys.readouterr().out
    assert r"a\textbar{}b\_\{c\}\$\textasciitilde{}\textasciicircum{}\textbackslash{}\&.mrg, 25,095 trees & " in out
    assert r"Vinyals \& Kaiser et al. (2014) [37] & WSJ only, discriminative & 88.3" in out and r"$\alpha$ 0.3" in out


# --- Bad input ---------------------------------------------------------------------------------------------


def test_what_is_no_evaluation_of_a_finished_parsing_run_is_refused(tmp_path, capsys):
    run = parsing_run(tmp_path / "run")
    [foreign] = write_records(tmp_path / "translation", [translation_record("base")])
    unfinished = parsing_run(tmp_path / "unfinished")
    (unfinished / "result.json").unlink()
    evaluation = stored_evaluation(run)
    elsewhere = tmp_path / "elsewhere/record.json"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(evaluation.read_bytes())
    two = {"one": "averaged checkpoint 9000", "two": "averaged checkpoint 9000"}
    for path, message in [
        (foreign, r"record: no f1 in .*base_seed_0\.json; give a record that experiments\.parsing_records wrote"),
        (elsewhere, r"record: no row in .*elsewhere/record\.json"),
        (
            run_folder(tmp_path / "ende"),
            r"evaluation: no f1 in .*ende/result\.json: test; --mode=evaluate of a parsing",
        ),
        (unfinished, r"run: no seed in .*; train it to its end"),
        (tmp_path / "absent", r"record: no file .*; give a record that experiments\.parsing_records wrote"),
        (tmp_path, r"record: no \*\.json in .*; give a run folder, a record or a folder of records"),
        (run / "evaluations/absent.json", "evaluation: no file "),
        (stored_evaluation(run, "a", step=500), "is of step 500; result.json describes step 9000"),
        (stored_evaluation(run, "c", split="dev"), "is of the 'dev' set; a record is of the test set"),
        (stored_evaluation(run, "b", checkpoints=two), "is of 2 runs; a record is of one"),
    ]:
        code, line = refused(capsys, table4_parsing.main, path)
        assert code == 2 and re.search(message, line), line
    code, line = refused(capsys, table4_parsing.main, run, run / "result.json")
    assert code == 2 and "run: run (seed 0, repaired) is given twice" in line
    code, line = refused(capsys, parsing_records.main, elsewhere, tmp_path / "out")
    assert code == 2 and "is not in a run folder; give RUN/evaluations/NAME.json" in line
    code, line = refused(capsys, parsing_records.main, run, elsewhere)
    assert code == 2 and "can't be made" in line
    write_parsing_records(tmp_path / "records", [parsing_record_of(run)])
    code, line = refused(capsys, table2_translation.main, tmp_path / "records")
    assert code == 2 and "record: no dev in " in line


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_an_unreadable_file_gives_one_line_and_code_4(tmp_path, capsys, content):
    run = parsing_run(tmp_path / "run")
    evaluation = stored_evaluation(run)
    [file] = write_parsing_records(tmp_path / "records", [parsing_record_of(evaluation)])
    for path, shown in [(evaluation,) * 2, (file,) * 2, (run / "result.json", run), (run / "config.json", evaluation)]:
        whole = path.read_bytes()
        put(path, content)
        code, line = refused(capsys, table4_parsing.main, shown)
        assert code == 4 and f"{path} is damaged" in line
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("field", "value"),
    [("f1", "82"), ("f1", 100.5), ("recall", -1), ("precision", float("nan")), ("exact_match", None),
     ("sentences", 0), ("sentences", 2.5), ("invalid", 2001), ("invalid", -1), ("invalid", True), ("constrained", 1),
     ("repairs", []), ("repairs", {"unclosed": "many"}), ("repairs", {"un\nclosed": 1}), ("error_sentences", "none")],
)  # fmt: skip
def test_a_damaged_score_is_named(tmp_path, capsys, field, value):
    run = parsing_run(tmp_path / "run", scores={field: value})
    code, line = refused(capsys, table4_parsing.main, run)
    assert code == 4 and f"{run}/result.json: test" in line and field in line and "is damaged" in line


def test_the_file_that_holds_a_damaged_field_is_named(tmp_path, capsys):
    run = parsing_run(tmp_path / "run", parameters="many")
    code, line = refused(capsys, table4_parsing.main, stored_evaluation(run))
    assert code == 4 and f"{run} is damaged: parameters is 'many'" in line
    run = parsing_run(tmp_path / "other")
    evaluation = stored_evaluation(run, options={"alpha": []})
    code, line = refused(capsys, table4_parsing.main, evaluation)
    assert code == 4 and "decode.alpha of its config is a list" in line


def test_what_would_break_a_line_of_the_table_is_refused(tmp_path, capsys):
    valid = record(tmp_path)
    for change in [
        {"config": valid["config"] | {"model.\nsize": 3}},
        {"config": valid["config"] | {"data.train": "a\nb"}},
        {"evaluation": valid["evaluation"] | {"files": ["a\nb"]}},
    ]:
        put(tmp_path / "one.json", valid | change)
        code, line = refused(capsys, table4_parsing.main, tmp_path / "one.json")
        assert code == 4 and "one.json" in line and "is damaged" in line


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """Of each file of a run: its path, what it holds, and what the table can show of it."""
    run = parsing_run(tmp_path_factory.mktemp("fuzzed") / "run")
    evaluation = stored_evaluation(run)
    [file] = write_parsing_records(run.parent / "records", [parsing_record_of(evaluation)])
    shown = {run / "result.json": [run, evaluation], run / "config.json": [run, evaluation], evaluation: [evaluation],
             file: [file]}  # fmt: skip
    return [(path, path.read_bytes(), arguments) for path, arguments in shown.items()]


@given(st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("number", range(4), ids=["result", "config", "evaluation", "record"])
def test_any_value_in_a_file_is_accepted_or_refused_in_one_line(valid, number, data):
    for path, content, _ in valid:
        path.write_bytes(content)
    path, content, arguments = valid[number]
    put(path, json.dumps(replace_somewhere(data.draw, json.loads(content))))
    for argument in arguments:
        try:
            found = [read_parsing_record(argument)]
            table4_parsing.check(found)
            cells = [cell for row in table(found) for cell in row]
            assert all(len(text.splitlines()) <= 1 for text in [*cells, *notes(found)])
        except StopError as error:
            assert len(str(error).splitlines()) == 1


def test_fields_of_leaves_out_what_belongs_to_one_machine():
    config = parsing_wsj.get_config()
    same = fields_of(config.to_dict())
    config.data.directory, config.data.archives, config.machine.remat = "/elsewhere", "/elsewhere", True
    config.train.accumulate = 4
    assert fields_of(config.to_dict()) == same
    config.optimizer.warmup_steps += 1
    assert fields_of(config.to_dict()) != same
