"""§6.1: the options of a search, which check themselves."""

import dataclasses
import math
from typing import Any

from t2t_jax.decoding.constraints import Constraint, LogitsProcessor
from t2t_jax.decoding.sampling import Sampling
from t2t_jax.decoding.traced_fields import traced_fields
from t2t_jax.errors import InputError, shown
from t2t_jax.validation import Range, check_number, check_ranges, choice

# When a sentence may stop before its length limit; only the first never changes the result.
EARLY_STOPS = ("exact", "best_finished", "beam_full")

# Memory grows with the beam size; compile time grows with the n-gram size and with the number of groups.
_RANGES = {
    "beam_size": Range(1, 256),
    "alpha": Range(0, 10),
    "n_best": Range(1, 256),
    "min_length": Range(0, 4096),
    "no_repeat_ngram": Range(0, 100),
    "groups": Range(1, 64),
    "diversity": Range(0, 1000),  # far more than log-probabilities differ by, which it must not round away
}


@traced_fields("alpha", "diversity", "sampling")
@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """What to search for; checks itself.

    Beam search with `beam_size` hypotheses and a length penalty of exponent `alpha` returns the `n_best` best ones,
    each of at least `min_length` tokens, EOS included. `no_repeat_ngram` blocks repeated n-grams of this size; 0: off.
    `groups` divides the beam for diverse beam search: each group subtracts `diversity` from a token's log-probability
    for every hypothesis of an earlier group that has chosen the token at the same step. A sentence stops early by the
    rule `early_stop`: 'exact' when no continuation can enter the `n_best` any more, 'best_finished' when none of the
    alive hypotheses scores better as it stands than the `n_best` finished ones, 'beam_full' when as many hypotheses
    have finished as the beam holds, or by 'exact' before. With `sampling`, the result is `n_best` independent samples
    instead. Equal hypotheses, of groups or samples, are returned once: there may be fewer than `n_best`. `constraint`
    is a `Constraint`, or a bare logits processor: one whose largest bonus is not known (constraints.py).

    Other values of `alpha`, `diversity` and the temperature of `sampling` run the programs that are compiled already.
    """

    beam_size: int = 4
    alpha: float = 0.6
    n_best: int = 1
    min_length: int = 0
    no_repeat_ngram: int = 0
    groups: int = 1
    diversity: float = 0.5
    early_stop: str = "exact"
    sampling: Sampling | None = None
    constraint: Constraint | LogitsProcessor | None = None

    def __post_init__(self):
        check_ranges(_RANGES, self)
        choice("early_stop", self.early_stop, EARLY_STOPS)
        if not isinstance(self.constraint, Constraint | None):
            object.__setattr__(self, "constraint", Constraint(self.constraint, largest_bonus=math.inf))
        if not isinstance(self.sampling, Sampling | None):
            raise InputError(f"sampling must be a Sampling or None; got {shown(self.sampling)}; try Sampling()")
        if self.n_best > self.beam_size and not self.sampling:
            raise InputError(f"n_best must be between 1 and beam_size={self.beam_size}; got {self.n_best}")
        if self.sampling and self.groups > 1:
            raise InputError(f"groups={self.groups} is for beam search, samples are independent; leave it at 1")
        if self.beam_size % self.groups:
            raise InputError(f"groups must divide beam_size={self.beam_size}; got {self.groups}")

    @property
    def width(self) -> int:
        """W, the number of hypotheses of each sentence."""
        return self.n_best if self.sampling else self.beam_size

    @property
    def group_size(self) -> int:
        """The number of hypotheses in each group of diverse beam search."""
        return self.width // self.groups

    @property
    def finished_per_group(self) -> int:
        """How many finished hypotheses each group keeps."""
        return -(-self.n_best // self.groups)

    @property
    def largest_bonus(self) -> float:
        """The most, in nats, that the constraint can raise a token's log-probability by; infinite if unknown."""
        return self.constraint.largest_bonus if self.constraint else 0.0


def check_options(
    *,
    max_extra_length: int = 0,
    constrained: bool = False,
    split_sentences: bool = False,
    min_length: int | None = None,
    **options: Any,
) -> SearchOptions:
    """The options of the search in those of `Translator.translate`; refuses what does not exist or makes no sense.

    Without `min_length`, a translation has a token before EOS at least, as in fairseq and CTranslate2: a weak model may
    give the empty one more probability than any other. What is `constrained` is as short as its grammar allows.
    """
    known = [field.name for field in dataclasses.fields(SearchOptions)]
    known += ["max_extra_length", "prefixes", "constrained", "split_sentences", "seed"]
    for name in options:
        choice("option of translate", name, known)
    if min_length is None:
        min_length = 0 if constrained else 2
    search = SearchOptions(min_length=min_length, **options)
    if not isinstance(split_sentences, bool):
        raise InputError(f"split_sentences must be True or False; got {shown(split_sentences)}")
    if constrained:
        for name in ("no_repeat_ngram", "min_length"):
            if value := getattr(search, name):
                raise InputError(
                    f"{name}={value}: may leave no output that is well-formed; leave out constrained or it"
                )
    check_number("max_extra_length", max_extra_length, Range(0, 4096), is_whole=True)
    return search
