"""§3, Table 3: the sizes and variants of a Transformer, and its number of parameters by formula."""

import dataclasses

from t2t_jax.errors import InputError
from t2t_jax.model.attention import ATTENTIONS
from t2t_jax.model.layers import ACTIVATIONS, POSITIONS
from t2t_jax.validation import Range, check_ranges, choice

_MOST_PARAMETERS = 10**12  # 4 TB in float32
_SIZE = Range(1, 10_000_000)
# Keyed by field name or, for all other fields, by type. Layers are compiled one by one, which limits `num_layers`.
_RANGES = {
    int: _SIZE,
    float: Range(0, 1, open_above=True),
    "source_vocab_size": _SIZE,
    "num_layers": Range(1, 1000),
    "layer_norm_epsilon": Range(0, 1, open_below=True, open_above=True),  # not 0, as the variance may be
    "attention_window": Range(0, 10_000_000),
}


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes and variants of a model; the defaults are the paper's base model (Table 3). Raises InputError.

    - `vocab_size`: ids of the target, and of the source too unless `source_vocab_size` is given.
    - `source_vocab_size`: ids of the source where it has a vocabulary of its own; needs `share_embeddings=False`.
    - `positions`: 'sinusoidal' (§3.5), 't2t' (the layout of the paper's code), 'learned' (Table 3 row E: a table of
      `max_positions` rows for each stack) or another entry of `POSITIONS` (layers.py).
    - `norm`: 'post' (§3.1) or 'pre'.
    - `activation`: of the feed-forward networks: 'relu' (Eq. 2) or another entry of `ACTIVATIONS` (layers.py).
    - `logits_bias`: whether the softmax has a bias. The paper's has none; Marian's has one.
    - `attention`: 'dot_product' (Eq. 1) or another entry of `ATTENTIONS` (attention.py).
    - `attention_window`: r of Table 1's restricted self-attention, where a position attends to those at most r/2
      away from it; 0: unrestricted.
    """

    vocab_size: int = 37000
    source_vocab_size: int | None = None
    num_layers: int = 6
    d_model: int = 512
    d_ff: int = 2048
    activation: str = "relu"
    num_heads: int = 8
    d_k: int = 64
    d_v: int = 64
    dropout: float = 0.1
    attention: str = "dot_product"
    attention_dropout: float = 0.0
    attention_window: int = 0
    positions: str = "sinusoidal"
    max_positions: int = 256
    norm: str = "post"
    attention_bias: bool = False
    share_embeddings: bool = True
    logits_bias: bool = False
    layer_norm_epsilon: float = 1e-6

    def __post_init__(self):
        ranges = {field.name: _RANGES.get(field.name, _RANGES.get(field.type)) for field in dataclasses.fields(self)}
        if self.source_vocab_size is None:
            del ranges["source_vocab_size"]
        elif self.share_embeddings:
            raise InputError(
                "model.share_embeddings must be False where the source has a vocabulary of its own; got True"
            )
        check_ranges({name: allowed for name, allowed in ranges.items() if allowed}, self, "model.")
        choice("model.activation", self.activation, ACTIVATIONS, is_open=True)
        choice("model.attention", self.attention, ATTENTIONS, is_open=True)
        choice("model.positions", self.positions, POSITIONS, is_open=True)
        choice("model.norm", self.norm, ["post", "pre"])
        if self.positions in ("sinusoidal", "t2t") and self.d_model % 2:
            raise InputError(f"model.d_model must be even for {self.positions} positions; got {self.d_model}")
        if self.parameter_count > _MOST_PARAMETERS:
            sizes = ", ".join(f"model.{name}={getattr(self, name)}" for name in ("num_layers", "d_model", "d_ff"))
            raise InputError(
                f"{sizes}: these, num_heads, d_k, d_v and the vocabulary make {self.parameter_count:,} parameters, "
                f"more than any machine holds; at most {_MOST_PARAMETERS:,} work"
            )

    @property
    def learned_positions(self) -> int | None:
        """How many positions the encoding has learned, the `length` of its module; None: it has all of them."""
        return getattr(POSITIONS[self.positions](self.max_positions, self.d_model), "length", None)

    @property
    def parameter_count(self) -> int:
        """Number of trained values (Table 3's last column), by formula: no time and no memory for any size."""
        heads = self.num_heads * (2 * self.d_k + 2 * self.d_v)
        attention = self.d_model * heads
        if self.attention_bias:
            attention += self.num_heads * (2 * self.d_k + self.d_v) + self.d_model
        feed_forward = 2 * self.d_model * self.d_ff + self.d_ff + self.d_model
        layer = 3 * attention + 2 * feed_forward + 5 * 2 * self.d_model  # 2 norms in an encoder layer, 3 in a decoder's
        norms = 2 * 2 if self.norm == "pre" else 0
        source_ids = self.vocab_size if self.source_vocab_size is None else self.source_vocab_size
        embeddings = self.vocab_size if self.share_embeddings else source_ids + 2 * self.vocab_size
        positions = 2 * (self.learned_positions or 0)
        bias = self.vocab_size if self.logits_bias else 0
        return self.num_layers * layer + (norms + embeddings + positions) * self.d_model + bias
