import json
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2t_jax.errors import InputError
from t2t_jax.evaluation import brackets
from t2t_jax.evaluation.brackets import ERROR, SKIP, VALID, bracket_scores, read_tree, score_sentence

# --- The rules of COLLINS.prm, by hand -----------------------------------------------------------------------


def counts(gold, test):
    """The counts of one pair of trees, by name."""
    return score_sentence(read_tree(gold, "gold"), read_tree(test, "test"))._asdict()


def matched_gold_test(gold, test):
    found = counts(gold, test)
    assert found["status"] == VALID
    return found["matched"], found["gold"], found["test"]


def test_brackets_match_in_label_and_span():
    gold = "(S (NP (D the) (N cat)) (VP (V sat)))"
    assert matched_gold_test(gold, "(S (NP (D the) (N cat)) (VP (V sat)))") == (3, 3, 3)
    assert matched_gold_test(gold, "(S (X (D the) (N cat)) (VP (V sat)))") == (2, 3, 3), "LABELED 1"
    assert matched_gold_test(gold, "(S (NP (D the)) (VP (N cat) (V sat)))") == (1, 3, 3), "only S 0-3"


def test_equal_brackets_are_a_multiset():
    one, two, three = "(NP (N a))", "(NP (NP (N a)))", "(NP (NP (NP (N a))))"
    assert matched_gold_test(one, three) == (1, 1, 3)
    assert matched_gold_test(three, two) == (2, 3, 2)
    assert matched_gold_test("(NP (VP (N a)))", "(VP (NP (N a)))") == (2, 2, 2), "the order of a unary chain is free"


@pytest.mark.parametrize("tag", [",", ":", "``", "''", ".", "-NONE-", "TOP"])
def test_words_with_a_deleted_tag_are_deleted_on_both_sides(tag):
    # After deletion: NP 0-1, VP 1-2, S 0-2; the deleted word may hang anywhere and even be another word.
    gold = f"(S (NP (N a)) ({tag} x) (VP (V b)))"
    test = f"(S (NP (N a) ({tag} y)) (VP (V b)))"
    assert matched_gold_test(gold, test) == (3, 3, 3)
    assert matched_gold_test(gold, "(S (NP (N a)) (VP (V b)))") == (3, 3, 3)
    assert counts(gold, test)["words"] == 2


@pytest.mark.parametrize("tag", ["!", "?", "-LRB-", "-RRB-", "HYPH", "$", "#", "'", '"', ".-X"])
def test_words_with_another_tag_stay(tag):
    assert counts("(S (N a))", f"(S (N a) ({tag} x))")["status"] == ERROR
    assert counts(f"(S (N a) ({tag} x))", f"(S (N a) ({tag} x))")["words"] == 2


def test_constituents_without_remaining_words_are_deleted():
    gold = "(S (NP (NP (-NONE- *T*-1)) (. .)) (X) (VP (V a)))"  # NP, NP and X are empty
    assert matched_gold_test(gold, "(S (VP (V a)))") == (2, 2, 2)


def test_brackets_labelled_top_are_deleted_and_their_children_stay():
    assert matched_gold_test("(TOP (S (N a)))", "(S (TOP-X (TOP=2 (N a))))") == (1, 1, 1)
    assert matched_gold_test("(TOP (S (N a)))", "(ROOT (S (N a)))") == (1, 1, 2), "only TOP"
    assert matched_gold_test("((S (N a)))", "(TOP (S (N a)))") == (1, 2, 1), "the treebank's empty label counts"


def test_labels_are_cut_at_the_first_hyphen_or_equals_sign():
    gold = "(S=1 (NP-SBJ-2 (N a)) (ADVP=3-TMP (R b)))"
    assert matched_gold_test(gold, "(S (NP=SBJ (N a)) (ADVP (R b)))") == (3, 3, 3)
    assert matched_gold_test("(NP|X-Y (N a))", "(NP (N a))") == (0, 1, 1), "no other sign cuts"


def test_advp_and_prt_are_one_label():
    assert matched_gold_test("(VP (V a) (PRT (R b)))", "(VP (V a) (ADVP-LOC (R b)))") == (2, 2, 2)
    assert matched_gold_test("(PRT (ADVP (R b)))", "(ADVP (PRT (PRT (R b))))") == (2, 2, 3)
    assert matched_gold_test("(PRT (R b))", "(PRT|ADVP (R b))") == (0, 1, 1)
    assert counts("(S (PRT b))", "(S (ADVP b))")["correct_tags"] == 1, "among tags too"


def test_tags_count_for_words_that_are_not_deleted_and_are_not_cut():
    found = counts("(S (A a) (B b) (C c) (. .))", "(S (A a) (X b) (C-D c) (. .))")
    assert (found["words"], found["correct_tags"]) == (3, 1)


def test_a_crossing_bracket_overlaps_a_gold_bracket_in_part():
    gold = "(S (X (A a) (A b)) (Y (A c) (A d)))"
    nested = "(S (A a) (X (A b)) (Y (Z (A c) (A d))))"
    assert counts(gold, nested)["crossing"] == 0, "inside or around a gold bracket"
    assert counts(gold, "(S (A a) (X (A b) (A c)) (A d))")["crossing"] == 1, "two gold brackets, one test bracket"
    assert counts(gold, "(S (A a) (X (X (Y (A b) (A c)))) (A d))")["crossing"] == 3, "each of equal spans"
    assert counts(gold, "(S (A a) (TOP (A b) (A c)) (A d))")["crossing"] == 0, "deleted"


def test_crossing_at_either_end_and_shared_ends():
    gold = "(S (A a) (X (A b) (A c) (A d)) (A e))"  # X 1-4
    assert counts(gold, "(S (Y (A a) (A b)) (A c) (A d) (A e))")["crossing"] == 1, "Y 0-2 begins before X"
    assert counts(gold, "(S (A a) (A b) (A c) (Y (A d) (A e)))")["crossing"] == 1, "Y 3-5 ends after X"
    for tree in (
        "(S (Y (A a)) (A b) (A c) (A d) (A e))",  # 0-1 touches X
        "(S (A a) (A b) (A c) (A d) (Y (A e)))",  # 4-5 touches X
        "(S (A a) (Y (A b) (A c)) (A d) (A e))",  # 1-3 begins with X
        "(S (A a) (A b) (Y (A c) (A d)) (A e))",  # 2-4 ends with X
        "(S (Y (A a) (A b) (A c) (A d)) (A e))",  # 0-4 ends with X
        "(S (A a) (Y (A b) (A c) (A d) (A e)))",  # 1-5 begins with X
    ):
        assert counts(gold, tree)["crossing"] == 0


def test_other_words_make_an_error_sentence():
    assert counts("(S (A a) (B b))", "(S (A a))")["status"] == ERROR
    assert counts("(S (A a) (B b))", "(S (A a) (B B))")["status"] == ERROR
    found = counts("(S (A a) (. .))", "(S (A a) (B .))")  # deleted on one side only
    assert found["status"] == ERROR and found["reason"].startswith("1 words in gold but 2 in test")


@pytest.mark.parametrize("test", ["", " ", "()", "(())", "(S)", "(S (X))", "(TOP (S (. .)))", "(S (-NONE- *))"])
def test_a_test_tree_without_words_makes_a_skip_sentence(test):
    assert counts("(S (A a) (. .))", test)["status"] == SKIP
    assert counts("(S (. .))", test)["status"] == SKIP


def test_the_length_of_a_sentence_counts_gold_punctuation_but_no_traces():
    assert counts("(S (A a) (-NONE- *) (, ,) (. .))", "(S (A a))")["length"] == 3
    gold = ["(S" + " (A a)" * (n - 1) + " (. .) (-NONE- *))" for n in (39, 40, 41)]
    assert bracket_scores(gold, gold)["up_to_40_words"]["sentences"] == 2
    assert bracket_scores(gold, gold)["sentences"] == 3


def test_scores_are_ratios_of_sums_over_valid_sentences():
    gold = ["(S (X (A a) (A b)) (A c))", "(S (A a))", "(S (A a))", "(S (A a))"]
    test = ["(S (A a) (X (B b) (X (A c))))", "(S (A a))", "(S (A b))", ""]
    # Sentence 1: S of S, X in gold; S, X 1-3, X 2-3 in test; X 1-3 crosses X 0-2. Sentence 2: S of S, S.
    scores = bracket_scores(gold, test)
    short = scores.pop("up_to_40_words")
    assert short == scores == {
        "recall": pytest.approx(100 * 2 / 3),
        "precision": 100 * 2 / 4,
        "f1": pytest.approx(100 * 2 * 2 / (3 + 4)),
        "exact_match": 50.0,
        "average_crossing": 0.5,
        "no_crossing": 50.0,
        "two_or_less_crossing": 100.0,
        "tagging_accuracy": 100 * 3 / 4,
        "sentences": 4,
        "error_sentences": 1,
        "skip_sentences": 1,
        "valid_sentences": 2,
    }  # fmt: skip


def test_three_crossing_brackets_are_more_than_two():
    gold = "(S (X (A a) (A b)) (A c) (A d))"
    test = ["(S (A a) (X" + " (X" * n + " (A b) (A c)" + ")" * n + ") (A d))" for n in (1, 2)]
    scores = bracket_scores([gold, gold], test)
    assert (scores["average_crossing"], scores["no_crossing"], scores["two_or_less_crossing"]) == (2.5, 0.0, 50.0)


def test_without_valid_sentences_every_ratio_is_zero():
    scores = bracket_scores(["(S (A a))"], [""])
    assert scores["f1"] == scores["exact_match"] == scores["tagging_accuracy"] == scores["no_crossing"] == 0.0
    assert bracket_scores(["(S (A a))"], ["(X (A a))"])["f1"] == 0.0


# --- Gold tags -----------------------------------------------------------------------------------------------


def test_gold_tags_let_punctuation_be_deleted_from_trees_without_tags():
    gold = ["(S (NP (N a)) (, ,) (VP (V b) (NP (-NONE- *))) (. .))"]
    test = ["(S (NP (XX a) (XX ,)) (VP (XX b)) (XX .))"]
    assert bracket_scores(gold, test)["error_sentences"] == 1
    scores = bracket_scores(gold, test, gold_tags=True)
    assert (scores["error_sentences"], scores["f1"], scores["tagging_accuracy"]) == (0, 100.0, 100.0)


def test_gold_tags_leave_traces_of_the_test_tree_alone():
    tree = read_tree("(S (-NONE- *) (XX a) (XX b))", "test")
    tagged = brackets.with_gold_tags(read_tree("(S (A a) (-NONE- 0) (B b))", "gold"), tree, "sentence 1")
    assert tagged.leaves == [("-NONE-", "*"), ("A", "a"), ("B", "b")]


def test_gold_tags_need_equal_words_but_skip_a_failed_parse():
    gold = ["(S (A a) (. .))", "(S (A a) (. .))"]
    assert bracket_scores(gold, ["", gold[1]], gold_tags=True)["skip_sentences"] == 1
    with pytest.raises(InputError, match=r"sentence 2: the word '\.' in gold but '!' in test"):
        bracket_scores(gold, [gold[0], "(S (XX a) (XX !))"], gold_tags=True)
    with pytest.raises(InputError, match="sentence 1: 2 words in gold but 1 in test"):
        bracket_scores(gold, ["(S (XX a))", gold[1]], gold_tags=True)


# --- Properties ----------------------------------------------------------------------------------------------

LABELS = ("S", "NP", "NP-SBJ", "ADVP", "PRT", "TOP", "-NONE-", ".", "")
TAGS = ("NN", "VB", ",", ".", "``", "-NONE-", "ADVP")
WORDS = ("a", "b", "é", "x\u00a0y")  # U+00A0 is part of a word, as for EVALB
leaves = st.builds("({} {})".format, st.sampled_from(TAGS), st.sampled_from(WORDS))
inner = st.recursive(
    leaves,
    lambda children: st.tuples(st.sampled_from(LABELS), st.lists(children, max_size=4)).map(
        lambda node: f"({node[0]}{' '.join(['', *node[1]])})"
    ),
    max_leaves=12,
)
trees = inner.map(lambda tree: f"(TOP {tree} (S (NN w)))")


@given(st.lists(trees, min_size=1, max_size=4))
def test_a_tree_scores_100_with_itself(lines):
    scores = bracket_scores(lines, lines)
    assert scores["f1"] == scores["exact_match"] == scores["no_crossing"] == scores["tagging_accuracy"] == 100.0
    assert scores["valid_sentences"] == len(lines)


@given(trees, trees)
def test_precision_and_recall_change_places_with_the_files(one, other):
    there, back = bracket_scores([one], [other]), bracket_scores([other], [one])
    assert (there["precision"], there["recall"], there["f1"]) == (back["recall"], back["precision"], back["f1"])
    assert there["error_sentences"] == back["error_sentences"]


@given(trees)
def test_white_space_between_brackets_is_free(tree):
    spaced = tree.replace("))", ")\t )").replace(" (", "  (").replace(")(", ") (")
    assert read_tree(f" {spaced}\r", "") == read_tree(tree, "")


def test_depth_has_no_limit():
    deep = "(X " * 100_000 + "(A a)" + ")" * 100_000
    assert bracket_scores([deep], [deep])["f1"] == 100.0


# --- As a command ------------------------------------------------------------------------------------------

GOLD = [
    "(TOP (S (NP-SBJ (DT The) (NN cat)) (VP (VBD sat) (PRT (RP down)) (PP (IN on) (NP (DT a) (NN mat)))) (. .)))",
    "(TOP (S (NP (NP (NNS Cats))) (VP (VBP sleep) (NP (-NONE- *T*-1)))))",
    "(TOP (S (NP (PRP It)) (VP (VBZ works) (, ,) (ADVP (RB mostly))) (. !)))",
    "(TOP (S (NP (PRP They)) (VP (VBD left))))",
    "(TOP (FRAG (. ?)))",
    "(TOP (S (NP (NN Rain)) (VP (VBZ falls))))",
    "(TOP (S (NP (DT a) (JJ b) (NN c)) (VP (VBZ d) (NP (NN e) (NN f)) (PP (IN g) (NP (NN h))))))",
    "(TOP (S " + "(NN w) " * 40 + "(. .)))",
]
TEST = [
    "(TOP (S (NP (DT The) (NN cat)) (VP (VBD sat) (ADVP (RB down)) (PP (IN on) (NP (DT a) (NN mat)))) (. .)))",
    "(TOP (S (NP (NNS Cats)) (VP (VB sleep))))",
    "(TOP (S (NP (PRP It)) (VP (VBZ works) (RB ,) (ADVP (RB mostly))) (. !)))",
    "(TOP (S (NP (PRP They)) (VP (VBD leave))))",
    "(TOP (FRAG (. ?)))",
    "",
    "(TOP (S (X (DT a)) (X (JJ b) (NN c) (VBZ d)) (X (NN e)) (X (NN f) (IN g)) (NP (NN h))))",
    "(TOP (S (NP " + "(NN w) " * 20 + ") (NP " + "(NN w) " * 20 + ") (. .)))",
]

# Printed by EVALB (the version of January 2006) with -p COLLINS.prm for these two files.
EVALB = """\
  Sent.                        Matched  Bracket   Cross        Correct Tag
 ID  Len.  Stat. Recal  Prec.  Bracket gold test Bracket Words  Tags Accracy
============================================================================
   1    8    0  100.00 100.00     6      6    6      0      7     6    85.71
   2    2    0   75.00 100.00     3      4    3      0      2     1    50.00
   3    5    1    0.00   0.00     0      0    0      0      0     0     0.00
   4    2    1    0.00   0.00     0      0    0      0      0     0     0.00
   5    1    2    0.00   0.00     0      0    0      0      0     0     0.00
   6    2    2    0.00   0.00     0      0    0      0      0     0     0.00
   7    8    0   33.33  33.33     2      6    6      2      8     8   100.00
   8   41    0  100.00  33.33     1      1    3      0     40    40   100.00
============================================================================
                 70.59  66.67     12    17    18      2     57    55    96.49
=== Summary ===

-- All --
Number of sentence        =      8
Number of Error sentence  =      2
Number of Skip  sentence  =      2
Number of Valid sentence  =      4
Bracketing Recall         =  70.59
Bracketing Precision      =  66.67
Bracketing FMeasure       =  68.57
Complete match            =  25.00
Average crossing          =   0.50
No crossing               =  75.00
2 or less crossing        = 100.00
Tagging accuracy          =  96.49

-- len<=40 --
Number of sentence        =      7
Number of Error sentence  =      2
Number of Skip  sentence  =      2
Number of Valid sentence  =      3
Bracketing Recall         =  68.75
Bracketing Precision      =  73.33
Bracketing FMeasure       =  70.97
Complete match            =  33.33
Average crossing          =   0.67
No crossing               =  66.67
2 or less crossing        = 100.00
Tagging accuracy          =  88.24
"""


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the command on two lists of lines: exit code, standard output, standard error."""

    def command(gold, test, *flags):
        paths = tmp_path / "gold.mrg", tmp_path / "test.mrg"
        for path, lines in zip(paths, (gold, test), strict=True):
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        code = brackets.main([*map(str, paths), *flags])
        return code, *capsys.readouterr()

    return command


def test_the_output_is_that_of_evalb(run):
    code, out, err = run(GOLD, TEST, "--sentences")
    for ours, theirs in zip_longest(out.split("\n"), EVALB.split("\n")):
        assert ours == theirs
    assert code == 0
    assert [line.split(":")[0] for line in err.splitlines()] == [f"sentence {n} is in no total" for n in (3, 4)]


def test_the_summary_alone_and_json(run):
    assert run(GOLD, TEST)[1] == EVALB[EVALB.index("=== Summary") :]
    assert json.loads(run(GOLD, TEST, "--json")[1]) == bracket_scores(GOLD, TEST)


def test_the_table_of_sentences_has_no_ratios_without_brackets(run):
    assert run(["(S (A a))"], [""], "--sentences")[1].splitlines()[5] == "      0     0     0.00"


def test_the_twelfth_error_ends_the_command(run):
    good, gold, test = "(S (A a))", ["(S (A a))"] * 12, ["(S (A b))"] * 12
    assert run(gold, [*test[:11], good])[0] == 0
    code, out, err = run([good, *gold], [good, *test])
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "12 of 13 sentences" in err and "sentence 2: the word 'a' in gold but 'b' in test" in err


@pytest.mark.parametrize(
    ("gold", "test", "message"),
    [
        (["(S (A a))", "(S (A a)"], ["(S (A a))"] * 2, "gold.mrg, line 2: unbalanced brackets; 1 opened"),
        (["(S (A a))"] * 2, ["(S (A a))", "(S (A a)))"], "test.mrg, line 2: unbalanced brackets; a closing"),
        (["(S (A a))"], [")("], "test.mrg, line 1: unbalanced brackets"),
        (["(S (A a))"], ["(S (A a) b)"], "test.mrg, line 1: 'b' is not part of a (tag word)"),
        (["(S (A a b))"], ["(S (A a))"], "gold.mrg, line 1: 'a' is not part of a (tag word)"),
        (["(S (A a))", ""], ["(S (A a))", ""], "gold.mrg, line 2: a tree without leaves"),
        (["(S (NP))"], ["(S (A a))"], "gold.mrg, line 1: a tree without leaves"),
        (["(S (NP ))"], ["(S (A a))"], "gold.mrg, line 1: a tree without leaves"),
        ([], ["(S (A a))"], "gold.mrg: no trees"),
        (["(S (A a))"], [], "test.mrg: no trees"),
        (["(S (A a))"] * 2, ["(S (A a))"] * 3, "has 2 trees but"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, gold, test, message):
    code, out, err = run(gold, test)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_missing_file_is_named(capsys):
    assert brackets.main(["/no/gold", "/no/test"]) == 2
    assert "gold: no file /no/gold" in capsys.readouterr().err
