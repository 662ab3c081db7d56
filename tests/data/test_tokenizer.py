import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t2t_jax.data.plain_text import collapse_spaces
from t2t_jax.data.tokenizer import EOS, UNKNOWN, Tokenizer, train_symbols, train_vocabulary
from t2t_jax.errors import InputError
from t2t_jax.files import without_line_ends
from tests.data import toy_corpus


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.model"
    text = [side for pair in toy_corpus.pairs(300, 0) for side in pair]
    path.write_bytes(train_vocabulary(text, 340))
    return Tokenizer(path)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁\0")))
@settings(max_examples=300)
def test_text_to_ids_to_text_is_the_identity_up_to_white_space(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == without_line_ends(collapse_spaces(text))
    assert ids[-1] == EOS and EOS not in ids[:-1] and 0 not in ids and 2 not in ids


def test_the_vocabulary_has_exactly_the_pieces_asked_for_with_padding_0_and_eos_1(tokenizer):
    assert len(tokenizer) == 340
    assert tokenizer.tokens([0, 1]) == ["<pad>", "</s>"]


def test_encode_many_equals_encode_of_each_text(tokenizer):
    texts = [pair[0] for pair in toy_corpus.pairs(50, 9)] + [""]
    assert tokenizer.encode_many(texts) == [tokenizer.encode(text) for text in texts]


def test_decoding_stops_at_eos_and_skips_padding(tokenizer):
    ids = tokenizer.encode("one two")
    assert tokenizer.decode([0, *ids, *tokenizer.encode("three"), 0]) == "one two"
    assert tokenizer.tokens([*ids, 0, 0])[-1] == "</s>"


def test_a_word_of_the_corpus_is_one_piece(tokenizer):
    assert tokenizer.tokens(tokenizer.encode("seven eight")) == ["▁seven", "▁eight", "</s>"]


def test_impossible_vocabulary_sizes_are_refused():
    with pytest.raises(InputError, match="data.vocab_size=100000"):
        train_vocabulary(["one two three"], 100_000)
    with pytest.raises(InputError, match="data.vocab_size=10"):
        train_vocabulary(["one two three"], 10)


symbols = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="▁"), min_size=1, max_size=40)
symbols = symbols.filter(lambda symbol: not re.search("<pad>|</s>|<unk>", symbol))


@given(st.lists(st.lists(symbols, min_size=1, max_size=6).map(" ".join), min_size=1, max_size=6))
@settings(deadline=None)
def test_each_symbol_is_one_piece_and_text_to_ids_to_text_is_the_identity(tmp_path_factory, sentences):
    path = tmp_path_factory.mktemp("symbols") / "vocab.model"
    path.write_bytes(train_symbols(sentences, 512))
    tokenizer, known = Tokenizer(path), sorted(set(" ".join(sentences).split(" ")))
    assert sorted(tokenizer.pieces()[3:]) == sorted(f"▁{symbol}" for symbol in known)
    for sentence in sentences:
        ids = tokenizer.encode(sentence)
        assert len(ids) == len(sentence.split(" ")) + 1 and UNKNOWN not in ids
        assert tokenizer.decode(ids) == sentence


def test_symbols_do_not_depend_on_the_order_of_the_sentences_and_others_are_unknown(tmp_path):
    model = train_symbols(["(S XX )S", "(NP XX )NP"], 8)
    assert model == train_symbols(["(NP XX )NP", "XX", "(S XX )S"], 8)
    (tmp_path / "vocab.model").write_bytes(model)
    tokenizer = Tokenizer(tmp_path / "vocab.model")
    assert len(tokenizer) == 8 and tokenizer.tokens([0, 1]) == ["<pad>", "</s>"]
    assert [id == UNKNOWN for id in tokenizer.encode("(S (VP XX )VP )S")] == [False, True, False, True, False, False]


@pytest.mark.parametrize("symbol", ["<unk>", "(<pad>", "</s>NP", "a\N{LOWER ONE EIGHTH BLOCK}b"])
def test_symbols_that_mean_something_else_to_sentencepiece_are_refused(symbol):
    with pytest.raises(InputError, match=f"data.train: '{re.escape(symbol)}' is a symbol of the targets; .* reserved"):
        train_symbols([f"XX {symbol} XX"], 512)


def test_more_symbols_than_the_vocabulary_has_pieces_are_refused():
    message = "data.vocab_size=7: the training targets have 5 symbols; .* they need data.vocab_size=8 or more"
    with pytest.raises(InputError, match=message):
        train_symbols(["(S XX )S", "(NP XX )NP"], 7)


def test_a_file_that_is_no_vocabulary_is_refused(tmp_path):
    (tmp_path / "vocab.model").write_text("not a model")
    with pytest.raises(InputError, match="is not a SentencePiece model"):
        Tokenizer(tmp_path / "vocab.model")
    with pytest.raises(InputError, match="no vocabulary"):
        Tokenizer(tmp_path / "other.model")


def test_normalisation_rules_are_applied_before_tokenisation(tmp_path):
    sentences = [side for pair in toy_corpus.pairs(300, 0) for side in pair]
    path = tmp_path / "vocab.model"
    path.write_bytes(train_vocabulary(sentences, 340, replace={"“": '"', "…": "...", "\u200b": ""}))
    tokenizer = Tokenizer(path)
    assert tokenizer.decode(tokenizer.encode("“one”… t\u200bwo")) == '"one”... two'
    assert tokenizer.encode("t\u200bwo") == tokenizer.encode("two")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_vocabulary_with_normalisation_rules_has_the_same_bytes_each_time(kind):
    """Its checksum is that of the data: runs are resumed, and processes agree, where each has prepared its own."""
    train = lambda: train_vocabulary(["one „two“ three"] * 9, 268, kind=kind, replace={"„": '"', "“": '"'})
    assert train() == train()


def test_characters_beyond_the_coverage_are_encoded_as_bytes(tmp_path):
    sentences = [side for pair in toy_corpus.pairs(300, 0) for side in pair] + ["Ω"]
    path = tmp_path / "vocab.model"
    path.write_bytes(train_vocabulary(sentences, 340, character_coverage=0.999))
    tokenizer = Tokenizer(path)
    assert tokenizer.tokens(tokenizer.encode("Ω"))[-3:] == ["<0xCE>", "<0xA9>", "</s>"]
    assert tokenizer.decode(tokenizer.encode("one Ω")) == "one Ω"


def test_a_lone_surrogate_is_refused_with_its_position(tokenizer):
    for encode in (tokenizer.encode_many, lambda texts: [tokenizer.encode(text) for text in texts]):
        with pytest.raises(InputError, match=r"text \d, character 5: '\\udc80' is a lone surrogate"):
            encode(["one", "two \udc80"])


@given(st.lists(st.integers(0, 339)))
def test_decoded_text_is_always_a_single_line(tokenizer, ids):
    """A model may produce the byte piece of a newline."""
    assert len(tokenizer.decode(ids).splitlines()) <= 1 and "\n" not in tokenizer.decode(ids)
    byte = {value: tokenizer.encode(chr(value))[-2] for value in (0x1C, 0x85)}
    assert tokenizer.tokens([byte[0x1C]]) == ["<0x1C>"]
    newline = byte[0x1C] - 0x1C + 0x0A
    assert tokenizer.tokens([newline]) == ["<0x0A>"]
    with_newline = tokenizer.decode([*tokenizer.encode("one")[:-1], newline, *tokenizer.encode("two")])
    assert with_newline == "one  two"


@given(st.text())
def test_any_string_is_encoded_or_refused(tokenizer, text):
    try:
        ids = tokenizer.encode(text)
    except InputError:
        text.encode("utf-8", "surrogatepass")
        assert any("\ud800" <= character <= "\udfff" for character in text)
    else:
        assert ids[-1] == EOS and ids == tokenizer.encode_many([text])[0]


UNLEARNT = {
    "two\u00a0three\u3000four\x85five": "two three four five",
    "\ufefftwo th\u00adree\u200b four\u2028": "two three four ",
    "tu\u0308r cafe\u0301": "tür café",
    "\u200b\u00a0\ufeff\x00\u200d": "",
    "می\u200cخواهم 👩\u200d🚀": "می\u200cخواهم 👩\u200d🚀",  # joiners are a part of words and of emoji
}


@pytest.mark.parametrize(("text", "plain"), UNLEARNT.items(), ids=map(ascii, UNLEARNT))
def test_spaces_invisible_and_decomposed_characters_that_were_not_learnt_become_plain(tokenizer, text, plain):
    assert tokenizer.plain(["one", text]) == ["one", plain]


@pytest.mark.parametrize(("kind", "size"), [("bpe", 310), ("unigram", 290)])
def test_characters_that_were_learnt_are_kept(tmp_path, kind, size):
    """French has a no-break space before some punctuation; whoever trains on decomposed accents needs them too."""
    sentences = [f"{source}\u00a0! ve\u0301lo\u0301" for source, _ in toy_corpus.pairs(300, 0)]
    rare = "one two\u2009\u00adthree vu\u0302"
    path = tmp_path / "vocab.model"
    path.write_bytes(train_vocabulary([*sentences, rare], size, kind=kind))
    tokenizer = Tokenizer(path)
    assert {"\u00a0", "\u0301", "\u2009", "\u00ad", "\u0302"} < set(tokenizer.pieces())  # as is every character
    for learnt in (sentences[0], "one\u00a0!", "ve\u0301lo"):
        assert tokenizer.plain([learnt]) == [learnt]
    assert tokenizer.plain([rare]) == ["one two three vû"]


def test_characters_that_the_vocabulary_normalises_itself_are_left_to_it(tmp_path):
    sentences = [side for pair in toy_corpus.pairs(300, 0) for side in pair]
    path = tmp_path / "vocab.model"
    path.write_bytes(train_vocabulary(sentences, 340, replace={"\u200b": " ", "\u00a0": "-"}))
    tokenizer = Tokenizer(path)
    assert tokenizer.plain(["one\u200btwo\u00a0three\u3000four"]) == ["one\u200btwo\u00a0three four"]
