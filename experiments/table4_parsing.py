"""Table 4: constituency parsing, the paper's rows and ours below them.

    python -m experiments.table4_parsing [RUN_OR_RECORD ...] [--format=markdown|latex|csv]

Each RUN_OR_RECORD is a run folder (its result.json), a stored evaluation RUN/evaluations/NAME.json, a record, or a
folder of records (experiments/parsing_records.py). The column "WSJ 23 F1" holds ours where the test set is all of
section 23 of the Wall Street Journal (data.corpus=penn_treebank). Scores on any other trees stand in columns of their
own, with the name of the treebank, and are not comparable with the paper's.

Where several runs have one number of layers and one training set, their rows say which run they are of.

"Decoding" is constrained, for grammar-constrained beam search, or repaired, where invalid outputs become trees by
repair; "invalid" is the share of outputs that were not a tree over the words of the sentence before repair.
"""

import sys
from collections.abc import Sequence
from typing import Any

from configs import parsing_semi, parsing_wsj
from experiments import paper
from experiments.conditions import conditions
from experiments.parsing_records import parsing_record_of, read_parsing_record
from experiments.records import Record, fields_of, load
from experiments.tables import FORMATS, print_notes, render
from t2t_jax.argument_parser import argument_parser
from t2t_jax.errors import InputError, exit_code_of

HEADER = ("parser", "training", "WSJ 23 F1", "other test set", "F1 there", "precision", "recall", "exact match",
          "sentences", "decoding", "invalid, %")  # fmt: skip
EXPERIMENTS = {paper.WSJ_ONLY: parsing_wsj, paper.SEMI_SUPERVISED: parsing_semi}
_WSJ_CORPUS, _WSJ_PART = "penn_treebank", "wsj"


def parser_name(record: Record, records: Sequence[Record]) -> str:
    """The paper's name of the model, with our number of layers; and the run, if `records` has others of this name."""
    namesakes = {_run(other) for other in records if _model_and_training(other) == _model_and_training(record)}
    row, seed = _run(record)
    return _model_name(record) + (f", {row}, seed {seed}" if len(namesakes) > 1 else "")


def _model_name(record: Record) -> str:
    layers = record["config"]["model.num_layers"]
    return f"Transformer ({layers} layer{'s' * (layers > 1)}), ours"


def _model_and_training(record: Record) -> tuple[str, str]:
    return _model_name(record), training_name(record)


def _run(record: Record) -> tuple[str, int]:
    return record["row"], record["seed"]


def training_name(record: Record) -> str:
    """The paper's name of the training set where it is the paper's; otherwise the treebank and its number of trees."""
    setting = setting_of(record)
    if setting:
        return setting
    config = record["config"]
    name = str(config.get("data.train") or config["data.corpus"])
    return f"{name}, {record['training_pairs']:,} trees" if "training_pairs" in record else name


def setting_of(record: Record) -> str | None:
    """Which of the paper's two training settings a run has; None for runs without the Wall Street Journal's trees."""
    config = record["config"]
    if config["data.corpus"] != _WSJ_CORPUS:
        return None
    parts = {part.partition(":")[0].strip() for part in str(config.get("data.train") or _WSJ_PART).split(",")}
    if _WSJ_PART not in parts:
        return None
    return paper.WSJ_ONLY if parts == {_WSJ_PART} else paper.SEMI_SUPERVISED


def test_set(record: Record) -> str:
    """The name of the trees that a parser was judged by; empty for the whole of section 23."""
    if record["evaluation"]["files"]:
        return str(record["evaluation"]["files"][-1])
    if record["config"]["data.corpus"] != _WSJ_CORPUS:
        return str(record["config"].get("data.test") or record["config"]["data.corpus"])
    if record["sentences"] == paper.WSJ_23_SENTENCES:
        return ""
    return f"WSJ 23, {record['sentences']:,} of {paper.WSJ_23_SENTENCES:,} sentences"


def decoding_name(record: Record) -> str:
    """Whether invalid outputs were excluded or repaired."""
    return "constrained" if record["constrained"] else "repaired"


def check(records: Sequence[Record]) -> None:
    """Refuses a record that is given twice."""
    for number, record in enumerate(records):
        if record in records[:number]:
            raise InputError(f"run: {record['row']} (seed {record['seed']}, {decoding_name(record)}) is given twice")


def by_setting(records: Sequence[Record]) -> dict[str | None, list[Record]]:
    """The records of each of the paper's training settings, and of others (None), in the order of the rows."""
    return {
        setting: [record for record in records if setting_of(record) == setting] for setting in (*EXPERIMENTS, None)
    }


def table(records: Sequence[Record]) -> list[list[str]]:
    """All rows, each cell formatted; a setting of the paper that we have no run of has an empty row."""
    empty = [""] * (len(HEADER) - len(paper.Parser._fields))
    rows = [[*row, *empty] for row in paper.TABLE_4]
    for setting, ours in by_setting(records).items():
        if setting and not ours:
            rows.append(["Transformer (4 layers), ours", setting, "", *empty])
        rows += [_row(parser_name(record, records), record) for record in ours]
    return rows


def _row(name: str, record: Record) -> list[str]:
    f1, elsewhere = f"{record['f1']:.2f}", test_set(record)
    return [
        name,
        training_name(record),
        *(["", elsewhere, f1] if elsewhere else [f1, "", ""]),
        *(f"{record[name]:.2f}" for name in ("precision", "recall", "exact_match")),
        str(record["sentences"]),
        decoding_name(record),
        f"{100 * record['invalid'] / record['sentences']:.2f}",
    ]


def without_empty_columns(header: Sequence[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows without the columns, beyond the paper's, that no row fills."""
    kept = [i for i in range(len(header)) if i < len(paper.Parser._fields) or any(row[i] for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def notes(records: Sequence[Record]) -> list[str]:
    """By which rules our parsers were judged, and the conditions of each, in the order of the rows."""
    if not records:
        return []
    rules = "Ours: labelled brackets by EVALB's rules with COLLINS.prm, part-of-speech tags from the gold trees."
    ours = [record for group in by_setting(records).values() for record in group]
    names = [", ".join([parser_name(r, records), training_name(r), decoding_name(r)]) for r in ours]
    return [rules, *(f"{name}: {_conditions(record)}" for name, record in zip(names, ours, strict=True))]


def _conditions(record: Record) -> str:
    full, expected = record["steps"], record["config"]
    if setting := setting_of(record):
        config = EXPERIMENTS[setting].get_config()
        own_files = {"data.train": expected.get("data.train")}
        full, expected = config.train.train_steps, fields_of(config.to_dict()) | own_files
    return conditions(record, full, expected, [*_training(record), _model(record), *_decoding(record)])


def _training(record: Record) -> list[str]:
    """What the column "training" does not say: the trees of the paper's settings, and a task that is not the usual."""
    found, config = [], record["config"]
    if setting_of(record) and "training_pairs" in record:
        found.append(f"{record['training_pairs']:,} training trees of {config.get('data.train') or _WSJ_PART}")
    if config.get("data.task", "parsing") != "parsing":
        found.append(f"data.task={config['data.task']}")
    return found


def _model(record: Record) -> str:
    fields = {"N": "num_layers", "d_model": "d_model", "d_ff": "d_ff", "h": "num_heads"}
    sizes = [f"{symbol}={record['config'][f'model.{field}']}" for symbol, field in fields.items()]
    return f"{', '.join(sizes)}, {record['parameters']:,} parameters"


def _decoding(record: Record) -> list[str]:
    """The search, its invalid outputs, and the sentences that EVALB's rules leave out of the totals."""
    config = record["config"]
    repairs = sorted(record.get("repairs", {}).items(), key=lambda item: -item[1])
    counts = f" ({', '.join(f'{kind} {count:,}' for kind, count in repairs)})" if repairs else ""
    left_out = [
        f"{record[name]:,} {label} sentences in no total, which raises the scores"
        for name, label in (("error_sentences", "error"), ("skip_sentences", "skipped"))
        if record.get(name)
    ]
    return [
        f"{record['sentences']:,} sentences, beam size {config['decode.beam_size']}, α {config['decode.alpha']}, "
        f"input + {config['decode.max_extra_length']} pieces, {record['evaluation']['dtype']}",
        f"{record['invalid']:,} invalid outputs{counts}",
        *left_out,
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser("experiments.table4_parsing", __doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN_OR_RECORD")
    parser.add_argument("--format", choices=FORMATS, default="markdown")
    return exit_code_of(lambda: show(parser.parse_args(argv)))


def show(options: Any) -> None:
    """Prints the table to standard output and the conditions under it; with CSV, these go to standard error."""
    records = [record for path in options.runs for record in load(path, parsing_record_of, read_parsing_record)]
    check(records)
    header, rows = HEADER, table(records)
    if options.format != "csv":
        header, rows = without_empty_columns(header, rows)
    print(render(header, rows, options.format, num_left=2))
    print_notes(notes(records), options.format)


if __name__ == "__main__":
    sys.exit(main())
