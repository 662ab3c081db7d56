"""`fused_attention` (JAX's kernels) and `scaled_dot_product_attention` (ours) give the same loss and gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2t_jax.errors import InputError
from t2t_jax.model import attention
from t2t_jax.model.platform import tracing_for
from tests import tiny
from tests.model.test_packing import ROWS, apart, loss_and_gradient, together


def both_ways(**changes):
    model = tiny.model(dropout=0.0, **changes)
    return model, dataclasses.replace(model, fused_attention=True)


def batch(packed):
    """Sentence pairs, and a last row of padding only."""
    pairs = together(apart(), ROWS) if packed else apart()
    return {name: jnp.pad(x, ((0, 1), (0, 0))) for name, x in pairs.items()}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("changes", [{}, {"norm": "pre", "positions": "learned"}, {"attention_window": 4}], ids=str)
def test_loss_and_gradient_are_those_of_equation_1(monkeypatch, packed, changes):
    ours, fused = both_ways(num_layers=1, d_v=tiny.K, **changes)
    params = tiny.variables(ours)["params"]
    (loss, _), gradient = loss_and_gradient(ours, params, batch(packed))
    monkeypatch.setattr(attention, "scaled_dot_product_attention", None)  # so that the fused model cannot call it
    (found, _), found_gradient = loss_and_gradient(fused, params, batch(packed))
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found_gradient), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


def test_rows_of_padding_have_finite_logits_and_gradients():
    _, fused = both_ways(num_layers=1, d_v=tiny.K)
    variables, empty = tiny.variables(fused), jnp.zeros((2, 4), jnp.int32)
    total = lambda v: jnp.sum(fused.apply(v, empty, empty) ** 2)
    value, gradient = jax.jit(jax.value_and_grad(total))(variables)
    assert np.isfinite(value) and all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    ("backend", "dtype", "head_dim", "length", "masked", "expected"),
    [
        ("gpu", jnp.bfloat16, 64, 5, False, "cudnn"),
        ("gpu", jnp.bfloat16, 64, 6, True, "cudnn"),
        ("gpu", jnp.bfloat16, 64, 5, True, "cudnn"),
        ("gpu", jnp.bfloat16, 136, 6, False, "xla"),
        ("gpu", jnp.bfloat16, 12, 6, False, "xla"),
        ("gpu", jnp.float32, 64, 6, False, "xla"),
        ("cpu", jnp.bfloat16, 64, 6, False, "xla"),
    ],
)
def test_cudnn_is_used_where_it_supports_the_case_and_padding_masks_become_lengths(
    monkeypatch, backend, dtype, head_dim, length, masked, expected
):
    used = {}

    def record(query, key, value, **options):
        used.update(options)
        return query

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    array = jnp.zeros((2, 3, length, head_dim), dtype)
    padding = attention.padding_mask(jnp.array([[3] * length, [0] * length]))
    mask = jnp.ones((1, 1, length, length), bool) if masked else padding
    with tracing_for(backend):
        attention.fused_attention(array, jnp.swapaxes(array, 2, 3), array, mask, causal=True)
    assert used["implementation"] == expected and used["is_causal"]
    if masked:
        assert used["mask"].shape == (2, 1, 6, 6), "cuDNN has gradients for even lengths only"
    else:
        assert used["key_value_seq_lengths"].tolist() == [length, 1], "every row has a key to attend to"


@pytest.mark.parametrize(("rows", "expected"), [(2**16 - 1, "cudnn"), (2**16, "xla")])
def test_more_rows_than_cudnn_computes_are_xlas(monkeypatch, rows, expected):
    """Short sentences in batches of 400,000 tokens, or the blocks of a small attention window."""
    used = []

    def record(query, key, value, *, implementation, **_):
        used.append(implementation)
        return query

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    array = jax.ShapeDtypeStruct((rows, 1, 8, 8), jnp.bfloat16)
    with tracing_for("gpu"):
        jax.eval_shape(lambda *arrays: attention.fused_attention(*arrays, None, causal=True), array, array, array)
    assert used == [expected]


def test_without_a_mask_only_causality_is_passed_on():
    array = jax.random.normal(jax.random.key(0), (2, 3, 6, 8))
    key = jnp.swapaxes(array, 2, 3)
    for causal in (True, False):
        mask = attention.whole_mask(None, 6, causal)
        expected = jax.jit(attention.scaled_dot_product_attention)(array, key, array, mask)
        found = jax.jit(functools.partial(attention.fused_attention, causal=causal))(array, key, array, None)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("queries", "keys", "masked", "causal", "expected"),
    [
        (6, 6, "each query", False, (0, 0)),
        (7, 6, "each query", False, (1, 0)),
        (6, 7, "padding", False, (0, 1)),
        (7, 7, None, True, (1, 1)),
        (48, 64, "each query", False, (0, 2)),
        (64, 64, "each query", True, (2, 2)),
        (192, 192, "each query", True, (2, 2)),
        (63, 63, "each query", True, (3, 3)),
        (7, 63, "each query", False, (1, 3)),
        (64, 64, None, False, (0, 2)),
        (64, 64, "padding", False, (0, 0)),
        (64, 64, None, True, (0, 0)),
        (128, 128, "each query", True, (0, 0)),
        (65, 65, "each query", True, (1, 1)),
    ],
)
def test_cudnn_gets_no_lengths_for_which_its_gradient_is_missing_or_wrong(queries, keys, masked, causal, expected):
    mask = {"padding": jnp.ones((1, 1, 1, keys)), "each query": jnp.ones((1, 1, queries, keys))}.get(masked)
    more = attention._positions_that_cudnn_lacks(queries, keys, mask, causal)
    assert more == expected
    mask = jnp.ones((1, 1, 1, 1)) if mask is None and not causal else mask  # of the longer ones
    longer = queries + more[0], keys + more[1]
    assert attention._positions_that_cudnn_lacks(*longer, mask, causal) == (0, 0), "it would never end"


@pytest.mark.parametrize("more_queries", [0, 1, 2])
@pytest.mark.parametrize("more_keys", [0, 1, 2, 3])
@pytest.mark.parametrize("masked", [None, "padding", "each query"])
@pytest.mark.parametrize("causal", [False, True])
def test_more_positions_change_nothing(more_queries, more_keys, masked, causal):
    if causal and more_queries != more_keys:
        return
    queries, keys = (6, 6) if causal else (5, 6)
    query, key, value = (jax.random.normal(jax.random.key(n), (2, 3, n, 8)) for n in (queries, keys, keys))
    key = jnp.swapaxes(key, 2, 3)
    allowed = jax.random.bernoulli(jax.random.key(0), 0.5, (2, 1, queries, keys)).at[:, :, :, 0].set(True)
    padding = attention.padding_mask(jnp.array([[3] * keys, [3] * 2 + [0] * (keys - 2)]))
    mask = {"padding": padding, "each query": allowed}.get(masked)
    expected = attention.scaled_dot_product_attention(query, key, value, attention.whole_mask(mask, keys, causal))
    found = attention._fused_attention_of_longer(query, key, value, mask, causal, more_queries, more_keys)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_what_cudnn_leaves_in_the_gradients_of_padding_is_not_used(monkeypatch, causal):
    """It computes none beyond the length of a row: there is what the memory held."""
    by_xla = jax.nn.dot_product_attention

    def by_cudnn(query, key, value, *, key_value_seq_lengths, is_causal, **_):
        within = jnp.arange(key.shape[1])[None, :, None, None] < key_value_seq_lengths[:, None, None, None]
        attend = functools.partial(by_xla, is_causal=is_causal, key_value_seq_lengths=key_value_seq_lengths)

        def backward(pull_back, cotangent):
            by_query, *others = pull_back(cotangent)
            return by_query, *(jnp.where(within, x, jnp.nan) for x in others)

        of_cudnn = jax.custom_vjp(attend)
        of_cudnn.defvjp(functools.partial(jax.vjp, attend), backward)
        return of_cudnn(query, key, value)

    mask = attention.padding_mask(jnp.array([[3] * 6, [3] * 2 + [0] * 4, [0] * 6]))
    query, key, value, weights = (jax.random.normal(jax.random.key(n), (3, 2, 6, 8), jnp.bfloat16) for n in range(4))
    weights = weights.at[2].set(0)  # nothing depends on a row of padding
    key = jnp.swapaxes(key, 2, 3)
    whole_mask = attention.whole_mask(mask, 6, causal)
    total = lambda f: lambda *arrays: (f(*arrays) * weights).sum(dtype=jnp.float32)
    gradients_of = lambda f: jax.jit(jax.grad(total(f), (0, 1, 2)))(query, key, value)
    expected = gradients_of(lambda *arrays: attention.scaled_dot_product_attention(*arrays, whole_mask))
    monkeypatch.setattr(jax.nn, "dot_product_attention", by_cudnn)
    with tracing_for("gpu"):
        found = gradients_of(lambda *arrays: attention.fused_attention(*arrays, mask, causal=causal))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=0.05)


@pytest.mark.slow
def test_a_gpu_without_cudnn_is_refused_in_one_line():
    array = jnp.zeros((2, 3, 6, 8), jnp.bfloat16)
    with tracing_for("gpu"), pytest.raises(InputError, match="machine.fused_attention=True: cuDNN is not detected"):
        attention.fused_attention(array, jnp.swapaxes(array, 2, 3), array, None, causal=True)
