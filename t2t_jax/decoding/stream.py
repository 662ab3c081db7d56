"""§6.1: translates a stream, or scores two files, line by line, in order, with bounded memory."""

import collections
import dataclasses
import itertools
import json
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, TextIO

from t2t_jax.decoding.hypothesis import Hypothesis
from t2t_jax.decoding.search_options import check_options
from t2t_jax.decoding.trained_model import first_run
from t2t_jax.decoding.translator import Translator, check_lists, load
from t2t_jax.errors import InputError
from t2t_jax.files import check_pairing, existing_text, read_lines, unpacked_lines
from t2t_jax.progress_bar import progress_bar
from t2t_jax.validation import choice

_WINDOW_LINES = 4096  # at most; a window of lines is translated together
_READ_AHEAD_CHARACTERS = 1 << 24  # no more is read while so many wait to be translated
_PAUSE = 0.005  # seconds without a line that end a window: the lines of a file come faster
# Unicode line ends that json.dumps leaves as they are, though many readers split lines at them.
_ESCAPED_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


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
    """`translate_stream` with the translator of a run, or of an ensemble of runs.

    Options that are None take the value in the config of the (first) run.
    """
    options = first_run(workdir).decode_options(**options)
    check_options(**options)
    prefixes = unpacked_lines(existing_text("target_prefix", target_prefix)) if target_prefix else None
    translate_stream(
        load(workdir, step, dtype=dtype or "float32"), source, output, output_format=output_format, prefixes=prefixes,
        seed=seed, **options,
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
    """Writes one line for each line of `source`, in order, with a progress bar on standard error.

    `prefixes` are the forced beginnings of the translations; `options` are those of `Translator.translate`. A last line
    on standard error says how many of the best hypotheses were repaired, if any.
    """
    check_lists(prefixes=prefixes)
    formats = {"text": _text, "jsonl": json_line}
    write = formats[choice("output_format", output_format, formats)]
    pairs = _with_prefixes(read_lines(source, "standard input"), prefixes)
    repaired, repairs = 0, collections.Counter()
    with progress_bar(unit=" lines", disable=source.isatty()) as bar:  # not where a person types
        first_line = 1
        for window in _ReadAhead(pairs).windows():
            lines = [line for line, _ in window]
            starts = [prefix for _, prefix in window] if prefixes is not None else None
            translations = translator.translate(
                lines, prefixes=starts, on_progress=bar.update, first_line=first_line, **options
            )
            first_line += len(lines)
            for line, hypotheses in zip(lines, translations, strict=True):
                output.write(write(line, hypotheses) + "\n")
                repaired += bool(hypotheses[0].repairs)
                repairs.update(hypotheses[0].repairs)
            output.flush()
    if repaired:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in repairs.most_common())
        print(
            f"{repaired:,} of {first_line - 1:,} outputs were malformed and have been repaired: {kinds}",
            file=sys.stderr,
        )


def score_run(
    workdir: str, output: TextIO, *, source: str, target: str, step: int | str | None, dtype: str | None
) -> None:
    """Writes the `Score` of each line of the file `source` with the same line of `target`, one JSON object each.

    The files are read twice, for their numbers of lines first. A progress bar is on standard error.
    """
    paths = [(existing_text(field, name), name) for field, name in (("source", source), ("target", target))]
    read = lambda: [unpacked_lines(path, name) for path, name in paths]
    counts = [sum(1 for _ in lines) for lines in read()]
    check_pairing((source, target), counts)
    translator, first_line = load(workdir, step, dtype=dtype or "float32"), 1
    with progress_bar(unit=" lines", total=counts[0]) as bar:
        pairs = zip(*read(), strict=True)
        while window := list(itertools.islice(pairs, _WINDOW_LINES)):
            for score in translator.score(window, first_line=first_line):
                output.write(json.dumps(dataclasses.asdict(score)) + "\n")
            output.flush()
            bar.update(len(window))
            first_line += len(window)


def _with_prefixes(lines: Iterable[str], prefixes: Iterable[str] | None) -> Iterator[tuple[str, str]]:
    if prefixes is None:
        yield from ((line, "") for line in lines)
        return
    for count, (line, prefix) in enumerate(itertools.zip_longest(lines, prefixes)):
        if line is None or prefix is None:
            names = "standard input", "--target_prefix"
            fewer, more = names if line is None else reversed(names)
            raise InputError(
                f"{fewer} has {count} lines, {more} more lines; give each line a prefix, which may be empty"
            )
        yield line, prefix


def _text(line: str, hypotheses: list[Hypothesis]) -> str:
    del line
    return hypotheses[0].text


def json_line(line: str, hypotheses: list[Hypothesis]) -> str:
    """A sentence and its hypotheses as one line of JSON."""
    answer = {"source": line, "hypotheses": [_fields(hypothesis) for hypothesis in hypotheses]}
    return json.dumps(answer, ensure_ascii=False).translate(_ESCAPED_LINE_ENDS)


def _fields(hypothesis: Hypothesis) -> dict[str, Any]:
    """The fields of a JSON line; `repairs` only where there were any, `parts` only of a line that was cut."""
    usual = {"repairs": {}, "parts": 1}
    return {name: x for name, x in dataclasses.asdict(hypothesis).items() if name not in usual or x != usual[name]}


class _ReadAhead:
    """A bounded queue of lines, filled by a reader thread: bounded in lines and in characters."""

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
                    self._changed.wait_for(self._has_capacity)
                    self._lines.append(line)
                    self._characters += _size(line)
                    self._changed.notify_all()
        except Exception as reason:  # raised again by `windows`
            error = reason
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def _has_capacity(self) -> bool:
        return len(self._lines) < 2 * _WINDOW_LINES and self._characters < _READ_AHEAD_CHARACTERS

    def _may_grow(self) -> bool:
        return len(self._lines) < _WINDOW_LINES and not self._ended and self._has_capacity()

    def windows(self) -> Iterator[list[Any]]:
        """The lines read so far, up to `_WINDOW_LINES` at a time: a line waits for the next one only 5 ms."""
        while window := self._take():
            yield window
        if self._error:
            raise self._error

    def _take(self) -> list[Any]:
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._ended)
            while self._may_grow() and self._changed.wait(_PAUSE):
                pass
            window = [self._lines.popleft() for _ in range(min(_WINDOW_LINES, len(self._lines)))]
            self._characters -= sum(map(_size, window))
            self._changed.notify_all()
            return window


def _size(line: tuple[str, str]) -> int:
    return sum(map(len, line))
