"""Reorders the pieces of another system's SentencePiece model to our ids: 0 padding, 1 EOS, 2 unknown."""

from typing import NamedTuple

import numpy as np
from sentencepiece import sentencepiece_model_pb2

from t2t_jax.data.tokenizer import EOS, PAD, UNKNOWN, load_pieces
from t2t_jax.errors import InputError, shown

_Piece = sentencepiece_model_pb2.ModelProto.SentencePiece


class Vocabulary(NamedTuple):
    """`model` is the contents of a SentencePiece file; `ids[i]` is the other system's id of piece i, or −1."""

    model: bytes
    ids: np.ndarray


def in_our_order(
    model: bytes, ids: dict[str, int], *, pad: str, eos: str, unknown: str, field: str = "vocabulary"
) -> Vocabulary:
    """The SentencePiece model with our special pieces first, and the other system's id of each piece.

    `ids` is the other system's dictionary. Pieces that only the dictionary has are appended as control symbols, which
    encoding never produces. Control symbols that only the model has are dropped. Its other pieces (bytes excepted)
    that the dictionary lacks become unused: they still take part in merges, but encoding splits them.
    """
    load_pieces(model, field)
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model)
    for name in ids:
        if not _is_symbol(name):
            raise InputError(f"vocabulary: the dictionary has {shown(name)}; a piece must be text, and not empty")
    for name in (pad, eos, unknown):
        if name not in ids:
            raise InputError(f"vocabulary: the dictionary has no {name}; it must have {pad}, {eos} and {unknown}")
    special = {pad: _Piece.CONTROL, eos: _Piece.CONTROL, unknown: _Piece.UNKNOWN}
    known = {piece.piece: piece for piece in proto.pieces}
    pieces = [known.get(name) or _Piece(piece=name, score=0.0) for name in special]
    for piece, kind in zip(pieces, special.values(), strict=True):
        piece.type = kind
    for piece in proto.pieces:
        name, is_text = piece.piece, piece.type not in (_Piece.CONTROL, _Piece.UNKNOWN)
        if name not in special and (name in ids or is_text):
            pieces.append(piece)
            if name not in ids and piece.type != _Piece.BYTE:
                piece.type = _Piece.UNUSED
    extra = sorted(set(ids) - set(known) - set(special), key=ids.get)
    pieces += [_Piece(piece=name, score=0.0, type=_Piece.CONTROL) for name in extra]
    found = Vocabulary(_reordered(model, pieces), np.array([ids.get(piece.piece, -1) for piece in pieces]))
    load_pieces(found.model, f"vocabulary: the pieces of {field} with those of the dictionary")
    return found


def _is_symbol(name: str) -> bool:
    """Whether SentencePiece can have the name as a piece; lone surrogates, which JSON allows, are not UTF-8."""
    try:
        return bool(name.encode()) and "\0" not in name
    except UnicodeEncodeError:
        return False


def _reordered(model: bytes, pieces: list[_Piece]) -> bytes:
    """The model with these pieces; the same bytes if nothing changes."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model)
    spec = proto.trainer_spec
    if list(proto.pieces) == pieces and (spec.pad_id, spec.eos_id, spec.unk_id) == (PAD, EOS, UNKNOWN):
        return model
    del proto.pieces[:]
    proto.pieces.extend(pieces)
    spec.pad_id, spec.eos_id, spec.unk_id, spec.bos_id = PAD, EOS, UNKNOWN, -1
    spec.pad_piece, spec.eos_piece, spec.unk_piece = (pieces[i].piece for i in (PAD, EOS, UNKNOWN))
    spec.vocab_size = len(pieces)
    return proto.SerializeToString()
