"""§5.1: mixtures of training texts: how often a pair occurs in an epoch, by the weight of its text."""

import math
from collections.abc import Sequence

import numpy as np


class Mixture:
    """The pairs of each epoch, a pure function of the sizes of the texts, their weights, the seed and the epoch.

    The pairs of text t, `sizes[t]` of them, follow those of the texts before it. A pair of weight 1 occurs once in an
    epoch, one of weight 2 twice, one of weight 0.5 in every second epoch.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int):
        ends = np.cumsum(sizes)
        self._texts = [
            (np.arange(end - size, end, dtype=np.uint32), weight)
            for end, size, weight in zip(ends, sizes, weights, strict=True)
        ]
        self._seed = seed

    def occurrences(self, num_pairs: int) -> np.ndarray:
        """How often each pair occurs in an epoch, at most."""
        found = np.empty(num_pairs, np.int64)
        for pairs, weight in self._texts:
            found[pairs] = math.ceil(weight)
        return found

    def group(self, group_of_pair: np.ndarray, num_groups: int) -> np.ndarray:
        """Fixes of how many pairs of each group every epoch consists, so that epochs are equally long; returns that."""
        total, self._fractions = np.zeros(num_groups, np.int64), []
        for text, (pairs, weight) in enumerate(self._texts):
            order = np.random.default_rng([self._seed, text]).permutation(pairs)
            order = order[np.argsort(group_of_pair[order], kind="stable")]
            sizes = np.bincount(group_of_pair[pairs], minlength=num_groups)
            # Rounded first: the fraction of 1.1 is a little more than 0.1 in floating point.
            taken = np.ceil(np.round(math.modf(weight)[0] * sizes, 6)).astype(np.int64)
            self._fractions.append((order, sizes, taken))
            total += int(weight) * sizes + taken
        return total

    def epoch(self, epoch: int) -> np.ndarray:
        """The pairs of an epoch, in no particular order."""
        found = [np.tile(pairs, int(weight)) for pairs, weight in self._texts]
        for order, sizes, taken in self._fractions:
            # Of each group, those that follow the ones of the epoch before: all occur equally often.
            number = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
            within = (np.repeat(epoch * taken, taken) + number) % np.repeat(sizes, taken)
            found.append(order[np.repeat(np.cumsum(sizes) - sizes, taken) + within])
        return np.concatenate(found)
