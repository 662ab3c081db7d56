"""BPE-dropout (Provilkov et al., 2020): random segmentations by a SentencePiece BPE model, reproducible on any machine.

SentencePiece draws such segmentations itself, but others in each process, whatever its seed is.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from t2t_jax.errors import InputError

_TYPES = sentencepiece_model_pb2.ModelProto.SentencePiece
_NO_MERGE = np.iinfo(np.int64).max  # the rank of two symbols that are not merged


class BpeDropout:
    """A BPE model whose merges can be left out at random.

    Symbols are ids of pieces, or, for characters that are no piece, numbers above them.
    """

    def __init__(self, processor: sentencepiece.SentencePieceProcessor, space: str):
        """Refuses models whose segmentations are not merges of characters within words."""
        model = sentencepiece_model_pb2.ModelProto.FromString(processor.serialized_model_proto())
        self._processor, self._space = processor, space
        self._space_ends_word = model.trainer_spec.treat_whitespace_as_suffix
        self._unknown = processor.unk_id()
        self._ids = {piece.piece: i for i, piece in enumerate(model.pieces) if piece.type == _TYPES.NORMAL}
        self._bytes = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        words = (piece[:-1] if self._space_ends_word else piece[1:] for piece in self._ids)
        if (
            model.trainer_spec.model_type != model.trainer_spec.BPE
            or any(piece.type in (_TYPES.USER_DEFINED, _TYPES.UNUSED) for piece in model.pieces)
            or any(space in word for word in words)
        ):
            raise InputError(
                "data.segmentations: several need a BPE vocabulary (data.vocab_kind=bpe) of parts of words, without "
                "user-defined pieces; give 1"
            )
        by_score = np.argsort([-piece.score for piece in model.pieces], kind="stable")
        self._rank = np.empty(len(by_score), np.int64)
        self._rank[by_score] = np.arange(len(by_score))
        self._num_initial = sum(piece.score > 0 for piece in model.pieces)  # by `model_of_merges`
        self._make_merges()

    def _make_merges(self) -> None:
        """A sorted table of pairs of symbols, each as one number, and of the symbols that they become."""
        self._base, found = len(self._rank), {}
        for piece, merged in self._ids.items():
            for cut in range(1, len(piece)):
                left, right = self._ids.get(piece[:cut]), self._ids.get(piece[cut:])
                if left is not None and right is not None:
                    found[left * self._base + right] = merged
        pairs = [*sorted(found), np.iinfo(np.int64).max]  # the last is above any pair: searches stay inside
        self._pairs, self._merged = np.array(pairs), np.array([found.get(pair, 0) for pair in pairs])

    def sample(self, texts: Sequence[str], rate: float, seed: int) -> list[list[int]]:
        """Ids of each text, which has one line; `rate` is the probability with which a merge is left out each time."""
        normalized = self._processor.normalize(list(texts))
        text = "".join(normalized)
        if not text:
            return [[] for _ in texts]
        characters = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        distinct, index = np.unique(characters, return_inverse=True)
        symbols = np.array([self._ids.get(chr(c), self._base + n) for n, c in enumerate(distinct)], np.int64)[index]
        ends = np.cumsum([len(line) for line in normalized])
        words = self._words(characters, ends)
        text_of_word = np.searchsorted(ends, np.flatnonzero(np.diff(words, prepend=-1)), side="right")
        symbols, words = self._merge(*self._initial(symbols, words), rate, np.random.default_rng(seed))
        bounds = np.searchsorted(text_of_word[words], np.arange(1, len(texts)))
        return [list(self._pieces(part.tolist(), distinct)) for part in np.split(symbols, bounds)]

    def _words(self, characters: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """The number of the word that each character is in; no symbol is a part of two."""
        spaces = characters == ord(self._space)
        starts = np.zeros(len(characters) + 1, bool)
        starts[ends] = True  # of the next text
        starts[1:] |= spaces if self._space_ends_word else np.append(spaces[1:], False)
        starts[0] = False
        return np.cumsum(starts[:-1])

    def _initial(self, symbols: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The symbols that merges start from, and their words: subword-nmt's last one has the end of the word."""
        ranks, merged = self._possible(symbols, words)
        joined = np.flatnonzero(ranks < self._num_initial)
        symbols[joined] = merged[joined]
        is_kept = np.ones(len(symbols), bool)
        is_kept[joined + 1] = False
        return symbols[is_kept], words[is_kept]

    def _merge(
        self, symbols: np.ndarray, words: np.ndarray, rate: float, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Merges symbols within words until no merge is left, and returns the remaining ones with their words.

        In each round, of the possible merges of a word those that the dropout leaves compete; the one of the highest
        score, the leftmost of several, is applied. A word without any is complete.
        """
        complete = []
        while len(symbols):
            ranks, merged = self._possible(symbols, words)
            ranks[rng.random(len(ranks)) < rate] = _NO_MERGE
            first = np.flatnonzero(np.diff(words, prepend=-1))  # symbol of each word
            best = np.minimum.reduceat(ranks, first)
            sizes = np.diff(first, append=len(words))
            goes_on = np.repeat(best != _NO_MERGE, sizes)
            complete.append((symbols[~goes_on], words[~goes_on]))
            is_best = np.flatnonzero(goes_on & (ranks == np.repeat(best, sizes)))
            chosen = is_best[np.diff(words[is_best], prepend=-1) != 0]
            symbols[chosen] = merged[chosen]
            goes_on[chosen + 1] = False
            symbols, words = symbols[goes_on], words[goes_on]
        symbols, words = (np.concatenate(parts) for parts in zip(*complete, strict=True))
        order = np.argsort(words, kind="stable")
        return symbols[order], words[order]

    def _possible(self, symbols: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each symbol, the rank of its merge with the next one and what they become."""
        following = np.append(symbols[1:], 0)
        pairs = symbols * self._base + following
        place = np.searchsorted(self._pairs, pairs)
        known = (symbols < self._base) & (following < self._base) & (words == np.append(words[1:], -1))
        known, merged = known & (self._pairs[place] == pairs), self._merged[place]
        return np.where(known, self._rank[merged], _NO_MERGE), merged

    def _pieces(self, symbols: list[int], characters: np.ndarray) -> Iterator[int]:
        """The ids of symbols; characters that are no piece become bytes, or a run of them becomes unknown."""
        for is_piece, run in itertools.groupby(symbols, lambda symbol: symbol < self._base):
            if is_piece:
                yield from run
            elif self._bytes[0] != self._unknown:
                text = "".join(chr(characters[symbol - self._base]) for symbol in run)
                yield from (self._bytes[byte] for byte in text.encode())
            else:
                yield self._unknown
