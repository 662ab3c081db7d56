"""Each filter drops the pairs that it should, and no others."""

import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import t2t_jax
from configs import base_ende
from t2t_jax.data import cleaning
from t2t_jax.data.cleaning import Report, Rules, clean
from t2t_jax.data.store_settings import StoreSettings
from t2t_jax.errors import InputError
from t2t_jax.training.loop import train
from tests.runs import tiny_config

GOOD = ("The house is small, but the garden is large.", "Das Haus ist klein, aber der Garten ist groß.")
HELD_OUT = cleaning.leak_index([("A sentence of the test set.", "Ein Satz aus dem Testsatz."), ("Yes.", "Ja.")])

CASES = {
    "too_many_words": (Rules(max_words=12), ("one " * 13, "eins"), ("one " * 12, "eins")),
    "bad_ratio": (Rules(max_ratio=1.5), ("one two three four", "eins zwei"), ("one two three", "eins zwei")),
    "identical": (Rules(drop_identical=True), ("New York  2014", "New York 2014"), ("New York", "Neu York")),
    "wrong_script": (Rules(drop_wrong_script=True), ("The house", "Дом у реки See"), ("α and β angles", "Größe α")),
    "test_leak": (
        Rules(drop_test_leaks=True),
        ("Something else", "ein Satz, aus dem TESTSATZ!"),
        ("Yes.", "Ein Satz aus dem anderen Testsatz."),
    ),
    "empty": (Rules(), ("one", "\u3000 \u200b\t"), ("one", ".")),
}


def dropped(rules, pair):
    report = Report()
    kept = clean([pair], rules, ("en", "de"), HELD_OUT, report)
    assert report.read == 1 and report.kept == len(kept)
    return list(report.dropped)


@pytest.mark.parametrize("rule", CASES)
def test_a_filter_drops_a_bad_pair_and_keeps_good_ones(rule):
    rules, bad, good = CASES[rule]
    assert dropped(rules, bad) == [rule]
    assert dropped(rules, good) == dropped(rules, GOOD) == []
    assert rule == "empty" or dropped(Rules(), bad) == []  # filters are off by default


def test_a_ratio_or_length_at_the_limit_is_kept():
    assert dropped(Rules(max_words=3, max_ratio=1.5), ("a b c", "a b")) == []
    assert dropped(Rules(max_words=2), ("a b c", "a b")) == ["too_many_words"]


HINDI = "समिति ने कल रिपोर्ट को अपनाया।"


def test_combining_marks_are_no_words_and_divide_none():
    """Vowel signs of Indic scripts, accents in NFD; nor are joiners (Persian, emoji), which are format characters."""
    assert cleaning.num_words(HINDI) == 7  # six words and the danda
    assert cleaning.num_words(GOOD[1]) == cleaning.num_words(unicodedata.normalize("NFD", GOOD[1])) == 11
    assert cleaning.num_words("می\u200cخواهم ❤\ufe0f") == 2
    assert dropped(Rules(max_words=12, max_ratio=1.5), ("The committee adopted the report yesterday.", HINDI)) == []


def test_letters_have_their_marks_in_every_normal_form():
    """A leak is found in NFC and NFD; vowel signs distinguish words, and what is on a symbol is dropped with it."""
    nfc = "Der Präsident eröffnete die Prüfung."
    held_out, nfd = cleaning.leak_index([("x", nfc)]), unicodedata.normalize("NFD", nfc)
    assert nfd != nfc and cleaning.is_leaked("y", nfd, held_out) and cleaning.is_leaked("y", nfc, held_out)
    assert cleaning.near_key("a", nfd) == cleaning.near_key("a", nfc)
    assert cleaning.letters("का 7\ufe0f\u20e3 ❤\ufe0f") == "का" != cleaning.letters("की")


def test_languages_without_a_known_script_are_not_filtered():
    assert not cleaning.is_wrong_script("家は小さい", "ja")
    assert cleaning.is_wrong_script("家は小さい", "en") and not cleaning.is_wrong_script("2014: 7 %", "ru")


@pytest.mark.parametrize("code", ["en", "EN", "en-US", "de_DE", "eng", "hrv_Latn"])
def test_the_script_of_a_language_is_known_by_its_regional_and_three_letter_codes_too(code):
    assert cleaning.is_wrong_script("Привет мир", code) and not cleaning.is_wrong_script("Größe", code)


def test_a_filter_by_script_is_refused_where_neither_script_is_known():
    data = base_ende.get_config().data
    data.cleaning.drop_wrong_script = True
    data.update(source_language="ja", target_language="de-AT")
    StoreSettings.of(data)
    data.target_language = "zh_CN"
    with pytest.raises(
        InputError, match="^data.cleaning.drop_wrong_script=True needs .* got .*=ja and .*=zh_CN; set it"
    ):
        StoreSettings.of(data)


def test_text_is_normalised_only_if_switched_on():
    text = "„Groß“ – it’s\u00a0here…\u200b\u0007"
    assert cleaning.normalize(text, Rules()) == text
    assert cleaning.normalize(text, Rules(normalize_punctuation=True)) == '"Groß" - it\'s here...\u200b\u0007'
    assert cleaning.normalize(text, Rules(remove_nonprinting=True)) == "„Groß“ – it’s\u00a0here…"
    assert cleaning.normalize("Ä „I“ ẞ İx", Rules(lowercase=True)) == "ä „i“ ß i̇x"
    kept = clean([(text, text)], Rules(normalize_punctuation=True, remove_nonprinting=True), ("en", "de"), (), Report())
    assert kept == [('"Groß" - it\'s here...',) * 2]


@given(st.text())
def test_the_normalisation_rules_of_the_vocabulary_are_those_of_cleaning(text):
    rules = Rules(lowercase=True, normalize_punctuation=True, remove_nonprinting=True)
    text = text.replace("\0", "")
    replaced = "".join(cleaning.replacements(rules).get(character, character) for character in text)
    assert replaced == cleaning.normalize(text, rules)
    assert cleaning.replacements(Rules()) == {}


@pytest.mark.slow
def test_a_run_in_lower_case_is_scored_without_case(tmp_path):
    config = tiny_config(tmp_path, train__train_steps=1)
    config.data.cleaning.lowercase = True
    for split in ("train", "dev", "test"):
        for language in ("en", "de"):
            path = Path(f"{config.data[split]}.{language}")
            path.write_text(path.read_text().title())
    result = train(config, str(tmp_path / "run"))
    assert "case:lc" in result["test"]["signature"] and "case:lc" in result["dev"]["paper_signature"]
    assert t2t_jax.load(tmp_path / "run").vocabularies.target.lowercases


def test_near_duplicates_differ_in_digits_punctuation_and_case_only():
    same = [("Page 7 of 9", "Seite 7 von 9"), ("page 12 of 300.", "SEITE 1 – von 2")]
    other = [("Page 7 of 9", "Seite 7 vor 9"), ("12", "13"), ("14", "15")]
    assert len({cleaning.near_key(*pair) for pair in same}) == 1
    assert len({cleaning.near_key(*pair) for pair in (same[0], *other)}) == 4
    assert len({cleaning.exact_key(*pair) for pair in (*same, *other)}) == 5
    assert cleaning.exact_key("a", "b c") != cleaning.exact_key("a b", "c")


@given(st.lists(st.integers(0, 2**64 - 1).map(lambda n: n % 7 << 61 | n % 3), max_size=60))
def test_repeated_keys_are_those_seen_before(keys):
    expected = [key in keys[:index] for index, key in enumerate(keys)]
    np.testing.assert_array_equal(cleaning.repeated(np.array(keys, np.uint64)), expected)


def test_reports_add_up_in_order():
    first, second = Report(unknown=2), Report(unknown=3)
    clean([("", "a"), ("b", "")], Rules(), ("en", "de"), (), first)
    clean([("c", ""), ("", "d"), ("e", "e")], Rules(drop_identical=True), ("en", "de"), (), second)
    first.add(second)
    assert first.unknown == 5
    assert first.read == 5 and first.kept == 0 and first.dropped == {"empty": 4, "identical": 1}
    assert first.examples == {"empty": [["", "a"], ["b", ""], ["c", ""]], "identical": [["e", "e"]]}


@pytest.mark.parametrize(
    ("field", "value", "off"),
    [
        ("lowercase", True, "False"),
        ("normalize_punctuation", True, "False"),
        ("max_words", 250, "0"),
        ("max_ratio", 1.5, "0.0"),
        ("drop_wrong_script", True, "False"),
    ],
)
def test_rules_for_words_are_refused_where_a_store_of_trees_would_be_written(field, value, off):
    """A lower-cased tree has other labels: the model learned them, and every bracket was wrong."""
    data = base_ende.get_config().data
    data.cleaning[field] = value
    StoreSettings.of(data).check_rules()
    data.task = "parsing_with_tags"
    with pytest.raises(InputError, match=rf"data.cleaning.{field}={value} is for words .*; set it to {off}$"):
        StoreSettings.of(data).check_rules()


@pytest.mark.parametrize(("field", "value"), [("max_words", -1), ("max_ratio", 0.5)])
def test_impossible_limits_are_refused(field, value):
    with pytest.raises(InputError, match=f"data.cleaning.{field} must be"):
        Rules(**{field: value})
