"""Trees as text and as tokens, and the trees that any sequence of tokens is turned into."""

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2t_jax.data.corpora import read_corpus
from t2t_jax.data.treebanks import TREEBANKS, read_pairs
from t2t_jax.data.trees import (
    DEEPEST,
    NUMBERS,
    REPAIRS,
    Tree,
    bracketed,
    linearize,
    numbered_text,
    numbered_words,
    output_tree,
    parse,
    read_trees,
    rebuild,
    source_text,
    tagged_text,
    target_text,
    words,
)  # fmt: skip
from t2t_jax.errors import InputError
from t2t_jax.files import sha256

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
    assert tagged_text(SENTENCE) == "(S (NP PRP )NP (VP VBP )VP . )S"
    assert words(tree) == ["I", "sleep", "."] and bracketed(tree) == SENTENCE
    assert output_tree("I sleep .", target_text(SENTENCE)) == ("(TOP (S (NP (XX I)) (VP (XX sleep)) (XX .)))", {})


def test_linearisation_in_order_by_hand():
    assert " ".join(linearize(parse(SENTENCE), in_order=True)) == "XX (NP )NP (S XX (VP )VP XX )S"
    assert numbered_text(SENTENCE, in_order=True) == "#0 PRP (NP )NP (S #1 VBP (VP )VP #2 . )S"
    two = parse("(TOP (A (B (X a) (X b))) (X c))")
    assert " ".join(linearize(two, tags=True, in_order=True)) == "X (B X )B (A )A X"


def test_both_sides_number_the_words_and_begin_again_after_the_last_number():
    assert numbered_words("-LRB- I -RRB-") == "#0 ( #1 I #2 )" and source_text(" -LRB-I-RRB-  sleep") == "(I) sleep"
    assert numbered_words("I  sleep .") == "#0 I #1 sleep #2 ." and numbered_words("") == ""
    assert numbered_text(SENTENCE) == "(S (NP #0 PRP )NP (VP #1 VBP )VP #2 . )S"
    many = " ".join(["(NN w)"] * (NUMBERS + 2))
    assert numbered_words("w " * (NUMBERS + 2)).endswith(" #15 w #0 w #1 w")
    assert numbered_text(f"(TOP {many})").endswith(" #15 NN #0 NN #1 NN")


@pytest.mark.parametrize("in_order", [False, True])
@given(tree=roots)
def test_numbers_of_words_change_nothing_about_the_tree(in_order, tree):
    numbered = numbered_text(bracketed(tree), in_order=in_order)
    assert output_tree(" ".join(words(tree)), numbered, in_order=in_order) == (bracketed(tree), {})


@given(roots)
def test_tree_to_text_to_tree_is_the_identity(tree):
    assert parse(bracketed(tree)) == tree


@pytest.mark.parametrize("in_order", [False, True])
@given(tree=roots)
def test_tree_to_tokens_to_tree_is_the_identity_without_any_repair(in_order, tree):
    rebuilt, repairs = rebuild(linearize(tree, tags=True, in_order=in_order), words(tree), in_order=in_order)
    assert rebuilt == tree and not repairs


@pytest.mark.parametrize("in_order", [False, True])
@given(tokens=tokens, sentence=st.lists(text, max_size=8))
def test_any_tokens_become_a_tree_over_exactly_the_given_words(in_order, tokens, sentence):
    tree, repairs = rebuild(tokens, sentence, in_order=in_order)
    assert words(tree) == sentence and repairs.keys() <= set(REPAIRS)
    if sentence:
        assert parse(bracketed(tree)) == tree
        again, none = rebuild(linearize(tree, tags=True, in_order=in_order), sentence, in_order=in_order)
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


@pytest.mark.parametrize(
    ("output", "expected", "repairs"),
    [
        ("XX (S XX )S", "(TOP (S (XX a) (XX b)))", {}),
        ("XX (NP )NP (S XX", "(TOP (S (NP (XX a)) (XX b)))", {"unclosed": 1}),
        ("XX (S XX (NP )S", "(TOP (S (XX a) (NP (XX b))))", {"unclosed": 1}),
        ("(S XX XX )S", "(TOP (XX a) (XX b))", {"no_first_child": 1, "unmatched_closing": 1}),
        ("XX (S (NP XX )S", "(TOP (S (XX a) (XX b)))", {"no_first_child": 1}),
        ("XX (S )S XX XX", "(TOP (S (XX a)) (XX b))", {"surplus_word": 1}),
    ],
)
def test_each_repair_in_order_by_hand(output, expected, repairs):
    tree, counts = rebuild(output.split(), ["a", "b"], in_order=True)
    assert bracketed(tree) == expected and counts == repairs


@pytest.mark.parametrize(
    ("tokens", "in_order"), [(["(S"] * 10_000 + ["XX"], False), (["XX"] + ["(S", ")S"] * 10_000, True)]
)
def test_output_of_any_depth_becomes_a_tree_that_can_be_read(tokens, in_order):
    tree, repairs = rebuild(tokens, ["a"], in_order=in_order)
    assert parse(bracketed(tree)) == tree and words(tree) == ["a"] and repairs["too_deep"] == 10_000 - DEEPEST


def test_traces_empty_constituents_and_function_tags_are_removed():
    text = "( (S (NP-SBJ-1 (DT the) (NN man)) (VP (VBD was) (VP (VBN seen) (NP (-NONE- *-1)) (PP=2 (IN by))))) )"
    cleaned = "(TOP (S (NP (DT the) (NN man)) (VP (VBD was) (VP (VBN seen) (PP (IN by))))))"
    assert bracketed(parse(text)) == cleaned


def test_a_bracket_without_a_label_inside_of_a_tree_is_no_constituent():
    """The model would have to write "(", which has no meaning to `rebuild`."""
    cleaned = parse("(TOP (S (NN a) (VP (VB b))))")
    for text in ("( ( (S (NN a) (VP (VB b)))))", "(S (() (NN a)) (() ((VP (VB b)))))"):
        assert parse(text) == cleaned and bracketed(parse(text)) == "(TOP (S (NN a) (VP (VB b))))"


def test_a_root_of_any_name_is_top_and_a_missing_one_is_added():
    for text in ("(TOP (S (NN a)))", "((S (NN a)))", "(ROOT (S (NN a)))", "(S1 (S (NN a)))", "(S (NN a))"):
        assert bracketed(parse(text)) == "(TOP (S (NN a)))"


def test_brackets_in_words_are_written_as_treebanks_write_them():
    tree = parse("(TOP (NP (-LRB- -LRB-) (NN a) (-RRB- -RRB-)))")
    assert words(tree) == ["(", "a", ")"]
    text, repairs = output_tree("f(x) \N{NO-BREAK SPACE}y", "(NP XX XX )NP")
    assert text == "(TOP (NP (XX f-LRB-x-RRB-) (XX \N{NO-BREAK SPACE}y)))" and not repairs
    assert output_tree("", "(NP )NP") == ("", {"empty": 1})


def test_no_word_of_a_treebank_has_ends_of_lines():
    """A sentence has none: else the words of its tree would be others than those that the model is given."""
    assert words(parse("(TOP (NP (NN a\u2028b) (NN \x85)))")) == ["ab", "-"]
    assert output_tree("a\u2028b c", "XX XX XX")[0] == "(TOP (XX a) (XX b) (XX c))"


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
        (["(S a", "(NP (NN b)))"], "wsj, line 2: 'a' and a bracket beside it; each word needs a tag"),
        (["(S (NP (-NONE- *)))"], "wsj, line 1: a tree without a word"),
        (["()"], "wsj, line 1: a tree without a word"),
        (["(S" * 600], "wsj, line 1: constituents are nested deeper than 198"),
    ],
)
def test_a_damaged_treebank_is_refused_by_line(lines, message):
    with pytest.raises(InputError, match=message):
        list(read_trees(lines, "wsj"))


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "empty.mrg").write_text("\n\n")
    with pytest.raises(InputError, match="data.dev: holds no tree"):
        list(read_pairs(tmp_path / "empty.mrg", "data.dev"))


def test_a_file_that_cannot_be_unpacked_is_refused(tmp_path):
    path, packed = tmp_path / "x.mrg.gz", gzip.compress(b"(NN a)\n" * 100)
    bad_block, bad_checksum = packed[:10] + b"\x07" + packed[11:], packed[:-8] + bytes(8)
    for content in (b"(NN a)\n", packed[:-9], bad_block, bad_checksum):
        path.write_bytes(content)
        with pytest.raises(InputError, match="data.dev: can't be unpacked .*; restore it from a copy"):
            list(read_pairs(path, "data.dev"))


# --- The corpus "trees" ------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """Three files of one tree and of two trees, as `data.train`, `data.dev` and `data.test`."""
    for split in ("train", "dev", "test"):
        (tmp_path / f"{split}.mrg").write_text("(NN a)\n")
    (tmp_path / "more.mrg").write_text("(NN b)\n(NN c)\n")
    return {split: str(tmp_path / f"{split}.mrg") for split in ("train", "dev", "test")}


def read(prefixes, tmp_path):
    return read_corpus("trees", "en", "trees", prefixes, tmp_path, "", TREEBANKS)


def test_files_of_trees_are_a_corpus_and_training_may_repeat_them(files, tmp_path):
    corpus = read(files, tmp_path)
    assert [list(corpus.splits[split]()) for split in files] == [[("a", "(TOP (NN a))")]] * 3
    assert corpus.checksums["train"] == sha256(tmp_path / "train.mrg") and not corpus.has_copies
    more = read(files | {"train": f"{files['train']}:2,{tmp_path / 'more.mrg'}"}, tmp_path)
    assert [sentence for sentence, _ in more.splits["train"]()] == ["a", "a", "b", "c"] and more.has_copies
    assert [line.split()[:4] for line in more.table().splitlines()[1:3]] == [
        ["train", "1", "2", "50.0%"],
        ["train", "2", "1", "50.0%"],
    ]


def test_the_name_of_a_folder_may_have_a_colon(files, tmp_path):
    folder = tmp_path / "craft:v5"
    folder.mkdir()
    (folder / "train.mrg").write_text("(NN b)\n")
    for copies, expected in (("", ["b", "a"]), (":2", ["b", "b", "a"])):
        corpus = read(files | {"train": f"{folder}/train.mrg{copies},{files['train']}"}, tmp_path)
        assert [sentence for sentence, _ in corpus.splits["train"]()] == expected


def test_the_table_expects_no_number_of_trees_of_a_treebank_of_ones_own(files, tmp_path):
    corpus = read(files, tmp_path)
    assert all(list(pairs()) for pairs in corpus.splits.values())
    header, *rows = (line.split() for line in corpus.table().splitlines())
    assert header == ["trees", "trees", "copies", "share"]
    assert rows == [
        ["train", "1", "1", "100.0%", files["train"]], ["dev", "1", files["dev"]], ["test", "1", files["test"]]
    ]  # fmt: skip


def test_further_test_sets_of_trees(files, tmp_path):
    corpus = read(files | {"test": f"{files['test']},{tmp_path / 'more.mrg'}"}, tmp_path)
    found = {split: [sentence for sentence, _ in pairs()] for split, pairs in corpus.splits.items()}
    assert found == {"train": ["a"], "dev": ["a"], "test": ["a"], "more_mrg": ["b", "c"]}
    assert corpus.checksums["more_mrg"] == sha256(tmp_path / "more.mrg")
    assert corpus.table().splitlines()[-1].split()[:2] == ["more_mrg", "2"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("train", "", "data.train is empty; give a file of bracketed trees, such as train.mrg.gz"),
        ("dev", "", "data.dev is empty"),
        ("test", "none.mrg", "data.test: no file none.mrg; give a file of bracketed trees"),
        ("train", "none.mrg:0", "the number of copies of none.mrg must be from 1"),
    ],
)
def test_a_split_without_a_file_is_refused(files, tmp_path, field, value, message):
    with pytest.raises(InputError, match=message):
        read(files | {field: value}, tmp_path)
