"""A line of any length needs bounded memory and does not change the other lines."""

import dataclasses
import io
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2t_jax.data.task import TASKS
from t2t_jax.data.tokenizer import EOS, longest_whole
from t2t_jax.decoding import batch_shapes
from t2t_jax.decoding.beam_search import SearchOptions
from t2t_jax.decoding.ensemble import Ensemble
from t2t_jax.decoding.hypothesis import Hypothesis, join
from t2t_jax.decoding.long_sentences import cut, sentences_of
from t2t_jax.decoding.stream import translate_stream
from t2t_jax.decoding.translator import Translator
from t2t_jax.errors import InputError
from tests import tiny
from tests.decoding.test_translator import close

PIECES = ["</s>", "▁one", "▁two", ".", "x", "<0xE2>", "<0x82>", "<0xAC>", "。"]
ONE, TWO, STOP, X, EURO, CHINESE_STOP = 1, 2, 3, 4, [5, 6, 7], 8


def cut_at(ids, length):
    """The parts without their EOS; checks that each has one."""
    parts = cut([*ids, EOS], PIECES.__getitem__, length)
    assert all(part[-1] == EOS for part in parts)
    return [part[:-1] for part in parts]


@given(st.lists(st.integers(1, len(PIECES) - 1)), st.integers(2, 40))
def test_the_parts_join_to_the_sentence_and_none_is_too_long(ids, length):
    parts = cut_at(ids, length)
    assert [i for part in parts for i in part] == ids
    assert all(len(part) < length for part in parts) and all(parts[:-1])


def test_cuts_are_after_sentences_else_between_words_else_between_characters():
    assert cut_at([ONE, TWO, STOP, ONE, TWO, TWO], 6) == [[ONE, TWO, STOP], [ONE, TWO, TWO]]
    assert cut_at([X, X, X, CHINESE_STOP, X, X], 6) == [[X, X, X, CHINESE_STOP], [X, X]]
    assert cut_at([ONE, X, X, TWO, X, X], 6) == [[ONE, X, X], [TWO, X, X]]
    assert cut_at([X, X, X, *EURO, X], 6) == [[X, X, X], [*EURO, X]]
    assert cut_at([7] * 9, 5) == [[7] * 4, [7] * 4, [7]]


def test_each_part_begins_with_the_language_code_of_the_source():
    """It counts; only at the beginning is it one."""
    pieces = [*PIECES, "▁>>fra<<"]
    parts = cut([CODE := len(PIECES), ONE, TWO, STOP, ONE, TWO, CODE, TWO, EOS], pieces.__getitem__, 6)
    assert parts == [[CODE, ONE, TWO, STOP, EOS], [CODE, ONE, TWO, CODE, TWO, EOS]]


@pytest.mark.parametrize("code", [["▁", ">>fra<<"], ["▁<", "2", "f", "r", ">"], ["▁<2fr>"], ["<2fr>▁"]])
def test_a_language_code_of_any_vocabulary_is_repeated(code):
    """A user-defined symbol of SentencePiece follows a space of its own; elsewhere the code is several subwords."""
    pieces = [*PIECES, *code]
    code = list(range(len(PIECES), len(pieces)))
    parts = cut([*code, ONE, TWO, STOP, ONE, TWO, EOS], pieces.__getitem__, len(code) + 5)
    assert parts == [[*code, ONE, TWO, STOP, EOS], [*code, ONE, TWO, EOS]]


def test_brackets_around_several_words_are_no_language_code():
    pieces = [*PIECES, "▁<2b", "▁>>", "▁or", ">", "<<"]
    first, second, word, close, end = range(len(PIECES), len(pieces))
    for ids in ([first, word, close, ONE, EOS], [second, word, end, ONE, EOS]):
        assert cut(ids, pieces.__getitem__, 4)[-1] == [ONE, EOS]


@pytest.fixture
def short_limits(translator, monkeypatch):
    """The translator with short limits: it splits lines of more than 8 subwords into parts of at most 5."""
    monkeypatch.setattr("t2t_jax.decoding.preprocessing.longest_whole", lambda max_length: 8)
    return Translator(translator.ensemble, translator.vocabularies, max_length=5, mesh=translator.mesh)


LONG = "one two three four five six seven eight one two"
PARTS = ["one two three four", "five six seven eight", "one two"]


LINES = [  # | stands for the end of a sentence and the space after it
    "",
    "One.",
    "He came.|She left!|Why?|Nobody knows…|The end",
    "a man sleeps.|two dogs run.|the end.",
    'He said: "Go away!"|She went.|(So it was.)|“Yes.”|Done; really: done.',
    "Mr. Smith of the U.S. Army met Dr. J. Jones, e.g. on the 3. October, vs. St. Paul in 2014.|Then he left.",
    "Wait ... what? she asked at 3.15 p.m. and left.",
    "Bis 31.12. Urlaub, am 3.1. Feiertag.|Fragen Sie Univ.Prof. Huber, Prof.Dr. Meier oder Art.Nr. A12.|Ja.",
    "It costs 3.50.|Visit example.com.|Load main.py.|Write Ph.D. or z.B. Wien.|Version 2.0.1.|The end",
    "家は小さい。|「庭は大きい！」|はい。。",
    "Él vino.|¿Quién?|«Yo.»|Bien.",
]


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_split_at_the_ends_of_its_sentences(line):
    separator = "" if "。" in line else " "
    assert sentences_of(line.replace("|", separator)) == line.split("|")


@pytest.mark.parametrize("text", [".", "。", "。 ", ". ", "one. Two", "一。"])
def test_a_line_of_a_megabyte_is_split_into_sentences_in_linear_time(text):
    line = text * (1_000_000 // len(text))
    assert "".join(sentences_of(line)).replace(" ", "") == line.replace(" ", "")


TWO_SENTENCES = "one two three. four five!"


def test_split_sentences_translates_the_sentences_of_a_line_as_if_each_were_a_line(translator):
    options = {"n_best": 2, "max_extra_length": 3}
    _, found, empty = translator.translate(["two two", TWO_SENTENCES, ""], split_sentences=True, **options)
    close(join(translator.translate(["one two three.", "four five!"], **options), 0.6), found)
    assert {hypothesis.parts for hypothesis in found} == {2} and empty[0].text == "" and empty[0].parts == 1
    (whole,) = translator.translate([TWO_SENTENCES], **options)
    assert whole[0].parts == 1 and whole[0].tokens != found[0].tokens


@pytest.mark.parametrize(
    ("texts", "joined"),
    [
        (["Eins.", "", "Zwei!"], "Eins. Zwei!"),
        (["今日は雨。", "「はい」", "ok"], "今日は雨。「はい」ok"),  # no spaces in Japanese and Chinese
        (["一二", "三。", "", ""], "一二三。"),
        (["네.", "아니요."], "네. 아니요."),
        (["สวัสดี", "ครับ"], "สวัสดี ครับ"),  # in Thai, between sentences
        (["", ""], ""),
    ],
)
def test_texts_are_joined_with_spaces_where_the_language_has_them(texts, joined):
    found = [[Hypothesis(text, [], 0.0, 0.0, 1, [])] for text in texts]
    assert join(found, 0.6)[0].text == joined


def test_a_joined_hypothesis_with_a_part_that_was_cut_off_comes_after_those_without_one():
    ended, cut_off = (
        Hypothesis(text, [], -n, -n, 1, [], finished=text == "Ja.") for text, n in (("Ja.", 2.0), ("Ja ja", 1.2))
    )
    joined = join([[ended, cut_off]] * 2, 0.6)
    assert [(h.text, h.finished) for h in joined] == [("Ja. Ja.", True), ("Ja ja Ja ja", False)]
    assert joined[0].score < joined[1].score


def test_each_sentence_begins_with_the_language_code_of_its_line(translator, monkeypatch):
    seen = []
    monkeypatch.setattr("t2t_jax.decoding.translator.search_all", lambda _, requests, *__: seen.extend(requests) or ())
    monkeypatch.setattr("t2t_jax.decoding.translator.join", lambda parts, alpha: [])
    vocabulary = translator.vocabularies.source
    code, *_ = vocabulary.encode("one")
    monkeypatch.setattr("t2t_jax.decoding.long_sentences.LANGUAGE_CODE", re.compile("one"))
    translator.translate([TWO_SENTENCES], split_sentences=True)
    assert [request.ids for request in seen] == [
        vocabulary.encode(text) for text in ("one two three.", "one four five!")
    ]
    assert seen[0].ids[0] == code


def test_the_sentences_of_a_line_are_not_split_where_the_output_is_of_the_whole(translator):
    parser = Translator(translator.ensemble, translator.vocabularies, max_length=256, task=TASKS["parsing"])
    with pytest.raises(InputError, match="split_sentences: an output of this task is of the whole line"):
        parser.translate([TWO_SENTENCES], split_sentences=True)
    with pytest.raises(InputError, match="split_sentences: attention is between one source and its target"):
        translator.attention([TWO_SENTENCES], split_sentences=True)
    with pytest.raises(InputError, match="split_sentences must be True or False; got 'yes'"):
        translator.translate([TWO_SENTENCES], split_sentences="yes")


def test_a_long_line_is_translated_in_parts_and_changes_no_other_line(short_limits, caplog):
    options = {"n_best": 2, "max_extra_length": 3}
    before, long, after = short_limits.translate(["two two", LONG, "four"], first_line=7, **options)
    assert "line 8: 11 subwords are more than are translated at once (8); translated in 3 parts" in caplog.text
    close(short_limits.translate(["two two"], **options)[0], before)
    close(short_limits.translate(["four"], **options)[0], after)
    parts = short_limits.translate(PARTS, **options)
    close(join([p[:1] for p in parts], 0.6), long[:1])
    assert long[0].text == " ".join(part[0].text for part in parts if part[0].text)
    for hypothesis in long:
        assert hypothesis.num_tokens == len(hypothesis.tokens) == len(hypothesis.token_log_probs)
        assert hypothesis.log_prob == pytest.approx(sum(hypothesis.token_log_probs), rel=1e-5)
        assert hypothesis.score == pytest.approx(hypothesis.log_prob / ((5 + hypothesis.num_tokens) / 6) ** 0.6)
    assert long == sorted(long, key=lambda h: (not h.finished, -h.score))


def test_a_line_beyond_the_learned_positions_is_translated_in_parts_which_have_no_attention_together(translator):
    """A model cannot tell the order of words apart that share the last position."""
    (model,) = translator.ensemble.modules
    config = dataclasses.replace(model.config, positions="learned", max_positions=8)
    learned = dataclasses.replace(model, config=config)
    variables = tiny.sharp_variables(learned, seed=1)
    limited = Translator(Ensemble((learned,), (variables["params"],)), translator.vocabularies, max_length=256)
    assert limited.translate([LONG], max_extra_length=3)[0][0].parts == 2

    beyond = "line 1: [0-9]+ subwords, which must be at most 8; split the line"
    for side, pair in ("source", ([LONG], ["two"])), ("target", (["one"], [LONG])), ("source", ([LONG],)):
        with pytest.raises(InputError, match=f"{side}, {beyond}"):
            limited.attention(*pair)
    with pytest.raises(InputError, match=f"target, {beyond}"):
        limited.attention(["one"], min_length=9)


@pytest.mark.parametrize("task", ["parsing", "parsing_with_numbers", "parsing_in_order"])
def test_a_long_line_is_refused_where_the_task_has_a_grammar(short_limits, task):
    """A tree is over all words of its line, whose numbers go on: separate parts have neither."""
    parser = Translator(short_limits.ensemble, short_limits.vocabularies, max_length=5, task=TASKS[task])
    with pytest.raises(InputError, match="source, line 8: [0-9]+ subwords, which must be at most 8; split the line"):
        parser.translate(["one", LONG], first_line=7)


def test_line_n_of_the_output_belongs_to_line_n_of_the_input(short_limits, caplog):
    output = io.StringIO()
    source = io.BytesIO(f"two two\n\n{LONG}\nfour\n".encode())
    translate_stream(short_limits, source, output, output_format="jsonl", max_extra_length=3)
    answers = [json.loads(line) for line in output.getvalue().splitlines()]
    assert [answer["source"] for answer in answers] == ["two two", "", LONG, "four"]
    assert [answer["hypotheses"][0].get("parts") for answer in answers] == [None, None, 3, None]
    assert "line 3: 11 subwords" in caplog.text


def test_the_limit_is_that_of_training_but_at_least_1024():
    assert longest_whole(256) == longest_whole(1024) == 1024 and longest_whole(4096) == 4096


def test_pairs_and_prefixes_beyond_the_limit_are_refused_by_their_line(short_limits):
    for pairs, place in [([("one", "two"), (LONG, "two")], "source, line 2"), ([("one", LONG)], "target, line 1")]:
        with pytest.raises(InputError, match=f"{place}: 11 subwords, which must be at most 8; split the line"):
            short_limits.score(pairs)
    with pytest.raises(InputError, match="reference, line 2: 11 subwords"):
        short_limits.preprocessor.check_lengths(["one", "two"], ["one", LONG])
    with pytest.raises(InputError, match="prefix, line 5: 11 subwords"):
        short_limits.translate(["one"], prefixes=[LONG], first_line=5)


def test_a_line_of_a_megabyte_is_split_before_the_search(translator, monkeypatch):
    """No request is longer than the limit, so memory is bounded."""
    seen = []
    monkeypatch.setattr(
        "t2t_jax.decoding.translator.search_all", lambda ensemble, requests, *_: seen.extend(requests) or iter(())
    )
    monkeypatch.setattr("t2t_jax.decoding.translator.join", lambda parts, alpha: [])
    translator.translate(["one " * 250_000, "x" * 100_000])
    assert len(seen) > 1000 and max(len(request.ids) for request in seen) <= 256


def test_a_wide_beam_has_fewer_rows(translator):
    usual = [(16, 4), (64, 4), (1024, 4), (1024, 16)]
    rows = lambda source_length, beam_width: batch_shapes.bucket_rows(source_length, 200, translator.mesh, beam_width)
    assert [rows(*shape) for shape in usual] == [64, 32, 2, 2]
    assert [rows(length, SearchOptions(beam_size=256).width) for length in (16, 64, 1024)] == [8, 2, 1]


@pytest.mark.parametrize(("platform", "most"), [("cpu", 64), ("gpu", 512)])
def test_long_translations_have_fewer_rows_and_a_bounded_cache(platform, most):
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
    rows = lambda beam_width, extra: batch_shapes.bucket_rows(16, 2000, mesh, beam_width, 16 + extra)
    assert rows(4, 50) == most and rows(4, 1000) == most // 8 and rows(32, 4096) == 1
    for beam_width, extra in ((1, 4096), (4, 1000), (32, 512), (256, 50)):
        capacity = batch_shapes.bucket_capacities(16, 16 + extra)[-1]
        assert rows(beam_width, extra) * beam_width * capacity <= max(most * 4 * 128, beam_width * capacity)


def test_rows_that_would_be_empty_are_avoided_where_they_cost_time():
    """On CPU few sentences have few rows, which are refilled; on an accelerator one batch holds them if it can."""
    mesh = lambda platform: SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
    counts = (1, 2, 7, 8, 17, 127, 128, 300)
    rows = lambda platform: [batch_shapes.bucket_rows(16, count, mesh(platform)) for count in counts]
    assert rows("cpu") == [1, 4, 8, 8, 16, 16, 64, 64]
    assert rows("gpu") == [1, 4, 16, 16, 64, 256, 256, 512]


def test_a_beam_wider_than_the_vocabulary_and_a_single_string_are_refused(translator, monkeypatch):
    with pytest.raises(InputError, match="beam_size must be at least 1 and at most 256; got 100000"):
        translator.translate(["one"], beam_size=100_000)
    monkeypatch.setattr(type(translator.vocabularies.target), "__len__", lambda self: 3)
    with pytest.raises(InputError, match="beam_size must be at most 3, the size of the vocabulary; got 4"):
        translator.translate(["one"])
    with pytest.raises(InputError, match="must be a list of str"):
        translator.translate("one two")
    for prefixes, message in (
        (["drei"], "as many as the 2 sentences; got 1"),
        ([], "2 sentences; got 0"),
        ("ab", "list"),
    ):
        with pytest.raises(InputError, match=f"prefixes must be .*{message}"):
            translator.translate(["one", "two"], prefixes=prefixes, beam_size=1)
    assert translator.translate([], prefixes=[], beam_size=1) == []
