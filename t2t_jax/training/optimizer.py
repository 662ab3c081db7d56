"""§5.3: the learning-rate schedule (Eq. 3) and Adam.

Another schedule or optimiser is one more entry of `SCHEDULES` or `OPTIMIZERS`, which `optimizer.schedule` and
`optimizer.name` of a config choose from.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax


def learning_rate_schedule(d_model: int, warmup_steps: int, factor: float = 1.0) -> optax.Schedule:
    """factor · d_model^−0.5 · min(step^−0.5, step · warmup_steps^−1.5) (Eq. 3).

    The paper counts steps from 1, optax from 0: the update number n (n = 0, 1, …) uses step n + 1.
    """

    def schedule(count):
        step = count + 1.0
        return factor * d_model**-0.5 * jnp.minimum(step**-0.5, step * warmup_steps**-1.5)

    return schedule


def adam(schedule: optax.Schedule, beta1: float, beta2: float, epsilon: float) -> optax.GradientTransformation:
    """Adam with this schedule; no weight decay and no gradient clipping, as in the paper."""
    return optax.adam(schedule, b1=beta1, b2=beta2, eps=epsilon)


# (config.optimizer, d_model, train_steps) → the learning rate of each update.
SCHEDULES: dict[str, Callable[[Mapping[str, Any], int, int], optax.Schedule]] = {
    "inverse_sqrt": lambda fields, d_model, train_steps: learning_rate_schedule(
        d_model, fields["warmup_steps"], fields["learning_rate_factor"]
    ),
}
# (config.optimizer, schedule) → the optimiser.
OPTIMIZERS: dict[str, Callable[[Mapping[str, Any], optax.Schedule], optax.GradientTransformation]] = {
    "adam": lambda fields, schedule: adam(schedule, fields["beta1"], fields["beta2"], fields["epsilon"]),
}
