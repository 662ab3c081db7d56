import csv
import hashlib
import importlib
import io
import re

import numpy as np
import pytest
from scipy.stats import spearmanr

from configs import base_ende
from experiments import paper, table3_figure
from experiments.figure_file import figure_file
from experiments.records import write_records
from experiments.sweep.plan import CONFIGS, parse_config
from experiments.table3_figure import label_points, scatter
from experiments.table3_rows import holm, make_table, spearman, spearman_interval
from experiments.table3_variations import main
from t2t_jax.errors import InputError
from tests.experiments.runs import record, run_folder


def trained(row, perplexity=6.25, bleu=21.5, **changes):
    """A record of a row of configs/table3."""
    config = importlib.import_module(f"configs.table3.{row}").get_config()
    changes = {"steps": config.train.train_steps} | changes
    return record(row, config, dev__perplexity=perplexity, dev__sacrebleu=bleu, **changes)


def table(capsys, *arguments):
    """({row: {column: cell}}, notes), from the CSV output."""
    assert main([*map(str, arguments), "--format=csv"]) == 0
    out, notes = capsys.readouterr()
    header, *rows = csv.reader(io.StringIO(out))
    assert len(set(header)) == len(header) and all(len(row) == len(header) for row in rows)
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}, notes


def records(tmp_path, *made):
    write_records(tmp_path / "records", made)
    return f"--records={tmp_path / 'records'}"


TABLE_3 = str(CONFIGS / "table3")
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
def test_without_records_the_cells_of_the_paper_are_shown_and_ours_are_empty(row, cells, capsys):
    rows, notes = table(capsys)
    assert [rows[row][column] or "-" for column in PRINTED] == cells.split()
    assert not any(rows[row][column] for column in rows[row] if "ours" in column)
    assert list(rows) == list(paper.TABLE_3) and "No records" in notes


def test_mean_and_deviation_over_the_seeds_equal_a_calculation_by_hand(tmp_path, capsys):
    """Of 6, 7 and 11: mean 8, squares of the differences 4 + 1 + 9 = 14, over n − 1: √7."""
    made = [trained("a_h1", 5 + extra, 20 + extra, seed=extra) for extra in (1, 2, 6)]
    rows, notes = table(capsys, records(tmp_path, *made, trained("base", 6.0, 21.0)))
    assert rows["a_h1"]["PPL (dev) ours"] == "8.0000" and rows["a_h1"]["PPL (dev) ours deviation"] == f"{7**0.5:.4f}"
    assert rows["a_h1"]["BLEU (dev) ours"] == "23.0000" and rows["a_h1"]["BLEU (dev) ours deviation"] == f"{7**0.5:.4f}"
    assert rows["a_h1"]["seeds"] == "3" and rows["a_h1"]["params ×10⁶ ours"] == "63.0456"
    assert rows["base"]["PPL (dev) ours"] == "6.0000" and rows["base"]["PPL (dev) ours deviation"] == ""
    assert rows["c_n2"]["seeds"] == "0" and rows["c_n2"]["PPL (dev) ours"] == ""
    assert "± is the standard deviation" in notes and "Shortened" not in notes


def test_our_settings_are_shown_where_the_paper_prints_one_or_ours_differs_from_our_base(tmp_path, capsys):
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


def test_markdown_and_latex_show_the_values_of_the_paper_and_ours_side_by_side(tmp_path, capsys):
    made = [trained("base", 6.0 + seed, 21.0 + seed, seed=seed, steps=1000) for seed in (0, 1)]
    worse = trained("a_h4", 6.5, 20.125, steps=1000) | {"against_base": {"difference": -1.4, "p_value": 0.0156}}
    folder = records(tmp_path, *made, worse)
    assert main([folder]) == 0
    out = capsys.readouterr().out
    assert "| base | 6 | 512 | 2048 | 8 | 64 | 64 | 0.1 | 0.1 | 100,000 → 1,000 | 4.92 | 6.50 ± 0.71 | 25.8 |" in out
    assert "| 25.8 | 21.50 ± 0.71 | 65 | 63.0 | 2 |  |  |" in out
    assert (
        "| a_h4 |  |  |  | 4 | 128 | 128 |  |  |  | 5.00 | 6.50 | 25.5 | 20.12 |  | 63.0 | 1 | 0.031 | 0.031 * |" in out
    )
    assert "| c_n2 | 2 |  |  |  |  |  |  |  |  | 6.11 |  | 23.7 |  | 36 |  |  |  |  |" in out
    assert "nrefs:1|tok:13a" in out and "8 × NVIDIA H100 80GB HBM3" in out
    assert main([folder, "--format=latex"]) == 0
    out = capsys.readouterr().out
    assert r"base & 6 & 512 & 2048 & 8 & 64 & 64 & 0.1 & 0.1 & 100,000 $\to$ 1,000 & 4.92 & 6.50 $\pm$ 0.71" in out
    assert r"a\_h4 & " in out and not re.search(r"[→±×⁶ε]|(?<!\\)_", out)


def against_base(**found):
    """One record of c_n2 for each difference and one-tailed p."""
    pairs = zip(found["differences"], found["p_values"], strict=True)
    compared = [{"difference": difference, "p_value": p} for difference, p in pairs]
    return [trained("c_n2", seed=n) | {"against_base": each} for n, each in enumerate(compared)]


def test_of_several_seeds_twice_the_largest_one_tailed_p_value_is_shown(tmp_path, capsys):
    made = against_base(differences=(-2.5, -3.0, -1.0), p_values=(0.01, 0.001, 0.0625))
    rows, notes = table(capsys, records(tmp_path, trained("base"), *made))
    assert (rows["c_n2"]["p"], rows["base"]["p"]) == ("0.1250", "") and "of several seeds the largest" in notes
    assert "corrected for 1 comparison;" in notes and "No p" not in notes


def test_a_p_value_is_not_printed_as_zero(tmp_path, capsys):
    made = against_base(differences=(-2.5,), p_values=(0.0001,))
    assert main([records(tmp_path, trained("base"), *made)]) == 0
    assert "| 1 | < 0.001 | < 0.001 * |" in capsys.readouterr().out


def test_a_row_with_more_seeds_than_the_base_has_no_p_value_yet(tmp_path, capsys):
    """It would be that of fewer seeds than the mean beside it."""
    made = against_base(differences=(-2.5, -3.0), p_values=(0.01, 0.001))
    del made[1]["against_base"]
    rows, notes = table(capsys, records(tmp_path, trained("base"), *made))
    assert (rows["c_n2"]["p"], rows["c_n2"]["p (Holm)"]) == ("", "")
    assert "No p of c_n2: not every seed is compared with base of the same seed." in notes


@pytest.mark.parametrize("differences", [(2.31, -2.24), (2.31, 0.0)])
def test_seeds_that_differ_from_base_in_opposite_directions_are_not_significant(differences, tmp_path, capsys):
    rows, notes = table(
        capsys, records(tmp_path, trained("base"), *against_base(differences=differences, p_values=(0.001, 0.001)))
    )
    assert (rows["c_n2"]["p"], rows["c_n2"]["p (Holm)"]) == ("1.0000", "1.0000")
    assert "* is significance at 5%: 0 of 1." in notes


def test_the_pieces_are_those_of_the_vocabulary_whatever_the_config_asks_for(tmp_path, capsys):
    """With data.vocabulary=FILE, data.vocab_size has no effect. Records of earlier versions have that alone."""
    _, notes = table(capsys, records(tmp_path, trained("base", vocab_size=303), trained("a_h1")))
    assert "wmt14_ende en-de, 303 pieces" in notes and "wmt14_ende en-de, 37,000 pieces" in notes


def test_holms_correction_equals_a_calculation_by_hand():
    """Of four: the smallest times 4, the next times 3, times 2, times 1; none below one before it, none above 1."""
    assert holm([0.03, 0.005, 0.9, 0.02]) == pytest.approx([0.06, 0.02, 0.9, 0.06])
    assert holm([0.5, 0.5]) == [1.0, 1.0] and holm([]) == []


def test_significance_is_marked_by_holms_correction_for_all_rows(tmp_path, capsys):
    """One-tailed 0.01 and 0.02 are 0.02 and 0.04 in both directions, and 0.04 and 0.04 corrected; with a third, not."""

    def compared(row, p):
        return trained(row, 6.5, 20.0) | {"against_base": {"difference": -1.0, "p_value": p}}

    made = [trained("base"), compared("a_h1", 0.01), compared("c_n2", 0.02)]
    assert main([records(tmp_path, *made)]) == 0
    out = capsys.readouterr().out
    assert "| 0.020 | 0.040 * |" in out and "| 0.040 | 0.040 * |" in out and "* is significance at 5%: 2 of 2." in out
    assert main([records(tmp_path, *made, compared("a_h4", 0.4))]) == 0
    out = capsys.readouterr().out
    assert "| 0.020 | 0.060 |" in out and "| 0.800 | 0.800 |" in out and "corrected for 3 comparisons" in out
    assert "* is significance at 5%: 0 of 3." in out


def test_a_sweep_is_read_like_its_records(tmp_path, capsys):
    references = ["the house stands by the river", "nobody knows who built it"] * 5
    worse = ["the house is by the river", "nobody knows who has it"] * 5
    for row, lines in (("base", worse), ("c_n8", references)):
        config = importlib.import_module(f"configs.table3.{row}").get_config()
        run_folder(tmp_path / f"sweep/{row}/seed_0", config, lines, references)
    rows, _ = table(capsys, f"--workdir={tmp_path / 'sweep'}")
    assert rows["c_n8"]["N ours"] == "8" and rows["base"]["seeds"] == "1"
    assert 0 < float(rows["c_n8"]["p"]) < 0.05 and rows["base"]["p"] == ""


def test_rows_as_different_as_can_be_are_significant_among_the_papers_nineteen(tmp_path, capsys):
    references = ["the house stands by the river", "nobody knows who built it"]
    run_folder(tmp_path / "sweep/base/seed_0", None, ["a b c d e f", "g h i j k"], references)
    run_folder(tmp_path / "sweep/a_h1/seed_0", None, references, references)
    rows, _ = table(capsys, f"--workdir={tmp_path / 'sweep'}")
    assert 19 * float(rows["a_h1"]["p"]) < 0.01


def test_spearman_equals_a_calculation_by_hand_and_scipy():
    """Ranks 1, 2, 3, 4 and 1, 3, 2, 4: 1 − 6·2 / (4·15) = 0.8. Ties get their average rank."""
    assert spearman([1, 2, 3, 4], [10, 30, 20, 4000]) == pytest.approx(0.8)
    assert spearman([1, 2, 3], [9, 5, -1]) == pytest.approx(-1)
    printed = [row["bleu"] for row in paper.TABLE_3.values()]
    ours = [row["perplexity"] for row in paper.TABLE_3.values()]
    assert len(set(printed)) < len(printed)
    assert spearman(printed, ours) == pytest.approx(spearmanr(printed, ours).statistic)
    assert spearman([1, 2, 3], [3, 3, 3]) is None
    assert spearman([1, 2], [3, 4]) is None and spearman([1], [1]) is None and spearman([], []) is None


def test_the_interval_of_the_correlation_is_that_of_resampled_rows():
    """Of equal orders it is one point; of noise it contains 0; the share of resamples within it is 95 %."""
    order = list(range(20))
    assert spearman_interval(order, order) == pytest.approx((1, 1)) and spearman_interval(order[:9], order[:9]) is None
    assert spearman_interval(order, [1] * 20) is None
    noise = np.random.default_rng(0).permutation(20)
    low, high = spearman_interval(order, noise)
    assert low < spearman(order, noise) < high and low < 0 < high
    draws = np.random.default_rng(1).choice(20, size=(500, 20))
    within = [low <= spearmanr(draw, noise[draw]).statistic <= high for draw in draws]
    assert 0.92 < np.mean(within) < 0.98


def test_the_correlation_is_computed_from_the_rows_with_records(tmp_path, capsys):
    """Perplexities in the paper's order, BLEU in another: of 25.8, 24.9, 23.7, 26.4 and 2, 1, 3, 4 by rank."""
    made = [trained("base", 5.0, 12), trained("a_h1", 6.0, 11), trained("c_n2", 9.0, 13), trained("big", 4.0, 14)]
    _, notes = table(capsys, records(tmp_path, *made))
    assert "PPL (dev): 1.00 (4 rows)" in notes
    assert "BLEU (dev): 0.40 (4 rows)" in notes  # ranks 3, 2, 1, 4 and 2, 1, 3, 4: 1 − 6·(1 + 1 + 4 + 0)/60
    _, notes = table(capsys, records(tmp_path / "one", trained("base")))
    assert "PPL (dev): not defined below three rows (1 row)" in notes


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_figure_has_a_labelled_point_for_each_row(suffix, tmp_path, capsys):
    made = [trained(row, 5 + n, 20 - n, seed=seed) for n, row in enumerate(("base", "a_h1", "big")) for seed in (0, 1)]
    path = tmp_path / f"figure.{suffix}"
    assert main([records(tmp_path, *made), f"--figure={path}"]) == 0
    if suffix == "png":
        assert path.read_bytes().startswith(b"\x89PNG")
    else:
        drawn = path.read_text()
        assert [drawn.count(f"<!-- {text} -->") for text in ("base", "a_h1", "big", "(A)", "c_n2")] == [2, 2, 2, 2, 0]


def test_paths_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    """The shell leaves ~ as it is after `--records=`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    records(tmp_path, trained("base"))
    assert main(["--records=~/records", "--figure=~/figure.svg"]) == 0
    assert (tmp_path / "figure.svg").stat().st_size
    with pytest.raises(InputError, match="--figure: '~nobody-here/f.svg': no home directory is known"):
        figure_file("--figure", "~nobody-here/f.svg")


def test_labels_in_the_figure_do_not_overlap(tmp_path):
    """With all twenty rows at distinct perplexities."""
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation, Text

    made = [trained(row, 2 * cells["perplexity"], cells["bleu"]) for row, cells in paper.TABLE_3.items()]
    figure = Figure(figsize=(7, 7))
    axes = figure.subplots()
    found = make_table(made, TABLE_3)
    scatter(axes, found, "perplexity"), label_points(axes, found, "perplexity")
    figure.draw_without_rendering()
    names = [text for text in axes.texts if isinstance(text, Annotation)]
    assert [name.get_text() for name in names] == list(paper.TABLE_3)
    boxes = [Text.get_window_extent(name) for name in names]
    assert not [(a, b) for a in range(20) for b in range(a) if boxes[a].shrunk(0.95, 0.8).overlaps(boxes[b])]


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """The panels of the figure that `table3_variations --figure` draws: perplexity and BLEU."""

    def draw(*flags):
        figures = []
        with monkeypatch.context() as patch:
            patch.setattr(table3_figure, "save", lambda figure, *rest, **options: figures.append(figure))
            assert main([*flags, f"--figure={tmp_path}/figure.svg"]) == 0
        figures[0].draw_without_rendering()
        return figures[0].axes

    return draw


MINIATURE = f"--records={CONFIGS.parent / 'experiments/results/table3_miniature'}"


def test_the_labels_of_the_figure_stay_within_its_axes(drawn):
    from matplotlib.text import Annotation, Text

    for axes in drawn(MINIATURE):
        names = [text for text in axes.texts if isinstance(text, Annotation)]
        assert len(names) == 20
        frame = axes.get_window_extent()
        for name in names:
            box = Text.get_window_extent(name)
            assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1, name


def test_two_lines_through_base_compare_the_rows_with_it_and_perplexity_is_logarithmic(tmp_path, drawn):
    perplexity, bleu = drawn(records(tmp_path, trained("base", 5.0, 22), trained("a_h1", 6.0, 21)))
    for axes, printed, ours in ((perplexity, 4.92, 5.0), (bleu, 25.8, 22)):
        vertical, horizontal = axes.lines[-2:]
        assert [*vertical.get_xdata()] == [printed] * 2 and [*horizontal.get_ydata()] == [ours] * 2
    assert [axes.get_yscale() for axes in (perplexity, bleu)] == ["log", "linear"]
    for axes in drawn(records(tmp_path / "without", trained("a_h1", 6.0, 21))):
        assert len(axes.lines) == 1 and "base" not in axes.get_title()


def test_error_bars_are_drawn_for_rows_of_several_seeds_alone(tmp_path, drawn):
    made = [trained("base", 5.0, 22), *(trained("a_h1", 6.0 + seed, 21 + seed, seed=seed) for seed in (0, 1))]
    for axes in drawn(records(tmp_path, *made)):
        assert [bars.get_label() for bars in axes.containers] == ["(A)"]
    assert not any(axes.containers for axes in drawn(records(tmp_path / "one", *made[:2])))


def test_the_legend_has_the_groups_in_the_order_of_the_table_with_error_bars_or_without(tmp_path, drawn):
    made = [trained("base", 5.0, 22), *(trained("a_h1", 6.0 + seed, 21 + seed, seed=seed) for seed in (0, 1))]
    for axes in drawn(records(tmp_path, *made, trained("b_dk16", 7.0, 20))):
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["base, big", "(A)", "(B)"]


def test_rows_whose_bleu_is_of_different_kinds_are_named(tmp_path, capsys):
    of_kind = lambda row, case: record(row, dev__signature=f"case:{case}|tok:13a|version:2.6.0")
    rows = records(tmp_path, of_kind("base", "mixed"), of_kind("one", "lc"), of_kind("two", "mixed"))
    note = "BLEU of different kinds is not comparable: case:mixed|tok:13a: base, two; case:lc|tok:13a: one.\n"
    assert note in table(capsys, rows)[1]
    assert "kinds" not in table(capsys, records(tmp_path / "same", of_kind("base", "lc"), of_kind("one", "lc")))[1]


def test_rows_whose_translations_had_different_minimum_lengths_are_named(tmp_path, capsys):
    rows = records(tmp_path, record("base"), record("one", dev__min_length=2), record("two", dev__min_length=0))
    note = "BLEU of different min_length is not comparable: 0: base, two; 2: one.\n"  # records that lack it: 0
    assert note in table(capsys, rows)[1]
    of_one = records(tmp_path / "same", record("base", dev__min_length=2), record("one", dev__min_length=2))
    assert "min_length" not in table(capsys, of_one)[1]


def test_rows_that_were_trained_from_the_weights_of_a_run_are_named(tmp_path, capsys):
    tuned = [record("tuned", seed=seed, init_from=f"runs/{seed}, checkpoint 6") for seed in range(2)]
    notes = table(capsys, records(tmp_path, record("base"), *tuned))[1]
    assert "weights of another run: tuned: runs/0, checkpoint 6; tuned: runs/1, checkpoint 6.\n" in notes
    assert "weights" not in table(capsys, records(tmp_path / "base", record("base")))[1]


def test_records_that_do_not_make_one_table_are_refused(tmp_path, capsys):
    other_steps = trained("a_h1", seed=1, steps=7)
    averaged = trained("a_h1", averaged_steps=[1, 2])
    run_folder(tmp_path / "run")
    older, *newer = [trained("a_h1", seed=seed) for seed in range(3)]
    del older["config"]["model.activation"]  # as in records of earlier versions
    newer[1]["config"]["model.activation"] = "gelu"
    own = lambda seed, **changes: record("own", seed=seed, **changes)
    cased, uncased = (f"nrefs:1|case:{case}|tok:13a|version:2.6.0" for case in ("mixed", "lc"))
    write_records(tmp_path / "twice", [trained("a_h1")])
    (tmp_path / "twice/copy.json").write_text((tmp_path / "twice/a_h1_seed_0.json").read_text())
    for arguments, message in [
        ([records(tmp_path / "a", trained("a_h1"), other_steps)], "a_h1, seed 1 and seed 0 differ in config or steps"),
        ([records(tmp_path / "d", older, *newer)],
         "seed 2 and seed 1 differ in config or steps: model.activation is 'gelu' and 'relu'; one row"),
        ([records(tmp_path / "e", own(0), own(1, averaged_steps=[1, 2]))],
         "own, seed 1 and seed 0 differ in config or steps: averaged checkpoints is 2 and 1; one row"),
        ([records(tmp_path / "f", own(0), own(1, init_from="runs/a, checkpoint 6"))],
         "own, seed 1 and seed 0 differ in config or steps: first weights is 'those of a run' and 'random'; one row"),
        ([records(tmp_path / "g", own(0), own(1, dev__sentences=4))],
         "own, seed 1 and seed 0 differ in config or steps: sentences of dev is 4 and 3; one row"),
        ([records(tmp_path / "i", own(0, training_pairs=300), own(1, training_pairs=9000))],
         "own, seed 1 and seed 0 differ in config or steps: training_pairs is 9000 and 300; one row"),
        ([records(tmp_path / "h", own(0, dev__signature=cased), own(1, dev__signature=uncased))],
         f"records: the sacreBLEU of own, seed 0 is {cased}, that of seed 1 {uncased}; one row has one of these"),
        ([records(tmp_path / "b", averaged)], "a_h1, seed 0 is an average of 2 checkpoints; Table 3 takes the last"),
        ([records(tmp_path / "c", trained("a_h1"), trained("base", dev__headline="f1", dev__f1=0.5))],
         "records: the headline scores are f1 and sacrebleu; give records of one task"),
        ([f"--records={tmp_path / 'twice'}"], "a_h1, seed 0 is there twice"),
        ([f"--records={tmp_path / 'absent'}"], "records: no folder"),
        ([f"--records={tmp_path}"], "; give a folder that experiments.records wrote"),
        ([f"--workdir={tmp_path / 'absent'}"], "workdir: no folder"),
        ([f"--workdir={tmp_path / 'run'}"], f"workdir: no finished trial, ROW/seed_N, in {tmp_path / 'run'}; give"),
        ([f"--configs={tmp_path / 'absent'}"], "absent: not a folder of configs"),
        (["--figure=plot.pdf"], "--figure=plot.pdf: must end in .png or .svg"),
    ]:  # fmt: skip
        assert main(arguments) == 2
        out, error = capsys.readouterr()
        assert out == "" and message in error and error.count("\n") == 1


# --- Any folder of ablations -------------------------------------------------------------------------------

ABLATION = """
from configs import base_ende

def get_config():
    config = base_ende.get_config()
    config.checkpoint.average_last = 1
    {change}
    return config
"""


@pytest.fixture
def ablations(tmp_path):
    """A folder of configs: base, one of the paper's rows and two rows of its own."""
    folder = tmp_path / "ablations"
    folder.mkdir()
    changes = {"base": "", "f_window": "config.model.attention_window = 8", "c_n2": "config.model.num_layers = 2",
               "f_short": "config.train.train_steps = 5_000"}  # fmt: skip
    for row, change in changes.items():
        (folder / f"{row}.py").write_text(ABLATION.format(change=change))
    return f"--configs={folder}"


def own_row(row, **changes):
    """A record of a row that the paper does not have."""
    made = trained("base", 6.5, 20.0)
    return made | {"row": row, "config": made["config"] | changes}


GOLDEN = {  # SHA-256 of standard output
    (False, "markdown"): "055cddf4da23171bf55a50feccde872e2ad875a2ebe4524c4563b3e4d0ac9e1e",
    (False, "latex"): "c745fc1b5f14d49fd6d4f4becf442f922938df260429835c6b3594f3dab2602d",
    (False, "csv"): "742e94e6c06825ca8f360a198f34447ad17733db722be53deba9c206f0f1f942",
    (True, "markdown"): "8fbb12c9193d0f619152e491853eb44ffa10e1807851bdf59024ea50167bc079",
    (True, "latex"): "38e7023a9e05cea439babd119aa5a135f4425b30d44595cd527424f211bb6966",
    (True, "csv"): "38794e6ff1c40bef7e58bd3d7748a6fff92800ca9eb461a03a297020fa129b60",
}


@pytest.mark.parametrize(("with_records", "format"), GOLDEN)
def test_the_table_of_the_rows_of_the_paper_is_unchanged_to_the_byte(with_records, format, capsys):
    """A change of the output on purpose changes the README's table too; then put the new digests here."""
    assert main([*([MINIATURE] if with_records else []), f"--format={format}"]) == 0
    assert hashlib.sha256(capsys.readouterr().out.encode()).hexdigest() == GOLDEN[with_records, format]


def test_rows_of_a_folder_show_their_settings_and_only_rows_of_the_paper_its_numbers(ablations, capsys):
    rows, notes = table(capsys, ablations)
    assert list(rows) == ["base", "c_n2", "f_short", "f_window"]
    assert rows["c_n2"]["PPL (dev)"] == "6.11" and rows["f_short"]["PPL (dev)"] == ""
    assert (rows["f_short"]["steps"], rows["f_short"]["steps ours"], rows["f_short"]["N ours"]) == ("", "5000", "")
    assert not any(cell for column, cell in rows["f_window"].items() if column not in ("row", "seeds", "other"))
    assert {row: cells["other"] for row, cells in rows.items() if cells["other"]} == {
        "f_window": "model.attention_window=8"
    }
    assert "No records" in notes


def test_settings_without_a_column_are_shown_of_all_rows_and_of_rows_that_are_more_than_an_ablation(tmp_path, capsys):
    made = [trained("base"), trained("c_n2"), trained("e_learned_positions"), trained("d_ls00")]
    for row in made:
        row["config"] |= {"optimizer.warmup_steps": 400}
    made[3]["config"] |= {"train.dtype": "bfloat16", "data.tokens_per_batch": 64}
    rows, notes = table(capsys, records(tmp_path, *made))
    assert "All rows: optimizer.warmup_steps=400." in notes.splitlines()
    assert {row: cells["other"] for row, cells in rows.items() if cells["other"]} == {
        "d_ls00": "data.tokens_per_batch=64, train.dtype=bfloat16"
    }


def test_the_options_of_an_entry_of_one_s_own_are_settings_though_base_has_none(tmp_path, capsys):
    def with_option(row, seed=0):
        config = base_ende.get_config()
        config.optimizer.options = {"weight_decay": 0.1}
        return record(row, config, seed=seed)

    rows, _ = table(capsys, records(tmp_path, record("base"), with_option("decay")))
    assert rows["decay"]["other"] == "optimizer.options.weight_decay=0.1"
    rows, _ = table(capsys, records(tmp_path / "other", with_option("base"), record("none")))
    assert rows["none"]["other"] == "optimizer.options.weight_decay=None"
    rows, _ = table(capsys, records(tmp_path / "no_base", record("none"), with_option("decay")))
    assert rows["decay"]["other"] == "optimizer.options.weight_decay=0.1"
    for folder, seeds in (
        ("first", [record("own"), with_option("own", 1)]),
        ("last", [with_option("own"), record("own", seed=1)]),
    ):
        assert main([records(tmp_path / folder, *seeds)]) == 2
        assert "differ in config or steps: optimizer.options.weight_decay is" in capsys.readouterr().err


def test_records_of_rows_that_the_paper_does_not_have_are_rows_of_their_own(tmp_path, ablations, capsys):
    made = [trained("base", 5.0, 22.0), own_row("f_window", **{"model.attention_window": 8}),
            own_row("g_deep", **{"model.num_layers": 12})]  # fmt: skip
    folder = records(tmp_path, *made)
    rows, _ = table(capsys, folder)
    assert list(rows) == [*paper.TABLE_3, "f_window", "g_deep"]
    assert (rows["g_deep"]["N ours"], rows["g_deep"]["PPL (dev)"], rows["g_deep"]["PPL (dev) ours"]) == (
        "12", "", "6.5000"
    )  # fmt: skip
    assert rows["f_window"]["other"] == "model.attention_window=8" and rows["g_deep"]["other"] == ""
    rows, _ = table(capsys, folder, ablations)
    assert list(rows) == ["base", "c_n2", "f_short", "f_window", "g_deep"]
    assert main([folder]) == 0
    assert (
        "| g_deep | 12 |  |  |  |  |  |  |  |  |  | 6.50 |  | 20.00 |  | 63.0 | 1 |  |  |  |" in capsys.readouterr().out
    )


@pytest.fixture
def own_sweep(tmp_path):
    """A folder of configs of another experiment, with rows named as the paper's, and the records of its runs."""
    folder, made = tmp_path / "own", []
    folder.mkdir()
    changes = {"base": "", "c_n2": "config.model.num_layers = 1",
               "lion": "config.optimizer.name, config.model.attention = 'lion', 'sigmoid'"}  # fmt: skip
    for row, change in changes.items():
        path = folder / f"{row}.py"
        path.write_text(ABLATION.format(change=f"config.model.d_model = 32\n    {change}"))
        made.append(record(row, parse_config(path), steps=100_000))
        made[-1]["against_base"] = {"row": "lion", "difference": 1.5, "p_value": 0.0625}
    del made[-1]["against_base"]
    return f"--configs={folder}", records(tmp_path, *made)


def test_rows_of_another_experiment_show_no_number_of_the_paper_whatever_their_names(own_sweep, capsys):
    rows, notes = table(capsys, *own_sweep)
    assert list(rows) == ["base", "c_n2", "lion"]
    assert not rows["base"].keys() & set(PRINTED)
    assert rows["c_n2"]["N ours"] == "1" and rows["lion"]["other"] == "model.attention=sigmoid, optimizer.name=lion"
    assert "Spearman" not in notes and "paper" not in notes and "Shortened" not in notes
    assert main([*own_sweep, "--figure=figure.svg"]) == 2
    out, error = capsys.readouterr()
    assert out == "" and "--figure compares with the paper: there is no record of a row of configs/table3" in error


def test_rows_that_were_trained_on_more_pairs_of_equally_named_files_say_so(tmp_path, capsys):
    """As of --grid data.train=small/train,large/train."""
    made = [record("base", training_pairs=300), record("large", training_pairs=9000), record("older")]
    rows, _ = table(capsys, records(tmp_path, *made))
    assert [rows[row]["other"] for row in ("base", "large", "older")] == ["", "training_pairs=9000", ""]
    rows, _ = table(capsys, records(tmp_path / "same", record("base", training_pairs=300), made[0] | {"row": "same"}))
    assert "other" not in rows["same"]
    seeds = [made[2], made[1] | {"row": "older", "seed": 1}]
    for others in (seeds, [*seeds, made[0]]):  # also where the first seed has no number, without and with the base
        small = made[0] | {"row": "small"}
        rows, _ = table(capsys, records(tmp_path / f"{len(others)}_older", record("a_first"), small, *others))
        assert rows["older"]["other"] == "training_pairs=9000"


def test_rows_of_no_config_of_the_folder_are_a_table_of_their_own(tmp_path, capsys):
    """As of a grid, `--rows=base --grid …`, without the paper's rows and columns; a small model has its size."""
    made = [own_row("base_d_ff_8", **{"model.d_ff": 8}), own_row("base_d_ff_16", **{"model.d_ff": 16})]
    made[0]["parameters"] = 10_345
    folder = records(tmp_path, *made)
    rows, _ = table(capsys, folder)
    assert list(rows) == ["base_d_ff_16", "base_d_ff_8"] and not rows["base_d_ff_8"].keys() & set(PRINTED)
    assert main([folder]) == 0
    out = capsys.readouterr().out
    assert "| steps | PPL (dev) | sacreBLEU (dev) | params ×10⁶ | seeds |" in out
    assert "| 100,000 | 6.50 | 20.00 | 63.0 | 1 |" in out and "| 6.50 | 20.00 | 0.010 | 1 |" in out


def test_averages_of_checkpoints_are_compared_with_one_another_and_not_with_the_paper(tmp_path, capsys):
    """Every config outside configs/table3 averages, also one that is otherwise a row of the paper."""
    folder = tmp_path / "averaging"
    folder.mkdir()
    for row, change in {"base": "", "f_window": "config.model.attention_window = 8"}.items():
        average = "config.checkpoint.average_last = 4"
        (folder / f"{row}.py").write_text(ABLATION.format(change=f"{change}\n    {average}"))
    four = {"averaged_steps": [97_000, 98_000, 99_000, 100_000]}
    made = [trained("base", **four), own_row("f_window", **{"model.attention_window": 8}) | four]
    rows, notes = table(capsys, records(tmp_path, *made), f"--configs={folder}")
    assert list(rows) == ["base", "f_window"] and not rows["base"].get("BLEU (dev)")
    assert rows["f_window"]["BLEU (dev) ours"] == "20.0000" and "average of the last 4 checkpoints" in notes


def test_the_row_that_the_others_are_compared_with_may_have_any_name(own_sweep, capsys):
    rows, notes = table(capsys, *own_sweep, "--base=lion")
    assert (rows["lion"]["N ours"], rows["base"]["N ours"], rows["c_n2"]["N ours"]) == ("6", "", "1")
    assert [rows[row]["p"] for row in ("base", "c_n2", "lion")] == ["0.1250", "0.1250", ""]
    assert rows["base"]["other"] == "model.attention=dot_product, optimizer.name=adam" and rows["lion"]["other"] == ""
    assert "paired bootstrap against lion of the same seed." in notes
    rows, notes = table(capsys, *own_sweep)
    assert not any(rows[row]["p"] for row in rows) and "bootstrap" not in notes  # those p are against another row
    assert main([*own_sweep, "--base=loin"]) == 2
    assert "--base: unknown value 'loin'; did you mean 'lion'?" in capsys.readouterr().err


def test_without_a_base_a_line_says_so_and_the_rows_show_in_what_they_differ(own_sweep, tmp_path, capsys):
    (tmp_path / "records/base_seed_0.json").unlink()
    rows, notes = table(capsys, *own_sweep)
    assert "No records of a row base, so no differences from it and no p; --base=ROW names another row." in notes
    assert rows["c_n2"]["other"] == "model.attention=dot_product, optimizer.name=adam"
    assert rows["lion"]["other"] == "model.attention=sigmoid, optimizer.name=lion"
    assert rows["lion"]["d_model ours"] == rows["c_n2"]["d_model ours"] == "32"


def test_the_correlation_and_the_figure_leave_out_rows_that_the_paper_does_not_have(tmp_path, capsys):
    made = [trained("base", 5.0, 12), trained("a_h1", 6.0, 11), trained("c_n2", 9.0, 10), own_row("f_window")]
    folder, path = records(tmp_path, *made), tmp_path / "figure.svg"
    assert main([folder, f"--figure={path}"]) == 0
    assert "PPL (dev): 1.00 (3 of 4 rows: those that the paper has)" in capsys.readouterr().out
    drawn = path.read_text()
    assert "<!-- a_h1 -->" in drawn and "f_window" not in drawn
    assert "3 of 4 rows: those that the paper has" in drawn


def test_another_headline_than_bleu_is_shown_without_the_numbers_of_the_paper(tmp_path, ablations, capsys):
    made = [
        trained("base", 1.5, dev__headline="f1", dev__f1=0.9125),
        trained("a_h1", 1.25, dev__headline="f1", dev__f1=0.5),
    ]
    for each in made:
        del each["dev"]["sacrebleu"], each["dev"]["signature"]
    rows, notes = table(capsys, records(tmp_path, *made), ablations)
    assert rows["base"]["f1 (dev) ours"] == "0.9125" and not rows["base"].keys() & set(PRINTED)
    assert (rows["base"]["N ours"], rows["a_h1"]["h ours"]) == ("6", "1")
    assert "Headline: f1." in notes and "Spearman" not in notes
    assert main([records(tmp_path, *made), ablations]) == 0
    out = capsys.readouterr().out
    assert "| PPL (dev) | f1 (dev) | params ×10⁶ | seeds |" in out and "| 1.50 | 0.9125 | 63.0 | 1 |" in out
