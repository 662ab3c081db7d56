import io
import random

import pytest
import sentencepiece

from t2t_jax.data.cleaning import Rules, replacements
from t2t_jax.data.ready_vocabulary import model_of_merges, ready_vocabulary
from t2t_jax.data.tokenizer import Tokenizer, train_vocabulary
from t2t_jax.errors import InputError
from tests.data import toy_corpus

TEXT = "low lower lowest newer wider widest new slow slowly Größe größer größte , . !"
WORDS = TEXT.split()


def sentences(count):
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 9))) for _ in range(count)]


def pieces(model, text):
    return sentencepiece.SentencePieceProcessor(model_proto=model).encode(text, out_type=str)


def test_merges_are_applied_in_their_order_by_hand():
    """l o w e r: (e, r</w>) before (l, o), then (lo, w); 'er' inside a word is not merged."""
    model = model_of_merges([("e", "r</w>"), ("l", "o"), ("lo", "w")])
    assert pieces(model, "lower low erlow") == ["low", "er▁", "lo", "w▁", "e", "r", "lo", "w▁"]


def learnt():
    """BPE codes of subword-nmt, of the version that it has now."""
    out = io.StringIO()
    pytest.importorskip("subword_nmt.learn_bpe").learn_bpe(io.StringIO("\n".join(sentences(200))), out, 25)
    return out.getvalue()


# Of version 0.1, without a header: the end of a word is a symbol.
FIRST_VERSION = "e r\nw e\nl o\ns t\ner </w>\nlo w\ne we\nw </w>\newe st\nl y\nly </w>\nö ß\nlow </w>\nest </w>\n"


@pytest.mark.parametrize("codes", [learnt, lambda: FIRST_VERSION])
def test_words_are_split_as_by_subword_nmt(codes, tmp_path):
    apply_bpe, codes = pytest.importorskip("subword_nmt.apply_bpe"), codes()
    (tmp_path / "codes").write_text(codes)
    model = ready_vocabulary(tmp_path / "codes", sentences(200))
    theirs = apply_bpe.BPE(io.StringIO(codes))
    rng = random.Random(1)
    unseen = ["".join(rng.choices("lowerstndiSGößew", k=rng.randint(1, 9))) for _ in range(300)]
    for word in (*WORDS, *unseen):
        ours = " ".join(piece if piece.endswith("▁") else piece + "@@" for piece in pieces(model, word))
        assert "S" in word or ours.removesuffix("▁").removesuffix("@@ ") == theirs.process_line(word)
    path = tmp_path / "vocab.model"
    path.write_bytes(model)
    tokenizer = Tokenizer(path)
    for text in (*sentences(20), "一 Ω and more", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_sentencepiece_model_is_used_unchanged(tmp_path):
    path = tmp_path / "some.model"
    path.write_bytes(train_vocabulary([side for pair in toy_corpus.pairs(300, 0) for side in pair], 300))
    assert ready_vocabulary(path, []) == path.read_bytes()


def test_files_that_are_no_vocabulary_are_refused_by_name(tmp_path):
    other, text = tmp_path / "other.model", tmp_path / "text"
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(200)), model_writer=model, vocab_size=30, minloglevel=2
    )
    other.write_bytes(model.getvalue())
    text.write_text("one\ntwo three four\n")
    for path, message in ((other, "must be pieces 0, 1 and 2"), (text, "is neither"), (tmp_path / "none", "no file")):
        with pytest.raises(InputError, match=message):
            ready_vocabulary(path, [])


@pytest.mark.parametrize("other", ["#version: 0.2\nĠ t\nh e\nĠt he\n", "the 1061\nof 593\n"])
def test_two_columns_that_are_no_codes_of_subword_nmt_are_refused(tmp_path, other):
    """The merges of GPT-2's byte-level BPE, and a list of words with their counts: few or none would ever apply."""
    (tmp_path / "other").write_text(other)
    with pytest.raises(InputError, match="data.vocabulary=.*other has no merge with </w>, .* subword-nmt learn-bpe"):
        ready_vocabulary(tmp_path / "other", [])


def test_a_byte_order_mark_before_the_merges_is_ignored(tmp_path):
    codes = "#version: 0.2\ne r</w>\nl o\n"
    (tmp_path / "plain").write_text(codes)
    (tmp_path / "marked").write_text("\ufeff" + codes)
    plain, marked = (ready_vocabulary(tmp_path / name, []) for name in ("plain", "marked"))
    assert plain == marked


def test_text_to_translate_is_normalised_like_training_text(tmp_path):
    """BPE codes and SentencePiece models without rules get those of `data.cleaning`; with others they are refused."""
    replace = replacements(Rules(lowercase=True, normalize_punctuation=True))
    (tmp_path / "codes").write_text("e r</w>\nl o\nlo w\n")
    (tmp_path / "plain").write_bytes(train_vocabulary(sentences(200), 290))
    for name in ("codes", "plain"):
        found = ready_vocabulary(tmp_path / name, sentences(200), replace=replace)
        assert pieces(found, "LOWER „Größe“") == pieces(found, 'lower "größe"') == pieces(found, 'LOWER "größe"')
        (tmp_path / "again").write_bytes(found)
        assert ready_vocabulary(tmp_path / "again", [], replace=replace) == found
    (tmp_path / "lower").write_bytes(train_vocabulary(sentences(200), 290, replace={"L": "l"}))
    with pytest.raises(InputError, match="lower has normalisation rules of its own, .* data.cleaning.lowercase"):
        ready_vocabulary(tmp_path / "lower", [], replace=replace)
