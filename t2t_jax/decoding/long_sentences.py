"""§6.1: a line of any length in bounded memory: beyond a limit, its parts are translated one by one."""

from collections.abc import Callable, Sequence

from t2t_jax.data.tokenizer import EOS

_SENTENCE_ENDS = (".", "!", "?", "…", ":", ";")
_FULL_WIDTH_ENDS = ("。", "！", "？")  # of scripts without spaces
_SPACE = "▁"  # SentencePiece's: at the beginning of a word or, where pieces are made so, at its end


def cut(ids: Sequence[int], piece_of: Callable[[int], str], length: int) -> list[list[int]]:
    """`ids`, EOS last, in parts of at most `length` with an EOS each.

    Each cut is the last of the best ones in the second half of the room there is: after a sentence, else between
    words, else between characters, else anywhere. `piece_of` is the text of a subword.
    """
    ids, parts, start, room = list(ids[:-1]), [], 0, max(1, length - 1)
    while len(ids) - start > room:
        places = range(start + room, start + room // 2, -1)
        end = max(places, key=lambda place: _quality(piece_of(ids[place - 1]), piece_of(ids[place])))
        parts.append([*ids[start:end], EOS])
        start = end
    return [*parts, [*ids[start:], EOS]]


def _quality(before: str, after: str) -> int:
    """How good it is to cut between two subwords."""
    text = before.strip(_SPACE)
    if text.endswith(_FULL_WIDTH_ENDS):
        return 3
    if after.startswith(_SPACE) or before.endswith(_SPACE):
        return 3 if text.endswith(_SENTENCE_ENDS) else 2
    return 0 if _is_inside_character(after) else 1


def _is_inside_character(piece: str) -> bool:
    """Whether it is a byte that never begins a character of UTF-8."""
    return len(piece) == 6 and piece.startswith("<0x") and 0x80 <= int(piece[3:5], 16) < 0xC0
