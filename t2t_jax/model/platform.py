"""The platform that programs are traced for: a few computations are fastest in another form on each."""

import jax

# For `jax.export` and ahead-of-time compilation, which trace for a platform that this machine may lack:
# `with tracing_for("gpu"): …`. Part of the key of JAX's caches.
tracing_for = jax.make_user_context(None)


def platform() -> str:
    """'cpu', 'gpu' or 'tpu': that of `tracing_for`, else the one of JAX's default devices."""
    return tracing_for.value or jax.default_backend()
