"""Figures 3–5: attention weights drawn with Matplotlib, as lines in the paper's style and as heat maps."""

import colorsys
import contextlib
import functools
import itertools
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from t2t_jax.data.plain_text import JOINERS
from t2t_jax.decoding.attention_maps import AttentionMap

# D3's category10, the colours of tensor2tensor's viewer, with which the paper's figures were made.
_CATEGORY10 = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf",
)  # fmt: skip
_DOTS_PER_INCH = 150
_LONGEST_LABEL = 24  # characters
_CELLS = 0.9  # width of the cells of all heads at a key, of the distance between keys
MOST_LINES = 2000  # of a head; of longer sentences the strongest are drawn
_INVISIBLE = 1 / 510  # a weight below this is an opacity of zero in 8 bits

# Inches.
_TOKEN_WIDTH, _CHARACTER_WIDTH, _TITLE_HEIGHT, _LINES_HEIGHT, _TEXT_HEIGHT = 0.21, 0.085, 0.35, 1.7, 0.19
_MARGIN, _SMALLEST_WIDTH, _CAPTION_CHARACTER_WIDTH = 0.15, 4.8, 0.072
_KEY_WIDTH, _KEY_HEIGHT, _KEY_SQUARE = 0.38, 0.24, 0.12  # of a head's entry in the key of colours; of its square
_MAP_PER_TOKEN, _SMALLEST_MAP, _LARGEST_MAP = 0.1, 1.1, 4.0  # of a heat map's side
_MAP_GAP, _MAP_TITLE_HEIGHT, _BAR_WIDTH = 0.1, 0.25, 0.6

_MAP_LABEL_SIZE, _SMALLEST_MAP_LABEL = 6, 3  # points; from 40 tokens on they shrink with the cells
_MOST_MAP_LABELS = int(_LARGEST_MAP / _MAP_PER_TOKEN * _MAP_LABEL_SIZE / _SMALLEST_MAP_LABEL)


class Panel(NamedTuple):
    """Heads of one layer of a map, counted from 1; with a `query`, only what the token at this position attends to."""

    map: AttentionMap
    layer: int
    heads: Sequence[int]
    title: str = ""
    query: int | None = None


def head_colours(count: int) -> list[str]:
    """A colour for each head, as #rrggbb: the paper's for up to ten, else hues at equal distances."""
    if count <= len(_CATEGORY10):
        return list(_CATEGORY10[:count])
    rgb = [colorsys.hls_to_rgb(n / count, (0.42, 0.6)[n % 2], 0.75) for n in range(count)]
    return ["#" + "".join(f"{round(255 * channel):02x}" for channel in colour) for colour in rgb]


def without_controls(text: str) -> str:
    """The text with "·" for each control or formatting character, apart from the joiners of words and emoji."""
    return "".join(c if c.isprintable() or c in JOINERS else "·" for c in text)


def printable(token: str) -> str:
    """The token as a label: "<EOS>" as in the paper, control and formatting characters as "·", long ones shortened."""
    label = "<EOS>" if token == "</s>" else without_controls(token)
    return label if len(label) <= _LONGEST_LABEL else label[: _LONGEST_LABEL - 1] + "…"


def draw_lines(panels: Sequence[Panel], caption: str = "") -> Any:
    """A figure of panels, one below the other: queries on top, keys below, joined by lines whose opacity is the weight.

    Left out: lines of weights below 1/510, which would be invisible, and all but the `MOST_LINES` strongest of a head.
    Below the panels, if one of them has several heads, is a key: the number and the colour of each head.
    """
    from matplotlib.figure import Figure  # half a second

    slots = max(max(len(panel.map.queries), len(panel.map.keys)) for panel in panels)
    span = _TOKEN_WIDTH * slots
    width = max(_SMALLEST_WIDTH, span + 2 * _MARGIN)
    lines = textwrap.wrap(caption, int((width - 2 * _MARGIN) / _CAPTION_CHARACTER_WIDTH))
    heights = [(_TITLE_HEIGHT * bool(p.title), _label_height(p.map.queries), _label_height(p.map.keys)) for p in panels]
    key = _key_rows(panels, width)
    height = sum(map(sum, heights)) + _LINES_HEIGHT * len(panels) + _TEXT_HEIGHT * len(lines) + 2 * _MARGIN
    height += _KEY_HEIGHT * len(key)
    figure = Figure(figsize=(width, height))
    top = height - _MARGIN
    for panel, (title, above, below) in zip(panels, heights, strict=True):
        figure.text(_MARGIN / width, (top - 0.05) / height, panel.title, size=10, va="top", parse_math=False)
        top -= title + above + _LINES_HEIGHT
        axes = figure.add_axes(((width - span) / 2 / width, top / height, span / width, _LINES_HEIGHT / height))
        _draw_panel(axes, panel, slots)
        top -= below
    _draw_key(figure, key, top, head_colours(panels[0].map.weights.shape[1]))
    figure.text(_MARGIN / width, _MARGIN / height, "\n".join(lines), size=9, va="bottom", parse_math=False)
    return figure


def _labels(tokens: Sequence[str]) -> list[str]:
    return [printable(token) for token in tokens]


def _label_height(tokens: Sequence[str]) -> float:
    return max(map(len, _labels(tokens)), default=0) * _CHARACTER_WIDTH + 0.1


def _key_rows(panels: Sequence[Panel], width: float) -> list[list[int]]:
    """The heads in each row of the key; none where no panel has several."""
    if max(len(panel.heads) for panel in panels) < 2:
        return []
    heads = sorted({head for panel in panels for head in panel.heads})
    size = int((width - 2 * _MARGIN) / _KEY_WIDTH) - 1  # the first place of a row is that of the word "heads"
    return [heads[start : start + size] for start in range(0, len(heads), size)]


def _draw_key(figure: Any, rows: Sequence[Sequence[int]], top: float, colours: Sequence[str]) -> None:
    """A square of its colour and the number of each head, in rows below `top` (in inches)."""
    from matplotlib.patches import Rectangle

    width, height = figure.get_size_inches()
    for n, heads in enumerate(rows):
        y = top - (n + 0.5) * _KEY_HEIGHT
        if n == 0:
            figure.text(_MARGIN / width, y / height, "heads", size=9, va="center")
        for place, head in enumerate(heads, start=1):
            x = _MARGIN + place * _KEY_WIDTH + 0.05
            corner = x / width, (y - _KEY_SQUARE / 2) / height
            square = Rectangle(corner, _KEY_SQUARE / width, _KEY_SQUARE / height, color=colours[head - 1], lw=0)
            figure.add_artist(square)
            figure.text((x + 1.3 * _KEY_SQUARE) / width, y / height, str(head), size=9, va="center")


def _draw_panel(axes: Any, panel: Panel, slots: int) -> None:
    from matplotlib.collections import LineCollection

    axes.set(xlim=(-0.5, slots - 0.5), ylim=(0, 1))
    axes.set_axis_off()
    map, colours = panel.map, head_colours(panel.map.weights.shape[1])
    queries, keys = (np.arange(len(side)) + (slots - len(side)) / 2 for side in (map.queries, map.keys))
    for n, head in enumerate(panel.heads):
        weights = map.head(panel.layer, head)
        shown = weights >= _INVISIBLE
        if panel.query is not None:
            shown &= (np.arange(len(queries)) == panel.query)[:, None]
        shift = 0 if panel.query is None else _CELLS * ((n + 0.5) / len(panel.heads) - 0.5)  # to the middle of its cell
        rows, columns = np.nonzero(shown)
        strongest = np.sort(np.argsort(-weights[rows, columns], kind="stable")[:MOST_LINES])
        rows, columns = rows[strongest], columns[strongest]
        lines = [((queries[q], 1), (keys[k] + shift, 0)) for q, k in zip(rows, columns, strict=True)]
        opacity = weights[rows, columns].clip(0, 1)
        axes.add_collection(
            LineCollection(lines, colors=colours[head - 1], alpha=opacity, linewidths=2, capstyle="butt")
        )
    if panel.query is not None:
        _draw_cells(axes, panel, queries, keys, colours)
    style = {"rotation": 90, "ha": "center", "size": 9, "parse_math": False}
    for n, label in enumerate(_labels(map.queries)):
        axes.text(queries[n], 1.03, label, va="bottom", weight="bold" if n == panel.query else "normal", **style)
    for x, label in zip(keys, _labels(map.keys), strict=True):
        axes.text(x, -0.03, label, va="top", **style)


def _draw_cells(axes: Any, panel: Panel, queries: np.ndarray, keys: np.ndarray, colours: Sequence[str]) -> None:
    """Behind each key a strip for each head, as opaque as its weight; behind the query a grey one."""
    from matplotlib.patches import Rectangle

    def strip(x, width, y, side, **style):
        label = len(printable(side)) * _CHARACTER_WIDTH / _LINES_HEIGHT + 0.03
        axes.add_patch(Rectangle((x, y - label * (y == 0)), width, label, lw=0, clip_on=False, zorder=0, **style))

    strip(queries[panel.query] - _CELLS / 2, _CELLS, 1, panel.map.queries[panel.query], color="0.8")
    width = _CELLS / len(panel.heads)
    for n, head in enumerate(panel.heads):
        weights = panel.map.head(panel.layer, head)[panel.query]
        for x, weight, key in zip(keys, weights, panel.map.keys, strict=True):
            strip(x - _CELLS / 2 + n * width, width, 0, key, color=colours[head - 1], alpha=float(weight.clip(0, 1)))


def draw_heat_maps(map: AttentionMap, title: str) -> Any:
    """A figure with a heat map of each head: a row for each layer, a column for each head; queries run downwards."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    layers, heads, queries, keys = map.weights.shape
    longest = max(queries, keys)
    cell = min(max(_SMALLEST_MAP, _MAP_PER_TOKEN * longest), _LARGEST_MAP) / longest
    across, down = max(cell * keys, _SMALLEST_MAP) + _MAP_GAP, cell * queries + _MAP_TITLE_HEIGHT
    lefts, tops = across * np.arange(heads), down * np.arange(layers) + _MAP_TITLE_HEIGHT
    width, height = heads * across, layers * down
    figure = Figure(figsize=(width + _BAR_WIDTH, height))
    axes = figure.add_axes((0, 0, width / (width + _BAR_WIDTH), 1))  # for all maps: 48 axes take seconds to draw
    for layer, head in np.ndindex(layers, heads):
        left, top = lefts[head], tops[layer]
        corners = left, left + cell * keys, top + cell * queries, top
        image = axes.imshow(
            map.weights[layer, head], cmap="Blues", vmin=0, vmax=1, interpolation="nearest", extent=corners
        )
        axes.add_patch(Rectangle((left, top), cell * keys, cell * queries, fill=False, lw=0.8))
        middle = left + cell * keys / 2
        axes.text(middle, top - 0.04, f"layer {layer + 1}, head {head + 1}", size=8, ha="center", va="bottom")
    axes.set(xlim=(0, width), ylim=(height, 0), aspect="auto")  # inches
    axes.set_axis_off()
    if longest <= _MOST_MAP_LABELS:
        style = {"size": _MAP_LABEL_SIZE * min(1, cell / _MAP_PER_TOKEN), "parse_math": False}
        for top, (n, label) in itertools.product(tops, enumerate(_labels(map.queries))):
            axes.text(-0.05, top + (n + 0.5) * cell, label, ha="right", va="center", **style)
        for left, (n, label) in itertools.product(lefts, enumerate(_labels(map.keys))):
            x = left + (n + 0.5) * cell
            axes.text(x, height + 0.05, label, rotation=90, ha="center", va="top", **style)
    else:
        title += f" More than {_MOST_MAP_LABELS} tokens: without labels."
    _draw_bar(figure, image)
    figure.text(width / 2 / (width + _BAR_WIDTH), 1 + 0.03 / height, title, size=10, ha="center", parse_math=False)
    return figure


def _draw_bar(figure: Any, image: Any) -> None:
    """The key to the colours of the weights, on the right."""
    width, height = figure.get_size_inches()
    length = min(3, height - _MAP_TITLE_HEIGHT)
    place = (width - _BAR_WIDTH) / width, (height - length) / 2 / height, 0.15 / width, length / height
    bar = figure.colorbar(image, cax=figure.add_axes(place))
    bar.set_label("attention weight", size=8)
    bar.ax.tick_params(labelsize=6)


def save(figure: Any, path: Path) -> list[Path]:
    """Writes PATH.png and PATH.svg; characters that no installed font has are boxes, which is said in a warning."""
    import matplotlib

    _use_installed_fonts(figure)
    paths = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
    with (
        warnings.catch_warnings(record=True) as caught,
        matplotlib.rc_context({"svg.hashsalt": "t2t_jax", "image.composite_image": False}),
    ):
        warnings.simplefilter("always")
        for written in paths:
            metadata = {"Date": None} if written.suffix == ".svg" else {}
            figure.savefig(
                written,
                dpi=_DOTS_PER_INCH,
                metadata=metadata,
                facecolor="white",
                bbox_inches="tight",
                pad_inches=_MARGIN,
            )
    messages = [str(warning.message) for warning in caught]
    missing = {message.partition(" missing from")[0] for message in messages if "missing from" in message}
    if missing:
        reason = "no installed font has them; install one that has, such as Noto Sans CJK"
        logging.warning("%s: %d characters are drawn as boxes: %s", path.name, len(missing), reason)
    return paths


def _use_installed_fonts(figure: Any) -> None:
    """Draws what Matplotlib's own font lacks, such as Chinese and Japanese, in installed fonts that have it."""
    from matplotlib import font_manager
    from matplotlib.text import Text

    texts = figure.findobj(Text)
    characters = {ord(character) for text in texts for character in text.get_text()}
    lacking = characters - font_manager.get_font(font_manager.findfont(None)).get_charmap().keys()
    if not lacking:
        return
    # Regular fonts first, before the bold and light ones of a family.
    paths = sorted(font_manager.findSystemFonts(), key=lambda path: ("regular" not in path.lower(), path))
    font_of = _font_of_each_character(tuple(paths))
    fonts = sorted({font_of[character] for character in lacking if character in font_of})
    for path, _ in fonts:
        font_manager.fontManager.addfont(path)  # which may be newer than Matplotlib's list
    for text in texts:
        text.set_fontfamily([*text.get_fontfamily(), *(family for _, family in fonts)])


@functools.cache
def _font_of_each_character(paths: tuple[str, ...]) -> dict[int, tuple[str, str]]:
    """The path and the family of the first of these fonts that has a character, by its code."""
    from matplotlib.font_manager import get_font

    font_of = {}
    for path in reversed(paths):  # so that the first one stays
        with contextlib.suppress(RuntimeError, OSError):  # no font, or one of bitmaps, such as coloured emoji
            font = get_font(path)
            if font.scalable:
                font_of |= dict.fromkeys(font.get_charmap(), (path, font.family_name))
    return font_of
