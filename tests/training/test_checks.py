"""Configs that are refused before training, with the field and its value."""

import math
import time

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import base_ende
from t2t_jax.errors import InputError
from t2t_jax.files import flat
from t2t_jax.model.layers import POSITIONS
from t2t_jax.training.checks import check
from t2t_jax.training.optimizer import OPTIMIZERS

BASE = flat(base_ende.get_config().to_dict())
NUMBERS = sorted(field for field, value in BASE.items() if type(value) in (int, float))


def changed(**changes):
    """The base config with SECTION__FIELD=value."""
    config = base_ende.get_config()
    config.model.num_layers = 1  # whatever machine this is
    for field, value in changes.items():
        *sections, name = field.split("__")
        section = config
        for each in sections:
            section = section[each]
        section[name] = value
    return config


@pytest.mark.parametrize("field", NUMBERS)
def test_every_number_has_a_range(field):
    """A field that is added to base_ende.py without a range fails here."""
    wrong = [math.nan, math.inf, -math.inf, -1e300] if isinstance(BASE[field], float) else [-(10**30), 10**30, -1]
    for value in wrong:
        with pytest.raises(InputError) as refused:
            check(changed(**{field.replace(".", "__"): value}))
        assert str(refused.value).startswith(field) and "got" in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("decode.beam_size", 0, "at least 1"),
        ("decode.beam_size", 100_000, "at most 256"),
        ("decode.max_extra_length", -3, "at least 0"),
        ("optimizer.learning_rate_factor", 0.0, "above 0"),
        ("optimizer.beta1", 2.0, "at least 0 and below 1"),
        ("optimizer.beta2", 1.0, "at least 0 and below 1"),
        ("optimizer.epsilon", 0.0, "above 0"),
        ("optimizer.beta2", 0.99999999, "at least 0 and below 1; got 0.99999999, which is 1 in float32"),
        ("optimizer.epsilon", 1e-46, "above 0; got 1e-46, which is 0 in float32"),
        ("model.layer_norm_epsilon", 0.0, "above 0 and below 1"),
        ("checkpoint.interval_minutes", -1.0, "at least 0"),
        ("train.seed", 2**32, "at most 4294967295"),
        ("data.cleaning.max_ratio", 0.5, "at least 1"),
        ("data.vocab_size", 0, "at least 3"),
        ("data.vocabulary", "/none/codes", "no file /none/codes"),
        ("model.attention", "dot_prodct", "unknown value 'dot_prodct'"),
    ],
)
def test_a_nonsensical_value_is_refused_with_its_field_and_what_would_work(field, value, message):
    with pytest.raises(InputError, match=f"^{field}.*{message}"):
        check(changed(**{field.replace(".", "__"): value}))


def test_options_that_would_change_nothing_are_refused():
    with pytest.raises(InputError, match=r"train.r_drop=5.0 needs model.dropout or model.attention_dropout above 0"):
        check(changed(train__r_drop=5.0, model__dropout=0.0))
    for dropout in ("model__dropout", "model__attention_dropout"):
        check(changed(**{"train__r_drop": 5.0, "model__dropout": 0.0, dropout: 0.1}))
    with pytest.raises(InputError, match="model.dropout=0.003: with train.dtype=bfloat16 it drops nothing; give"):
        check(changed(train__dtype="bfloat16", model__dropout=0.003))
    for dtype, rate in (("bfloat16", 0.0039), ("float32", 0.003)):
        check(changed(train__dtype=dtype, model__dropout=rate))
    with pytest.raises(InputError, match=r"machine.memory_gib=2.0 needs machine.engine='jit'"):
        check(changed(machine__engine="pmap", machine__memory_gib=2.0))


def test_the_smallest_and_the_largest_seed_make_keys_and_plans():
    for seed in (0, 2**32 - 1):
        check(changed(train__seed=seed))
        jax.random.key(seed)
        np.random.default_rng([seed, 0])


def test_a_beam_wider_than_the_vocabulary_is_refused():
    with pytest.raises(InputError, match="decode.beam_size must be at most data.vocab_size=3; got 4"):
        check(changed(data__vocab_size=3))


def test_a_task_without_a_grammar_refuses_a_constrained_search():
    with pytest.raises(InputError, match="decode.constrained: this task has no grammar, only parsing has one"):
        check(changed(decode__constrained=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__num_layers": 10**30}, "model.num_layers must be at least 1 and at most 1000; got"),
        ({"model__d_model": 10**9}, "model.d_model must be"),
        ({"model__d_model": 10**7, "model__d_ff": 10**7}, "parameters, more than any"),
        ({"model__d_model": 10**6, "model__d_ff": 10**5}, "this machine"),
    ],
)
def test_a_model_that_fits_no_memory_is_refused_at_once(changes, message):
    started = time.monotonic()
    with pytest.raises(InputError, match=message):
        check(changed(**changes))
    assert time.monotonic() - started < 1


def test_the_size_of_a_vocabulary_that_is_a_file_is_not_taken_from_the_config(tmp_path):
    large = {"data__vocab_size": 10**7, "model__d_model": 10**4}
    with pytest.raises(InputError, match="d_ff=2048, data.vocab_size=10000000: .* than the .* GiB of this machine"):
        check(changed(**large))
    (tmp_path / "vocabulary").write_text("")
    check(changed(**large, data__vocabulary=str(tmp_path / "vocabulary")))


@given(field=st.sampled_from(NUMBERS), number=st.one_of(st.floats(), st.integers()))
@settings(max_examples=300)
def test_any_number_is_accepted_or_refused_in_one_line(field, number):
    if type(number) is not type(BASE[field]):
        return  # refused where the config is read
    try:
        check(changed(**{field.replace(".", "__"): number}))
    except InputError as error:
        assert "\n" not in str(error) and len(str(error)) < 400


@pytest.mark.parametrize("section", ["optimizer", "train"])
def test_options_that_no_entry_would_read_are_refused(section):
    with pytest.raises(InputError, match=f"{section}.options=.*weight_decay.*: only entries of your own have options"):
        check(changed(**{f"{section}__options": {"weight_decay": 0.01}}))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"scales": {1000: 0.5}}, "scales"),
        ({"mu_dtype": np.float32}, "mu_dtype"),
        ({"x": math.nan}, "x"),
        ({"of": {"matrix": [[1, math.inf]]}}, "of.matrix"),
    ],
)
def test_options_that_the_config_on_disk_would_not_give_back_are_refused(monkeypatch, options, field):
    monkeypatch.setitem(OPTIMIZERS, "own", None)
    plain = {"a": (1, (2.5, 3)), "b": ["x"], "c": None, "d": {"e": True}}
    check(changed(optimizer__name="own", optimizer__options=plain))
    with pytest.raises(InputError, match=rf"^optimizer.options.{field}=.*: an option is a text, a finite number"):
        check(changed(optimizer__name="own", optimizer__options=plain | options))


@pytest.mark.parametrize("name", ["learned", "own"])
def test_sentences_beyond_the_learned_positions_are_refused(monkeypatch, name):
    monkeypatch.setitem(POSITIONS, "own", POSITIONS["learned"])
    learned = {"model__positions": name, "model__max_positions": 100}
    with pytest.raises(InputError, match="data.max_length=101: the model learns model.max_positions=100 positions"):
        check(changed(data__max_length=101, **learned))
    check(changed(data__max_length=100, **learned))
    check(changed(data__max_length=101, model__max_positions=100))
