import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2t_jax.training import loss as module
from t2t_jax.training.loss import cross_entropy
from tests.tiny import VOCAB, B, D, T

TARGETS = jnp.array([[3, 4, 1, 0, 0], [2, 9, 9, 5, 1]])


@pytest.fixture
def before_softmax():
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (B, T, D)), jax.random.normal(keys[1], (VOCAB, D))


@pytest.fixture(params=[1, 2, 4, 6, 10, 1000])
def chunked(request, monkeypatch):
    """Chunks of 1, 1, 2, 3, 5 and 5 of the five positions of both rows: one divides them, others do not."""
    monkeypatch.setattr(module, "tokens_per_chunk", lambda: request.param)


def plain(y, table, targets, epsilon):
    """Cross-entropy with 1 − ε on the true id and ε/(vocab − 1) on every other, all of it in memory."""
    log_probs = jax.nn.log_softmax((y @ table.T).astype(jnp.float32))
    smooth = jnp.where(jnp.eye(len(table))[targets] == 1, 1 - epsilon, epsilon / (len(table) - 1))
    return -jnp.sum(smooth * log_probs * (targets != 0)[..., None])


@pytest.mark.parametrize(("epsilon", "devices"), [(0.0, 1), (0.1, 1), (0.1, 2), (0.2, 1)])
def test_values_and_gradients_are_those_of_the_plain_formula(before_softmax, chunked, epsilon, devices):
    loss, nll, tokens = cross_entropy(*before_softmax, TARGETS, epsilon, devices)
    np.testing.assert_allclose(loss, plain(*before_softmax, TARGETS, epsilon), rtol=1e-5)
    np.testing.assert_allclose(nll, plain(*before_softmax, TARGETS, 0.0), rtol=1e-5)
    assert tokens == 8
    expected = jax.grad(lambda y, table: 3 * plain(y, table, TARGETS, epsilon), (0, 1))(*before_softmax)
    of = lambda y, table: 3 * cross_entropy(y, table, TARGETS, epsilon, devices)[0]
    found = jax.grad(of, (0, 1))(*before_softmax)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


def test_bfloat16_is_near_float32_and_the_table_keeps_its_type(before_softmax, chunked):
    """Gradients by the logits are rounded to bfloat16, 8 bits, before the last two products."""
    y, table = before_softmax
    rounded = y.astype(jnp.bfloat16), table.astype(jnp.bfloat16).astype(jnp.float32)
    of = lambda y, table: cross_entropy(y, table, TARGETS, 0.1)[0]
    loss, gradients = jax.value_and_grad(of, (0, 1))(*rounded)
    expected, plain_gradients = jax.value_and_grad(of, (0, 1))(rounded[0].astype(jnp.float32), rounded[1])
    assert [loss.dtype, *(x.dtype for x in gradients)] == [jnp.float32, jnp.bfloat16, jnp.float32]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for a, b in zip(gradients, plain_gradients, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=0.01 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("tokens_per_chunk", [64, 1024])
def test_bfloat16_has_products_for_wide_layers(monkeypatch, tokens_per_chunk):
    """XLA on CPU lacks some; which ones it takes depends on the widths."""
    monkeypatch.setattr(module, "tokens_per_chunk", lambda: tokens_per_chunk)
    arguments = jnp.ones((8, 16, 64), jnp.bfloat16), jnp.ones((320, 64)), jnp.ones((8, 16), jnp.int32)
    gradient = jax.jit(jax.grad(lambda y, table, targets: cross_entropy(y, table, targets, 0.1)[0], (0, 1)))
    assert all(np.isfinite(x.astype(jnp.float32)).all() for x in gradient(*arguments))


def test_only_the_smoothed_loss_has_a_gradient(before_softmax):
    others = lambda y, table: sum(cross_entropy(y, table, TARGETS, 0.1)[1:])
    assert not any(np.any(x) for x in jax.grad(others, (0, 1))(*before_softmax))


def test_masking_equals_deleting(before_softmax):
    y, table = before_softmax
    padded = cross_entropy(y[:1], table, TARGETS[:1], 0.1)
    deleted = cross_entropy(y[:1, :3], table, TARGETS[:1, :3], 0.1)
    np.testing.assert_allclose(padded, deleted, rtol=1e-6)


def test_the_best_possible_loss_is_the_entropy_of_the_smoothed_target():
    """1.3769 nats at 37,000 ids and ε = 0.1 (recipe §5.4)."""
    vocab, epsilon = 37000, 0.1
    table = jnp.full((vocab, 1), jnp.log(epsilon / (vocab - 1))).at[7].set(jnp.log(1 - epsilon))
    loss, _, _ = cross_entropy(jnp.ones((1, 1, 1)), table, jnp.array([[7]]), epsilon)
    np.testing.assert_allclose(loss, 1.3769, atol=2e-4)


def test_all_logits_are_never_in_memory(monkeypatch):
    """4 rows of 256 positions, 4,096 ids: 16 MiB of logits, a sixteenth at a time; and no gradients unasked."""
    monkeypatch.setattr(module, "tokens_per_chunk", lambda: 64)
    rows, length, width, vocab = 4, 256, 8, 4096
    shape = jax.ShapeDtypeStruct
    arguments = shape((rows, length, width), jnp.float32), shape((vocab, width), jnp.float32)
    targets = shape((rows, length), jnp.int32)
    of = lambda y, table, targets: cross_entropy(y, table, targets, 0.1)[0]
    temporary = lambda f: f.lower(*arguments, targets).compile().memory_analysis().temp_size_in_bytes
    everything = rows * length * vocab * 4
    assert temporary(jax.jit(of)) < everything / 6
    assert temporary(jax.jit(jax.grad(of, (0, 1)))) < everything / 3
    products = lambda f: f.lower(*arguments, targets).as_text().count("dot_general")
    assert products(jax.jit(of)) == 1 and products(jax.jit(jax.grad(of, (0, 1)))) == 3
