"""t2t_jax: "Attention Is All You Need" as a JAX/Flax research codebase."""

__version__ = "0.1.0"


def load(run: str, step: int | None = None, *, dtype: str = "float32"):
    """A `Translator` from a run folder; `step=None` takes the averaged checkpoint, else the last.

    A folder with a published Marian model, such as Opus-MT's, is read too, and a run in an object store by its URL.
    """
    from t2t_jax.decoding.translator import load
    from t2t_jax.interop.imported import run_folders

    with run_folders(run, step) as run:
        return load(run, step, dtype=dtype)
