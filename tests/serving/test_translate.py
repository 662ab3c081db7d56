"""The JSON endpoint answers as the command line does; what cannot be is refused with one line."""

import concurrent.futures
import io
import json

import pytest

from t2t_jax.decoding.stream import translate_stream
from t2t_jax.errors import InputError
from tests.serving.conftest import DEFAULTS, served

pytest.importorskip("starlette", reason="needs the extra `serve`")
from t2t_jax.serving.limits import Limits
from t2t_jax.serving.requests import OPTIONS, translate_request

SENTENCES = ["one two", "three", "four five six seven", "eight. one"]
OTHER = {"beam_size": 3, "n_best": 3, "alpha": 1}


def command_line(translator, sentences, **options):
    """What --mode=translate --output_format=jsonl writes."""
    options = {name: float(value) if name == "alpha" else value for name, value in options.items()}
    output = io.StringIO()
    source = io.BytesIO("\n".join(sentences).encode())
    translate_stream(translator, source, output, output_format="jsonl", **{**DEFAULTS, **options})
    return [json.loads(line) for line in output.getvalue().splitlines()]


def assert_same(answer, wanted):
    """Equal, with numbers to the rounding of batches of other sizes."""
    assert answer["source"] == wanted["source"] and len(answer["hypotheses"]) == len(wanted["hypotheses"])
    for ours, theirs in zip(answer["hypotheses"], wanted["hypotheses"], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            is_number = name in ("log_prob", "score", "token_log_probs")
            assert ours[name] == (pytest.approx(value, abs=1e-4) if is_number else value)


@pytest.mark.parametrize("options", [{}, {**OTHER, "max_extra_length": 2}, {"split_sentences": True}])
def test_the_answer_is_that_of_the_command_line(client, translator, options):
    wanted = command_line(translator, SENTENCES, **options)
    status, answer = client.post({"source": SENTENCES, **options})
    assert status == 200 and len(answer) == len(wanted)
    for pair in zip(answer, wanted, strict=True):
        assert_same(*pair)


def test_a_string_has_one_answer_and_a_list_has_a_list(client):
    status, answer = client.post({"source": "one two"})
    assert status == 200 and answer["source"] == "one two"
    assert client.post({"source": ["one two"]}) == (200, [answer])
    assert client.post({"source": ""})[1]["hypotheses"][0]["text"] == ""


def test_a_body_may_begin_with_a_byte_order_mark(client):
    body = json.dumps({"source": "one"})
    assert client.post(body.encode("utf-8-sig")) == client.post(body.encode())
    assert client.post(body.encode())[0] == 200


def test_a_hundred_parallel_requests_are_all_answered_as_if_alone(client, translator):
    options = [{}, OTHER, {"max_extra_length": 0}]
    asked = [(SENTENCES[n % 4], options[n % 3]) for n in range(100)]
    wanted = {
        str(each): dict(zip(SENTENCES, command_line(translator, SENTENCES, **each), strict=True)) for each in options
    }
    with concurrent.futures.ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda pair: client.post({"source": pair[0], **pair[1]}), asked))
    for (source, each), (status, answer) in zip(asked, answers, strict=True):
        assert status == 200
        assert_same(answer, wanted[str(each)][source])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"", "body: not valid JSON at character 1"),
        (b"{'source': 1}", "body: not valid JSON at character 2"),
        (b"\xff\xfe", "body: byte 0 is not valid UTF-8"),
        (b"[" * 30_000, "too deeply nested"),
        (b'{"source": "one", "beam_size": ' + b"9" * 6000 + b"}", "too large a number"),
        (["one"], "body must be a JSON object"),
        (b"null", 'such as {"source": "A sentence."}; got null'),
        ({}, "source must be a string or a list of strings; got nothing"),
        ({"source": None}, "source must be a string"),
        ({"source": [["one"]]}, "source must be a string; got a list"),
        ({"source": ["one", 2]}, "source, sentence 2 must be a string; got 2"),
        ({"source": ["one"] * 33}, "source must be 1 to 32 sentences; got 33; send several requests"),
        ({"source": "one\ntwo"}, "source: a line end at character 4; a sentence is one line"),
        ({"source": ["one", "two\ud800"]}, "source, sentence 2: '\\ud800' at character 4 is a lone surrogate; send"),
        ({"source": "xyz " * 300}, "subwords, which must be at most 256; split it"),
        ({"source": "one", "beam": 3}, "no field 'beam'; there are alpha, beam_size, "),
        ({"source": "one", "beam_size": 33}, "beam_size must be at least 1 and at most 32; got 33"),
        ({"source": "one", "beam_size": True}, "beam_size must be a whole number; got true"),
        ({"source": "one", "beam_size": None}, "beam_size must be a whole number; got null"),
        ({"source": "one", "beam_size": 2.0}, "beam_size must be a whole number; got 2.0"),
        ({"source": "one", "n_best": 3}, "n_best must be between 1 and beam_size=2; got 3"),
        ({"source": "one", "alpha": "0.6"}, "alpha must be a number; got '0.6'"),
        ({"source": "one", "alpha": 10.5}, "alpha must be at least 0 and at most 10; got 10.5"),
        (b'{"source": "one", "alpha": NaN}', "alpha must be finite"),
        (
            b'{"source": "one", "alpha": 1' + b"0" * 400 + b"}",
            "alpha must be at least 0 and at most 10; got an integer of",
        ),
        ({"source": "one", "max_extra_length": 513}, "max_extra_length must be at least 0 and at most 512"),
        ({"source": ["one"] * 32, "beam_size": 32, "max_extra_length": 512}, "lower beam_size or max_extra_length"),
        ({"source": "one. " * 40, "beam_size": 4, "max_extra_length": 512, "split_sentences": True}, "at most 65,536"),
        ({"source": "one", "constrained": 1}, "constrained must be true or false; got 1"),
        ({"source": "one", "split_sentences": "yes"}, "split_sentences must be true or false; got 'yes'"),
        ({"source": "one", "constrained": True}, "constrained: this task has no grammar"),
        ({"source": "one", "workdir": "/etc"}, "no field 'workdir'; there are "),
    ],
)
def test_a_mistake_is_one_line_that_says_what_would_work(client, value, message):
    status, answer = client.post(value)
    assert status == 400 and answer.keys() == {"error"}
    assert message in answer["error"] and "\n" not in answer["error"]


def test_the_run_s_own_options_are_never_too_much_for_one_sentence(translator):
    options = {"beam_size": 100, "alpha": 0.6, "max_extra_length": 700}
    body = json.dumps({"source": "one " * 127}).encode()
    (sentence,) = translate_request(body, translator, OPTIONS | options, Limits()).sentences
    with pytest.raises(InputError, match="send fewer sentences"):
        translate_request(json.dumps({"source": [sentence] * 2}).encode(), translator, OPTIONS | options, Limits())


def test_a_list_of_no_sentence_is_not_told_to_send_several_requests(client):
    assert client.post({"source": []}) == (400, {"error": "source must be 1 to 32 sentences; got 0"})


def test_attention_is_shown_on_a_page_of_its_own(client):
    status, answer = client.post({"source": "one two", "target": "eins"}, path="/attention")
    assert status == 200
    status, headers, content = client.request("GET", answer["page"])
    assert status == 200 and content.startswith(b"<!DOCTYPE html>") and "one two" in content.decode()
    assert headers["content-security-policy"] == "frame-ancestors 'self'"
    assert client.request("GET", "/attention/other")[0] == 404
    status, answer = client.post({"source": "xyz " * 100, "target": "eins"}, path="/attention")
    assert status == 400 and "at most 128" in answer["error"]
    status, answer = client.post({"source": ["one"], "target": "eins"}, path="/attention")
    assert (status, answer) == (400, {"error": "source must be a string; got a list"})
    status, answer = client.post({"source": "one", "target": "\ud800"}, path="/attention")
    assert status == 400 and answer["error"].startswith("target: '\\ud800' at character 1 is a lone surrogate")


def test_the_attention_of_a_hypothesis_is_that_of_its_own_tokens(client):
    tokens = ["▁", *"drei"]  # not those of "drei", and cut off before EOS
    status, answer = client.post({"source": "one two", "tokens": tokens}, path="/attention")
    assert status == 200
    content = client.request("GET", answer["page"])[2].decode()
    assert f'"queries":{json.dumps(tokens, ensure_ascii=False, separators=(",", ":"))}' in content


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"tokens": "drei"}, "tokens must be a list of strings; got 'drei'"),
        ({"tokens": None}, "tokens must be a list of strings; got nothing"),
        ({"tokens": ["d", "dreißig"]}, "tokens: 'dreißig' is no subword of the vocabulary; give those of a hypothesis"),
        ({"tokens": ["d", None]}, "tokens: None is no subword of the vocabulary; give those of a hypothesis"),
        ({"tokens": ["d", "</s>", "d"]}, "tokens: </s> is number 2 of 3, but ends a hypothesis; give one"),
        ({"tokens": ["d"] * 129}, "tokens: 129 subwords, which must be at most 128; split it"),
        ({"tokens": ["d"], "target": "d"}, "target: there are tokens too; send one of them"),
        ({}, "target must be a string; got nothing"),
    ],
)
def test_wrong_tokens_are_refused_in_one_line(client, value, message):
    assert client.post({"source": "one", **value}, path="/attention") == (400, {"error": message})


def test_only_the_newest_attention_pages_are_kept(translator):
    with served(translator, attention_pages=2) as client:
        pages = [client.post({"source": "one", "target": "eins"}, path="/attention")[1]["page"] for _ in range(3)]
        assert [client.request("GET", page)[0] for page in pages] == [404, 200, 200]
    assert len(set(pages)) == 3


def test_new_searches_are_rationed_and_known_ones_are_not(translator):
    with served(translator, searches=1, search_seconds=1000) as client:
        options = [OTHER, {"beam_size": 1}, OTHER, {}, {"alpha": 0.3}, {**OTHER, "alpha": 0.7}]
        answers = [client.request("POST", "/translate", json.dumps({"source": "one", **each}).encode(),
                                  Content_Type="application/json") for each in options]  # fmt: skip
    assert [status for status, _, _ in answers] == [200, 429, 200, 200, 200, 200]
    assert 0 < int(answers[1][1]["retry-after"]) <= 1000 and b"combination" in answers[1][2]


def test_the_info_holds_the_options_of_the_run_and_the_limits(client):
    status, headers, content = client.request("GET", "/info")
    info = json.loads(content)
    assert status == 200 and headers["content-type"] == "application/json"
    assert (
        info["options"] == {**DEFAULTS, "n_best": 1, "constrained": False, "split_sentences": False}
        and info["run"] == "tiny"
    )
    assert info["limits"]["sentences"] == 32 and info["has_attention"] and not info["has_trees"]
