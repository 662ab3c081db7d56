"""§6.1: a trained model as a translator: text in, text and probabilities out."""

import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from t2t_jax import sharding
from t2t_jax.checkpoints import Checkpoints
from t2t_jax.data.tokenizer import Tokenizer
from t2t_jax.decoding.beam_search import Hypotheses, beam_search
from t2t_jax.errors import InputError
from t2t_jax.files import read_text
from t2t_jax.model.transformer import Transformer, TransformerConfig, param_shapes, reorder_cache
from t2t_jax.run_folder import RunFolder

# Batches come in few shapes, each compiled once: lengths and rows are rounded up to these.
_SHORTEST = 16  # subwords; longer lengths double
_TOKENS_PER_BATCH = 2048  # source positions, padding included
_MOST_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One translation. `log_prob` is the natural logarithm, summed over `tokens` with EOS.

    `score` = log_prob / ((5 + num_tokens) / 6)^alpha. An unfinished one reached the length limit without EOS.
    """

    text: str
    tokens: list[str]
    log_prob: float
    score: float
    num_tokens: int
    token_log_probs: list[float]
    finished: bool = True


@dataclasses.dataclass(frozen=True)
class Score:
    """How likely the model finds a given translation."""

    log_prob: float
    token_log_probs: list[float]
    num_tokens: int


class Translator:
    """Translates and scores sentences with one set of parameters, on all devices of `mesh`."""

    def __init__(
        self, model: Transformer, params: Any, tokenizer: Tokenizer, *, max_length: int, mesh: Mesh | None = None
    ):
        self._model, self._tokenizer = model, tokenizer
        self._max_length = max_length  # of training, to warn beyond
        self._mesh = mesh or sharding.make_mesh()
        self._params = jax.device_put(params, sharding.replicated(self._mesh))

    def translate(
        self,
        sentences: Sequence[str],
        *,
        beam_size: int = 4,
        alpha: float = 0.6,
        n_best: int = 1,
        max_extra_length: int = 50,
    ) -> list[list[Hypothesis]]:
        """Up to `n_best` translations of each sentence, best first; an empty sentence has an empty one.

        A translation has at most as many subwords as its source, both with EOS, plus `max_extra_length`.
        """
        check_options(beam_size, alpha, n_best, max_extra_length)
        encoded = self._tokenizer.encode_many(sentences)
        for sentence, ids in zip(sentences, encoded, strict=True):
            if len(ids) > self._max_length:
                logging.warning(
                    "a sentence of %d subwords is longer than any in training (%d) and may be translated badly: %s…",
                    len(ids), self._max_length, sentence[:40],
                )  # fmt: skip
        answers = [[_EMPTY] for _ in sentences]
        todo = [index for index, ids in enumerate(encoded) if len(ids) > 1]
        for chosen, width, rows in _batches([len(encoded[index]) for index in todo]):
            indices = [todo[i] for i in chosen]
            inputs = _pad([encoded[index] for index in indices], rows, width)
            limits = np.zeros(rows, np.int32)  # rows that only fill the batch stop at once
            limits[: len(indices)] = [len(encoded[index]) + max_extra_length for index in indices]
            found = _search(
                self._model,
                self._params,
                **self._put(inputs=inputs, max_lengths=limits),
                beam_size=beam_size,
                alpha=float(alpha),
                n_best=n_best,
                max_steps=width + max_extra_length,
            )
            found = jax.tree.map(np.asarray, found)
            for row, index in enumerate(indices):
                answers[index] = self._hypotheses(jax.tree.map(lambda x, row=row: x[row], found))
        return answers

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        """The log-probability of each pair's target given its source."""
        sources = self._tokenizer.encode_many([source for source, _ in pairs])
        targets = self._tokenizer.encode_many([target for _, target in pairs])
        scores = [None] * len(pairs)
        lengths = [max(len(s), len(t)) for s, t in zip(sources, targets, strict=True)]
        for indices, width, rows in _batches(lengths):
            inputs, outputs = (_pad([side[i] for i in indices], rows, width) for side in (sources, targets))
            found = _token_log_probs(self._model, self._params, **self._put(inputs=inputs, targets=outputs))
            found = np.asarray(found)
            for row, index in enumerate(indices):
                values = [float(x) for x in found[row, : len(targets[index])]]
                scores[index] = Score(sum(values), values, len(values))
        return scores

    def _put(self, **arrays: np.ndarray) -> dict[str, jax.Array]:
        return sharding.put_rows(arrays, self._mesh)

    def _hypotheses(self, found: Hypotheses) -> list[Hypothesis]:
        """One sentence's hypotheses, [W, …] each, as text."""
        answers = []
        for rank in np.flatnonzero(found.scores > -np.inf):
            length = int(found.lengths[rank])
            ids = found.tokens[rank, :length]
            answers.append(
                Hypothesis(
                    text=self._tokenizer.decode(ids),
                    tokens=self._tokenizer.tokens(ids),
                    log_prob=float(found.log_probs[rank]),
                    score=float(found.scores[rank]),
                    num_tokens=length,
                    token_log_probs=[float(x) for x in found.token_log_probs[rank, :length]],
                    finished=bool(found.finished[rank]),
                )
            )
        return answers


_EMPTY = Hypothesis(text="", tokens=[], log_prob=0.0, score=0.0, num_tokens=0, token_log_probs=[])


class TrainedModel(NamedTuple):
    """What a run folder has learned, and where it was read from."""

    run: RunFolder
    model: Transformer
    params: Any
    tokenizer: Tokenizer
    step: int


def load(path: str | Path, step: int | None = None) -> Translator:
    """The translator a run folder holds: checkpoint `step`, else the averaged one, else the last."""
    trained = restore(path, step)
    max_length = trained.run.config["data"]["max_length"]
    return Translator(trained.model, trained.params, trained.tokenizer, max_length=max_length)


def restore(path: str | Path, step: int | None = None) -> TrainedModel:
    """Model, parameters and vocabulary of a run folder; `step` as for `load`."""
    run = RunFolder.open(path)
    tokenizer = Tokenizer(run.vocabulary)
    model = Transformer(TransformerConfig(vocab_size=len(tokenizer), **run.config["model"]))
    averaged, last = (Checkpoints(folder) for folder in (run.averaged, run.checkpoints))
    checkpoints = averaged if averaged.steps() and step in (None, *averaged.steps()) else last
    if step is None and not checkpoints.steps():
        raise InputError(f"workdir: {path} has no checkpoint yet; train it with --config=…")
    step = checkpoints.steps()[-1] if step is None else step
    checkpoint = checkpoints.restore(step, param_shapes(model))
    if checkpoint.metadata["vocabulary"] != tokenizer.checksum:
        raise InputError(
            f"workdir: {run.vocabulary} is not the vocabulary checkpoint {step} was trained with; copy it back"
        )
    kind = "averaged checkpoint" if checkpoints is averaged else "checkpoint"
    print(f"{path}: {kind} {step}", file=sys.stderr)
    return TrainedModel(run, model, checkpoint.params, tokenizer, step)


@functools.partial(jax.jit, static_argnames=("model", "beam_size", "alpha", "n_best", "max_steps"))
def _search(
    model: Transformer,
    params: Any,
    inputs: Int[Array, "B S"],
    max_lengths: Int[Array, " B"],
    *,
    beam_size: int,
    alpha: float,
    n_best: int,
    max_steps: int,
) -> Hypotheses:
    variables = {"params": params}
    cache = model.apply(variables, inputs, beam_size, max_steps, method=Transformer.init_cache)
    return beam_search(
        lambda tokens, cache: model.apply(variables, tokens, cache, method=Transformer.decode_step),
        cache,
        max_lengths,
        beam_size=beam_size,
        alpha=alpha,
        n_best=n_best,
        max_steps=max_steps,
        reorder=reorder_cache,
    )


@functools.partial(jax.jit, static_argnames="model")
def _token_log_probs(
    model: Transformer, params: Any, inputs: Int[Array, "B S"], targets: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    log_probs = jax.nn.log_softmax(model.apply({"params": params}, inputs, targets))
    return jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]


def _batches(lengths: Sequence[int]) -> Iterator[tuple[list[int], int, int]]:
    """(indices, width, rows) of batches of similar lengths, longest first."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    start = 0
    while start < len(order):
        width = max(_SHORTEST, 1 << (lengths[order[start]] - 1).bit_length())
        most = max(1, min(_MOST_ROWS, _TOKENS_PER_BATCH // width))
        indices = [i for i in order[start : start + most] if width == _SHORTEST or 2 * lengths[i] > width]
        # A few sentences alone, as a person types them, need not wait for a full batch.
        rows = most if len(indices) > most // 8 else max(1, most // 8)
        yield indices, width, rows
        start += len(indices)


def _pad(sentences: Sequence[Sequence[int]], rows: int, width: int) -> np.ndarray:
    padded = np.zeros((rows, width), np.int32)
    for row, ids in enumerate(sentences):
        padded[row, : len(ids)] = ids
    return padded


def check_options(beam_size: int, alpha: float, n_best: int, max_extra_length: int) -> None:
    """Refuses options of `Translator.translate` that make no sense."""
    if beam_size < 1:
        raise InputError(f"beam_size must be at least 1; got {beam_size}")
    if not 1 <= n_best <= beam_size:
        raise InputError(f"n_best must be between 1 and beam_size={beam_size}; got {n_best}")
    if alpha < 0:
        raise InputError(f"alpha must be at least 0; got {alpha}")
    if max_extra_length < 0:
        raise InputError(f"max_extra_length must be at least 0; got {max_extra_length}")


def score_files(translator: Translator, source: str, target: str) -> list[Score]:
    """The score of each line of a file as the translation of the same line of another."""
    sides = [read_text(field, path) for field, path in (("source", source), ("target", target))]
    if len(sides[0]) != len(sides[1]):
        raise InputError(
            f"{source} has {len(sides[0])} lines, {target} has {len(sides[1])}; they must pair line by line"
        )
    return translator.score(list(zip(*sides, strict=True)))
