"""§6.3: constituency trees: reading bracketed trees, trees ⇄ token sequences, and repair of malformed sequences.

The model reads the words of a sentence and writes its tree without them, depth first (Vinyals et al., 2015):

    (TOP (S (NP (PRP I)) (VP (VBP sleep)) (. .)))   →   (S (NP XX )NP (VP XX )VP XX )S

`(L` opens a constituent L, `)L` closes it, and XX stands for the next word, or its part-of-speech tag with
`tags=True`. The root TOP is left out. `rebuild` is the exact inverse, and makes a tree over exactly the given words of
any other sequence of tokens.

Words may be numbered on both sides, so that a decoder need not count them to know which one comes next:

    #0 I #1 sleep #2 .   →   (S (NP #0 PRP )NP (VP #1 VBP )VP #2 . )S

Brackets may have their depth too, so that it need not count those that are open. Numbers and depths then begin again
after 16, so that each is frequent in training, where a high number would be in long sentences alone:

    #0 I #1 sleep #2 .   →   (1:S (2:NP #0 PRP )2:NP (2:VP #1 VBP )2:VP #2 . )1:S
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from t2t_jax.data.corpora import one_line
from t2t_jax.errors import InputError

ROOT, ANY_TAG = "TOP", "XX"
_ROOTS = ("", "TOP", "ROOT", "S1")  # what treebanks call the root
_TRACE = "-NONE-"  # the tag of traces and other empty elements
DEEPEST = 198  # nested constituents below the root; the deepest tree of the Penn Treebank has fewer than 50
NUMBERS = 64  # numbers of words; the 65th word is #0 again, so that sentences may have any length
CYCLE = 16  # depths of brackets, and numbers of words where brackets have depths, begin again after so many
UNKNOWN_TOKEN = "⁇"  # SentencePiece's text of the unknown piece
_TOKEN = re.compile(r"[()]|[^\s()]+", flags=re.ASCII)
_NUMBER = re.compile("#([0-9]+)")
_BRACKET_WITH_DEPTH = re.compile("[()]([0-9]+):.+")

# Repairs that `rebuild` counts.
REPAIRS = (
    "unknown_token",  # a bracket without a label, or what is not in the vocabulary: dropped
    "unmatched_closing",  # closes no open constituent: dropped
    "unclosed",  # closed where an outer constituent is closed, or at the end
    "missing_word",  # words beyond the last leaf: put into the innermost open constituent
    "surplus_word",  # leaves beyond the last word: dropped
    "empty",  # constituents without words: dropped
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
    number = 0
    for number, line in enumerate(lines, start=1):
        for token in _TOKEN.findall(line):
            where = f"{name}, line {number}"
            if token == "(":
                if len(stack) == DEEPEST + 2:  # with the root and a word
                    raise InputError(f"{where}: constituents are nested deeper than {DEEPEST}; is a bracket missing?")
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
        node.word = text
    else:
        raise InputError(f"{where}: {text!r} is a second word in one bracket; each word needs a tag and brackets")


def parse(text: str) -> Tree:
    """The one tree in a line of text."""
    trees = list(read_trees([text], "tree"))
    if len(trees) != 1:
        raise InputError(f"tree: {len(trees)} trees in a line; it must have one")
    return trees[0]


def _cleaned(tree: Tree, where: str) -> Tree:
    """The tree below one root, without traces, constituents that hold nothing else, and function tags."""
    root = tree if tree.label in _ROOTS and tree.word is None else Tree(ROOT, (tree,))
    found = _without_traces(root)
    if found is None:
        raise InputError(f"{where}: a tree without a word; remove it from the treebank")
    return dataclasses.replace(found, label=ROOT)


def _without_traces(tree: Tree) -> Tree | None:
    if tree.word is not None:
        return None if tree.label == _TRACE else tree
    children = tuple(child for child in map(_without_traces, tree.children) if child is not None)
    return Tree(_without_function_tags(tree.label), children) if children else None


def _without_function_tags(label: str) -> str:
    """NP-SBJ-1 and NP=2 are NP."""
    return re.split("[-=]", label)[0] or label


# --- Trees as text ------------------------------------------------------------------------------------------


def words(tree: Tree) -> list[str]:
    """The words of a tree, in order, as a person types them: ( for -LRB-."""
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


def linearize(tree: Tree, *, tags: bool = False) -> list[str]:
    """The tokens that the model writes for a tree; see above."""
    if tree.word is not None:
        return [tree.label if tags else ANY_TAG]
    inside = [token for child in tree.children for token in linearize(child, tags=tags)]
    return inside if tree.label == ROOT else [f"({tree.label}", *inside, f"){tree.label}"]


def rebuild(tokens: Sequence[str], sentence: Sequence[str]) -> tuple[Tree, collections.Counter[str]]:
    """The tree over the words of `sentence` that the tokens mean, and how often each of `REPAIRS` was needed.

    Numbers of words mean nothing here.
    """
    stack, repairs, leaves = [_Open(ROOT)], collections.Counter(), 0

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
            if len(stack) <= DEEPEST:  # with the root
                stack.append(_Open(label))
            else:
                repairs["too_deep"] += 1
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


# --- The task -----------------------------------------------------------------------------------------------


def target_text(tree: str) -> str:
    """What the model learns of a bracketed tree (`Task.preprocess_target`)."""
    return " ".join(linearize(parse(tree)))


def tagged_text(tree: str) -> str:
    """`target_text` with the part-of-speech tags of the words in place of XX (`Task.preprocess_target`)."""
    return " ".join(linearize(parse(tree), tags=True))


def numbered_text(tree: str) -> str:
    """`tagged_text` with the number of each word before its tag (`Task.preprocess_target`)."""
    return " ".join(_numbered(tree, NUMBERS))


def _numbered(tree: str, cycle: int) -> list[str]:
    numbers, tokens = _numbers(cycle), linearize(parse(tree), tags=True)
    parts = [[token] if token.startswith(("(", ")")) else [next(numbers), token] for token in tokens]
    return list(itertools.chain.from_iterable(parts))


def nested_text(tree: str) -> str:
    """`tagged_text` with numbers of words and the depth of each bracket before its label (`Task.preprocess_target`)."""
    tokens, depth = [], 0
    for token in _numbered(tree, CYCLE):
        depth += token.startswith("(")
        tokens.append(f"{token[0]}{depth % CYCLE}:{token[1:]}" if token.startswith(("(", ")")) else token)
        depth -= token.startswith(")")
    return " ".join(tokens)


def source_text(sentence: str) -> str:
    """The words of a sentence as a person types them, also where it has -LRB- for ( (`Task.preprocess_source`)."""
    return " ".join(map(_typed, words_of(sentence)))


def numbered_words(sentence: str) -> str:
    """`source_text` with the number of each word before it (`Task.preprocess_source`)."""
    return _with_numbers(sentence, NUMBERS)


def cyclic_words(sentence: str) -> str:
    """`numbered_words` with the numbers of `nested_text` (`Task.preprocess_source`)."""
    return _with_numbers(sentence, CYCLE)


def _with_numbers(sentence: str, cycle: int) -> str:
    return " ".join(
        f"{number} {_typed(word)}" for number, word in zip(_numbers(cycle), words_of(sentence), strict=False)
    )


def _numbers(cycle: int) -> Iterator[str]:
    """#0, #1, …, and #0 again after so many."""
    return itertools.cycle(f"#{number}" for number in range(cycle))


def number_of(token: str) -> int | None:
    """The number that a token like #3 is, or None."""
    found = _NUMBER.fullmatch(token)
    return int(found[1]) if found else None


def depth_of(token: str) -> int | None:
    """The depth that a bracket like (3:NP has, or None."""
    found = _BRACKET_WITH_DEPTH.fullmatch(token)
    return int(found[1]) if found else None


def words_of(sentence: str) -> list[str]:
    """The words of a tokenised sentence: what spaces separate."""
    return [word for word in one_line(sentence).split(" ") if word]


def output_tree(sentence: str, output: str) -> tuple[str, Mapping[str, int]]:
    """The bracketed tree over a sentence that the model's output means, and the repairs (`Task.postprocess_output`)."""
    tree, repairs = rebuild(output.split(), words_of(sentence))
    return bracketed(tree) if tree.children else "", repairs


def nested_output_tree(sentence: str, output: str) -> tuple[str, Mapping[str, int]]:
    """`output_tree` of an output whose brackets have depths (`Task.postprocess_output`)."""
    tree, repairs = rebuild(output.split(), words_of(sentence))
    return bracketed(_without_depths(tree)) if tree.children else "", repairs


def _without_depths(tree: Tree) -> Tree:
    """The tree with labels like NP for 3:NP."""
    if tree.word is not None:
        return tree
    label = re.sub("^[0-9]+:", "", tree.label)
    return dataclasses.replace(tree, label=label, children=tuple(map(_without_depths, tree.children)))
