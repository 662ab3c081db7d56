import pytest
import sentencepiece

from t2t_jax.data.plain_text import collapse_spaces
from t2t_jax.data.ready_vocabulary import model_of_merges
from t2t_jax.data.tokenizer import train_vocabulary
from t2t_jax.errors import InputError
from t2t_jax.interop.vocabulary import in_our_order, with_white_space_rules
from tests.interop import models


def symbols(model):
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(i) for i in range(len(processor))]


def test_a_model_with_our_ids_is_unchanged():
    model = models.vocabulary()
    found = in_our_order(model, {name: i for i, name in enumerate(symbols(model))}, field="vocabulary")
    assert found.model == model and found.ids.tolist() == list(range(340))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_model_with_other_ids_gets_ours_and_tokenises_the_same(tmp_path, kind):
    """SentencePiece's own defaults: 0 unknown, 1 <s>, 2 </s>, no padding."""
    text = ["one two three four five six seven eight", "a tree, a house", "eins zwei drei"] * 9
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_prefix=str(tmp_path / "spm"), vocab_size=40, model_type=kind,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    given = (tmp_path / "spm.model").read_bytes()
    pieces = [piece for piece in symbols(given) if not piece.startswith("<")]
    ids = {name: 7 * i for i, name in enumerate(["<s>", "<pad>", "</s>", "<unk>", *reversed(pieces), "<en>"])}
    found = in_our_order(given, ids, field="vocabulary")
    names = symbols(found.model)
    assert names[:3] == ["<pad>", "</s>", "<unk>"] and names[-1] == "<en>" and set(names) == set(ids)
    assert [ids[name] for name in names] == found.ids.tolist()
    before, after = (sentencepiece.SentencePieceProcessor(model_proto=model) for model in (given, found.model))
    assert (after.pad_id(), after.eos_id(), after.unk_id()) == (0, 1, 2)
    for sentence in [*text, "a <s> <en> of § 3"]:
        assert after.encode(sentence, out_type=str) == before.encode(sentence, out_type=str)
        assert after.decode(after.encode(sentence)) == before.decode(before.encode(sentence))


def test_a_dictionary_without_the_special_symbols_is_refused():
    with pytest.raises(InputError, match="the dictionary has no </s>; it must have <pad>, </s> and <unk>"):
        in_our_order(models.vocabulary(), {"<pad>": 0, "<unk>": 1}, field="vocabulary")


@pytest.mark.parametrize("rules", [None, {"A": "a", "\u2013": "-", "\xad": ""}], ids=["no rules", "own rules"])
def test_white_space_is_read_as_in_our_text_and_other_characters_as_before(rules):
    model = train_vocabulary(["one two three", "a tree, a house", "eins zwei drei"] * 9, 300, replace=rules)
    changed = with_white_space_rules(model)
    before, after = (sentencepiece.SentencePieceProcessor(model_proto=m) for m in (model, changed))
    assert before.encode("a\tb\r") != before.encode("a b"), "else nothing would need rules"
    for text in (f"A {chr(code)}b\xad{chr(code)}" for code in range(1, 0x3001)):
        assert after.encode(text) == before.encode(collapse_spaces(text)), ascii(text)
    assert with_white_space_rules(changed) == changed


def test_runs_of_white_space_are_one_space_to_the_codes_of_subword_nmt_too():
    model = model_of_merges([("e", "</w>"), ("o", "n")], ["o", "n", "e", "t", "w"])
    changed = with_white_space_rules(model)
    before, after = (sentencepiece.SentencePieceProcessor(model_proto=m) for m in (model, changed))
    for text in ("one two", "  one   two ", "one \t two\r", "one\u3000two", " ", ""):
        assert after.encode(text) == before.encode(collapse_spaces(text)), ascii(text)
    assert with_white_space_rules(changed) == changed
