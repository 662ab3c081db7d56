"""§6.1: a trained model as a translator: text in, text and probabilities out."""

import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from t2t_jax import sharding
from t2t_jax.data.task import TASKS, Task, Vocabularies
from t2t_jax.decoding.attention_maps import AttentionMaps, attention_maps
from t2t_jax.decoding.batch_shapes import bucket_rows, by_bucket, pad_pairs
from t2t_jax.decoding.constraints import Constraint
from t2t_jax.decoding.continuous_batching import Request, search_all
from t2t_jax.decoding.ensemble import (
    DTYPES,
    Ensemble,
    as_computed,
    average_probabilities,
    computed_shapes,
    computing_in,
)
from t2t_jax.decoding.grammars import grammar_of
from t2t_jax.decoding.hypothesis import Hypothesis, empty, join
from t2t_jax.decoding.preprocessing import Preprocessor
from t2t_jax.decoding.search_options import SearchOptions, check_options
from t2t_jax.decoding.search_state import Hypotheses
from t2t_jax.decoding.trained_model import TrainedModel, restore_all
from t2t_jax.errors import DamagedError, InputError, shown
from t2t_jax.model.transformer import Transformer
from t2t_jax.threads import all_at_once
from t2t_jax.validation import Range, check_number, choice


@dataclasses.dataclass(frozen=True)
class Score:
    """How likely the model finds a given translation."""

    log_prob: float
    token_log_probs: list[float]
    num_tokens: int


class Translator:
    """Decodes and scores sentences with one model, or an ensemble, on all devices of `mesh`.

    `max_length` is that of training, in subwords: a warning is given where a sentence is longer.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        vocabularies: Vocabularies,
        *,
        max_length: int,
        task: Task = TASKS["translation"],
        mesh: Mesh | None = None,
    ):
        self.vocabularies, self.task = vocabularies, task
        self.preprocessor = Preprocessor(vocabularies, task, max_length, _learned_positions(ensemble))
        self.mesh = mesh or sharding.make_mesh()
        params = tuple(as_computed(*pair) for pair in zip(*ensemble, strict=True))
        self.ensemble = Ensemble(ensemble.modules, jax.device_put(params, sharding.replicated(self.mesh)))

    def translate(
        self,
        sentences: Sequence[str],
        *,
        max_extra_length: int = 50,
        prefixes: Sequence[str] | None = None,
        constrained: bool = False,
        split_sentences: bool = False,
        seed: int = 0,
        on_progress: Callable[[int], None] = lambda count: None,
        first_line: int | None = 1,
        **options: Any,
    ) -> list[list[Hypothesis]]:
        """Up to `n_best` different translations of each sentence, best first; an empty sentence has an empty one.

        `options` are those of `SearchOptions`: `beam_size=4, alpha=0.6, n_best=1, …`; `min_length` is 2 by default
        (`check_options`). A translation has at most as many subwords as its source, both with EOS, or as `min_length`
        or its prefix if these are more, plus `max_extra_length`. Each begins with its prefix, if `prefixes` are given.
        `constrained` allows only outputs that are well-formed by the task's grammar: in parsing, one tree over exactly
        the words. Samples are a function of `seed` and the sentence. `on_progress` is called with the number of
        sentences that have just been completed.
        With `split_sentences`, the sentences of a line are translated separately. So are the parts of one beyond
        `longest_whole` (see long_sentences.py). Neither works where the task has a grammar. Warnings count lines from
        `first_line`; None: there are none.
        """
        check_lists(sentences=sentences, prefixes=prefixes)
        sentences, prefixes = list(sentences), None if prefixes is None else list(prefixes)
        search = check_options(
            max_extra_length=max_extra_length, constrained=constrained, split_sentences=split_sentences, **options
        )
        check_number("seed", seed, Range(-math.inf), is_whole=True)
        if constrained:
            search = dataclasses.replace(search, constraint=self._grammar(search, prefixes))
        self._check_arguments(sentences, prefixes, search)
        sentences = self.preprocessor.plain(sentences)
        sources = [self.task.preprocess_source(sentence) for sentence in sentences]
        parts = self.preprocessor.encode_parts(sources, split_sentences, first_line)
        starts = [[]] * len(sentences)
        if prefixes is not None:
            starts = self.preprocessor.encode_prefixes(prefixes, first_line or 1)
        requests = [
            _request(ids, [] if number else start, search.min_length, max_extra_length, int(seed) + number)
            for start, of_line in zip(starts, parts, strict=True)
            for number, ids in enumerate(of_line)
        ]
        if search.constraint and (features := search.constraint.features):
            texts = itertools.chain.from_iterable(map(self._part_texts, sources, parts))
            requests = _with_features(requests, [features(text) for text in texts])
        found = iter(self._search(requests, [len(of_line) for of_line in parts], search, on_progress))
        joined = [join(list(itertools.islice(found, len(of_line))), search.alpha) for of_line in parts]
        return [self._postprocessed(*pair) for pair in zip(sentences, joined, strict=True)]

    def _search(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        search: SearchOptions,
        on_progress: Callable[[int], None],
    ) -> list[list[Hypothesis]]:
        """The hypotheses of each request; the first `counts[0]` are the parts of the first line, and so on."""
        found, missing = [None] * len(requests), list(counts)
        lines = [line for line, count in enumerate(counts) for _ in range(count)]  # of each request
        on_progress(missing.count(0))
        for results in search_all(self.ensemble, requests, search, self.mesh):
            on_progress(0)  # which may raise
            for request, hypotheses in results:
                found[request] = self._hypotheses(hypotheses)
                missing[lines[request]] -= 1
                on_progress(int(missing[lines[request]] == 0))
        return found

    def _grammar(self, search: SearchOptions, prefixes: Sequence[str] | None) -> Constraint:
        """The constraint of `constrained`."""
        if search.constraint:
            raise InputError("constrained: there is another constraint; give one of them")
        if prefixes is not None:
            raise InputError("constrained: a prefix may leave no output that is well-formed; give one of them")
        return grammar_of(self.task, self.vocabularies)

    def _part_texts(self, source: str, parts: list[list[int]]) -> list[str]:
        """The text of each part of a preprocessed source."""
        return [source] if len(parts) == 1 else [self.vocabularies.source.decode(ids) for ids in parts]

    def _postprocessed(self, source: str, hypotheses: list[Hypothesis]) -> list[Hypothesis]:
        """The hypotheses with the text that the task makes of the model's output; of equal texts the best."""
        if not self.task.postprocesses:  # translations of other subwords are other hypotheses
            return hypotheses
        found = {}
        for hypothesis in hypotheses:
            text, repairs = self.task.postprocess_output(source, hypothesis.text)
            found.setdefault(text, dataclasses.replace(hypothesis, text=text, repairs=dict(repairs)))
        return list(found.values())

    def _check_arguments(self, sentences: Sequence[str], prefixes: Sequence[str] | None, search: SearchOptions) -> None:
        if prefixes is not None and len(prefixes) != len(sentences):
            raise InputError(f"prefixes must be as many as the {len(sentences)} sentences; got {len(prefixes)}")
        if search.width > (size := len(self.vocabularies.target)):
            name = "n_best" if search.sampling else "beam_size"
            raise InputError(f"{name} must be at most {size}, the size of the vocabulary; got {search.width}")

    def score(self, pairs: Sequence[tuple[str, str]], *, first_line: int = 1) -> list[Score]:
        """The log-probability of each pair's target given its source; neither may be beyond `longest_whole`.

        Errors count lines from `first_line`.
        """
        pairs = list(pairs)
        for index, pair in enumerate(pairs):
            if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
                raise InputError(f"pairs: pair {index} must be (source, target); got {shown(pair)}")
        texts = [source for source, _ in pairs]
        sources = self.preprocessor.encode_sources(texts)
        targets = self.preprocessor.encode_targets(texts, [target for _, target in pairs], first_line=first_line)
        self.preprocessor.check_length("source", sources, first_line)
        self.preprocessor.check_length("target", targets, first_line)
        scores = [None] * len(pairs)
        lengths = [max(len(s), len(t)) for s, t in zip(sources, targets, strict=True)]
        batches = list(_batches(lengths, self.mesh))
        _compile_scoring(self.ensemble.modules, {(rows, width) for _, width, rows in batches}, self.mesh)
        for indices, width, rows in batches:
            batch = sharding.put_rows(pad_pairs(indices, sources, targets, rows, width), self.mesh)
            found = np.asarray(_token_log_probs(*self.ensemble, **batch))
            _check_numbers(found)
            for row, index in enumerate(indices):
                values = [float(x) for x in found[row, : len(targets[index])]]
                scores[index] = Score(sum(values), values, len(values))
        return scores

    def attention(
        self,
        sources: Sequence[str],
        targets: Sequence[str] | None = None,
        *,
        tokens: Sequence[Sequence[str]] | None = None,
        **options: Any,
    ) -> list[AttentionMaps]:
        """The attention weights of all layers and heads for each source and its target (Figures 3–5).

        `tokens`, in place of `targets`, are those of a hypothesis each, whose text may be encoded into others. Without
        either, for the best translation that `translate` finds with `options`. Neither side may be beyond
        `longest_whole` or beyond the learned positions. An ensemble has no attention weights of its own and is refused.
        """
        check_lists(sources=sources, targets=targets, tokens=tokens)
        sources = list(sources)
        given = {name: list(value) for name, value in (("targets", targets), ("tokens", tokens)) if value is not None}
        if options.get("split_sentences"):
            raise InputError("split_sentences: attention is between one source and its target; give a sentence each")
        if (count := len(self.ensemble.modules)) > 1:
            raise InputError(f"workdir: attention weights are those of one model; got {count}; give one run")
        if len(given) > 1:
            raise InputError("tokens: there are targets too; give one or the other")
        for name, value in given.items():
            if len(value) != len(sources):
                raise InputError(f"{name} must be as many as the {len(sources)} sources; got {len(value)}")
            if options:
                raise InputError(f"{next(iter(options))} has no effect where {name} are given; give one or the other")
        encoded = self.preprocessor.encode_sources(sources)
        self.preprocessor.check_length("source", encoded, within_positions=True)  # of longer ones only parts are read
        target_ids = self._target_ids(sources, given, options)
        self.preprocessor.check_length("target", target_ids, within_positions=True)
        found = attention_maps(self.ensemble, self.vocabularies, encoded, target_ids, self.mesh)
        for maps in found:
            _check_numbers(maps.decoder.weights)
        return found

    def _target_ids(
        self, sources: Sequence[str], given: Mapping[str, Sequence[Any]], options: Mapping[str, Any]
    ) -> list[list[int]]:
        """The ids of the `targets` or `tokens` that are given to `attention`, else of its own translations."""
        if "targets" in given:
            return self.preprocessor.encode_targets(sources, given["targets"])
        tokens = given.get("tokens")
        if tokens is None:
            tokens = [hypotheses[0].tokens for hypotheses in self.translate(sources, **options)]
        for of_hypothesis in tokens:
            check_lists(tokens=of_hypothesis)
        return [self.vocabularies.target.ids(of_hypothesis) for of_hypothesis in tokens]

    def _hypotheses(self, found: Hypotheses) -> list[Hypothesis]:
        """One sentence's hypotheses, [W, …] each, as text; equal ones once."""
        _check_numbers(found.scores)
        vocabulary = self.vocabularies.target
        answers = {}
        for rank in np.flatnonzero(found.scores > -np.inf):
            length = int(found.lengths[rank])
            ids = found.tokens[rank, :length]
            hypothesis = Hypothesis(
                text=vocabulary.decode(ids),
                tokens=vocabulary.tokens(ids),
                log_prob=float(found.log_probs[rank]),
                score=float(found.scores[rank]),
                num_tokens=length,
                token_log_probs=[float(x) for x in found.token_log_probs[rank, :length]],
                finished=bool(found.finished[rank]),
            )
            answers.setdefault(tuple(ids.tolist()), hypothesis)
        if not answers:
            logging.warning("the constraints allow no %s of a sentence; it is left empty", self.task.output)
        return list(answers.values()) or [empty(finished=False)]


def _check_numbers(scores: np.ndarray) -> None:
    if np.isnan(scores).any() or np.isposinf(scores).any():
        raise DamagedError(
            "the model computes scores that are not numbers (NaN or +∞): its parameters are damaged, or a function "
            "that the config names or a constraint is wrong; give another checkpoint with --step"
        )


def _request(ids: list[int], prefix: list[int], min_length: int, max_extra_length: int, seed: int) -> Request:
    return Request(
        ids=ids,
        max_length=max(max(len(ids), min_length, len(prefix)) + max_extra_length, len(prefix) + 1),
        prefix=prefix,
        seed=(zlib.crc32(np.asarray(ids, np.int32)) + seed) % 2**31,
    )


def _with_features(requests: Sequence[Request], features: Sequence[Sequence[int]]) -> list[Request]:
    """The requests, each with the features of its sentence, which must be as many for all."""
    features = [_checked_features(of_text) for of_text in features]
    if len(counts := sorted(set(map(len, features)))) > 1:
        raise InputError(f"constraint: features must be as many for each sentence; got {counts[0]} and {counts[-1]}")
    return [request._replace(features=of_text) for request, of_text in zip(requests, features, strict=True)]


def _checked_features(features: Any) -> list[int]:
    """Any array of whole numbers of 32 bits as a list."""
    found = np.asarray(features)
    if found.ndim != 1:
        raise InputError(f"constraint: features must return a list of integers; got {shown(features)}")
    values = found.tolist()
    for value in values:
        check_number("constraint: a feature", value, Range(-(2**31), 2**31 - 1), is_whole=True)
    return values


def load(path: str | Path, step: int | str | None = None, *, dtype: str = "float32") -> Translator:
    """The translator a run folder holds; several folders with commas between are an ensemble.

    `step` is the number of a checkpoint, 'last' or 'averaged'; None is the averaged one if there is one, else the last.
    An ensemble translates by the mean of its members' probabilities.
    """
    return translator_of(restore_all(path, step), dtype)


def translator_of(members: Sequence[TrainedModel], dtype: str) -> Translator:
    """The translator of one model, or of an ensemble, that computes in one of `ensemble.DTYPES`."""
    choice("dtype", dtype, DTYPES)
    modules = tuple(computing_in(dtype, member.model) for member in members)
    max_length = min(member.run.config["data"]["max_length"] for member in members)
    ensemble = Ensemble(modules, tuple(member.params for member in members))
    return Translator(ensemble, members[0].vocabularies, max_length=max_length, task=members[0].task)


def _learned_positions(ensemble: Ensemble) -> int | None:
    """The fewest positions that a model of the ensemble has learned; None if none learns them."""
    learned = [module.config.learned_positions for module in ensemble.modules]
    return min((count for count in learned if count is not None), default=None)


@functools.partial(jax.jit, static_argnames="modules")
def _token_log_probs(
    modules: tuple[Transformer, ...], params: tuple[Any, ...], inputs: Int[Array, "B S"], targets: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    logits = [module.apply({"params": p}, inputs, targets) for module, p in zip(modules, params, strict=True)]
    log_probs = jax.nn.log_softmax(average_probabilities(logits))
    return jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]


def _compile_scoring(modules: tuple[Transformer, ...], shapes: Collection[tuple[int, int]], mesh: Mesh) -> None:
    """Compiles the programs of all shapes `[B, S]` at the same time, not each when its batch comes."""
    if len(shapes) > 1:
        all_at_once([functools.partial(_compile_token_log_probs, modules, shape, mesh) for shape in shapes])


@functools.lru_cache(maxsize=256)
def _compile_token_log_probs(modules: tuple[Transformer, ...], shape: tuple[int, int], mesh: Mesh) -> None:
    batch = dict.fromkeys(("inputs", "targets"), jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding.by_rows(mesh)))
    _token_log_probs.lower(modules, computed_shapes(modules, mesh), **batch).compile()


def _batches(lengths: Sequence[int], mesh: Mesh) -> Iterator[tuple[list[int], int, int]]:
    """(indices, width, rows) of batches of similar lengths, longest first, in the shapes of the search."""
    for width, members in by_bucket(lengths):
        rows = bucket_rows(width, len(members), mesh)
        for start in range(0, len(members), rows):
            yield members[start : start + rows], width, rows


def check_lists(**arguments: Iterable[Any] | None) -> None:
    """Refuses a str in place of several, which would be read as a list of its characters."""
    for name, value in arguments.items():
        if isinstance(value, str):
            raise InputError(f"{name} must be a list of str; got one str; put it in [ ]")
