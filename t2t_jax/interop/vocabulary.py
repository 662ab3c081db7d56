"""SentencePiece models from and for other systems: pieces with our ids (0 padding, 1 EOS, 2 unknown); white space."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from t2t_jax.data.tokenizer import (
    EOS,
    LANGUAGE_CODE,
    PAD,
    SPACE,
    UNKNOWN,
    compiled_rules,
    load_pieces,
    set_special_pieces,
)  # fmt: skip
from t2t_jax.errors import InputError, shown
from t2t_jax.files import lone_surrogate

_Piece = sentencepiece_model_pb2.ModelProto.SentencePiece
_SPECIAL = ("<pad>", "</s>", "<unk>")  # padding, EOS and unknown, as fairseq and Marian have them
_UNIGRAM = sentencepiece_model_pb2.TrainerSpec.UNIGRAM
_WHITE_SPACE = "\t\n\v\f\r"  # what `collapse_spaces` replaces by a space


class Vocabulary(NamedTuple):
    """`model` is the contents of a SentencePiece file; `ids[i]` is the other system's id of piece i, or −1."""

    model: bytes
    ids: np.ndarray


def in_our_order(model: bytes, ids: dict[str, int], *, field: str) -> Vocabulary:
    """The SentencePiece model with our special pieces first, and the other system's id of each piece.

    `ids` is the other system's dictionary. Pieces that only the dictionary has are appended as control symbols, which
    encoding never produces. Control symbols that only the model has are dropped. Its other pieces (bytes excepted)
    that the dictionary lacks become unused: they still take part in merges, but encoding splits them.
    """
    proto, pieces = _begun(model, ids, field)
    known = {piece.piece for piece in proto.pieces}
    for piece in proto.pieces:
        name, is_text = piece.piece, piece.type not in (_Piece.CONTROL, _Piece.UNKNOWN)
        if name not in _SPECIAL and (name in ids or is_text):
            pieces.append(piece)
            if name not in ids and piece.type != _Piece.BYTE:
                piece.type = _Piece.UNUSED
    extra = sorted(set(ids) - known - set(_SPECIAL), key=ids.get)
    pieces += [_Piece(piece=name, score=0.0, type=_Piece.CONTROL) for name in extra]
    return _finished(model, pieces, [ids.get(piece.piece, -1) for piece in pieces], field)


def of_source(model: bytes, ids: dict[str, int], *, field: str) -> Vocabulary:
    """The vocabulary that only reads, of a system that looks up the pieces of `model` in the dictionary `ids`.

    A piece that the dictionary lacks has the id of the unknown piece, as there. Language codes of the dictionary, such
    as >>fra<<, are encoded as one piece at the beginning of a word. Entries without any character that the model has
    are encoded too: it leaves such text as it is, and the other system finds it in the dictionary. The other entries
    are never read and left out.
    """
    proto, pieces = _begun(model, ids, field)
    pieces += [p for p in proto.pieces if p.piece not in _SPECIAL and p.type not in (_Piece.CONTROL, _Piece.UNKNOWN)]
    found = [ids.get(piece.piece, ids[_SPECIAL[UNKNOWN]]) for piece in pieces]
    known = {piece.piece for piece in pieces}
    added = [
        _Piece(piece=SPACE + name, score=0.0, type=_Piece.USER_DEFINED)
        for name in sorted(filter(LANGUAGE_CODE.fullmatch, ids), key=ids.get)
        if SPACE + name not in known
    ]
    added += _of_other_characters(proto, set(ids) - set(_SPECIAL))
    found += [ids[piece.piece.removeprefix(SPACE)] for piece in added]
    return _finished(model, pieces + added, found, field)


def _of_other_characters(proto: sentencepiece_model_pb2.ModelProto, names: Iterable[str]) -> list[_Piece]:
    """Pieces for the names that have no character of the model's own pieces; single characters only, unless unigram.

    They are less likely than any of the model's, which they never compete with.
    """
    characters = set().union(*(piece.piece for piece in proto.pieces), SPACE)
    longest = math.inf if proto.trainer_spec.model_type == _UNIGRAM else 1
    score = min(piece.score for piece in proto.pieces) - 1
    found = sorted(name for name in names if len(name) <= longest and characters.isdisjoint(name))
    return [_Piece(piece=name, score=score) for name in found]


def of_target(model: bytes, ids: dict[str, int], *, field: str, dictionary: str) -> Vocabulary:
    """The vocabulary that writes: exactly the entries of `ids`, read from `dictionary`, of which the softmax is made.

    Those that `model` lacks are written as they are, but no text is encoded with them. Pieces that the dictionary lacks
    are left out.
    """
    proto, pieces = _begun(model, ids, field)
    if proto.trainer_spec.model_type != _UNIGRAM and not {piece.piece for piece in proto.pieces} <= ids.keys():
        raise InputError(f"{dictionary} lacks pieces of {field}, which is no unigram model; it must hold all of them")
    pieces += [piece for piece in proto.pieces if piece.piece in ids and piece.piece not in _SPECIAL]
    extra = sorted(set(ids) - {piece.piece for piece in pieces}, key=ids.get)
    pieces += [_Piece(piece=name, score=0.0, type=_Piece.UNUSED) for name in extra]
    return _finished(model, pieces, [ids[piece.piece] for piece in pieces], field)


def _begun(model: bytes, ids: dict[str, int], field: str) -> tuple[sentencepiece_model_pb2.ModelProto, list[_Piece]]:
    """The parsed model, and the first three pieces of ours: padding, EOS, unknown."""
    load_pieces(model, field)
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    for name in ids:
        if not _is_symbol(name):
            raise InputError(f"vocabulary: the dictionary has {shown(name)}; a piece must be text, and not empty")
    for name in _SPECIAL:
        if name not in ids:
            wanted = "{}, {} and {}".format(*_SPECIAL)
            raise InputError(f"vocabulary: the dictionary has no {name}; it must have {wanted}")
    words = {piece.piece for piece in proto.pieces if SPACE in piece.piece}
    if words and words.isdisjoint(ids):  # single characters are symbols of other tokenisers too
        raise InputError(
            f"{field}: none of its pieces with {SPACE} is among the {len(ids)} symbols of the dictionary (vocab.json, "
            "dict.*.txt); give the model that tokenised the text"
        )
    known = {piece.piece: piece for piece in proto.pieces}
    pieces = [known.get(name) or _Piece(piece=name, score=0.0) for name in _SPECIAL]
    for piece, kind in zip(pieces, (_Piece.CONTROL, _Piece.CONTROL, _Piece.UNKNOWN), strict=True):
        piece.type = kind
    return proto, pieces


def _finished(model: bytes, pieces: list[_Piece], ids: list[int], field: str) -> Vocabulary:
    found = Vocabulary(_reordered(model, pieces), np.array(ids))
    load_pieces(found.model, f"vocabulary: the pieces of {field} with those of the dictionary")
    return found


def _is_symbol(name: str) -> bool:
    """Whether SentencePiece can have the name as a piece; lone surrogates, which JSON allows, are not UTF-8."""
    return bool(name) and "\0" not in name and lone_surrogate(name) is None


def _reordered(model: bytes, pieces: list[_Piece]) -> bytes:
    """The model with these pieces; the same bytes if nothing changes."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    spec = proto.trainer_spec
    if list(proto.pieces) == pieces and (spec.pad_id, spec.eos_id, spec.unk_id) == (PAD, EOS, UNKNOWN):
        return model
    del proto.pieces[:]
    proto.pieces.extend(pieces)
    set_special_pieces(spec, [piece.piece for piece in pieces[:3]])
    spec.vocab_size = len(pieces)
    return proto.SerializeToString()


def with_white_space_rules(model: bytes) -> bytes:
    """The SentencePiece model with rules that make one space of each run of white space, after its own rules.

    Our tokenizer does so before SentencePiece sees the text; other systems do not.
    """
    pieces = load_pieces(model, "vocabulary")
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    spec = proto.normalizer_spec
    if any(pieces.normalize(f"a{character}a") != pieces.normalize("a a") for character in _WHITE_SPACE):
        sentencepiece.set_min_log_level(2)
        has_rules = bool(spec.precompiled_charsmap)
        rules = dict(sentencepiece.SentencePieceNormalizer(model_proto=model).Decompile()) if has_rules else {}
        spec.name, spec.precompiled_charsmap = "", compiled_rules(rules | dict.fromkeys(_WHITE_SPACE, " "))
    elif spec.remove_extra_whitespaces:
        return model
    spec.remove_extra_whitespaces = True  # false with subword-nmt's codes
    return proto.SerializeToString()
