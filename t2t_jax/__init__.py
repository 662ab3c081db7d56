"""t2t_jax: "Attention Is All You Need" as a JAX/Flax research codebase."""

__version__ = "0.1.0"


def load(run: str, step: int | None = None, *, dtype: str = "float32"):
    """A `Translator` from a run folder; `step=None` takes the averaged checkpoint, else the last."""
    from t2t_jax.decoding.translator import load

    return load(run, step, dtype=dtype)
