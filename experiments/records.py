"""What is kept of a finished run: its numbers and their conditions, one small JSON file a run.

    python -m experiments.records SWEEP FOLDER

writes the records of a sweep's finished trials, SWEEP/ROW/seed_N, into FOLDER. The tables are made of records, so that
they can be made again without the runs. A run that ends writes `dev.hypotheses.txt` and `dev.reference.txt` beside its
result.json; by them each trial is compared with the base trial of the same seed.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments import paper
from t2t_jax.errors import InputError, exit_code_of
from t2t_jax.evaluation.bleu import check_pairs
from t2t_jax.evaluation.significance import paired_bootstrap
from t2t_jax.files import read_json, read_text, write_json
from t2t_jax.run_folder import RunFolder

Record = dict[str, Any]

OF_RESULT = ("seed", "steps", "averaged_steps", "dev", "test", "parameters", "training_seconds",
             "target_tokens_per_second", "hardware", "commit", "date", "jax")  # fmt: skip
OF_RECORD = ("row", "config", "train_steps_of_config", *OF_RESULT)
OF_CONFIG = ("data.corpus", "data.source_language", "data.target_language", "data.vocab_size", "data.tokens_per_batch",
             "optimizer.learning_rate_factor", "optimizer.warmup_steps", "train.label_smoothing", "train.dtype",
             "decode.beam_size", "decode.alpha", "decode.max_extra_length")  # fmt: skip


def record_of(run_folder: str | Path) -> Record:
    """The record of a finished run; its row is the folder's name, or that of the folder of its seeds.

    `train_steps_of_config` are the paper's for a row of Table 3, and else those of the run's own config. The
    floating-point operations of training are there where the run counted them.
    """
    run = RunFolder.open(run_folder)
    result = read_json(run.result) if run.result.is_file() else {}
    for field in OF_RESULT:
        if field not in result:
            raise InputError(f"run: no {field} in {run.result}; train it to its end, which writes it")
    row, config = _row(run.path), run.config
    full = paper.train_steps(row) if row in paper.TABLE_3 else config["train"]["train_steps"]
    counted = {"training_flops": result["training_flops"]} if "training_flops" in result else {}
    numbers = {field: result[field] for field in OF_RESULT} | counted
    return {"row": row, "config": fields_of(config), "train_steps_of_config": full} | numbers


def _row(path: Path) -> str:
    path = path.resolve()
    return path.parent.name if re.fullmatch(r"seed_\d+", path.name) else path.name


def fields_of(config: dict[str, Any]) -> dict[str, Any]:
    """{'SECTION.FIELD': value} of what bears on the numbers: the model, and a few fields more."""
    model = {f"model.{name}": value for name, value in config["model"].items()}
    named = [field.split(".") for field in OF_CONFIG]
    return model | {f"{section}.{name}": config[section][name] for section, name in named}


def sweep_records(workdir: str | Path) -> list[Record]:
    """The records of a sweep's finished trials, each with its comparison to the base trial of the same seed."""
    folder, records = _existing(workdir, "workdir"), []
    for run in sorted(result.parent for result in folder.glob("*/seed_*/result.json")):
        record, base = record_of(run), folder / "base" / run.name
        if record["row"] != "base" and (base / "result.json").is_file():
            record["against_base"] = significance_against(base, run)
        records.append(record)
    return records


def significance_against(base_run: str | Path, run: str | Path) -> dict[str, Any]:
    """How far `run` is ahead of `base_run` on their dev set, in sacreBLEU: the paired bootstrap's `Comparison`."""
    (baseline, references), (hypotheses, same) = (
        [read_text("run", Path(folder) / f"dev.{side}.txt") for side in ("hypotheses", "reference")]
        for folder in (base_run, run)
    )
    if references != same:
        raise InputError(f"run: the dev sets of {base_run} and {run} differ; only runs on one corpus can be compared")
    check_pairs(baseline, references, str(base_run))
    check_pairs(hypotheses, references, str(run))
    found = paired_bootstrap(hypotheses, baseline, references)
    return found._asdict() | {"interval": list(found.interval)}  # as JSON has it


def read_records(folder: str | Path) -> list[Record]:
    """All records of a folder, by the names of their files."""
    return [read_record(path) for path in sorted(_existing(folder, "records").glob("*.json"))]


def read_record(path: str | Path) -> Record:
    """The record in a file."""
    try:
        record = read_json(Path(path))
    except (OSError, json.JSONDecodeError) as error:
        raise InputError(f"record: {path} is no JSON file that can be read: {error}") from None
    for field in OF_RECORD:
        if not isinstance(record, dict) or field not in record:
            raise InputError(f"record: no {field} in {path}; `experiments.records.record_of` makes records of runs")
    return record


def write_records(folder: str | Path, records: Iterable[Record]) -> list[Path]:
    """One file a record, ROW_seed_N.json; a record of the same row and seed is replaced."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = []
    for record in records:
        paths.append(Path(folder) / f"{record['row']}_seed_{record['seed']}.json")
        write_json(paths[-1], record)
    return paths


def _existing(folder: str | Path, field: str) -> Path:
    if not Path(folder).is_dir():
        raise InputError(f"{field}: no folder {folder}")
    return Path(folder)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.records",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sweep", help="the sweep's --workdir")
    parser.add_argument("folder", help="where the records go")
    options = parser.parse_args(argv)

    def write() -> None:
        paths = write_records(options.folder, sweep_records(options.sweep))
        print("".join(f"{path}\n" for path in paths), end="")

    return exit_code_of(write)


if __name__ == "__main__":
    sys.exit(main())
