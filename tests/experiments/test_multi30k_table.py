import csv
import io
import re

import pytest

from configs import base_ende, multi30k_ende, multi30k_enfr
from experiments.multi30k_table import main
from experiments.records import write_records
from tests.experiments.runs import record


def run(row, config, seed=0, bleu=(40.0, 33.0, 29.0), **changes):
    """A record whose lower-cased BLEU of the three test sets is given."""
    scores = [{"lowercased_bleu": value, "lowercased_signature": "case:lc", "sacrebleu": value - 1, "signature": "13a",
               "sentences": 1000} for value in bleu]  # fmt: skip
    others = {"test_2017_flickr": scores[1], "test_2017_mscoco": scores[2]}
    return record(row, config, seed=seed, **changes) | {"test": scores[0], "other_tests": others}


def as_csv(capsys, *arguments):
    assert main([*map(str, arguments), "--format=csv"]) == 0
    out, notes = capsys.readouterr()
    return list(csv.reader(io.StringIO(out)))[1:], notes


PUBLISHED = ["Transformer-tiny, text only (Revisit-MMT)", "EN-DE", "", "", "41.02", "", "", ""]


def test_without_runs_there_is_the_published_row(capsys):
    assert as_csv(capsys) == ([PUBLISHED], "")


def test_seeds_of_a_row_are_one_line_with_mean_and_deviation(tmp_path, capsys):
    """By hand: the mean of 40, 41 and 42 is 41, their standard deviation 1; two records of one row, two languages."""
    config, cased = multi30k_ende.get_config(), multi30k_ende.get_config()
    cased.data.cleaning.lowercase, cased.data.segmentations = False, 20
    whole, continued = {"steps": 8000}, {"steps": 4000, "init_from": "runs/tiny, checkpoint 8000"}
    seeds = [run("tiny", config, seed, (40.0 + seed, 33.0, 29.0), parameters=2_600_000, **whole) for seed in (2, 0, 1)]
    paths = write_records(tmp_path, seeds)
    other = write_records(tmp_path / "more", [run("own", cased, parameters=2_600_000, **continued)])
    french = write_records(tmp_path / "fr", [run("tiny", multi30k_enfr.get_config(), parameters=2_600_000, **whole)])
    rows, notes = as_csv(capsys, *paths, *other, *french)
    assert rows == [
        PUBLISHED,
        ["tiny, ours", "EN-DE", "3", "2.6", "41.00 ± 1.00", "33.00 ± 0.00", "29.00 ± 0.00", ""],
        ["own, ours", "EN-DE", "1", "2.6", "40.00", "33.00", "29.00", "39.00"],
        ["tiny, ours", "EN-FR", "1", "2.6", "40.00", "33.00", "29.00", ""],
    ]
    lines = [line for line in notes.splitlines() if line]
    assert len(lines) == 5 and [f"seed {n}" in line for n, line in enumerate(lines[:3])] == [True] * 3
    assert ": 8,000 steps; the" in lines[0]
    assert ": 4,000 steps, a shortened run: 8,000 are the whole; from the weights of runs/tiny, checkpoint" in lines[3]
    departures = "departs from configs/multi30k_ende.py in data.cleaning.lowercase=False, data.segmentations=20"
    assert departures in lines[3] and "departs" not in lines[0] + lines[4] and "case:lc" in lines[0]


def test_rows_say_how_they_were_searched_and_seeds_that_were_searched_differently_are_refused(tmp_path, capsys):
    """Earlier versions permitted empty translations, which cost weak models some BLEU."""
    earlier, later = (run("tiny", multi30k_ende.get_config(), seed) for seed in (0, 1))
    later["test"]["min_length"] = 2
    paths = write_records(tmp_path, [earlier, later])
    for path, searched in zip(paths, ("min_length 0", "min_length 2"), strict=True):
        assert f"1,000 sentences, {searched}, case:lc" in as_csv(capsys, path)[1]
    assert main(list(map(str, paths))) == 2
    assert "seed 1 and seed 0 differ in config or steps: min_length of test is 2 and 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "code", "error"),
    [
        (
            run("one", base_ende.get_config()),
            2,
            "one has data.corpus=wmt14_ende; the table takes runs on multi30k_ende",
        ),
        (record("one", multi30k_ende.get_config()), 4, "one, seed 0: test has no lowercased_bleu"),
    ],
)
def test_runs_that_it_cannot_show_are_refused(tmp_path, capsys, found, code, error):
    assert main(list(map(str, write_records(tmp_path, [found])))) == code
    out, errors = capsys.readouterr()
    assert out == "" and error in errors and len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("scores", "error"),
    [
        ({"lowercased_signature": None}, "lowercased_signature is None; it must be a line of text"),
        ({"lowercased_bleu": "41.2"}, "lowercased_bleu is '41.2'; it must be a number"),
        ({"sentences": ...}, "one, seed 0: test has no sentences"),
    ],
)
def test_damaged_and_incomplete_scores_are_one_line(tmp_path, capsys, scores, error):
    found = run("one", multi30k_ende.get_config())
    found["test"] = {name: value for name, value in (found["test"] | scores).items() if value is not ...}
    assert main(list(map(str, write_records(tmp_path, [found])))) == 4
    out, errors = capsys.readouterr()
    assert out == "" and re.search(error, errors) and len(errors.splitlines()) == 1


def test_the_other_test_sets_are_checked_too(tmp_path, capsys):
    found = run("one", multi30k_ende.get_config())
    for scores in ({"lowercased_bleu": None}, [], {}):
        found["other_tests"] = found["other_tests"] | {"test_2017_flickr": scores}
        assert main(list(map(str, write_records(tmp_path, [found])))) == 4
        assert "test_2017_flickr" in capsys.readouterr().err
    del found["other_tests"]
    assert main(list(map(str, write_records(tmp_path, [found])))) == 4
    assert "test_2017_flickr has no lowercased_bleu" in capsys.readouterr().err


def test_a_run_that_is_given_twice_is_refused(tmp_path, capsys):
    (path,) = write_records(tmp_path, [run("one", multi30k_ende.get_config())])
    assert main([str(path), str(path)]) == 2
    assert "one, seed 0 is there twice" in capsys.readouterr().err
