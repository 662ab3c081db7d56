"""§3.2, Figures 3–5: the attention weights of every layer and head, with the tokens that they join.

A map has a row for each query, the position that attends, and a column for each key, a position attended to:

- encoder: from each source token to all source tokens;
- encoder–decoder: from each target token, in the step that predicts it, to all source tokens;
- decoder: from each target token, in the step that predicts it, to what the decoder has read: `START` and the target
  tokens before it.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from t2t_jax import sharding
from t2t_jax.data.plain_text import WITHOUT_SPACES
from t2t_jax.data.task import Vocabularies
from t2t_jax.data.tokenizer import EOS, SPACE, Tokenizer
from t2t_jax.decoding.batch_shapes import by_bucket, pad_pairs
from t2t_jax.decoding.ensemble import Ensemble
from t2t_jax.errors import InputError
from t2t_jax.model.transformer import Transformer
from t2t_jax.validation import Range

START = "<start>"  # the label of what the decoder reads before the first target token: a zero vector, no piece
_WEIGHTS_A_HEAD = 1 << 20  # of a batch, in each layer and kind of attention: 4 MiB


class Words(NamedTuple):
    """The words that tokens make up: `numbers[i]`, from 0 and never falling, is the word of token i."""

    numbers: list[int]
    texts: list[str]


@dataclasses.dataclass(frozen=True)
class AttentionMap:
    """softmax(Q Kᵀ / √d_k) (Eq. 1) in N layers of H heads, from each of Q queries to K keys. Rows sum to one."""

    queries: list[str]
    keys: list[str]
    weights: Float[np.ndarray, "N H Q K"]
    query_words: Words
    key_words: Words

    def head(self, layer: int, head: int) -> Float[np.ndarray, "Q K"]:
        """The weights of one head; layers and heads are counted from 1."""
        for name, value, count in zip(("layer", "head"), (layer, head), self.weights.shape[:2], strict=True):
            Range(1, count).check(name, value)
        return self.weights[layer - 1, head - 1]

    def words(self) -> "AttentionMap":
        """The map between words: the sum over the tokens of the key word, the mean over those of the query word."""
        of_queries, of_keys = (_indicator(words) for words in (self.query_words, self.key_words))
        of_queries = of_queries / of_queries.sum(axis=0)
        weights = np.einsum("lhqk,qv,kw->lhvw", self.weights, of_queries, of_keys, optimize=True)
        merged = [Words(list(range(len(words.texts))), words.texts) for words in (self.query_words, self.key_words)]
        return AttentionMap(merged[0].texts, merged[1].texts, weights.astype(np.float32), *merged)


@dataclasses.dataclass(frozen=True)
class AttentionMaps:
    """The three attentions (§3.2.3) of one sentence pair; `source` and `target` are its tokens, with EOS."""

    source: list[str]
    target: list[str]
    encoder: AttentionMap
    decoder: AttentionMap
    encoder_decoder: AttentionMap

    def words(self) -> "AttentionMaps":
        """The maps between words instead of subwords (`AttentionMap.words`)."""
        maps = {name: getattr(self, name).words() for name in ("encoder", "decoder", "encoder_decoder")}
        return AttentionMaps(maps["encoder"].queries, maps["decoder"].queries, **maps)


def attention_maps(
    ensemble: Ensemble,
    vocabularies: Vocabularies,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    mesh: Mesh,
) -> list[AttentionMaps]:
    """The maps of each pair of ids, from the first model of `ensemble`; its decoder reads `targets` (§3.2.3)."""
    module = dataclasses.replace(ensemble.modules[0], fused_attention=False, remat=False)
    labels = [functools.partial(_labels, vocabulary=side, at_end=_marks_ends(side)) for side in vocabularies]
    found = [None] * len(sources)
    for indices, width, rows in _batches([max(map(len, pair)) for pair in zip(sources, targets, strict=True)], mesh):
        batch = sharding.put_rows(pad_pairs(indices, sources, targets, rows, width), mesh)
        weights = jax.device_get(_weights(module, ensemble.params[0], **batch))
        for row, index in enumerate(indices):
            of_pair = (kind[row] for kind in weights)
            found[index] = _maps(labels[0](sources[index]), labels[1](targets[index]), *of_pair)
    return found


@functools.partial(jax.jit, static_argnames="module")
def _weights(
    module: Transformer, params: Any, inputs: Int[Array, "B S"], targets: Int[Array, "B T"]
) -> tuple[Float[Array, "B N H S S"], Float[Array, "B N H T T"], Float[Array, "B N H T S"]]:
    """What the modules of the encoder's, the decoder's and the encoder–decoder attention sow, by layer."""
    _, state = module.apply({"params": params}, inputs, targets, mutable=["intermediates"])
    sown = state.get("intermediates", {})

    def stacked(stack: str, name: str) -> Array:
        layers = range(module.config.num_layers)
        return jnp.stack([sown[f"{stack}_layers_{n}"][name]["weights"][0] for n in layers], axis=1)

    try:
        return (
            stacked("encoder", "self_attention"),
            stacked("decoder", "self_attention"),
            stacked("decoder", "cross_attention"),
        )
    except KeyError:
        raise InputError(
            f"model.attention={module.config.attention} never calls its `dropout`, which receives the weights; there "
            "are none to show"
        ) from None


def _batches(lengths: Sequence[int], mesh: Mesh) -> Iterator[tuple[list[int], int, int]]:
    """(indices, width, rows) of batches of similar lengths; long sentences are few to a batch, as memory is width²."""
    for width, members in by_bucket(lengths):
        most = max(1, _WEIGHTS_A_HEAD // width**2)
        size = most * mesh.devices.size
        for some in (members[start : start + size] for start in range(0, len(members), size)):
            each = -(-len(some) // mesh.devices.size)
            yield some, width, mesh.devices.size * min(most, 1 << (each - 1).bit_length())


def _maps(
    source: tuple[list[str], Words],
    target: tuple[list[str], Words],
    encoder: Float[np.ndarray, "N H S S"],
    decoder: Float[np.ndarray, "N H T T"],
    encoder_decoder: Float[np.ndarray, "N H T S"],
) -> AttentionMaps:
    """The maps of one pair, with labels and without padding."""
    (s, s_words), (t, t_words) = source, target
    read, read_words = _shifted(t, t_words)
    without_padding = lambda weights, rows, columns: weights[:, :, : len(rows), : len(columns)].copy()
    return AttentionMaps(
        source=s,
        target=t,
        encoder=AttentionMap(s, s, without_padding(encoder, s, s), s_words, s_words),
        decoder=AttentionMap(t, read, without_padding(decoder, t, read), t_words, read_words),
        encoder_decoder=AttentionMap(t, s, without_padding(encoder_decoder, t, s), t_words, s_words),
    )


def _labels(ids: Sequence[int], vocabulary: Tokenizer, at_end: bool) -> tuple[list[str], Words]:
    """The pieces, and the words: EOS, and runs of pieces without a space between; `at_end`: pieces end with spaces.

    In scripts without spaces each piece is a word of its own.
    """
    pieces = [vocabulary.piece(i) for i in ids]
    numbers = [0] * bool(pieces)
    for (last_id, last), (id, piece) in itertools.pairwise(zip(ids, pieces, strict=True)):
        begins = last.endswith(SPACE) if at_end else piece.startswith(SPACE)
        is_apart = any(map(WITHOUT_SPACES.match, (last.rstrip(SPACE)[-1:], piece.lstrip(SPACE)[:1])))
        numbers.append(numbers[-1] + (begins or is_apart or EOS in (last_id, id)))
    parts = [[id for id, _ in word] for _, word in itertools.groupby(zip(ids, numbers, strict=True), lambda x: x[1])]
    texts = [vocabulary.decode(part).strip() or "".join(map(vocabulary.piece, part)) for part in parts]
    return pieces, Words(numbers, texts)


def _marks_ends(vocabulary: Tokenizer) -> bool:
    """Whether the space belongs to the end of a word, as with subword-nmt's codes, not to its beginning."""
    pieces = [piece for piece in vocabulary.pieces() if piece != SPACE]
    return sum(piece.endswith(SPACE) for piece in pieces) > sum(piece.startswith(SPACE) for piece in pieces)


def _shifted(tokens: list[str], words: Words) -> tuple[list[str], Words]:
    """What the decoder reads: `START`, then all target tokens but the last."""
    numbers = [0, *(number + 1 for number in words.numbers[:-1])][: len(tokens)]
    texts = [START, *words.texts][: numbers[-1] + 1 if numbers else 0]
    return [START, *tokens[:-1]][: len(tokens)], Words(numbers, texts)


def _indicator(words: Words) -> Float[np.ndarray, "tokens words"]:
    """1 where a token belongs to a word, else 0."""
    return (np.asarray(words.numbers)[:, None] == np.arange(len(words.texts))[None]).astype(np.float64)
