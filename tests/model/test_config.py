import dataclasses

import pytest

from t2t_jax.errors import InputError
from t2t_jax.model.config import TransformerConfig
from t2t_jax.model.transformer import num_parameters
from tests import tiny
from tests.tiny import TWO_VOCABULARIES

# Vocabulary 40960 with attention biases; the paper prints 65, 58, 60, 36, 50, 80, 28, 168, 53, 90 million.
PARAMETERS = {
    "base": ({}, 65_110_016),
    "A1": ({"num_heads": 1, "d_k": 512, "d_v": 512}, 65_110_016),
    "A2": ({"num_heads": 4, "d_k": 128, "d_v": 128}, 65_110_016),
    "A3": ({"num_heads": 16, "d_k": 32, "d_v": 32}, 65_110_016),
    "A4": ({"num_heads": 32, "d_k": 16, "d_v": 16}, 65_110_016),
    "B1": ({"d_k": 16}, 58_018_304),
    "B2": ({"d_k": 32}, 60_382_208),
    "C1": ({"num_layers": 2}, 35_684_352),
    "C2": ({"num_layers": 4}, 50_397_184),
    "C3": ({"num_layers": 8}, 79_822_848),
    "C4": ({"d_model": 256, "d_k": 32, "d_v": 32}, 27_848_704),
    "C5": ({"d_model": 1024, "d_k": 128, "d_v": 128}, 167_944_192),
    "C6": ({"d_ff": 1024}, 52_514_816),
    "C7": ({"d_ff": 4096}, 90_300_416),
    "D": ({"dropout": 0.2}, 65_110_016),
    "E": ({"positions": "learned"}, 65_372_160),
    "big": ({"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3}, 218_300_416),
}


@pytest.mark.parametrize("row", PARAMETERS)
def test_parameter_counts_of_table_3_to_the_last_digit(row):
    changes, expected = PARAMETERS[row]
    config = dataclasses.replace(TransformerConfig(vocab_size=40960, attention_bias=True), **changes)
    assert num_parameters(config) == config.parameter_count == expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "pre"},
        {"share_embeddings": False, "positions": "learned"},
        {"attention_bias": True},
        TWO_VOCABULARIES,
    ],
    ids=str,
)
def test_the_formula_counts_the_parameters_of_the_model(changes):
    config = dataclasses.replace(tiny.CONFIG, **changes)
    assert config.parameter_count == num_parameters(config)


@pytest.mark.parametrize(
    ("changes", "expected"), [({}, 63_045_632), ({"vocab_size": 32000}, 60_485_632), ({"d_k": 16}, 55_967_744)]
)
def test_parameter_counts_without_biases(changes, expected):
    assert num_parameters(dataclasses.replace(TransformerConfig(vocab_size=37000), **changes)) == expected


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("d_model", 15, "d_model must be even for sinusoidal positions; got 15"),
        ("num_layers", 0, "num_layers must be at least 1 and at most 1000; got 0"),
        ("dropout", 1.0, "dropout must be at least 0 and below 1; got 1.0"),
        ("positions", "sinusodial", "did you mean 'sinusoidal'"),
        ("norm", "rms", "known: post, pre"),
        ("source_vocab_size", 13, "model.share_embeddings must be False .* got True"),
        ("attention_window", -1, "attention_window must be at least 0 and at most 10000000; got -1"),
    ],
)
def test_impossible_sizes_are_refused_by_field_name(field, value, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(tiny.CONFIG, **{field: value})


def test_a_source_vocabulary_without_ids_is_refused():
    with pytest.raises(InputError, match="model.source_vocab_size must be at least 1 .* got 0"):
        dataclasses.replace(tiny.CONFIG, share_embeddings=False, source_vocab_size=0)
