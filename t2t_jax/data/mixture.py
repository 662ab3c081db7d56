"""§5.1: mixtures of training texts: how often a pair occurs in an epoch, by the weight of its text."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

_FILLED = 0.97  # of the slots that pairs of a fractional weight share, at least


class Mixture:
    """The pairs of each epoch, a pure function of the sizes of the texts, their weights, the seed and the epoch.

    The pairs of text t, `sizes[t]` of them, follow those of the texts before it. A pair of weight 1 occurs once in an
    epoch, one of weight 2 twice, one of weight 0.5 in every second epoch.

    Every epoch consists of as many slots of each group of pairs, so that epochs are equally long. A slot for which
    there is no pair in an epoch has the index of no pair: the number of pairs plus that of the group.
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

    def slot_lengths(self, source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The lengths of the slots for pairs of these lengths, where a group is all pairs of equal lengths.

        Of a text with a fractional weight w, each n pairs of similar lengths share n·w slots, about a whole number,
        that are as long as the longest of them: most slots for rare lengths would be empty otherwise.
        """
        sides = source.copy(), target.copy()
        for pairs, weight in self._texts:
            if not (fraction := math.modf(weight)[0]):
                continue
            slots = (round(n * fraction, 6) for n in itertools.count(1))
            size = next(n for n, filled in enumerate(slots, start=1) if filled >= _FILLED * math.ceil(filled))
            falling_and_rising = np.where(source[pairs] % 2, -1, 1) * target[pairs].astype(np.int32)
            order = pairs[np.lexsort((falling_and_rising, source[pairs]))]
            starts = np.arange(0, len(order), size)
            for side in sides:
                longest = np.maximum.reduceat(side[order], starts)
                side[order] = np.repeat(longest, size)[: len(order)]
        return sides

    def group(self, group_of_pair: np.ndarray, num_groups: int) -> np.ndarray:
        """Fixes the number of slots of each group, and returns it."""
        total, self._fractions = np.zeros(num_groups, np.int64), []
        self._num_pairs = len(group_of_pair)
        for text, (pairs, weight) in enumerate(self._texts):
            rng = np.random.default_rng([self._seed, text])
            order = rng.permutation(pairs)
            order = order[np.argsort(group_of_pair[order], kind="stable")]
            sizes = np.bincount(group_of_pair[pairs], minlength=num_groups)
            # Rounded: the fraction of 1.1 is a little more than 0.1 in floating point.
            wanted = np.round(math.modf(weight)[0] * sizes, 6)
            self._fractions.append((order, sizes, wanted, rng.random(num_groups)))
            total += int(weight) * sizes + np.ceil(wanted).astype(np.int64)
        return total

    def epoch(self, epoch: int) -> np.ndarray:
        """The pairs in the slots of an epoch, in no particular order."""
        found = [np.tile(pairs, int(weight)) for pairs, weight in self._texts]
        for order, sizes, wanted, phases in self._fractions:
            # Of each group `wanted` pairs on average: by epoch n, n times as many, rounded down after adding the phase.
            before, after = (np.floor(n * wanted + phases).astype(np.int64) for n in (epoch, epoch + 1))
            taken = after - before
            # Those that follow the ones of the epoch before: all occur equally often.
            number = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
            within = (np.repeat(before, taken) + number) % np.repeat(sizes, taken)
            found.append(order[np.repeat(np.cumsum(sizes) - sizes, taken) + within])
            empty = np.ceil(wanted).astype(np.int64) - taken
            found.append(np.repeat(np.arange(len(sizes), dtype=np.uint32) + np.uint32(self._num_pairs), empty))
        return np.concatenate(found)
