"""§3.1: the Transformer, an encoder and a decoder stack: whole sentences, or one target position at a time."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num

from t2t_jax.model import kv_cache
from t2t_jax.model.attention import ancestor_mask, needed_by_fused, padding_mask, segment_mask
from t2t_jax.model.blocks import DecoderLayer, EncoderLayer
from t2t_jax.model.config import TransformerConfig
from t2t_jax.model.kv_cache import KVCache, LayerCache, SourceCache
from t2t_jax.model.layers import POSITIONS, Dropout, Embedding, LayerNorm, Rows
from t2t_jax.model.platform import platform


class Transformer(nn.Module):
    """The Transformer (§3). Id 0 is padding and the start symbol; id 1 is EOS, which ends source and target.

    Parameters are float32; `dtype` is that of the computation. With `int8`, for decoding, the matrices among them are
    quantized (`decoding_matrix.py`), and `dtype` is that of everything but the products. `fused_attention` uses
    `attention.fused_attention` for whole sentences; cached decoding never does. `remat` is rematerialisation: the
    backward pass keeps only the output of each layer and recomputes the rest.

    Training (`train=True`) needs a key as `rngs={'dropout': key}`. `rows` are the indices of the given rows in the
    global batch (default: 0, 1, …). A dropout mask depends on the key and this index only, not on the other rows.

    Sequence packing: a row may hold several sentence pairs. `input_segments` and `target_segments` then number the
    pairs within each row from 1 (0: padding), and each pair is computed as if it were alone.
    """

    config: TransformerConfig
    dtype: DTypeLike = jnp.float32
    fused_attention: bool = False
    remat: bool = False
    int8: bool = False

    def setup(self):
        config = self.config
        if self.fused_attention:
            assert all(getattr(config, field) == value for field, value in needed_by_fused(config.d_k).items())
        embedding = lambda vocab_size: Embedding(vocab_size, config.d_model, self.dtype)
        if config.share_embeddings:
            self.embedding = embedding(config.vocab_size)
            self.source_embedding = self.target_embedding = self.softmax = self.embedding
        else:
            self.source_embedding = embedding(config.source_vocab_size or config.vocab_size)
            self.target_embedding, self.softmax = embedding(config.vocab_size), embedding(config.vocab_size)
        if config.logits_bias:
            self.logits_bias = self.param("logits_bias", nn.initializers.zeros_init(), (config.vocab_size,))
        self.source_positions = POSITIONS[config.positions](config.max_positions, config.d_model)
        self.target_positions = POSITIONS[config.positions](config.max_positions, config.d_model)
        self.source_dropout = Dropout(config.dropout)
        self.target_dropout = Dropout(config.dropout)
        layers = lambda kind: [kind(config, self.fused_attention) for _ in range(config.num_layers)]
        self.encoder_layers, self.decoder_layers = layers(EncoderLayer), layers(DecoderLayer)
        final_norm = lambda: LayerNorm(config.layer_norm_epsilon) if config.norm == "pre" else lambda x: x
        self.encoder_norm, self.decoder_norm = final_norm(), final_norm()

    def _embed(self, embedding, positions, ids, segments):
        """Embeddings plus positions (§3.5), which are cast for each row: the gradient of a table adds up in float32."""
        vectors = positions(jnp.arange(ids.shape[1]))
        return embedding(ids) + _restart_at_segments(vectors, ids, segments).astype(self.dtype)

    def _with_bias(self, logits: Float[Array, "B T vocab"]) -> Float[Array, "B T vocab"]:
        return logits + self.logits_bias[None, None] if self.config.logits_bias else logits

    def _apply_layer(self, layer, *arrays):
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
        rows = _dropout_rows(inputs, train, rows)
        mask = padding_mask(inputs) if input_segments is None else segment_mask(input_segments, input_segments)
        x = self._embed(self.source_embedding, self.source_positions, inputs, input_segments)
        x = self.source_dropout(x, rows)
        for layer in self.encoder_layers:
            x = self._apply_layer(layer, x, mask, rows)
        return self.encoder_norm(x)

    def _decode(
        self,
        encoded: Float[Array, "B S D"],
        inputs: Int[Array, "B S"],
        targets: Int[Array, "B T"],
        input_segments: Int[Array, "B S"] | None,
        target_segments: Int[Array, "B T"] | None,
        train: bool,
        rows: Rows,
    ) -> Float[Array, "B T D"]:
        """What the softmax reads, by teacher forcing: the decoder reads the targets shifted right by one position."""
        rows = _dropout_rows(inputs, train, rows)
        shifted = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))
        # Padding comes after all target tokens, so that causality alone keeps them from attending to it.
        self_mask, source_mask = None, padding_mask(inputs)
        if target_segments is not None:
            shifted = jnp.where(_is_segment_start(target_segments), 0, shifted)
            self_mask = segment_mask(target_segments, target_segments)
            source_mask = segment_mask(target_segments, input_segments)
        y = self._embed(self.target_embedding, self.target_positions, shifted, target_segments)
        y = self.target_dropout(y, rows)
        for layer in self.decoder_layers:
            y = self._apply_layer(layer, y, encoded, self_mask, source_mask, rows)
        return self.decoder_norm(y)

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
        """Logits of every target position by teacher forcing: position t depends on the source and `targets[:, :t]`."""
        y = self._decode(encoded, inputs, targets, input_segments, target_segments, train, rows)
        return self._with_bias(self.softmax.logits(y))

    def before_softmax(
        self,
        inputs: Int[Array, "B S"],
        targets: Int[Array, "B T"],
        input_segments: Int[Array, "B S"] | None = None,
        target_segments: Int[Array, "B T"] | None = None,
        *,
        train: bool = False,
        rows: Rows = None,
    ) -> tuple[Float[Array, "B T M"], Float[Array, "vocab M"]]:
        """(y, E), where the logits are y Eᵀ: for a loss that computes them in chunks (`training/loss.py`).

        M is d_model, and one more with `logits_bias`: the bias is then the last column of E, and y ends with 1.
        """
        encoded = self.encode(inputs, input_segments, train=train, rows=rows)
        y = self._decode(encoded, inputs, targets, input_segments, target_segments, train, rows)
        if not self.config.logits_bias:
            return y, self.softmax.table
        ones = jnp.ones((*y.shape[:2], 1), y.dtype)
        return jnp.concatenate([y, ones], 2), jnp.concatenate([self.softmax.table, self.logits_bias[:, None]], 1)

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
        """Logits of every target position: encode, then decode."""
        encoded = self.encode(inputs, input_segments, train=train, rows=rows)
        return self.decode(encoded, inputs, targets, input_segments, target_segments, train=train, rows=rows)

    def init_cache(self, rows: int, source_length: int, beam_size: int, capacity: int) -> KVCache:
        """An empty KV cache for `rows` sentences of up to `source_length` tokens, `beam_size` hypotheses each.

        Self-attention sees the newest `capacity` target positions of a hypothesis.
        """
        # XLA's CPU kernels would convert all of a bfloat16 cache to float32 at every step.
        dtype = jnp.float32 if platform() == "cpu" else self.dtype
        sizes = {name: getattr(self.config, name) for name in ("num_layers", "num_heads", "d_k", "d_v")}
        return kv_cache.init_cache(rows, source_length, beam_size, capacity, **sizes, dtype=dtype)

    def encode_source(self, inputs: Int[Array, "A S"]) -> SourceCache:
        """Encodes A new source sentences into what `kv_cache.admit_to_cache` inserts."""
        encoded = self.encode(inputs)
        layers = tuple(LayerCache.of(*layer.cross_attention.keys_values(encoded)) for layer in self.decoder_layers)
        return SourceCache(layers, padding_mask(inputs))

    def decode_step(
        self, tokens: Int[Array, "B W"], positions: Int[Array, " B"], cache: KVCache
    ) -> tuple[Float[Array, "B W vocab"], KVCache]:
        """Logits of the next token of each hypothesis, given its last one (`tokens`, 0 at the start).

        `positions` are the lengths of each sentence's hypotheses so far, below the cache's capacity.
        """
        cache = kv_cache.claim_slot(cache)
        self_mask = ancestor_mask(cache.ancestors, cache.slot, self.config.attention_window)
        y = self.target_embedding(tokens) + self.target_positions(positions).astype(self.dtype)[:, None]
        layers = []
        for layer, layer_cache, source in zip(self.decoder_layers, cache.layers, cache.source.layers, strict=True):
            y, layer_cache = layer.step(y, layer_cache, source, cache.slot, self_mask, cache.source.mask)
            layers.append(layer_cache)
        slot = (cache.slot + 1) % cache.capacity
        logits = self._with_bias(self.softmax.logits_of_step(self.decoder_norm(y)))
        return logits, cache._replace(layers=tuple(layers), slot=slot)


def _dropout_rows(inputs: Int[Array, "B S"], train: bool, rows: Rows) -> Rows:
    """The row indices that dropout depends on; None outside training."""
    if not train:
        return None
    return jnp.arange(len(inputs)) if rows is None else rows


def _is_segment_start(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """True at the first position of each segment."""
    return segments != jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))


def _restart_at_segments(
    vectors: Num[Array, "T D"], ids: Int[Array, "B T"], segments: Int[Array, "B T"] | None
) -> Num[Array, "B T D"]:
    """The vectors of positions 0, 1, …, counted from the start of each segment, for each row of `ids`."""
    if segments is None:
        return jnp.broadcast_to(vectors, (len(ids), *vectors.shape))
    positions = jnp.arange(len(vectors))[None]
    starts = jax.lax.cummax(jnp.where(_is_segment_start(segments), positions, 0), axis=1)
    # Without the barrier XLA on GPU computes the maximum again for each of the D components.
    return vectors[jax.lax.optimization_barrier(positions - starts)]


def init_params(model: Transformer, key: Array) -> Any:
    """Random parameters, which do not depend on the shape of a batch."""
    ids = jnp.ones((1, 2), jnp.int32)
    return model.init(key, ids, ids)["params"]


@functools.lru_cache(maxsize=32)  # each run of an ensemble asks for them
def param_shapes(model: Transformer) -> Any:
    """Shapes and dtypes of the model's parameters, without allocating or compiling anything."""
    return jax.eval_shape(functools.partial(init_params, model), jax.random.key(0))


def num_parameters(config: TransformerConfig) -> int:
    """Number of trained values (Table 3's last column), counted in the model itself."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(Transformer(config))))
