"""Training curves of runs: what they logged, over the steps, each run in a colour of its own.

    python -m experiments.curves RUN [RUN ...] [--output=FILE.png|FILE.svg]

A panel for each of: the loss (label-smoothed); perplexity, in training and on dev; the headline score on dev; the
learning rate; target tokens a second. A run may still be in progress; nothing in it is written. Where a run has the
model of a row of Table 3 and its corpus, dotted lines are the paper's dev perplexity and BLEU. Prints the last values
of each run.
"""

import dataclasses
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import paper
from experiments.figure_file import figure_file, save
from experiments.json_types import is_number
from experiments.sweep.plan import CONFIGS, parse_config
from t2t_jax.argument_parser import argument_parser
from t2t_jax.errors import InputError, exit_code_of
from t2t_jax.evaluation.metrics import METRICS
from t2t_jax.run_folder import RunFolder
from t2t_jax.visualization.figures import head_colours, without_controls

DEV = "dev_"  # begins the names of what an evaluation logs
DEV_PERPLEXITY, TRAINING_PERPLEXITY = "dev_perplexity", "training_perplexity"
SPEED, SKIPPED = "target_tokens_per_second", "skipped_steps"
PRINTED = {DEV_PERPLEXITY: "perplexity", "dev_bleu": "bleu"}  # what Table 3 has, by the name of ours
_LARGEST_NLL = 600  # nats per subword, of which exp is still a number that can be drawn
_LONGEST_NAME = 40  # characters
_COLUMNS, _PANEL_INCHES, _DOTS_PER_INCH = 3, (3.7, 2.8), 150
_LONGEST_LEGEND, _LEGEND_LINE_INCHES = 12, 0.2  # lines that fit into a panel, the height of one


class Panel(NamedTuple):
    """One plot; `fields` are drawn in it: those of an evaluation as points joined by lines, others as lines."""

    title: str
    fields: tuple[str, ...]
    scale: str = "linear"


@dataclasses.dataclass(frozen=True)
class Curves:
    """What a run logged: {field: {step: value}}, and how many values are no finite numbers, which are left out.

    `row` is the row of Table 3 that the run repeats, if any.
    """

    name: str
    values: dict[str, dict[int, float]]
    left_out: int
    row: str | None

    @property
    def fields(self) -> list[str]:
        """The fields that a panel shows, with at least one value."""
        return [field for panel in panels(self.values) for field in panel.fields if self.values.get(field)]

    @property
    def last_step(self) -> int:
        return max(max(self.values[field]) for field in self.fields)

    def skips(self) -> Iterator[tuple[int, float]]:
        """(step, loss) of the log entries before which updates were skipped."""
        before, loss = 0, self.values.get("loss", {})
        for step, count in sorted(self.values.get(SKIPPED, {}).items()):
            if count > before and step in loss:
                yield step, loss[step]
            before = count


def panels(fields: Sequence[str]) -> list[Panel]:
    """The panels for runs that have these fields."""
    scores = sorted(field for field in fields if field.startswith(DEV) and field != DEV_PERPLEXITY)
    return [
        Panel("label-smoothed loss, nats per token", ("loss",)),
        Panel("perplexity per token", (TRAINING_PERPLEXITY, DEV_PERPLEXITY), "log"),
        *(Panel(f"{score_label(field)}, dev", (field,)) for field in scores),
        Panel("learning rate", ("learning_rate",)),
        Panel("target tokens a second", (SPEED,)),
    ]


def score_label(field: str) -> str:
    """What the headline score of an evaluation is called in print: "BLEU" for dev_bleu."""
    metric = METRICS.get(name := field.removeprefix(DEV))
    return metric.labels[metric.headline] if metric else name


def read(folder: str, name: str) -> Curves:
    """The curves of a run. Of a step that is logged twice the later entry counts."""
    if any(Path(folder).glob("*/seed_*/config.json")):
        raise InputError(f"run: {folder} is a sweep; give its runs, {folder.rstrip('/')}/*/seed_*")
    run = RunFolder.open(folder)
    row, values, left_out = table3_row(run.config), {}, 0
    for record in run.metrics():
        step = record.pop("step")
        if is_number(nll := record.get("nll")) and nll < _LARGEST_NLL:
            record[TRAINING_PERPLEXITY] = math.exp(nll)
        for field, value in record.items():
            if is_number(value) and is_number(step):
                values.setdefault(field, {})[step] = value
            else:
                left_out += 1
    return Curves(name, values, left_out, row)


def table3_row(config: dict[str, Any]) -> str | None:
    """The row of Table 3 whose model, label smoothing and corpus a run has; None if there is none.

    What else a run may have changed, such as its number of steps, is for the reader to judge.
    """
    if config["data"]["corpus"] != "wmt14_ende":  # the others would have to be parsed for nothing
        return None
    found = _compared(config)
    rows = (row for row in paper.TABLE_3 if found == _compared(parse_config(CONFIGS / f"table3/{row}.py").to_dict()))
    return next(rows, None)


def _compared(config: dict[str, Any]) -> list[Any]:
    languages = [config["data"].get(f"{side}_language") for side in ("source", "target")]
    return [config["model"], config.get("train", {}).get("label_smoothing"), config["data"]["corpus"], *languages]


def names(folders: Sequence[str]) -> list[str]:
    """What the runs are called in the figure: their paths from the folder that they share."""
    paths = [Path(folder).expanduser().resolve() for folder in folders]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise InputError(f"run: {folders[number]} is given twice; give it once")
    shared = os.path.commonpath([path.parent for path in paths])
    texts = [without_controls(str(path.relative_to(shared))) for path in paths]
    return [text if len(text) <= _LONGEST_NAME else "…" + text[1 - _LONGEST_NAME :] for text in texts]


# --- The figure --------------------------------------------------------------------------------------------


def figure(runs: Sequence[Curves]) -> Any:
    """The panels of all runs and, in the last place or, if it is too long for that, under them, the legend."""
    from matplotlib.figure import Figure  # half a second

    shown, colours = panels(sorted({field for run in runs for field in run.values})), head_colours(len(runs))
    handles = _legend_handles(runs, colours)
    lines = [1 + handle.get_label().count("\n") for handle in handles]
    is_long = sum(lines) > _LONGEST_LEGEND
    width, height = _PANEL_INCHES
    heights = [height] * -(-(len(shown) + (not is_long)) // _COLUMNS)
    if is_long:
        heights.append(_LEGEND_LINE_INCHES * (1 + max(map(sum, np.array_split(lines, _COLUMNS)))))
    made = Figure(figsize=(_COLUMNS * width, sum(heights)), layout="constrained")
    grid = made.add_gridspec(len(heights), _COLUMNS, height_ratios=heights)
    for number, panel in enumerate(shown):
        draw(made.add_subplot(grid[number // _COLUMNS, number % _COLUMNS]), panel, runs, colours)
    _draw_legend(made.add_subplot(grid[-1, slice(None) if is_long else -1]), handles, _COLUMNS if is_long else 1)
    return made


def draw(axes: Any, panel: Panel, runs: Sequence[Curves], colours: Sequence[str]) -> None:
    """One panel: what each run logged, and the paper's values of the same."""
    for run, colour in zip(runs, colours, strict=True):
        for field in panel.fields:
            if points := run.values.get(field):
                axes.plot(*zip(*sorted(points.items()), strict=True), **_style(field, len(points)), color=colour)
        if panel.fields == ("loss",) and (skips := list(run.skips())):
            axes.plot(*zip(*skips, strict=True), **_SKIPPED_STYLE, color=colour)
    for row, colour in _repeated_rows(runs, colours).items():
        for field in PRINTED.keys() & panel.fields:
            axes.axhline(paper.TABLE_3[row][PRINTED[field]], **_PAPER_STYLE, color=colour)
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel("step", fontsize=9)
    axes.set_xlim(0, 1.03 * max(run.last_step for run in runs) or 1)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=8)
    _set_scale(axes, panel, runs)
    if not any(run.values.get(field) for run in runs for field in panel.fields):
        axes.text(0.5, 0.5, "nothing logged", transform=axes.transAxes, ha="center", color="0.5")


_SKIPPED_STYLE = {"linestyle": "", "marker": "x", "markersize": 7, "markeredgewidth": 2}
_PAPER_STYLE = {"linestyle": ":", "linewidth": 1.6}


def _style(field: str, count: int) -> dict[str, Any]:
    if field.startswith(DEV):
        return {"marker": "o", "markersize": 3.5, "linewidth": 1.5}
    return {"marker": "." if count == 1 else "", "linewidth": 1, "alpha": 0.8}


def _repeated_rows(runs: Sequence[Curves], colours: Sequence[str]) -> dict[str, str]:
    """The rows of Table 3 that the runs repeat, each with the colour of its first run."""
    rows: dict[str, str] = {}
    for run, colour in zip(runs, colours, strict=True):
        if run.row:
            rows.setdefault(run.row, colour)
    return rows


def _set_scale(axes: Any, panel: Panel, runs: Sequence[Curves]) -> None:
    """Scales and labels of the axes. Perplexities far above any on dev, those of the first steps, are cut off."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    if panel.scale == "log":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, position: f"{value:,g}")
        on_dev = [value for run in runs for value in run.values.get(DEV_PERPLEXITY, {}).values()]
        axes.set_ylim(top=min(axes.get_ylim()[1], 5 * max(on_dev, default=math.inf)))
    elif panel.fields == (SPEED,):
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    else:
        axes.ticklabel_format(axis="y", scilimits=(-3, 6), useMathText=True)


def _legend_handles(runs: Sequence[Curves], colours: Sequence[str]) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, label=run.name) for run, colour in zip(runs, colours, strict=True)]
    logged = {field for run in runs for field in run.fields}
    if any(not field.startswith(DEV) for field in logged):
        handles.append(Line2D([], [], **_style("loss", 2), color="0.3", label="in training, with dropout"))
    if any(field.startswith(DEV) for field in logged):
        handles.append(Line2D([], [], **_style(DEV, 2), color="0.3", label="on dev"))
    if any(list(run.skips()) for run in runs):
        handles.append(Line2D([], [], **_SKIPPED_STYLE, color="0.3", label="updates skipped before this entry"))
    for row, colour in _repeated_rows(runs, colours).items():
        printed = paper.TABLE_3[row]
        scores = f"perplexity {printed['perplexity']:.2f}, tokenised BLEU {printed['bleu']}"
        label = f"paper, {row}, after {paper.train_steps(row):,} steps:\n{scores}"
        handles.append(Line2D([], [], **_PAPER_STYLE, color=colour, label=label))
    return handles


def _draw_legend(axes: Any, handles: Sequence[Any], columns: int) -> None:
    axes.set_axis_off()
    legend = axes.legend(handles=handles, loc="upper left", frameon=False, fontsize=9, ncols=columns)
    for text in legend.get_texts():
        text.set_parse_math(False)


# --- The command -------------------------------------------------------------------------------------------


def summary(run: Curves) -> str:
    """The last values of a run, and what of its log is not drawn."""
    parts = []
    for field, label, digits in (("loss", "loss", 3), (DEV_PERPLEXITY, "dev perplexity", 2)):
        if points := run.values.get(field):
            parts.append(f"{label} {points[max(points)]:.{digits}f}")
    for field in (field for field in run.fields if field.startswith(DEV) and field != DEV_PERPLEXITY):
        points = run.values[field]
        parts.append(f"dev {score_label(field)} {points[max(points)]:.4g}")
    if skipped := run.values.get(SKIPPED):
        parts.append(f"{max(skipped.values()):,.0f} updates skipped")
    if run.left_out:
        parts.append(f"{run.left_out} values are no finite numbers: not drawn")
    return f"{run.name}: up to step {run.last_step:,}: {', '.join(parts)}"


def show(folders: Sequence[str], output: str) -> None:
    """Draws the runs into the file `output` and prints a line for each."""
    file = figure_file("--output", output)
    runs = [read(*pair) for pair in zip(folders, names(folders), strict=True)]
    empty = [folder for folder, run in zip(folders, runs, strict=True) if not run.fields]
    if len(empty) == len(runs):
        raise InputError(f"run: {', '.join(empty)}: nothing logged yet; train.log_interval is the number of steps")
    for folder in empty:
        print(f"{folder}: nothing logged yet, so it is not drawn", file=sys.stderr)
    drawn = [run for run in runs if run.fields]
    save(figure(drawn), "--output", file, _DOTS_PER_INCH)
    for run in drawn:
        print(summary(run))
    print(file)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser("experiments.curves", __doc__)
    parser.add_argument("folders", nargs="+", metavar="RUN", help="a run folder")
    parser.add_argument("--output", default="curves.png", help="a .png or .svg file; default: curves.png")
    return exit_code_of(lambda: show(**vars(parser.parse_args(argv))))


if __name__ == "__main__":
    sys.exit(main())
