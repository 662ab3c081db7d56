"""§6.3: constituency trees: reading bracketed trees, trees ⇄ token sequences, and repair of malformed sequences.

The model reads the words of a sentence and writes its tree without them, depth first (Vinyals et al., 2015):

    (TOP (S (NP (PRP I)) (VP (VBP sleep)) (. .)))   →   (S (NP XX )NP (VP XX )VP XX )S

`(L` opens a constituent L, `)L` closes it, and XX stands for the next word, or its part-of-speech tag with
`tags=True`. The root TOP is left out. `rebuild` is the exact inverse, and makes a tree over exactly the given words of
any other sequence of tokens.

Words may be numbered on both sides, so that a decoder need not count them to know which one comes next:

    #0 I #1 sleep #2 .   →   (S (NP #0 PRP )NP (VP #1 VBP )VP #2 . )S

In order (Liu and Zhang, 2017), each opening bracket comes after the first child of its constituent, so that a decoder
need not know, before the first word, which constituents begin there:

    #0 I #1 sleep #2 .   →   #0 PRP (NP )NP (S #1 VBP (VP )VP #2 . )S
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from t2t_jax.errors import InputError, shown
from t2t_jax.files import without_line_ends

ROOT, ANY_TAG = "TOP", "XX"
_ROOTS = ("", "TOP", "ROOT", "S1")  # what treebanks call the root
_TRACE = "-NONE-"  # the tag of traces and other empty elements
DEEPEST = 198  # nested constituents below the root; the deepest tree of the Penn Treebank has fewer than 50
NUMBERS = 16  # of words; they begin again, so that each is frequent in training and sentences may have any length
UNKNOWN_TOKEN = "⁇"  # SentencePiece's text of the unknown piece
_TOKEN = re.compile(r"[()]|[^\s()]+", flags=re.ASCII)
_NUMBER = re.compile("#([0-9]+)")

# Repairs that `rebuild` counts.
REPAIRS = (
    "unknown_token",  # a bracket without a label, or what is not in the vocabulary: dropped
    "unmatched_closing",  # closes no open constituent: dropped
    "unclosed",  # closed where an outer constituent is closed, or at the end
    "missing_word",  # words beyond the last leaf: put into the innermost open constituent
    "surplus_word",  # leaves beyond the last word: dropped
    "empty",  # constituents without words: dropped
    "no_first_child",  # in order, an opening bracket without a finished child before it: dropped
    "too_deep",  # constituents nested deeper than `DEEPEST`: dropped
)


@dataclasses.dataclass(frozen=True)
class Tree:
    """A constituent with its children, or a word, whose label is its part-of-speech tag."""

    label: str
    children: tuple["Tree", ...] = ()
    word: str | None = None


@dataclasses.dataclass
class _Open:
    """A constituent that is being built; `line` is where it was opened."""

    label: str | None
    children: list[Tree] = dataclasses.field(default_factory=list)
    word: str | None = None
    line: int = 0

    def close(self) -> Tree:
        return Tree(self.label or "", tuple(self.children), self.word)


# --- Reading ------------------------------------------------------------------------------------------------


def read_trees(lines: Iterable[str], name: str) -> Iterator[Tree]:
    """The trees in the lines of a treebank, cleaned; a tree may take any number of lines.

    `name` is what an InputError calls the file, beside the number of the line.
    """
    stack: list[_Open] = []
    for number, line in enumerate(lines, start=1):
        for token in _TOKEN.findall(line):
            where = f"{name}, line {number}"
            if token == "(":
                if len(stack) == DEEPEST + 2:  # with the root and a word
                    raise InputError(f"{where}: constituents are nested deeper than {DEEPEST}; is a bracket missing?")
                if stack and stack[-1].word is not None:
                    word = stack[-1].word
                    raise InputError(f"{where}: {word!r} and a bracket beside it; each word needs a tag and brackets")
                stack.append(_Open(None, line=number))
            elif not stack:
                raise InputError(f"{where}: {token!r} stands outside of all brackets; a tree begins with (")
            elif token == ")":
                closed = stack.pop().close()
                if stack:
                    stack[-1].children.append(closed)
                else:
                    yield _cleaned(closed, where)
            else:
                _add_text(stack[-1], token, where)
    if stack:
        raise InputError(f"{name}, line {stack[0].line}: the bracket that opens this tree is never closed")


def _add_text(node: _Open, text: str, where: str) -> None:
    """The first text in a bracket is its label, the second its word."""
    if node.label is None and not node.children:
        node.label = text
    elif node.word is None and not node.children:
        node.word = "".join(text.splitlines()) or "-"  # no word has ends of lines: see `words_of`
    else:
        raise InputError(f"{where}: {text!r} is a second word in one bracket; each word needs a tag and brackets")


def parse(text: str) -> Tree:
    """The one tree in a line of text."""
    name = "tree"
    try:
        trees = list(read_trees([text], name))
    except InputError as error:  # there is one line; which of a file, its reader knows
        raise InputError(str(error).removeprefix(f"{name}, line 1: ")) from None
    if len(trees) != 1:
        raise InputError(f"{len(trees)} trees in a line; it must have one")
    return trees[0]


def _cleaned(tree: Tree, where: str) -> Tree:
    """The tree below one root, without traces, empty constituents, function tags and brackets without a label."""
    root = tree if tree.label in _ROOTS and tree.word is None else Tree(ROOT, (tree,))
    found = _without_traces(root)
    if found is None:
        raise InputError(f"{where}: a tree without a word; remove it from the treebank")
    return dataclasses.replace(found, label=ROOT)


def _without_traces(tree: Tree) -> Tree | None:
    if tree.word is not None:
        return None if tree.label == _TRACE else tree
    found = (child for child in map(_without_traces, tree.children) if child is not None)
    # A bracket without a label is no constituent, and `rebuild` cannot know it: its children take its place.
    children = tuple(itertools.chain.from_iterable((child,) if child.label else child.children for child in found))
    return Tree(_without_function_tags(tree.label), children) if children else None


def _without_function_tags(label: str) -> str:
    """NP-SBJ-1 and NP=2 are NP."""
    return re.split("[-=]", label)[0] or label


# --- Trees as text ------------------------------------------------------------------------------------------


def words(tree: Tree) -> list[str]:
    """The words of a tree, in order, with brackets for -LRB- and -RRB-; other escapes of a treebank, as 3\\/4, stay."""
    return [_typed(leaf.word) for leaf in _leaves(tree)]


def _typed(word: str) -> str:
    return word.replace("-LRB-", "(").replace("-RRB-", ")")


def _leaves(tree: Tree) -> list[Tree]:
    if tree.word is not None:
        return [tree]
    return [leaf for child in tree.children for leaf in _leaves(child)]


def bracketed(tree: Tree) -> str:
    """The tree as a treebank writes it, in one line; brackets in words are -LRB- and -RRB-."""
    if tree.word is not None:
        return f"({tree.label} {tree.word.replace('(', '-LRB-').replace(')', '-RRB-')})"
    return f"({' '.join([tree.label, *map(bracketed, tree.children)])})"


def linearize(tree: Tree, *, tags: bool = False, in_order: bool = False) -> list[str]:
    """The tokens that the model writes for a tree; see above."""
    if tree.word is not None:
        return [tree.label if tags else ANY_TAG]
    parts = [linearize(child, tags=tags, in_order=in_order) for child in tree.children]
    if tree.label != ROOT:
        parts.insert(int(in_order), [f"({tree.label}"])
        parts.append([f"){tree.label}"])
    return list(itertools.chain.from_iterable(parts))


def rebuild(
    tokens: Sequence[str], sentence: Sequence[str], *, in_order: bool = False
) -> tuple[Tree, collections.Counter[str]]:
    """The tree over the words of `sentence` that the tokens mean, and how often each of `REPAIRS` was needed.

    Numbers of words mean nothing here.
    """
    stack, repairs, leaves = [_Open(ROOT)], collections.Counter(), 0

    def open(label: str) -> None:
        siblings = stack[-1].children
        first = siblings[-1:] if in_order else []
        kept = 1 if len(stack) > 1 else 0  # a constituent keeps its own first child
        if in_order and len(siblings) == kept:
            repairs["no_first_child"] += 1
        elif len(stack) + sum(map(_height, first)) > DEEPEST:  # the stack has the root
            repairs["too_deep"] += 1
        else:
            del siblings[len(siblings) - len(first) :]
            stack.append(_Open(label, first))

    def close() -> None:
        closed = stack.pop().close()
        if closed.children:
            stack[-1].children.append(closed)
        else:
            repairs["empty"] += 1

    for token in tokens:
        label = token[1:]
        if number_of(token) is not None:
            continue
        if token in ("(", ")", UNKNOWN_TOKEN):
            repairs["unknown_token"] += 1
        elif token.startswith("("):
            open(label)
        elif token.startswith(")"):
            if label not in [node.label for node in stack[1:]]:
                repairs["unmatched_closing"] += 1
                continue
            while stack[-1].label != label:
                repairs["unclosed"] += 1
                close()
            close()
        elif leaves < len(sentence):
            stack[-1].children.append(Tree(token, word=sentence[leaves]))
            leaves += 1
        else:
            repairs["surplus_word"] += 1
    repairs["missing_word"] += len(sentence) - leaves
    stack[-1].children += [Tree(ANY_TAG, word=word) for word in sentence[leaves:]]
    while len(stack) > 1:
        repairs["unclosed"] += 1
        close()
    return stack[0].close(), +repairs


def _height(tree: Tree) -> int:
    """How many constituents are nested in a tree, itself included."""
    return 0 if tree.word is not None else 1 + max(map(_height, tree.children))


# --- The task -----------------------------------------------------------------------------------------------


def target_text(tree: str) -> str:
    """What the model learns of a bracketed tree (`Task.preprocess_target`)."""
    return " ".join(linearize(parse(tree)))


def tagged_text(tree: str) -> str:
    """`target_text` with the part-of-speech tags of the words in place of XX (`Task.preprocess_target`)."""
    return " ".join(linearize(parse(tree), tags=True))


def numbered_text(tree: str, *, in_order: bool = False) -> str:
    """`tagged_text` with the number of each word before its tag (`Task.preprocess_target`)."""
    numbers, tokens = _numbers(), linearize(parse(tree), tags=True, in_order=in_order)
    return " ".join(token if token.startswith(("(", ")")) else f"{next(numbers)} {token}" for token in tokens)


def source_text(sentence: str) -> str:
    """The words of a sentence, with brackets for -LRB- and -RRB- (`Task.preprocess_source`)."""
    return " ".join(map(_typed, words_of(sentence)))


def numbered_words(sentence: str) -> str:
    """`source_text` with the number of each word before it (`Task.preprocess_source`)."""
    return " ".join(f"{number} {_typed(word)}" for number, word in zip(_numbers(), words_of(sentence), strict=False))


def _numbers() -> Iterator[str]:
    """#0, #1, …, and #0 again after `NUMBERS`."""
    return itertools.cycle(f"#{number}" for number in range(NUMBERS))


def number_of(token: str) -> int | None:
    """The number that a token like #3 is, or None."""
    found = _NUMBER.fullmatch(token)
    return int(found[1]) if found else None


def words_of(sentence: str) -> list[str]:
    """The words of a tokenised sentence: what spaces and ends of lines, such as U+2028, separate."""
    return re.findall(r"\S+", without_line_ends(sentence), flags=re.ASCII)


def check_words(sentence: str, tree: str) -> None:
    """Refuses a tree over other words than those of the sentence (`Task.check_pair`)."""
    wanted, found = list(map(_typed, words_of(sentence))), words(parse(tree))
    if len(found) != len(wanted):
        raise InputError(f"a tree over {len(found)} words, but its source has {len(wanted)}")
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True), start=1):
        if ours != theirs:
            raise InputError(f"word {number} of the tree is {shown(ours)}, that of its source {shown(theirs)}")


def output_tree(sentence: str, output: str, *, in_order: bool = False) -> tuple[str, Mapping[str, int]]:
    """The bracketed tree over a sentence that the model's output means, and the repairs (`Task.postprocess_output`)."""
    tree, repairs = rebuild(output.split(), words_of(sentence), in_order=in_order)
    return bracketed(tree) if tree.children else "", repairs
