import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float, Int

from t2t_jax.model.einsum import dense
from t2t_jax.model.layers import layer_norm
from t2t_jax.model.platform import tracing_for
from t2t_jax.training import loss as module
from t2t_jax.training.loss import cross_entropy, smoothed_cross_entropy_reference
from tests.tiny import VOCAB, B, D, T

TARGETS = jnp.array([[3, 4, 1, 0, 0], [2, 9, 9, 5, 1]])


@pytest.fixture
def before_softmax():
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (B, T, D)), jax.random.normal(keys[1], (VOCAB, D))


@pytest.fixture(params=[1, 4, 6, None])
def chunked(request, monkeypatch):
    """Chunks of 1, 2, 3 and 5 of the five positions; some lengths divide five, others do not."""
    if request.param:
        monkeypatch.setattr(module, "tokens_per_chunk", lambda: request.param)


def reference(y, table, targets, epsilon):
    return smoothed_cross_entropy_reference((y @ table.T).astype(jnp.float32), targets, epsilon)


def test_the_reference_is_section_5_4_in_numpy():
    """One position: 1 − ε on the true id, ε/(vocab − 1) on every other one."""
    logits, epsilon = np.linspace(-1, 2, VOCAB), 0.1
    log_probs = np.log(np.exp(logits) / np.exp(logits).sum())
    expected = -(1 - epsilon) * log_probs[3] - epsilon / (VOCAB - 1) * np.delete(log_probs, 3).sum()
    padded = jnp.asarray(np.tile(logits, (1, 2, 1)), jnp.float32)
    found = smoothed_cross_entropy_reference(padded, jnp.array([[3, 0]]), epsilon)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_values_and_gradients_are_those_of_the_reference(before_softmax, chunked, epsilon, platform):
    """In the form that is computed on a CPU, and in the one for a GPU."""
    with tracing_for(platform):
        check_against_the_reference(before_softmax, epsilon)


def check_against_the_reference(before_softmax, epsilon):
    loss, nll, tokens = cross_entropy(*before_softmax, TARGETS, epsilon)
    np.testing.assert_allclose(loss, reference(*before_softmax, TARGETS, epsilon), rtol=1e-5)
    np.testing.assert_allclose(nll, reference(*before_softmax, TARGETS, 0.0), rtol=1e-5)
    assert tokens == 8
    expected = jax.grad(lambda y, table: 3 * reference(y, table, TARGETS, epsilon), (0, 1))(*before_softmax)
    chunked_loss = lambda y, table: 3 * cross_entropy(y, table, TARGETS, epsilon)[0]
    found = jax.grad(chunked_loss, (0, 1))(*before_softmax)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize(("platform", "rtol"), [("cpu", 1e-5), ("gpu", 2e-3)])
def test_bfloat16_is_near_float32_and_the_gradient_of_the_table_is_float32(before_softmax, chunked, platform, rtol):
    """The gradient of the logits is rounded to bfloat16 (8 bits) before the two backward matmuls; on a GPU, so are the
    logits.
    """
    y, table = before_softmax
    rounded = y.astype(jnp.bfloat16), table.astype(jnp.bfloat16).astype(jnp.float32)
    of = lambda y, table: cross_entropy(y, table, TARGETS, 0.1)[0]
    with tracing_for(platform):
        loss, gradients = jax.value_and_grad(of, (0, 1))(*rounded)
    expected, expected_gradients = jax.value_and_grad(of, (0, 1))(rounded[0].astype(jnp.float32), rounded[1])
    assert [loss.dtype, *(x.dtype for x in gradients)] == [jnp.float32, jnp.bfloat16, jnp.float32]
    np.testing.assert_allclose(loss, expected, rtol=rtol)
    for a, b in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=0.01 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("tokens_per_chunk", [64, 1024])
def test_bfloat16_works_with_large_d_model_and_vocabulary(monkeypatch, tokens_per_chunk):
    """XLA on CPU lacks some bfloat16 matmuls; the ones it chooses depend on the sizes."""
    monkeypatch.setattr(module, "tokens_per_chunk", lambda: tokens_per_chunk)
    arguments = jnp.ones((8, 16, 64), jnp.bfloat16), jnp.ones((320, 64)), jnp.ones((8, 16), jnp.int32)
    gradient = jax.jit(jax.grad(lambda y, table, targets: cross_entropy(y, table, targets, 0.1)[0], (0, 1)))
    assert all(np.isfinite(x.astype(jnp.float32)).all() for x in gradient(*arguments))


def test_only_the_smoothed_loss_has_a_gradient(before_softmax):
    others = lambda y, table: sum(cross_entropy(y, table, TARGETS, 0.1)[1:])
    assert not any(np.any(x) for x in jax.grad(others, (0, 1))(*before_softmax))


def test_padding_equals_deleting(before_softmax):
    y, table = before_softmax
    padded = cross_entropy(y[:1], table, TARGETS[:1], 0.1)
    deleted = cross_entropy(y[:1, :3], table, TARGETS[:1, :3], 0.1)
    np.testing.assert_allclose(padded, deleted, rtol=1e-6)


def test_the_best_possible_loss_is_the_entropy_of_the_smoothed_target():
    """1.3769 nats for 37,000 ids and ε = 0.1."""
    vocab, epsilon = 37000, 0.1
    table = jnp.full((vocab, 1), jnp.log(epsilon / (vocab - 1))).at[7].set(jnp.log(1 - epsilon))
    loss, _, _ = cross_entropy(jnp.ones((1, 1, 1)), table, jnp.array([[7]]), epsilon)
    np.testing.assert_allclose(loss, 1.3769, atol=2e-4)


def test_the_full_array_of_logits_is_never_materialised(monkeypatch):
    """4 rows of 256 positions, 4,096 ids: 16 MiB of logits, one sixteenth at a time. Without grad: one matmul."""
    monkeypatch.setattr(module, "tokens_per_chunk", lambda: 64)
    rows, length, d_model, vocab = 4, 256, 8, 4096
    shape = jax.ShapeDtypeStruct
    arguments = shape((rows, length, d_model), jnp.float32), shape((vocab, d_model), jnp.float32)
    targets = shape((rows, length), jnp.int32)
    of = lambda y, table, targets: cross_entropy(y, table, targets, 0.1)[0]
    temporary = lambda f: f.lower(*arguments, targets).compile().memory_analysis().temp_size_in_bytes
    all_logits = rows * length * vocab * 4  # bytes
    assert temporary(jax.jit(of)) < all_logits / 6
    assert temporary(jax.jit(jax.grad(of, (0, 1)))) < all_logits / 3
    matmuls = lambda f: f.lower(*arguments, targets).as_text().count("dot_general")
    assert matmuls(jax.jit(of)) == 1 and matmuls(jax.jit(jax.grad(of, (0, 1)))) == 3


PASSES = jnp.repeat(TARGETS[:1], 2, axis=0)  # one sentence of three tokens, twice


def r_drop_reference(
    logits: Float[Array, "B T vocab"], targets: Int[Array, "B T"], label_smoothing: float, r_drop: float
) -> Float[Array, ""]:
    """The loss of R-Drop (Liang et al. 2021, equation 4), halved: the mean cross-entropy of two dropout passes, and
    α/4 of the sum of both Kullback-Leibler divergences between them; α = `r_drop`.

    Rows 2i and 2i + 1 are the two passes of one sentence.
    """
    first, second = (jax.nn.log_softmax(logits[i::2]) for i in range(2))
    divergences = jnp.sum((jnp.exp(first) - jnp.exp(second)) * (first - second), axis=-1)  # KL(1‖2) + KL(2‖1)
    regularizer = jnp.sum(jnp.where(targets[::2] != 0, divergences, 0))
    return smoothed_cross_entropy_reference(logits, targets, label_smoothing) / 2 + r_drop / 4 * regularizer


def test_the_reference_of_r_drop_is_its_equation_in_numpy():
    """Two distributions of two ids: their mean cross-entropy, and α/4 of both divergences."""
    p, q, alpha = np.array([0.5, 0.5]), np.array([0.2, 0.8]), 5.0
    divergences = np.sum(p * np.log(p / q)) + np.sum(q * np.log(q / p))
    expected = -(np.log(p[1]) + np.log(q[1])) / 2 + alpha / 4 * divergences
    logits = jnp.log(jnp.array([[p, p], [q, p]], jnp.float32))  # the second position is padding
    np.testing.assert_allclose(r_drop_reference(logits, jnp.array([[1, 0]] * 2), 0.0, alpha), expected, rtol=1e-6)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("alpha", [1.0, 5.0])
def test_values_and_gradients_of_r_drop_are_those_of_its_reference(before_softmax, chunked, platform, alpha):
    of_reference = lambda y, table: 3 * r_drop_reference(y @ table.T, PASSES, 0.1, alpha)
    of_chunks = lambda y, table: 3 * cross_entropy(y, table, PASSES, 0.1, alpha)[0]
    with tracing_for(platform):
        loss, nll, tokens = cross_entropy(*before_softmax, PASSES, 0.1, alpha)
        found = jax.grad(of_chunks, (0, 1))(*before_softmax)
    np.testing.assert_allclose(3 * loss, of_reference(*before_softmax), rtol=1e-5)
    np.testing.assert_allclose(nll, reference(*before_softmax, PASSES, 0.0) / 2, rtol=1e-5)
    assert tokens == 3  # of the sentence, not of both passes
    for a, b in zip(found, jax.grad(of_reference, (0, 1))(*before_softmax), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


def test_equal_passes_have_the_loss_of_one(before_softmax):
    y, table = before_softmax
    twice = cross_entropy(jnp.repeat(y[:1], 2, axis=0), table, PASSES, 0.1, 5.0)
    for a, b in zip(twice, cross_entropy(y[:1], table, TARGETS[:1], 0.1), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_products_with_the_hessian_are_those_without_gradients_of_our_own(before_softmax):
    """Computed as on docs/library.md, through a matrix product, a layer normalisation and the loss."""

    def ours(x, kernel, table):
        y = layer_norm(dense(x, kernel), jnp.full(D, 1.5), jnp.zeros(D), 1e-6)
        return cross_entropy(y, table, TARGETS, 0.1)[0]

    def plain(x, kernel, table):
        y = 1.5 * jax.nn.standardize(x @ kernel, epsilon=1e-6)
        return reference(y, table, TARGETS, 0.1)

    x, table = before_softmax
    at = x, jax.random.normal(jax.random.key(1), (D, D)), table
    direction = tuple(jax.random.normal(jax.random.key(i), a.shape) for i, a in enumerate(at))

    def product(f):
        gradient = jax.grad(lambda at: f(*at))
        return jax.jit(jax.grad(lambda at: optax.tree.vdot(gradient(at), direction)))(at)

    for a, b in zip(product(ours), product(plain), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * float(jnp.abs(b).max()))
