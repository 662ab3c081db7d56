"""Trees as text and as tokens, and the trees that any sequence of tokens is turned into."""

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2t_jax.data.trees import (
    REPAIRS,
    Tree,
    bracketed,
    linearize,
    output_tree,
    parse,
    read_pairs,
    read_trees,
    rebuild,
    target_text,
    words,
)  # fmt: skip
from t2t_jax.errors import InputError

SENTENCE = "(TOP (S (NP (PRP I)) (VP (VBP sleep)) (. .)))"

text = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="()"), min_size=1, max_size=4)
labels = st.sampled_from(["S", "NP", "VP", "PP", "X|Y", "WHNP"])
leaves = st.builds(lambda tag, word: Tree(tag, word=word), st.sampled_from(["NN", "VB", ",", "-LRB-", "PRP$"]), text)
nodes = st.recursive(
    leaves, lambda inner: st.builds(Tree, labels, st.lists(inner, min_size=1, max_size=4).map(tuple)), max_leaves=12
)
roots = st.lists(nodes, min_size=1, max_size=3).map(lambda children: Tree("TOP", tuple(children)))
tokens = st.lists(st.sampled_from(["(S", "(NP", ")S", ")NP", ")VP", "XX", "(", ")", "NN"]), max_size=40)


def test_linearisation_by_hand():
    tree = parse(SENTENCE)
    assert " ".join(linearize(tree)) == "(S (NP XX )NP (VP XX )VP XX )S"
    assert " ".join(linearize(tree, tags=True)) == "(S (NP PRP )NP (VP VBP )VP . )S"
    assert words(tree) == ["I", "sleep", "."] and bracketed(tree) == SENTENCE
    assert output_tree("I sleep .", target_text(SENTENCE)) == "(TOP (S (NP (XX I)) (VP (XX sleep)) (XX .)))"


@given(roots)
def test_tree_to_text_to_tree_is_the_identity(tree):
    assert parse(bracketed(tree)) == tree


@given(roots)
def test_tree_to_tokens_to_tree_is_the_identity_without_any_repair(tree):
    rebuilt, repairs = rebuild(linearize(tree, tags=True), words(tree))
    assert rebuilt == tree and not repairs


@given(tokens, st.lists(text, max_size=8))
def test_any_tokens_become_a_tree_over_exactly_the_given_words(tokens, sentence):
    tree, repairs = rebuild(tokens, sentence)
    assert words(tree) == sentence and repairs.keys() <= set(REPAIRS)
    if sentence:
        assert parse(bracketed(tree)) == tree
        again, none = rebuild(linearize(tree, tags=True), sentence)
        assert again == tree and not none


@pytest.mark.parametrize(
    ("output", "expected", "repairs"),
    [
        ("(S XX XX )S", "(TOP (S (XX a) (XX b)))", {}),
        ("(S (NP XX )S XX", "(TOP (S (NP (XX a))) (XX b))", {"unclosed": 1}),
        ("(S XX (NP XX", "(TOP (S (XX a) (NP (XX b))))", {"unclosed": 2}),
        ("(S XX XX )NP )S", "(TOP (S (XX a) (XX b)))", {"unmatched_closing": 1}),
        ("(S (NP )NP XX XX XX )S", "(TOP (S (XX a) (XX b)))", {"empty": 1, "surplus_word": 1}),
        ("( (S XX )S )", "(TOP (S (XX a)) (XX b))", {"unknown_token": 2, "missing_word": 1}),
        ("", "(TOP (XX a) (XX b))", {"missing_word": 2}),
    ],
)
def test_each_repair_by_hand(output, expected, repairs):
    tree, counts = rebuild(output.split(), ["a", "b"])
    assert bracketed(tree) == expected and counts == repairs


def test_output_of_any_depth_becomes_a_tree():
    tree, repairs = rebuild(["(S"] * 10_000 + ["XX"], ["a"])
    assert words(tree) == ["a"] and repairs["too_deep"] > 9000


def test_traces_empty_constituents_and_function_tags_are_removed():
    text = "( (S (NP-SBJ-1 (DT the) (NN man)) (VP (VBD was) (VP (VBN seen) (NP (-NONE- *-1)) (PP=2 (IN by))))) )"
    cleaned = "(TOP (S (NP (DT the) (NN man)) (VP (VBD was) (VP (VBN seen) (PP (IN by))))))"
    assert bracketed(parse(text)) == cleaned


def test_a_root_of_any_name_is_top_and_a_missing_one_is_added():
    for text in ("(TOP (S (NN a)))", "((S (NN a)))", "(ROOT (S (NN a)))", "(S1 (S (NN a)))", "(S (NN a))"):
        assert bracketed(parse(text)) == "(TOP (S (NN a)))"


def test_brackets_in_words_are_written_as_treebanks_write_them():
    tree = parse("(TOP (NP (-LRB- -LRB-) (NN a) (-RRB- -RRB-)))")
    assert words(tree) == ["(", "a", ")"]
    assert (
        output_tree("f(x) \N{NO-BREAK SPACE}y", "(NP XX XX )NP")
        == "(TOP (NP (XX f-LRB-x-RRB-) (XX \N{NO-BREAK SPACE}y)))"
    )
    assert output_tree("", "(NP )NP") == ""


def test_a_file_may_have_several_trees_a_line_or_a_tree_on_several_lines(tmp_path):
    lines = ["( (S", "  (NP (PRP I))", "  (VP (VBP sleep))))(NP (NN a))", "", "(NP (NN b))"]
    assert [words(tree) for tree in read_trees(lines, "wsj")] == [["I", "sleep"], ["a"], ["b"]]
    path = tmp_path / "x.mrg.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert next(read_pairs(path, "x")) == ("I sleep", "(TOP (S (NP (PRP I)) (VP (VBP sleep))))")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["(S (NN a))", "(S (NN b)"], "wsj, line 2: the bracket that opens this tree is never closed"),
        (["(S (NN a)))"], r"wsj, line 1: '\)' stands outside of all brackets"),
        (["", "word"], "wsj, line 2: 'word' stands outside"),
        (["(S (NN a b))"], "wsj, line 1: 'b' is a second word in one bracket"),
        (["(S (NP (NN a)) b)"], "wsj, line 1: 'b' is a second word"),
        (["(S (NP (-NONE- *)))"], "wsj, line 1: a tree without a word"),
        (["()"], "wsj, line 1: a tree without a word"),
        (["(S" * 600], "wsj, line 1: constituents are nested deeper than 200"),
    ],
)
def test_a_damaged_treebank_is_refused_by_line(lines, message):
    with pytest.raises(InputError, match=message):
        list(read_trees(lines, "wsj"))


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "empty.mrg").write_text("\n\n")
    with pytest.raises(InputError, match="data.dev: holds no tree"):
        list(read_pairs(tmp_path / "empty.mrg", "data.dev"))
