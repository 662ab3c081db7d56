import functools
import io
import itertools
import json
import os
import select
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2t_jax.decoding import stream
from t2t_jax.decoding.hypothesis import Hypothesis
from t2t_jax.decoding.translator import Score, Translator
from t2t_jax.errors import InputError


class UpperCaseTranslator(Translator):
    """A translator without a model, to test the order of lines."""

    def __init__(self):
        self.windows = []

    def translate(self, sentences, **options):
        self.windows.append(list(sentences))
        return [[Hypothesis(s.upper(), [s], -1.0, -1.0, 1, [-1.0])] for s in sentences]


def translate(data: bytes, output_format="text"):
    output = io.StringIO()
    translator = UpperCaseTranslator()
    stream.translate_stream(translator, io.BytesIO(data), output, output_format=output_format)
    return output.getvalue(), translator.windows


def test_each_line_gives_one_line_in_order_and_empty_lines_stay_empty(monkeypatch):
    monkeypatch.setattr(stream, "_WINDOW_LINES", 3)
    lines = [f"line {i}" if i % 4 else "" for i in range(20)]
    output, windows = translate("\n".join(lines).encode())
    assert output == "\n".join(lines).upper() + "\n"
    assert [line for window in windows for line in window] == lines and max(map(len, windows)) <= 3


def test_json_lines_hold_source_and_hypotheses():
    output, _ = translate("grün\n\n".encode(), "jsonl")
    first, second = map(json.loads, output.splitlines())
    assert first == {
        "source": "grün",
        "hypotheses": [
            {"text": "GRÜN", "tokens": ["grün"], "log_prob": -1.0, "score": -1.0, "num_tokens": 1,
             "token_log_probs": [-1.0], "finished": True}
        ],
    }  # fmt: skip
    assert second["source"] == ""


def test_scores_are_written_while_later_lines_are_still_to_be_read(tmp_path, monkeypatch):
    """In windows, so that memory is bounded; errors count the lines of the file."""

    class LengthTranslator(Translator):
        def __init__(self):
            pass

        def score(self, pairs, first_line):
            if ("long", "long") in pairs:
                raise InputError(f"source, line {first_line + pairs.index(('long', 'long'))}: too long")
            return [Score(-len(source), [-len(source)], 1) for source, _ in pairs]

    monkeypatch.setattr(stream, "_WINDOW_LINES", 3)
    monkeypatch.setattr(stream, "load", lambda *arguments, **options: LengthTranslator())
    (tmp_path / "text").write_text("a\nbb\nccc\ndddd\nlong\n")
    output, path = io.StringIO(), str(tmp_path / "text")
    with pytest.raises(InputError, match="line 5"):
        stream.score_run("run", output, source=path, target=path, step=None, dtype=None)
    assert [json.loads(line)["log_prob"] for line in output.getvalue().splitlines()] == [-1, -2, -3]


def test_empty_input_gives_empty_output():
    assert translate(b"") == ("", [])


def test_invalid_utf8_is_refused_with_its_line_number():
    output = io.StringIO()
    with pytest.raises(InputError, match="standard input, line 3: not valid UTF-8"):
        stream.translate_stream(UpperCaseTranslator(), io.BytesIO(b"a\nb\n\xff\nd\n"), output, output_format="text")
    assert output.getvalue() in ("", "A\n", "A\nB\n")


def test_unknown_formats_are_refused():
    with pytest.raises(InputError, match="did you mean 'jsonl'"):
        translate(b"a\n", "json")


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [
        ([""], "--target_prefix has 1 lines, standard input more lines; give each line a prefix"),
        ([], "--target_prefix has 0 lines, standard input more lines"),
        (["", "b", "c"], "standard input has 2 lines, --target_prefix more lines; give each line a prefix"),
        ("ab", "prefixes must be a list of str; got one str"),
    ],
)
def test_prefixes_that_are_not_as_many_as_the_lines_are_refused(prefixes, message):
    translate = functools.partial(stream.translate_stream, UpperCaseTranslator(), output_format="text")
    with pytest.raises(InputError, match=message):
        translate(io.BytesIO(b"a\nb\n"), io.StringIO(), prefixes=prefixes)
    translate(io.BytesIO(b"a\nb\n"), io.StringIO(), prefixes=["", "b"])


def test_a_line_is_translated_before_the_next_one_arrives():
    """An interactive program at the other end of the pipe needs this."""
    read_in, write_in = os.pipe()
    read_out, write_out = os.pipe()
    source, output = os.fdopen(read_in, "rb"), os.fdopen(write_out, "w")
    arguments = {"args": (UpperCaseTranslator(), source, output), "kwargs": {"output_format": "text"}}
    thread = threading.Thread(target=stream.translate_stream, **arguments, daemon=True)
    thread.start()
    for word in (b"one\n", b"two\n"):
        os.write(write_in, word)
        answered, _, _ = select.select([read_out], [], [], 10)
        assert answered, "no translation within ten seconds"
        assert os.read(read_out, 100) == word.upper()
    os.close(write_in)
    thread.join(10)
    assert not thread.is_alive()


@given(st.binary(max_size=80), st.sampled_from(["text", "jsonl"]))
def test_any_bytes_give_one_line_for_each_line_or_an_error(data, output_format):
    output, translator = io.StringIO(), UpperCaseTranslator()
    try:
        stream.translate_stream(translator, io.BytesIO(data), output, output_format=output_format)
    except InputError as error:
        assert "not valid UTF-8" in str(error) or "not text, but " in str(error)
        assert output.getvalue().count("\n") < data.count(b"\n") + 1
    else:
        assert sum(map(len, translator.windows)) == data.count(b"\n") + (data[-1:] not in (b"\n", b""))
        if output_format == "jsonl":
            lines = output.getvalue().splitlines()  # which, as many readers do, also splits at U+2028
            assert [json.loads(line)["source"] for line in lines] == [s for w in translator.windows for s in w]


def test_each_json_object_is_one_line_whatever_it_contains():
    text = "a\u2028b\x85c\u2029d"
    output, _ = translate(text.encode(), "jsonl")
    (line,) = output.splitlines()
    assert json.loads(line)["source"] == text


def test_the_lines_of_a_file_are_one_window(monkeypatch):
    monkeypatch.setattr(stream, "_PAUSE", 60)  # which the end of the file cuts short
    assert [len(window) for window in stream._ReadAhead([("a", "")] * 3000).windows()] == [3000]


def test_read_ahead_is_bounded_in_characters(monkeypatch):
    monkeypatch.setattr(stream, "_READ_AHEAD_CHARACTERS", 100)
    read = []

    def lines():
        for number in range(50):
            read.append(number)
            yield "x" * 60, ""

    windows = stream._ReadAhead(lines()).windows()
    taken = 0
    for window in windows:
        taken += len(window)
        assert len(window) <= 2
        time.sleep(0.002)
        assert len(read) <= taken + 3
    assert taken == 50


def test_line_numbers_continue_from_window_to_window(monkeypatch):
    monkeypatch.setattr(stream, "_WINDOW_LINES", 2)
    numbers = []

    class Numbered(UpperCaseTranslator):
        def translate(self, sentences, *, first_line, **options):
            numbers.append((first_line, len(sentences)))
            return super().translate(sentences)

    stream.translate_stream(Numbered(), io.BytesIO(b"a\n" * 7), io.StringIO(), output_format="text")
    assert numbers[0][0] == 1 and sum(count for _, count in numbers) == 7
    assert all(later == first + count for (first, count), (later, _) in itertools.pairwise(numbers))
