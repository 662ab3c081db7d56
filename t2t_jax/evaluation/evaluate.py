"""§6: the perplexity of a model on a test set, and what its outputs are worth by the metric of its task."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from t2t_jax import sharding
from t2t_jax.data.preparation import open_store
from t2t_jax.decoding.search_options import check_options
from t2t_jax.decoding.trained_model import TrainedModel, first_run, restore_all
from t2t_jax.decoding.translator import Translator, translator_of
from t2t_jax.errors import InputError
from t2t_jax.evaluation.metrics import METRICS, Metric
from t2t_jax.files import check_output, check_pairing, is_url, output_path, read_text, sha256, write_json
from t2t_jax.progress_bar import progress_bar
from t2t_jax.temporary_folders import original_of

_SCORED_TOGETHER = 1024  # sentence pairs, between two updates of the progress bar
_RECORDED = ("beam_size", "alpha", "early_stop", "min_length")  # the decode options that are part of the scores


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The scores of a test set, by which metric, and the outputs they were computed from.

    `scores["headline"]` is the name of the score by which runs are compared; `unit` is what the perplexity is per.
    """

    scores: dict[str, Any]
    outputs: list[str]
    metric: Metric
    unit: str = "subword"


def perplexities(
    translator: Translator, sources: Sequence[str], references: Sequence[str], name: str = "test"
) -> dict[str, float]:
    """exp of the mean unsmoothed cross-entropy of the references, EOS included: per subword and per word.

    Words are what white space separates in the reference, and EOS counts as one more. The sum of the log-probabilities
    is the same, so the perplexity per word compares models with different vocabularies.
    """

    def score(pairs):
        found = []
        with _bar(f"scoring {name}", pairs) as bar:
            for start in range(0, len(pairs), _SCORED_TOGETHER):
                found += translator.score(pairs[start : start + _SCORED_TOGETHER])
                bar.update(len(found) - start)
        return [(-s.log_prob, s.num_tokens) for s in found]

    scores = sharding.share_out(score, list(zip(sources, references, strict=True)))
    nll = sum(nll for nll, _ in scores)
    return {
        "perplexity": _exp(nll / sum(num_tokens for _, num_tokens in scores)),
        "perplexity_per_word": _exp(nll / sum(len(reference.split()) + 1 for reference in references)),
    }


def _bar(what: str, items: Sequence[Any]) -> tqdm:
    """A progress bar over the sentences of this process, shown by the main one alone.

    Without it an evaluation of many minutes would be silent, and a sweep would take it for a hang.
    """
    return progress_bar(
        total=len(items), desc=what, unit=" sentences", unit_scale=False, leave=False, disable=not sharding.is_main()
    )


def _exp(x: float) -> float:
    """At most e⁷⁰⁰: a "word" may be a whole sentence of Chinese, and JSON has no infinity."""
    return math.exp(min(x, 700.0))


def evaluate(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    *,
    target_language: str | None = None,
    name: str = "test",
    decode_sentences: int | None = None,
    **options: Any,
) -> Evaluation:
    """Perplexities of the references, and scores of the decoded sources against them; progress on standard error.

    `options` are those of `Translator.translate`. Several processes share the sentences. At most the first
    `decode_sentences` sources are decoded, by default all; with 0 there are perplexities alone. The scores of Moses
    tokens, the paper's BLEU among them, need `target_language`. If the task has a grammar, the scores also say how many
    outputs were not well-formed, and which repairs they needed.
    """
    metric, unit = METRICS[translator.task.metric], "symbol" if translator.task.target_symbols else "subword"
    if len(sources) != len(references):
        raise InputError(f"{len(sources)} sources but {len(references)} references; they must pair line by line")
    if not sources:
        raise InputError("there is no sentence; give at least one source and its reference")
    translator.preprocessor.check_lengths(sources, references)

    def decode(sources):
        with _bar(f"decoding {name}", sources) as bar:
            best = [found[0] for found in translator.translate(sources, on_progress=bar.update, **options)]
        return [(hypothesis.text, dict(hypothesis.repairs)) for hypothesis in best]

    scores = perplexities(translator, sources, references, name) | {"sentences": len(references)}
    if decode_sentences == 0:
        return Evaluation(scores, [], metric, unit)
    sources, references = sources[:decode_sentences], references[:decode_sentences]
    decoded = sharding.share_out(decode, sources)
    outputs, search = [text for text, _ in decoded], check_options(**options)
    lowercase = translator.vocabularies.target.lowercases
    scores |= {
        **_plain(metric.score(sources, outputs, references, target_language, lowercase)),
        "headline": metric.headline,
        **{option: getattr(search, option) for option in _RECORDED},
    }
    if translator.task.grammar:
        scores |= _well_formed([repairs for _, repairs in decoded])
        scores["constrained"] = options.get("constrained", False)
    return Evaluation(scores, outputs, metric, unit)


def _plain(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Python's numbers in place of NumPy's and JAX's, which JSON does not have."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in scores.items()}


def _well_formed(repairs: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """How many outputs had to be repaired, and how often in each way."""
    total = sum(map(collections.Counter, repairs), collections.Counter())
    return {"invalid": sum(map(bool, repairs)), "repairs": dict(total.most_common())}


def evaluate_run(
    workdir: str,
    *,
    step: int | str | None,
    source: str | None,
    reference: str | None,
    output: str | None,
    dtype: str | None,
    split: str | None = None,
    **options: Any,
) -> tuple[dict[str, Any], str | None]:
    """Scores a run on its test sets, or on two text files, and stores the scores in RUN/evaluations or `output`.

    Returns the scores and the name of the file in RUN, None with `output`. If RUN is the copy of a URL, that file is
    there only after the upload that follows.
    With `split` "dev" its dev set is scored, which decoding may be tuned on, in place of the test sets. The checkpoint,
    the options and the checksums of the files are stored with the scores; result.json is not changed. `options` are
    those of `Translator.translate`, `dtype` is that of the computation; by default the run's.
    """
    runs = workdir.split(",")
    _check_stored(output, runs)
    if (source is None) != (reference is None):
        raise InputError("--source and --reference go together; give both, or neither for the run's own test set")
    if source is not None and split is not None:
        raise InputError(f"--split={split} is of the run's own data; leave it out, or --source and --reference")
    if output:
        _check_output(output, map(original_of, runs), [path for path in (source, reference) if path])
    split, run = split or "test", first_run(workdir)
    if not output:
        run.check_evaluations()
    options = run.decode_options(**options)
    check_options(**options)
    config = run.config
    dtype = dtype or config.get("evaluate", {}).get("dtype", "float32")  # an imported run has no such section
    if source is not None:  # read before the model is
        sides = read_text("source", source), read_text("reference", reference)
        check_pairing((source, reference), tuple(map(len, sides)))
        texts, scored = {"test": sides}, {"files": {p: sha256(Path(p).expanduser()) for p in (source, reference)}}
    members = restore_all(workdir, step)
    if source is None:
        texts, fingerprint = _own_sets(members[0], split)
        scored = {"files": {"data": fingerprint}, "split": split}
    translator, language = translator_of(members, dtype), config["data"]["target_language"]
    found = {
        name: evaluate(translator, *sides, target_language=language, name=name, **options).scores
        for name, sides in texts.items()
    }
    first_set, *_ = found
    scores = found.pop(first_set)
    if found:
        scores["other_tests"] = found
    conditions = {
        "step": members[0].step,
        "checkpoints": {original_of(member.run.path): member.checkpoint for member in members},
        "averaged_steps": [member.averaged_steps for member in members],
        "dtype": dtype,
        "options": options,
        **scored,
    }
    if output:
        write_json(output_path(output), scores | conditions)
        return scores, None
    kept = run.keep_evaluation(scores, conditions)
    return scores, f"{original_of(run.path)}/{kept.relative_to(run.path)}"


def _check_stored(output: str | None, runs: Sequence[str]) -> None:
    """Refuses to score, without `output`, what has no run folder in which the scores could be stored."""
    if output:
        return
    if len(runs) > 1:
        raise InputError("--workdir names several runs, and an ensemble has no folder; give --output=FILE")
    if (original := original_of(runs[0])) != runs[0] and not is_url(original):
        raise InputError(
            f"workdir: {original} is a model of another system, without a test set and a folder for scores; give "
            "--source, --reference and --output=FILE"
        )


def _check_output(output: str, runs: Iterable[str], inputs: Sequence[str]) -> None:
    """Refuses to write the scores over a file of a run or over the text that is scored."""
    path = check_output("output", output).resolve()
    if path in [Path(given).expanduser().resolve() for given in inputs]:
        raise InputError(f"output={output}: is the text to score; give another path")
    if any(path.is_relative_to(Path(run).resolve()) for run in runs):
        raise InputError(f"output={output}: is inside the run; leave out --output, and the scores are in evaluations/")


def _own_sets(trained: TrainedModel, split: str) -> tuple[dict[str, tuple[list[str], list[str]]], str]:
    """Both sides of a run's own dev set, or of each of its test sets, 'test' first; and the fingerprint of its data."""
    store = open_store(trained.run.config["data"])
    if store.fingerprint != trained.data:
        raise InputError(
            f"data: what the config of {trained.run.path} names is not the text it was trained with; give it back, or "
            "give --source and --reference"
        )
    names = store.test_sets if split == "test" else [split]
    return {name: store.held_out(name) for name in names}, store.fingerprint
