import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t2t_jax.decoding.sampling import Sampling, sample, top_k_top_p_filter
from t2t_jax.errors import InputError

P = np.array([0.4, 0.25, 0.2, 0.1, 0.05])


def kept(**options):
    found = top_k_top_p_filter(jnp.log(jnp.asarray(P))[None, None], **({"top_k": 0, "top_p": 1.0} | options))[0, 0]
    return set(np.flatnonzero(np.isfinite(found)))


def test_top_k_keeps_a_number_and_top_p_a_probability_of_the_most_likely_tokens():
    assert kept() == {0, 1, 2, 3, 4}
    assert kept(top_k=2) == {0, 1}
    assert kept(top_p=0.3) == {0}
    assert kept(top_p=0.64) == {0, 1} and kept(top_p=0.66) == {0, 1, 2}
    assert kept(top_k=2, top_p=0.7) == {0, 1}, "top_p applies to what top_k keeps: .4 / .65 is below .7"
    assert kept(top_k=2, top_p=0.6) == {0}


def test_the_nucleus_equals_the_one_found_by_sorting():
    logits = 3 * np.random.default_rng(0).normal(size=(4, 3, 500)).astype(np.float32)
    for top_p in (0.05, 0.5, 0.9):
        found = np.isfinite(top_k_top_p_filter(jnp.asarray(logits), 0, top_p))
        for row, keeps in zip(logits.reshape(-1, 500), found.reshape(-1, 500), strict=True):
            p = np.exp(row - np.logaddexp.reduce(row))
            order = np.argsort(-p)
            expected = set(order[: np.searchsorted(np.cumsum(p[order]), top_p) + 1])
            assert set(np.flatnonzero(keeps)) == expected


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_of_samples_are_the_probabilities(temperature):
    log_probs = jnp.broadcast_to(jnp.log(jnp.asarray(P)), (200, 50, 5))
    tokens = jax.jit(sample, static_argnums=1)(
        log_probs, Sampling(temperature=temperature), jnp.arange(200), jnp.zeros(200, jnp.int32)
    )
    expected = P ** (1 / temperature)
    expected /= expected.sum()
    np.testing.assert_allclose(np.bincount(np.ravel(tokens)) / 10_000, expected, atol=0.02)


def test_a_sample_depends_on_the_seed_and_the_position():
    log_probs = jnp.zeros((3, 1, 1000))
    (first, same, other) = sample(log_probs, Sampling(), jnp.array([1, 1, 2]), jnp.array([4, 4, 4]))[:, 0]
    later = sample(log_probs, Sampling(), jnp.array([1, 1, 2]), jnp.array([5, 5, 5]))[0, 0]
    assert first == same and first != other and first != later


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1),
     ("temperature", "hot"), ("top_k", 2.5), ("top_p", None), ("temperature", float("nan")),
     ("temperature", 1e-300), ("top_p", float("nan")), ("top_p", 1e-300)],
)  # fmt: skip
def test_impossible_distributions_are_refused(field, value):
    with pytest.raises(InputError, match=f"{field} must be .*got {value!r}"):
        Sampling(**{field: value})
