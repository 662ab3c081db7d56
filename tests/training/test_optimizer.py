import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t2t_jax.training.optimizer import adam, learning_rate_schedule


def test_equation_3_at_step_1_at_warm_up_and_at_four_times_warm_up():
    schedule = learning_rate_schedule(512, 4000)
    at = lambda step: schedule(jnp.array(step - 1))  # optax counts from 0
    np.testing.assert_allclose(at(1), 512**-0.5 * 4000**-1.5, rtol=1e-6)
    np.testing.assert_allclose(at(4000), 6.988e-4, rtol=1e-3)
    np.testing.assert_allclose(at(16000), at(4000) / 2, rtol=1e-6)
    np.testing.assert_allclose(at(100_000), 1.398e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("d_model", "factor", "peak"), [(1024, 1.0, 4.941e-4), (256, 1.0, 9.882e-4), (512, 2.0, 1.3975e-3)]
)
def test_peak_follows_the_width_and_the_factor(d_model, factor, peak):
    np.testing.assert_allclose(learning_rate_schedule(d_model, 4000, factor)(3999), peak, rtol=1e-3)


def test_two_steps_of_adam_by_hand():
    """β₁ 0.9, β₂ 0.98, ε 1e-9, bias correction, learning rates of steps 1 and 2."""
    schedule = learning_rate_schedule(4, 10)
    optimizer = adam(schedule, 0.9, 0.98, 1e-9)
    x, state = jnp.array(1.0), optimizer.init(jnp.array(1.0))
    expected, m, v = 1.0, 0.0, 0.0
    for step, gradient in ((1, 0.5), (2, -0.2)):
        updates, state = optimizer.update(jnp.array(gradient), state, x)
        x = optax.apply_updates(x, updates)
        m, v = 0.9 * m + 0.1 * gradient, 0.98 * v + 0.02 * gradient**2
        rate = 4**-0.5 * step * 10**-1.5
        expected -= rate * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.98**step)) + 1e-9)
        np.testing.assert_allclose(x, expected, rtol=1e-5)
