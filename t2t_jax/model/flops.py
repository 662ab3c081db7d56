"""Number of floating-point operations of a model's matrix products, by formula.

A multiply-add counts as two operations. Element-wise operations (normalisation, softmax, dropout) do not count, nor do
operations on padding, nor scores beyond `attention_window`; at the ends of a sentence a token counts as many neighbours
as elsewhere, up to its length. The causal mask (§3.2.3) saves nothing: masked scores are computed all the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from t2t_jax.model.config import TransformerConfig

Lengths = Sequence[int] | np.ndarray  # tokens of each sentence, EOS included


class Flops(NamedTuple):
    """Floating-point operations by part of the model."""

    projections: int  # W^Q, W^K, W^V and W^O (§3.2.2)
    attention: int  # Q Kᵀ and the weighted sum of V (Eq. 1)
    feed_forward: int  # Eq. 2
    softmax: int  # logits over the target vocabulary (§3.4)


def forward_flops(config: TransformerConfig, source_lengths: Lengths, target_lengths: Lengths) -> Flops:
    """A forward pass over sentence pairs of these lengths, up to the logits."""
    source, target = np.asarray(source_lengths, np.int64), np.asarray(target_lengths, np.int64)
    source_tokens, target_tokens = int(source.sum()), int(target.sum())
    # Of all three attentions, per head and layer.
    half = config.attention_window // 2
    within, before = (half + 1 + half, half + 1) if config.attention_window else (np.inf, np.inf)
    self_attention = source @ np.minimum(source, within) + target @ np.minimum(target, before)
    scores = int(self_attention + target @ source)
    heads = config.num_heads * (config.d_k + config.d_v)
    # As a query (W^Q, W^O) or as a key (W^K, W^V), a token costs d_model · heads multiply-adds. A source token is query
    # and key in the encoder and key in cross-attention; a target token is query and key in the decoder's
    # self-attention and query in cross-attention.
    projected = 3 * source_tokens + 3 * target_tokens
    return Flops(
        projections=2 * config.num_layers * projected * config.d_model * heads,
        attention=2 * config.num_layers * scores * heads,
        feed_forward=2 * config.num_layers * (source_tokens + target_tokens) * 2 * config.d_model * config.d_ff,
        softmax=2 * target_tokens * config.d_model * config.vocab_size,
    )


def training_flops(config: TransformerConfig, source_lengths: Lengths, target_lengths: Lengths) -> int:
    """Forward and backward pass: each matrix product has two in the backward pass, for its input and its kernel."""
    return 3 * sum(forward_flops(config, source_lengths, target_lengths))
