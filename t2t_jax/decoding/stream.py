"""§6.1: translating text that arrives on a stream, in order, with bounded memory."""

import contextlib
import dataclasses
import itertools
import json
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, TextIO

from t2t_jax.decoding.translator import Hypothesis, Translator, check_options, load
from t2t_jax.errors import InputError, choice
from t2t_jax.files import open_text, read_lines
from t2t_jax.progress_bar import progress_bar
from t2t_jax.run_folder import RunFolder

_WINDOW = 4096  # lines read, sorted by length and translated together

_END = object()


def translate_run(
    workdir: str,
    source: BinaryIO,
    output: TextIO,
    *,
    step: int | str | None,
    dtype: str | None,
    output_format: str,
    target_prefix: str | None,
    seed: int,
    **options: Any,
) -> None:
    """`translate_stream` with a run's translator, or an ensemble's, and the first run's options where they are None."""
    options = RunFolder.open(workdir.split(",")[0]).decode_options(**options)
    check_options(**options)
    with open_text("target_prefix", target_prefix) if target_prefix else contextlib.nullcontext() as file:
        translate_stream(
            load(workdir, step, dtype=dtype or "float32"), source, output, output_format=output_format,
            prefixes=file and read_lines(file, target_prefix), seed=seed, **options,
        )  # fmt: skip


def translate_stream(
    translator: Translator,
    source: BinaryIO,
    output: TextIO,
    *,
    output_format: str,
    prefixes: Iterable[str] | None = None,
    **options: Any,
) -> None:
    """Writes one line for each line of `source`, in order, and shows on standard error how far it is.

    `prefixes` has the beginning of each translation; `options` are those of `Translator.translate`.
    """
    write = {"text": _text, "jsonl": _json}[choice("output_format", output_format, ["text", "jsonl"])]
    pairs = _with_prefixes(read_lines(source, "standard input"), prefixes)
    with progress_bar(unit=" lines", disable=source.isatty()) as bar:  # not where a person types them
        for window in _windows(pairs):
            lines = [line for line, _ in window]
            begun = [prefix for _, prefix in window] if prefixes is not None else None
            found = translator.translate(lines, prefixes=begun, on_progress=bar.update, **options)
            for line, hypotheses in zip(lines, found, strict=True):
                output.write(write(line, hypotheses) + "\n")
            output.flush()


def _with_prefixes(lines: Iterable[str], prefixes: Iterable[str] | None) -> Iterator[tuple[str, str]]:
    prefixes = itertools.repeat("") if prefixes is None else iter(prefixes)
    for number, line in enumerate(lines, start=1):
        prefix = next(prefixes, None)
        if prefix is None:
            raise InputError(
                f"--target_prefix has {number - 1} lines, standard input more; give each line one, which may be empty"
            )
        yield line, prefix


def _text(line: str, hypotheses: list[Hypothesis]) -> str:
    del line
    return hypotheses[0].text.replace("\n", " ")


def _json(line: str, hypotheses: list[Hypothesis]) -> str:
    answer = {"source": line, "hypotheses": [dataclasses.asdict(h) for h in hypotheses]}
    return json.dumps(answer, ensure_ascii=False)


def _windows(lines: Iterable[Any]) -> Iterator[list[Any]]:
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
