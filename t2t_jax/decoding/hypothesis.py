"""A translation, as the translator returns it; translations of the parts of a line joined to one of the whole."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from t2t_jax.data.plain_text import NO_SPACE_AFTER


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One translation. `log_prob` is the natural logarithm, summed over `tokens` with EOS.

    `score` = log_prob / ((5 + num_tokens) / 6)^alpha. An unfinished one reached the length limit without EOS. `parts`
    is in how many parts the line was translated. `repairs` counts what had to be repaired to make `text` of the tokens:
    nothing in translation; in parsing see trees.py.
    """

    text: str
    tokens: list[str]
    log_prob: float
    score: float
    num_tokens: int
    token_log_probs: list[float]
    finished: bool = True
    repairs: Mapping[str, int] = dataclasses.field(default_factory=dict)
    parts: int = 1


def empty(finished: bool = True) -> Hypothesis:
    return Hypothesis(text="", tokens=[], log_prob=0.0, score=0.0, num_tokens=0, token_log_probs=[], finished=finished)


def join(parts: list[list[Hypothesis]], alpha: float) -> list[Hypothesis]:
    """The hypotheses of a sentence from those of its parts: the best of each, then the second best of each, …"""
    if len(parts) < 2:
        return parts[0] if parts else [empty()]
    joined = [_concatenate(ranked, alpha) for ranked in zip(*parts, strict=False)]  # as many as every part has
    return sorted(joined, key=lambda hypothesis: (not hypothesis.finished, -hypothesis.score))


def _concatenate(parts: Sequence[Hypothesis], alpha: float) -> Hypothesis:
    log_prob, num_tokens = sum(part.log_prob for part in parts), sum(part.num_tokens for part in parts)
    return Hypothesis(
        text=functools.reduce(_append, (part.text for part in parts), ""),
        tokens=[token for part in parts for token in part.tokens],
        log_prob=log_prob,
        score=log_prob / ((5 + num_tokens) / 6) ** alpha,
        num_tokens=num_tokens,
        token_log_probs=[log_prob for part in parts for log_prob in part.token_log_probs],
        finished=all(part.finished for part in parts),
        parts=len(parts),
    )


def _append(text: str, part: str) -> str:
    """The text, and that of its next part, with a space between where the language has one."""
    is_apart = text and part and not NO_SPACE_AFTER.match(text[-1])
    return f"{text} {part}" if is_apart else text + part
