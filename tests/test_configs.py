import importlib
from pathlib import Path

import ml_collections
import pytest

from configs import base_ende, quickstart
from t2t_jax import files
from t2t_jax.model.config import TransformerConfig
from t2t_jax.training.checks import check
from t2t_jax.training.setup import make_schedule

FILES = sorted(p.stem for p in (Path(__file__).parents[1] / "configs").glob("*.py") if p.stem != "__init__")


def flat(config):
    """The fields by their dotted names."""
    return files.flat(config.to_dict())


@pytest.mark.parametrize("name", FILES)
def test_every_config_is_locked_has_exactly_the_fields_of_base_and_passes_its_checks(name):
    config = importlib.import_module(f"configs.{name}").get_config()
    assert isinstance(config, ml_collections.ConfigDict) and config.is_locked
    base = flat(base_ende.get_config())
    assert flat(config).keys() == base.keys()
    assert {field: type(value) for field, value in flat(config).items()} == {f: type(v) for f, v in base.items()}
    check(config)
    module = importlib.import_module(f"configs.{name}")
    assert f"python main.py --config=configs/{name}.py" in module.__doc__


def test_a_misspelt_field_is_an_error():
    config = base_ende.get_config()
    with pytest.raises(AttributeError):
        config.model.d_modle = 3
    with pytest.raises(AttributeError):
        config.trian = 3


def test_base_ende_has_the_values_of_the_paper():
    """§3, §5 and §6.1; the comments in base_ende.py give the section of each."""
    config = base_ende.get_config()
    paper = {
        "model.num_layers": 6, "model.d_model": 512, "model.d_ff": 2048, "model.num_heads": 8, "model.d_k": 64,
        "model.d_v": 64, "model.dropout": 0.1, "model.attention_dropout": 0.0, "model.positions": "sinusoidal",
        "model.norm": "post", "model.share_embeddings": True, "data.vocab_size": 37000, "data.tokens_per_batch": 25000,
        "optimizer.warmup_steps": 4000, "optimizer.beta1": 0.9, "optimizer.beta2": 0.98, "optimizer.epsilon": 1e-9,
        "optimizer.learning_rate_factor": 1.0, "train.train_steps": 100_000, "train.label_smoothing": 0.1,
        "checkpoint.interval_steps": 1500, "checkpoint.interval_minutes": 10.0, "checkpoint.average_last": 5,
        "decode.beam_size": 4, "decode.alpha": 0.6, "decode.max_extra_length": 50,
    }  # fmt: skip
    assert {field: flat(config)[field] for field in paper} == paper


def test_the_rows_of_table_2_differ_from_base_in_their_own_fields_and_no_others():
    """§6.1; d_k and d_v stay 64, and so does the warm-up; 10 minutes between checkpoints are 1,500 and 600 steps."""
    big = {"model.d_model": 1024, "model.d_ff": 4096, "model.num_heads": 16, "train.train_steps": 300_000,
           "checkpoint.interval_steps": 600, "checkpoint.average_last": 20}  # fmt: skip
    french = {"data.corpus": "wmt14_enfr", "data.target_language": "fr", "data.vocab_size": 32000}
    french |= {"data.cleaning.normalize_punctuation": True, "data.cleaning.remove_nonprinting": True,
               "data.cleaning.max_words": 175, "data.cleaning.max_ratio": 1.5}  # fmt: skip
    base = flat(base_ende.get_config())
    for name, changes in [
        ("big_ende", big | {"model.dropout": 0.3}),
        ("base_enfr", french),
        ("big_enfr", big | french),  # P_drop is 0.1 again
    ]:
        config = flat(importlib.import_module(f"configs.{name}").get_config())
        assert {field: value for field, value in config.items() if value != base[field]} == changes


PARSING = {
    "model.num_layers": 4, "model.d_model": 1024, "model.d_k": 128, "model.d_v": 128, "model.dropout": 0.2,
    "model.attention_dropout": 0.2, "model.share_embeddings": False, "data.task": "parsing",
    "data.corpus": "penn_treebank", "data.target_language": "trees", "data.source_vocab_size": 16384,
    "data.vocab_size": 512, "data.max_length": 512, "data.packing": False, "optimizer.learning_rate_factor": 5.0,
    "optimizer.warmup_steps": 16_000, "decode.beam_size": 21, "decode.alpha": 0.3, "decode.max_extra_length": 300,
    "evaluate.interval_steps": 2500,
}  # fmt: skip


def test_the_rows_of_table_4_differ_from_base_in_their_own_fields_and_no_others():
    """§6.3: "all other parameters remained unchanged"; dropout and learning rate are those of the paper's code."""
    as_base = ("model.dropout", "model.attention_dropout", "optimizer.warmup_steps")
    semi = {field: value for field, value in PARSING.items() if field not in as_base}
    semi |= {"data.source_vocab_size": 32768, "data.train": "wsj,agreed.mrg.gz,berkeley.mrg.gz"}
    base = flat(base_ende.get_config())
    for name, changes in [("parsing_wsj", PARSING), ("parsing_semi", semi)]:
        config = flat(importlib.import_module(f"configs.{name}").get_config())
        assert {field: value for field, value in config.items() if value != base[field]} == changes


@pytest.mark.parametrize(
    ("name", "parameters", "peak"), [("parsing_wsj", 101_777_408, 1.235e-3), ("parsing_semi", 118_554_624, 2.47e-3)]
)
def test_the_parsers_have_the_sizes_and_the_peak_learning_rate_of_the_recipe(name, parameters, peak):
    config = importlib.import_module(f"configs.{name}").get_config()
    sizes = {"vocab_size": config.data.vocab_size, "source_vocab_size": config.data.source_vocab_size}
    count = TransformerConfig(**sizes, **config.model).parameter_count
    assert count == parameters == 83_951_616 + (config.data.source_vocab_size + 2 * 512) * 1024
    schedule = make_schedule(config)
    assert max(float(schedule(step)) for step in range(0, 100_000, 50)) == pytest.approx(peak, rel=1e-2)
    assert float(schedule(config.optimizer.warmup_steps - 1)) == pytest.approx(peak, rel=1e-3)


def test_quickstart_changes_only_values_of_size_data_and_schedule():
    base, quick = flat(base_ende.get_config()), flat(quickstart.get_config())
    changed = {field for field in base if base[field] != quick[field]}
    paper = {"model.positions", "model.norm", "model.share_embeddings", "model.attention_bias", "train.label_smoothing",
             "optimizer.beta1", "optimizer.beta2", "optimizer.epsilon", "decode.beam_size", "decode.alpha"}  # fmt: skip
    assert changed.isdisjoint(paper)


def test_checks_name_the_field_and_the_value():
    for field, value, message in [
        ("data.tokens_per_batch", 0, "data.tokens_per_batch must be at least 1 and at most 1000000000; got 0"),
        ("train.dtype", "bf16", "train.dtype: unknown value 'bf16'; did you mean 'bfloat16'"),
        ("train.label_smoothing", 1.0, "train.label_smoothing must be at least 0 and below 1; got 1.0"),
        ("checkpoint.average_last", 30, "checkpoint.average_last=30 needs checkpoint.keep"),
        ("model.d_model", 511, "model.d_model must be even"),
    ]:
        config = base_ende.get_config()
        section, name = field.split(".")
        config[section][name] = value
        with pytest.raises(ValueError, match=message):
            check(config)
