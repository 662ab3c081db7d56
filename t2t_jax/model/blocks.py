"""§3.1: the layers of the encoder and the decoder: sub-layers with residual connections and layer normalisation."""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
from jaxtyping import Array, Bool, Float, Int

from t2t_jax.model.attention import ATTENTIONS, MultiHeadAttention
from t2t_jax.model.config import TransformerConfig
from t2t_jax.model.kv_cache import LayerCache
from t2t_jax.model.layers import ACTIVATIONS, Dropout, FeedForward, LayerNorm, Rows, dropout


class Sublayer(nn.Module):
    """LayerNorm(x + Dropout(f(x))) (§3.1, §5.4); pre-norm: x + Dropout(f(LayerNorm(x)))."""

    config: TransformerConfig

    def setup(self):
        self.norm = LayerNorm(self.config.layer_norm_epsilon)
        self.Dropout_0 = Dropout(self.config.dropout)  # its keys depend on the name, which earlier runs had from Flax

    def __call__(
        self, x: Float[Array, "B T D"], function: Callable[[Array], Array], rows: Rows, key: Array | None
    ) -> Float[Array, "B T D"]:
        if self.config.norm == "pre":
            return x + dropout(function(self.norm(x)), self.config.dropout, key, rows)
        return self.norm(x + dropout(function(x), self.config.dropout, key, rows))

    def dropout_key(self, rows: Rows) -> Array | None:
        return self.Dropout_0.key(rows)


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


class _Layer(nn.Module):
    """A layer, whose forward pass `_forward` all layers of a stack trace together: tracing takes half of the time."""

    config: TransformerConfig
    fused_attention: bool

    def _apply(self, *arrays):
        """Initialised one by one: with a shared trace Flax's keys, and so all initial parameters, would be others."""
        if self.is_initializing():
            return self._forward(*arrays)
        # The config has only their names, under which there may be another function at the next call.
        functions = ACTIVATIONS[self.config.activation], ATTENTIONS[self.config.attention]
        return self._traced_once(functions, *arrays)

    def _traced_once(self, functions, *arrays):
        return self._forward(*arrays)


_sharing_a_trace = functools.partial(nn.jit, methods=["_traced_once"], static_argnums=1, rngs=False)


@_sharing_a_trace
class EncoderLayer(_Layer):
    """Self-attention, then the feed-forward network (§3.1)."""

    def setup(self):
        self.self_attention = self_attention(self.config, self.fused_attention)
        self.feed_forward = FeedForward(self.config.d_ff, self.config.activation)
        self.attention_dropout = Dropout(self.config.attention_dropout)
        self.after_self_attention = Sublayer(self.config)
        self.after_feed_forward = Sublayer(self.config)

    def __call__(self, x: Float[Array, "B S D"], mask: Bool[Array, "B 1 #S S"], rows: Rows) -> Float[Array, "B S D"]:
        sublayers = self.after_self_attention, self.after_feed_forward
        keys = self.attention_dropout.key(rows), *(sublayer.dropout_key(rows) for sublayer in sublayers)
        return self._apply(x, mask, rows, keys)

    def _forward(self, x, mask, rows, keys):
        of_weights, after_attention, after_feed_forward = keys
        drop = functools.partial(dropout, rate=self.config.attention_dropout, rows=rows, key=of_weights)

        def attend(x):
            return self.self_attention(x, x, mask, drop)

        x = self.after_self_attention(x, attend, rows, after_attention)
        return self.after_feed_forward(x, self.feed_forward, rows, after_feed_forward)


@_sharing_a_trace
class DecoderLayer(_Layer):
    """Causal self-attention, cross-attention to the encoder's output, then the feed-forward network (§3.1)."""

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
        sublayers = self.after_self_attention, self.after_cross_attention, self.after_feed_forward
        of_weights = self.self_attention_dropout.key(rows), self.cross_attention_dropout.key(rows)
        keys = *of_weights, *(sublayer.dropout_key(rows) for sublayer in sublayers)
        return self._apply(y, encoded, self_mask, source_mask, rows, keys)

    def _forward(self, y, encoded, self_mask, source_mask, rows, keys):
        of_self, of_source, after_self_attention, after_cross_attention, after_feed_forward = keys
        drop = functools.partial(dropout, rate=self.config.attention_dropout, rows=rows)

        def attend_self(y):
            return self.self_attention(y, y, self_mask, functools.partial(drop, key=of_self), causal=True)

        def attend_source(y):
            return self.cross_attention(y, encoded, source_mask, functools.partial(drop, key=of_source))

        y = self.after_self_attention(y, attend_self, rows, after_self_attention)
        y = self.after_cross_attention(y, attend_source, rows, after_cross_attention)
        return self.after_feed_forward(y, self.feed_forward, rows, after_feed_forward)

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

        y = self.after_self_attention(y, attend_self, None, None)
        y = self.after_cross_attention(y, attend_source, None, None)
        return self.after_feed_forward(y, self.feed_forward, None, None), cache
