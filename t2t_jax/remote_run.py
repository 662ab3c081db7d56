"""The paths of run folders; those by URL, in an object store (object_store.py), are copied to this machine for use."""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator

from absl import logging

from t2t_jax.errors import DamagedError, InputError, InterruptedRun
from t2t_jax.files import is_url
from t2t_jax.object_store import RemoteFolder, Select, everything, local_copy

_CHECKPOINT = re.compile("(checkpoints|averaged)/([0-9]+)/")

Publish = Callable[[], None]  # uploads what has changed


def needed_to_read(step: int | str | None) -> Select:
    """Selects what reading the checkpoint `step` of a run needs; `step` as for `load`."""

    def select(names: set[str]) -> Iterable[str]:
        found = {name: match.groups() for name in names if (match := _CHECKPOINT.match(name))}
        has_average = any(folder == "averaged" for folder, _ in found.values())
        folder = "averaged" if step == "averaged" or (step is None and has_average) else "checkpoints"
        newest = max((int(number) for of, number in found.values() if of == folder), default=None)
        wanted = folder, str(step if isinstance(step, int) else newest)
        return [name for name in names if "/" not in name or found.get(name) == wanted]

    return select


def run_paths(field: str, paths: str | os.PathLike) -> str:
    """One path, or several with commas between, with the home folder in place of a leading ~; refuses an empty one."""
    given = os.fspath(paths).split(",")
    if "" in given:
        raise InputError(f"{field}: an empty path; give that of a run folder, such as runs/quickstart")
    return ",".join(map(os.path.expanduser, given))


@contextlib.contextmanager
def local_run(path: str, select: Select = everything, *, trains: bool = False) -> Iterator[tuple[str, Publish]]:
    """A run folder, or its copy on this machine if `path` is a URL, with what `select` chooses; and its `Publish`.

    What has changed at the end of the block, or when it is interrupted, is uploaded too. Where `Publish` finds no
    network, that is logged: the next upload has what this one lacks. Of all the processes that use a run, one `trains`.
    """
    if not is_url(path):
        yield path, lambda: None
        return
    exclusive = "checkpoints/" if trains else ""
    with local_copy(path) as folder:
        remote = RemoteFolder("workdir", path, folder, _CHECKPOINT)
        remote.download(select)

        def publish() -> None:
            try:
                remote.upload(exclusive)
            except InterruptedRun as error:
                logging.error("%s; the run goes on, and the next upload has this one's files too", error)

        try:
            yield str(folder), publish
        except InterruptedRun:  # which promises that the run is saved
            remote.upload(exclusive)
            raise
        except DamagedError:  # such as a loss that is no number: its log says why
            with contextlib.suppress(InputError):
                publish()
            raise
        remote.upload(exclusive)


@contextlib.contextmanager
def local_runs(paths: str | os.PathLike, select: Select = everything) -> Iterator[str]:
    """`local_run` of each of the folders, separated by commas."""
    each = run_paths("workdir", paths).split(",")
    with contextlib.ExitStack() as stack:
        yield ",".join(stack.enter_context(local_run(path, select))[0] for path in each)
