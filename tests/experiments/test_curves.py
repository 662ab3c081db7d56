"""Training curves: what is drawn is what was logged; runs that are young, resumed, torn, damaged or of another task."""

import importlib
import json
import math
import shutil

import numpy as np
import pytest

from configs import base_ende, quickstart
from experiments import curves, paper
from t2t_jax.run_folder import RunFolder

RATE = 3e-4


def logged(path, config=None, steps=(10, 20, 30), evaluations=(20,), metric="bleu", **more):
    """A run that has logged these steps; step n has loss 100/n, half of it as nll, and n·1000 tokens a second."""
    config = (config or quickstart.get_config()).to_dict()
    run = RunFolder.start(path, config)
    run.begin(config, {"vocab.model": b"pieces"}, 0)
    for step in steps:
        run.log(
            step, loss=100 / step, nll=50 / step, learning_rate=RATE, target_tokens_per_second=1000.0 * step, **more
        )
        if step in evaluations:
            run.log(step, dev_perplexity=200 / step, **{f"dev_{metric}": step / 2})
    run.close()
    return path


def drawn(*folders):
    """{panel's title: [(colour, marker, points), …]} of the figure of these runs."""
    runs = [curves.read(str(folder), name) for folder, name in zip(folders, curves.names(folders), strict=True)]
    *panels, legend = curves.figure(runs).axes
    lines = {
        axes.get_title(): [
            (line.get_color(), line.get_marker(), [tuple(point) for point in line.get_xydata().tolist()])
            for line in axes.get_lines()
        ]
        for axes in panels
        if axes.get_title()  # not a place that is left empty
    }
    return lines, [text.get_text() for text in legend.get_legend().get_texts()]


LOSS, PERPLEXITY = "label-smoothed loss, nats per token", "perplexity per token"


def test_the_numbers_drawn_are_the_numbers_logged(tmp_path):
    lines, legend = drawn(logged(tmp_path / "one"))
    assert list(lines) == [LOSS, PERPLEXITY, "BLEU, dev", "learning rate", "target tokens a second"]
    assert [points for _, _, points in lines[LOSS]] == [[(10, 10.0), (20, 5.0), (30, 100 / 30)]]
    training, dev = (points for _, _, points in lines[PERPLEXITY])
    assert training == [(10, math.exp(5)), (20, math.exp(2.5)), (30, math.exp(50 / 30))] and dev == [(20, 10.0)]
    assert [points for _, _, points in lines["BLEU, dev"]] == [[(20, 10.0)]]
    assert [points for _, _, points in lines["learning rate"]] == [[(10, RATE), (20, RATE), (30, RATE)]]
    assert lines["target tokens a second"][0][2] == [(10, 10_000), (20, 20_000), (30, 30_000)]
    assert legend == ["one", "in training, with dropout", "on dev"]


def test_each_run_has_a_colour_of_its_own_and_its_name_in_the_legend(tmp_path):
    folders = [logged(tmp_path / "sweep" / name / "seed_0", steps=steps) for name, steps in (("a", (5,)), ("b", (7,)))]
    lines, legend = drawn(*folders)
    assert legend[:2] == ["a/seed_0", "b/seed_0"]
    (a, _, of_a), (b, _, of_b) = lines[LOSS]
    assert a != b and (of_a, of_b) == ([(5, 20.0)], [(7, 100 / 7)])
    assert [(line[0], line[2][0][0]) for line in lines[PERPLEXITY]] == [(a, 5), (b, 7)]
    many = [logged(tmp_path / f"many/{n}", steps=(1,), evaluations=()) for n in range(23)]
    lines, legend = drawn(*many)
    assert len({colour for colour, _, _ in lines[LOSS]}) == 23 and len(legend) == 24


@pytest.mark.parametrize("count", [4, 30])
def test_the_legend_lies_within_the_figure_and_covers_no_panel(tmp_path, count):
    rows = [importlib.import_module(f"configs.table3.{row}").get_config() for row in ("base", "c_n2", "c_n4")]
    folders = [logged(tmp_path / f"row/seed_{n}", rows[n % 3]) for n in range(count)]
    made = curves.figure([curves.read(str(folder), folder.name) for folder in folders])
    made.draw_without_rendering()
    *panels, last = made.axes
    legend, whole = last.get_legend().get_window_extent(), made.bbox
    assert whole.x0 <= legend.x0 and legend.x1 <= whole.x1 and whole.y0 <= legend.y0 and legend.y1 <= whole.y1
    assert not any(legend.overlaps(axes.get_tightbbox()) for axes in panels if axes.get_title())
    assert all(text.get_size() == 9 for text in last.get_legend().get_texts())


@pytest.mark.parametrize(("row", "config"), [("base", "base_ende"), ("big", "big_ende"), ("c_n2", "table3.c_n2")])
def test_a_run_of_a_row_of_table_3_has_the_papers_values_beside_its_own(tmp_path, row, config):
    config = importlib.import_module(f"configs.{config}").get_config()
    config.train.dtype = "bfloat16"  # no matter
    lines, legend = drawn(logged(tmp_path / "run", config))
    printed, colour = paper.TABLE_3[row], lines[LOSS][0][0]
    for panel, field in ((PERPLEXITY, "perplexity"), ("BLEU, dev", "bleu")):
        of_paper = lines[panel][-1]
        assert of_paper[0] == colour and {y for _, y in of_paper[2]} == {printed[field]}
    assert f"paper, {row}, after {paper.train_steps(row):,} steps" in legend[-1] and str(printed["bleu"]) in legend[-1]
    assert len(lines[LOSS]) == 1


@pytest.mark.parametrize(
    "change", [("model", "norm", "pre"), ("train", "label_smoothing", 0.3), ("data", "corpus", "home_assistant"),
               ("data", "target_language", "fr")],
)  # fmt: skip
def test_another_model_or_corpus_has_none_of_the_papers_values(tmp_path, change):
    section, field, value = change
    config = base_ende.get_config()
    config[section][field] = value
    lines, legend = drawn(logged(tmp_path / "run", config))
    assert [len(lines[panel]) for panel in (PERPLEXITY, "BLEU, dev")] == [2, 1]
    assert not [text for text in legend if "paper" in text]


def test_runs_of_two_tasks_share_what_both_have(tmp_path):
    lines, _ = drawn(
        logged(tmp_path / "a"), logged(tmp_path / "b", metric="brackets"), logged(tmp_path / "c", metric="x")
    )
    assert list(lines)[2:5] == ["BLEU, dev", "F1, dev", "x, dev"]
    assert [len(lines[title]) for title in (LOSS, "BLEU, dev", "F1, dev", "x, dev")] == [3, 1, 1, 1]


def test_a_run_is_drawn_with_what_it_has(tmp_path):
    run = logged(tmp_path / "run", evaluations=())
    lines, legend = drawn(run)
    assert list(lines) == [LOSS, PERPLEXITY, "learning rate", "target tokens a second"] and "on dev" not in legend
    dev_only = RunFolder(logged(tmp_path / "dev", steps=()))
    dev_only.begin(quickstart.get_config().to_dict(), {}, 0)
    dev_only.log(7, dev_perplexity=3.0)
    lines, legend = drawn(dev_only.path)
    assert lines[LOSS] == [] and lines[PERPLEXITY][0][2] == [(7, 3.0)] and legend == ["dev", "on dev"]


def test_a_resumed_run_is_one_curve(tmp_path):
    path = logged(tmp_path / "run")
    config = quickstart.get_config().to_dict()
    run = RunFolder.start(path, config)
    run.begin(config, {"vocab.model": b"pieces"}, 20)
    run.log(30, loss=1.0, nll=1.0)
    run.close()
    assert drawn(path)[0][LOSS][0][2] == [(10, 10.0), (20, 5.0), (30, 1.0)]


def test_a_step_that_is_logged_twice_counts_as_it_was_logged_last(tmp_path):
    """Earlier versions could leave such logs."""
    path = logged(tmp_path / "run")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "loss": 2.5}\n')
    assert drawn(path)[0][LOSS][0][2] == [(10, 10.0), (20, 2.5), (30, 100 / 30)]


def test_skipped_updates_are_marked_where_they_happened(tmp_path, capsys):
    path = logged(tmp_path / "run", steps=())
    run = RunFolder(path)
    run.begin(quickstart.get_config().to_dict(), {}, 0)
    for step, skipped in ((10, 0), (20, 2), (30, 2), (40, 3)):
        run.log(step, loss=float(step), skipped_steps=skipped)
    lines, legend = drawn(path)
    assert [(marker, points) for _, marker, points in lines[LOSS]][1] == ("x", [(20, 20.0), (40, 40.0)])
    assert "updates skipped before this entry" in legend
    assert curves.main([str(path), f"--output={tmp_path}/a.png"]) == 0
    assert "3 updates skipped" in capsys.readouterr().out


def test_a_torn_last_line_is_left_out_with_a_warning_and_the_run_stays_as_it_is(tmp_path, capsys, caplog):
    path = logged(tmp_path / "run")
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 40, "lo')
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    held = RunFolder.start(path, quickstart.get_config().to_dict())  # as a run that is being trained
    assert curves.main([str(path), f"--output={tmp_path}/a.png"]) == 0
    held.close()
    assert "unfinished last line of 16 bytes" in caplog.text
    assert "run: up to step 30: loss 3.333, dev perplexity 10.00, dev BLEU 10" in capsys.readouterr().out
    assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("value", ["NaN", "Infinity", "null", '"5"', "[1]", "1" + "0" * 400, "true"])
def test_values_that_are_no_finite_numbers_are_counted_and_not_drawn(tmp_path, capsys, value):
    path = logged(tmp_path / "run", evaluations=())
    with (path / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 40, "loss": {value}, "nll": {value}}}\n{{"step": 50, "loss": 7}}\n')
    lines, _ = drawn(path)
    assert lines[LOSS][0][2] == [(10, 10.0), (20, 5.0), (30, 100 / 30), (50, 7)]
    assert curves.main([str(path), f"--output={tmp_path}/a.svg"]) == 0
    assert "2 values are no finite numbers: not drawn" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:constrained_layout not applied")  # the labels leave no room
def test_extreme_numbers_are_drawn(tmp_path):
    path = logged(tmp_path / "run", steps=())
    lines = [
        {"step": 0, "loss": -1e299, "nll": 599.0, "dev_perplexity": 1e299, "dev_bleu": 0},
        {"step": 10**300, "loss": 1e299, "nll": -1e299, "dev_perplexity": -5, "learning_rate": 0},
        {"step": -3, "nll": 1e4, "target_tokens_per_second": 1e-300},
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert curves.main([str(path), f"--output={tmp_path}/a.png"]) == 0


def test_names_of_runs_are_shown_as_they_are(tmp_path):
    names = [r"$\frac$", "_hidden", "a\nb", "long" * 20]
    folders = [logged(tmp_path / name, steps=(1,)) for name in names]
    assert curves.main([*map(str, folders), f"--output={tmp_path}/a.svg"]) == 0
    text = (tmp_path / "a.svg").read_text()
    assert all(f"<!-- {name} -->" in text for name in (r"$\frac$", "_hidden", "a·b", "…" + ("long" * 20)[-39:]))


def test_a_young_run_is_named_and_the_others_are_drawn(tmp_path, capsys):
    young, old = logged(tmp_path / "young", steps=()), logged(tmp_path / "old")
    (young / "metrics.jsonl").unlink()
    assert curves.main([str(young), str(old), f"--output={tmp_path}/a.png"]) == 0
    out, errors = capsys.readouterr()
    assert errors == f"{young}: nothing logged yet, so it is not drawn\n" and "old: up to step 30" in out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_bad_input_gives_one_line_and_writes_nothing(tmp_path, capsys):
    run, young, damaged = (logged(tmp_path / name, steps=(1,)) for name in ("run", "young", "damaged"))
    (young / "metrics.jsonl").write_text("")
    (damaged / "metrics.jsonl").write_text('{"step": 1}\n{"ste\n')
    shutil.copytree(run, tmp_path / "no_config").joinpath("config.json").unlink()
    shutil.copytree(run, tmp_path / "sweep/base/seed_0")
    output = f"--output={tmp_path}/new.png"
    for arguments, code, message in [
        ([tmp_path / "absent", output], 2, f"no folder {tmp_path}/absent"),
        ([tmp_path / "no_config", output], 2, "no_config is not a run folder"),
        ([tmp_path / "sweep", output], 2, f"is a sweep; give its runs, {tmp_path}/sweep/*/seed_*"),
        ([run, run, output], 2, f"run: {run} is given twice"),
        ([run, f"{run}/../run", output], 2, "is given twice"),
        ([young, output], 2, "nothing logged yet"),
        ([damaged, output], 4, "metrics.jsonl, line 2: not a record"),
        ([run, f"--output={tmp_path}/new.pdf"], 2, "must end in .png or .svg"),
        ([run, f"--output={tmp_path}/none/new.png"], 2, "no folder"),
    ]:
        assert curves.main([str(argument) for argument in arguments]) == code
        out, errors = capsys.readouterr()
        assert out == "" and message in errors and errors.count("\n") == 1 and errors.startswith("error: ")
    with pytest.raises(SystemExit, match="2"):
        curves.main([])
    assert not list(tmp_path.glob("*.png"))


def test_perplexities_of_the_first_steps_do_not_squeeze_those_on_dev(tmp_path):
    run = curves.read(str(logged(tmp_path / "run", steps=(5, 500, 1000), evaluations=(500, 1000))), "run")
    axes = next(axes for axes in curves.figure([run]).axes if axes.get_title() == PERPLEXITY)
    assert np.isclose(axes.get_ylim()[1], 5 * 200 / 500) and axes.get_yscale() == "log"
