import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t2t_jax.model.layers import (
    Dropout,
    Embedding,
    FeedForward,
    LayerNorm,
    keep_mask,
    relu,
    sinusoidal_positions,
    t2t_positions,
)
from t2t_jax.model.platform import tracing_for
from tests.tiny import VOCAB, B, D, F, T


def test_positions_0_and_1_by_hand():
    signal = sinusoidal_positions(jnp.arange(2), 4)
    np.testing.assert_allclose(signal[0], [0, 1, 0, 1])
    # Channels 2i, 2i+1 have frequency 10000^(−2i/4): 1, then 1/100.
    np.testing.assert_allclose(signal[1], [np.sin(1), np.cos(1), np.sin(0.01), np.cos(0.01)], rtol=1e-5)


def test_t2t_positions_include_the_longest_wavelength():
    signal = t2t_positions(jnp.array([1]), 6)[0]
    np.testing.assert_allclose(signal, [*np.sin([1, 1e-2, 1e-4]), *np.cos([1, 1e-2, 1e-4])], rtol=1e-5)


@pytest.mark.parametrize("activation", ["swish", "gelu"])
def test_activations_by_definition(activation):
    x = jnp.array([[[-3.0, -0.5, 0.0, 0.1, 2.0]]])
    layer = FeedForward(5, activation)
    identity = {"kernel": jnp.eye(5), "bias": jnp.zeros(5)}
    found = layer.apply({"params": {"hidden": identity, "output": identity}}, x)
    gates = {"swish": lambda v: 1 / (1 + math.exp(-v)), "gelu": lambda v: (1 + math.erf(v / math.sqrt(2))) / 2}
    np.testing.assert_allclose(found[0, 0], [v * gates[activation](v) for v in x[0, 0].tolist()], atol=1e-6)


def test_feed_forward_is_equation_2():
    x = jax.random.normal(jax.random.key(1), (B, T, D))
    layer = FeedForward(F)
    params = jax.tree.map(lambda p: p + 0.1, layer.init(jax.random.key(0), x)["params"])
    hidden = np.maximum(0, x @ params["hidden"]["kernel"] + params["hidden"]["bias"][None, None])
    expected = hidden @ params["output"]["kernel"] + params["output"]["bias"][None, None]
    np.testing.assert_allclose(layer.apply({"params": params}, x), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_layer_normalisation_and_its_gradients_are_those_of_flax(platform, dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    x, cotangent = (3 * jax.random.normal(key, (B, T, D)).astype(dtype) + 1 for key in keys[:2])
    params = {name: jax.random.normal(key, (D,)) for name, key in zip(("scale", "bias"), keys[2:], strict=True)}
    of = lambda layer: jax.vjp(lambda params, x: layer.apply({"params": params}, x), params, x)
    expected, expected_vjp = of(nn.LayerNorm(epsilon=1e-3, dtype=dtype, use_fast_variance=False))
    with tracing_for(platform):
        found, vjp = of(LayerNorm(1e-3))
        gradients = vjp(cotangent)
    assert found.dtype == gradients[1].dtype == dtype and gradients[0]["scale"].dtype == jnp.float32
    tolerance = 1e-5 if dtype == jnp.float32 else 0.02
    for a, b in zip(
        jax.tree.leaves((found, gradients)), jax.tree.leaves((expected, expected_vjp(cotangent))), strict=True
    ):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=tolerance * abs(b).max())


def test_the_gradient_of_relu_is_that_of_flax():
    x = jnp.array([-2.0, -0.0, 0.0, 1e-30, 3.0])
    of = lambda function: jax.vjp(function, x)
    (found, vjp), (expected, expected_vjp) = of(relu), of(nn.relu)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(vjp(x + 5), expected_vjp(x + 5))


def test_embeddings_are_scaled_logits_are_not_and_padding_is_zero():
    layer = Embedding(VOCAB, D, jnp.float32)
    variables = layer.init(jax.random.key(0), jnp.ones((1, 1), jnp.int32))
    table = variables["params"]["table"]
    vectors = layer.apply(variables, jnp.array([[3, 0]]))
    np.testing.assert_allclose(vectors[0, 0], table[3] * np.sqrt(D), rtol=1e-6)
    np.testing.assert_array_equal(vectors[0, 1], np.zeros(D))
    logits = layer.apply(variables, vectors, method=Embedding.logits)
    np.testing.assert_allclose(logits[0, 0], table @ vectors[0, 0], atol=1e-5)


def test_initial_embeddings_have_unit_variance():
    layer = Embedding(1000, 64, jnp.float32)
    table = layer.init(jax.random.key(0), jnp.ones((1, 1), jnp.int32))["params"]["table"]
    np.testing.assert_allclose(np.std(table) * np.sqrt(64), 1, rtol=0.01)


@given(st.integers(0, 2**31), st.sampled_from([0.1, 0.3, 0.5, 0.9]))
@settings(max_examples=20)
def test_keep_mask_keeps_the_right_share_independently_of_neighbours_and_seeds(seed, keep):
    mask = np.asarray(keep_mask(jax.random.key(seed), keep, (300, 400), jnp.arange(300)))
    error = 5 * np.sqrt(keep * (1 - keep) / mask.size)  # five standard deviations
    assert abs(mask.mean() - keep) < error
    for shifted in (mask[:, 1:] & mask[:, :-1], mask[1:] & mask[:-1]):
        assert abs(shifted.mean() - keep**2) < 2 * error
    other = np.asarray(keep_mask(jax.random.key(seed + 1), keep, (300, 400), jnp.arange(300)))
    assert abs((mask & other).mean() - keep**2) < 2 * error


def test_keep_mask_uses_every_word_of_the_key():
    key = lambda words: jax.random.wrap_key_data(jnp.array(words, jnp.uint32))
    masks = [keep_mask(key(words), 0.5, (64,), jnp.arange(64)) for words in ([1, 2], [1, 3], [2, 2])]
    assert (masks[0] != masks[1]).any() and (masks[0] != masks[2]).any()


def test_the_dropout_mask_of_a_row_depends_on_its_index_only():
    key, numbers = jax.random.key(0), jnp.array([7, 0, 3])
    whole = keep_mask(key, 0.5, (8, 5, 6), jnp.arange(8))
    np.testing.assert_array_equal(keep_mask(key, 0.5, (3, 5, 6), numbers), whole[numbers])


def test_dropout_scales_kept_elements_and_is_the_identity_outside_training():
    x = jnp.full((50, 60), 2.0)
    layer = Dropout(0.25)
    np.testing.assert_array_equal(layer.apply({}, x, None), x)
    dropped = layer.apply({}, x, jnp.arange(50), rngs={"dropout": jax.random.key(0)})
    np.testing.assert_allclose(np.unique(dropped), [0, 2 / 0.75], rtol=1e-6)
    assert (dropped[0] != dropped[1]).any() and (dropped[:, 0] != dropped[:, 1]).any()


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_dropout_in_bfloat16_keeps_the_mean(rate):
    """1/0.9 is 1.109 there, and the expectation would be 0.9984 of x."""
    x = jnp.ones((2000, 2000), jnp.bfloat16)
    dropped = Dropout(rate).apply({}, x, jnp.arange(2000), rngs={"dropout": jax.random.key(0)})
    assert dropped.dtype == x.dtype
    assert np.asarray(dropped, np.float64).mean() == pytest.approx(1, abs=4e-4)


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_the_gradient_of_dropout_is_its_scaled_mask(rate):
    drop = lambda x: Dropout(rate).apply({}, x, jnp.arange(6), rngs={"dropout": jax.random.key(0)})
    x = jnp.ones((6, 7))
    np.testing.assert_array_equal(jax.grad(lambda x: drop(x).sum())(x), drop(x))
