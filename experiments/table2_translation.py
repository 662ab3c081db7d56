"""Table 2: translation quality and training cost, the paper's rows and ours below them.

    python -m experiments.table2_translation [RUN_OR_RECORD ...] [--format=markdown|latex|csv]
        [--sustained_tflops=NAME=VALUE ...]

Each RUN_OR_RECORD is a run folder, the record of a run, or a folder of records. The runs must have been trained with
configs/{base,big}_{ende,enfr}.py; fields that were changed are listed under the table. BLEU is computed as in the paper
(`paper_bleu`).

There are two estimates of training cost, which differ several times over; compare each only with itself. "Capacity ×
time" is the paper's: training time × number of devices × the FLOP/s that one device sustains, known for K80, K40, M40
and P100 (footnote 5); of a run that was resumed on other devices, the sum over all. For others,
--sustained_tflops=H100=60 sets the sustained TFLOP/s of every device with H100 in its name. "Counted" is the number
of floating-point operations in the matrix products, if the run counted them.
"""

import contextlib
import math
import re
import sys
from collections.abc import Sequence
from typing import Any

from configs import base_ende, base_enfr, big_ende, big_enfr
from experiments import paper
from experiments.conditions import conditions
from experiments.records import Record, fields_of, load, need_scores, training_seconds
from experiments.tables import FORMATS, power_of_ten, print_notes, render
from t2t_jax.argument_parser import argument_parser
from t2t_jax.errors import InputError, exit_code_of

HEADER = ("model", "BLEU EN-DE", "BLEU EN-FR", "FLOPs EN-DE, capacity × time", "FLOPs EN-FR, capacity × time",
          "FLOPs EN-DE, counted", "FLOPs EN-FR, counted")  # fmt: skip
OURS = {"base": "Transformer (base model), ours", "big": "Transformer (big), ours"}
EXPERIMENTS = {
    ("base", "EN-DE"): base_ende, ("base", "EN-FR"): base_enfr, ("big", "EN-DE"): big_ende, ("big", "EN-FR"): big_enfr
}  # fmt: skip
EXPERIMENT_FIELDS = ("data.corpus", "data.source_language", "data.target_language", "model.num_layers", "model.d_model",
                     "model.d_ff", "model.num_heads", "model.d_k", "model.d_v")  # fmt: skip

Cell = tuple[str, str]  # model, language pair


def paper_cost(seconds: float, devices: int, tflops: float) -> float:
    """The paper's estimate of floating-point operations; `tflops` is what one device sustains (§6.1, footnote 5)."""
    return seconds * devices * tflops * 1e12


def cost_of(record: Record, sustained: dict[str, float]) -> float | None:
    """`paper_cost` of a run, summed over the hardware it was trained on.

    None for a device that is none of those in `sustained`.
    """
    costs = []
    for hardware, seconds in training_seconds(record).items():
        devices, device_name = devices_of(record, hardware)
        tflops = next((value for name, value in sustained.items() if _is_device(name, device_name)), None)
        costs.append(None if tflops is None else paper_cost(seconds, devices, tflops))
    return None if None in costs else sum(costs)


def _is_device(name: str, device_name: str) -> bool:
    """Whether a device is of the kind `name`: P100 is "Tesla P100-SXM2", not "Quadro P1000"; K40 is "Tesla K40m"."""
    return bool(re.search(rf"(?<!\w){re.escape(name)}(?!\d)", device_name))


def devices_of(record: Record, hardware: str) -> tuple[int, str]:
    """Number and name of the devices in `hardware`, which a run was trained on: '8 × NAME, Python 3.11.4'."""
    found = re.fullmatch(r"(\d{1,9}) × (.*?)(, Python .*)?", hardware)
    if not found:
        raise InputError(f"record: hardware of {record['row']} must be 'COUNT × NAME'; got {hardware!r}")
    return int(found[1]), found[2]


def cell_of(record: Record) -> Cell:
    """Model and language pair of a run; refuses runs of other experiments."""
    for cell, experiment in EXPERIMENTS.items():
        expected = fields_of(experiment.get_config().to_dict())
        if all(record["config"].get(field) == expected[field] for field in EXPERIMENT_FIELDS):
            return cell
    found = ", ".join(f"{field}={record['config'].get(field)}" for field in EXPERIMENT_FIELDS)
    raise InputError(f"run: {record['row']} has {found}; Table 2 takes runs of configs/{{base,big}}_{{ende,enfr}}.py")


def by_cell(records: Sequence[Record]) -> dict[Cell, Record]:
    """The runs by model and language pair; refuses two of one cell."""
    runs: dict[Cell, Record] = {}
    for record in records:
        cell = cell_of(record)
        need_scores(record, "test", ("paper_bleu", "paper_signature", "sentences"))
        if cell in runs:
            names = " and ".join(f"{r['row']} (seed {r['seed']})" for r in (runs[cell], record))
            raise InputError(f"run: {names} are both {' '.join(cell)}; give one of them")
        runs[cell] = record
    return runs


def table(runs: dict[Cell, Record], sustained: dict[str, float], format: str) -> list[list[str]]:
    """All rows, each cell formatted."""
    rows = [
        [row.model, row.bleu_ende or "", row.bleu_enfr or "",
         power_of_ten(row.cost_ende, format), power_of_ten(row.cost_enfr, format), "", ""]
        for row in paper.TABLE_2
    ]  # fmt: skip
    for model, name in OURS.items():
        ours = [runs.get((model, pair)) for pair in ("EN-DE", "EN-FR")]
        bleu = ["" if run is None else f"{run['test']['paper_bleu']:.2f}" for run in ours]
        costs = [None if run is None else cost_of(run, sustained) for run in ours]
        counts = [None if run is None else run.get("training_flops") for run in ours]
        rows.append([name, *bleu, *(power_of_ten(cost, format) for cost in costs + counts)])
    return rows


def notes(runs: dict[Cell, Record]) -> list[str]:
    """The conditions of each of our runs."""
    return [f"{model}, {pair}, ours: {_conditions((model, pair), record)}" for (model, pair), record in runs.items()]


def _conditions(cell: Cell, record: Record) -> str:
    config, test = EXPERIMENTS[cell].get_config(), record["test"]
    measured = [f"{test['sentences']:,} sentences, {test['paper_signature']}"]
    return conditions(record, config.train.train_steps, fields_of(config.to_dict()), measured)


def sustained_tflops(given: Sequence[str], records: Sequence[Record]) -> dict[str, float]:
    """{device name: sustained TFLOP/s}: the given NAME=VALUE pairs first, then the paper's."""
    device_names = {devices_of(record, hardware)[1] for record in records for hardware in training_seconds(record)}
    chosen = {}
    for text in given:
        name, value = _named_value(text)
        if not any(_is_device(name, device_name) for device_name in device_names):
            known = ", ".join(sorted(device_names)) or "none"
            raise InputError(f"--sustained_tflops={text}: no run has a device of this name; their devices: {known}")
        chosen[name] = value
    return chosen | {name: value for name, value in paper.SUSTAINED_TFLOPS.items() if name not in chosen}


def _named_value(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    with contextlib.suppress(ValueError):
        if name and 0 < float(value) < math.inf:
            return name, float(value)
    raise InputError(f"--sustained_tflops={text}: must be NAME=VALUE with a value above 0, such as H100=60")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser("experiments.table2_translation", __doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN_OR_RECORD")
    parser.add_argument("--format", choices=FORMATS, default="markdown")
    parser.add_argument("--sustained_tflops", action="append", default=[], metavar="NAME=VALUE")
    return exit_code_of(lambda: show(parser.parse_args(argv)))


def show(options: Any) -> None:
    """Prints the table to standard output and the conditions under it; with CSV, these go to standard error."""
    records = [record for path in options.runs for record in load(path)]
    runs = by_cell(records)
    sustained = sustained_tflops(options.sustained_tflops, records)
    print(render(HEADER, table(runs, sustained, options.format), options.format))
    print_notes(notes(runs), options.format)


if __name__ == "__main__":
    sys.exit(main())
