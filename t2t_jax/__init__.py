"""t2t_jax: "Attention Is All You Need" as a JAX/Flax research codebase."""

__version__ = "0.1.0"


def restore(run: str, step: int | str | None = None):
    """A `TrainedModel`, with `model`, `params`, `vocabularies` and `task`; `run` and `step` as for `load`.

    The parameters are NumPy arrays. Its `run` is the folder that was read: where `run` is a URL or a Marian model, a
    temporary one, which is gone.
    """
    from t2t_jax.decoding import trained_model
    from t2t_jax.interop.workdir import run_folders

    with run_folders(run, step) as folder:
        return trained_model.restore(folder, step)


def load(run: str, step: int | str | None = None, *, dtype: str = "float32"):
    """A `Translator` from a run folder; `step` is a number, 'last' or 'averaged'.

    None is the averaged checkpoint if there is one, else the last. A folder with a published Marian model, such as
    Opus-MT's, is read too, and a run in an object store by its URL. "RUN1,RUN2" is an ensemble.
    """
    from t2t_jax.decoding import translator
    from t2t_jax.interop.workdir import run_folders

    with run_folders(run, step) as folders:
        return translator.load(folders, step, dtype=dtype)
