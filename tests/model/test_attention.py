import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from t2t_jax.model import attention
from t2t_jax.model.attention import (
    MultiHeadAttention,
    ancestor_mask,
    causal_mask,
    padding_mask,
    scaled_dot_product_attention,
    window_mask,
)
from tests import tiny
from tests.tiny import B, D, H, K, S, T, V


def arrays(*shapes, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def test_scaled_dot_product_attention_is_equation_1_in_numpy():
    query, key, value = arrays((B, H, T, K), (B, H, K, S), (B, H, S, V))
    found = scaled_dot_product_attention(query, key, value, jnp.ones((1, 1, 1, S), bool))
    for b in range(B):
        for h in range(H):
            scores = np.exp(np.asarray(query[b, h] @ key[b, h]) / np.sqrt(K))
            weights = scores / scores.sum(axis=-1, keepdims=True)
            np.testing.assert_allclose(found[b, h], weights @ value[b, h], atol=1e-6)


def test_masking_a_position_equals_deleting_it():
    query, key, value = arrays((B, H, T, K), (B, H, K, S), (B, H, S, V))
    mask = (jnp.arange(S) < 4)[None, None, None]
    masked = scaled_dot_product_attention(query, key, value, mask)
    deleted = scaled_dot_product_attention(query, key[..., :4], value[:, :, :4], mask[..., :4])
    np.testing.assert_allclose(masked, deleted, atol=1e-6)


def test_a_fully_masked_row_has_finite_values_and_gradients():
    query, key, value = arrays((B, H, T, K), (B, H, K, S), (B, H, S, V))
    all_masked = jnp.zeros((1, 1, 1, S), bool)
    total = lambda q: scaled_dot_product_attention(q, key, value, all_masked).sum()
    assert np.isfinite(total(query)) and np.isfinite(jax.grad(total)(query)).all()


def test_masks_by_hand():
    np.testing.assert_array_equal(padding_mask(jnp.array([[5, 1, 0]]))[0, 0], [[True, True, False]])
    np.testing.assert_array_equal(causal_mask(3)[0, 0], [[True, False, False], [True, True, False], [True, True, True]])
    expected = [[True, True, False, False], [True] * 3 + [False], [False] + [True] * 3, [False, False, True, True]]
    for window in (2, 3):
        np.testing.assert_array_equal(window_mask(4, window)[0, 0], expected)


@pytest.mark.parametrize(("window", "oldest"), [(0, 0), (2, 1)])
def test_a_hypothesis_attends_to_its_ancestors_in_the_ring_buffer(window, oldest):
    """Two beams, three slots, the newest is 2: each beam's ancestors; none in slot 0 for beam 1."""
    mask = ancestor_mask(jnp.array([[[1, 0, 0], [-1, 0, 1]]]), jnp.array(2), window)
    by_slot = np.array([[[0, 1], [1, 0], [1, 0]], [[0, 0], [1, 0], [0, 1]]], bool)  # [W, T, W]
    by_slot[:, :oldest] = False
    np.testing.assert_array_equal(mask[0, 0], by_slot.reshape(2, 6))


@pytest.mark.parametrize("bias", [False, True])
def test_agrees_with_flax(bias):
    """Flax's MultiHeadDotProductAttention with the same weights gives the same output (it has d_v = d_k)."""
    x, memory = arrays((B, T, D), (B, S, D))
    ours = MultiHeadAttention(H, K, K, D, bias, 1.0, 1.0)
    mask = jnp.ones((B, 1, T, S), bool).at[1, :, :, 4:].set(False)
    params = ours.init(jax.random.key(0), x, memory, mask, lambda w: w)["params"]
    params = jax.tree.map(lambda p: p + 0.1, params)  # no bias is zero
    theirs = {name: {"kernel": params[f"{name}_kernel"]} for name in ("query", "key", "value")}
    theirs["out"] = {"kernel": params["output_kernel"]}
    if bias:
        for name, part in theirs.items():
            part["bias"] = params[f"{'output' if name == 'out' else name}_bias"]
    flax = nn.MultiHeadDotProductAttention(num_heads=H, qkv_features=H * K, out_features=D, use_bias=bias)
    expected = flax.apply({"params": theirs}, x, memory, mask=mask)
    np.testing.assert_allclose(ours.apply({"params": params}, x, memory, mask, lambda w: w), expected, atol=1e-5)


def test_glorot_fans_are_those_of_the_flattened_kernel():
    """Limit √(6/(fan_in + fan_out)); with the gain √(1/2), that of one fused kernel for q, k and v."""
    init = attention.glorot_uniform(np.sqrt(1 / 2), 0, (1, 2))
    kernel = init(jax.random.key(0), (64, 8, 8), jnp.float32)
    limit = np.sqrt(6 / (64 + 3 * 64))  # fused: 64 in, 3 · 64 out
    assert 0.98 * limit < np.abs(kernel).max() <= limit
    output = attention.glorot_uniform(1.0, (0, 1), 2)(jax.random.key(0), (8, 8, 32), jnp.float32)
    limit = np.sqrt(6 / (64 + 32))
    assert 0.98 * limit < np.abs(output).max() <= limit


def test_attention_weights_are_neither_kept_nor_computed_unless_asked_for(monkeypatch):
    """The gradient's program is the same text as without `sow`; asked for, there is one array for each module."""
    model, inputs, targets = tiny.model(), tiny.sentences([S, 3], S), tiny.sentences([T, 4], T, seed=1)
    variables = tiny.variables(model)
    assert variables.keys() == {"params"}
    program = lambda: jax.jit(jax.grad(lambda v: model.apply(v, inputs, targets).sum())).lower(variables).as_text()
    with_sow = program()
    _, kept = jax.eval_shape(lambda v: model.apply(v, inputs, targets, mutable=["intermediates"]), variables)
    assert len(jax.tree.leaves(kept)) == 3 * model.config.num_layers
    monkeypatch.setattr(MultiHeadAttention, "sow", lambda *_: False)
    assert program() == with_sow
