"""§5.1: corpus cleaning: normalisation of training text, filters that drop pairs, and a report of what they dropped.

Each rule is a function, switched on in `config.data.cleaning`. Filters that look at a single pair run in the worker
processes that encode the text; deduplication comes after them, by 64-bit hashes of all pairs. Dev and test pairs are
never cleaned.
"""

import dataclasses
import functools
import hashlib
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from t2t_jax.data.languages import LETTERS, base_language
from t2t_jax.data.plain_text import Pair, is_blank
from t2t_jax.errors import InputError
from t2t_jax.validation import Range

EXAMPLES = 3  # dropped pairs that the report shows for each rule
_SHORTEST_LEAK = 12  # letters; shorter held-out sentences occur in training text by chance
_WORDS = re.compile(r"\w+|[^\w\s]")
_NEITHER = re.compile(r"[^\w\s]")  # of a word nor a space
_WITHIN_WORDS = ("Mn", "Mc", "Me", "Cf")  # Unicode's combining marks and format characters
_PUNCTUATION = {
    **dict.fromkeys("„“”«»‟″", '"'),
    **dict.fromkeys("‘’‚‛´`′", "'"),
    **dict.fromkeys("–—―−", "-"),
    "…": "...",
    **dict.fromkeys("\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u3000", " "),
}
_ANY_PUNCTUATION = re.compile(f"[{''.join(_PUNCTUATION)}]")


@dataclasses.dataclass(frozen=True)
class Rules:
    """Which rules are on, with the field names of `config.data.cleaning`; 0 turns a limit off."""

    lowercase: bool = False
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
        Range(0, 10**9, hint="0: no limit").check("data.cleaning.max_words", self.max_words)
        if self.max_ratio != 0:
            Range(1, hint="0: no limit").check("data.cleaning.max_ratio", self.max_ratio)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Rules":
        """The rules in `config.data.cleaning`; one that is not known, and must not be ignored, is an InputError."""
        if later := sorted(set(fields) - {field.name for field in dataclasses.fields(cls)}):
            raise InputError(
                f"the config has data.cleaning.{later[0]}, which this version does not know; a later one wrote it: "
                "read the run with that version"
            )
        return cls(**fields)

    @property
    def normalizes(self) -> bool:
        """Whether a normalisation is on."""
        return self.lowercase or self.normalize_punctuation or self.remove_nonprinting

    def check_languages(self, source: str, target: str) -> None:
        """Refuses `drop_wrong_script` where it would drop nothing."""
        if self.drop_wrong_script and not LETTERS.keys() & {base_language(source), base_language(target)}:
            raise InputError(
                f"data.cleaning.drop_wrong_script=True needs a language whose script is known: {', '.join(LETTERS)}; "
                f"got data.source_language={source} and data.target_language={target}; set it to False"
            )


# --- Normalisation -----------------------------------------------------------------------------------------


def lowercase(text: str) -> str:
    """`text` in lower case, each character for itself, as SentencePiece's rules say it (`replacements`)."""
    return "".join(map(str.lower, text))


def normalize_punctuation(text: str) -> str:
    """`text` with the ASCII form of the common quotation marks, dashes, ellipsis and spaces (`_PUNCTUATION`)."""
    return _ANY_PUNCTUATION.sub(lambda found: _PUNCTUATION[found[0]], text)


def remove_nonprinting(text: str) -> str:
    """`text` without control, format and private-use characters (Unicode's Cc, Cf, Co) other than tab, CR and LF."""
    return text if text.isprintable() else "".join(c for c in text if not _is_nonprinting(c))


def _is_nonprinting(character: str) -> bool:
    return character not in "\t\r\n" and unicodedata.category(character) in ("Cc", "Cf", "Co")


# --- Filters on one pair: True drops it --------------------------------------------------------------------


def is_empty(source: str, target: str) -> bool:
    """Whether a side is blank."""
    return is_blank(source) or is_blank(target)


def num_words(text: str) -> int:
    """The number of words and punctuation marks: runs of letters and digits, and each other character but spaces.

    Combining marks, as vowels are in many scripts and accents in NFD, belong to the word that they are in, and so do
    format characters, such as joiners.
    """
    if not text.isascii():
        text = _NEITHER.sub(lambda c: "" if unicodedata.category(c[0]) in _WITHIN_WORDS else c[0], text)
    return len(_WORDS.findall(text))


def has_too_many_words(source_words: int, target_words: int, max_words: int) -> bool:
    """Whether a side has more than `max_words` words."""
    return max(source_words, target_words) > max_words


def has_bad_ratio(source_words: int, target_words: int, max_ratio: float) -> bool:
    """Whether one side has more than `max_ratio` times as many words as the other."""
    return max(source_words, target_words) > max_ratio * min(source_words, target_words)


def is_identical(source: str, target: str) -> bool:
    """Whether both sides are the same text, apart from white space: an untranslated pair."""
    return source.split() == target.split()


def is_wrong_script(text: str, language: str) -> bool:
    """Whether fewer than half of the letters are of the language's script; False for languages without a known one."""
    script = LETTERS.get(base_language(language))
    if script is None or not (others := re.findall(rf"[^\W\d_{script}]", text)):
        return False
    return len(re.findall(f"[{script}]", text)) < len(others)


def is_too_long(source: Sequence[int], target: Sequence[int], max_length: int) -> bool:
    """Whether a side has more than `max_length` subwords, EOS included."""
    return max(len(source), len(target)) > max_length


def leak_index(held_out: Iterable[Pair]) -> frozenset[str]:
    """The `letters` of the held-out sentences that `is_leaked` looks for, without the shortest."""
    sides = (letters(side) for pair in held_out for side in pair)
    return frozenset(side for side in sides if len(side) >= _SHORTEST_LEAK)


def is_leaked(source: str, target: str, held_out: Collection[str]) -> bool:
    """Test-set leakage: whether a side has the same letters as a held-out sentence (`leak_index`)."""
    return letters(source) in held_out or letters(target) in held_out


# --- Deduplication: duplicates have equal keys -------------------------------------------------------------


def letters(text: str) -> str:
    """The letters of a text, with the marks on them, in NFC and lower case, without digits, punctuation and spaces."""
    if text.isascii():
        return "".join(filter(str.isalpha, text)).lower()
    kept, is_kept = [], False
    for character in unicodedata.normalize("NFC", text):
        is_kept = character.isalpha() or (is_kept and unicodedata.category(character)[0] == "M")
        if is_kept:
            kept.append(character)
    return "".join(kept).lower()


def exact_key(source: str, target: str) -> int:
    """A 64-bit hash of a pair's text."""
    return _hash(f"{source}\t{target}")


def near_key(source: str, target: str) -> int:
    """A 64-bit hash of a pair's letters: near-duplicates differ only in digits, punctuation, spaces and case.

    Pairs without letters have their exact key.
    """
    near = f"{letters(source)}\t{letters(target)}"
    return _hash(near) if len(near) > 1 else exact_key(source, target)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def repeated(keys: np.ndarray) -> np.ndarray:
    """Whether each key occurred earlier. To save memory, keys are sorted in 16 parts, by their top four bits."""
    found, part_of = np.zeros(len(keys), bool), (keys >> np.uint64(60)).astype(np.uint8)
    for part in range(16):
        members = np.flatnonzero(part_of == part).astype(np.uint32)
        order = np.argsort(keys[members], kind="stable")
        ordered = keys[members[order]]
        found[members[order[1:]]] = ordered[1:] == ordered[:-1]
    return found


# --- All filters on many pairs -----------------------------------------------------------------------------


@dataclasses.dataclass
class Report:
    """How many training pairs were read, how many each rule dropped, and the first few that it dropped.

    `unknown` counts the kept pairs with text that is not in the vocabulary; `texts` the pairs kept of each training
    text, where they are known.
    """

    read: int = 0
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    examples: dict[str, list[list[str]]] = dataclasses.field(default_factory=dict)
    unknown: int = 0
    texts: list[int] = dataclasses.field(default_factory=list)

    @property
    def kept(self) -> int:
        return self.read - sum(self.dropped.values())

    def drop(self, rule: str, source: str, target: str) -> None:
        """Counts a pair that this rule dropped; a pair is counted for one rule only."""
        self.dropped[rule] = self.dropped.get(rule, 0) + 1
        examples = self.examples.setdefault(rule, [])
        if len(examples) < EXAMPLES:
            examples.append([source[:200], target[:200]])

    def add(self, other: "Report") -> None:
        """Adds the report of the pairs that follow these."""
        self.read += other.read
        self.unknown += other.unknown
        for rule, count in other.dropped.items():
            self.dropped[rule] = self.dropped.get(rule, 0) + count
            self.examples[rule] = (self.examples.get(rule, []) + other.examples[rule])[:EXAMPLES]

    def __str__(self) -> str:
        lines = [f"{self.kept:,} of {self.read:,} training pairs kept"]
        lines += [f"  {count:>12,} dropped: {_DESCRIPTIONS[rule]}" for rule, count in self.dropped.items() if count]
        if self.unknown:
            lines.append(f"  {self.unknown:>12,} kept with text that is not in the vocabulary")
        return "\n".join(lines)


_DESCRIPTIONS = {
    "empty": "an empty side",
    "too_many_words": "more than data.cleaning.max_words words",
    "bad_ratio": "a ratio of words above data.cleaning.max_ratio",
    "identical": "both sides the same",
    "wrong_script": "letters of another script",
    "test_leak": "test-set leakage, a sentence of the dev or test set",
    "too_long": "more than data.max_length subwords",
    "duplicate": "duplicates",
    "near_duplicate": "near-duplicates, equal but for digits, punctuation and case",
}


def clean(
    pairs: Iterable[Pair], rules: Rules, languages: tuple[str, str], held_out: Collection[str], report: Report
) -> list[Pair]:
    """The normalised pairs that pass all filters on text; the others are counted in `report`."""
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
    """`normalize` as SentencePiece normalisation rules, so that text to translate is normalised like training text."""
    characters = list(map(chr, range(0x110000)))
    # SentencePiece can have no rule for NUL.
    unseen = (character for character in characters if character != "\0" and _is_nonprinting(character))
    removed = {character: "" for character in unseen} if rules.remove_nonprinting else {}
    capitals = (character for character in characters if character.lower() != character)
    lowered = {character: character.lower() for character in capitals} if rules.lowercase else {}
    return removed | lowered | (_PUNCTUATION if rules.normalize_punctuation else {})


def normalize(text: str, rules: Rules) -> str:
    """The text after the normalisations that are on."""
    text = remove_nonprinting(text) if rules.remove_nonprinting else text
    text = lowercase(text) if rules.lowercase else text
    return normalize_punctuation(text) if rules.normalize_punctuation else text


def _first_rule(
    source: str, target: str, rules: Rules, languages: tuple[str, str], held_out: Collection[str]
) -> str | None:
    """The first filter that drops the pair, in a fixed order."""
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
