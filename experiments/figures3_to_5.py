"""Figures 3, 4 and 5 of the paper: what the encoder's self-attention of a run attends to in the paper's own sentences.

    python -m experiments.figures3_to_5 --workdir=RUN [--step=STEP] [--output=DIR]

Writes each figure as PNG and SVG into DIR, by default RUN/figures. Subwords are merged into the words that the paper
prints, with spaces around punctuation, and EOS; there is no <pad>.

The paper shows "layer 5 of 6". Its viewer counts layers from 0, so this may be the sixth: each figure is drawn for
both, the last layer but one and the last. Here layers and heads are counted from 1. Heads of different runs have
nothing to do with each other. Figure 4 has the paper's heads, 5 and 6, or the last two of fewer; Figure 5, whose heads
the paper does not name, has the two that differ most.
"""

import itertools
import os
import sys
from collections.abc import Iterator, Sequence

import numpy as np

import t2t_jax
from t2t_jax.argument_parser import argument_parser
from t2t_jax.command_line import checkpoint
from t2t_jax.decoding.attention_maps import AttentionMap
from t2t_jax.errors import InputError, exit_code_of
from t2t_jax.files import expanded
from t2t_jax.run_folder import RunFolder
from t2t_jax.visualization.figures import Panel, draw_lines, save

MAKING = (
    "It is in this spirit that a majority of American governments have passed new laws since 2009 making the "
    "registration or voting process more difficult ."
)
LAW = (
    "The Law will never be perfect , but its application should be just - this is what we are missing , in my opinion ."
)


def shown_layers(count: int) -> list[int]:
    """Both readings of "layer 5 of 6", counted from 1: the last layer but one and the last."""
    return sorted({max(1, count - 1), count})


def its_heads(count: int) -> list[int]:
    """The heads of Figure 4, counted from 1: 5 and 6, or the last two of fewer."""
    return [5, 6] if count >= 6 else sorted({max(1, count - 1), count})


def most_different_heads(map: AttentionMap, layer: int) -> list[int]:
    """The two heads, counted from 1, with the largest mean total variation distance between their rows."""
    heads = range(1, map.weights.shape[1] + 1)
    distance = lambda pair: float(np.abs(map.head(layer, pair[0]) - map.head(layer, pair[1])).sum(axis=1).mean() / 2)
    return list(max(itertools.combinations(heads, 2), key=distance, default=(1,)))


def figures(making: AttentionMap, law: AttentionMap, layer: int) -> Iterator[tuple[int, list[Panel], str]]:
    """(number, panels, what is shown) of each figure, for one layer."""
    heads = list(range(1, making.weights.shape[1] + 1))
    of_making, of_its = _index(making, "making"), _index(law, "its")
    yield 3, [Panel(making, layer, heads, query=of_making)], "Only what “making” attends to; a colour for each head."

    first, *_ = chosen = its_heads(len(heads))
    panels = [
        Panel(law, layer, [first], f"head {first}"),
        Panel(law, layer, chosen, f"only “its”, {_names(chosen)}", query=of_its),
    ]
    yield 4, panels, f"Top: all words, head {first}. Bottom: only “its”, {_names(chosen)} (paper: heads 5 and 6)."

    chosen = most_different_heads(law, layer)
    panels = [Panel(law, layer, [head], f"head {head}") for head in chosen]
    why = "the two that differ most" if len(chosen) > 1 else "the only one"
    yield 5, panels, f"All words, {_names(chosen)}: {why} (the paper does not name its heads)."


def _index(map: AttentionMap, word: str) -> int:
    """Which query the word is; refuses a vocabulary that lacks some of its letters."""
    if word not in map.queries:
        raise InputError(
            f"workdir: the figures show {word!r}, which the run's source vocabulary cannot represent; give a run with "
            "an English source or with data.byte_fallback"
        )
    return map.queries.index(word)


def _names(heads: Sequence[int]) -> str:
    return f"head{'s' * (len(heads) > 1)} {' and '.join(map(str, heads))}"


def draw(workdir: str, step: str | None, output: str | None) -> None:
    """Draws all figures and prints what each file shows; `step` is that of a checkpoint, last or averaged."""
    chosen = checkpoint(step)
    run = RunFolder.open(workdir)
    folder = expanded("--output", output or run.path / "figures")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output={folder}: no such folder can be made: {error.strerror}; give another") from None
    translator = t2t_jax.load(workdir, chosen)
    targets = None if translator.task.grammar else ["", ""]  # not shown, so empty; that of a parser must be a tree
    maps = translator.attention([MAKING, LAW], targets)
    making, law = (found.encoder.words() for found in maps)
    layers, heads = making.weights.shape[:2]
    notes = [_length_note(len(found.source), run.config["data"]["max_length"]) for found in maps]
    for layer in shown_layers(layers):
        for number, panels, shown in figures(making, law, layer):
            base = 1 if layer < layers or layers == 1 else 0
            where = f"Encoder self-attention, layer {layer} of {layers} (paper: layer 5 of 6, if counted from {base})."
            size = f"This run has {heads} head{'s' * (heads > 1)}."
            caption = " ".join([f"Figure {number}.", where, shown, size, *notes[number > 3]])
            for path in save(draw_lines(panels, caption), folder / f"figure{number}_layer{layer}"):
                print(f"{path}: {caption}")


def _length_note(length: int, longest: int) -> list[str]:
    if length <= longest:
        return []
    return [f"It was trained on at most {longest} subwords a sentence; this one has {length}."]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser("experiments.figures3_to_5", __doc__)
    parser.add_argument("--workdir", type=os.path.expanduser, required=True, help="the run")
    parser.add_argument("--step", help="a step, last or averaged; default: averaged if there is one, else last")
    parser.add_argument("--output", help="a folder; default: RUN/figures")
    return exit_code_of(lambda: draw(**vars(parser.parse_args(argv))))


if __name__ == "__main__":
    sys.exit(main())
