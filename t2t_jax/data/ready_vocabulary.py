"""§5.1: ready-made vocabularies: a SentencePiece model, or BPE merges in subword-nmt's format.

Preprocessed WMT14 data comes with such merges ("BPE codes"): one per line, in the order in which they are applied, with
`</w>` for the end of a word. They apply to tokenised text that is not yet split into subwords.
"""

import collections
from collections.abc import Iterable, Mapping
from pathlib import Path

from sentencepiece import sentencepiece_model_pb2

from t2t_jax.data.tokenizer import (
    SPACE,
    add_normalization,
    check_special_pieces,
    load_pieces,
    read_model,
    set_special_pieces,
)
from t2t_jax.errors import InputError

_Piece = sentencepiece_model_pb2.ModelProto.SentencePiece
MIN_COUNT = 5  # characters that are in no merge become pieces from this count on; rarer ones are encoded as bytes


def ready_vocabulary(
    path: Path, sentences: Iterable[str], field: str = "data.vocabulary", replace: Mapping[str, str] | None = None
) -> bytes:
    """The SentencePiece model in `path`, or one that applies the BPE merges in `path`.

    In the second case, characters of `sentences` that are in no merge become pieces too. `replace` holds normalisation
    rules for encoding, from single characters to strings; a SentencePiece model that has other rules is refused.
    """
    if not path.is_file():
        raise InputError(f"{field}: no file {path}; give a SentencePiece model or subword-nmt's codes")
    name = f"{field}={path}"
    content = read_model(path, name)
    try:
        merges = _merges(content.decode("utf-8-sig"))
    except (UnicodeDecodeError, ValueError):
        model = content
    else:
        _check_kind(name, merges)
        model = model_of_merges(merges, _alphabet(sentences))
    return add_normalization(_checked(name, model), replace or {}, name)


def is_merges(path: str | Path) -> bool:
    """Whether a file holds BPE merges and no SentencePiece model."""
    try:
        return bool(_merges(Path(path).read_text("utf-8-sig")))
    except ValueError:
        return False


def _checked(name: str, model: bytes) -> bytes:
    """The model, after checking that it can encode text; error messages call it `name`."""
    try:
        pieces = load_pieces(model, name)
    except InputError as error:
        raise InputError(f"{name} is neither a SentencePiece model nor subword-nmt's codes ({error})") from None
    check_special_pieces(pieces, name)
    return model


def _merges(text: str) -> list[tuple[str, str]]:
    """The merges in the text of a file of BPE codes; ValueError if it is something else."""
    lines = [line for line in text.split("\n") if line and not line.startswith("#version")]
    pairs = [tuple(line.removesuffix("\r").split(" ")) for line in lines]
    if not pairs or any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise ValueError("not merges")
    return pairs


def _check_kind(name: str, merges: list[tuple[str, str]]) -> None:
    """Refuses other files of two columns, of which few lines or none would ever apply as merges."""
    if any("</w>" in piece for pair in merges for piece in pair):
        return
    if any("Ġ" in piece for pair in merges for piece in pair):  # stands for a space; also a letter of Maltese
        kind = "the merges of a byte-level BPE, as GPT-2's"
    elif all(second.isdecimal() for _, second in merges):
        kind = "a list of words with counts"
    else:
        return
    raise InputError(
        f"{name} has no merge with </w>, the end of a word: it is {kind}; give the output of subword-nmt learn-bpe"
    )


def _alphabet(sentences: Iterable[str]) -> set[str]:
    """The characters that occur at least `MIN_COUNT` times."""
    counts = collections.Counter()
    for sentence in sentences:
        counts.update(sentence)
    del counts["\0"]  # SentencePiece cannot have it as a piece
    return {character for character, count in counts.items() if count >= MIN_COUNT and not character.isspace()}


def model_of_merges(merges: list[tuple[str, str]], alphabet: Iterable[str] = ()) -> bytes:
    """A SentencePiece BPE model that applies these merges in this order, like subword-nmt.

    The score of a piece is minus the rank of its merge, as SentencePiece merges the pair with the highest score first.
    Pieces of a character and the end of a word, here a space, have the highest score: subword-nmt starts from them.
    Only in its version 0.1 is the end of a word a symbol of its own, which the merges join to others.
    SentencePiece may also merge two pieces into a third that has another merge; this has not been seen on real text.
    """
    merged = ["".join(pair).replace("</w>", SPACE) for pair in merges]
    characters = sorted({c for piece in merged for c in piece.replace(SPACE, "")} | set(alphabet) - {SPACE})
    is_first_version = any("</w>" in pair for pair in merges)
    scores = {} if is_first_version else {character + SPACE: 1.0 for character in characters}
    for rank, piece in enumerate(merged, start=1):
        scores.setdefault(piece, -float(rank))
    for character in (*characters, SPACE):
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
    set_special_pieces(spec, list(special)[:3])
    normalizer = model.normalizer_spec
    normalizer.name, normalizer.add_dummy_prefix, normalizer.escape_whitespaces = "identity", True, True
    normalizer.remove_extra_whitespaces = False
    return model.SerializeToString()
