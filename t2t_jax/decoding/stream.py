"""§6.1: translating text that arrives on a stream, in order, with bounded memory."""

import dataclasses
import json
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, TextIO

from t2t_jax.decoding.translator import Hypothesis, Translator, check_options, load
from t2t_jax.errors import choice
from t2t_jax.files import read_lines
from t2t_jax.run_folder import RunFolder

_WINDOW = 4096  # lines read, sorted by length and translated together

_END = object()


def translate_run(
    workdir: str, source: BinaryIO, output: TextIO, *, step: int | None, output_format: str, n_best: int, **options: Any
) -> None:
    """`translate_stream` with a run's translator, and its own options where `options` are None."""
    options = RunFolder.open(workdir).decode_options(**options)
    check_options(n_best=n_best, **options)
    translate_stream(load(workdir, step), source, output, output_format=output_format, n_best=n_best, **options)


def translate_stream(
    translator: Translator, source: BinaryIO, output: TextIO, *, output_format: str, **options: Any
) -> None:
    """Writes one line for each line of `source`, in order; `options` are those of `Translator.translate`."""
    write = {"text": _text, "jsonl": _json}[choice("output_format", output_format, ["text", "jsonl"])]
    for window in _windows(read_lines(source, "standard input")):
        for line, hypotheses in zip(window, translator.translate(window, **options), strict=True):
            output.write(write(line, hypotheses) + "\n")
        output.flush()


def _text(line: str, hypotheses: list[Hypothesis]) -> str:
    del line
    return hypotheses[0].text.replace("\n", " ")


def _json(line: str, hypotheses: list[Hypothesis]) -> str:
    answer = {"source": line, "hypotheses": [dataclasses.asdict(h) for h in hypotheses]}
    return json.dumps(answer, ensure_ascii=False)


def _windows(lines: Iterable[str]) -> Iterator[list[str]]:
    """Whatever lines have arrived, at least one and at most `_WINDOW`: a lone line never waits for more."""
    arrived = queue.Queue(maxsize=2 * _WINDOW)
    threading.Thread(target=_read, args=(lines, arrived), daemon=True).start()
    item = arrived.get()
    while item is not _END:
        window = []
        while item is not _END and not isinstance(item, Exception):
            window.append(item)
            if len(window) == _WINDOW or arrived.empty():
                break
            item = arrived.get()
        if window:
            yield window
        if isinstance(item, Exception):
            raise item
        if item is not _END:
            item = arrived.get()


def _read(lines: Iterable[str], arrived: queue.Queue) -> None:
    try:
        for line in lines:
            arrived.put(line)
        arrived.put(_END)
    except Exception as error:  # raised again where the windows are consumed
        arrived.put(error)
