"""§3.1: the layers of the encoder and the decoder: sub-layers with residual connections and layer normalisation."""

import math
from collections.abc import Callable

import flax.linen as nn
from jaxtyping import Array, Bool, Float, Int

from t2t_jax.model.attention import MultiHeadAttention
from t2t_jax.model.config import TransformerConfig
from t2t_jax.model.kv_cache import LayerCache
from t2t_jax.model.layers import Dropout, FeedForward, LayerNorm, Rows


class Sublayer(nn.Module):
    """LayerNorm(x + Dropout(f(x))) (§3.1, §5.4); pre-norm: x + Dropout(f(LayerNorm(x)))."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], function: Callable[[Array], Array], rows: Rows
    ) -> Float[Array, "B T D"]:
        norm = LayerNorm(self.config.layer_norm_epsilon, name="norm")
        dropout = Dropout(self.config.dropout)
        if self.config.norm == "pre":
            return x + dropout(function(norm(x)), rows)
        return norm(x + dropout(function(x), rows))


def self_attention(config: TransformerConfig, fused: bool) -> MultiHeadAttention:
    """Multi-head attention within one sequence."""
    # The paper's code has one d × 3d kernel for q, k and v, with the Glorot limit √(6/4d); ours of d × d have √(6/2d).
    gain = math.sqrt(1 / 2)
    return _attention(config, fused, query_gain=gain, key_value_gain=gain, window=config.attention_window)


def cross_attention(config: TransformerConfig, fused: bool) -> MultiHeadAttention:
    """Multi-head attention from the decoder to the encoder's output."""
    # The paper's code has one d × 2d kernel for k and v, with the Glorot limit √(6/3d).
    return _attention(config, fused, query_gain=1.0, key_value_gain=math.sqrt(2 / 3))


def _attention(config, fused, query_gain, key_value_gain, window=0):
    return MultiHeadAttention(
        num_heads=config.num_heads,
        d_k=config.d_k,
        d_v=config.d_v,
        d_model=config.d_model,
        bias=config.attention_bias,
        query_gain=query_gain,
        key_value_gain=key_value_gain,
        function=config.attention,
        window=window,
        fused=fused,
    )


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network (§3.1)."""

    config: TransformerConfig
    fused_attention: bool

    def setup(self):
        self.self_attention = self_attention(self.config, self.fused_attention)
        self.feed_forward = FeedForward(self.config.d_ff, self.config.activation)
        self.attention_dropout = Dropout(self.config.attention_dropout)
        self.after_self_attention = Sublayer(self.config)
        self.after_feed_forward = Sublayer(self.config)

    def __call__(self, x: Float[Array, "B S D"], mask: Bool[Array, "B 1 #S S"], rows: Rows) -> Float[Array, "B S D"]:
        def attend(x):
            return self.self_attention(x, x, mask, lambda weights: self.attention_dropout(weights, rows))

        x = self.after_self_attention(x, attend, rows)
        return self.after_feed_forward(x, self.feed_forward, rows)


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention to the encoder's output, then the feed-forward network (§3.1)."""

    config: TransformerConfig
    fused_attention: bool

    def setup(self):
        self.self_attention = self_attention(self.config, self.fused_attention)
        self.cross_attention = cross_attention(self.config, self.fused_attention)
        self.feed_forward = FeedForward(self.config.d_ff, self.config.activation)
        self.self_attention_dropout = Dropout(self.config.attention_dropout)
        self.cross_attention_dropout = Dropout(self.config.attention_dropout)
        self.after_self_attention = Sublayer(self.config)
        self.after_cross_attention = Sublayer(self.config)
        self.after_feed_forward = Sublayer(self.config)

    def __call__(
        self,
        y: Float[Array, "B T D"],
        encoded: Float[Array, "B S D"],
        self_mask: Bool[Array, "#B 1 #T T"] | None,
        source_mask: Bool[Array, "B 1 #T S"],
        rows: Rows,
    ) -> Float[Array, "B T D"]:
        """All target positions at once (teacher forcing); causality is added to `self_mask` here."""

        def attend_self(y):
            drop = lambda weights: self.self_attention_dropout(weights, rows)
            return self.self_attention(y, y, self_mask, drop, causal=True)

        def attend_source(y):
            drop = lambda weights: self.cross_attention_dropout(weights, rows)
            return self.cross_attention(y, encoded, source_mask, drop)

        y = self.after_self_attention(y, attend_self, rows)
        y = self.after_cross_attention(y, attend_source, rows)
        return self.after_feed_forward(y, self.feed_forward, rows)

    def step(
        self,
        y: Float[Array, "B W D"],
        cache: LayerCache,
        source: LayerCache,
        slot: Int[Array, ""],
        self_mask: Bool[Array, "B 1 W TW"],
        source_mask: Bool[Array, "B 1 1 S"],
    ) -> tuple[Float[Array, "B W D"], LayerCache]:
        """One target position of W hypotheses per sentence; `cache` is written, `source` is only read."""

        def attend_self(y):
            nonlocal cache
            output, cache = self.self_attention.append_and_attend(y, cache, slot, self_mask)
            return output

        def attend_source(y):
            return self.cross_attention.attend_to_cache(y, source, source_mask)

        y = self.after_self_attention(y, attend_self, None)
        y = self.after_cross_attention(y, attend_source, None)
        return self.after_feed_forward(y, self.feed_forward, None), cache
