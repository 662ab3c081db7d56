"""Table 3 as a figure: our scores against the paper's, one labelled point per row."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.figure_file import save
from experiments.table3_rows import SCORES, Row, Table, correlation
from t2t_jax.errors import InputError

_GROUPS = {"a": "(A)", "b": "(B)", "c": "(C)", "d": "(D)", "e": "(E)"}


def draw(table: Table, path: str) -> None:
    """Draws perplexity and BLEU of the rows that both have; error bars are standard deviations over the seeds."""
    from matplotlib.figure import Figure  # half a second

    if not table.comparable:
        raise InputError("--figure needs a record of one of the paper's rows; give --records or --workdir")
    figure = Figure(figsize=(14, 7), layout="constrained")
    for axes, column in zip(figure.subplots(1, 2), SCORES, strict=True):
        scatter(axes, table, column)
    save(figure, "--figure", path, dots_per_inch=120)


def scatter(axes: Any, table: Table, column: str) -> None:
    """Draws one column, in a colour for each of the paper's groups of rows."""
    rows = table.comparable
    x = [row.printed[column] for row in rows]
    y = [row.mean_and_deviation(column) for row in rows]
    groups = [_group(row) for row in rows]
    colours = {group: f"C{n}" for n, group in enumerate(dict.fromkeys(groups))}
    for group, colour in colours.items():
        points = [
            (at, *value, *[0] * (2 - len(value))) for at, value, g in zip(x, y, groups, strict=True) if g == group
        ]
        style = {"fmt": "o", "markersize": 5, "elinewidth": 0.8, "capsize": 2, "color": colour}
        axes.errorbar(*zip(*points, strict=True), label=_GROUPS.get(group, group), **style)
    unit = {"perplexity": "perplexity a subword", "bleu": "BLEU"}[column]
    axes.set(xlabel=f"paper: dev {unit}", ylabel=f"ours: dev {'sacre' if column == 'bleu' else ''}{unit}")
    axes.set_title(f"Spearman {correlation(table, column)}", fontsize=10)
    axes.margins(0.12)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    names = {row.name: colours[group] for row, group in zip(rows, groups, strict=True)}
    _label_points(axes, x, [value[0] for value in y], names)


def _group(row: Row) -> str:
    return row.name.partition("_")[0] if "_" in row.name else "base, big"


def _label_points(axes: Any, x: Sequence[float], y: Sequence[float], names: dict[str, str]) -> None:
    """Writes each name, in its colour, at the least crowded of several offsets from its point."""
    axes.figure.draw_without_rendering()
    pixels_per_point = axes.figure.dpi / 72
    dots = axes.transData.transform(np.column_stack([x, y]))
    taken = [axes.get_legend().get_window_extent().extents]
    for n, (name, colour) in enumerate(names.items()):
        width, height = _text_size(axes, name)
        boxes = {}
        for right, up in _offsets():
            left = dots[n, 0] + right * pixels_per_point - (width if right < 0 else 0)
            bottom = dots[n, 1] + up * pixels_per_point - height / 2
            boxes[right, up] = left, bottom, left + width, bottom + height
        penalties = [_overlap_penalty(box, taken, dots, n) for box in boxes.values()]
        chosen = list(boxes)[int(np.argmin(penalties))]
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
