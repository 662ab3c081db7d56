"""Table 3: variations on the base model, the paper's numbers beside ours.

    python -m experiments.table3_variations [--records=FOLDER | --workdir=SWEEP] [--configs=configs/table3]
        [--base=ROW] [--format=markdown|latex|csv] [--figure=FILE.png|FILE.svg]

FOLDER holds records; SWEEP holds runs, ROW/seed_N. The rows are the configs of the folder --configs and the rows of the
records; where they have no row in common, those of the records alone. A row with a config of configs/table3 shows the
paper's cells, and ours where there are records; other rows show only ours, and a table of such rows has no columns for
the paper. An empty setting is that of the row --base, which is "base" by default; settings that have no column are in
the column "other". In Markdown and LaTeX, "a → b" is the paper's value and ours; CSV has two columns.

Our BLEU is sacreBLEU of the dev set; the paper's is tokenised, with compounds split, and perplexity depends on the
vocabulary. So compare each row with the base of its own column, and the two columns by how they rank the rows. Where
the records' headline score is not BLEU, it is shown instead, and none of the paper's numbers.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

from experiments import paper
from experiments.figure_file import figure_file
from experiments.records import Record, min_length, read_records, sweep_records
from experiments.sweep.plan import CONFIGS
from experiments.table3_figure import draw
from experiments.table3_rows import (
    MEASURED,
    SCORES,
    SETTINGS,
    SIGNIFICANCE_LEVEL,
    Row,
    Table,
    correlation,
    kind_of_bleu,
    make_table,
)
from experiments.tables import FORMATS, print_notes, render
from t2t_jax.argument_parser import argument_parser
from t2t_jax.errors import exit_code_of

HEADINGS = {"num_layers": "N", "d_model": "d_model", "d_ff": "d_ff", "num_heads": "h", "d_k": "d_k", "d_v": "d_v",
            "dropout": "P_drop", "label_smoothing": "ε_ls", "train_steps": "steps"}  # fmt: skip
PRINTED_DIGITS = {"perplexity": 2, "bleu": 1, "parameters": 0}  # after the point, as in the paper
OUR_DIGITS = {"perplexity": 2, "bleu": 2, "parameters": 1}
SMALL_MODEL = 0.1  # million parameters; below, two significant digits
P_VALUES = ("p", "p (Holm)")
OTHER_HEADLINE_DIGITS = 4  # it may be a fraction of 1


def for_people(table: Table) -> tuple[list[str], list[list[str]]]:
    """Header and rows for Markdown and LaTeX: settings as "paper → ours", measured values in two cells."""
    header = ["row", *HEADINGS.values()]
    headline = "sacreBLEU" if table.is_translation else table.headline
    for column, heading in MEASURED.items():
        if table.has_paper:
            header += [heading, f"ours, {headline}" if column == "bleu" else "ours"]
        else:
            header.append(f"{headline} (dev)" if column == "bleu" else heading)
    header += ["seeds", *P_VALUES]
    return _with_other_settings(header, [_for_people(row, table) for row in table.rows], table)


def _for_people(row: Row, table: Table) -> list[str]:
    cells = [row.name]
    for column in SETTINGS:
        printed, ours = (_setting(column, values.get(column)) for values in (row.printed, row.settings))
        cells.append(_printed_and_ours(printed, ours) if row.printed else ours)
    for column in MEASURED:
        ours = " ± ".join(_measured(column, value, table) for value in row.mean_and_deviation(column))
        cells += [_printed(row, column), ours] if table.has_paper else [ours]
    p, corrected = [f"{p:.3f}" if p >= 0.0005 else "< 0.001" for p in _p_values(row, table)] or ["", ""]
    return [*cells, str(len(row.records) or ""), p, corrected + " *" * is_significant(row, table)]


def _measured(column: str, value: float, table: Table) -> str:
    if column == "parameters" and value < SMALL_MODEL:
        return f"{value:#.2g}"
    digits = OUR_DIGITS[column] if column != "bleu" or table.is_translation else OTHER_HEADLINE_DIGITS
    return f"{value:.{digits}f}"


def _p_values(row: Row, table: Table) -> list[float]:
    """The row's own p, and that by Holm's correction; nothing for a row that is not compared with the base."""
    return [] if row.p_value is None else [row.p_value, table.adjusted_p_values[row.name]]


def is_significant(row: Row, table: Table) -> bool:
    """Whether the row's BLEU differs from that of the base, by Holm's correction for all rows."""
    return table.adjusted_p_values.get(row.name, 1.0) < SIGNIFICANCE_LEVEL


def _printed_and_ours(printed: str, ours: str) -> str:
    return f"{printed} → {ours}".strip() if ours not in ("", printed) else printed


def for_csv(table: Table) -> tuple[list[str], list[list[str]]]:
    """Header and rows with one number per cell."""
    header = ["row"]
    for heading in HEADINGS.values():
        header += [*[heading] * table.has_paper, f"{heading} ours"]
    for column, heading in MEASURED.items():
        ours = heading if column != "bleu" or table.is_translation else f"{table.headline} (dev)"
        deviation = [f"{ours} ours deviation"] * (column in SCORES)
        header += [*[heading] * table.has_paper, f"{ours} ours", *deviation]
    return _with_other_settings([*header, "seeds", *P_VALUES], [_for_csv(row, table) for row in table.rows], table)


def _with_other_settings(header: list[str], rows: list[list[str]], table: Table) -> tuple[list[str], list[list[str]]]:
    """Header and rows with the column of the settings that have none of their own, if a row but base has some."""
    found = ["" if row.name == table.base else _other_settings(row) for row in table.rows]
    if not any(found):
        return header, rows
    return [*header, "other"], [[*row, cell] for row, cell in zip(rows, found, strict=True)]


def _other_settings(row: Row) -> str:
    return ", ".join(f"{field}={value}" for field, value in row.other_changes.items())


def _for_csv(row: Row, table: Table) -> list[str]:
    cells = [row.name]
    for column in SETTINGS:
        sides = (row.printed, row.settings) if table.has_paper else (row.settings,)
        cells += [str(values.get(column, "")) for values in sides]
    for column in MEASURED:
        found = [f"{value:.4f}" for value in row.mean_and_deviation(column)]
        empty = [""] * ((2 if column in SCORES else 1) - len(found))
        cells += [*[_printed(row, column)] * table.has_paper, *found, *empty]
    return [*cells, str(len(row.records)), *([f"{value:.4f}" for value in _p_values(row, table)] or ["", ""])]


def _printed(row: Row, column: str) -> str:
    return f"{row.printed[column]:.{PRINTED_DIGITS[column]}f}" if column in row.printed else ""


def _setting(column: str, value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if column == "train_steps" else str(value)


# --- Notes under the table ---------------------------------------------------------------------------------


def notes(table: Table) -> list[str]:
    """The conditions of the numbers."""
    records = [record for row in table.trained for record in row.records]
    conditions = [*_shortened(table.comparable), *sorted({_conditions(record) for record in records})]
    if not records:
        numbers = "the paper's numbers" if table.has_paper else "the settings"
        return [f"No records: {numbers} alone.", *_of_all_rows(table)]
    return [
        *_comparison(table), *_kinds_of_bleu(table), *_missing_base(table), *_without_p(table), *_statistics(table),
        *_correlations(table), *_of_all_rows(table), *_first_weights(table), *conditions, *_trained_on(table),
    ]  # fmt: skip


def _comparison(table: Table) -> list[str]:
    if not table.is_translation:
        return [f"Headline: {table.headline}. The paper's numbers are of translation, so none is shown."]
    if not table.comparable:
        return []
    return ["The paper's BLEU: its own tokens, compounds split. Perplexity is per subword, each of its own vocabulary."]


def _kinds_of_bleu(table: Table) -> list[str]:
    """Which rows can be compared, where the BLEU of some is of another kind or their search had another minimum."""
    kinds = {"kinds": kind_of_bleu, "min_length": lambda record: min_length(record["dev"])}
    notes = []
    for name, kind in kinds.items():
        found: dict[Any, list[str]] = {}
        for row in table.trained if table.is_translation else []:
            found.setdefault(kind(row.records[0]), []).append(row.name)
        if len(found) > 1:
            listed = "; ".join(f"{value}: {', '.join(rows)}" for value, rows in found.items())
            notes.append(f"BLEU of different {name} is not comparable: {listed}.")
    return notes


def _missing_base(table: Table) -> list[str]:
    if table.has_base:
        return []
    return [f"No records of a row {table.base}, so no differences from it and no p; --base=ROW names another row."]


def _without_p(table: Table) -> list[str]:
    rows = [row.name for row in table.trained if row.p_value is None and row.name != table.base]
    if not (rows and table.has_base and table.is_translation):
        return []
    return [f"No p of {', '.join(rows)}: not every seed is compared with {table.base} of the same seed."]


def _statistics(table: Table) -> list[str]:
    found = []
    if any(len(row.records) > 1 for row in table.trained):
        found.append("± is the standard deviation over the seeds.")
    compared = [row for row in table.trained if row.p_value is not None]
    if compared:
        several = "; of several seeds the largest, or 1 where their differences are not all of one sign"
        several *= any(len(row.records) > 1 for row in compared)
        significant = sum(is_significant(row, table) for row in compared)
        found += [
            f"p: two-sided, twice that of sacreBLEU's paired bootstrap against {table.base} of the same seed{several}.",
            f"p (Holm): corrected for {len(compared)} comparison{'s' * (len(compared) > 1)}; * is significance at "
            f"{SIGNIFICANCE_LEVEL:.0%}: {significant} of {len(compared)}.",
        ]
    return found


def _correlations(table: Table) -> list[str]:
    if not table.comparable:
        return []
    return [
        f"Spearman's rank correlation with the paper, {MEASURED[column]}: {correlation(table, column)}"
        for column in SCORES
    ]


def _of_all_rows(table: Table) -> list[str]:
    """How base departs from its config in settings without a column, which holds for all rows."""
    return [f"All rows: {_other_settings(row)}." for row in table.rows if row.name == table.base and row.other_changes]


def _first_weights(table: Table) -> list[str]:
    """The runs whose weights the training of rows began from, where these were not random."""
    begun = [f"{row.name}: {of['init_from']}" for row in table.trained for of in row.records if "init_from" in of]
    return [f"Trained from the weights of another run: {'; '.join(begun)}."] if begun else []


def _shortened(rows: Sequence[Row]) -> list[str]:
    by_steps: dict[str, list[str]] = {}
    for row in rows:
        steps, full = row.records[0]["steps"], paper.train_steps(row.name)
        if steps < full:
            by_steps.setdefault(f"{steps:,} steps instead of {full:,}", []).append(row.name)
    return [f"Shortened runs, {steps}: {', '.join(names)}." for steps, names in by_steps.items()]


def _conditions(record: Record) -> str:
    dev, config = record["dev"], record["config"]
    sentences = [f"{dev['sentences']:,} dev sentences"] if "sentences" in dev else []
    signature = [dev["signature"]] if "signature" in dev else []
    averaged = len(record["averaged_steps"])
    averages = [f"average of the last {averaged} checkpoints"] if averaged > 1 else []
    pieces = record.get("vocab_size", config["data.vocab_size"])
    data = ", ".join([f"{pieces:,} pieces", *averages, *sentences, *signature])
    languages = f"{config['data.source_language']}-{config['data.target_language']}"
    return f"Ours: {config['data.corpus']} {languages}, {data}."


def _trained_on(table: Table) -> list[str]:
    """The rows of which some seed was trained on each hardware and version of JAX."""
    rows: dict[str, dict[str, None]] = {}
    for row in table.trained:
        for record in row.records:
            for place in record.get("trained_on") or [record]:  # earlier versions noted that of the evaluation alone
                rows.setdefault(f"{place['hardware']}, jax {place['jax']}", {})[row.name] = None
    return [f"Trained on {place}: {', '.join(names)}." for place, names in sorted(rows.items())]


# --- The command -------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser("experiments.table3_variations", __doc__)
    ours = parser.add_mutually_exclusive_group()
    path = os.path.expanduser
    ours.add_argument("--records", type=path, help="a folder of records")
    ours.add_argument("--workdir", type=path, help="the --workdir of a sweep")
    parser.add_argument(
        "--configs", type=path, default=str(CONFIGS / "table3"), help="a folder of configs, one per row"
    )
    parser.add_argument("--base", metavar="ROW", help="the row that the others are compared with; default: base")
    parser.add_argument("--format", choices=FORMATS, default="markdown")
    parser.add_argument("--figure", help="plot our scores against the paper's into this .png or .svg file")
    return exit_code_of(lambda: show(parser.parse_args(argv)))


def show(options: Any) -> None:
    """Draws the figure, prints the table to standard output and the notes under it, with CSV to standard error."""
    figure = options.figure and figure_file("--figure", options.figure)
    records = read_records(options.records) if options.records else []
    records = sweep_records(options.workdir, options.base) if options.workdir else records
    table = make_table(records, options.configs, options.base)
    if figure:
        draw(table, figure)
    header, rows = for_csv(table) if options.format == "csv" else for_people(table)
    print(render(header, rows, options.format))
    print_notes(notes(table), options.format)


if __name__ == "__main__":
    sys.exit(main())
