"""A SentencePiece model of another system, its pieces put in our order: 0 padding, 1 EOS, 2 unknown."""

from typing import NamedTuple

import numpy as np
from sentencepiece import sentencepiece_model_pb2

from t2t_jax.data.tokenizer import EOS, PAD, UNKNOWN, load_pieces
from t2t_jax.errors import InputError, shown

_Piece = sentencepiece_model_pb2.ModelProto.SentencePiece


class Vocabulary(NamedTuple):
    """`model` is a SentencePiece model file; `ids[i]` is the other system's id of its piece i, −1 where it has none."""

    model: bytes
    ids: np.ndarray


def in_our_order(
    model: bytes, ids: dict[str, int], *, pad: str, eos: str, unknown: str, field: str = "vocabulary"
) -> Vocabulary:
    """The pieces of `model` after our three; symbols that only the other system has follow, never cut from text.

    Control symbols that only the model has are left out. A piece that only the model has stays, so that longer
    pieces can still be merged from it, but is unused: text is cut into other pieces instead.
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
    """Whether SentencePiece can have it as a piece: half of a surrogate pair, which JSON can hold, is no text."""
    try:
        return bool(name.encode()) and "\0" not in name
    except UnicodeEncodeError:
        return False


def _reordered(model: bytes, pieces: list[_Piece]) -> bytes:
    """The model with these pieces; its very bytes if nothing changes."""
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
