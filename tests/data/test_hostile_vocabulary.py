"""Vocabularies that are damaged or made to break the C++ library: refused in one line, or usable for any text."""

import io
import json
import os
import random
import subprocess
import sys

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from t2t_jax.data.ready_vocabulary import model_of_merges, ready_vocabulary
from t2t_jax.data.tokenizer import MOST_BYTES, Tokenizer, train_vocabulary
from t2t_jax.errors import InputError
from tests.data import toy_corpus

Piece = sentencepiece_model_pb2.ModelProto.SentencePiece
TEXTS = ["one two three", "", "Bäume – “x” 日本 ﬁ ①", "a" * 300, " " * 5, "\0x", "é ½ K", "\ue000\U0010ffff"]
SENTENCES = [side for pair in toy_corpus.pairs(300, 0) for side in pair]


def trained(**options):
    model = io.BytesIO()
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=model, minloglevel=2, hard_vocab_limit=False, **ids
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def models():
    """One SentencePiece model of each kind."""
    return {
        "bpe": train_vocabulary(SENTENCES, 340),
        "unigram": trained(model_type="unigram", vocab_size=38),
        "normalising": trained(vocab_size=320, model_type="bpe", byte_fallback=True),
        "word": trained(model_type="word", vocab_size=30),
        "merges": model_of_merges([("e", "r</w>"), ("l", "o"), ("lo", "w")], "abc"),
    }


def use(path) -> None:
    """Every operation of a tokenizer, on texts and on all of its ids."""
    tokenizer = Tokenizer(path)
    encoded = [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer.encode_many(TEXTS) == encoded
    every = list(range(len(tokenizer)))
    for ids in (*encoded, every, every[2:], *([i] for i in every)):
        assert isinstance(tokenizer.decode(ids), str) and len(tokenizer.tokens(ids)) <= len(ids)


def usable_or_refused(path, content: bytes) -> bool:
    """Whether it is usable; otherwise both readers must refuse it in one line."""
    path.write_bytes(content)
    for read in (use, lambda path: ready_vocabulary(path, [])):
        try:
            read(path)
        except InputError as error:
            assert str(path) in str(error) and len(str(error).splitlines()) == 1
            usable = False
        else:
            usable = True
    return usable


def changed(model: bytes, change) -> bytes:
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    change(proto)
    return proto.SerializePartialToString()


def scores(value):
    def change(proto):
        for piece in proto.pieces:
            piece.score = value

    return change


def kinds(kind):
    def change(proto):
        for piece in proto.pieces[3:]:
            piece.type = kind

    return change


def only(*names):
    def change(proto):
        proto.trainer_spec.byte_fallback = False
        known = {piece.piece: piece for piece in proto.pieces}
        kept = [known[name] for name in names]
        del proto.pieces[:]
        proto.pieces.extend(kept)

    return change


def swap(a, b):
    def change(proto):
        pieces = list(proto.pieces)
        pieces[a], pieces[b] = pieces[b], pieces[a]
        del proto.pieces[:]
        proto.pieces.extend(pieces)

    return change


def add(*names):
    return lambda proto: [proto.pieces.add(piece=name, score=0.0) for name in names]


def spec(**fields):
    return lambda proto: [setattr(proto.trainer_spec, name, value) for name, value in fields.items()]


def charsmap(blob):
    return lambda proto: setattr(proto.normalizer_spec, "precompiled_charsmap", blob)


def huge_replacement(proto):
    blob = sentencepiece_model_pb2.ModelProto.FromString(train_vocabulary(SENTENCES, 340, replace={"o": "0"}))
    blob = blob.normalizer_spec.precompiled_charsmap
    trie = 4 + int.from_bytes(blob[:4], "little")
    proto.normalizer_spec.precompiled_charsmap = blob[:trie] + b"0" * (1 << 23) + b"\0"


REFUSED = {
    "no pieces": lambda proto: proto.ClearField("pieces"),
    "three pieces, but bytes": lambda proto: proto.pieces.__delitem__(slice(3, None)),
    "no padding": only("</s>", "<unk>", "▁one"),
    "no EOS": only("<pad>", "<unk>", "▁one"),
    "no unknown": only("<pad>", "</s>", "▁one"),
    "padding and EOS exchanged": swap(0, 1),
    "EOS and unknown exchanged": swap(1, 2),
    "padding is a text piece": swap(0, 300),
    "padding has another name": spec(pad_piece="nix"),
    "unknown has another name": spec(unk_piece="e"),
    "a piece twice": add("twice", "twice"),
    "an empty piece": add(""),
    "all are control symbols": kinds(Piece.CONTROL),
    "all are unknown": kinds(Piece.UNKNOWN),
    "all are bytes": kinds(Piece.BYTE),
    "a megabyte for one piece": add("x" * (1 << 20)),
    "a character replaced by megabytes": huge_replacement,
    "megabytes for what is unknown": spec(unk_surface="?" * (1 << 20)),
    "no map of characters": charsmap(b"\1"),
    "a map of 4 GB": charsmap(b"\xff\xff\xff\xffabc"),
    "a map of random bytes": charsmap(b"\0\4\0\0" + random.Random(0).randbytes(2000)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_vocabulary_that_no_text_can_be_encoded_with_is_refused(models, tmp_path, name):
    assert not usable_or_refused(tmp_path / "vocab.model", changed(models["bpe"], REFUSED[name]))


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_scores_of_any_value_crash_nothing(models, tmp_path, kind, value):
    usable_or_refused(tmp_path / "vocab.model", changed(models[kind], scores(value)))


def test_what_is_no_file_or_too_long_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "long").touch()
    os.truncate(tmp_path / "long", MOST_BYTES + 1)
    for name in ("folder", "loop", "none", "long"):
        for read in (Tokenizer, lambda path: ready_vocabulary(path, [])):
            with pytest.raises(InputError, match=name):
                read(tmp_path / name)


def test_empty_files_and_texts_are_refused(tmp_path):
    for content in (b"", b"\0" * 100, b"one\n", b"\n\n\n", "日本\n".encode("utf-16"), b"a b c\n"):
        assert not usable_or_refused(tmp_path / "vocab.model", content)


@pytest.mark.parametrize("codes", ["▁ </w>\n", "</w> </w>\n", "a b\na b\n", "<unk> x\n", "a b</w>\n", "日 本\n"])
def test_odd_merges_and_texts_make_a_usable_vocabulary(tmp_path, codes):
    (tmp_path / "codes").write_text(codes)
    model = ready_vocabulary(tmp_path / "codes", TEXTS * 9)
    (tmp_path / "vocab.model").write_bytes(model)
    use(tmp_path / "vocab.model")


@pytest.mark.parametrize("codes", ["a\0 b\n", f"{'x' * 10**5} y\n", "<pad> <unk>\n</s> </w>\n<0x 41>\n"])
def test_merges_that_make_no_vocabulary_are_refused(tmp_path, codes):
    (tmp_path / "codes").write_text(codes)
    with pytest.raises(InputError, match="codes"):
        ready_vocabulary(tmp_path / "codes", [])


# --- Random damage -----------------------------------------------------------------------------------------


@given(
    place=st.floats(0, 1),
    length=st.integers(0, 20),
    new=st.binary(max_size=20),
    at_end=st.booleans(),
    cut=st.booleans(),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("kind", ["bpe", "unigram", "normalising", "word", "merges"])
def test_damage_anywhere_leaves_a_usable_vocabulary_or_one_that_is_refused(
    models, tmp_path, kind, place, length, new, at_end, cut
):
    model = models[kind]
    start = int(len(model) - place * 400) if at_end and len(model) > 400 else int(place * len(model))
    usable_or_refused(tmp_path / "vocab.model", model[:start] if cut else model[:start] + new + model[start + length :])


# Run in a child process with bounded memory, as a crash of the C++ library would end the process.
CHILD = """
import json, pathlib, random, resource, sys, tempfile
from tests.data.test_hostile_vocabulary import usable_or_refused
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
kind, model = sys.argv[1], pathlib.Path(sys.argv[2]).read_bytes()
with tempfile.TemporaryDirectory() as folder:
    counts = [0, 0]
    for seed in range(int(sys.argv[3])):
        rng, content = random.Random(seed), bytearray(model)
        for _ in range(rng.choice([1, 1, 2, 8])):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        counts[usable_or_refused(pathlib.Path(folder) / "vocab.model", bytes(content))] += 1
print(json.dumps(counts))
"""


@pytest.mark.parametrize("kind", ["bpe", "unigram", "normalising"])
def test_flipped_bits_crash_no_process(models, tmp_path, kind):
    (tmp_path / "model").write_bytes(models[kind])
    command = [sys.executable, "-c", CHILD, kind, str(tmp_path / "model"), "150"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    refused, usable = json.loads(ended.stdout.splitlines()[-1])
    assert refused > 10 and usable > 10


def test_without_our_check_a_character_becomes_megabytes(models, tmp_path):
    """Shows that the check of replacements is needed."""
    processor = sentencepiece.SentencePieceProcessor(
        model_proto=changed(models["bpe"], REFUSED["a character replaced by megabytes"])
    )
    assert len(processor.normalize("o")) > 1 << 20
