"""Records of finished runs: the scores of a run and the conditions they hold under, one small JSON file per run.

    python -m experiments.records RUNS FOLDER [--base=ROW]

writes the record of the run RUNS, or those of a sweep's finished trials, RUNS/ROW/seed_N, into FOLDER. The tables are
rendered from records, so they can be rendered again without the runs. A finished run has `dev.hypotheses.txt` and
`dev.reference.txt` beside its result.json; with these, each translation trial is compared with the trial of the row
--base and the same seed (paired bootstrap).
"""

import collections
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.json_types import INTEGER, LIST, NUMBER, OBJECT, TEXT, check_names, check_types, is_scalar
from experiments.scores import SACREBLEU, headline_name
from t2t_jax.argument_parser import argument_parser
from t2t_jax.errors import DamagedError, InputError, exit_code_of, shown
from t2t_jax.evaluation.bleu import check_pairs, tokenizer
from t2t_jax.evaluation.significance import paired_bootstrap
from t2t_jax.files import existing_file, flat, read_json, read_object, read_text, sha256, write_json
from t2t_jax.run_folder import FILE_FIELDS, RunFolder, changes, has_effect, is_option, row_of
from t2t_jax.validation import choice

Record = dict[str, Any]
Reader = Callable[[str | Path], Record]  # of a run folder, or of a file

PROVENANCE_FIELDS = ("seed", "steps", "averaged_steps", "parameters", "training_seconds", "target_tokens_per_second",
                     "hardware", "commit", "date", "jax")  # fmt: skip
# Results of earlier versions lack them.
_LATER_FIELDS = ("init_from", "trained_on", "training_flops", "training_pairs", "vocab_size", "source_vocab_size",
                 "skipped_steps")  # fmt: skip
RESULT_FIELDS = (*PROVENANCE_FIELDS, "dev", "test")
BASE = "base"  # the row that the others of a sweep are compared with, unless --base names another
RESAMPLES = 10_000  # Holm multiplies the smallest two-sided p that they allow, 0.0002, by the number of rows
RECORD_FIELDS = ("row", "config", *RESULT_FIELDS)
CONFIG_FIELDS = ("data.corpus", "data.source_language", "data.target_language", "data.vocab_size",
                 "data.tokens_per_batch", "optimizer.learning_rate_factor", "optimizer.warmup_steps",
                 "train.label_smoothing", "train.dtype", "decode.beam_size", "decode.alpha",
                 "decode.max_extra_length")  # fmt: skip
MODEL_FIELDS = ("model.num_layers", "model.d_model", "model.d_ff", "model.num_heads", "model.d_k", "model.d_v",
                "model.dropout")  # fmt: skip

# Fields of a config that affect the scores; of files only the names.
_SECTIONS = ("model", "data", "optimizer", "train", "checkpoint", "decode")
_LEFT_OUT = ("train.seed", "train.train_steps")  # numbers of the result

_ROUNDING_SECONDS = 1.0  # more than the rounding of several numbers of seconds adds up to
_RECORD_TYPES = {"row": TEXT, "config": OBJECT, "seed": INTEGER, "steps": INTEGER, "averaged_steps": LIST,
                 "dev": OBJECT, "test": OBJECT, "parameters": INTEGER, "training_seconds": NUMBER,
                 "target_tokens_per_second": NUMBER, "hardware": TEXT, "commit": TEXT, "date": TEXT, "jax": TEXT,
                 "init_from": TEXT, "training_flops": NUMBER, "training_pairs": INTEGER, "against_base": OBJECT,
                 "trained_on": LIST, "other_tests": OBJECT, "vocab_size": INTEGER,
                 "source_vocab_size": INTEGER, "skipped_steps": INTEGER}  # fmt: skip
_TRAINED_ON_TYPES = {"commit": TEXT, "hardware": TEXT, "jax": TEXT, "seconds": NUMBER}
_SCORE_TYPES = {"headline": TEXT, "paper_bleu": NUMBER, "paper_signature": TEXT, "lowercased_bleu": NUMBER,
                "lowercased_signature": TEXT, "sacrebleu": NUMBER, "signature": TEXT, "perplexity": NUMBER,
                "sentences": INTEGER, "min_length": INTEGER}  # fmt: skip


def _check_record(record: Record, where: str) -> Record:
    """Returns the record if all its fields have the types that the tables need."""
    check_provenance(record, where)
    others = record.get("other_tests", {})
    check_names(others, f"{where}: other_tests")
    for split, scores in {"dev": record["dev"], "test": record["test"], **others}.items():
        check_types(scores, _SCORE_TYPES, f"{where}: {split}")
    if "against_base" in record:
        types = {"p_value": NUMBER, "difference": NUMBER, "row": TEXT}
        check_types(record["against_base"], types, f"{where}: against_base", ["p_value", "difference"])
    return record


def check_provenance(record: Record, where: str) -> None:
    """Refuses a record in which anything but the scores has other types than the tables need."""
    check_types(record, _RECORD_TYPES, where)
    for entry in record.get("trained_on", []):
        check_types(entry, _TRAINED_ON_TYPES, f"{where}: trained_on", _TRAINED_ON_TYPES)
    config = check_types(
        record["config"], {"data.vocab_size": INTEGER}, f"{where}: config", MODEL_FIELDS + CONFIG_FIELDS
    )
    check_names(config, f"{where}: config")
    for field, value in config.items():
        if not is_scalar(value) and not (is_option(field) and isinstance(value, list)):
            raise DamagedError(f"{where} is damaged: {field} of its config is {shown(value)}; it must be a scalar")


def training_seconds(record: Record) -> dict[str, float]:
    """{hardware: seconds of training on it}.

    Earlier versions did not note it: what is left of the whole time counts as spent on the hardware of the evaluation.
    """
    seconds = collections.Counter()
    for entry in record.get("trained_on", []):
        seconds[entry["hardware"]] += entry["seconds"]
    left = record["training_seconds"] - sum(seconds.values())
    if not seconds or left > _ROUNDING_SECONDS:
        seconds[record["hardware"]] += left
    return dict(seconds)


def need_scores(record: Record, split: str, fields: Iterable[str]) -> None:
    """Refuses a record that lacks some of the scores that a table shows."""
    check_types(record.get(split, {}), {}, where_of(record, split), fields)


def check_seeds(records: Sequence[Record]) -> None:
    """Refuses records of one row that are not its seeds: one twice, or trained, averaged or evaluated differently."""
    for number, record in enumerate(records):
        name = f"records: {record['row']}, seed {record['seed']}"
        for earlier in records[:number]:  # with each: an older one may lack the field that two others differ in
            if record["seed"] == earlier["seed"]:
                raise InputError(f"{name} is there twice; remove one")
            found, expected = _of_all_seeds(record), _of_all_seeds(earlier)
            for field, value in changes(found, expected).items():
                raise InputError(
                    f"{name} and seed {earlier['seed']} differ in config or steps: {field} is {shown(value)} and "
                    f"{shown(expected.get(field))}; one row has one of each"
                )


def _of_all_seeds(record: Record) -> dict[str, Any]:
    """What the seeds of a row have in common: else their mean is of different experiments."""
    scored = {split: record[split] for split in ("dev", "test") if split in record}
    return trained_config(record) | {
        "averaged checkpoints": len(record["averaged_steps"]),
        "first weights": "those of a run" if record.get("init_from") else "random",
        **{f"sentences of {split}": scores["sentences"] for split, scores in scored.items() if "sentences" in scores},
        **{f"min_length of {split}": min_length(scores) for split, scores in scored.items()},
    }


def min_length(scores: Mapping[str, Any]) -> int:
    """Minimum subwords of the translations that were scored; earlier versions had none."""
    return scores.get("min_length", 0)


def trained_config(record: Record) -> dict[str, Any]:
    """{'SECTION.FIELD': value} of a run, with the steps that it was trained for.

    And with the number of pairs, if that is known: of training texts the config has only the names of the files.
    """
    pairs = {"training_pairs": record["training_pairs"]} if "training_pairs" in record else {}
    return record["config"] | {"train.train_steps": record["steps"]} | pairs


def where_of(record: Record, split: str) -> str:
    """How error messages name the scores of a record."""
    return f"record: {record['row']}, seed {record['seed']}: {split}"


def record_of(run_folder: str | Path) -> Record:
    """The record of a finished run; with `other_tests`, where the corpus has several test sets."""
    run = RunFolder.open(run_folder)
    result, config = finished_result(run), config_of(run)
    record = provenance_of(run, result, config) | {"dev": result["dev"], "test": result["test"]}
    if result.get("other_tests"):
        record["other_tests"] = result["other_tests"]
    return _check_record(record, str(run.path))


def provenance_of(run: RunFolder, result: Mapping[str, Any], config: Mapping[str, Any]) -> Record:
    """All of a record but its scores. Its row is the name of the run's folder, or of the parent folder of seed_N."""
    later = {field: result[field] for field in _LATER_FIELDS if result.get(field)}
    numbers = {field: result[field] for field in PROVENANCE_FIELDS} | later
    return {"row": row_of(run.path), "config": fields_of(config)} | numbers


def finished_result(run: RunFolder) -> dict[str, Any]:
    """The result.json of a run; refuses a run that has not been trained to its end."""
    result = read_object(run.result) if run.result.is_file() else {}
    for field in RESULT_FIELDS:
        if field not in result:
            is_imported = "imported_from" in run.config
            advice = "an imported model has no record" if is_imported else "train it to its end, which writes it"
            raise InputError(f"run: no {field} in {run.result}; {advice}")
    return result


def config_of(run: RunFolder) -> dict[str, Any]:
    """The config of a run; refuses one without the fields that a record keeps."""
    where, fields = f"{run.path}/config.json", {}
    for section, _, name in (field.partition(".") for field in (*MODEL_FIELDS, *CONFIG_FIELDS, "train.train_steps")):
        fields.setdefault(section, []).append(name)
    config = check_types(run.config, dict.fromkeys(fields, OBJECT), where, fields)
    for section, names in fields.items():
        check_types(config[section], {}, f"{where}: {section}", names)
    return config


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """{'SECTION.FIELD': value} of the fields that affect the scores; of files, their names."""
    fields = flat({section: config[section] for section in _SECTIONS if section in config})
    kept = {field: value for field, value in fields.items() if has_effect(field, config) and field not in _LEFT_OUT}
    names = {field: _names(kept[field]) for field in FILE_FIELDS if field in kept}
    return kept | names | {"evaluate.dtype": config.get("evaluate", {}).get("dtype", "float32")}


def _names(paths: Any) -> Any:
    """Paths, separated by commas, without their folders, which belong to one machine."""
    return ",".join(path.strip().rpartition("/")[2] for path in paths.split(",")) if isinstance(paths, str) else paths


def sweep_records(workdir: str | Path, base: str | None = None) -> list[Record]:
    """The records of a sweep's finished trials; those of translation are compared with the base of the same seed.

    `base` is the row of that name unless it is given. The other trials are named on standard error.
    """
    folder, records = _existing(workdir, "workdir"), []
    trials = sorted(path for path in folder.glob("*/seed_*") if path.is_dir())
    runs = [trial for trial in trials if (trial / "result.json").exists()]
    if not runs:
        raise InputError(
            f"workdir: no finished trial, ROW/seed_N, in {workdir}; give the folder of a sweep. Of one run, "
            "`python -m experiments.records RUN FOLDER` makes a record"
        )
    if others := [str(trial.relative_to(folder)) for trial in trials if trial not in runs]:
        print(f"not finished, so left out: {', '.join(others)}", file=sys.stderr)
    rows = sorted({run.parent.name for run in runs})
    base = BASE if base is None else choice("--base", base, rows)
    for run in runs:
        record, of_base = record_of(run), folder / base / run.name
        is_translation = headline_name(record["dev"]) == SACREBLEU
        if is_translation and record["row"] != base and (of_base / "result.json").is_file():
            language = str(record["config"]["data.target_language"])
            lowercase = "case:lc" in record["dev"].get("signature", "")
            found = significance_against(of_base, run, language, lowercase)
            record["against_base"] = {"row": base, **found}
        records.append(record)
    return records


def significance_against(
    base_run: str | Path, run: str | Path, target_language: str | None = None, lowercase: bool = False
) -> dict[str, Any]:
    """The paired bootstrap's `Comparison` of `run` with `base_run`: sacreBLEU on their dev set."""
    (baseline, references), (hypotheses, same) = (
        [_text_of(Path(folder), f"dev.{side}.txt") for side in ("hypotheses", "reference")]
        for folder in (base_run, run)
    )
    if references != same:
        raise InputError(f"run: the dev sets of {base_run} and {run} differ; only runs on one corpus can be compared")
    check_pairs(baseline, references, str(base_run))
    check_pairs(hypotheses, references, str(run))
    how = {"tokenizer": tokenizer(target_language), "lowercase": lowercase, "resamples": RESAMPLES}
    found = paired_bootstrap(hypotheses, baseline, references, **how)
    return found._asdict() | {"interval": list(found.interval)}  # a list, as it is read back from JSON


def _text_of(run: Path, name: str) -> list[str]:
    """The lines of a text that a run wrote, checked against the checksum in its result."""
    lines = read_text("run", run / name)
    checksums = read_object(run / "result.json").get("sha256", {})  # earlier versions wrote none
    if name in checksums and checksums[name] != sha256(run / name):
        raise DamagedError(f"{run / name} does not match its checksum in result.json; restore it")
    return lines


def read_record(path: str | Path) -> Record:
    """The record in a file."""
    hint = "give a record that experiments.records wrote, or a run folder"
    return _check_record(read_fields(path, RECORD_FIELDS, hint), f"record: {path}")


def read_fields(path: str | Path, fields: Iterable[str], hint: str) -> Record:
    """The object in a file; refuses one without these fields, with a `hint` at what makes them."""
    path = existing_file("record", path, hint)
    record = check_types(read_json(path), {}, f"record: {path}")
    for field in fields:
        if field not in record:
            raise InputError(f"record: no {field} in {path}; {hint}")
    return record


def read_records(
    folder: str | Path, read: Reader = read_record, wanted: str = "a folder that experiments.records wrote"
) -> list[Record]:
    """All records of a folder, sorted by file name; refuses a folder without any and says what is `wanted`."""
    paths = sorted(_existing(folder, "records").glob("*.json"))
    if not paths:
        raise InputError(f"record: no *.json in {folder}; give {wanted}")
    return [read(path) for path in paths]


def load(path: str, of_run: Reader = record_of, read: Reader = read_record) -> list[Record]:
    """The records of one command-line argument: of a run folder, of a file, or of a folder of records."""
    if not Path(path).is_dir():
        return [read(path)]
    wanted = "a run folder, a record or a folder of records"
    return [of_run(path)] if is_run(path) else read_records(path, read, wanted)


def is_run(folder: str | Path) -> bool:
    """Whether a folder is that of a run, and not one of records or of a sweep."""
    return (Path(folder) / "config.json").is_file()


def write_records(folder: str | Path, records: Iterable[Record]) -> list[Path]:
    """Writes each record to ROW_seed_N.json, over an older record of the same row and seed."""
    return write_named(folder, {f"{record['row']}_seed_{record['seed']}.json": record for record in records})


def write_named(folder: str | Path, records: Mapping[str, Record]) -> list[Path]:
    """Writes {file name: record} into a folder, which is made if necessary."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"folder: {folder} can't be made: {error.strerror}; choose another") from None
    paths = {Path(folder) / name: record for name, record in records.items()}
    for path, record in paths.items():
        write_json(path, record)
    return list(paths)


def _existing(folder: str | Path, field: str) -> Path:
    if not Path(folder).is_dir():
        raise InputError(f"{field}: no folder {folder}")
    return Path(folder)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser("experiments.records", __doc__)
    parser.add_argument("runs", help="--workdir of a run or of a sweep")
    parser.add_argument("folder", help="where the records are written")
    parser.add_argument("--base", metavar="ROW", help="the row of a sweep that the others are compared with")

    def write() -> None:
        options = parser.parse_args(argv)
        if options.base and is_run(options.runs):
            raise InputError(f"--base={options.base}: {options.runs} is one run, without rows; give a sweep")
        records = [record_of(options.runs)] if is_run(options.runs) else sweep_records(options.runs, options.base)
        paths = write_records(options.folder, records)
        print("".join(f"{path}\n" for path in paths), end="")
        if len(records) > 1 and (options.base or BASE) not in [record["row"] for record in records]:
            print(f"no trial of a row {BASE}, so none is compared with it; --base=ROW names another", file=sys.stderr)

    return exit_code_of(write)


if __name__ == "__main__":
    sys.exit(main())
