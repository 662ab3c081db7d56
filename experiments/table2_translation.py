"""Table 2: translation quality and training cost, the paper's rows and under them ours.

    python -m experiments.table2_translation [RUN_OR_RECORD ...] [--format=markdown|latex|csv]
        [--sustained_tflops=NAME=VALUE ...]

Each RUN_OR_RECORD is a run folder, the record of one, or a folder of records; it must have been trained with
configs/{base,big}_{ende,enfr}.py, where it departs from them it says so. BLEU is the paper's (`paper_bleu`).

Two costs, which differ several times over and are never compared. "Capacity × time" is the paper's: the seconds, times
the devices, times what one of them sustains, known for K80, K40, M40 and P100 (footnote 5) and to be given for others:
--sustained_tflops=H100=60 stands for every device with H100 in its name. "Counted" are the operations of the matrix
products that were done, if the run counted them.
"""

import argparse
import contextlib
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs import base_ende, base_enfr, big_ende, big_enfr
from experiments import paper
from experiments.records import Record, fields_of, need_scores, read_record, read_records, record_of
from experiments.tables import FORMATS, power_of_ten, print_notes, render
from t2t_jax.errors import InputError, exit_code_of

HEADER = ("model", "BLEU EN-DE", "BLEU EN-FR", "FLOPs EN-DE, capacity × time", "FLOPs EN-FR, capacity × time",
          "FLOPs EN-DE, counted", "FLOPs EN-FR, counted")  # fmt: skip
OURS = {"base": "Transformer (base model), ours", "big": "Transformer (big), ours"}
EXPERIMENTS = {
    ("base", "EN-DE"): base_ende, ("base", "EN-FR"): base_enfr, ("big", "EN-DE"): big_ende, ("big", "EN-FR"): big_enfr
}  # fmt: skip
IDENTITY = ("data.corpus", "model.num_layers", "model.d_model", "model.d_ff", "model.num_heads", "model.d_k",
            "model.d_v")  # fmt: skip

Cell = tuple[str, str]  # a model and a language pair


def paper_cost(seconds: float, devices: int, tflops: float) -> float:
    """The paper's estimate of floating-point operations: `tflops` is what one device sustains (§6.1, footnote 5)."""
    return seconds * devices * tflops * 1e12


def cost_of(record: Record, sustained: dict[str, float]) -> float | None:
    """`paper_cost` of a run on devices of a kind whose name holds one of those in `sustained`; None on others."""
    devices, kind = devices_of(record)
    tflops = next((value for name, value in sustained.items() if name in kind), None)
    return None if tflops is None else paper_cost(record["training_seconds"], devices, tflops)


def devices_of(record: Record) -> tuple[int, str]:
    """How many devices of what kind a run had: '8 × NAME, Python 3.11.4'."""
    found = re.fullmatch(r"(\d{1,9}) × (.*?)(, Python .*)?", record["hardware"])
    if not found:
        raise InputError(f"record: hardware of {record['row']} must be 'COUNT × NAME'; got {record['hardware']!r}")
    return int(found[1]), found[2]


def load(path: str) -> list[Record]:
    """The records that an argument stands for."""
    if not Path(path).is_dir():
        return [read_record(path)]
    return [record_of(path)] if (Path(path) / "config.json").is_file() else read_records(path)


def cell_of(record: Record) -> Cell:
    """The model and the pair of a run; refuses runs of other experiments."""
    for cell, experiment in EXPERIMENTS.items():
        expected = fields_of(experiment.get_config().to_dict())
        if all(record["config"].get(field) == expected[field] for field in IDENTITY):
            return cell
    found = ", ".join(f"{field}={record['config'].get(field)}" for field in IDENTITY)
    raise InputError(f"run: {record['row']} has {found}; Table 2 takes runs of configs/{{base,big}}_{{ende,enfr}}.py")


def by_cell(records: Sequence[Record]) -> dict[Cell, Record]:
    """Each run in its place."""
    places: dict[Cell, Record] = {}
    for record in records:
        cell = cell_of(record)
        need_scores(record, "test", ("paper_bleu", "paper_signature", "sentences"))
        if cell in places:
            names = " and ".join(f"{r['row']} (seed {r['seed']})" for r in (places[cell], record))
            raise InputError(f"run: {names} are both {' '.join(cell)}; give one of them")
        places[cell] = record
    return places


def table(places: dict[Cell, Record], sustained: dict[str, float], format: str) -> list[list[str]]:
    """All rows, each cell as it is shown."""
    rows = [
        [row.model, row.bleu_ende or "", row.bleu_enfr or "",
         power_of_ten(row.cost_ende, format), power_of_ten(row.cost_enfr, format), "", ""]
        for row in paper.TABLE_2
    ]  # fmt: skip
    for model, name in OURS.items():
        runs = [places.get((model, pair)) for pair in ("EN-DE", "EN-FR")]
        bleu = ["" if run is None else f"{run['test']['paper_bleu']:.2f}" for run in runs]
        costs = [None if run is None else cost_of(run, sustained) for run in runs]
        counts = [None if run is None else run.get("training_flops") for run in runs]
        rows.append([name, *bleu, *(power_of_ten(cost, format) for cost in costs + counts)])
    return rows


def notes(places: dict[Cell, Record]) -> list[str]:
    """The conditions of each of our numbers."""
    return [f"{model}, {pair}, ours: {_conditions((model, pair), record)}" for (model, pair), record in places.items()]


def _conditions(cell: Cell, record: Record) -> str:
    config = EXPERIMENTS[cell].get_config()
    full, steps = config.train.train_steps, record["steps"]
    short = f", a shortened run: {full:,} are the whole" if steps < full else ""
    expected = fields_of(config.to_dict())
    changed = [f"{name}={value}" for name, value in record["config"].items() if value != expected.get(name)]
    test = record["test"]
    return "; ".join(
        [
            f"{steps:,} steps{short}",
            f"average of the last {len(record['averaged_steps'])} checkpoints",
            *([f"departs from its config in {', '.join(changed)}"] if changed else []),
            f"seed {record['seed']}",
            f"{test['sentences']:,} sentences, {test['paper_signature']}",
            f"{record['training_seconds'] / 3600:.1f} hours of training on {record['hardware']}",
            f"{record['date']}, commit {record['commit'][:12]}",
        ]
    )


def sustained_tflops(given: Sequence[str], records: Sequence[Record]) -> dict[str, float]:
    """The values given as NAME=VALUE, and after them the paper's."""
    kinds = {devices_of(record)[1] for record in records}
    chosen = {}
    for text in given:
        name, value = _named_value(text)
        if not any(name in kind for kind in kinds):
            known = ", ".join(sorted(kinds)) or "none"
            raise InputError(f"--sustained_tflops={text}: no run here is on a device named so; theirs are: {known}")
        chosen[name] = value
    return chosen | {name: value for name, value in paper.SUSTAINED_TFLOPS.items() if name not in chosen}


def _named_value(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    with contextlib.suppress(ValueError):
        if name and 0 < float(value) < math.inf:
            return name, float(value)
    raise InputError(f"--sustained_tflops={text}: must be NAME=VALUE with a value above 0, such as H100=60")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.table2_translation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN_OR_RECORD")
    parser.add_argument("--format", choices=FORMATS, default="markdown")
    parser.add_argument("--sustained_tflops", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args(argv)
    return exit_code_of(lambda: show(options))


def show(options: Any) -> None:
    """The table on standard output, the conditions under it; under CSV, on standard error."""
    records = [record for path in options.runs for record in load(path)]
    places = by_cell(records)
    sustained = sustained_tflops(options.sustained_tflops, records)
    print(render(HEADER, table(places, sustained, options.format), options.format))
    print_notes(notes(places), options.format)


if __name__ == "__main__":
    sys.exit(main())
