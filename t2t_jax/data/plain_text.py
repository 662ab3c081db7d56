"""Plain forms of characters that nobody sees: other kinds of space, invisible characters, decomposed accents.

Editors, web pages and file systems put them into sources: no-break spaces, byte order marks, soft hyphens, Unicode's
decomposed form (NFD). They are replaced by their plain forms (a space, nothing, NFC) where a vocabulary has not learnt
them, since a model has learnt nothing of what its vocabulary has not.
"""

import collections
import re
import unicodedata
from collections.abc import Set

Pair = tuple[str, str]  # a source and its target

# White space other than what `collapse_spaces` knows.
SPACES = "\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
# Control characters; soft hyphen, Arabic letter mark, zero-width space, direction marks, embeddings and overrides, word
# joiner to the deprecated format characters, byte order mark. Without the joiners, which words and emoji need.
_INVISIBLE_RANGES = (
    (0x00, 0x08), (0x0E, 0x1B), (0x7F, 0x84), (0x86, 0x9F), (0xAD, 0xAD), (0x61C, 0x61C), (0x200B, 0x200B),
    (0x200E, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0xFEFF, 0xFEFF),
)  # fmt: skip
JOINERS = "\u200c\u200d"
INVISIBLE = "".join(chr(code) for first, last in _INVISIBLE_RANGES for code in range(first, last + 1))

# Scripts without spaces between words: Thai and Lao, Tibetan, Burmese, Khmer, kana, Chinese characters.
WITHOUT_SPACES = re.compile("[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]")
# Chinese and Japanese, with their punctuation and full-width forms: no space follows, not even after a sentence.
NO_SPACE_AFTER = re.compile("[\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uff9f\U00020000-\U0003ffff]")


def collapse_spaces(text: str) -> str:
    """`text` with each run of ASCII white space, newlines included, replaced by one space, and stripped."""
    return re.sub(r"\s+", " ", text, flags=re.ASCII).strip(" ")


def is_blank(text: str) -> bool:
    """Whether nothing is in `text` but white space, control and format characters (Unicode's Cc and Cf)."""
    return all(c.isspace() or unicodedata.category(c) in ("Cc", "Cf") for c in text)


def plain_forms(learnt: Set[str]) -> dict[int, str]:
    """A table for `str.translate`: what replaces each space and each invisible character that is not `learnt`."""
    forms = dict.fromkeys(SPACES, " ") | dict.fromkeys(INVISIBLE, "")
    return {ord(character): plain for character, plain in forms.items() if character not in learnt}


def compose(text: str, learnt: Set[str]) -> str:
    """`text` with the words in NFC in which that replaces a character that is not `learnt`."""
    if unicodedata.is_normalized("NFC", text):
        return text
    return re.sub(r"\S+", lambda word: _composed(word[0], learnt), text)


def _composed(word: str, learnt: Set[str]) -> str:
    composed = unicodedata.normalize("NFC", word)
    replaced = collections.Counter(word) - collections.Counter(composed)
    return word if replaced.keys() <= learnt else composed
