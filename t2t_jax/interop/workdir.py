"""Opens what --workdir names: run folders, their URLs in an object store, and folders of published Marian models."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from t2t_jax.errors import DamagedError, InputError
from t2t_jax.interop.foreign import json_object
from t2t_jax.interop.from_marian import from_marian
from t2t_jax.remote_run import local_runs, needed_to_read
from t2t_jax.temporary_folders import standing_for, temporary_folder


@contextlib.contextmanager
def run_folders(workdir: str | Path, step: int | str | None = None) -> Iterator[str]:
    """`workdir` with a temporary run folder, for the time of the block, for each URL or Marian model in it.

    `workdir` is a run folder or several with commas between, as `load` takes it; of a URL, checkpoint `step` is read.
    """
    with contextlib.ExitStack() as stack:
        paths = stack.enter_context(local_runs(workdir, needed_to_read(step))).split(",")
        for index, path in enumerate(paths):
            if is_marian(path):
                folder = stack.enter_context(temporary_folder()) / Path(path).resolve().name  # of "." and ".." too
                from_marian(path, folder)
                stack.enter_context(standing_for(folder, path))
                paths[index] = str(folder)
        yield ",".join(paths)


def is_marian(path: str | Path) -> bool:
    """Whether a folder holds a model of Hugging Face's MarianMTModel."""
    try:
        return json_object("workdir", Path(path) / "config.json").get("model_type") == "marian"
    except (InputError, DamagedError):  # whoever opens it as a run folder says what is wrong with it
        return False
