"""§3.1 The encoder and decoder stacks, whole-sentence and one step at a time."""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from t2t_jax.errors import InputError, Range, check_ranges, choice
from t2t_jax.model.attention import (
    MultiHeadAttention,
    padding_mask,
    scaled_dot_product_attention,
    segment_mask,
    window_mask,
)
from t2t_jax.model.layers import (
    Dropout,
    Embedding,
    FeedForward,
    LearnedPositions,
    sinusoidal_positions,
    t2t_positions,
)

Cache = dict[str, Any]
Rows = Int[Array, " B"] | None  # numbers of the rows in the global batch; inside the layers, None outside training

_MOST_PARAMETERS = 10**12  # 4 TB in float32
# By the name of a field, else by its type. Each layer is compiled, so there cannot be many.
_RANGES = {
    int: Range(1, 10_000_000),
    float: Range(0, 1, open_above=True),
    "num_layers": Range(1, 1000),
    "attention_window": Range(0, 10_000_000),
}


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The shape of a model; the defaults are the paper's base model (Table 3). Checks itself.

    `positions` is 'sinusoidal' (§3.5), 't2t' (the layout of the paper's code) or 'learned' (row E, a table of
    `max_positions` rows in each stack); `norm` is 'post' (§3.1) or 'pre'; `attention_window` is r of Table 1's
    restricted self-attention, in which a position attends to those within r/2 of it, or 0 for all.
    """

    vocab_size: int = 37000
    num_layers: int = 6
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    d_k: int = 64
    d_v: int = 64
    dropout: float = 0.1
    attention_dropout: float = 0.0
    attention_window: int = 0
    positions: str = "sinusoidal"
    max_positions: int = 256
    norm: str = "post"
    attention_bias: bool = False
    share_embeddings: bool = True
    layer_norm_epsilon: float = 1e-6
    source_vocab_size: int | None = None

    def __post_init__(self):
        ranges = {field.name: _RANGES.get(field.name, _RANGES.get(field.type)) for field in dataclasses.fields(self)}
        check_ranges({name: allowed for name, allowed in ranges.items() if allowed}, self, "model.")
        choice("model.positions", self.positions, ["sinusoidal", "t2t", "learned"])
        choice("model.norm", self.norm, ["post", "pre"])
        if self.positions != "learned" and self.d_model % 2:
            raise InputError(f"model.d_model must be even for {self.positions} positions; got {self.d_model}")
        if self.parameter_count > _MOST_PARAMETERS:
            sizes = ", ".join(f"model.{name}={getattr(self, name)}" for name in ("num_layers", "d_model", "d_ff"))
            raise InputError(
                f"{sizes}: these and num_heads, d_k, d_v make {self.parameter_count:,} parameters, more than any "
                f"machine holds; at most {_MOST_PARAMETERS:,} work"
            )

    @property
    def parameter_count(self) -> int:
        """`num_parameters` by formula, which takes no time and no memory for any size."""
        heads = self.num_heads * (2 * self.d_k + 2 * self.d_v)
        attention = self.d_model * heads
        if self.attention_bias:
            attention += self.num_heads * (2 * self.d_k + self.d_v) + self.d_model
        feed_forward = 2 * self.d_model * self.d_ff + self.d_ff + self.d_model
        layer = 3 * attention + 2 * feed_forward + 5 * 2 * self.d_model  # with two norms in the encoder, three after it
        norms = 2 * 2 if self.norm == "pre" else 0
        embeddings = self.vocab_size
        if not self.share_embeddings:
            embeddings = (self.source_vocab_size or self.vocab_size) + 2 * self.vocab_size
        positions = 2 * self.max_positions if self.positions == "learned" else 0
        return self.num_layers * layer + (norms + embeddings + positions) * self.d_model


class Sublayer(nn.Module):
    """LayerNorm(x + Dropout(f(x))) (§3.1, §5.4), or x + Dropout(f(LayerNorm(x))) where `norm` is 'pre'."""

    config: TransformerConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x, function, rows: Rows):
        norm = layer_norm(self.config, self.dtype, name="norm")
        dropout = Dropout(self.config.dropout)
        if self.config.norm == "pre":
            return x + dropout(function(norm(x)), rows)
        return norm(x + dropout(function(x), rows))


def layer_norm(config: TransformerConfig, dtype: DTypeLike, name: str | None = None) -> nn.LayerNorm:
    """Layer normalisation; statistics in float32."""
    return nn.LayerNorm(epsilon=config.layer_norm_epsilon, dtype=dtype, use_fast_variance=False, name=name)


def attention(config: TransformerConfig, fused: bool, *, to_itself: bool) -> MultiHeadAttention:
    """Attention over the same sequence, or from the decoder over the encoder's output."""
    # A fused d × 3d kernel has the Glorot limit √(6/4d), a fused d × 2d one √(6/3d): see MultiHeadAttention.
    query_gain, key_value_gain = (math.sqrt(1 / 2),) * 2 if to_itself else (1.0, math.sqrt(2 / 3))
    return MultiHeadAttention(
        num_heads=config.num_heads,
        d_k=config.d_k,
        d_v=config.d_v,
        d_model=config.d_model,
        bias=config.attention_bias,
        query_gain=query_gain,
        key_value_gain=key_value_gain,
        fused=fused,
    )


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network (§3.1)."""

    config: TransformerConfig
    dtype: DTypeLike
    fused_attention: bool

    def setup(self):
        self.self_attention = attention(self.config, self.fused_attention, to_itself=True)
        self.feed_forward = FeedForward(self.config.d_ff)
        self.attention_dropout = Dropout(self.config.attention_dropout)
        self.after_self_attention = Sublayer(self.config, self.dtype)
        self.after_feed_forward = Sublayer(self.config, self.dtype)

    def __call__(self, x: Float[Array, "B S D"], mask: Bool[Array, "B 1 #S S"], rows: Rows):
        def drop(weights):
            return self.attention_dropout(weights, rows)

        x = self.after_self_attention(x, lambda y: self.self_attention(y, y, mask, drop), rows)
        return self.after_feed_forward(x, self.feed_forward, rows)


class DecoderLayer(nn.Module):
    """Self-attention to the left, attention over the encoder's output, feed-forward network (§3.1)."""

    config: TransformerConfig
    dtype: DTypeLike
    fused_attention: bool

    def setup(self):
        self.self_attention = attention(self.config, self.fused_attention, to_itself=True)
        self.cross_attention = attention(self.config, self.fused_attention, to_itself=False)
        self.feed_forward = FeedForward(self.config.d_ff)
        self.self_attention_dropout = Dropout(self.config.attention_dropout)
        self.cross_attention_dropout = Dropout(self.config.attention_dropout)
        self.after_self_attention = Sublayer(self.config, self.dtype)
        self.after_cross_attention = Sublayer(self.config, self.dtype)
        self.after_feed_forward = Sublayer(self.config, self.dtype)

    def __call__(
        self,
        y: Float[Array, "B T D"],
        encoded: Float[Array, "B S D"],
        own: Bool[Array, "#B 1 #T T"],
        mask: Bool[Array, "B 1 #T S"],
        rows: Rows,
    ):
        def attend_left(y):
            drop = lambda weights: self.self_attention_dropout(weights, rows)
            return self.self_attention(y, y, own, drop, causal=True)

        def attend_source(y):
            return self.cross_attention(y, encoded, mask, lambda w: self.cross_attention_dropout(w, rows))

        y = self.after_self_attention(y, attend_left, rows)
        y = self.after_cross_attention(y, attend_source, rows)
        return self.after_feed_forward(y, self.feed_forward, rows)

    def step(
        self,
        y: Float[Array, "B W D"],
        layer: Cache,
        slot: Int[Array, ""],
        ancestry: Bool[Array, "B 1 W TW"],
        mask: Bool[Array, "B 1 1 S"],
    ):
        """One position of W hypotheses for each of B sentences; `layer` is this layer's part of the cache."""
        layer, beams = dict(layer), y.shape[1]

        def write(name, new, axis):
            new = new.astype(layer[name].dtype)
            layer[name] = jax.lax.dynamic_update_slice_in_dim(layer[name], new, slot * beams, axis)

        def attend(attention, y, key, value, mask):
            query = attention.queries(y).astype(key.dtype)
            return attention.combine(scaled_dot_product_attention(query, key, value, mask).astype(self.dtype))

        def attend_left(y):
            key, value = self.self_attention.keys_values(y)  # [B, H, K, W], [B, H, W, V]
            write("key", key, axis=3)
            write("value", value, axis=2)
            return attend(self.self_attention, y, layer["key"], layer["value"], ancestry)

        def attend_source(y):
            # All hypotheses of a sentence attend to one copy of its keys and values: W takes the place of T.
            return attend(self.cross_attention, y, layer["source_key"], layer["source_value"], mask)

        y = self.after_self_attention(y, attend_left, None)
        y = self.after_cross_attention(y, attend_source, None)
        return self.after_feed_forward(y, self.feed_forward, None), layer


class Transformer(nn.Module):
    """The Transformer (§3). Ids: 0 is padding and the start symbol, 1 ends every sentence, source and target.

    Parameters are float32; `dtype` is what the layers compute in, `fused_attention` whether whole sentences attend in
    one kernel (decoding step by step never does). With `remat`, a backward pass finds only what each layer gave and
    computes its inside again.

    Training (`train=True`) takes a key as `rngs={'dropout': key}`. `rows` are the numbers of the given rows in the
    global batch, 0, 1, … where they are not given: with the same key, a row has the same elements dropped whichever
    other rows are computed with it.

    Rows may hold several pairs: `input_segments` and `target_segments` then number the pairs of each row, one
    after the other, 0 being padding, and each pair is computed as if it were alone.
    """

    config: TransformerConfig
    dtype: DTypeLike = jnp.float32
    fused_attention: bool = False
    remat: bool = False

    def setup(self):
        config = self.config
        if self.fused_attention and config.attention_dropout > 0:
            raise InputError(
                f"machine.fused_attention=True has no dropout on the attention weights; set model.attention_dropout="
                f"{config.attention_dropout} to 0 or the other to False"
            )
        embedding = lambda: Embedding(config.vocab_size, config.d_model, self.dtype)
        if config.share_embeddings:
            self.embedding = embedding()
        else:
            self.source_embedding = Embedding(config.source_vocab_size or config.vocab_size, config.d_model, self.dtype)
            self.target_embedding, self.softmax = embedding(), embedding()
        if config.positions == "learned":
            self.source_positions = LearnedPositions(config.max_positions, config.d_model)
            self.target_positions = LearnedPositions(config.max_positions, config.d_model)
        self.source_dropout = Dropout(config.dropout)
        self.target_dropout = Dropout(config.dropout)
        layers = lambda kind: [kind(config, self.dtype, self.fused_attention) for _ in range(config.num_layers)]
        self.encoder_layers, self.decoder_layers = layers(EncoderLayer), layers(DecoderLayer)
        if config.norm == "pre":
            self.encoder_norm = layer_norm(config, self.dtype)
            self.decoder_norm = layer_norm(config, self.dtype)

    def _embed_source(self, inputs, segments):
        embedding = self.embedding if self.config.share_embeddings else self.source_embedding
        table = self.source_positions if self.config.positions == "learned" else None
        return embedding(inputs) + _by_segment(self._positions(table, jnp.arange(inputs.shape[1])), segments)

    def _embed_target(self, ids):
        return (self.embedding if self.config.share_embeddings else self.target_embedding)(ids)

    def _target_positions(self, positions):
        return self._positions(self.target_positions if self.config.positions == "learned" else None, positions)

    def _positions(self, table, positions):
        layouts = {"sinusoidal": sinusoidal_positions, "t2t": t2t_positions}
        vectors = table(positions) if table else layouts[self.config.positions](positions, self.config.d_model)
        return vectors.astype(self.dtype)

    def _softmax(self, y):
        y = self.decoder_norm(y) if self.config.norm == "pre" else y
        return y, (self.embedding if self.config.share_embeddings else self.softmax)

    def _restricted(self, mask):
        """The mask of self-attention, within the window if there is one."""
        window = self.config.attention_window
        return mask & window_mask(mask.shape[-1], window) if window else mask

    def _through(self, layer, *arrays):
        call = lambda layer, *arrays: layer(*arrays)
        return (nn.remat(call) if self.remat else call)(layer, *arrays)

    def encode(
        self,
        inputs: Int[Array, "B S"],
        input_segments: Int[Array, "B S"] | None = None,
        *,
        train: bool = False,
        rows: Rows = None,
    ) -> Float[Array, "B S D"]:
        """The encoder's output for each source position."""
        rows = _rows_to_drop_from(inputs, train, rows)
        mask = padding_mask(inputs) if input_segments is None else segment_mask(input_segments, input_segments)
        mask = self._restricted(mask)
        x = self.source_dropout(self._embed_source(inputs, input_segments), rows)
        for layer in self.encoder_layers:
            x = self._through(layer, x, mask, rows)
        return self.encoder_norm(x) if self.config.norm == "pre" else x

    def _decoded(self, encoded, inputs, targets, input_segments, target_segments, train, rows):
        rows = _rows_to_drop_from(inputs, train, rows)
        shifted = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))
        own, mask = jnp.ones((1, 1, 1, targets.shape[1]), bool), padding_mask(inputs)
        if target_segments is not None:
            shifted = jnp.where(_begins(target_segments), 0, shifted)
            own = segment_mask(target_segments, target_segments)
            mask = segment_mask(target_segments, input_segments)
        own = self._restricted(own)
        positions = self._target_positions(jnp.arange(targets.shape[1]))
        y = self._embed_target(shifted) + _by_segment(positions, target_segments)
        y = self.target_dropout(y, rows)
        for layer in self.decoder_layers:
            y = self._through(layer, y, encoded, own, mask, rows)
        return self._softmax(y)

    def decode(
        self,
        encoded: Float[Array, "B S D"],
        inputs: Int[Array, "B S"],
        targets: Int[Array, "B T"],
        input_segments: Int[Array, "B S"] | None = None,
        target_segments: Int[Array, "B T"] | None = None,
        *,
        train: bool = False,
        rows: Rows = None,
    ) -> Float[Array, "B T vocab"]:
        """Logits of every target position, each having seen the source and `targets[:, :t]`."""
        y, softmax = self._decoded(encoded, inputs, targets, input_segments, target_segments, train, rows)
        return softmax.logits(y)

    def before_softmax(
        self,
        inputs: Int[Array, "B S"],
        targets: Int[Array, "B T"],
        input_segments: Int[Array, "B S"] | None = None,
        target_segments: Int[Array, "B T"] | None = None,
        *,
        train: bool = False,
        rows: Rows = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "vocab D"]]:
        """(y, E): the logits of the targets are y Eᵀ; for a loss that never has all of them in memory."""
        encoded = self.encode(inputs, input_segments, train=train, rows=rows)
        y, softmax = self._decoded(encoded, inputs, targets, input_segments, target_segments, train, rows)
        return y, softmax.table

    def __call__(
        self,
        inputs: Int[Array, "B S"],
        targets: Int[Array, "B T"],
        input_segments: Int[Array, "B S"] | None = None,
        target_segments: Int[Array, "B T"] | None = None,
        *,
        train: bool = False,
        rows: Rows = None,
    ) -> Float[Array, "B T vocab"]:
        """Logits of the targets given the inputs, for scoring."""
        encoded = self.encode(inputs, input_segments, train=train, rows=rows)
        return self.decode(encoded, inputs, targets, input_segments, target_segments, train=train, rows=rows)

    def init_cache(self, rows: int, width: int, beam_size: int, room: int) -> Cache:
        """Memory for decoding `rows` sentences of at most `width` subwords, and `room` steps of each hypothesis.

        `layers[i]` holds the self-attention's `key` `[B, H, K, T·W]` and `value` `[B, H, T·W, V]`, T = `room` slots
        that are written round and round, and those of the source, `[B, H, K, S]` and `[B, H, S, V]`, which all
        hypotheses of a sentence share. Keys and values never move: `ancestors[b, w, t]` says in whose place the
        step of hypothesis w in slot t was written, −1 where it has none there.
        """
        config = self.config
        # XLA's CPU kernels would convert all of a bfloat16 cache at every step.
        dtype = jnp.float32 if jax.default_backend() == "cpu" else self.dtype
        zeros = lambda *shape: jnp.zeros((rows, config.num_heads, *shape), dtype)
        layer = lambda: {
            "key": zeros(config.d_k, room * beam_size),
            "value": zeros(room * beam_size, config.d_v),
            "source_key": zeros(config.d_k, width),
            "source_value": zeros(width, config.d_v),
        }
        return {
            "layers": [layer() for _ in range(config.num_layers)],
            "ancestors": jnp.full((rows, beam_size, room), -1),
            "mask": jnp.zeros((rows, 1, 1, width), bool),
            "slot": jnp.zeros((), jnp.int32),
        }

    def source(self, inputs: Int[Array, "A S"]) -> Cache:
        """What the cache holds of each source sentence, for `admit_to_cache`."""
        encoded = self.encode(inputs)
        keys_values = [layer.cross_attention.keys_values(encoded) for layer in self.decoder_layers]
        layers = [{"source_key": key, "source_value": value} for key, value in keys_values]
        return {"layers": layers, "mask": padding_mask(inputs)}

    def decode_step(
        self, tokens: Int[Array, "B W"], positions: Int[Array, " B"], cache: Cache
    ) -> tuple[Float[Array, "B W vocab"], Cache]:
        """Logits of the next token of each hypothesis, whose last token is `tokens` (0 at the start).

        `positions` is how many tokens the hypotheses of each sentence have, fewer than the cache has room for.
        """
        slot, (batch, beams) = cache["slot"], tokens.shape
        places = jnp.arange(beams)[None]
        ancestors = cache["ancestors"].at[:, :, slot].set(places)
        ancestry = ancestors[..., None] == places[None, None]  # [B, W, T, W]
        if self.config.attention_window:
            ages = (slot - jnp.arange(ancestors.shape[-1])) % ancestors.shape[-1]
            ancestry &= (ages <= self.config.attention_window // 2)[None, None, :, None]
        ancestry = ancestry.reshape(batch, 1, beams, -1)  # [B, 1, W, TW]
        y = self._embed_target(tokens) + self._target_positions(positions)[:, None]
        layers = []
        for layer, layer_cache in zip(self.decoder_layers, cache["layers"], strict=True):
            y, layer_cache = layer.step(y, layer_cache, slot, ancestry, cache["mask"])
            layers.append(layer_cache)
        slot = (slot + 1) % ancestors.shape[-1]
        y, softmax = self._softmax(y)
        return softmax.logits_of_step(y), cache | {"layers": layers, "ancestors": ancestors, "slot": slot}


def _rows_to_drop_from(inputs: Int[Array, "B S"], train: bool, rows: Rows) -> Rows:
    if not train:
        return None
    return jnp.arange(len(inputs)) if rows is None else rows


def _begins(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Where a segment has its first position."""
    return segments != jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))


def _by_segment(vectors: Float[Array, "T D"], segments: Int[Array, "B T"] | None) -> Float[Array, "#B T D"]:
    """The vectors of positions 0, 1, …, beginning anew with each segment."""
    if segments is None:
        return vectors[None]
    places = jnp.arange(len(vectors))[None]
    return vectors[places - jax.lax.cummax(jnp.where(_begins(segments), places, 0), axis=1)]


def admit_to_cache(cache: Cache, source: Cache, rows: Int[Array, " A"]) -> Cache:
    """The cache with new sentences in these rows; a row number beyond the last is left out."""
    put = lambda x, new: x.at[rows].set(new.astype(x.dtype), mode="drop")
    layers = [
        layer | {name: put(layer[name], new[name]) for name in new}
        for layer, new in zip(cache["layers"], source["layers"], strict=True)
    ]
    ancestors, mask = cache["ancestors"].at[rows].set(-1, mode="drop"), put(cache["mask"], source["mask"])
    return cache | {"layers": layers, "ancestors": ancestors, "mask": mask}


def reorder_cache(cache: Cache, parents: Int[Array, "B W"]) -> Cache:
    """The cache after hypothesis w of each sentence has become a continuation of hypothesis `parents[:, w]`."""
    return cache | {"ancestors": jnp.take_along_axis(cache["ancestors"], parents[..., None], axis=1)}


def resize_cache(cache: Cache, room: int) -> Cache:
    """The cache with more room, or with only the newest `room` steps of it."""
    beams, old = cache["ancestors"].shape[1:]

    def resize(x, axis, times, fill=0):
        x = jnp.roll(x, -cache["slot"] * times, axis)  # oldest first
        if room < old:
            return jax.lax.slice_in_dim(x, (old - room) * times, old * times, axis=axis)
        return jnp.pad(x, [(0, (room - old) * times) if a == axis else (0, 0) for a in range(x.ndim)],
                       constant_values=fill)  # fmt: skip

    layers = [
        layer | {"key": resize(layer["key"], 3, beams), "value": resize(layer["value"], 2, beams)}
        for layer in cache["layers"]
    ]
    slot = jnp.asarray(old if room > old else 0, jnp.int32)  # where the oldest step is, or was never written
    return cache | {"layers": layers, "ancestors": resize(cache["ancestors"], 2, 1, fill=-1), "slot": slot}


def param_shapes(model: Transformer) -> Any:
    """Shapes and dtypes of the model's parameters, nothing allocated."""
    ids = jnp.ones((1, 2), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), ids, ids)["params"]


def num_parameters(config: TransformerConfig) -> int:
    """The number of trained values (Table 3's last column)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(Transformer(config))))
