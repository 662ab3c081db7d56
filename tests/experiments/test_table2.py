import csv
import io

import pytest

from configs import base_ende, base_enfr, big_ende, big_enfr, quickstart
from experiments import paper
from experiments.records import write_records
from experiments.table2_translation import OURS, main, paper_cost
from experiments.tables import in_latex, power_of_ten
from tests.experiments.runs import record, run_folder

DAY = 86_400
K80, K40, M40, P100 = 2.8, 3.7, 6.0, 9.5
OF_PAPER = {row.model: row for row in paper.TABLE_2}


@pytest.mark.parametrize(
    ("model", "pair", "days", "devices", "tflops"),
    [
        ("Transformer (base model)", "ende", 0.5, 8, P100),
        ("Transformer (big)", "ende", 3.5, 8, P100),
        ("GNMT + RL", "ende", 1, 96, K80),
        ("GNMT + RL", "enfr", 6, 96, K80),
        ("ConvS2S", "ende", 18.5, 1, M40),
        ("ConvS2S", "enfr", 37, 8, M40),
        ("MoE", "ende", 1, 64, K40),
        ("MoE", "enfr", 6, 64, K40),
    ],
)
def test_the_cost_formula_gives_the_printed_costs(model, pair, days, devices, tflops):
    """Devices and days are from each system's paper."""
    printed = getattr(OF_PAPER[model], f"cost_{pair}")
    assert float(f"{paper_cost(days * DAY, devices, tflops):.1e}") == printed


def test_the_cost_formula_equals_a_calculation_by_hand():
    assert paper_cost(43_200, 8, 9.5) == pytest.approx(3.2832e18)
    assert paper_cost(302_400, 8, 9.5) == pytest.approx(2.29824e19)
    assert paper.SUSTAINED_TFLOPS == {"K80": K80, "K40": K40, "M40": M40, "P100": P100}


def as_csv(capsys, *arguments):
    """({model: cells}, notes)"""
    assert main([*map(str, arguments), "--format=csv"]) == 0
    out, notes = capsys.readouterr()
    header, *rows = csv.reader(io.StringIO(out))
    assert all(len(row) == len(header) for row in rows)
    return {row[0]: row[1:] for row in rows}, notes


def test_without_runs_the_table_has_the_rows_of_the_paper_and_empty_rows_of_ours(capsys):
    rows, notes = as_csv(capsys)
    assert len(rows) == 12 and notes == ""
    assert rows["ByteNet"] == ["23.75", "", "", "", "", ""]
    assert rows["Deep-Att + PosUnk"] == ["", "39.2", "", "1.0e20", "", ""]
    assert rows["GNMT + RL Ensemble"] == ["26.30", "41.16", "1.8e20", "1.1e21", "", ""]
    assert rows["Transformer (base model)"] == ["27.3", "38.1", "3.3e18", "3.3e18", "", ""]
    assert rows["Transformer (big)"] == ["28.4", "41.8", "2.3e19", "2.3e19", "", ""]
    assert [rows[name] for name in OURS.values()] == [[""] * 6] * 2


def test_each_run_fills_the_cell_of_its_model_and_language_pair(tmp_path, capsys):
    """From a run folder, a record and a folder of records."""
    runs = [
        run_folder(tmp_path / "one", base_ende.get_config(), test__paper_bleu=27.04, training_flops=int(9.5e17)),
        *write_records(tmp_path / "record", [record("two", big_enfr.get_config(), test__paper_bleu=41.0)]),
    ]
    write_records(tmp_path / "records", [record("three", base_enfr.get_config(), test__paper_bleu=38.0),
                                         record("four", big_ende.get_config(), test__paper_bleu=28.0)])  # fmt: skip
    rows, notes = as_csv(capsys, *runs, tmp_path / "records")
    assert rows[OURS["base"]] == ["27.04", "38.00", "", "", "9.5e17", ""]
    assert rows[OURS["big"]] == ["28.00", "41.00", "", "", "", ""]
    assert notes.count("seed 0; 3,003 sentences, tok:moses-de; 12.0 hours of training on 8 × NVIDIA H100") == 4


def test_capacity_times_time_needs_the_sustained_flops_of_the_device(tmp_path, capsys):
    ours = run_folder(tmp_path / "one")
    rows, _ = as_csv(capsys, ours, "--sustained_tflops=H100=60")
    assert rows[OURS["base"]][2] == f"{43_200 * 8 * 60e12:.1e}".replace("e+", "e") == "2.1e19"
    p100 = run_folder(tmp_path / "two", hardware="8 × Tesla P100-SXM2-16GB, Python 3.11.4")
    assert as_csv(capsys, p100)[0][OURS["base"]][2] == "3.3e18"
    assert as_csv(capsys, p100, "--sustained_tflops=P100=19")[0][OURS["base"]][2] == "6.6e18"
    k40m = run_folder(tmp_path / "k40m", hardware="8 × Tesla K40m, Python 3.11.4")
    assert as_csv(capsys, k40m)[0][OURS["base"]][2]
    for device in ("Quadro P1000", "Quadro M4000", "Quadro K4000", "Quadro GP100"):
        other = run_folder(tmp_path / device, hardware=f"1 × {device}, Python 3.11.4")
        assert as_csv(capsys, other)[0][OURS["base"]][2] == ""


def test_a_run_on_several_devices_costs_what_each_of_them_has_spent(tmp_path, capsys):
    """Of 43,200 s, 1,200 are of a version that did not note it: they are counted on `hardware`."""
    entry = {"commit": "0123", "jax": "0.10.2"}
    trained_on = [entry | {"hardware": "8 × Tesla P100, Python 3.11.4", "seconds": 30_000.0},
                  entry | {"hardware": "1 × Tesla K80, Python 3.11.4", "seconds": 12_000.0}]  # fmt: skip
    hardware = "2 × Tesla K40, Python 3.11.4"
    run = run_folder(tmp_path / "one", training_seconds=43_200.1, trained_on=trained_on, hardware=hardware)
    cost = 30_000 * 8 * 9.5e12 + 12_000 * 2.8e12 + 1_200 * 2 * 3.7e12
    assert paper_cost(43_200, 2, 3.7) < 0.9 * cost
    rows, notes = as_csv(capsys, run)
    assert rows[OURS["base"]][2] == f"{cost:.1e}".replace("e+", "e")
    times = "8.3 hours of training on 8 × Tesla P100, Python 3.11.4 and 3.3 hours on 1 × Tesla K80, Python 3.11.4 and "
    assert times + f"0.3 hours on {hardware}" in notes
    whole = [trained_on[0] | {"seconds": 43_200.0}]  # the evaluation alone ran elsewhere
    record_file = write_records(tmp_path, [record("two", trained_on=whole, hardware="1 × a laptop")])[0]
    assert as_csv(capsys, record_file)[0][OURS["base"]][2] == "3.3e18"


def test_shortened_runs_and_changed_fields_are_noted(tmp_path, capsys):
    config = base_ende.get_config()
    config.model.attention_bias = True
    config.data.vocab_size = 40960
    _, notes = as_csv(capsys, run_folder(tmp_path / "run", config, steps=1000))
    assert "1,000 steps, a shortened run: 100,000 are the whole" in notes
    assert "departs from its config in model.attention_bias=True, data.vocab_size=40960" in notes
    _, notes = as_csv(capsys, run_folder(tmp_path / "whole", averaged_steps=[1, 2, 3, 4, 5]))
    assert "100,000 steps; average of the last 5 checkpoints" in notes
    assert "shortened" not in notes and "departs" not in notes


def test_markdown_and_latex_show_the_same_numbers(tmp_path, capsys):
    run = str(run_folder(tmp_path / "run", training_flops=int(9.5e17)))
    assert main([run]) == 0
    out = capsys.readouterr().out
    assert power_of_ten(3.3e9, "markdown") == "3.3·10⁹" and power_of_ten(0.0, "markdown") == "0"
    assert "| GNMT + RL | 24.6 | 39.92 | 2.3·10¹⁹ | 1.4·10²⁰ |  |  |" in out
    assert f"| {OURS['base']} | 22.75 |  |  |  | 9.5·10¹⁷ |  |" in out and "base, EN-DE, ours: 100,000 steps" in out
    assert main([run, "--format=latex"]) == 0
    out = capsys.readouterr().out
    assert r"GNMT + RL & 24.6 & 39.92 & 2.3$\cdot 10^{19}$ & 1.4$\cdot 10^{20}$ &  &  \\" in out
    assert in_latex("9.5·10¹⁶, 10⁶") == r"9.5$\cdot 10^{16}$, 10$^6$" and in_latex("·10³\n_") == "$\\cdot 10^{3}$\n\\_"
    assert r"8 $\times$ NVIDIA" in out and "×" not in out and "_" not in out.replace(r"\_", "")


def test_runs_of_other_experiments_and_bad_arguments_are_refused(tmp_path, capsys):
    other = run_folder(tmp_path / "other", quickstart.get_config())
    one, two = run_folder(tmp_path / "one"), run_folder(tmp_path / "two", seed=1)
    german_to_english = base_ende.get_config()
    german_to_english.data.update(source_language="de", target_language="en")
    back = run_folder(tmp_path / "back", german_to_english)
    for arguments, message in [
        ([back], "run: back has data.corpus=wmt14_ende, data.source_language=de, data.target_language=en, "),
        ([other], "run: other has data.corpus=home_assistant"),
        ([one, two], "run: one (seed 0) and two (seed 1) are both base EN-DE; give one of them"),
        ([tmp_path / "absent"], "record: no file "),
        ([one, "--sustained_tflops=H100"], "--sustained_tflops=H100: must be NAME=VALUE"),
        ([one, "--sustained_tflops=H100=nan"], "must be NAME=VALUE with a value above 0"),
        ([one, "--sustained_tflops=H200=60"], "no run has a device of this name; their devices: NVIDIA H100 80GB HBM3"),
        ([run_folder(tmp_path / "odd", hardware="a laptop")], "must be 'COUNT × NAME'; got 'a laptop'"),
    ]:
        assert main(list(map(str, arguments))) == 2
        out, error = capsys.readouterr()
        assert out == "" and message in error and error.count("\n") == 1
