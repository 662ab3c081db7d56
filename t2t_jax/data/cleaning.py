"""§5.1: what is changed in training text, which pairs are left out, and the report that says so.

Each rule is a function of its own, switched in `config.data.cleaning`. Rules that look at one pair run where the text
is read; duplicates are found later, by the 64-bit keys of all pairs. Held-out pairs are never cleaned.
"""

import dataclasses
import functools
import hashlib
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from t2t_jax.errors import Range

Pair = tuple[str, str]

EXAMPLES = 3  # dropped pairs kept for each rule
_LEAK = 12  # letters; shorter held-out sentences are not looked for
_WORDS = re.compile(r"\w+|[^\w\s]")
_PUNCTUATION = {
    **dict.fromkeys("„“”«»‟″", '"'),
    **dict.fromkeys("‘’‚‛´`′", "'"),
    **dict.fromkeys("–—―−", "-"),
    "…": "...",
    **dict.fromkeys("\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u3000", " "),
}
_ANY_PUNCTUATION = re.compile(f"[{''.join(_PUNCTUATION)}]")
_LATIN, _CYRILLIC, _GREEK = "A-Za-zªºÀ-ÖØ-öø-ɏḀ-ỿ", "Ѐ-ԯ", "Ͱ-Ͽἀ-῿"
_LATIN_LANGUAGES = "cs da de en es et fi fr hr hu is it lt lv nl no pl pt ro sk sl sv tr"
_LETTERS = {
    **{language: _LATIN for language in _LATIN_LANGUAGES.split()},
    **dict.fromkeys(("bg", "mk", "ru", "uk"), _CYRILLIC),
    "el": _GREEK,
}


@dataclasses.dataclass(frozen=True)
class Rules:
    """Which rules are on; the fields are those of `config.data.cleaning`. Checks itself; 0 turns a limit off."""

    normalize_punctuation: bool = False
    remove_nonprinting: bool = False
    max_words: int = 0
    max_ratio: float = 0.0
    drop_identical: bool = False
    drop_wrong_script: bool = False
    drop_duplicates: bool = False
    drop_near_duplicates: bool = False
    drop_test_leaks: bool = False

    def __post_init__(self):
        Range(0, 10**9).check("data.cleaning.max_words", self.max_words, "0: no limit")
        if self.max_ratio != 0:
            Range(1).check("data.cleaning.max_ratio", self.max_ratio, "0: no limit")


# --- Changes of the text -----------------------------------------------------------------------------------


def normalize_punctuation(text: str) -> str:
    """One form for each kind of quotation mark, dash, ellipsis and space."""
    return _ANY_PUNCTUATION.sub(lambda found: _PUNCTUATION[found[0]], text)


def remove_nonprinting(text: str) -> str:
    """No control, format, private-use or unassigned characters (Unicode C*), tab and line ends apart."""
    if text.isprintable():
        return text
    return "".join(c for c in text if c in "\t\r\n" or not unicodedata.category(c).startswith("C"))


# --- Rules on one pair: True means left out ----------------------------------------------------------------


def is_empty(source: str, target: str) -> bool:
    """A side has nothing but white space."""
    return not source.strip() or not target.strip()


def num_words(text: str) -> int:
    """Words as a tokeniser counts them: runs of letters and digits, and each other mark."""
    return len(_WORDS.findall(text))


def has_too_many_words(source_words: int, target_words: int, max_words: int) -> bool:
    """A side has more than `max_words` words."""
    return max(source_words, target_words) > max_words


def has_bad_ratio(source_words: int, target_words: int, max_ratio: float) -> bool:
    """One side has more than `max_ratio` times the words of the other."""
    return max(source_words, target_words) > max_ratio * min(source_words, target_words)


def is_identical(source: str, target: str) -> bool:
    """Both sides are the same text, white space aside: nothing was translated."""
    return source.split() == target.split()


def is_wrong_script(text: str, language: str) -> bool:
    """Fewer than half of the letters belong to the language's script; never for a language without an entry."""
    own = _LETTERS.get(language)
    if own is None or not (foreign := re.findall(rf"[^\W\d_{own}]", text)):
        return False
    return len(re.findall(f"[{own}]", text)) < len(foreign)


def is_too_long(source: Sequence[int], target: Sequence[int], max_length: int) -> bool:
    """A side has more than `max_length` subwords, EOS included."""
    return max(len(source), len(target)) > max_length


def leak_index(held_out: Iterable[Pair]) -> frozenset[str]:
    """What `is_leaked` looks for; a sentence of a few letters may well stand in both sets by chance."""
    found = (letters(side) for pair in held_out for side in pair)
    return frozenset(side for side in found if len(side) >= _LEAK)


def is_leaked(source: str, target: str, held_out: Collection[str]) -> bool:
    """A side is, letters alone, one of the held-out sentences (their `letters`)."""
    return letters(source) in held_out or letters(target) in held_out


# --- Keys of pairs: equal keys are duplicates --------------------------------------------------------------


def letters(text: str) -> str:
    """The letters of a text, in lower case: what is left of it without numbers, marks and spaces."""
    return "".join(filter(str.isalpha, text)).lower()


def exact_key(source: str, target: str) -> int:
    """64 bits of a pair's text."""
    return _hash(f"{source}\t{target}")


def near_key(source: str, target: str) -> int:
    """64 bits of a pair's letters: equal for pairs that differ only in numbers, marks, spaces and capitals.

    Pairs without any letters are near no other, but for the same text.
    """
    near = f"{letters(source)}\t{letters(target)}"
    return _hash(near) if len(near) > 1 else exact_key(source, target)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def repeated(keys: np.ndarray, parts: int = 16) -> np.ndarray:
    """True where a key has occurred before. Sorted in `parts` by the top bits, for memory's sake."""
    found, part_of = np.zeros(len(keys), bool), (keys >> np.uint64(60)).astype(np.uint8) % parts
    for part in range(parts):
        members = np.flatnonzero(part_of == part).astype(np.uint32)
        order = np.argsort(keys[members], kind="stable")
        ordered = keys[members[order]]
        found[members[order[1:]]] = ordered[1:] == ordered[:-1]
    return found


# --- All rules on many pairs -------------------------------------------------------------------------------


@dataclasses.dataclass
class Report:
    """How many training pairs were read, how many each rule dropped, in this order, and the first few of those."""

    read: int = 0
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    examples: dict[str, list[list[str]]] = dataclasses.field(default_factory=dict)

    @property
    def kept(self) -> int:
        return self.read - sum(self.dropped.values())

    def drop(self, rule: str, source: str, target: str) -> None:
        """Counts a pair for the first rule that drops it."""
        self.dropped[rule] = self.dropped.get(rule, 0) + 1
        examples = self.examples.setdefault(rule, [])
        if len(examples) < EXAMPLES:
            examples.append([source[:200], target[:200]])

    def add(self, other: "Report") -> None:
        """Adds the report of the pairs that come next."""
        self.read += other.read
        for rule, count in other.dropped.items():
            self.dropped[rule] = self.dropped.get(rule, 0) + count
            self.examples[rule] = (self.examples.get(rule, []) + other.examples[rule])[:EXAMPLES]

    def __str__(self) -> str:
        lines = [f"{self.kept:,} of {self.read:,} training pairs kept"]
        lines += [f"  {count:>12,} dropped: {_SAID[rule]}" for rule, count in self.dropped.items() if count]
        return "\n".join(lines)


_SAID = {
    "empty": "an empty side",
    "too_many_words": "more than data.cleaning.max_words words",
    "bad_ratio": "a ratio of words above data.cleaning.max_ratio",
    "identical": "both sides the same",
    "wrong_script": "letters of another script",
    "test_leak": "a sentence of the dev or test set",
    "too_long": "more than data.max_length subwords",
    "duplicate": "the same pair again",
    "near_duplicate": "the same pair again but for numbers, marks and capitals",
}


def clean(
    pairs: Iterable[Pair], rules: Rules, languages: tuple[str, str], held_out: Collection[str], report: Report
) -> list[Pair]:
    """The pairs that all rules on text keep, as they are to be learned; the others go into `report`."""
    kept = []
    for original in pairs:
        report.read += 1
        source, target = (normalize(side, rules) for side in original)
        rule = _first_rule(source, target, rules, languages, held_out)
        if rule:
            report.drop(rule, *original)
        else:
            kept.append((source, target))
    return kept


@functools.cache
def replacements(rules: Rules) -> dict[str, str]:
    """The changes of the text, where they are on, for the vocabulary: what is translated is changed alike."""
    unseen = (chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in ("Cc", "Cf"))
    removed = {character: "" for character in unseen if character not in "\0\t\r\n"} if rules.remove_nonprinting else {}
    return removed | (_PUNCTUATION if rules.normalize_punctuation else {})


def normalize(text: str, rules: Rules) -> str:
    """Both changes of the text, where they are on."""
    text = remove_nonprinting(text) if rules.remove_nonprinting else text
    return normalize_punctuation(text) if rules.normalize_punctuation else text


def _first_rule(
    source: str, target: str, rules: Rules, languages: tuple[str, str], held_out: Collection[str]
) -> str | None:
    if is_empty(source, target):
        return "empty"
    if rules.max_words or rules.max_ratio:
        words = num_words(source), num_words(target)
        if rules.max_words and has_too_many_words(*words, rules.max_words):
            return "too_many_words"
        if rules.max_ratio and has_bad_ratio(*words, rules.max_ratio):
            return "bad_ratio"
    if rules.drop_identical and is_identical(source, target):
        return "identical"
    if rules.drop_wrong_script and any(map(is_wrong_script, (source, target), languages)):
        return "wrong_script"
    if rules.drop_test_leaks and is_leaked(source, target, held_out):
        return "test_leak"
    return None
