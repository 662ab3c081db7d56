"""The attention of a run on a text file: one HTML page and figures (`main.py --mode=attention`)."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from t2t_jax.decoding.attention_maps import AttentionMaps
from t2t_jax.decoding.trained_model import first_run
from t2t_jax.decoding.translator import Translator, load
from t2t_jax.errors import InputError
from t2t_jax.files import check_pairing, new_folder, read_text, write_bytes
from t2t_jax.progress_bar import progress_bar
from t2t_jax.run_folder import row_of
from t2t_jax.temporary_folders import original_of
from t2t_jax.visualization.figures import MOST_LINES, Panel, draw_heat_maps, draw_lines, save
from t2t_jax.visualization.page import page, weights_size

PAGE = "attention.html"
KINDS = {"encoder": "Encoder", "decoder": "Decoder", "encoder_decoder": "Encoder–decoder"}
_MOST_SENTENCES = 50
_LARGEST_PAGE = 64 << 20  # bytes of weights; browsers are slow with more


def attention_run(workdir: str, *, source: str, target: str | None, output: str, step: int | str | None) -> str:
    """Writes the page and the figures into the new folder `output`; returns a line that says what was written.

    The weights are those for the lines of the file `target`, or for the translations that the run's own options find.
    """
    sources, targets = _read(source, target)
    options = {} if targets is not None else first_run(workdir).decode_options()
    with new_folder("output", output) as folder:
        translator = load(workdir, step)
        _check_size(translator, _lengths(translator, sources, targets))
        maps = translator.attention(sources, targets, **options)
        _check_size(translator, [(len(pair.source), len(pair.target)) for pair in maps])
        content = page(maps, f"Attention of {row_of(Path(original_of(workdir)))}").encode()
        write_bytes(folder / PAGE, content)
        figures = progress_bar(_figures(maps), total=2 * len(KINDS) * len(maps), desc="drawing", unit=" figures")
        count = sum(len(save(figure, folder / name)) for name, figure in figures)
    return f"{output}/{PAGE}: {len(maps)} sentence{'s' * (len(maps) > 1)}, {len(content):,} bytes; and {count} figures"


def _read(source: str, target: str | None) -> tuple[list[str], list[str] | None]:
    sources = read_text("source", source)
    if not 1 <= len(sources) <= _MOST_SENTENCES:
        raise InputError(f"source: {source} has {len(sources)} lines; a page shows 1 to {_MOST_SENTENCES}")
    if target is None:
        return sources, None
    targets = read_text("target", target)
    check_pairing((source, target), (len(sources), len(targets)))
    return sources, targets


def _lengths(translator: Translator, sources: Sequence[str], targets: Sequence[str] | None) -> list[tuple[int, int]]:
    """The subwords of each source and target with EOS; a target that is not yet known counts as EOS alone."""
    of_sources = map(len, translator.preprocessor.encode_sources(sources))
    if targets is None:
        return [(length, 1) for length in of_sources]
    of_targets = map(len, translator.preprocessor.encode_targets(sources, targets))
    return list(zip(of_sources, of_targets, strict=True))


def _check_size(translator: Translator, lengths: Sequence[tuple[int, int]]) -> None:
    """Refuses pairs whose weights make too large a page."""
    config = translator.ensemble.modules[0].config
    size = sum(weights_size(config.num_layers * config.num_heads, *pair) for pair in lengths)
    if size > _LARGEST_PAGE:
        raise InputError(
            f"source: the page would have {size >> 20:,} MiB of weights; at most {_LARGEST_PAGE >> 20} work; "
            "give fewer or shorter sentences"
        )


def _figures(maps: Sequence[AttentionMaps]) -> Iterator[tuple[str, Any]]:
    """(name, figure) for each sentence and kind of attention, the lines of each layer, and a heat map of each head."""
    for number, words in enumerate((pair.words() for pair in maps), start=1):
        for kind, title in KINDS.items():
            map = getattr(words, kind)
            if not map.queries:  # an empty translation
                continue
            layers, heads = map.weights.shape[:2]
            panels = [
                Panel(map, n, range(1, heads + 1), f"{title}, layer {n} of {layers}") for n in range(1, layers + 1)
            ]
            caption = f"Sentence {number}, all {heads} heads. Above: queries, which attend; below: keys, attended to."
            if len(map.queries) * len(map.keys) > MOST_LINES:
                caption += f" Only the {MOST_LINES:,} strongest lines of each head are drawn."
            yield f"sentence{number}_{kind}_lines", draw_lines(panels, caption)
            title = f"Sentence {number}, {title.lower()} attention. Rows: queries; columns: keys."
            yield f"sentence{number}_{kind}_heat_maps", draw_heat_maps(map, title)
