"""Statistical significance of a difference in sacreBLEU: the paired bootstrap (Koehn, 2004)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from sacrebleu.metrics import BLEU

RESAMPLES, SEED = 1000, 12345  # sacreBLEU's defaults


class Comparison(NamedTuple):
    """`difference` is score − baseline; `interval` is the 95 % interval of the resampled differences."""

    score: float
    baseline: float
    difference: float
    interval: tuple[float, float]
    p_value: float
    resamples: int
    seed: int


def paired_bootstrap(
    hypotheses: Sequence[str],
    baseline: Sequence[str],
    references: Sequence[str],
    *,
    tokenizer: str = "13a",
    lowercase: bool = False,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Comparison:
    """Scores both translations on the same resampled test sets, whose sentences are drawn with replacement.

    `tokenizer` is one of sacreBLEU's; with `lowercase` it ignores case. The p value is that of its paired bootstrap:
    the share of resamples in which |difference| exceeds its mean by at least |score − baseline|. sacreBLEU has "more
    than"; "at least" gives equal translations p = 1. In spite of the absolute values it is one-tailed: unless the
    scores are close, all differences have one sign, and only one tail of them is counted. The two-sided p is twice as
    large; the interval excludes 0 where that is below about 0.05.
    """
    statistics = [_statistics(side, references, tokenizer, lowercase) for side in (hypotheses, baseline)]
    score, other = (_bleu(rows.sum(0)) for rows in statistics)
    random, size = np.random.default_rng(seed), len(references)
    draws = (np.bincount(random.choice(size, size=size), minlength=size) for _ in range(resamples))
    both = np.concatenate(statistics, axis=1).astype(np.float64)  # sums of whole numbers: exact, and fast
    differences = np.subtract(*map(_bleu_of_each, np.split(np.array([draw @ both for draw in draws]), 2, axis=1)))
    low, high = np.quantile(differences, (0.025, 0.975))
    sizes = np.abs(differences)
    larger = int(np.sum(sizes - sizes.mean() >= abs(score - other)))
    p_value = (larger + 1) / (resamples + 1)
    return Comparison(score, other, score - other, (float(low), float(high)), p_value, resamples, seed)


def _statistics(hypotheses: Sequence[str], references: Sequence[str], tokenizer: str, lowercase: bool) -> np.ndarray:
    """BLEU's sufficient statistics, [sentences, 10]: both lengths, then matching and all n-grams of orders 1 to 4."""
    bleu = BLEU(force=True, tokenize=tokenizer, lowercase=lowercase)
    scores = [bleu.corpus_score([h], [[r]]) for h, r in zip(hypotheses, references, strict=True)]
    return np.array([[s.sys_len, s.ref_len, *s.counts, *s.totals] for s in scores], np.int64)


def _bleu_of_each(sums: np.ndarray) -> np.ndarray:
    """`_bleu` of many test sets, [test sets, 10], up to rounding."""
    sys_len, ref_len, counts, totals = sums[:, 0], sums[:, 1], sums[:, 2:6], sums[:, 6:]
    is_smoothed = (counts == 0).any(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_precision, log_penalty = np.log(counts / totals).mean(axis=1), np.minimum(1 - ref_len / sys_len, 0)
        scores = 100 * np.exp(log_precision + log_penalty)
    scores[is_smoothed] = [_bleu(row) for row in sums[is_smoothed].astype(np.int64)]
    return scores


def _bleu(row: np.ndarray) -> float:
    """sacreBLEU from the summed statistics of a test set."""
    sys_len, ref_len, *ngrams = row.tolist()
    return BLEU.compute_bleu(ngrams[:4], ngrams[4:], sys_len, ref_len, smooth_method="exp").score
