import io
import json
import os
import select
import threading

import pytest

from t2t_jax.decoding import stream
from t2t_jax.decoding.translator import Hypothesis, Translator
from t2t_jax.errors import InputError


class Shouting(Translator):
    """Stands in for a model, which has tests of its own: what is tested here is the order of lines."""

    def __init__(self):
        self.windows = []

    def translate(self, sentences, **options):
        self.windows.append(list(sentences))
        return [[Hypothesis(s.upper(), [s], -1.0, -1.0, 1, [-1.0])] for s in sentences]


def translate(data: bytes, output_format="text"):
    output = io.StringIO()
    translator = Shouting()
    stream.translate_stream(translator, io.BytesIO(data), output, output_format=output_format)
    return output.getvalue(), translator.windows


def test_one_line_out_for_each_line_in_in_order_and_empty_lines_stay_empty(monkeypatch):
    monkeypatch.setattr(stream, "_WINDOW", 3)
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


def test_nothing_in_nothing_out():
    assert translate(b"") == ("", [])


def test_bad_bytes_are_refused_with_their_line_after_the_lines_before_it():
    output = io.StringIO()
    with pytest.raises(InputError, match="standard input, line 3: not valid UTF-8"):
        stream.translate_stream(Shouting(), io.BytesIO(b"a\nb\n\xff\nd\n"), output, output_format="text")
    assert output.getvalue() in ("", "A\n", "A\nB\n")


def test_unknown_formats_are_refused():
    with pytest.raises(InputError, match="did you mean 'jsonl'"):
        translate(b"a\n", "json")


def test_a_line_is_answered_before_the_next_one_is_written():
    """As an interactive program on the other end of a pipe needs it."""
    read_in, write_in = os.pipe()
    read_out, write_out = os.pipe()
    source, output = os.fdopen(read_in, "rb"), os.fdopen(write_out, "w")
    arguments = {"args": (Shouting(), source, output), "kwargs": {"output_format": "text"}}
    thread = threading.Thread(target=stream.translate_stream, **arguments, daemon=True)
    thread.start()
    for word in (b"one\n", b"two\n"):
        os.write(write_in, word)
        answered, _, _ = select.select([read_out], [], [], 10)
        assert answered, "no answer in ten seconds"
        assert os.read(read_out, 100) == word.upper()
    os.close(write_in)
    thread.join(10)
    assert not thread.is_alive()
