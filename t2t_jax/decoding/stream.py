"""§6.1: translating text that arrives on a stream, in order, with bounded memory."""

import collections
import contextlib
import dataclasses
import itertools
import json
import threading
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, TextIO

from t2t_jax.decoding.translator import Hypothesis, Translator, check_options, load
from t2t_jax.errors import InputError, choice
from t2t_jax.files import open_text, read_lines
from t2t_jax.progress_bar import progress_bar
from t2t_jax.run_folder import RunFolder

_WINDOW = 4096  # lines read, sorted by length and translated together
_CHARACTERS = 1 << 24  # read ahead, or one line
_ESCAPED = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}  # line ends that JSON does not escape


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
        number = 1
        for window in _Arrived(pairs).windows():
            lines = [line for line, _ in window]
            begun = [prefix for _, prefix in window] if prefixes is not None else None
            found = translator.translate(lines, prefixes=begun, on_progress=bar.update, first_line=number, **options)
            number += len(lines)
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
    return hypotheses[0].text


def _json(line: str, hypotheses: list[Hypothesis]) -> str:
    answer = {"source": line, "hypotheses": [dataclasses.asdict(h) for h in hypotheses]}
    return json.dumps(answer, ensure_ascii=False).translate(_ESCAPED)


class _Arrived:
    """Lines that a thread reads ahead: a bounded number, with a bounded number of characters."""

    def __init__(self, lines: Iterable[Any]):
        self._lines = collections.deque()
        self._characters, self._ended, self._error = 0, False, None
        self._changed = threading.Condition()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()

    def _read(self, lines: Iterable[Any]) -> None:
        error = None
        try:
            for line in lines:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._lines) < 2 * _WINDOW and self._characters < _CHARACTERS)
                    self._lines.append(line)
                    self._characters += _size(line)
                    self._changed.notify_all()
        except Exception as reason:  # raised again where the windows are consumed
            error = reason
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def windows(self) -> Iterator[list[Any]]:
        """Whatever has arrived, at least a line and at most `_WINDOW`: a lone line never waits for more."""
        while window := self._take():
            yield window
        if self._error:
            raise self._error

    def _take(self) -> list[Any]:
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._ended)
            window = [self._lines.popleft() for _ in range(min(_WINDOW, len(self._lines)))]
            self._characters -= sum(map(_size, window))
            self._changed.notify_all()
            return window


def _size(line: tuple[str, str]) -> int:
    return sum(map(len, line))
