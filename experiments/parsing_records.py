"""Records of parsing runs (Table 4): the bracket scores of one evaluation, and the conditions that they hold under.

    python -m experiments.parsing_records EVALUATION [EVALUATION ...] FOLDER

EVALUATION is RUN/evaluations/NAME.json, which `--mode=evaluate` has stored, or RUN/result.json (or RUN), the test
scores at the end of training. Its record is written to FOLDER: ROW_seed_N_constrained.json for grammar-constrained beam
search, ROW_seed_N_repaired.json for unconstrained search, whose invalid outputs are repaired. Row and seed are those of
experiments.records.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import records
from experiments.json_types import BOOLEAN, INTEGER, LIST, NUMBER, OBJECT, TEXT, check_names, check_types
from experiments.records import Record
from t2t_jax.argument_parser import argument_parser
from t2t_jax.errors import DamagedError, InputError, exit_code_of, shown
from t2t_jax.files import existing_file, read_object
from t2t_jax.run_folder import RunFolder

PERCENTAGES = ("f1", "precision", "recall", "exact_match")
SCORES = (*PERCENTAGES, "sentences", "constrained", "invalid")
# Of a stored evaluation, beside its scores.
_CONDITIONS = ("step", "checkpoints", "averaged_steps", "dtype", "options", "files", "split")
_FIELDS = ("row", "config", *SCORES, *records.PROVENANCE_FIELDS, "evaluation")

_SCORE_TYPES = {**dict.fromkeys(PERCENTAGES, NUMBER), "sentences": INTEGER, "constrained": BOOLEAN, "invalid": INTEGER,
                "repairs": OBJECT, "error_sentences": INTEGER, "skip_sentences": INTEGER,
                "evaluation": OBJECT}  # fmt: skip
_EVALUATION_TYPES = {"checkpoint": TEXT, "dtype": TEXT, "files": LIST}


def parsing_record_of(path: str | Path) -> Record:
    """The record of an evaluation: RUN/evaluations/NAME.json or RUN/result.json; RUN stands for the latter."""
    if (folder := run_of(path)) is None:
        raise InputError(
            f"evaluation: {path} is not in a run folder; give RUN/evaluations/NAME.json, RUN/result.json or RUN"
        )
    run = RunFolder.open(folder)
    result, config = records.finished_result(run), records.config_of(run)
    if Path(path).parent.name == "evaluations":
        where, stored = str(path), read_object(existing_file("evaluation", path))
        scores, evaluation = _scores(stored, where), _stored_evaluation(stored, result, where)
    else:
        where = f"{run.result}: test"
        scores, evaluation = _scores(result["test"], where), _end_of_training(result, config)
    averaged_steps, options = evaluation.pop("averaged_steps"), evaluation.pop("options")
    decode = {f"decode.{name}": value for name, value in check_types(options, {}, where).items()}
    known = records.provenance_of(run, result, config) | {"averaged_steps": averaged_steps, "evaluation": evaluation}
    known["config"] |= decode
    records.check_provenance(known, str(run.path))
    return check_record(scores | known, where)


def run_of(path: str | Path) -> Path | None:
    """The run folder of an evaluation; None for any other file."""
    path = Path(path)
    if path.parent.name == "evaluations":
        folder = path.parent.parent
    else:
        folder = path.parent if path.name == "result.json" else path
    return folder if records.is_run(folder) else None


def _scores(found: Any, where: str) -> dict[str, Any]:
    """The scores of an evaluation; refuses those of other tasks."""
    for name in SCORES:
        if name not in check_types(found, {}, where):
            raise InputError(f"evaluation: no {name} in {where}; --mode=evaluate of a parsing run stores it")
    return {name: value for name, value in found.items() if name not in _CONDITIONS}


def _end_of_training(result: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions of the test scores in result.json."""
    return {
        "averaged_steps": result["averaged_steps"],
        "options": config["decode"],
        "checkpoint": f"averaged checkpoint {shown(result['steps'])}",
        "dtype": result.get("evaluation_dtype", "float32"),
        "files": [],
    }


def _stored_evaluation(stored: dict[str, Any], result: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The conditions of a stored evaluation; `files` names the texts where they are not the run's own test set."""
    types = {"step": INTEGER, "checkpoints": OBJECT, "dtype": TEXT, "options": OBJECT, "files": OBJECT}
    check_types(stored, types | {"averaged_steps": LIST}, where, types)
    if stored.get("split", "test") != "test":  # earlier versions evaluated the test sets alone
        raise InputError(f"evaluation: {where} is of the {shown(stored['split'])} set; a record is of the test set")
    if len(stored["checkpoints"]) != 1:
        raise InputError(f"evaluation: {where} is of {len(stored['checkpoints'])} runs; a record is of one")
    if stored["step"] != result["steps"]:
        raise InputError(
            f"evaluation: {where} is of step {stored['step']}; result.json describes step {shown(result['steps'])}, so "
            "evaluate that one"
        )
    [checkpoint] = stored["checkpoints"].values()
    is_averaged = str(checkpoint).startswith("averaged")
    # Evaluations of earlier versions do not say what was averaged: the run's own average, then.
    of_run = result["averaged_steps"] if is_averaged else [stored["step"]]
    return {
        "averaged_steps": (stored.get("averaged_steps") or [of_run])[0],
        "options": stored["options"],
        "checkpoint": checkpoint,
        "dtype": stored["dtype"],
        "files": [] if "data" in stored["files"] else [Path(name).name for name in stored["files"]],
    }


def check_record(record: Record, where: str) -> Record:
    """Returns the record if all its fields have the types and the ranges that Table 4 needs."""
    check_types(record, _SCORE_TYPES, where)
    for name in PERCENTAGES:
        if not 0 <= record[name] <= 100:
            raise DamagedError(f"{where} is damaged: {name} is {shown(record[name])}; it must be a percentage")
    if not 0 <= record["invalid"] <= record["sentences"] or not record["sentences"]:
        raise DamagedError(
            f"{where} is damaged: {shown(record['invalid'])} invalid outputs of {shown(record['sentences'])} sentences"
        )
    repairs = record.get("repairs", {})
    check_names(repairs, f"{where}: repairs")
    check_types(repairs, dict.fromkeys(repairs, INTEGER), f"{where}: repairs")
    evaluation = check_types(record["evaluation"], _EVALUATION_TYPES, f"{where}: evaluation", _EVALUATION_TYPES)
    names = {f"file {number}": name for number, name in enumerate(evaluation["files"])}
    check_types(names, dict.fromkeys(names, TEXT), f"{where}: evaluation")
    records.check_provenance(record, where)
    return record


def read_parsing_record(path: str | Path) -> Record:
    """The record in a file; that of an evaluation which lies in its run folder is made."""
    if run_of(path):
        return parsing_record_of(path)
    hint = "give a record that experiments.parsing_records wrote, or an evaluation in its run folder"
    return check_record(records.read_fields(path, _FIELDS, hint), f"record: {path}")


def write_parsing_records(folder: str | Path, parsed: Sequence[Record]) -> list[Path]:
    """Writes each record to ROW_seed_N_constrained.json or ROW_seed_N_repaired.json, over an older one."""
    named: dict[str, Record] = {}
    for record in parsed:
        name = f"{record['row']}_seed_{record['seed']}_{'constrained' if record['constrained'] else 'repaired'}.json"
        if name in named:
            raise InputError(f"evaluation: two records are both {name}; give one of them")
        named[name] = record
    return records.write_named(folder, named)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser("experiments.parsing_records", __doc__)
    parser.add_argument("evaluations", nargs="+", metavar="EVALUATION")
    parser.add_argument("folder", help="where the records are written")

    def write() -> None:
        options = parser.parse_args(argv)
        paths = write_parsing_records(options.folder, [parsing_record_of(path) for path in options.evaluations])
        print("".join(f"{path}\n" for path in paths), end="")

    return exit_code_of(write)


if __name__ == "__main__":
    sys.exit(main())
