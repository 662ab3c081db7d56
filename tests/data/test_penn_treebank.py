"""The Wall Street Journal of the Penn Treebank, in small folders of its format, alone and mixed with other trees."""

import gzip
import re
import shutil

import pytest

import main
from t2t_jax.data import treebanks
from t2t_jax.data.corpora import read_corpus
from t2t_jax.data.treebanks import TREEBANKS
from t2t_jax.errors import InputError

# As in the combined files of Treebank-3: over several lines, with traces, function tags and an unnamed root.
TREE = """
( (S 
    (NP-SBJ-1 (NNP Section) (CD {section}) )
    (VP (VBZ wants) 
      (S 
        (NP-SBJ (-NONE- *-1) )
        (VP (TO to) 
          (VP (VB see) 
            (NP (NN file) (CD {file}) )))))
    (. .) ))
"""
SECTIONS = [f"{number:02}" for number in range(25)]


def write(folder):
    """Two files of one and two trees in each section."""
    for section in SECTIONS:
        (folder / section).mkdir(parents=True)
        for file in (2, 1):
            path = folder / section / f"wsj_{section}{file:02}.mrg"
            path.write_text(TREE.format(section=section, file=f"{section}{file:02}") * file)
    return folder


REMARK = ["(not", "the", "expected", "number", "of", "trees)"]


@pytest.fixture
def wsj(tmp_path):
    return write(tmp_path / "ptb")


def read(archives, tmp_path, train="", **held_out):
    prefixes = {"train": train, "dev": "", "test": ""} | held_out
    return read_corpus("penn_treebank", "en", "trees", prefixes, tmp_path, str(archives), TREEBANKS)


def sentences(corpus, split):
    return [sentence for sentence, _ in corpus.splits[split]()]


def sentences_of(*sections):
    """The sentences of the two files of each section, in order."""
    return [f"Section {s} wants to see file {s}{n:02} ." for s in sections for n in (1, 2, 2)]


def extra_file(path, *words):
    path.write_text("".join(f"(TOP (NP (NN {word})))\n" for word in words))
    return path


def test_sections_02_to_21_are_train_22_is_dev_and_23_is_test(wsj, tmp_path):
    corpus = read(wsj, tmp_path)
    assert sentences(corpus, "train") == sentences_of(*SECTIONS[2:22])
    assert sentences(corpus, "dev") == sentences_of("22") and sentences(corpus, "test") == sentences_of("23")
    assert (corpus.name, corpus.languages, corpus.has_copies) == ("penn_treebank", ("en", "trees"), False)


def test_traces_function_tags_and_line_breaks_are_removed(wsj, tmp_path):
    tree = (
        "(TOP (S (NP (NNP Section) (CD 22)) (VP (VBZ wants) (S (VP (TO to) (VP (VB see) (NP (NN file) (CD 2201)))))) "
        "(. .)))"
    )
    assert next(read(wsj, tmp_path).splits["dev"]()) == ("Section 22 wants to see file 2201 .", tree)


@pytest.mark.parametrize("below", ["", "wsj", "mrg/wsj", "parsed/mrg/wsj", "PARSED/MRG/WSJ"])
def test_the_sections_are_found_below_the_named_folder(tmp_path, below):
    write(tmp_path / "ptb" / below)
    assert sentences(read(tmp_path / "ptb", tmp_path), "test") == sentences_of("23")


def test_packed_files_and_names_in_upper_case_are_read_in_order_and_other_files_are_not(wsj, tmp_path):
    second = wsj / "23/wsj_2302.mrg"
    (wsj / "23/WSJ_2302.MRG.GZ").write_bytes(gzip.compress(second.read_bytes()))
    second.unlink()
    (wsj / "23/README").write_text("not a tree")
    assert sentences(read(wsj, tmp_path), "test") == sentences_of("23")


def test_the_table_compares_the_numbers_of_trees_with_the_expected_ones(wsj, tmp_path, monkeypatch):
    monkeypatch.setitem(treebanks._EXPECTED, "dev", 3)
    rows = [line.split() for line in read_all(read(wsj, tmp_path)).table().splitlines()]
    assert rows[0] == ["penn_treebank", "expected", "trees", "copies", "share"]
    assert rows[1] == ["train", "39,832", "60", "1", "100.0%", "wsj", *REMARK]
    assert rows[2:22] == [["section", section, "3", "2", "files"] for section in SECTIONS[2:22]]
    assert rows[22:24] == [["dev", "3", "3", "wsj"], ["section", "22", "3", "2", "files"]]
    assert rows[24][:3] == ["test", "2,416", "3"] and len(rows) == 26


def read_all(corpus):
    for split in corpus.splits.values():
        assert list(split())
    return corpus


def test_gold_trees_and_copies_are_mixed_with_the_trees_of_files(wsj, tmp_path):
    one, two = extra_file(tmp_path / "one.mrg", "a", "b"), extra_file(tmp_path / "two.mrg", "c")
    corpus = read_all(read(wsj, tmp_path, f"{one}:3, wsj:2,{two}"))
    gold = [sentence for sentence in sentences_of(*SECTIONS[2:22]) for _ in range(2)]
    assert sentences(corpus, "train") == ["a"] * 3 + ["b"] * 3 + gold + ["c"]
    assert corpus.has_copies and len(sentences(corpus, "dev")) == 3
    rows = [line.split() for line in corpus.table().splitlines() if line.startswith("train")]
    assert rows == [
        ["train", "2", "3", "4.7%", str(one)],  # 2 × 3 of 127 trees
        ["train", "39,832", "60", "2", "94.5%", "wsj", *REMARK],
        ["train", "1", "1", "0.8%", str(two)],
    ]


def test_a_file_of_ones_own_may_be_called_wsj(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("wsj", "test.mrg"):
        extra_file(tmp_path / name, "bridge")
    prefixes = {"train": "wsj", "dev": "wsj", "test": "test.mrg,wsj"}
    corpus = read_corpus("trees", "en", "trees", prefixes, tmp_path, "", TREEBANKS)
    rows = [line.split() for line in read_all(corpus).table().splitlines()]
    assert rows == [
        ["trees", "trees", "copies", "share"],
        ["train", "1", "1", "100.0%", "wsj"],
        ["dev", "1", "wsj"],
        ["test", "1", "test.mrg"],
        ["wsj", "1", "wsj"],
    ]


def test_trees_are_streamed(wsj, tmp_path):
    damaged = tmp_path / "damaged.mrg"
    damaged.write_text("(NN a)\n" * 20_000 + "(NN\n")
    pairs = read(wsj, tmp_path, f"{damaged}").splits["train"]()
    assert next(pairs) == ("a", "(TOP (NN a))")
    with pytest.raises(InputError, match="damaged.mrg, line 20001: the bracket that opens this tree is never closed"):
        list(pairs)


def test_checksums_identify_the_text_of_each_split_wherever_it_is(wsj, tmp_path):
    first = read(wsj, tmp_path).checksums
    shutil.copytree(wsj, tmp_path / "copy/wsj")
    assert read(tmp_path / "copy", tmp_path).checksums == first and len(set(first.values())) == 3
    (wsj / "05/wsj_0501.mrg").rename(wsj / "05/wsj_0500.mrg")
    renamed = read(wsj, tmp_path).checksums
    (wsj / "05/wsj_0502.mrg").write_text(TREE.format(section="05", file="?"))
    changed = read(wsj, tmp_path).checksums
    assert len({sums["train"] for sums in (first, renamed, changed)}) == 3
    assert all(sums[split] == first[split] for sums in (renamed, changed) for split in ("dev", "test"))


def test_checksums_hold_the_parts_and_their_copies_but_not_their_paths(wsj, tmp_path):
    one, same = extra_file(tmp_path / "one.mrg", "a"), extra_file(tmp_path / "same.mrg", "a")
    sums = [
        read(wsj, tmp_path, train).checksums["train"]
        for train in ("", "wsj:2", f"wsj,{one}", f"wsj,{one}:2", f"{one},wsj")
    ]
    assert len(set(sums)) == 5
    assert read(wsj, tmp_path, "wsj:1").checksums["train"] == sums[0]
    assert read(wsj, tmp_path, f"wsj,{same}:2").checksums["train"] == sums[3]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("wsj:0", "data.train=wsj:0: after the colon, the number of copies of wsj must be from 1 to 999999; got '0'"),
        ("wsj:-1", "copies of wsj must be from 1 to 999999; got '-1'"),
        ("wsj:x", "copies of wsj must be from 1 to 999999; got 'x'"),
        ("wsj:", "copies of wsj must be from 1 to 999999; got ''"),
        ("wsj:1000000", "copies of wsj must be from 1 to 999999; got '1000000'"),
        ("wsj,,wsj", "data.train=wsj,,wsj: a name is empty; write FILE:COPIES,FILE:COPIES"),
        (":3", "data.train=:3: a name is empty"),
        ("wsj,none.mrg:2", "data.train: no file none.mrg; give a file of bracketed trees"),
    ],
)
def test_a_training_list_that_means_nothing_is_refused(wsj, tmp_path, train, message):
    with pytest.raises(InputError, match=re.escape(message)):
        read(wsj, tmp_path, train)


def remove_a_section(wsj):
    shutil.rmtree(wsj / "07")


def empty_a_section(wsj):
    for path in (wsj / "22").iterdir():
        path.rename(path.with_suffix(".txt"))


def pack_beside(wsj):
    (wsj / "23/wsj_2301.mrg.gz").write_bytes(gzip.compress(b"(NN a)"))


def remove_all(wsj):
    shutil.rmtree(wsj)


def only_another_folder(wsj):
    remove_all(wsj)
    (wsj / "brown").mkdir(parents=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_a_section, "data.archives: section 07 is missing: no folder FOLDER/07; restore it"),
        (empty_a_section, "data.archives: section 22 is empty: no file *.mrg or *.mrg.gz in FOLDER/22; restore them"),
        (pack_beside, "data.archives: section 23: FOLDER/23 holds a file both packed and unpacked"),
        (remove_all, "data.archives=FOLDER: no such folder; name the folder of the Penn Treebank"),
        (only_another_folder, "data.archives=FOLDER: no section in it, or in its wsj or parsed/mrg/wsj; name"),
    ],
)
def test_a_folder_without_a_section_is_refused(wsj, tmp_path, damage, message):
    damage(wsj)
    with pytest.raises(InputError, match=re.escape(message.replace("FOLDER", str(wsj)))):
        read(wsj, tmp_path)


def test_a_training_set_without_gold_trees_needs_no_gold_sections(wsj, tmp_path):
    remove_a_section(wsj)
    train = extra_file(tmp_path / "one.mrg", "a")
    assert sentences(read(wsj, tmp_path, str(train)), "train") == ["a"]


def test_the_folder_must_be_named_and_the_held_out_sections_are_fixed(wsj, tmp_path):
    with pytest.raises(InputError, match="data.archives is empty; name the folder of the Penn Treebank"):
        read("", tmp_path)
    with pytest.raises(InputError, match="data.test=x.mrg: with data.corpus=penn_treebank it is section 23; leave"):
        read(wsj, tmp_path, test="x.mrg")


def test_another_encoding_is_refused_by_file_and_line(wsj, tmp_path):
    path = wsj / "23/wsj_2302.mrg"
    path.write_bytes(path.read_bytes() + b"(NN caf\xe9)\n")
    with pytest.raises(InputError, match=r"^data.archives: .*23/wsj_2302.mrg, line 21: not valid UTF-8 \(byte 0xe9\)"):
        list(read(wsj, tmp_path).splits["test"]())


@pytest.fixture
def prepare(tmp_path, capsys):
    """Runs --mode=prepare of the config for the Penn Treebank; returns exit code, standard output and error."""

    def run(archives, **data):
        data = {"directory": tmp_path / "stores", "archives": archives, "source_vocab_size": 320} | data
        flags = [f"--config.data.{field}={value}" for field, value in data.items()]
        code = main.main(["main.py", "--mode=prepare", "--config=configs/parsing_wsj.py", *flags])
        return code, *capsys.readouterr()

    return run


def test_prepare_prints_the_table_and_the_sizes_of_the_vocabularies(prepare, wsj):
    code, output, _ = prepare(wsj, train="wsj:2")
    assert code == 0 and output.startswith("120 of 120 training pairs kept\n3 dev pairs\n3 test pairs\n")
    # XX, and the two brackets of S, NP and VP
    assert "320 source and 10 target pieces" in output
    assert "\ntrain               39,832            60         2   100.0%  wsj" in output


def test_prepare_refuses_a_folder_without_a_section_in_one_line(prepare, wsj):
    remove_a_section(wsj)
    code, output, errors = prepare(wsj)
    assert (code, output) == (2, "") and len(errors.splitlines()) == 1
    assert errors.startswith("error: data.archives: section 07 is missing")


@pytest.mark.parametrize("rule", ["drop_duplicates", "drop_near_duplicates"])
def test_deduplication_and_copies_exclude_each_other(prepare, wsj, rule):
    code, _, errors = prepare(wsj, **{"train": "wsj:2", f"cleaning.{rule}": True})
    assert code == 2 and f"data.cleaning.{rule}=True would drop the copies that data.train asks for" in errors
    code, output, _ = prepare(wsj, **{f"cleaning.{rule}": True})
    assert code == 0 and "duplicates" in output  # the two equal trees of each second file
