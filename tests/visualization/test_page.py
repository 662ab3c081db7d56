"""The page is one file that needs nothing else and holds every weight; what it does: test_page_in_a_browser.py."""

import base64
import hashlib
import json
import re

import numpy as np
import pytest

from t2t_jax.visualization.page import LEVELS, page, weights_size
from tests.visualization.maps import HOSTILE, random_maps

KINDS = ("encoder", "decoder", "encoder_decoder")
DIGITS = {c: n for n, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}


def data_of(content):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', content, re.S)[1])


def weights_of(map):
    """All weights of a map in the page's JSON."""
    rows, columns = len(map["queries"]), len(map["keys"])
    found = np.zeros((len(map["weights"]), len(map["weights"][0]), rows, columns))
    for index in np.ndindex(*found.shape[:2]):
        text = map["weights"][index[0]][index[1]]
        values = [(64 * DIGITS[a] + DIGITS[b]) / LEVELS for a, b in zip(text[::2], text[1::2], strict=True)]
        places = [(q, k) for q in range(rows) for k in range(q + 1 if map["causal"] else columns)]
        for place, value in zip(places, values, strict=True):
            found[index][place] = value
    return found


def test_the_json_holds_the_tokens_and_every_weight_of_the_model_to_half_a_level(translator):
    maps = translator.attention(["one two three", "four", "two"], ["drei zwei", "", "zwei eins eins vier"])
    data = data_of(page(maps, "x"))
    assert (data["layers"], data["heads"], len(data["sentences"])) == (2, 4, 3)
    for pair, sentence in zip(maps, data["sentences"], strict=True):
        for kind in KINDS:
            map = getattr(pair, kind)
            assert (sentence[kind]["queries"], sentence[kind]["keys"]) == (map.queries, map.keys)
            assert sentence[kind]["query_words"] == map.query_words._asdict()
            np.testing.assert_allclose(weights_of(sentence[kind]), map.weights, atol=0.5 / LEVELS + 1e-7)


def test_a_sentence_of_fifty_tokens_with_six_layers_of_eight_heads_is_below_a_megabyte():
    tokens = [f"▁word{n}" for n in range(50)]
    assert 500_000 < len(page([random_maps(tokens, tokens, 6, 8)], "x").encode()) < 1_000_000


@pytest.mark.parametrize(("source", "target"), [(1, 1), (5, 3), (3, 5)])
def test_the_size_of_the_weights_follows_from_the_lengths(source, target):
    (sentence,) = data_of(page([random_maps(["a"] * source, ["b"] * target, 2, 3)], "x"))["sentences"]
    written = sum(len(head) for kind in KINDS for layer in sentence[kind]["weights"] for head in layer)
    assert written == weights_size(2 * 3, source, target)


def test_no_token_and_no_title_can_add_markup():
    harmless = page([random_maps(["a"] * len(HOSTILE), ["a"])], "x")
    content = page([random_maps(HOSTILE, HOSTILE)], HOSTILE[1])
    for markup in ("<script", "</script", "<img", "<!--", "]]>", "\u2028"):
        assert content.count(markup) == harmless.count(markup), markup
    assert data_of(content)["sentences"][0]["encoder"]["queries"] == HOSTILE


def test_the_policy_allows_the_script_and_the_style_of_the_page_and_nothing_else():
    content = page([random_maps(["a", "</s>"], ["b"])], "x")
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', content)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    for rule, element in (("script-src", "script"), ("style-src", "style")):
        (inline,) = re.findall(f"<{element}>(.*?)</{element}>", content, re.S)
        assert rules[rule] == f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"
    assert set(re.findall(r"\w+://[^\"' )]*", content)) == {"http://www.w3.org/2000/svg"}  # a name, never fetched
    assert not re.search(r"<link|<img|@import|url\(|fetch\(|XMLHttp|import\(", content)


@pytest.mark.parametrize("heads", [1, 10, 11, 32])
def test_heads_have_different_colours(heads):
    colours = data_of(page([random_maps(["a"], ["b"], 1, heads)], "x"))["colours"]
    assert len(set(colours)) == heads and all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)
