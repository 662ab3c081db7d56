"""Grammar-constrained decoding (§6.3): the allowed tokens are exactly those that can still become a tree."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t2t_jax.data.task import TASKS
from t2t_jax.data.trees import DEEPEST, NUMBERS, Tree, linearize, rebuild
from t2t_jax.decoding.beam_search import SearchOptions, beam_search
from t2t_jax.decoding.constraints import Constraint
from t2t_jax.decoding.grammars import LONGEST_CHAIN, MOST_OPENINGS, tree_grammar
from t2t_jax.decoding.search_options import check_options
from t2t_jax.decoding.translator import Translator
from t2t_jax.errors import DamagedError, InputError

PIECES = ("<pad>", "</s>", "<unk>", "▁XX", "▁(A", "▁)A", "▁(B", "▁)B", "▁(ODD")  # (ODD has no closing bracket
EOS, XX = 1, 3
GRAMMAR = tree_grammar(PIECES)
NUMBERED = ("<pad>", "</s>", "<unk>", "▁XX", "▁(A", "▁)A", "▁#0", "▁#1", "▁#2", "▁#3")


def is_tree(ids, num_words, pieces=PIECES, in_order=False):
    """Whether `rebuild` makes a tree of these ids, EOS last, without a repair; each leaf follows its number, if any."""
    *tokens, last = ids
    symbols = [pieces[i].removeprefix("▁") for i in tokens]
    leaves = [symbol for symbol in symbols if not symbol.startswith(("(", ")"))]
    numbered = [x for number in range(num_words) for x in (f"#{number}", "XX")]
    follows = all(after == "XX" for before, after in itertools.pairwise(symbols) if before.startswith("#"))
    return (
        last == EOS
        and not rebuild(symbols, ["w"] * num_words, in_order=in_order)[1]
        and (pieces is not NUMBERED or (leaves == numbered and follows))
    )


@functools.partial(jax.jit, static_argnums=0)
def constrain(constraint, *arguments):
    return constraint(*arguments)


def allowed_after(prefixes, num_words, limit, pieces=PIECES, in_order=False):
    """The tokens that the grammar allows after each of these prefixes of equal length."""
    length = len(prefixes[0])
    tokens = np.full((len(prefixes), limit), 4, np.int32)  # after the prefix is rubbish, which must be ignored
    tokens[:, :length] = prefixes
    lengths = *np.array([[length], [limit]]), np.array([[num_words]])
    constraint, found = tree_grammar(pieces, in_order=in_order), []
    for first in range(0, len(prefixes), 64):  # at a time, so that one shape is compiled
        some = np.resize(tokens[first : first + 64], (1, 64, limit))
        found.append(constrain(constraint, np.zeros((1, 64, len(pieces)), np.float32), some, *lengths)[0])
    found = np.concatenate(found)[: len(prefixes)]
    assert set(np.unique(found)) <= {0.0, -np.inf}  # log-probabilities of allowed tokens do not change
    return [set(np.flatnonzero(row == 0).tolist()) for row in found]


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(
    ("pieces", "num_words", "limit"),
    [(PIECES, 1, 6), (PIECES, 2, 6), (PIECES, 3, 5), (PIECES, 3, 4), (PIECES, 2, 3),
     (NUMBERED, 1, 7), (NUMBERED, 2, 7), (NUMBERED, 3, 7)],
)  # fmt: skip
def test_allowed_are_exactly_the_tokens_that_can_still_become_a_tree_within_the_limit(
    pieces, num_words, limit, in_order
):
    """Against the definition, by enumeration of all sequences."""
    ids = range(3, len(pieces))
    whole = [
        (*tokens, EOS)
        for length in range(limit)
        for tokens in itertools.product(ids, repeat=length)
        if is_tree((*tokens, EOS), num_words, pieces, in_order)
    ]
    prefixes = {tokens[:length] for tokens in whole for length in range(len(tokens))}
    assert len(whole) > 0
    for length in range(limit):
        group = sorted(prefix for prefix in prefixes if len(prefix) == length)
        expected = [{tokens[length] for tokens in whole if tokens[:length] == prefix} for prefix in group]
        assert not group or allowed_after(group, num_words, limit, pieces, in_order) == expected


def forests(num_words, num_constituents):
    """All sequences of trees with so many words and constituents A together."""
    if num_words == 0:
        yield from [()] * (num_constituents == 0)
        return
    for rest in forests(num_words - 1, num_constituents):
        yield Tree("XX", word="w"), *rest
    for words, inner in itertools.product(range(1, num_words + 1), range(num_constituents)):
        others = list(forests(num_words - words, num_constituents - 1 - inner))
        yield from ((Tree("A", children), *rest) for children in forests(words, inner) for rest in others)


def chain(tree):
    """How many constituents of one child stand one above another, from the root of the tree down."""
    return 1 + chain(tree.children[0]) if len(tree.children) == 1 else 0


def has_bounded_chains(tree, in_order):
    if in_order:
        is_bounded = lambda node: chain(node) <= LONGEST_CHAIN and all(map(is_bounded, node.children))
        return all(map(is_bounded, tree.children))
    return f"{' (A' * (MOST_OPENINGS + 1)} " not in f" {' '.join(linearize(tree))} "


@pytest.mark.parametrize("pieces", [PIECES[:6], NUMBERED])
@pytest.mark.parametrize(
    ("in_order", "num_words", "num_constituents"),
    [(True, 1, 6), (True, 2, 6), (True, 3, 5), (False, 1, 14), (False, 2, 14)],
)
def test_unary_chains_are_bounded_and_every_tree_without_long_ones_stays_possible(
    pieces, in_order, num_words, num_constituents
):
    """Against the definition, by enumeration of all trees of so many constituents or fewer."""
    trees = [Tree("TOP", forest) for count in range(num_constituents + 1) for forest in forests(num_words, count)]
    short = [tree for tree in trees if has_bounded_chains(tree, in_order)]
    assert 0 < len(short) < len(trees)
    limit = num_words * (2 if pieces is NUMBERED else 1) + 2 * num_constituents + 1
    whole = [(*ids_of(tree, pieces, in_order), EOS) for tree in short]
    followers = collections.defaultdict(set)
    for ids in whole:
        for length, token in enumerate(ids):
            followers[ids[:length]].add(token)
    for length in range(limit):
        group = sorted(prefix for prefix in followers if len(prefix) == length)
        expected = [followers[prefix] for prefix in group]
        assert not group or allowed_after(group, num_words, limit, pieces, in_order) == expected


def ids_of(tree, pieces, in_order):
    """The linearised tree, each leaf after its number if there are numbers."""
    numbers = itertools.count()
    for symbol in linearize(tree, in_order=in_order):
        if symbol == "XX" and pieces is NUMBERED:
            yield pieces.index(f"▁#{next(numbers)}")
        yield pieces.index(f"▁{symbol}")


def test_constituents_are_not_nested_deeper_than_a_tree_may_be():
    limit = 2 * DEEPEST + 10
    nested = [4, XX] * (DEEPEST - 2)  # with words between, as only few brackets may open in a row
    assert allowed_after([[*nested, 4]], DEEPEST, 2 * limit) == [{XX, 4, 6}]
    assert allowed_after([[*nested, 4, 4]], DEEPEST, 2 * limit) == [{XX}]


@pytest.mark.parametrize(
    "tokens",
    [[XX, *[4, 5] * (DEEPEST - 1)], [*[XX, 4] * (DEEPEST - 1), XX], [*[XX, 4] * 9, XX, *[4, 5] * (DEEPEST - 10)]],
    ids=["finished", "open", "both"],
)
def test_nor_in_order_where_finished_constituents_are_nested_in_later_ones(tokens):
    open_ones = tokens.count(4) - tokens.count(5)
    limit, num_words = 4 * DEEPEST, tokens.count(XX) + 1
    after = {XX} | ({5} if open_ones else set())
    assert allowed_after([tokens], num_words, limit, in_order=True) == [after | {4, 6}]
    assert allowed_after([[*tokens, 4, 5]], num_words, limit, in_order=True) == [after]


def test_numbers_begin_again_after_the_last_one():
    pieces = ("<pad>", "</s>", "<unk>", "▁XX", "▁(A", "▁)A", *(f"▁#{number}" for number in range(NUMBERS)))
    number = lambda index: pieces.index(f"▁#{index % NUMBERS}")
    for count in (1, NUMBERS - 1, NUMBERS, NUMBERS + 1):
        leaves = [token for index in range(count) for token in (number(index), XX)]
        [allowed] = allowed_after([[4, *leaves]], count + 1, 3 * NUMBERS, pieces)
        assert allowed - {4} == {number(count), 5}


@functools.partial(jax.jit, static_argnames=("width", "constraint"))
def search(key, limits, num_words, width, constraint):
    """The hypotheses of a model with random logits that prefers opening brackets to EOS."""

    def step(tokens, positions, cache):
        logits = 3 * jax.random.normal(jax.random.fold_in(key, positions.max()), (*tokens.shape, len(PIECES)))
        return logits.at[..., 4].add(3.0).at[..., EOS].add(-3.0), cache

    options = SearchOptions(beam_size=width, n_best=width, constraint=constraint)
    cache = jnp.zeros((len(limits), width))
    return beam_search(step, cache, limits, options, max_steps=32, features=num_words[:, None])


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**31 - 1),
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 18)), min_size=4, max_size=4),
    st.booleans(),
)
def test_every_hypothesis_is_a_tree_over_the_words(seed, sentences, in_order):
    num_words, limits = np.array([(words, words + 1 + spare) for words, spare in sentences], np.int32).T
    found = search(
        jax.random.key(seed), jnp.asarray(limits), jnp.asarray(num_words), 4, tree_grammar(PIECES, in_order=in_order)
    )
    assert np.all(found.scores[:, 0] > -np.inf)
    for row, hypothesis in zip(*np.nonzero(np.asarray(found.scores) > -np.inf), strict=True):
        ids = found.tokens[row, hypothesis, : found.lengths[row, hypothesis]].tolist()
        assert found.finished[row, hypothesis] and len(ids) <= limits[row]
        assert is_tree(ids, num_words[row], in_order=in_order)


def test_without_the_constraint_the_same_model_writes_no_tree():
    found = search(jax.random.key(0), jnp.full(4, 30), jnp.full(4, 3), 4, None)
    ids = [found.tokens[row, 0, : found.lengths[row, 0]].tolist() for row in range(4)]
    assert not any(is_tree(row, 3) for row in ids)


def test_the_same_vocabulary_has_the_same_constraint_so_that_nothing_is_compiled_twice():
    assert tree_grammar(tuple(PIECES)) is GRAMMAR
    assert tree_grammar(PIECES[:-1]) is not GRAMMAR


@pytest.mark.parametrize("piece", ["▁", "N", "▁(", "▁)"])
def test_a_vocabulary_of_subwords_is_refused(piece):
    with pytest.raises(InputError, match="constrained: the target vocabulary must hold whole symbols"):
        tree_grammar((*PIECES, piece))


def test_a_vocabulary_without_a_leaf_is_refused():
    with pytest.raises(InputError, match="has no symbol for a word, such as XX"):
        tree_grammar(("<pad>", "</s>", "<unk>", "▁(A", "▁)A"))


def test_a_task_without_a_grammar_refuses_the_option(translator):
    with pytest.raises(InputError, match="constrained: this task has no grammar, only parsing has one"):
        translator.translate(["a"], constrained=True)


def test_two_constraints_are_refused(translator):
    parser = Translator(translator.ensemble, translator.vocabularies, max_length=256, task=TASKS["parsing"])
    with pytest.raises(InputError, match="constrained: there is another constraint"):
        parser.translate(["a"], constrained=True, constraint=GRAMMAR)
    with pytest.raises(InputError, match="constrained: a prefix may leave no output that is well-formed"):
        parser.translate(["a"], constrained=True, prefixes=["a"])


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (3, "features must return a list of integers; got 3"),
        ("12", "features must return a list of integers; got '12'"),
        ([1.5], "a feature must be a whole number; got 1.5"),
        (["a"], "a feature must be a whole number; got 'a'"),
        ([2**40], "a feature must be at least -2147483648 and at most 2147483647; got 1099511627776"),
    ],
)
def test_features_other_than_integers_of_32_bits_are_refused(translator, features, message):
    constraint = Constraint(lambda log_probs, *_, **__: log_probs, 0.0, features=lambda sentence: features)
    with pytest.raises(InputError, match=f"constraint: {message}"):
        translator.translate(["one two"], constraint=constraint)


def test_a_constraint_that_adds_infinity_is_damage(translator):
    constraint = Constraint(lambda log_probs, *_: log_probs + jnp.inf, 0.0)
    with pytest.raises(DamagedError, match=r"scores that are not numbers \(NaN or \+∞\)"):
        translator.translate(["one two"], constraint=constraint)


@pytest.mark.parametrize("option", ["no_repeat_ngram", "min_length"])
def test_options_that_forbid_what_the_grammar_demands_are_refused(option):
    """A tree repeats n-grams, and after its last bracket there is only EOS."""
    with pytest.raises(InputError, match=f"{option}=3: may leave no output that is well-formed"):
        check_options(constrained=True, **{option: 3})
    check_options(constrained=False, **{option: 3})


def test_features_of_a_sentence_reach_the_constraint_whatever_its_neighbours(translator):
    """A constraint that allows as many tokens as the sentence has words, then EOS alone."""

    def process(log_probs, tokens, lengths, max_lengths, features):
        del tokens, max_lengths
        is_eos = (jnp.arange(log_probs.shape[-1]) == EOS)[None, None]
        return jnp.where(is_eos == (lengths >= features[:, 0])[:, None, None], log_probs, -jnp.inf)

    constraint = Constraint(process, largest_bonus=0.0, features=lambda sentence: [len(sentence.split())])
    sentences = ["one", "two three four", "", "five six seven eight nine", "ten one"]
    found = translator.translate(sentences, constraint=constraint, max_extra_length=20)
    assert [best.num_tokens for best, *_ in found] == [2, 4, 0, 6, 3]


def test_options_are_hashable_so_that_they_can_be_static_arguments():
    assert hash(SearchOptions(constraint=GRAMMAR)) == hash(dataclasses.replace(SearchOptions(), constraint=GRAMMAR))
