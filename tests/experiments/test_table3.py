import csv
import importlib
import io
import re

import pytest
from scipy.stats import spearmanr

from experiments import paper
from experiments.records import write_records
from experiments.table3_variations import main, spearman
from tests.experiments.runs import record, run_folder


def trained(row, perplexity=6.25, bleu=21.5, **changes):
    """A record of a row, trained as configs/table3 says."""
    config = importlib.import_module(f"configs.table3.{row}").get_config()
    whole = {"steps": config.train.train_steps} | changes
    made = record(row, config, dev__perplexity=perplexity, dev__sacrebleu=bleu, **whole)
    return made | {"train_steps_of_config": config.train.train_steps}


def table(capsys, *arguments):
    """({row: {column: cell}}, the notes) of the CSV"""
    assert main([*map(str, arguments), "--format=csv"]) == 0
    out, notes = capsys.readouterr()
    header, *rows = csv.reader(io.StringIO(out))
    assert len(set(header)) == len(header) and all(len(row) == len(header) for row in rows)
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}, notes


def records(tmp_path, *made):
    write_records(tmp_path / "records", made)
    return f"--records={tmp_path / 'records'}"


SHAPE = ("N", "d_model", "d_ff", "h", "d_k", "d_v", "P_drop", "ε_ls", "steps")
PRINTED = (*SHAPE, "PPL (dev)", "BLEU (dev)", "params ×10⁶")


@pytest.mark.parametrize(
    ("row", "cells"),
    [
        ("base", "6 512 2048 8 64 64 0.1 0.1 100000 4.92 25.8 65"),
        ("a_h1", "- - - 1 512 512 - - - 5.29 24.9 -"),
        ("b_dk32", "- - - - 32 - - - - 5.01 25.4 60"),
        ("c_n2", "2 - - - - - - - - 6.11 23.7 36"),
        ("c_d1024", "- 1024 - - 128 128 - - - 4.66 26.0 168"),
        ("c_ff4096", "- - 4096 - - - - - - 4.75 26.2 90"),
        ("d_drop00", "- - - - - - 0.0 - - 5.77 24.6 -"),
        ("d_ls02", "- - - - - - - 0.2 - 5.47 25.7 -"),
        ("e_learned_positions", "- - - - - - - - - 4.92 25.7 -"),
        ("big", "6 1024 4096 16 - - 0.3 - 300000 4.33 26.4 213"),
    ],
)
def test_the_cells_of_the_paper_and_empty_ones_beside_them(row, cells, capsys):
    rows, notes = table(capsys)
    assert [rows[row][column] or "-" for column in PRINTED] == cells.split()
    assert not any(rows[row][column] for column in rows[row] if "ours" in column)
    assert list(rows) == list(paper.TABLE_3) and "No records" in notes


def test_mean_and_deviation_over_the_seeds_by_hand(tmp_path, capsys):
    """Of 6, 7 and 11: mean 8, squares of the differences 4 + 1 + 9 = 14, over n − 1: √7."""
    made = [trained("a_h1", 5 + extra, 20 + extra, seed=extra) for extra in (1, 2, 6)]
    rows, notes = table(capsys, records(tmp_path, *made, trained("base", 6.0, 21.0)))
    assert rows["a_h1"]["PPL (dev) ours"] == "8.0000" and rows["a_h1"]["PPL (dev) ours deviation"] == f"{7**0.5:.4f}"
    assert rows["a_h1"]["BLEU (dev) ours"] == "23.0000" and rows["a_h1"]["BLEU (dev) ours deviation"] == f"{7**0.5:.4f}"
    assert rows["a_h1"]["seeds"] == "3" and rows["a_h1"]["params ×10⁶ ours"] == "63.0456"
    assert rows["base"]["PPL (dev) ours"] == "6.0000" and rows["base"]["PPL (dev) ours deviation"] == ""
    assert rows["c_n2"]["seeds"] == "0" and rows["c_n2"]["PPL (dev) ours"] == ""
    assert "± is the standard deviation" in notes and "Shortened" not in notes


def test_our_fields_are_shown_where_the_paper_shows_its_own_or_they_differ_from_our_base(tmp_path, capsys):
    def small(row):
        made = trained(row, steps=1000)
        made["config"] |= {"model.d_model": made["config"]["model.d_model"] // 4, "model.num_layers": 3}
        return made

    odd = small("d_drop02")
    odd["config"]["model.d_ff"] = 99
    rows, notes = table(capsys, records(tmp_path, small("base"), small("c_d256"), small("big"), odd))
    ours = {row: " ".join(rows[row][f"{column} ours"] or "-" for column in SHAPE) for row in rows}
    assert ours["base"] == "3 128 2048 8 64 64 0.1 0.1 1000"
    assert ours["c_d256"] == "- 64 - - 32 32 - - -"
    assert ours["big"] == "3 256 4096 16 - - 0.3 - 1000"
    assert ours["d_drop02"] == "- - 99 - - - 0.2 - -"
    assert "Shortened runs, 1,000 steps instead of 100,000: base, c_d256, d_drop02." in notes
    assert "Shortened runs, 1,000 steps instead of 300,000: big." in notes


def test_in_markdown_and_latex_ours_stand_beside_the_papers(tmp_path, capsys):
    made = [trained("base", 6.0 + seed, 21.0 + seed, seed=seed, steps=1000) for seed in (0, 1)]
    worse = trained("a_h4", 6.5, 20.125, steps=1000) | {"against_base": {"p_value": 0.0312}}
    folder = records(tmp_path, *made, worse)
    assert main([folder]) == 0
    out = capsys.readouterr().out
    assert "| base | 6 | 512 | 2048 | 8 | 64 | 64 | 0.1 | 0.1 | 100,000 → 1,000 | 4.92 | 6.50 ± 0.71 | 25.8 |" in out
    assert "| 25.8 | 21.50 ± 0.71 | 65 | 63.0 | 2 |  |" in out
    assert "| a_h4 |  |  |  | 4 | 128 | 128 |  |  |  | 5.00 | 6.50 | 25.5 | 20.12 |  | 63.0 | 1 | 0.031 |" in out
    assert "| c_n2 | 2 |  |  |  |  |  |  |  |  | 6.11 |  | 23.7 |  | 36 |  |  |  |" in out
    assert "nrefs:1|tok:13a" in out and "8 × NVIDIA H100 80GB HBM3" in out
    assert main([folder, "--format=latex"]) == 0
    out = capsys.readouterr().out
    assert r"base & 6 & 512 & 2048 & 8 & 64 & 64 & 0.1 & 0.1 & 100,000 $\to$ 1,000 & 4.92 & 6.50 $\pm$ 0.71" in out
    assert r"a\_h4 & " in out and not re.search(r"[→±×⁶ε]|(?<!\\)_", out)


def test_the_largest_p_value_of_the_seeds_is_shown(tmp_path, capsys):
    values = (0.25, 0.001, 0.125)
    made = [trained("c_n2", seed=n) | {"against_base": {"p_value": p}} for n, p in enumerate(values)]
    rows, notes = table(capsys, records(tmp_path, trained("base"), *made))
    assert (rows["c_n2"]["p"], rows["base"]["p"]) == ("0.2500", "") and "paired bootstrap" in notes


def test_a_sweep_is_read_as_its_records_are(tmp_path, capsys):
    references = ["the house stands by the river", "nobody knows who built it"] * 5
    worse = ["the house is by the river", "nobody knows who has it"] * 5
    for row, lines in (("base", worse), ("c_n8", references)):
        config = importlib.import_module(f"configs.table3.{row}").get_config()
        run_folder(tmp_path / f"sweep/{row}/seed_0", config, lines, references)
    rows, _ = table(capsys, f"--workdir={tmp_path / 'sweep'}")
    assert rows["c_n8"]["N ours"] == "8" and rows["base"]["seeds"] == "1"
    assert 0 < float(rows["c_n8"]["p"]) < 0.05 and rows["base"]["p"] == ""


def test_spearman_by_hand_and_by_scipy():
    """Ranks 1, 2, 3, 4 and 1, 3, 2, 4: 1 − 6·2 / (4·15) = 0.8. Equal values share their ranks."""
    assert spearman([1, 2, 3, 4], [10, 30, 20, 4000]) == pytest.approx(0.8)
    assert spearman([1, 2, 3], [9, 5, -1]) == pytest.approx(-1)
    printed = [row["bleu"] for row in paper.TABLE_3.values()]
    ours = [row["perplexity"] for row in paper.TABLE_3.values()]
    assert len(set(printed)) < len(printed)
    assert spearman(printed, ours) == pytest.approx(spearmanr(printed, ours).statistic)
    assert spearman([1, 2], [3, 3]) is None and spearman([1], [1]) is None and spearman([], []) is None


def test_the_correlation_is_that_of_the_rows_there_are(tmp_path, capsys):
    """Perplexities in the paper's order, BLEU in another: of 25.8, 24.9, 23.7, 26.4 and 2, 1, 3, 4 by rank."""
    made = [trained("base", 5.0, 12), trained("a_h1", 6.0, 11), trained("c_n2", 9.0, 13), trained("big", 4.0, 14)]
    _, notes = table(capsys, records(tmp_path, *made))
    assert "PPL (dev): 1.00 (4 rows)" in notes
    assert "BLEU (dev): 0.40 (4 rows)" in notes  # ranks 3, 2, 1, 4 and 2, 1, 3, 4: 1 − 6·(1 + 1 + 4 + 0)/60
    _, notes = table(capsys, records(tmp_path / "one", trained("base")))
    assert "PPL (dev): undefined (1 rows)" in notes


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_figure_has_a_name_and_a_point_for_each_row(suffix, tmp_path, capsys):
    made = [trained(row, 5 + n, 20 - n, seed=seed) for n, row in enumerate(("base", "a_h1", "big")) for seed in (0, 1)]
    path = tmp_path / f"figure.{suffix}"
    assert main([records(tmp_path, *made), f"--figure={path}"]) == 0
    if suffix == "png":
        assert path.read_bytes().startswith(b"\x89PNG")
    else:
        drawn = path.read_text()
        assert [drawn.count(f"<!-- {text} -->") for text in ("base", "a_h1", "big", "(A)", "c_n2")] == [2, 2, 2, 2, 0]


def test_names_lie_on_no_other_name(tmp_path):
    """All twenty rows at their own perplexities: only the box of a name, none of another's."""
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation, Text

    from experiments.table3_variations import _scatter, lines

    made = [trained(row, 2 * cells["perplexity"], cells["bleu"]) for row, cells in paper.TABLE_3.items()]
    figure = Figure(figsize=(7, 7))
    axes = figure.subplots()
    _scatter(axes, lines(made), "perplexity")
    figure.draw_without_rendering()
    names = [text for text in axes.texts if isinstance(text, Annotation)]
    assert [name.get_text() for name in names] == list(paper.TABLE_3)
    boxes = [Text.get_window_extent(name) for name in names]
    assert not [(a, b) for a in range(20) for b in range(a) if boxes[a].shrunk(0.95, 0.8).overlaps(boxes[b])]


def test_what_is_not_one_table_is_refused(tmp_path, capsys):
    other_steps = trained("a_h1", seed=1, steps=7)
    averaged = trained("a_h1", averaged_steps=[1, 2])
    write_records(tmp_path / "twice", [trained("a_h1")])
    (tmp_path / "twice/copy.json").write_text((tmp_path / "twice/a_h1_seed_0.json").read_text())
    for arguments, said in [
        ([records(tmp_path / "a", trained("a_h1"), other_steps)], "a_h1, seed 1 and seed 0 differ in config or steps"),
        ([records(tmp_path / "b", averaged)], "a_h1, seed 0 is an average of 2 checkpoints; Table 3 takes the last"),
        ([records(tmp_path / "c", record("a_h3"))], "row: unknown value 'a_h3'; did you mean 'a_h32'"),
        ([f"--records={tmp_path / 'twice'}"], "a_h1, seed 0 is there twice"),
        ([f"--records={tmp_path / 'absent'}"], "records: no folder"),
        ([f"--workdir={tmp_path / 'absent'}"], "workdir: no folder"),
        (["--figure=plot.pdf"], "--figure=plot.pdf: must end in .png or .svg"),
    ]:  # fmt: skip
        assert main(arguments) == 2
        out, error = capsys.readouterr()
        assert out == "" and said in error and error.count("\n") == 1
