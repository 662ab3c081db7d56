"""Table 3 as a figure: our scores against the paper's, one labelled point per row."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.figure_file import save
from experiments.table3_rows import SCORES, Row, Table, correlation
from t2t_jax.errors import InputError

_POINT = {"markersize": 5, "linestyle": "none", "marker": "o"}
_BASE_LINE = {"color": "0.4", "linewidth": 0.6, "zorder": 0}
_GROUPS = {"a": "(A)", "b": "(B)", "c": "(C)", "d": "(D)", "e": "(E)"}


def draw(table: Table, path: Path) -> None:
    """Draws perplexity and BLEU of the rows that both have; error bars are standard deviations over the seeds."""
    from matplotlib.figure import Figure  # half a second

    if not table.comparable:
        raise InputError(
            "--figure compares with the paper: there is no record of a row of configs/table3; leave it out"
        )
    figure = Figure(figsize=(14, 7), layout="constrained")
    panels = list(zip(figure.subplots(1, 2), SCORES, strict=True))
    for axes, column in panels:
        scatter(axes, table, column)
    for axes, column in panels:  # when both have their sizes
        label_points(axes, table, column)
    save(figure, "--figure", path, dots_per_inch=120)


def scatter(axes: Any, table: Table, column: str) -> None:
    """Draws one column, in a colour for each of the paper's groups of rows, and two lines through base."""
    shown = []
    for group, colour in _colours(table).items():
        rows = [row for row in table.comparable if _group(row) == group]
        x, y = _points(rows, column)
        deviations = [(*row.mean_and_deviation(column), 0)[1] for row in rows]
        style = {**_POINT, "color": colour, "label": _GROUPS.get(group, group)}
        if any(deviations):
            shown.append(axes.errorbar(x, y, deviations, elinewidth=0.8, capsize=2, **style))
        else:
            shown += axes.plot(x, y, **style)
    base = _base(table)
    for x, y in zip(*_points(base, column), strict=True):
        axes.axvline(x, **_BASE_LINE)
        axes.axhline(y, **_BASE_LINE)
    if column == "perplexity":
        _make_logarithmic(axes)
    unit = {"perplexity": "perplexity per subword", "bleu": "BLEU"}[column]
    axes.set(xlabel=f"paper: dev {unit}", ylabel=f"ours: dev {'sacre' if column == 'bleu' else ''}{unit}")
    crossing = f"; the lines cross at {table.base}" if base else ""
    axes.set_title(f"Spearman {correlation(table, column)}{crossing}", fontsize=10)
    axes.margins(0.12)
    axes.grid(alpha=0.3)
    # Without handles, the groups with error bars would be last.
    axes.legend(handles=shown, fontsize=8, loc="upper left")  # empty if both order the rows alike


def _base(table: Table) -> list[Row]:
    """The row that the others are compared with, or nothing where there is no record of it."""
    return [row for row in table.comparable if row.name == table.base]


def _points(rows: Sequence[Row], column: str) -> tuple[list[float], list[float]]:
    """The paper's values, and ours, the means over the seeds."""
    return [row.printed[column] for row in rows], [row.mean_and_deviation(column)[0] for row in rows]


def _make_logarithmic(axes: Any) -> None:
    """Logarithmic axes, with round numbers as ticks though they span less than a decade."""
    from matplotlib.ticker import MaxNLocator, NullLocator, ScalarFormatter

    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(8))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_locator(NullLocator())


def _colours(table: Table) -> dict[str, str]:
    """The colour of each group of rows."""
    return {group: f"C{n}" for n, group in enumerate(dict.fromkeys(map(_group, table.comparable)))}


def _group(row: Row) -> str:
    return row.name.partition("_")[0] if "_" in row.name else "base, big"


def label_points(axes: Any, table: Table, column: str) -> None:
    """Writes the name of each row, in its colour, at the least crowded of several offsets from its point."""
    axes.figure.draw_without_rendering()
    pixels_per_point = axes.figure.dpi / 72
    x, y = _points(table.comparable, column)
    dots = axes.transData.transform(np.column_stack([x, y]))
    left, bottom, right, top = frame = axes.get_window_extent().extents
    taken = [axes.get_legend().get_window_extent().extents]
    for at in axes.transData.transform(np.column_stack(_points(_base(table), column))):
        taken += [(at[0], bottom, at[0], top), (left, at[1], right, at[1])]
    for n, row in enumerate(table.comparable):
        width, height = _text_size(axes, row.name)
        boxes = {}
        for right, up in _offsets():
            left = dots[n, 0] + right * pixels_per_point - (width if right < 0 else 0)
            bottom = dots[n, 1] + up * pixels_per_point - height / 2
            boxes[right, up] = left, bottom, left + width, bottom + height
        penalties = [_overlap_penalty(box, taken, dots, n) + 100 * _leaves(box, frame) for box in boxes.values()]
        chosen = list(boxes)[int(np.argmin(penalties))]
        taken.append(boxes[chosen])
        colour = _colours(table)[_group(row)]
        line = {"arrowstyle": "-", "lw": 0.5, "color": colour, "shrinkA": 0, "shrinkB": 2}
        style = {"size": 8, "color": colour, "va": "center", "ha": "right" if chosen[0] < 0 else "left"}
        axes.annotate(row.name, (x[n], y[n]), chosen, textcoords="offset points", arrowprops=line, **style)


def _leaves(box: tuple[float, ...], frame: Sequence[float]) -> bool:
    """Whether a box (left, bottom, right, top) is not wholly within another."""
    return box[0] < frame[0] or box[1] < frame[1] or box[2] > frame[2] or box[3] > frame[3]


def _text_size(axes: Any, text: str) -> tuple[float, float]:
    """Width and height in pixels."""
    drawn = axes.text(0, 0, text, size=8)
    box = drawn.get_window_extent()
    drawn.remove()
    return box.width, box.height


def _overlap_penalty(box: tuple[float, ...], taken: list[Any], dots: np.ndarray, index: int) -> int:
    """How bad `box` (left, bottom, right, top) is as a label of the dot `index`.

    Counts the labels and dots that it covers, three each, and the dots that are closer to it than its own.
    """
    left, bottom, right, top = box
    covered = sum(left < b[2] and b[0] < right and bottom < b[3] and b[1] < top for b in taken)
    outside = np.maximum([left, bottom] - dots, dots - [right, top]).clip(0)
    distances = np.hypot(*outside.T)
    return 3 * covered + 3 * int((distances < 4).sum()) + int((distances < distances[index]).sum())


def _offsets() -> Iterator[tuple[float, float]]:
    """Candidate label offsets from a dot, in points (1/72 inch), the nearest first."""
    for radius in (10, 18, 28, 40, 54, 70, 90):
        for angle in np.deg2rad((0, 180, 30, -30, 150, -150, 60, -60, 120, -120)):
            yield radius * np.cos(angle), radius * np.sin(angle)
