"""§5.1: subword tokenisation with SentencePiece; a vocabulary is joint or of one side.

Ids: 0 is padding and the start symbol, 1 EOS, 2 unknown (never produced by models with byte fallback).
"""

import functools
import hashlib
import io
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from t2t_jax.data.bpe_dropout import BpeDropout
from t2t_jax.data.plain_text import INVISIBLE, SPACES, collapse_spaces, compose, is_blank, plain_forms
from t2t_jax.errors import InputError, shown
from t2t_jax.files import lone_surrogate, without_line_ends

PAD, EOS, UNKNOWN = 0, 1, 2
SPACE = "▁"  # SentencePiece's mark at the beginning of a word or, in some vocabularies, at its end
LANGUAGE_CODE = re.compile(">>[^<>\\s]+<<")  # with which sources of Marian's multilingual models begin
_NUM_SPECIAL = 3
_RESERVED = re.compile("<pad>|</s>|<unk>|" + SPACE)  # pieces and spaces
_LONGEST = 1024  # subwords
MOST_BYTES = 1 << 24  # bytes of a SentencePiece file; 250,000 pieces take 5 million
_LONGEST_REPLACEMENT = 1024  # bytes that normalisation may put in place of one character; NFKC needs 33


def longest_whole(max_length: int) -> int:
    """The longest text, in subwords with EOS, that a model trained on `max_length` subwords takes in one piece."""
    return max(max_length, _LONGEST)


def train_vocabulary(
    sentences: Iterable[str],
    vocab_size: int,
    *,
    field: str = "data.vocab_size",
    kind: str = "bpe",
    byte_fallback: bool = True,
    character_coverage: float = 1.0,
    replace: Mapping[str, str] | None = None,
) -> bytes:
    """Trains a SentencePiece model of exactly `vocab_size` pieces and returns the contents of its file.

    With `byte_fallback`, 256 of the pieces are bytes: text → ids → text is then the identity, except that runs of white
    space become one space (`collapse_spaces`) and so does U+2581, SentencePiece's space. `character_coverage` is the
    fraction of the text whose characters are pieces; the remaining, rare ones are encoded as bytes. `replace` holds
    normalisation rules, from single characters to strings, for training and for encoding. Errors call the size `field`.
    """
    replace = dict(replace or {})
    if replace:  # an empty table takes its time, too
        sentences = map(operator.methodcaller("translate", str.maketrans(replace)), sentences)
    model = _train(
        sentences,
        vocab_size,
        field,
        model_type=kind,
        byte_fallback=byte_fallback,
        character_coverage=character_coverage,
    )
    return add_normalization(model, replace, field)


def train_symbols(sentences: Iterable[str], vocab_size: int) -> bytes:
    """The contents of the file of a SentencePiece model whose pieces are the symbols of the sentences.

    Symbols are separated by single spaces. `vocab_size` is the largest number of pieces, padding, EOS and unknown
    included. Text → ids → text is the identity for these symbols.
    """
    symbols = sorted({symbol for sentence in sentences for symbol in sentence.split(" ")})
    if reserved := next(filter(_RESERVED.search, symbols), None):
        raise InputError(
            f"data.train: {reserved!r} is a symbol of the targets; rename it: {_RESERVED.pattern} are reserved"
        )
    if (needed := len(symbols) + _NUM_SPECIAL) > vocab_size:
        raise InputError(
            f"data.vocab_size={vocab_size}: the training targets have {len(symbols):,} symbols; with padding, EOS and "
            f"unknown they need data.vocab_size={needed} or more"
        )
    return _train(
        symbols,
        needed,
        "data.vocab_size",
        model_type="word",
        use_all_vocab=True,
        character_coverage=1.0,
    )


def _train(sentences: Iterable[str], vocab_size: int, field: str, **options: Any) -> bytes:
    model, failed = io.BytesIO(), []

    def watched() -> Iterator[str]:
        try:
            yield from sentences
        except (Exception, KeyboardInterrupt) as error:
            failed.append(error)
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=watched(),
            model_writer=model,
            vocab_size=vocab_size,
            **options,
            normalization_rule_name="identity",
            max_sentence_length=1 << 20,
            pad_id=PAD,
            eos_id=EOS,
            unk_id=UNKNOWN,
            bos_id=-1,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        if failed:  # SentencePiece makes a RuntimeError of whatever reading the text raises
            raise failed[0] from None
        raise InputError(f"{field}={vocab_size}: {_reason(error)}") from None
    return model.getvalue()


def add_normalization(model: bytes, replace: Mapping[str, str], name: str) -> bytes:
    """A SentencePiece model with the normalisation rules `replace`, from single characters to strings.

    Errors call the model `name`. One that has other rules already is refused.
    """
    pieces = load_pieces(model, name)
    if all(pieces.normalize(f"a{old}a") == pieces.normalize(f"a{new}a") for old, new in replace.items()):
        return model
    changed = sentencepiece_model_pb2.ModelProto.FromString(model)
    if changed.normalizer_spec.precompiled_charsmap:
        raise InputError(
            f"{name} has normalisation rules of its own, to which those of data.cleaning can't be added; set "
            "data.cleaning.lowercase, normalize_punctuation and remove_nonprinting to False"
        )
    changed.normalizer_spec.name, changed.normalizer_spec.precompiled_charsmap = "user_defined", compiled_rules(replace)
    return changed.SerializeToString()


def compiled_rules(replace: Mapping[str, str]) -> bytes:
    """Normalisation rules as the `precompiled_charsmap` of a SentencePiece model."""
    sentencepiece.set_min_log_level(2)
    compiled = sentencepiece.SentencePieceNormalizer(norm_map=list(replace.items())).serialized_model_proto()
    return sentencepiece_model_pb2.ModelProto.FromString(compiled).normalizer_spec.precompiled_charsmap


def _reason(error: Exception) -> str:
    """SentencePiece's error message without the line of C++ code before it."""
    text = collapse_spaces(str(error)).replace("--character_coverage option", "data.character_coverage")
    return text.split("] ", 1)[-1] or "the vocabulary could not be trained on this text; try a smaller one"


def checked_lines(texts: Sequence[str]) -> list[str]:
    """The texts, each on one line; refuses lone surrogates."""
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise InputError(f"text {number}: must be a str; got {type(text).__name__}")
        if (at := lone_surrogate(text)) is not None:
            raise InputError(
                f"text {number}, character {at + 1}: {text[at]!a} is a lone surrogate; read the text as UTF-8, without "
                "errors='surrogateescape'"
            )
    return [collapse_spaces(text) for text in texts]


def read_model(path: Path, name: str) -> bytes:
    """The contents of a vocabulary's file; error messages call it `name`."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise InputError(f"{name} has {size:,} bytes; a vocabulary has at most {MOST_BYTES:,}")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{name} can't be read: {error.strerror}") from None


def load_pieces(model: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    """The SentencePiece processor for a file with these contents; error messages call the file `name`."""
    try:
        pieces = sentencepiece.SentencePieceProcessor()
        pieces.LoadFromSerializedProto(model)  # unlike the constructor, refuses empty contents
        for i in range(len(pieces)):  # pieces of a damaged model may not be UTF-8
            pieces.id_to_piece(i)
        longest = _longest_replacement(sentencepiece_model_pb2.ModelProto.FromString(model))
    except (RuntimeError, UnicodeDecodeError, MemoryError, DecodeError):  # protobuf is stricter than SentencePiece
        raise InputError(f"{name} is not a SentencePiece model, or is damaged; restore it from a copy") from None
    if longest > _LONGEST_REPLACEMENT:
        raise InputError(
            f"{name} replaces a character by {longest:,} bytes; at most {_LONGEST_REPLACEMENT} are allowed, so "
            "that memory stays bounded"
        )
    return pieces


def _longest_replacement(model: sentencepiece_model_pb2.ModelProto) -> int:
    """The most bytes that normalisation, denormalisation or the unknown piece put in place of one character."""
    maps = (model.normalizer_spec.precompiled_charsmap, model.denormalizer_spec.precompiled_charsmap)
    # Format: the size of a trie, the trie, then the replacements, each ended by a zero byte.
    replacements = [found for blob in maps for found in blob[4 + int.from_bytes(blob[:4], "little") :].split(b"\0")]
    return max(map(len, (*replacements, model.trainer_spec.unk_surface.encode())))


def set_special_pieces(spec: sentencepiece_model_pb2.TrainerSpec, names: Sequence[str]) -> None:
    """Gives padding, EOS and unknown, in a model that is assembled, the ids 0, 1 and 2; their pieces are `names`."""
    spec.pad_id, spec.eos_id, spec.unk_id, spec.bos_id = PAD, EOS, UNKNOWN, -1
    spec.pad_piece, spec.eos_piece, spec.unk_piece = names


def check_special_pieces(pieces: sentencepiece.SentencePieceProcessor, name: str) -> None:
    """Refuses models whose padding, EOS and unknown pieces do not have the ids 0, 1 and 2."""
    ids = pieces.pad_id(), pieces.eos_id(), pieces.unk_id()
    if ids != (PAD, EOS, UNKNOWN):
        raise InputError(
            f"{name}: padding, EOS and unknown must be pieces {PAD}, {EOS} and {UNKNOWN}; "
            f"got {ids}; train it with pad_id={PAD}, eos_id={EOS}, unk_id={UNKNOWN}, bos_id=-1"
        )


class Tokenizer:
    """Text ⇄ ids. Encoding appends EOS; decoding stops at the first EOS."""

    def __init__(self, path: Path):
        if not path.is_file():
            raise InputError(f"no vocabulary {path}; a run folder has it beside config.json")
        self.model = read_model(path, str(path))  # contents of the file
        self._pieces = load_pieces(self.model, str(path))
        check_special_pieces(self._pieces, str(path))
        self.checksum = hashlib.sha256(self.model).hexdigest()

    def __len__(self) -> int:
        return self._pieces.get_piece_size()

    @property
    def lowercases(self) -> bool:
        """Whether capitals are normalised to small letters, so that a model with this vocabulary writes lower case."""
        return self._pieces.normalize("A") == self._pieces.normalize("a")

    def plain(self, texts: Sequence[str]) -> list[str]:
        """The texts with plain forms of the spaces, invisible and decomposed characters that were not learnt.

        What is translated is read so; training text is encoded as it is. A blank text becomes "".
        """
        lines = checked_lines(texts)
        return ["" if is_blank(line) else compose(line, self._learnt).translate(self._plain_forms) for line in lines]

    @functools.cached_property
    def _learnt(self) -> frozenset[str]:
        """The characters of pieces that training text needed, and those that normalisation replaces itself.

        These are pieces of several characters, and single ones with the score of such, by which unigram models rank
        them. Any other single character may have occurred once, or, with a joint vocabulary, in the other language.
        """
        spm, ids = self._pieces, range(_NUM_SPECIAL, len(self))
        scores = {self.piece(i): spm.get_score(i) for i in ids if not (spm.is_byte(i) or spm.is_unused(i))}
        longer = {piece for piece in scores if len(piece.strip(SPACE)) > 1}
        least = min((scores[piece] for piece in longer), default=0.0)
        single = {piece for piece, score in scores.items() if len(piece) == 1 and score >= least}
        normalized = {c for c in SPACES + INVISIBLE if c != "\0" and c not in spm.normalize(f"a{c}a")}
        return frozenset(normalized.union(*longer, *single))

    @functools.cached_property
    def _plain_forms(self) -> dict[int, str]:
        return plain_forms(self._learnt)

    def encode(self, text: str) -> list[int]:
        """Ids of one sentence, EOS last."""
        return [*self._pieces.encode(*checked_lines([text])), EOS]

    def encode_many(self, texts: Sequence[str], num_threads: int = -1) -> list[list[int]]:
        """`encode` of each text, on `num_threads` threads; −1: on all cores."""
        return [[*ids, EOS] for ids in self._pieces.encode(checked_lines(texts), num_threads=num_threads)]

    def sample_many(self, texts: Sequence[str], rate: float, seed: int) -> list[list[int]]:
        """`encode_many` with random segmentations, the same for the same texts and seed (subword regularisation).

        `rate` is the probability with which BPE-dropout leaves out a merge.
        """
        return [[*ids, EOS] for ids in self._bpe_dropout.sample(checked_lines(texts), rate, seed)]

    @functools.cached_property
    def _bpe_dropout(self) -> BpeDropout:
        return BpeDropout(self._pieces, SPACE)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids` up to the first EOS, always a single line; padding is skipped."""
        text = self._pieces.decode([i for i in self._until_eos(ids) if i not in (PAD, EOS)])
        return without_line_ends(text.removesuffix(" "))  # with BPE codes the last word ends with a space

    def piece(self, id: int) -> str:
        """The piece with this id."""
        return self._pieces.id_to_piece(id)

    def pieces(self) -> list[str]:
        """All pieces, in the order of their ids."""
        return [self.piece(i) for i in range(len(self))]

    def tokens(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """The pieces of `ids` up to and with the first EOS."""
        return [self.piece(i) for i in self._until_eos(ids)]

    def ids(self, tokens: Sequence[str]) -> list[int]:
        """The ids of the `tokens` of one hypothesis, which need not end with EOS."""
        for number, token in enumerate(tokens, start=1):
            if not isinstance(token, str) or token not in self._id_of:
                raise InputError(f"tokens: {shown(token)} is no subword of the vocabulary; give those of a hypothesis")
            if token == self.piece(EOS) and number < len(tokens):
                raise InputError(
                    f"tokens: {token} is number {number} of {len(tokens)}, but ends a hypothesis; give one"
                )
        return [self._id_of[token] for token in tokens]

    @functools.cached_property
    def _id_of(self) -> dict[str, int]:
        return {piece: id for id, piece in enumerate(self.pieces())}

    def _until_eos(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        ids = [int(i) for i in ids]
        return ids[: ids.index(EOS) + 1] if EOS in ids else ids
