"""Grammar-constrained decoding: a task's outputs are well-formed by construction.

A grammar is a function of the target vocabulary's pieces, an entry of `GRAMMARS`, which a task names
(t2t_jax/data/task.py). It returns the `Constraint` that forbids every token after which the output could no longer
become well-formed.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from t2t_jax.data.task import Task, Vocabularies
from t2t_jax.data.tokenizer import EOS, PAD, SPACE, UNKNOWN
from t2t_jax.data.trees import DEEPEST, NUMBERS, number_of, words_of
from t2t_jax.decoding.constraints import Constraint
from t2t_jax.errors import InputError

_FORBIDDEN, _LEAF, _OPENING, _CLOSING, _NUMBER = range(5)  # kinds of tokens

# Without a bound on unary chains, a weak parser fills the length limit with constituents of one child each. In the Penn
# Treebank at most 3 of them stand one above another. Depth first, a chain cannot be told from the beginning of a tree
# that branches to the left: 1,620 trees of CRAFT have up to 7 opening brackets in a row, but no chain above 2.
LONGEST_CHAIN = 4  # in order
MOST_OPENINGS = 12  # in a row, depth first


@functools.cache  # the same vocabulary has the same constraint, so that a search is compiled once
def tree_grammar(pieces: tuple[str, ...], *, in_order: bool = False) -> Constraint:
    """§6.3: allows the sequences of which `trees.rebuild` makes a tree over the source's words without a repair.

    Brackets are balanced and their labels match, no constituent is empty or nested too deeply, there are exactly as
    many leaves as words, and EOS comes last, within the length limit. If the vocabulary has numbers of words, each leaf
    follows its own. `in_order` is the order of `trees.linearize`. Unary chains are bounded: at most `LONGEST_CHAIN`
    constituents of one child stand one above another in order; at most `MOST_OPENINGS` brackets open in a row depth
    first.
    """
    kinds, closing_of, number_ids = _tables(pieces)
    tokens_per_word = 2 if _NUMBER in kinds else 1

    def process(
        log_probs: Float[Array, "B W vocab"],
        tokens: Int[Array, "B W T"],
        lengths: Int[Array, " B"],
        max_lengths: Int[Array, " B"],
        features: Int[Array, "B 1"],
    ) -> Float[Array, "B W vocab"]:
        is_token = jnp.arange(tokens.shape[2])[None, None] < lengths[:, None, None]
        token_kinds = jnp.where(is_token, jnp.asarray(kinds)[tokens], _FORBIDDEN)
        innermost, depth, nested = _innermost(tokens, token_kinds)
        leaves = (token_kinds == _LEAF).sum(axis=2)  # [B, W]
        missing, last = features - leaves, _last(token_kinds, lengths)
        is_numbered = last == _NUMBER  # only the leaf may follow
        number = jnp.where((missing > 0) & ~is_numbered, jnp.asarray(number_ids)[leaves % NUMBERS], -1)
        # How many tokens the limit leaves besides the next one, the missing leaves and closing brackets, and EOS.
        spare = (max_lengths - lengths - 1)[:, None] - (tokens_per_word * missing + depth + 1)
        follows_child = (last == _LEAF) | (last == _CLOSING)
        if in_order:  # the child before the bracket has at most `nested` levels
            is_longest = _chain(token_kinds, lengths) >= LONGEST_CHAIN  # what opens above it needs a second child
            may_open, levels = follows_child & ((missing > 0) | ~is_longest), depth + nested
            may_close = ~is_numbered & ~((last == _OPENING) & is_longest)
        else:
            is_longest = _run(token_kinds == _OPENING, lengths) >= MOST_OPENINGS
            may_open, levels, may_close = (missing > 0) & ~is_numbered & ~is_longest, depth, follows_child
        may_open &= (levels < DEEPEST) & (spare > 0)
        closing = jnp.where((depth > 0) & may_close, jnp.asarray(closing_of)[innermost], -1)
        kind, ids = jnp.asarray(kinds)[None, None], jnp.arange(len(pieces))[None, None]  # [1, 1, vocab]
        is_allowed = (
            (kind == _LEAF) & ((missing > 0) & (number < 0))[..., None]
            | (ids == number[..., None])
            | (kind == _OPENING) & may_open[..., None]
            | (ids == closing[..., None])
            | (ids == EOS) & ((depth == 0) & (missing == 0))[..., None]
        )
        return jnp.where(is_allowed, log_probs, -jnp.inf)

    count_words = lambda source: [len(words_of(source)) // tokens_per_word]
    return Constraint(process, largest_bonus=0.0, features=count_words)


class _Tables(NamedTuple):
    """The kind of each token, the closing bracket of each opening one, and the token of each number (−1: none)."""

    kinds: Int[np.ndarray, " vocab"]
    closing_of: Int[np.ndarray, " vocab"]
    number_ids: Int[np.ndarray, " numbers"]


def _tables(pieces: tuple[str, ...]) -> _Tables:
    """What the grammar knows of a vocabulary; refuses one without a leaf."""
    symbols = _symbols(pieces)
    closings = {symbol[1:]: id for id, symbol in symbols.items() if symbol.startswith(")")}
    closing_of = np.zeros(len(pieces), np.int32)
    kinds = np.full(len(pieces), _FORBIDDEN, np.int8)
    number_ids = np.full(NUMBERS, -1, np.int32)
    for id, symbol in symbols.items():
        if (number := number_of(symbol)) is not None:
            kinds[id], number_ids[number % NUMBERS] = _NUMBER, id
        elif not symbol.startswith(("(", ")")):
            kinds[id] = _LEAF
        elif symbol.startswith(")"):
            kinds[id] = _CLOSING
        elif symbol[1:] in closings:
            kinds[id], closing_of[id] = _OPENING, closings[symbol[1:]]
    if _LEAF not in kinds:
        raise InputError("constrained: the target vocabulary has no symbol for a word, such as XX; train the run anew")
    return _Tables(kinds, closing_of, number_ids)


def _symbols(pieces: tuple[str, ...]) -> dict[int, str]:
    """The symbols of a vocabulary by their ids; refuses a vocabulary of subwords."""
    symbols = {id: piece for id, piece in enumerate(pieces) if id not in (PAD, EOS, UNKNOWN)}
    for piece in symbols.values():
        if not piece.startswith(SPACE) or piece in (SPACE, f"{SPACE}(", f"{SPACE})"):
            raise InputError(
                f"constrained: the target vocabulary must hold whole symbols; {piece!r} is a part of one; train with "
                "data.source_vocab_size, so that the targets have a vocabulary of their own"
            )
    return {id: piece.removeprefix(SPACE) for id, piece in symbols.items()}


def _innermost(
    tokens: Int[Array, "B W T"], kinds: Int[Array, "B W T"]
) -> tuple[Int[Array, "B W"], Int[Array, "B W"], Int[Array, "B W"]]:
    """The bracket that opened the innermost open constituent, how many are open, and how many were opened after it.

    If none is open, the bracket is any token.
    """
    is_opening, index = kinds == _OPENING, jnp.arange(tokens.shape[2])[None, None]
    depths = jnp.cumsum(is_opening.astype(jnp.int32) - (kinds == _CLOSING), axis=2)
    depth = depths[:, :, -1]
    is_current = is_opening & (depths == depth[..., None])  # the last of these has not been closed
    position = jnp.where(is_current, index, -1).max(axis=2)[..., None]
    bracket = jnp.take_along_axis(tokens, jnp.maximum(position, 0), axis=2)[..., 0]
    return bracket, depth, (is_opening & (index > position)).sum(axis=2)


def _chain(kinds: Int[Array, "B W T"], lengths: Int[Array, " B"]) -> Int[Array, "B W"]:
    """In order, the length of the unary chain finished last: how many brackets were closed as soon as opened."""
    is_opening = kinds == _OPENING
    is_unary = (kinds == _CLOSING) & jnp.roll(is_opening, 1, axis=2)  # no sequence begins with a closing bracket
    return _run(is_opening | is_unary, lengths) // 2  # a bracket that has just been opened does not count


def _run(is_member: Bool[Array, "B W T"], lengths: Int[Array, " B"]) -> Int[Array, "B W"]:
    """How many tokens at the end of each hypothesis are members."""
    index, end = jnp.arange(is_member.shape[2])[None, None], lengths[:, None, None]
    return lengths[:, None] - 1 - jnp.where(~is_member & (index < end), index, -1).max(axis=2)


def _last(values: Int[Array, "B W T"], lengths: Int[Array, " B"]) -> Int[Array, "B W"]:
    """The value at the last token of each hypothesis; at the first position if there is none."""
    return jnp.take_along_axis(values, jnp.maximum(lengths - 1, 0)[:, None, None], axis=2)[..., 0]


GRAMMARS: dict[str, Callable[[tuple[str, ...]], Constraint]] = {
    "trees": tree_grammar,
    "trees_in_order": functools.partial(tree_grammar, in_order=True),
}


def check_grammar(task: Task) -> None:
    """Refuses a task without a grammar."""
    if not task.grammar:
        raise InputError("constrained: this task has no grammar, only parsing has one; leave it out")


def grammar_of(task: Task, vocabularies: Vocabularies) -> Constraint:
    """The constraint by the grammar of a task."""
    check_grammar(task)
    return GRAMMARS[task.grammar](tuple(vocabularies.target.pieces()))
