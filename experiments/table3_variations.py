"""Table 3: variations on the base model, the paper's numbers beside ours.

    python -m experiments.table3_variations [--records=FOLDER | --workdir=SWEEP] [--format=markdown|latex|csv]
        [--figure=FILE.png|FILE.svg]

FOLDER holds records; SWEEP holds runs, ROW/seed_N. Rows are those of configs/table3, and empty where there is none; a
field that is not listed is that of base, the paper's or ours. In Markdown and LaTeX, "a → b" is the paper's value and
then ours; in CSV each has a column. Our BLEU is sacreBLEU of the dev set, the paper's has tokens of its own and
compounds split, and a vocabulary has perplexities of its own: compare a row with the base of its own column, and the
columns by the order they put the rows in.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import paper
from experiments.records import Record, need_scores, read_records, sweep_records
from experiments.tables import FORMATS, print_notes, render
from t2t_jax.errors import InputError, choice, exit_code_of

HEADINGS = {"num_layers": "N", "d_model": "d_model", "d_ff": "d_ff", "num_heads": "h", "d_k": "d_k", "d_v": "d_v",
            "dropout": "P_drop", "label_smoothing": "ε_ls", "train_steps": "steps"}  # fmt: skip
MEASURED = {"perplexity": "PPL (dev)", "bleu": "BLEU (dev)", "parameters": "params ×10⁶"}
SPREAD = ("perplexity", "bleu")  # what differs from seed to seed
DIGITS = {"perplexity": (2, 2), "bleu": (1, 2), "parameters": (0, 1)}  # the paper's and ours, behind the point
GROUPS = {"a": "(A)", "b": "(B)", "c": "(C)", "d": "(D)", "e": "(E)"}


@dataclasses.dataclass(frozen=True)
class Line:
    """A row of the table: what the paper prints of it, and what we found."""

    row: str
    printed: dict[str, Any]  # the paper's, where it has any
    records: list[Record]  # ours, by seed
    fields: dict[str, Any]  # our values of the cells the paper fills, and of those that differ from our base

    def measured(self, name: str) -> list[float]:
        """A column of `MEASURED`, one value a seed."""
        if name == "parameters":
            return [record["parameters"] / 1e6 for record in self.records]
        return [record["dev"]["sacrebleu" if name == "bleu" else name] for record in self.records]

    @property
    def p_value(self) -> float | None:
        """Of the paired bootstrap against the base of the same seed, the largest over the seeds."""
        found = [record["against_base"]["p_value"] for record in self.records if "against_base" in record]
        return max(found) if found else None


def lines(records: Sequence[Record]) -> list[Line]:
    """The rows in the paper's order."""
    check(records)
    of_row = {row: [record for record in records if record["row"] == row] for row in paper.TABLE_3}
    base = of_row["base"]
    return [Line(row, paper.TABLE_3[row], ours, _fields(row, ours, base)) for row, ours in of_row.items()]


def check(records: Sequence[Record]) -> None:
    """Refuses what does not make one table: unknown rows, seeds twice or unlike each other, averaged checkpoints."""
    first: dict[str, Record] = {}
    seen = set()
    for record in records:
        row, name = choice("row", record["row"], paper.TABLE_3), f"{record['row']}, seed {record['seed']}"
        need_scores(record, "dev", ("sacrebleu", "signature", "perplexity", "sentences"))
        if (row, record["seed"]) in seen:
            raise InputError(f"records: {name} is there twice; remove one")
        seen.add((row, record["seed"]))
        if len(record["averaged_steps"]) != 1:
            raise InputError(
                f"records: {name} is an average of {len(record['averaged_steps'])} checkpoints; Table 3 takes the last "
                "alone (checkpoint.average_last=1)"
            )
        other = first.setdefault(row, record)
        if (record["config"], record["steps"]) != (other["config"], other["steps"]):
            raise InputError(
                f"records: {name} and seed {other['seed']} differ in config or steps; one row has one of each"
            )


def _fields(row: str, ours: list[Record], base: list[Record]) -> dict[str, Any]:
    values, base_values = (_values(records[0]) if records else {} for records in (ours, base))
    return {name: v for name, v in values.items() if name in paper.TABLE_3[row] or v != base_values.get(name)}


def _values(record: Record) -> dict[str, Any]:
    elsewhere = {"label_smoothing": record["config"]["train.label_smoothing"], "train_steps": record["steps"]}
    return {name: elsewhere[name] if name in elsewhere else record["config"][f"model.{name}"] for name in HEADINGS}


# --- As text -----------------------------------------------------------------------------------------------


def for_people(table: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: the paper's fields and ours in one cell, the measured ones in two."""
    header = ["row", *HEADINGS.values()]
    for name, heading in MEASURED.items():
        header += [heading, "ours, sacreBLEU" if name == "bleu" else "ours"]
    return [*header, "seeds", "p"], [_for_people(line) for line in table]


def _for_people(line: Line) -> list[str]:
    cells = [line.row]
    for name in HEADINGS:
        theirs, ours = (_field(name, values.get(name)) for values in (line.printed, line.fields))
        cells.append(f"{theirs} → {ours}".strip() if ours and ours != theirs else theirs)
    for name in MEASURED:
        found = [f"{value:.{DIGITS[name][1]}f}" for value in mean_and_deviation(line, name)]
        cells += [_printed(line, name), " ± ".join(found)]
    return [*cells, str(len(line.records) or ""), "" if line.p_value is None else f"{line.p_value:.3f}"]


def for_programs(table: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    """Header and rows with one number a cell."""
    header = ["row"]
    for heading in HEADINGS.values():
        header += [heading, f"{heading} ours"]
    for name, heading in MEASURED.items():
        header += [heading, f"{heading} ours", *([f"{heading} ours deviation"] if name in SPREAD else [])]
    return [*header, "seeds", "p"], [_for_programs(line) for line in table]


def _for_programs(line: Line) -> list[str]:
    cells = [line.row]
    for name in HEADINGS:
        cells += [str(values.get(name, "")) for values in (line.printed, line.fields)]
    for name in MEASURED:
        found = [f"{value:.4f}" for value in mean_and_deviation(line, name)]
        cells += [_printed(line, name), *found, *[""] * ((2 if name in SPREAD else 1) - len(found))]
    return [*cells, str(len(line.records)), "" if line.p_value is None else f"{line.p_value:.4f}"]


def mean_and_deviation(line: Line, name: str) -> list[float]:
    """Nothing without seeds, the value of one; of several, the mean and the standard deviation (n − 1)."""
    values = line.measured(name)
    spread = [statistics.stdev(values)] if len(values) > 1 and name in SPREAD else []
    return [statistics.mean(values), *spread] if values else []


def _printed(line: Line, name: str) -> str:
    """The paper's number with the paper's digits."""
    return f"{line.printed[name]:.{DIGITS[name][0]}f}" if name in line.printed else ""


def _field(name: str, value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if name == "train_steps" else str(value)


def notes(table: Sequence[Line]) -> list[str]:
    """What the numbers of this table need to be read."""
    found = [line for line in table if line.records]
    records = [record for line in found for record in line.records]
    if not records:
        return ["No records: the paper's numbers alone."]
    several = any(len(line.records) > 1 for line in found)
    said = ["± is the standard deviation over the seeds."] if several else []
    if any(line.p_value is not None for line in found):
        said.append("p: paired bootstrap of sacreBLEU against the base of the same seed, the largest over the seeds.")
    return [
        "The paper's BLEU: its own tokens, compounds split. Perplexity: a subword of each one's own vocabulary.",
        *said,
        *(f"Spearman's rank correlation with the paper, {MEASURED[name]}: {_correlation(found, name)}"
          for name in SPREAD),
        *_shortened(found),
        *sorted({_conditions(record) for record in records}),
    ]  # fmt: skip


def _correlation(found: list[Line], name: str) -> str:
    value = spearman([line.printed[name] for line in found], [mean_and_deviation(line, name)[0] for line in found])
    return f"undefined ({len(found)} rows)" if value is None else f"{value:.2f} ({len(found)} rows)"


def _shortened(found: list[Line]) -> list[str]:
    rows: dict[str, list[str]] = {}
    for line in found:
        steps, full = line.records[0]["steps"], line.records[0]["train_steps_of_config"]
        if steps < full:
            rows.setdefault(f"{steps:,} steps instead of {full:,}", []).append(line.row)
    return [f"Shortened runs, {said}: {', '.join(names)}." for said, names in rows.items()]


def _conditions(record: Record) -> str:
    dev, config = record["dev"], record["config"]
    return (f"Ours: {config['data.corpus']} {config['data.source_language']}-{config['data.target_language']}, "
            f"{config['data.vocab_size']:,} pieces, {dev['sentences']:,} dev sentences, {dev['signature']}; "
            f"{record['hardware']}, jax {record['jax']}.")  # fmt: skip


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's rank correlation; equal values share the mean of their ranks. None where one side is all equal."""
    ranks = np.stack([_ranks(x), _ranks(y)])
    if len(x) < 2 or (np.ptp(ranks, axis=1) == 0).any():
        return None
    return float(np.corrcoef(ranks)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    values = np.asarray(values, float)
    below, equal = values[:, None] > values, values[:, None] == values
    return below.sum(1) + (equal.sum(1) + 1) / 2


# --- As a figure -------------------------------------------------------------------------------------------


def draw(table: Sequence[Line], path: str) -> None:
    """Ours against the paper's: perplexity and BLEU, a point a row, bars the deviation over the seeds."""
    from matplotlib.figure import Figure  # half a second

    found = [line for line in table if line.records]
    if not found:
        raise InputError("--figure needs at least one record; give --records or --workdir")
    figure = Figure(figsize=(14, 7), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), SPREAD, strict=True):
        _scatter(axes, found, name)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise InputError(f"--figure={path} can't be written: {error.strerror}") from None


def _scatter(axes: Any, found: list[Line], name: str) -> None:
    x = [line.printed[name] for line in found]
    y = [mean_and_deviation(line, name) for line in found]
    groups = [line.row.partition("_")[0] if "_" in line.row else "base, big" for line in found]
    colours = {group: f"C{n}" for n, group in enumerate(dict.fromkeys(groups))}
    for group, colour in colours.items():
        points = [
            (at, *value, *[0] * (2 - len(value))) for at, value, g in zip(x, y, groups, strict=True) if g == group
        ]
        style = {"fmt": "o", "markersize": 5, "elinewidth": 0.8, "capsize": 2, "color": colour}
        axes.errorbar(*zip(*points, strict=True), label=GROUPS.get(group, group), **style)
    unit = {"perplexity": "perplexity a subword", "bleu": "BLEU"}[name]
    axes.set(xlabel=f"paper: dev {unit}", ylabel=f"ours: dev {'sacre' if name == 'bleu' else ''}{unit}")
    axes.set_title(f"Spearman {_correlation(found, name)}", fontsize=10)
    axes.margins(0.12)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    names = {line.row: colours[group] for line, group in zip(found, groups, strict=True)}
    _label_points(axes, x, [value[0] for value in y], names)


def _label_points(axes: Any, x: list[float], y: list[float], names: dict[str, str]) -> None:
    """Each name, in its colour, near its own point and on no other; farther off where it is crowded."""
    axes.figure.draw_without_rendering()
    pixels_a_point = axes.figure.dpi / 72
    dots = axes.transData.transform(np.column_stack([x, y]))
    taken = [axes.get_legend().get_window_extent().extents]
    for n, (name, colour) in enumerate(names.items()):
        width, height = _text_size(axes, name)
        boxes = {}
        for right, up in _offsets():
            left = dots[n, 0] + right * pixels_a_point - (width if right < 0 else 0)
            bottom = dots[n, 1] + up * pixels_a_point - height / 2
            boxes[right, up] = left, bottom, left + width, bottom + height
        crowds = [_crowd(box, taken, dots, n) for box in boxes.values()]
        chosen = list(boxes)[int(np.argmin(crowds))]
        taken.append(boxes[chosen])
        line = {"arrowstyle": "-", "lw": 0.5, "color": colour, "shrinkA": 0, "shrinkB": 2}
        style = {"size": 8, "color": colour, "va": "center", "ha": "right" if chosen[0] < 0 else "left"}
        axes.annotate(name, (x[n], y[n]), chosen, textcoords="offset points", arrowprops=line, **style)


def _text_size(axes: Any, text: str) -> tuple[float, float]:
    """Width and height in pixels."""
    drawn = axes.text(0, 0, text, size=8)
    box = drawn.get_window_extent()
    drawn.remove()
    return box.width, box.height


def _crowd(box: tuple[float, ...], taken: list[Any], dots: np.ndarray, own: int) -> int:
    """How bad a place for the name of a dot `box` (left, bottom, right, top) is: what it covers, and who is nearer."""
    left, bottom, right, top = box
    covered = sum(left < b[2] and b[0] < right and bottom < b[3] and b[1] < top for b in taken)
    outside = np.maximum([left, bottom] - dots, dots - [right, top]).clip(0)
    gaps = np.hypot(*outside.T)
    return 3 * covered + 3 * int((gaps < 4).sum()) + int((gaps < gaps[own]).sum())


def _offsets():
    """Places around a point, in points of 1/72 inch, the nearest first."""
    for radius in (10, 18, 28, 40, 54, 70, 90):
        for angle in np.deg2rad((0, 180, 30, -30, 150, -150, 60, -60, 120, -120)):
            yield radius * np.cos(angle), radius * np.sin(angle)


# --- As a command ------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.table3_variations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    of_ours = parser.add_mutually_exclusive_group()
    of_ours.add_argument("--records", help="a folder of records")
    of_ours.add_argument("--workdir", help="a sweep's folder of runs")
    parser.add_argument("--format", choices=FORMATS, default="markdown")
    parser.add_argument("--figure", help="draw ours against the paper's into this .png or .svg file")
    options = parser.parse_args(argv)
    return exit_code_of(lambda: show(options))


def show(options: Any) -> None:
    """The table on standard output and the notes under it; under CSV, on standard error."""
    if options.figure and Path(options.figure).suffix not in (".png", ".svg"):
        raise InputError(f"--figure={options.figure}: must end in .png or .svg")
    records = read_records(options.records) if options.records else []
    table = lines(sweep_records(options.workdir) if options.workdir else records)
    header, rows = for_programs(table) if options.format == "csv" else for_people(table)
    print(render(header, rows, options.format))
    print_notes(notes(table), options.format)
    if options.figure:
        draw(table, options.figure)


if __name__ == "__main__":
    sys.exit(main())
