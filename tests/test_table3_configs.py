"""The configs of Table 3: each is base with the changes of its row, and has the paper's number of parameters."""

import importlib
import re
from pathlib import Path

import pytest

from configs import base_ende, big_ende
from experiments import paper
from t2t_jax.model.transformer import TransformerConfig, num_parameters
from t2t_jax.training.checks import check
from tests.test_configs import flat

# §6.2: the changes of a row; its parameters with 40,960 pieces and attention biases, exactly, and the printed millions.
ROWS = {
    "base": ({}, 65_110_016, 65),
    "a_h1": ({"model.num_heads": 1, "model.d_k": 512, "model.d_v": 512}, 65_110_016, None),
    "a_h4": ({"model.num_heads": 4, "model.d_k": 128, "model.d_v": 128}, 65_110_016, None),
    "a_h16": ({"model.num_heads": 16, "model.d_k": 32, "model.d_v": 32}, 65_110_016, None),
    "a_h32": ({"model.num_heads": 32, "model.d_k": 16, "model.d_v": 16}, 65_110_016, None),
    "b_dk16": ({"model.d_k": 16}, 58_018_304, 58),
    "b_dk32": ({"model.d_k": 32}, 60_382_208, 60),
    "c_n2": ({"model.num_layers": 2}, 35_684_352, 36),
    "c_n4": ({"model.num_layers": 4}, 50_397_184, 50),
    "c_n8": ({"model.num_layers": 8}, 79_822_848, 80),
    "c_d256": ({"model.d_model": 256, "model.d_k": 32, "model.d_v": 32}, 27_848_704, 28),
    "c_d1024": ({"model.d_model": 1024, "model.d_k": 128, "model.d_v": 128}, 167_944_192, 168),
    "c_ff1024": ({"model.d_ff": 1024}, 52_514_816, 53),
    "c_ff4096": ({"model.d_ff": 4096}, 90_300_416, 90),
    "d_drop00": ({"model.dropout": 0.0}, 65_110_016, None),
    "d_drop02": ({"model.dropout": 0.2}, 65_110_016, None),
    "d_ls00": ({"train.label_smoothing": 0.0}, 65_110_016, None),
    "d_ls02": ({"train.label_smoothing": 0.2}, 65_110_016, None),
    "e_learned_positions": ({"model.positions": "learned"}, 65_372_160, None),
    "big": (
        {"model.d_model": 1024, "model.d_ff": 4096, "model.num_heads": 16, "model.dropout": 0.3,
         "train.train_steps": 300_000, "checkpoint.interval_steps": 600},
        218_300_416, 213,
    ),
}  # fmt: skip
BIG = "big"  # its 213 million imply a smaller vocabulary, which the paper does not mention


def module(row):
    return importlib.import_module(f"configs.table3.{row}")


def test_the_folder_has_exactly_the_rows_of_the_paper():
    files = {path.stem for path in (Path(__file__).parents[1] / "configs/table3").glob("*.py")} - {"__init__"}
    assert files == set(ROWS) == set(paper.TABLE_3) and len(files) == 20


@pytest.mark.parametrize("row", ROWS)
def test_a_row_differs_from_base_in_exactly_its_changes(row):
    base, config = flat(module("base").get_config()), module(row).get_config()
    assert config.is_locked
    check(config)
    assert flat(config).keys() == base.keys()
    assert {field: value for field, value in flat(config).items() if value != base[field]} == ROWS[row][0]


@pytest.mark.parametrize(("row", "of_table_2"), [("base", base_ende), ("big", big_ende)])
def test_base_and_big_are_the_configs_of_table_2_without_averaging(row, of_table_2):
    ours, theirs = flat(module(row).get_config()), flat(of_table_2.get_config())
    changes = {field: value for field, value in ours.items() if value != theirs[field]}
    assert changes == {"checkpoint.average_last": 1, "checkpoint.keep": 2}  # sixty runs of twenty would fill a terabyte


@pytest.mark.parametrize("row", ROWS)
def test_the_parameter_count_is_exact_and_rounds_to_the_printed_one(row):
    _, expected, printed = ROWS[row]
    fields = module(row).get_config().model.to_dict() | {"attention_bias": True}
    count = num_parameters(TransformerConfig(vocab_size=40960, **fields))
    assert count == expected
    if printed is not None and row != BIG:
        assert round(count / 1e6) == printed
    assert paper.TABLE_3[row].get("parameters") == printed


@pytest.mark.parametrize("row", ROWS)
def test_the_docstring_has_the_command_and_the_printed_numbers(row):
    text, printed = module(row).__doc__, paper.TABLE_3["base"] | paper.TABLE_3[row]
    assert f"python main.py --config=configs/table3/{row}.py --workdir=runs/table3/{row}" in text
    found = re.search(r"([\d,]+) steps.*perplexity\s([\d.]+) and BLEU\s([\d.]+);\s([\d.]+) million", text, re.DOTALL)
    numbers = (printed["train_steps"], printed["perplexity"], printed["bleu"], printed["parameters"])
    assert tuple(float(number.replace(",", "")) for number in found.groups()) == numbers


@pytest.mark.parametrize("row", ROWS)
def test_the_printed_settings_are_those_of_the_configs(row):
    """The paper leaves a cell empty where it equals base; big repeats N."""
    config = flat(module(row).get_config())
    fields = {"label_smoothing": "train.label_smoothing", "train_steps": "train.train_steps"}
    cells = paper.TABLE_3["base"] | paper.TABLE_3[row]
    for name in ("num_layers", "d_model", "d_ff", "num_heads", "d_k", "d_v", "dropout", *fields):
        assert cells[name] == config[fields.get(name, f"model.{name}")], name
