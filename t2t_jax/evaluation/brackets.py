"""§6.3: labelled bracketing scores of constituency trees by the rules of EVALB with its parameter file COLLINS.prm.

    python -m t2t_jax.evaluation.brackets GOLD TEST [--gold_tags] [--sentences] [--json]

Two files with one bracketed tree a line. A bracket is a label with the span of its words; brackets are counted as
multisets, so that each of two equal brackets (NP over NP) needs a partner of its own. Before that, on both sides,

- words tagged -NONE- , : `` '' or . are deleted, and constituents without remaining words;
- labels are cut at their first - or = (function tags, indices); brackets labelled TOP are deleted;
- ADVP and PRT become one label, also among tags.

Sentences outside all totals, which therefore raise the score; their numbers stand in the summary:

- error sentences: after deletion the two trees differ in their number of words or in a word;
- skip sentences: the test tree has no words after deletion, as for an empty line or (()) where a parser failed.

EVALB ends without a summary at its twelfth error (MAX_ERROR 10); this command then ends with exit code 2. Other
differences from EVALB: unbalanced brackets in either file, which EVALB counts as an error sentence, words outside of
"(tag word)", which end it, files of different length and gold trees without leaves are bad input; F1 is 0.00 where
EVALB prints nan; nothing limits the length of a line (EVALB: 5,000 bytes, 200 words, 200 brackets).

--gold_tags replaces the tags in TEST by those in GOLD. Deletion follows the tags: where a parser prints XX for every
tag, its punctuation would stay, and nearly every sentence would be an error sentence. Tagging accuracy is then 100 by
construction, and words that differ are bad input.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, compress
from typing import Any, NamedTuple

from t2t_jax.argument_parser import argument_parser
from t2t_jax.errors import InputError, exit_code_of, shown
from t2t_jax.files import read_text

TRACE = "-NONE-"  # DELETE_LABEL_FOR_LENGTH
DELETED = frozenset(["TOP", TRACE, ",", ":", "``", "''", "."])  # DELETE_LABEL
EQUIVALENT = {"PRT": "ADVP"}  # EQ_LABEL
CUTOFF_LENGTH = 40  # CUTOFF_LEN
MOST_ERRORS = 11  # MAX_ERROR 10, which EVALB compares with the number of errors before the present one

VALID, ERROR, SKIP = range(3)  # EVALB's column Stat.

# An opening bracket with its label, and the rest of "(tag word)" if it is one | a closing bracket | anything else.
# re.ASCII: EVALB separates at ASCII white space only, so that U+00A0 may be part of a word.
_TOKEN = re.compile(r"\(([^\s()]*)(?:\s+([^\s()]*)\))?|(\))|([^\s()]+)", re.ASCII)
_FUNCTION_TAG = re.compile("[-=]")


class Leaf(NamedTuple):
    tag: str
    word: str


class Bracket(NamedTuple):
    label: str
    start: int  # the words from `start` to before `end`
    end: int


class Tree(NamedTuple):
    leaves: list[Leaf]
    brackets: list[Bracket]


class SentenceScore(NamedTuple):
    """The counts of one sentence, in the order of EVALB's columns; those of error and skip sentences are 0."""

    length: int  # words of the gold tree, punctuation included, traces not
    status: int
    matched: int = 0
    gold: int = 0  # brackets
    test: int = 0
    crossing: int = 0  # test brackets that cross a gold bracket
    words: int = 0  # after deletion
    correct_tags: int = 0
    reason: str = ""  # of an error sentence


def bracket_scores(gold: Sequence[str], test: Sequence[str], *, gold_tags: bool = False) -> dict[str, Any]:
    """EVALB's summary of bracketed trees, one a string: percentages, means and numbers of sentences.

    `up_to_40_words` holds the same for sentences whose gold tree has at most 40 words. `gold_tags` gives the test trees
    the tags of the gold trees first.
    """
    return summary(sentence_scores(gold, test, gold_tags))


def sentence_scores(
    gold: Sequence[str], test: Sequence[str], gold_tags: bool = False, names: tuple[str, str] = ("gold", "test")
) -> list[SentenceScore]:
    """The counts of every sentence; `gold_tags` as in `bracket_scores`, `names` stand for the two sides in errors."""
    for name, trees in zip(names, (gold, test), strict=True):
        if not trees:
            raise InputError(f"{name}: no trees; give one bracketed tree a line")
    if len(gold) != len(test):
        raise InputError(
            f"{names[0]} has {len(gold)} trees but {names[1]} has {len(test)}; they must pair line by line"
        )
    scores = []
    for number, lines in enumerate(zip(gold, test, strict=True), start=1):
        wanted, found = (read_tree(line, f"{name}, line {number}") for name, line in zip(names, lines, strict=True))
        if not any(leaf.word for leaf in wanted.leaves):
            raise InputError(f"{names[0]}, line {number}: a tree without leaves; write at least one (tag word)")
        if gold_tags:
            found = with_gold_tags(wanted, found, f"sentence {number}")
        scores.append(score_sentence(wanted, found))
    return scores


# --- Trees -------------------------------------------------------------------------------------------------


def read_tree(line: str, where: str) -> Tree:
    """The leaves and brackets of a bracketed tree as EVALB reads them; errors begin with `where`.

    Without its outer label, as in ( (S (NP …) …)), a tree has a bracket with the empty label. A line may hold several
    trees.
    """
    leaves: list[Leaf] = []
    brackets: list[Bracket] = []
    opened: list[tuple[str, int]] = []
    for label, word, closing, stray in (match.groups() for match in _TOKEN.finditer(line)):
        if stray:
            raise InputError(f"{where}: {shown(stray)} is not part of a (tag word); each leaf is a tag and one word")
        if not closing and word is None:
            opened.append((label, len(leaves)))
        elif not closing:
            leaves.append(Leaf(label, word))
        elif opened:
            brackets.append(Bracket(*opened.pop(), len(leaves)))
        else:
            raise InputError(f"{where}: unbalanced brackets; a closing bracket has no opening one")
    if opened:
        raise InputError(f"{where}: unbalanced brackets; {len(opened)} opened and not closed")
    return Tree(leaves, brackets)


def with_gold_tags(gold: Tree, test: Tree, where: str) -> Tree:
    """The test tree with the tags of the gold tree; traces, which parsers do not predict, are left out of account.

    A test tree without leaves, which is a skip sentence, stays as it is. Other words than in gold are an InputError.
    """
    if not test.leaves:
        return test
    wanted = [leaf for leaf in gold.leaves if leaf.tag != TRACE]
    is_word = [leaf.tag != TRACE for leaf in test.leaves]
    difference = _difference(wanted, list(compress(test.leaves, is_word)))
    if difference:
        raise InputError(f"{where}: {difference}; gold tags need the same words in both trees")
    tags = iter(wanted)
    return Tree([next(tags) if word else leaf for leaf, word in zip(test.leaves, is_word, strict=True)], test.brackets)


def _difference(gold: Sequence[Leaf], test: Sequence[Leaf]) -> str:
    """How two sequences of words differ; empty where they do not."""
    if len(gold) != len(test):
        return f"{len(gold)} words in gold but {len(test)} in test"
    pairs = ((wanted.word, found.word) for wanted, found in zip(gold, test, strict=True))
    return next((f"the word {shown(a)} in gold but {shown(b)} in test" for a, b in pairs if a != b), "")


def _after_deletion(tree: Tree) -> Tree:
    """The tree as it is scored: without deleted words, empty and deleted brackets; one name for equivalent labels."""
    kept = [leaf.tag not in DELETED for leaf in tree.leaves]
    position = list(accumulate(kept, initial=0))  # of each boundary between leaves
    brackets = []
    for label, start, end in tree.brackets:
        label = _FUNCTION_TAG.split(label, maxsplit=1)[0]
        if position[start] < position[end] and label not in DELETED:
            brackets.append(Bracket(EQUIVALENT.get(label, label), position[start], position[end]))
    return Tree(list(compress(tree.leaves, kept)), brackets)


# --- Counts ------------------------------------------------------------------------------------------------


def score_sentence(gold: Tree, test: Tree) -> SentenceScore:
    """EVALB's counts for one pair of trees."""
    length = sum(leaf.tag != TRACE for leaf in gold.leaves)
    gold, test = _after_deletion(gold), _after_deletion(test)
    if not test.leaves:
        return SentenceScore(length, SKIP)
    if difference := _difference(gold.leaves, test.leaves):
        return SentenceScore(length, ERROR, reason=f"{difference}, punctuation deleted")
    tags = ([EQUIVALENT.get(leaf.tag, leaf.tag) for leaf in tree.leaves] for tree in (gold, test))
    return SentenceScore(
        length,
        VALID,
        matched=(Counter(gold.brackets) & Counter(test.brackets)).total(),
        gold=len(gold.brackets),
        test=len(test.brackets),
        crossing=_crossing(gold.brackets, test.brackets),
        words=len(gold.leaves),
        correct_tags=sum(a == b for a, b in zip(*tags, strict=True)),
    )


def _crossing(gold: Sequence[Bracket], test: Sequence[Bracket]) -> int:
    """The number of test brackets that partly overlap at least one gold bracket."""
    spans = {(start, end) for _, start, end in gold}  # gold spans do not cross each other
    outside = [(start, end) for _, start, end in test if (start, end) not in spans]
    return sum(any(a < start < b < end or start < a < end < b for a, b in spans) for start, end in outside)


def summary(scores: Sequence[SentenceScore]) -> dict[str, Any]:
    """The totals of all sentences and, as `up_to_40_words`, those of the sentences within EVALB's cut-off length."""
    short = [score for score in scores if score.length <= CUTOFF_LENGTH]
    return _totals(scores) | {f"up_to_{CUTOFF_LENGTH}_words": _totals(short)}


def _totals(scores: Sequence[SentenceScore]) -> dict[str, Any]:
    """One block of the summary; a ratio without cases is 0, as in EVALB."""
    counts = Counter(score.status for score in scores)
    valid = [score for score in scores if score.status == VALID]
    total = {name: sum(getattr(score, name) for score in valid) for name in ("matched", "gold", "test", "crossing")}
    recall = _ratio(100.0 * total["matched"], total["gold"])
    precision = _ratio(100.0 * total["matched"], total["test"])
    return {
        "f1": _ratio(2 * precision * recall, precision + recall),
        "precision": precision,
        "recall": recall,
        "exact_match": _ratio(100.0 * sum(s.matched == s.gold == s.test for s in valid), len(valid)),
        "average_crossing": _ratio(total["crossing"], len(valid)),
        "no_crossing": _ratio(100.0 * sum(s.crossing == 0 for s in valid), len(valid)),
        "two_or_less_crossing": _ratio(100.0 * sum(s.crossing <= 2 for s in valid), len(valid)),
        "tagging_accuracy": _ratio(100.0 * sum(s.correct_tags for s in valid), sum(s.words for s in valid)),
        "sentences": len(scores),
        "error_sentences": counts[ERROR],
        "skip_sentences": counts[SKIP],
        "valid_sentences": len(valid),
    }


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


# --- As a command ------------------------------------------------------------------------------------------

# EVALB's names, in its order; its tables and summary are laid out for programs that read them by column or by name.
_NUMBERS = {
    "Number of sentence": "sentences",
    "Number of Error sentence": "error_sentences",
    "Number of Skip  sentence": "skip_sentences",
    "Number of Valid sentence": "valid_sentences",
}
_MEASURES = {
    "Bracketing Recall": "recall",
    "Bracketing Precision": "precision",
    "Bracketing FMeasure": "f1",
    "Complete match": "exact_match",
    "Average crossing": "average_crossing",
    "No crossing": "no_crossing",
    "2 or less crossing": "two_or_less_crossing",
    "Tagging accuracy": "tagging_accuracy",
}
_RULE = "=" * 76


def summary_text(scores: dict[str, Any]) -> str:
    """EVALB's summary of `bracket_scores`."""
    lines = ["=== Summary ==="]
    for title, block in {"All": scores, f"len<={CUTOFF_LENGTH}": scores[f"up_to_{CUTOFF_LENGTH}_words"]}.items():
        lines += ["", f"-- {title} --"]
        lines += [f"{name:<26}= {block[key]:6d}" for name, key in _NUMBERS.items()]
        lines += [f"{name:<26}= {block[key]:6.2f}" for name, key in _MEASURES.items()]
    return "\n".join(lines)


def sentences_text(scores: Sequence[SentenceScore]) -> str:
    """EVALB's table of sentences: one row each, and their sums."""
    lines = [
        "  Sent.                        Matched  Bracket   Cross        Correct Tag",
        " ID  Len.  Stat. Recal  Prec.  Bracket gold test Bracket Words  Tags Accracy",
        _RULE,
    ]
    for number, (length, status, matched, gold, test, crossing, words, tags, _) in enumerate(scores, start=1):
        recall, precision, accuracy = (
            _ratio(100.0 * a, b) for a, b in ((matched, gold), (matched, test), (tags, words))
        )
        lines.append(
            f"{number:4d}  {length:3d}    {status}  {recall:6.2f} {precision:6.2f}   {matched:3d}"
            f"    {gold:3d}  {test:3d}    {crossing:3d}   {words:4d}  {tags:4d}   {accuracy:6.2f}"
        )
    # The counts of error and skip sentences are 0 already.
    matched, gold, test, crossing, words, tags = (
        sum(column) for column in zip(*(score[2:8] for score in scores), strict=True)
    )
    sums = f"  {words:5d} {tags:5d}   {_ratio(100.0 * tags, words):6.2f}"
    if gold and test:
        ratios = f"{100.0 * matched / gold:6.2f} {100.0 * matched / test:6.2f}"
        sums = f"{'':16}{ratios} {matched:6d} {gold:5d} {test:5d}  {crossing:5d}{sums}"
    return "\n".join([*lines, _RULE, sums])


def score_files(gold: str, test: str, gold_tags: bool = False) -> list[SentenceScore]:
    """The counts of every sentence of two files; more errors than EVALB accepts are an InputError."""
    scores = sentence_scores(read_text("gold", gold), read_text("test", test), gold_tags, (gold, test))
    errors = [(number, score.reason) for number, score in enumerate(scores, start=1) if score.status == ERROR]
    if len(errors) > MOST_ERRORS:
        raise InputError(
            f"{test}: {len(errors)} of {len(scores)} sentences have other words than {gold}, over EVALB's limit of "
            f"{MOST_ERRORS}; the first is sentence {errors[0][0]}: {errors[0][1]}; if the tags of {test} are not "
            "predicted, give --gold_tags"
        )
    for number, reason in errors:
        print(f"sentence {number} is in no total: {reason}", file=sys.stderr)
    return scores


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser("t2t_jax.evaluation.brackets", __doc__)
    parser.add_argument("gold", help="reference trees, one a line")
    parser.add_argument("test", help="predicted trees, line by line")
    parser.add_argument("--gold_tags", action="store_true", help="give the test trees the tags of the gold trees")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--sentences", action="store_true", help="print EVALB's table of sentences before its summary")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of a summary")

    def show() -> None:
        options = parser.parse_args(argv)
        sentences = score_files(options.gold, options.test, options.gold_tags)
        scores = summary(sentences)
        if options.sentences:
            print(sentences_text(sentences))
        print(json.dumps(scores) if options.json else summary_text(scores))

    return exit_code_of(show)


if __name__ == "__main__":
    sys.exit(main())
