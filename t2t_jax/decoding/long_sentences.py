"""§6.1: splits lines into parts that are translated separately.

Lines beyond a length limit, which bounds memory, and, on request, lines of several sentences: a model trained on single
sentences translates only some of them.
"""

import itertools
import re
from collections.abc import Callable, Sequence

from t2t_jax.data.tokenizer import EOS, LANGUAGE_CODE, SPACE

_SENTENCE_ENDS = (".", "!", "?", "…", ":", ";")
_FULL_WIDTH_ENDS = ("。", "！", "？")  # in scripts without spaces
# A possible end of a sentence and the space after it, if a text follows; without backtracking, so in linear time.
_BOUNDARY = re.compile("(?:(?<![.!?…])[.!?…]++[\"'”’“»)\\]]*+ ++|(?<![。！？])[。！？]++[”’」』）]*+ *+)(?=\\S)")
# Before a full stop that ends no sentence: a title, an initial, an abbreviation with full stops, an ordinal number, a
# day and month. No number or domain, such as 3.50 or example.com.
_TITLE = "mrs?|ms|mme|dr|prof|st|hr|fr|nr|vs"
_PART = rf"(?:{_TITLE}|univ|dipl|art|[^\W\d_]{{1,2}})\."
_DATE = r"(?:0?[1-9]|[12]\d|3[01])\.(?:0?[1-9]|1[0-2])"
_ABBREVIATION = re.compile(rf"(?:{_TITLE}|\w|(?:{_PART})+(?:{_TITLE}|[^\W\d_]{{1,3}})|\d\d?|{_DATE})", re.IGNORECASE)
_LANGUAGE_TAG = re.compile("<2[A-Za-z][^<>\\s]*>")  # the language code of Johnson et al. 2017
_LONGEST_CODE = 16  # subwords, where the vocabulary does not have the code whole


def cut(ids: Sequence[int], piece_of: Callable[[int], str], length: int) -> list[list[int]]:
    """Splits `ids`, which end with EOS, into parts of at most `length` ids that each end with EOS.

    Each part ends at the best position in the second half of the allowed length: after a sentence, else between words,
    else between characters, else anywhere; of equally good positions at the last. `piece_of` returns a subword's text.
    Each part begins with the language code of the source, if it has one.
    """
    code = language_code(ids, piece_of)
    ids, parts, start, longest = list(ids[len(code) : -1]), [], 0, max(1, length - 1 - len(code))
    while len(ids) - start > longest:
        positions = range(start + longest, start + longest // 2, -1)
        end = max(positions, key=lambda position: _quality(piece_of(ids[position - 1]), piece_of(ids[position])))
        parts.append([*code, *ids[start:end], EOS])
        start = end
    return [*parts, [*code, *ids[start:], EOS]]


def sentences_of(text: str) -> list[str]:
    """The sentences of a line: at least one, "" of an empty line.

    A sentence ends with . ! ? or …, perhaps with quotation marks or brackets after it, before a space; or with 。 ！ or
    ？. None begins with a small letter, except in a text without capitals, and none ends with an abbreviation.
    """
    has_capitals = text != text.lower()
    ends = [found.end() for found in _BOUNDARY.finditer(text) if _ends_sentence(text, found, has_capitals)]
    return [text[start:end].rstrip() for start, end in itertools.pairwise([0, *ends, len(text)])]


def _ends_sentence(text: str, found: re.Match[str], has_capitals: bool) -> bool:
    if has_capitals and text[found.end()].islower():
        return False
    if not found[0].startswith(". "):
        return True
    word = text[text.rfind(" ", 0, found.start()) + 1 : found.start()]
    return not _ABBREVIATION.fullmatch(word.lstrip("\"'“„«‚‘(["))


def language_code(ids: Sequence[int], piece_of: Callable[[int], str]) -> list[int]:
    """The subwords that name the target language at the beginning of a source, such as >>fra<< or <2fr>, if any do."""
    beginnings = itertools.accumulate(piece_of(id) for id in ids[:_LONGEST_CODE])
    for end, text in enumerate(beginnings, start=1):
        word = text.strip(SPACE)
        if SPACE in word:
            return []
        if any(code.fullmatch(word) for code in (LANGUAGE_CODE, _LANGUAGE_TAG)):
            return list(ids[:end])
    return []


def _quality(before: str, after: str) -> int:
    """How good a cut between two subwords is, from 0 to 3."""
    text = before.strip(SPACE)
    if text.endswith(_FULL_WIDTH_ENDS):
        return 3
    if after.startswith(SPACE) or before.endswith(SPACE):
        return 3 if text.endswith(_SENTENCE_ENDS) else 2
    return 0 if _is_inside_character(after) else 1


def _is_inside_character(piece: str) -> bool:
    """Whether the piece is a UTF-8 continuation byte."""
    return len(piece) == 6 and piece.startswith("<0x") and 0x80 <= int(piece[3:5], 16) < 0xC0
