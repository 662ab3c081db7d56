"""Traces of training steps for TensorBoard or Perfetto (`--profile_steps`)."""

import jax

from t2t_jax.errors import InputError
from t2t_jax.run_folder import RunFolder
from t2t_jax.temporary_folders import original_of
from t2t_jax.training.progress import Progress
from t2t_jax.training.setup import say


class Profiler:
    """A trace of the steps from `steps[0]` to `steps[1]`, written to the folder `profile` of the run by process 0."""

    def __init__(self, run: RunFolder, steps: tuple[int, int] | None, step: int, train_steps: int):
        self._run = run
        self._first, self._last = steps or (0, 0)
        given = f"--profile_steps={self._first},{self._last}"
        if steps and self._last > train_steps:
            raise InputError(f"{given}: must be among the steps to come, {step + 1} to {train_steps}")
        if steps and step >= self._first:  # no error: the command that has begun a run resumes it
            say(f"{given}: step {self._first} has been made; nothing is traced")
        if step >= self._first or not run.writes:  # all processes of a host would write one file
            self._first = self._last = 0

    def before(self, step: int) -> None:
        """Starts the trace if `step` is its first one."""
        if step == self._first:
            jax.profiler.start_trace(str(self._run.path / "profile"))

    def after(self, step: int, progress: Progress) -> None:
        """Ends the trace if `step` was its last one."""
        if step == self._last:
            progress.flush()  # the devices have completed it as well
            jax.profiler.stop_trace()
            folder = f"{original_of(self._run.path)}/profile"
            progress.say(f"steps {self._first} to {self._last} are traced in {folder}")
