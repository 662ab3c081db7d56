"""How much a model computes: the floating-point operations of its matrix products, counted from its shape.

A multiply-add is two operations. What is done element by element (normalisation, softmax, dropout) is left out, and so
are the operations on padding: the lengths are those of the sentences. A length counts the end of the sentence, and
the mask of §3.2.3 saves nothing, as its products are computed before they are masked.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from t2t_jax.model.transformer import TransformerConfig

Lengths = Sequence[int] | np.ndarray


class Flops(NamedTuple):
    """Floating-point operations by where they are spent."""

    projections: int  # of queries, keys, values and heads (§3.2.2)
    attention: int  # Q Kᵀ and the weighted sum of V (Eq. 1)
    feed_forward: int  # Eq. 2
    softmax: int  # logits (§3.4)


def forward_flops(config: TransformerConfig, source_lengths: Lengths, target_lengths: Lengths) -> Flops:
    """The logits of pairs of sentences of these lengths, one pair after the other."""
    source, target = np.asarray(source_lengths, np.int64), np.asarray(target_lengths, np.int64)
    source_tokens, target_tokens = int(source.sum()), int(target.sum())
    scores = int(source @ source + target @ target + target @ source)  # of all three attentions, per head and layer
    heads = config.num_heads * (config.d_k + config.d_v)  # width of all queries and values, as of all keys and heads
    # A source token is queried and read in the encoder, and read by the decoder; a target token is queried and read in
    # the decoder's self-attention, and queries the source.
    projected = 3 * source_tokens + 3 * target_tokens
    return Flops(
        projections=2 * config.num_layers * projected * config.d_model * heads,
        attention=2 * config.num_layers * scores * heads,
        feed_forward=2 * config.num_layers * (source_tokens + target_tokens) * 2 * config.d_model * config.d_ff,
        softmax=2 * target_tokens * config.d_model * config.vocab_size,
    )


def training_flops(config: TransformerConfig, source_lengths: Lengths, target_lengths: Lengths) -> int:
    """Forward and backward: for each product of the one, two of the other (to its input and to its kernel)."""
    return 3 * sum(forward_flops(config, source_lengths, target_lengths))
