import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2t_jax.training.loss import cross_entropy
from tests.tiny import VOCAB, B, T


@pytest.fixture
def logits():
    return 3 * jax.random.normal(jax.random.key(0), (B, T, VOCAB))


TARGETS = jnp.array([[3, 4, 1, 0, 0], [2, 9, 9, 5, 1]])


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.2])
def test_smoothing_against_one_line_of_numpy(logits, epsilon):
    """The smoothed target has 1 − ε on the true id and ε/(vocab − 1) on every other."""
    log_probs = np.asarray(jax.nn.log_softmax(logits), np.float64)
    smooth = np.where(np.eye(VOCAB)[np.asarray(TARGETS)] == 1, 1 - epsilon, epsilon / (VOCAB - 1))
    expected = -(smooth * log_probs).sum(axis=-1)[np.asarray(TARGETS) != 0].sum()
    loss, nll, tokens = cross_entropy(logits, TARGETS, epsilon)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(nll, cross_entropy(logits, TARGETS, 0.0)[0], rtol=1e-6)
    assert tokens == 8


def test_gradient_is_softmax_minus_the_smoothed_target(logits):
    gradient = jax.grad(lambda z: cross_entropy(z, TARGETS, 0.1)[0])(logits)
    smooth = np.where(np.eye(VOCAB)[np.asarray(TARGETS)] == 1, 0.9, 0.1 / (VOCAB - 1))
    expected = (jax.nn.softmax(logits) - smooth) * (TARGETS != 0)[..., None]
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_masking_equals_deleting(logits):
    padded = cross_entropy(logits[:1], TARGETS[:1], 0.1)
    deleted = cross_entropy(logits[:1, :3], TARGETS[:1, :3], 0.1)
    np.testing.assert_allclose(padded, deleted, rtol=1e-6)


def test_the_best_possible_loss_is_the_entropy_of_the_smoothed_target():
    """1.3769 nats at 37,000 ids and ε = 0.1 (recipe §5.4)."""
    vocab, epsilon = 37000, 0.1
    logits = jnp.full((1, 1, vocab), jnp.log(epsilon / (vocab - 1))).at[0, 0, 7].set(jnp.log(1 - epsilon))
    loss, _, _ = cross_entropy(logits, jnp.array([[7]]), epsilon)
    np.testing.assert_allclose(loss, 1.3769, atol=2e-4)
