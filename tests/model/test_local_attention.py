"""Attention in blocks equals attention with a mask of nearby positions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t2t_jax.model.attention import padding_mask, scaled_dot_product_attention, segment_mask
from t2t_jax.model.local_attention import local_attention
from tests import tiny
from tests.model.test_packing import ROWS, apart, loss_and_gradient, together

BATCH, HEADS, K, V = 2, 2, 3, 5


def arrays(length):
    rng = np.random.default_rng(length)
    shapes = (BATCH, HEADS, length, K), (BATCH, HEADS, K, length), (BATCH, HEADS, length, V)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@functools.cache
def masks(length):
    ids = np.arange(length)[None] < np.array([[length], [length - 2]])
    ids, segments = jnp.asarray(ids, jnp.int32), jnp.asarray(ids * (1 + np.arange(length)[None] // 3), jnp.int32)
    return {"none": None, "padding": padding_mask(ids), "segments": segment_mask(segments, segments)}


@functools.partial(jax.jit, static_argnames=("left", "right"))
def both(query, key, value, wholes, masks, left, right):
    """For each kind of mask: with the mask of nearby positions, and in blocks."""
    attend = lambda mask: local_attention(scaled_dot_product_attention, query, key, value, mask, left, right)
    expected = {kind: scaled_dot_product_attention(query, key, value, whole) for kind, whole in wholes.items()}
    return expected, {kind: attend(mask) for kind, mask in masks.items()}


@given(  # few values, as every new shape is compiled
    st.sampled_from([3, 11, 12, 20]), st.sampled_from([0, 1, 6]), st.sampled_from([0, 2, 5])
)
@settings(max_examples=12)
def test_blocks_equal_a_mask_of_nearby_positions(length, left, right):
    """For every position that may attend to any; the others are padding."""
    offsets = np.arange(length)[None] - np.arange(length)[:, None]
    near = ((offsets >= -left) & (offsets <= right))[None, None]
    wholes = {kind: near if mask is None else near & np.asarray(mask) for kind, mask in masks(length).items()}
    expected, found = both(*arrays(length), wholes, masks(length), left, right)
    for kind, whole in wholes.items():
        real = np.broadcast_to(whole.any(axis=-1), (BATCH, HEADS, length))
        np.testing.assert_allclose(found[kind][real], expected[kind][real], atol=1e-5)
        assert np.isfinite(found[kind]).all()


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_the_model_has_the_same_loss_and_gradients(monkeypatch, packed, fused):
    model = dataclasses.replace(
        tiny.model(num_layers=1, dropout=0.0, d_v=tiny.K, attention_window=2), fused_attention=fused
    )
    params = tiny.variables(model)["params"]
    batch = together(apart(), ROWS) if packed else apart()
    batch = {name: jnp.pad(x, ((0, 0), (0, 8))) for name, x in batch.items()}
    used = []
    monkeypatch.setattr(
        "t2t_jax.model.attention.local_attention", lambda *arguments: used.append(1) or local_attention(*arguments)
    )
    (loss, _), gradient = loss_and_gradient(model, params, batch)
    assert len(used) == 2 * model.config.num_layers, "self-attention of both stacks"
    monkeypatch.setattr("t2t_jax.model.attention.block_length", lambda left, right: 1000)
    (expected, _), expected_gradient = loss_and_gradient(
        dataclasses.replace(model, remat=True),
        params,
        batch,  # another model, so that it is traced anew
    )
    assert len(used) == 2 * model.config.num_layers
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


def test_the_work_is_linear_in_the_length():
    def flops(length):
        attend = lambda *arrays: local_attention(scaled_dot_product_attention, *arrays, None, 4, 4)
        return jax.jit(attend).lower(*arrays(length)).cost_analysis()["flops"]

    assert flops(512) / flops(256) == pytest.approx(2, rel=0.05)
