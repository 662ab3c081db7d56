"""Figures show the weights: opacity of lines, values of heat maps; any label can be drawn."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from matplotlib import font_manager
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from t2t_jax.visualization.figures import MOST_LINES, Panel, draw_heat_maps, draw_lines, head_colours, printable, save
from tests.visualization.maps import HOSTILE, random_maps

SOURCE, TARGET = ["▁a", "▁b", "▁c", "</s>"], ["▁x", "▁y", "</s>"]


@pytest.fixture(scope="module")
def map():
    return random_maps(SOURCE, TARGET).encoder_decoder


def lines(axes):
    """For each head's lines: ends as (x, y) pairs, and opacities."""
    found = [c for c in axes.collections if isinstance(c, LineCollection)]
    return [(np.array(c.get_segments()), c.get_colors()[:, 3], c.get_colors()[0, :3]) for c in found]


def test_each_line_has_the_opacity_of_its_weight_and_the_colour_of_its_head(map):
    (axes,) = draw_lines([Panel(map, 2, [1, 3])]).axes
    for head, (ends, opacity, colour) in zip((1, 3), lines(axes), strict=True):
        weights = map.head(2, head)
        queries, keys = np.nonzero(weights >= 1 / 510)
        np.testing.assert_allclose(opacity, weights[queries, keys], atol=1e-6)
        np.testing.assert_allclose(
            ends[:, 0], np.stack([queries + 0.5, np.ones(len(queries))], 1)
        )  # 3 above 4: centred
        np.testing.assert_allclose(ends[:, 1], np.stack([keys, np.zeros(len(keys))], 1))
        np.testing.assert_allclose(colour, to_rgb(head_colours(3)[head - 1]))


def test_one_query_has_only_its_own_lines_and_a_cell_at_each_key(map):
    (axes,) = draw_lines([Panel(map, 1, [1, 2, 3], query=1)]).axes
    for head, (ends, opacity, _) in enumerate(lines(axes), start=1):
        weights = map.head(1, head)[1]
        np.testing.assert_allclose(opacity, weights[weights >= 1 / 510], atol=1e-6)
        assert set(ends[:, 0, 0]) == {1.5}
    cells = sorted(patch.get_alpha() for patch in axes.patches if patch.get_alpha() is not None)
    np.testing.assert_allclose(cells, np.sort(map.weights[0, :, 1].ravel()), atol=1e-6)


@pytest.mark.parametrize("heads", [[2, 3], list(range(1, 17))])
def test_a_key_has_the_colour_of_each_head_of_several(heads):
    """A square left of each number; in several rows if there are many."""
    found = random_maps(SOURCE, TARGET, heads=16).encoder
    figure = draw_lines([Panel(found, 1, heads[:1]), Panel(found, 1, heads)], "a caption")
    numbers = {int(text.get_text()): text.get_position() for text in figure.texts if text.get_text().isdigit()}
    assert list(numbers) == heads and len(figure.patches) == 0
    squares = [artist for artist in figure.artists if isinstance(artist, Rectangle)]
    for (head, (x, y)), square in zip(numbers.items(), squares, strict=True):
        assert to_rgb(square.get_facecolor()) == to_rgb(head_colours(16)[head - 1])
        assert square.get_y() < y < square.get_y() + square.get_height() and 0 < x - square.get_x() < 0.1
        assert 0 < square.get_x() < x < 0.95


def test_one_head_needs_no_key(map):
    assert not draw_lines([Panel(map, 1, [1], "head 1"), Panel(map, 2, [2], "head 2")]).artists


def test_heat_maps_have_the_weights_of_every_head(map):
    figure = draw_heat_maps(map, "title")
    axes = figure.axes[0]
    texts = {text.get_text(): text.get_position() for text in axes.texts}
    images = list(axes.images)
    assert len(images) == 6
    for layer, head in np.ndindex(2, 3):
        x, y = texts[f"layer {layer + 1}, head {head + 1}"]  # above the middle of its map
        (image,) = (i for i in images if i.get_extent()[0] < x < i.get_extent()[1] and 0 < i.get_extent()[3] - y < 0.1)
        np.testing.assert_array_equal(image.get_array(), map.weights[layer, head])
        assert image.get_clim() == (0, 1)
    labels = [(text.get_text(), text.get_position()[1]) for text in axes.texts if text.get_position()[0] < 0]
    assert [label for label, _ in labels] == ["▁x", "▁y", "<EOS>"] * 2
    for layer, (_, _, bottom, top) in enumerate(image.get_extent() for image in images[::3]):
        middles = top + (bottom - top) * np.array([1, 3, 5]) / 6  # of the rows
        np.testing.assert_allclose([y for _, y in labels[3 * layer : 3 * layer + 3]], middles)
    bar = next(axes.yaxis for axes in figure.axes if axes.get_ylabel() == "attention weight")
    sizes = {bar.label.get_size(), *(tick.label2.get_size() for tick in bar.get_major_ticks())}
    assert sizes <= {6, 8}  # those of the labels and the titles of the maps


@pytest.mark.parametrize(("length", "size"), [(40, 6), (60, 4), (80, 3), (81, None)])
def test_the_labels_of_large_heat_maps_are_smaller_and_their_absence_is_said(length, size):
    tokens = [f"t{n}" for n in range(length)]
    figure = draw_heat_maps(random_maps(tokens, ["x", "y"], 1, 2).encoder_decoder, "title.")
    sizes = {text.get_text(): text.get_size() for text in figure.axes[0].texts}
    assert [sizes.get(label) for label in ("t0", "x", f"t{length - 1}")] == [pytest.approx(size) if size else None] * 3
    (title,) = [text.get_text() for text in figure.texts]
    assert title == "title." + " More than 80 tokens: without labels." * (size is None)


def test_labels_are_printable_and_bounded():
    assert [printable(token) for token in ("</s>", "▁on", "\u202ea\x00\n", "می\u200cخواهم", "x" * 99)] == [
        "<EOS>",
        "▁on",
        "·a··",
        "می\u200cخواهم",
        "x" * 23 + "…",
    ]


def test_any_token_is_drawn_in_both_formats(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(font_manager, "findSystemFonts", list)
    found = random_maps(HOSTILE, HOSTILE, 1, 2).encoder
    for name, figure in (("lines", draw_lines([Panel(found, 1, [1, 2], "$\\x^{$", query=3)], "$\\x^{$")),
                         ("heat", draw_heat_maps(found, "$\\x^{$"))):  # fmt: skip
        png, svg = save(figure, tmp_path / name)
        assert png.read_bytes().startswith(b"\x89PNG") and svg.name == f"{name}.svg"
        assert ElementTree.parse(svg).getroot().tag.endswith("svg")
        assert "<script" not in svg.read_text().lower()
    assert "characters are drawn as boxes" in caplog.text


def test_what_the_font_lacks_is_drawn_in_an_installed_font_that_has_it(tmp_path, caplog, monkeypatch):
    """Another of Matplotlib's fonts stands for an installed one, such as Chinese and Japanese need."""
    fonts = [font_manager.findfont(family) for family in ("DejaVu Sans", "STIXGeneral")]
    lacks, has = (font_manager.get_font(path).get_charmap().keys() for path in fonts)
    token = next(chr(code) for code in sorted(has - lacks) if chr(code).isprintable())
    (tmp_path / "broken.ttf").write_text("no font")
    installed = [str(tmp_path / "broken.ttf"), fonts[1]]
    for found, warnings in (([], 1), (installed, 0)):
        monkeypatch.setattr(font_manager, "findSystemFonts", lambda found=found: found)
        caplog.clear()
        save(draw_lines([Panel(random_maps([token], [token], 1, 2).encoder, 1, [1])]), tmp_path / "figure")
        assert len(caplog.records) == warnings


def test_the_same_figure_has_the_same_bytes(map, tmp_path):
    first, second = (
        [path.read_bytes() for path in save(draw_lines([Panel(map, 1, [1])]), tmp_path / name)] for name in "ab"
    )
    assert first == second


def test_a_long_sentence_is_drawn(tmp_path):
    """By the strongest lines of each head, so that the file stays small."""
    tokens = [f"t{n}" for n in range(100)]
    found = random_maps(tokens, tokens[:5], 1, 2)
    figure = draw_lines([Panel(found.encoder, 1, [1, 2])])
    for head, (_, opacity, _) in enumerate(lines(figure.axes[0]), start=1):
        np.testing.assert_allclose(np.sort(opacity), np.sort(found.encoder.head(1, head).ravel())[-MOST_LINES:])
    for drawn in (figure, draw_heat_maps(found.encoder_decoder, "long")):
        png, svg = save(drawn, tmp_path / "long")
        assert png.stat().st_size > 10_000 and svg.stat().st_size < 2_000_000
