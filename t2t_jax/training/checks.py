"""§5: what a config must fulfil before anything expensive begins.

`_RANGES` are those of the sections that only training reads. Model, token store and search check their own fields
(`TransformerConfig`, `StoreSettings`, `SearchOptions`). The functions check what depends on several fields.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import jax
from ml_collections import ConfigDict

from t2t_jax import sharding
from t2t_jax.data.bucketing import BUCKETINGS
from t2t_jax.data.corpora import choose_corpus
from t2t_jax.data.store_settings import StoreSettings
from t2t_jax.data.task import Vocabularies, task_of
from t2t_jax.decoding.ensemble import DTYPES
from t2t_jax.decoding.grammars import check_grammar, grammar_of
from t2t_jax.decoding.search_options import check_options
from t2t_jax.errors import InputError, shown
from t2t_jax.evaluation.metrics import METRICS
from t2t_jax.model.attention import check_variant
from t2t_jax.model.layers import check_positions
from t2t_jax.model.transformer import TransformerConfig
from t2t_jax.training.device_defaults import why_not_fused
from t2t_jax.training.loss import LOSSES
from t2t_jax.training.optimizer import OPTIMIZERS, SCHEDULES
from t2t_jax.validation import Range, choice

_STEPS = 2**31 - 1  # steps are counted in int32
_BYTES_PER_PARAMETER = 12  # in float32, with the two moments of Adam
_LEAST_DROPOUT_IN_BFLOAT16 = 0.0039  # 1 / (1 − it) is the first number above 1

_RANGES = {
    "data.tokens_per_batch": Range(1, 10**9),
    "data.num_buckets": Range(1, 10_000),
    "data.packing_shapes": Range(1, 16),
    "optimizer.learning_rate_factor": Range(0, open_below=True),
    "optimizer.warmup_steps": Range(1, _STEPS),
    "optimizer.beta1": Range(0, 1, open_above=True),
    "optimizer.beta2": Range(0, 1, open_above=True),
    "optimizer.epsilon": Range(0, open_below=True),
    "train.train_steps": Range(1, _STEPS),
    "train.label_smoothing": Range(0, 1, open_above=True),
    "train.r_drop": Range(0),
    "train.seed": Range(0, 2**32 - 1),  # what jax.random.key tells apart
    "train.accumulate": Range(0, 10**9, hint="0: as memory allows"),
    "train.log_interval": Range(1, _STEPS),
    "machine.model_parallel": Range(1, 1_000_000),
    "machine.memory_gib": Range(0),
    "machine.peak_tflops": Range(0),
    "machine.hang_timeout_minutes": Range(0),
    "machine.peer_timeout_seconds": sharding.PEER_TIMEOUT_SECONDS,
    "checkpoint.interval_minutes": Range(0),
    "checkpoint.interval_steps": Range(0, _STEPS),
    "checkpoint.keep": Range(1, _STEPS),
    "checkpoint.average_last": Range(1, _STEPS),
    "evaluate.interval_steps": Range(0, _STEPS),
    "evaluate.decode_sentences": Range(0, 10**9),
    "evaluate.samples": Range(0, 10**9),
}


def check(config: ConfigDict) -> None:
    """Refuses what would only fail later, naming the field, the value and what would work."""
    check_config(config)
    check_memory(config)


def check_config(config: ConfigDict) -> None:
    """`check` without the memory of this machine. Uses no device, unless for an attention or positions of one's own."""
    for field, allowed in _RANGES.items():
        section, name = field.split(".")
        allowed.check(field, config[section][name])
    check_data(config)
    check_model(config)
    check_dropout(config)
    check_machine(config)
    check_decoding(config)
    choice("optimizer.name", config.optimizer.name, OPTIMIZERS, is_open=True)
    choice("optimizer.schedule", config.optimizer.schedule, SCHEDULES, is_open=True)
    choice("train.loss", config.train.loss, LOSSES, is_open=True)
    check_own_options(config)
    choice("train.dtype", config.train.dtype, ["float32", "bfloat16"])
    choice("train.on_nonfinite", config.train.on_nonfinite, ["halt", "skip"])
    choice("evaluate.dtype", config.evaluate.dtype, DTYPES)
    if config.checkpoint.average_last > config.checkpoint.keep:
        raise InputError(
            f"checkpoint.average_last={config.checkpoint.average_last} needs checkpoint.keep to be at least as many; "
            f"got {config.checkpoint.keep}"
        )


def check_own_options(config: ConfigDict) -> None:
    """Refuses the options of a section where no entry of one's own could read them, or that JSON can't hold."""
    built_in = {
        "optimizer": (config.optimizer.name, config.optimizer.schedule) == ("adam", "inverse_sqrt"),
        "train": config.train.loss == "label_smoothed",
    }
    for section, reads_none in built_in.items():
        if reads_none and (options := config[section].options):
            raise InputError(
                f"{section}.options={shown(str(options.to_dict()))}: only entries of your own have options "
                "(CONTRIBUTING.md); leave them out"
            )
        _check_plain(f"{section}.options", config[section].options.to_dict())


def _check_plain(field: str, value: Any) -> None:
    """Refuses values that a run's config.json would not give back."""
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        for name, inner in value.items():
            _check_plain(f"{field}.{name}", inner)
        return
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_plain(field, item)
        return
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    if not (is_number or isinstance(value, str) or value is None):
        raise InputError(
            f"{field}={shown(str(value))}: an option is a text, a finite number, True, False, None, a list, or a dict "
            "with texts as keys"
        )


def check_data(config: ConfigDict) -> None:
    """Refuses an unknown task, corpus or metric, and shared embeddings of separate vocabularies."""
    settings, task = StoreSettings.of(config.data), task_of(config.data)
    choose_corpus(config.data.corpus, task.corpora)
    choice("data.bucketing", config.data.bucketing, BUCKETINGS)
    choice(f"task {config.data.task}: metric", task.metric, METRICS, is_open=True)
    if not settings.is_joint and config.model.share_embeddings:
        raise InputError(
            "model.share_embeddings=True needs one vocabulary; set it to False, or leave data.source_vocabulary and "
            "data.source_vocab_size empty and 0"
        )


def check_model(config: ConfigDict) -> None:
    """Refuses more positions than are learned, and sizes or an attention that do not fit together."""
    learned = _model_config(config).learned_positions
    if learned is not None and config.data.max_length > learned:
        raise InputError(
            f"data.max_length={config.data.max_length}: the model learns model.max_positions={learned} positions; "
            "lower the first or raise the second"
        )
    if config.model.positions not in ("sinusoidal", "t2t", "learned"):
        check_positions(config.model.positions, config.model.max_positions, config.model.d_model)
    if config.model.attention != "dot_product":
        check_variant(config.model.attention, config.model.num_heads, config.model.d_k, config.model.d_v)


def check_memory(config: ConfigDict) -> None:
    """Refuses more parameters than this machine can train."""
    count = _model_config(config).parameter_count
    needed, memory = _BYTES_PER_PARAMETER * count, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Several processes may share the state among their machines.
    if needed > memory and not jax.distributed.is_initialized():
        sizes = {f"model.{name}": config.model[name] for name in ("num_layers", "d_model", "d_ff")}
        for vocabulary in ("", "source_"):
            if not config.data[f"{vocabulary}vocabulary"] and (size := config.data[f"{vocabulary}vocab_size"]):
                sizes[f"data.{vocabulary}vocab_size"] = size
        named = ", ".join(f"{field}={value}" for field, value in sizes.items())
        raise InputError(
            f"{named}: {count:,} parameters and Adam's moments need {needed / 2**30:,.0f} GiB, more than the "
            f"{memory / 2**30:,.0f} GiB of this machine; make them smaller"
        )


def _model_config(config: ConfigDict) -> TransformerConfig:
    """The model, with vocabularies of the size that the config names; the pieces of a file are not known yet."""
    data = config.data
    target = 1 if data.vocabulary else data.vocab_size
    source = 1 if data.source_vocabulary else data.source_vocab_size or None
    return TransformerConfig(vocab_size=target, source_vocab_size=source, **config.model)


def check_dropout(config: ConfigDict) -> None:
    """Refuses a rate that bfloat16 rounds to 0, and to compare two passes that are equal, as there is no dropout."""
    rate = config.model.dropout
    if config.train.dtype == "bfloat16" and 0 < rate < _LEAST_DROPOUT_IN_BFLOAT16:
        raise InputError(
            f"model.dropout={rate}: with train.dtype=bfloat16 it drops nothing; give 0, or at least "
            f"{_LEAST_DROPOUT_IN_BFLOAT16}"
        )
    if config.train.r_drop and not (config.model.dropout or config.model.attention_dropout):
        raise InputError(
            f"train.r_drop={config.train.r_drop} needs model.dropout or model.attention_dropout above 0; without, it "
            "doubles the time of a step and changes nothing"
        )


def check_machine(config: ConfigDict) -> None:
    """Refuses ways to use the devices that exclude each other."""
    engine, parallel, heads = config.machine.engine, config.machine.model_parallel, config.model.num_heads
    choice("machine.engine", engine, ["jit", "pmap"])
    if engine == "pmap" and jax.distributed.is_initialized() and jax.process_count() > 1:
        raise InputError("machine.engine='pmap' is for a single process; several need machine.engine='jit'")
    if parallel > 1 and (heads % parallel or engine == "pmap"):
        raise InputError(
            f"machine.model_parallel={parallel} must divide model.num_heads={heads}, and needs machine.engine='jit'"
        )
    if config.machine.fused_attention and (reason := why_not_fused(config)):
        raise InputError(reason)
    if engine == "pmap" and config.machine.memory_gib:
        raise InputError(
            f"machine.memory_gib={config.machine.memory_gib} needs machine.engine='jit'; with pmap, set the number of "
            "microbatches by train.accumulate"
        )
    if engine == "pmap" and config.machine.shard_state:
        raise InputError("machine.shard_state=True needs machine.engine='jit'; pmap keeps the state whole everywhere")


def check_decoding(config: ConfigDict) -> None:
    """Refuses options of the search that are impossible, by the name of their field."""
    with _errors_of_decode():
        check_options(**config.decode)
        if config.decode.constrained:
            check_grammar(task_of(config.data))
    if not config.data.vocabulary and config.decode.beam_size > config.data.vocab_size:
        raise InputError(
            f"decode.beam_size must be at most data.vocab_size={config.data.vocab_size}; got {config.decode.beam_size}"
        )


def check_search(config: ConfigDict, vocabularies: Vocabularies) -> None:
    """Refuses a beam larger than the target vocabulary, and a constrained search that has no grammar for it.

    The target vocabulary may be smaller than `data.vocab_size`.
    """
    if config.decode.beam_size > (size := len(vocabularies.target)):
        raise InputError(
            f"decode.beam_size must be at most {size}, the size of the target vocabulary; got {config.decode.beam_size}"
        )
    if config.decode.constrained:
        with _errors_of_decode():
            grammar_of(task_of(config.data), vocabularies)


@contextlib.contextmanager
def _errors_of_decode() -> Iterator[None]:
    """Puts "decode." before the option that an error names."""
    try:
        yield
    except InputError as error:
        raise InputError(f"decode.{error}") from None
