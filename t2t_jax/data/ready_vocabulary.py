"""§5.1: a vocabulary that is there already: a SentencePiece model of ours, or the merges of subword-nmt.

The preprocessed sets of the WMT14 papers come with such merges ("BPE codes"), one a line, the first applied first;
`</w>` ends a word. Give the tokenised text, not the one that is already cut into subwords.
"""

import collections
from collections.abc import Iterable
from pathlib import Path

from sentencepiece import sentencepiece_model_pb2

from t2t_jax.data.tokenizer import EOS, PAD, UNKNOWN, check_special_pieces, load_pieces, read_model
from t2t_jax.errors import InputError

_Piece = sentencepiece_model_pb2.ModelProto.SentencePiece
_SPACE = "▁"  # SentencePiece's own; here it ends a word, as </w> does
_LEAST_OFTEN = 5  # characters rarer than this, and in no merge, are cut into bytes


def ready_vocabulary(path: Path, sentences: Iterable[str], field: str = "data.vocabulary") -> bytes:
    """The SentencePiece model in `path`, or one that cuts words as the merges in `path` do.

    Characters of `sentences` that no merge has become pieces too.
    """
    if not path.is_file():
        raise InputError(f"{field}: no file {path}; give a SentencePiece model or subword-nmt's codes")
    name = f"{field}={path}"
    content = read_model(path, name)
    try:
        merges = _merges(content.decode("utf-8-sig"))
    except (UnicodeDecodeError, ValueError):
        return _checked(name, content)
    return _checked(name, model_of_merges(merges, _alphabet(sentences)))


def _checked(name: str, model: bytes) -> bytes:
    """The model, if text can be encoded with it; `name` is what an error calls it."""
    try:
        pieces = load_pieces(model, name)
    except InputError as error:
        raise InputError(f"{name} is neither a SentencePiece model nor subword-nmt's codes ({error})") from None
    check_special_pieces(pieces, name)
    return model


def _merges(text: str) -> list[tuple[str, str]]:
    """The pairs of a file of codes; ValueError where it is no such file."""
    lines = [line for line in text.split("\n") if line and not line.startswith("#version")]
    pairs = [tuple(line.removesuffix("\r").split(" ")) for line in lines]
    if not pairs or any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise ValueError("not merges")
    return pairs


def _alphabet(sentences: Iterable[str]) -> set[str]:
    counts = collections.Counter()
    for sentence in sentences:
        counts.update(sentence)
    del counts["\0"]  # which SentencePiece has no piece for
    return {character for character, count in counts.items() if count >= _LEAST_OFTEN and not character.isspace()}


def model_of_merges(merges: list[tuple[str, str]], alphabet: Iterable[str] = ()) -> bytes:
    """A SentencePiece model whose merges are these, in this order.

    It merges what would be an earlier piece first, as subword-nmt does. Before anything else the last character of
    a word takes in the end of the word, with which subword-nmt begins. It may also join two pieces that together
    are a piece but were never a merge; on real text that has not been seen.
    """
    merged = ["".join(pair).replace("</w>", _SPACE) for pair in merges]
    characters = sorted({c for piece in merged for c in piece.replace(_SPACE, "")} | set(alphabet) - {_SPACE})
    scores = {character + _SPACE: 1.0 for character in characters}
    for rank, piece in enumerate(merged, start=1):
        scores.setdefault(piece, -float(rank))
    for character in (*characters, _SPACE):
        scores.setdefault(character, -float(len(merged) + 1))

    model = sentencepiece_model_pb2.ModelProto()
    special = {"<pad>": _Piece.CONTROL, "</s>": _Piece.CONTROL, "<unk>": _Piece.UNKNOWN}
    special |= {f"<0x{byte:02X}>": _Piece.BYTE for byte in range(256)}
    for piece, kind in special.items():
        model.pieces.add(piece=piece, score=0.0, type=kind)
    for piece, score in scores.items():
        model.pieces.add(piece=piece, score=score, type=_Piece.NORMAL)
    spec = model.trainer_spec
    spec.model_type, spec.vocab_size, spec.byte_fallback = spec.BPE, len(model.pieces), True
    spec.treat_whitespace_as_suffix = True
    spec.pad_id, spec.eos_id, spec.unk_id, spec.bos_id = PAD, EOS, UNKNOWN, -1
    spec.pad_piece, spec.eos_piece, spec.unk_piece = list(special)[:3]
    normalizer = model.normalizer_spec
    normalizer.name, normalizer.add_dummy_prefix, normalizer.escape_whitespaces = "identity", True, True
    normalizer.remove_extra_whitespaces = False
    return model.SerializeToString()
