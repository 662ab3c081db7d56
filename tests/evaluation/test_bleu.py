import json
import math
from collections import Counter

import pytest
import sacrebleu
from absl import logging
from sacremoses import MosesTokenizer

from t2t_jax.data import languages
from t2t_jax.data.languages import LETTERS
from t2t_jax.errors import InputError
from t2t_jax.evaluation import bleu
from t2t_jax.evaluation.bleu import corpus_scores, moses_tokens, multi_bleu, split_compounds
from t2t_jax.evaluation.metrics import METRICS
from t2t_jax.evaluation.significance import paired_bootstrap

REFERENCES = ["Das Licht ist an .", "Schalte das Licht ein, bitte!", "Gerät"]

# What a German test set has in it: compounds, abbreviations, quotes, numbers, entities, an empty line.
GERMAN = [
    'Die E-Mail-Adresse von Dr. Weber lautet "info@haus-garten.de".',
    "Der CDU-Politiker sagte am 3. Mai, er habe 1.500,75 Euro für das Nord-Süd-Gefälle ausgegeben.",
    "Müller & Söhne (Köln) liefern [fast] alles, z.B. Fenster, Türen usw.",
    "",
    "Was ist's? Ein Vitamin-C-Mangel ...",
    "Ja!",
    "Am Montag wurde in Baden-Württemberg ein neues Gesetz verabschiedet.",
]
TRANSLATIONS = [
    'Die E-Mail von Dr. Weber lautet "info@haus-garten.de".',
    "Der CDU-Mann sagte am 3. Mai, er habe 1.500,75 Euro für das Nord-Süd-Gefälle bezahlt.",
    "Müller & Söhne (Köln) liefern [fast] alles, z.B. Fenster und Türen.",
    "Nichts.",
    "Was ist das? Ein Vitamin-C-Mangel ...",
    "",
    "Am Montag wurde in Baden-Württemberg das neue Gesetz angenommen.",
]


def ngrams(line, n):
    words = line.split()
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def multi_bleu_by_definition(hypotheses, references):
    """The geometric mean of clipped precisions over the whole set, 0 if one of them is, times the brevity penalty."""
    precisions = []
    for n in (1, 2, 3, 4):
        pairs = [(ngrams(h, n), ngrams(r, n)) for h, r in zip(hypotheses, references, strict=True)]
        right = sum(min(count, wanted[gram]) for found, wanted in pairs for gram, count in found.items())
        precisions.append(right / max(1, sum(found.total() for found, _ in pairs)))
    lengths = [sum(len(line.split()) for line in side) for side in (hypotheses, references)]
    if 0 in precisions or 0 in lengths:
        return 0.0
    return 100 * min(1, math.exp(1 - lengths[1] / lengths[0])) * math.prod(precisions) ** 0.25


def split_by_definition(tokens):
    """Scans the line once; a hyphen is split where both neighbours are non-spaces and not part of the match before."""
    out, taken = [], -1  # `taken`: the last character that a hyphen before this one has used
    for i, c in enumerate(tokens):
        inside = 0 < i < len(tokens) - 1 and not tokens[i - 1].isspace() and not tokens[i + 1].isspace()
        if c == "-" and inside and taken < i - 1:
            out.append(" ##AT##-##AT## ")
            taken = i + 1
        else:
            out.append(c)
    return "".join(out)


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return str(path)


@pytest.fixture
def command(capsys):
    def call(*arguments):
        code = bleu.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


def test_a_perfect_translation_scores_100_with_its_signature():
    scores = corpus_scores(REFERENCES, REFERENCES, "de")
    for name in ("paper_bleu", "tokenized_bleu", "sacrebleu", "chrf"):
        assert scores[name] == pytest.approx(100)
    assert "tok:13a" in scores["signature"] and f"version:{sacrebleu.__version__}" in scores["signature"]
    assert "case:mixed" in scores["signature"] and "nc:6" in scores["chrf_signature"]
    assert "tok:moses-de|compounds:split" in scores["paper_signature"]
    assert "tok:moses-de|compounds:whole" in scores["tokenized_signature"]


def test_bleu_by_hand():
    """Of 5 words 4 match, of 4 bigrams 3, of 3 trigrams 2, of 2 four-grams 1."""
    scores = corpus_scores(["a b c d x"], ["a b c d e"])
    assert scores["sacrebleu"] == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)


def test_brevity_penalty_by_hand():
    scores = corpus_scores(["a b c d e f"], ["a b c d e f g h"])
    assert scores["sacrebleu"] == pytest.approx(100 * math.exp(1 - 8 / 6))


def test_hypotheses_and_references_must_pair():
    with pytest.raises(InputError, match="2 translations but 3 references"):
        corpus_scores(REFERENCES[:2], REFERENCES)
    with pytest.raises(InputError, match="test set is empty"):
        corpus_scores([], [])


def test_the_two_editions_of_newstest2014_are_told_apart():
    full, filtered = ["x"] * 3003, ["x"] * 2737
    with pytest.raises(InputError, match="2737 .* 3003 .* the filtered newstest2014 and the full newstest2014"):
        corpus_scores(filtered, full)
    with pytest.raises(InputError, match="3003 .* 2737 .* the full newstest2014 and the filtered newstest2014"):
        corpus_scores(full, filtered)
    with pytest.raises(InputError) as other:
        corpus_scores(full, filtered[:-1])
    assert "newstest2014" not in str(other.value)


# --- The paper's protocol ----------------------------------------------------------------------------------


def test_moses_tokens_as_tokenizer_perl_writes_them():
    """The expected lines are the output of Moses' tokenizer.perl -l de for GERMAN."""
    expected = [
        "Die E-Mail-Adresse von Dr. Weber lautet &quot; info @ haus-garten.de &quot; .",
        "Der CDU-Politiker sagte am 3. Mai , er habe 1.500,75 Euro für das Nord-Süd-Gefälle ausgegeben .",
        "Müller &amp; Söhne ( Köln ) liefern &#91; fast &#93; alles , z.B. Fenster , Türen usw.",
        "",
        "Was ist &apos; s ? Ein Vitamin-C-Mangel ...",
        "Ja !",
        "Am Montag wurde in Baden-Württemberg ein neues Gesetz verabschiedet .",
    ]
    tokenizer = MosesTokenizer("de")
    assert [moses_tokens(line, tokenizer) for line in GERMAN] == expected


@pytest.mark.parametrize(
    "tokens, expected",
    [
        ("E-Mail-Adresse", "E ##AT##-##AT## Mail ##AT##-##AT## Adresse"),
        ("Vitamin-C-Mangel", "Vitamin ##AT##-##AT## C-Mangel"),
        ("a-b-c-d", "a ##AT##-##AT## b-c ##AT##-##AT## d"),
        ("Ein- und Ausgang - oder -Weg", "Ein- und Ausgang - oder -Weg"),
        ("---", "- ##AT##-##AT## -"),
        ("", ""),
    ],
)
def test_compounds_by_hand(tokens, expected):
    assert split_compounds(tokens) == expected == split_by_definition(tokens)


@pytest.mark.parametrize(
    "hypotheses, references",
    [
        (TRANSLATIONS, GERMAN),
        (GERMAN, TRANSLATIONS),
        (TRANSLATIONS[:2], GERMAN[:2]),
        (["", "", "Das ist ein ganz neues Haus ."], ["Ja", "", "Das ist ein neues Haus ."]),
        (["das das das das das das"], ["das Haus und das Boot und das Meer"]),  # clipped
    ],
)
def test_multi_bleu_is_its_definition(hypotheses, references):
    assert multi_bleu(hypotheses, references) == pytest.approx(multi_bleu_by_definition(hypotheses, references))


@pytest.mark.parametrize(
    "hypotheses, references",
    [
        (["Ja !", "Das Haus"], ["Ja !", "Das Haus"]),  # no n-grams of order three and four, all others right
        (["a b c x d e f"], ["a b c y d e f"]),  # four-grams, none of them right
        (["", ""], ["Ja !", "Das Haus"]),
        (["Ja !", "x"], ["", ""]),
        ([""], [""]),
    ],
)
def test_multi_bleu_is_zero_where_an_order_has_no_match(hypotheses, references):
    assert multi_bleu(hypotheses, references) == multi_bleu_by_definition(hypotheses, references) == 0


def test_the_paper_splits_compounds_in_german_and_the_other_protocol_does_not():
    scores = corpus_scores(TRANSLATIONS, GERMAN, "de")
    tokenizer = MosesTokenizer("de")
    sides = [[moses_tokens(line, tokenizer) for line in side] for side in (TRANSLATIONS, GERMAN)]
    assert scores["tokenized_bleu"] == pytest.approx(multi_bleu_by_definition(*sides))
    split = [[split_by_definition(line) for line in side] for side in sides]
    assert scores["paper_bleu"] == pytest.approx(multi_bleu_by_definition(*split))
    assert scores["paper_bleu"] != pytest.approx(scores["tokenized_bleu"], abs=0.1)


def test_french_is_not_split_and_has_its_own_apostrophes():
    french = ["L'hôtel se trouve peut-être à Saint-Denis.", "Qu'est-ce que c'est ?"]
    scores = corpus_scores(["L'hôtel est peut-être à Saint-Denis.", french[1]], french, "fr")
    assert (
        scores["paper_bleu"] == scores["tokenized_bleu"] and scores["paper_signature"] == scores["tokenized_signature"]
    )
    hypothesis = "L&apos; hôtel est peut-être à Saint-Denis . | Qu&apos; est-ce que c&apos; est ?"
    reference = "L&apos; hôtel se trouve peut-être à Saint-Denis . | Qu&apos; est-ce que c&apos; est ?"
    by_definition = multi_bleu_by_definition(hypothesis.split("|"), reference.split("|"))
    assert scores["paper_bleu"] == pytest.approx(by_definition)


def test_case_and_escaped_characters_are_treated_alike_on_both_sides():
    """& in a reference matches only &, and a capital only a capital."""
    line = "Müller & Söhne liefern [fast] alles ."
    assert corpus_scores([line], [line], "de")["paper_bleu"] == pytest.approx(100)
    for other in (line.replace("&", "&amp;"), line.lower()):
        assert corpus_scores([other], [line], "de")["paper_bleu"] < 90


def test_the_lower_cased_protocol_is_that_of_multi30k():
    """Its files hold, for the first line, the second: lower case, punctuation normalised, then Moses tokens."""
    raw = "Ein Kind trägt ein „Super“-T-Shirt – und lacht…"
    tokens = "ein kind trägt ein &quot; super &quot; -t-shirt - und lacht ..."
    scores = corpus_scores([raw.upper()], [raw], "de")
    assert scores["lowercased_bleu"] == pytest.approx(100) and scores["tokenized_bleu"] == 0
    plain = raw.translate({ord("„"): '"', ord("“"): '"', ord("–"): "-", ord("…"): "..."})
    assert corpus_scores([plain], [raw], "de")["lowercased_bleu"] == pytest.approx(100)
    assert "case:lc|norm:moses-de|tok:moses-de" in scores["lowercased_signature"]
    other = raw.replace("Kind", "Mann")
    by_definition = multi_bleu_by_definition([tokens.replace("kind", "mann")], [tokens])
    assert corpus_scores([other], [raw], "de")["lowercased_bleu"] == pytest.approx(by_definition)


def test_without_a_language_there_are_only_the_scores_of_plain_text():
    full = corpus_scores(TRANSLATIONS, GERMAN, "de")
    plain = corpus_scores(TRANSLATIONS, GERMAN)
    assert plain.keys() == {"sacrebleu", "signature", "chrf", "chrf_signature"} and plain.items() <= full.items()


CHINESE = ["他们在公园里踢足球。", "一个女人正在街上骑自行车。", "今天天气很好。"]


@pytest.mark.parametrize("language, tokenizer", [("zh", "zh"), ("ja", "char"), ("th", "char")])
def test_languages_without_spaces_are_not_scored_sentence_by_sentence(language, tokenizer):
    """To 13a each of these sentences is one token, so that any other sentence scores 0."""
    almost = [sentence.replace("一个", "那个").replace("很好", "不错") for sentence in CHINESE]
    scores = corpus_scores(almost, CHINESE, language)
    assert scores.keys() == {"sacrebleu", "signature", "chrf", "chrf_signature"}
    assert 50 < scores["sacrebleu"] < 100 and f"|tok:{tokenizer}|" in scores["signature"]
    assert scores["sacrebleu"] == sacrebleu.BLEU(tokenize=tokenizer).corpus_score(almost, [CHINESE]).score
    compared = paired_bootstrap(almost, CHINESE, CHINESE, tokenizer=bleu.tokenizer(language), resamples=10)
    assert compared.score == pytest.approx(scores["sacrebleu"]) and compared.baseline == pytest.approx(100)


@pytest.mark.parametrize(
    "codes, tokenizer",
    [
        ("zh zh-Hans zh_CN ZH-tw zho_Hans zho_Hant cmn cmn_Hans yue_Hant", "zh"),
        ("ja ja-JP jpn_Jpan jpn th tha th_TH tha_Thai lao_Laoo khm_Khmr mya_Mymr bod_Tibt dzo", "char"),
        ("de xx ko kor_Hang deu_Latn", "13a"),
    ],
)
def test_languages_are_known_by_regional_and_three_letter_codes_too(codes, tokenizer):
    for code in codes.split():
        assert bleu.tokenizer(code) == tokenizer, code
    assert bleu.tokenizer(None) == "13a"


def test_codes_of_one_language_have_the_same_scores_and_signatures():
    scores = corpus_scores(TRANSLATIONS, GERMAN, "de")
    assert all(corpus_scores(TRANSLATIONS, GERMAN, code) == scores for code in ("de-AT", "de_DE", "deu", "deu_Latn"))
    with_two_letters = {language for language in bleu.known_languages() | LETTERS.keys() if len(language) == 2}
    assert set(languages._TWO_LETTERS.values()) == with_two_letters
    by_metric = METRICS["bleu"].score([], CHINESE, CHINESE, "zho_Hans", False)
    assert "|tok:zh|" in by_metric["signature"] and by_metric["sacrebleu"] == pytest.approx(100)


@pytest.mark.parametrize(
    "language, lines, warns",
    [
        (None, CHINESE, True),
        ("lzh", CHINESE, True),
        ("zh", CHINESE, False),
        (None, GERMAN, False),
        (None, ["안녕하세요.", "네"], False),  # Korean has spaces
    ],
)
def test_13a_warns_of_text_without_spaces(monkeypatch, caplog, language, lines, warns):
    monkeypatch.setattr(logging, "_log_counter_per_token", {})  # the warning comes once a process
    METRICS["bleu"].score([], lines, lines, language, False)
    assert any("each sentence is one token to 13a" in message for message in caplog.messages) == warns


# --- The command -------------------------------------------------------------------------------------------


def test_the_command_prints_all_protocols(command, tmp_path):
    files = write(tmp_path / "ref.de", GERMAN), write(tmp_path / "hyp.de", TRANSLATIONS)
    expected = corpus_scores(TRANSLATIONS, GERMAN, "de") | {"sentences": 7}
    code, output, errors = command(*files, "--target_language=de", "--json")
    assert code == 0 and json.loads(output) == expected and not errors

    code, output, _ = command(*files, "--target_language=de")
    rows = {line.split()[0]: line for line in output.splitlines()}
    assert code == 0 and list(rows) == [
        "paper_bleu",
        "tokenized_bleu",
        "lowercased_bleu",
        "sacrebleu",
        "chrf",
        "sentences",
    ]
    for name, signature in (("paper_bleu", "paper_signature"), ("sacrebleu", "signature"), ("chrf", "chrf_signature")):
        assert f"{expected[name]:.2f}" in rows[name] and expected[signature] in rows[name]


def test_the_command_compares_with_a_baseline(command, tmp_path):
    reference, hypothesis = write(tmp_path / "ref.de", GERMAN), write(tmp_path / "hyp.de", TRANSLATIONS)
    code, output, _ = command(reference, reference, f"--baseline={hypothesis}", "--json")
    found = json.loads(output)["comparison"]
    score = corpus_scores(TRANSLATIONS, GERMAN)["sacrebleu"]
    assert code == 0 and found["score"] == pytest.approx(100) and found["baseline"] == pytest.approx(score)
    assert found["difference"] == pytest.approx(100 - score) and found["resamples"] == 1000
    assert command(reference, reference, f"--baseline={hypothesis}", "--json")[1] == output

    code, output, _ = command(reference, reference, f"--baseline={hypothesis}")
    low, high = found["interval"]
    assert code == 0 and f"{100 - score:+.2f}  95 % interval {low:+.2f} to {high:+.2f}, one-tailed p = " in output


def test_the_command_ignores_case_where_it_is_asked_to(command, tmp_path):
    """Translations in lower case of cased references: a model that was trained in lower case."""
    reference, hypothesis, baseline = (
        write(tmp_path / f"{name}.de", lines)
        for name, lines in (("ref", GERMAN), ("hyp", map(str.lower, GERMAN)), ("base", map(str.lower, TRANSLATIONS)))
    )
    arguments = (reference, hypothesis, f"--baseline={baseline}", "--target_language=de", "--json")
    cased, found = (json.loads(command(*arguments, *flags)[1]) for flags in ([], ["--lowercase"]))
    assert found["sacrebleu"] == found["comparison"]["score"] == pytest.approx(100) and cased["sacrebleu"] < 50
    assert "case:lc" in found["signature"] and "case:lc" in found["paper_signature"]
    expected = corpus_scores(TRANSLATIONS, GERMAN, lowercase=True)["sacrebleu"]
    assert found["comparison"]["baseline"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("ref.de", "short.de"), "hypothesis: 6 translations but 7 references"),
        (("ref.de", "ref.de", "--baseline=short.de"), "baseline: 6 translations but 7 references"),
        (("ref.de", "none.de"), "hypothesis: no file none.de"),
        (("ref.de", "ref.de", "--target_language=xx"), "target_language: Moses has no rules for 'xx'"),
        (("empty.de", "empty.de"), "the test set is empty"),
        (("folder", "ref.de"), "reference: not a regular file: folder"),
        (("ref.de", "loop"), "hypothesis: no file loop"),
        (("ref.de", "latin.de"), "latin.de, line 2: not valid UTF-8 (byte 0xe4)"),
        (("ref.de", "utf16.de"), "utf16.de, line 1: not valid UTF-8"),
        (("x" * 5000, "ref.de"), "reference: 'xxx"),
        (("ref.de", "ref.de", "--baseline=~nobody_at_all/x"), "baseline: '~nobody_at_all/x'"),
        (("ref.de", "ref.de", "--baseline=empty.de"), "baseline: 0 translations but 7 references"),
    ],
)
def test_mistakes_are_one_line(command, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name, lines in {"ref.de": GERMAN, "short.de": GERMAN[:6], "empty.de": []}.items():
        write(tmp_path / name, lines)
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "latin.de").write_bytes("eins\nz\xe4hlen\n".encode("latin-1"))
    (tmp_path / "utf16.de").write_bytes("eins\n".encode("utf-16"))
    code, output, errors = command(*arguments)
    assert code == 2 and not output and len(errors.splitlines()) == 1 and message in errors


ODD = [
    "",
    " ",
    "\0",
    "\u2028\x0b\x85",
    "\ufeff",
    "(" * 3000,
    "a-" * 3000,
    "&" * 3000,
    "." * 3000,
    "1," * 3000,
    "日" * 3000,
]


def test_lines_of_any_kind_have_scores(command, tmp_path):
    """Only a newline ends a line, whatever other separators it contains."""
    files = write(tmp_path / "ref.de", ODD), write(tmp_path / "hyp.de", [*ODD[1:], "x"])
    code, output, errors = command(*files, "--target_language=de", "--json", f"--baseline={files[0]}")
    scores = json.loads(output)
    assert code == 0 and not errors and scores["sentences"] == len(ODD)
    assert all(0 <= scores[name] <= 100 for name in ("paper_bleu", "tokenized_bleu", "sacrebleu", "chrf"))


def test_outputs_in_lower_case_are_compared_without_case():
    lower = [line.lower() for line in GERMAN]
    scores = corpus_scores(lower, GERMAN, "de", lowercase=True)
    names = ("paper_bleu", "tokenized_bleu", "lowercased_bleu", "sacrebleu", "chrf")
    assert [round(scores[name], 6) for name in names] == [100] * 5
    assert all("|case:lc|" in scores[name] for name in scores if "signature" in name)
    assert corpus_scores(lower, GERMAN)["sacrebleu"] < 90
