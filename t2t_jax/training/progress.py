"""§5: the progress of a run: the progress bar, metrics.jsonl and TensorBoard."""

import collections
import contextlib
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import optax
from tqdm import tqdm

from t2t_jax import sharding
from t2t_jax.data.batching import checksum
from t2t_jax.errors import DamagedError
from t2t_jax.progress_bar import is_live
from t2t_jax.run_folder import RunFolder
from t2t_jax.training.train_step import Metrics
from t2t_jax.training.watchdog import Watchdog

IN_FLIGHT = 2  # steps dispatched to the devices before the metrics of the oldest are waited for
_NOT_TRAINING = ("evaluation", "save")  # phases whose time does not count as training
_MOST_SKIPPED = 20  # updates in a row; a model whose updates are all skipped learns nothing

Item = TypeVar("Item")


class Progress:
    """Collects the metrics of each step; logs their means over `log_interval` steps and the time of each phase.

    The last interval of a run may be shorter. Time outside of any phase counts as that of the steps. Stops the run when
    a loss is not finite.
    """

    def __init__(
        self,
        run: RunFolder,
        step: int,
        train_steps: int,
        log_interval: int,
        schedule: optax.Schedule,
        peak_flops: float,
        skip_nonfinite: bool,
        saved: dict[str, Any],
        watchdog: Watchdog,
        trains_on: Mapping[str, str],
    ):
        """`saved` is what `totals` returned at `step`; at step 0 nothing, or `init_from` alone. `trains_on` is the
        hardware and software from here on.

        `peak_flops` is the rate of all devices together, 0 where it is unknown. With `skip_nonfinite`, updates with a
        number that is not finite have been skipped: they are counted and reported.
        """
        self._run, self._schedule, self._peak_flops = run, schedule, peak_flops
        self._log_interval, self._train_steps = log_interval, train_steps
        self._skip_nonfinite, self._watchdog = skip_nonfinite, watchdog
        interval = 0.5 if is_live() else 60
        self._bar = tqdm(
            total=train_steps, initial=step, unit="step", file=sys.stderr, mininterval=interval, maxinterval=interval,
            dynamic_ncols=True, smoothing=0.05, disable=not run.writes,
        )  # fmt: skip
        self._pending = collections.deque()
        self._since_log = collections.Counter(saved.get("since_log"))
        self._per_token = ("loss",)  # the names of the loss function's sums, once a step has told them
        self.tokens, self.seconds, self.flops = (saved.get(name, 0.0) for name in ("tokens", "seconds", "flops"))
        self.skipped, self._pairs_crc32 = (saved.get(name, 0) for name in ("skipped", "pairs_crc32"))
        self._checksum, self._checksum_of_own_rows = saved.get("batches_checksum", 0), 0
        self._skipped_in_a_row, self._logged_step = (saved.get(name, 0) for name in ("skipped_in_a_row", "logged_step"))
        self._evaluated_step = saved.get("evaluated_step", step)  # earlier versions did not save it
        self.init_from = saved.get("init_from", "")  # whose weights step 0 had; random ones without it
        # The `seconds` of training on each hardware and software; earlier versions did not save it.
        self.trained_on: list[dict[str, Any]] = [dict(entry) for entry in saved.get("trained_on", [])]
        same = (entry for entry in self.trained_on if entry == {**entry, **trains_on})
        self._seconds_here = next(same, {**trains_on, "seconds": 0.0})
        self._clock = time.monotonic()

    def totals(self) -> dict[str, Any]:
        """What a resumed run needs, to log what an uninterrupted one would have logged."""
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "flops": self.flops,
            "skipped": self.skipped,
            "skipped_in_a_row": self._skipped_in_a_row,
            "logged_step": self._logged_step,
            "since_log": dict(self._since_log),
            "init_from": self.init_from,
            "evaluated_step": self._evaluated_step,
            "trained_on": [dict(entry) for entry in self.trained_on],
            "batches_checksum": self.batches_checksum(),
            "pairs_crc32": self._pairs_crc32,
        }

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time of the block as that of this phase."""
        if name in _NOT_TRAINING:
            self.flush()  # so that the steps before are not counted
        self._count_time("step")
        with self._watchdog.paused() if name in _NOT_TRAINING else contextlib.nullcontext():
            yield
        self._count_time(name)

    def waiting_for(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items; the time spent waiting for them counts as phase 'input'."""
        items, none = iter(items), object()
        while True:
            with self.phase("input"):
                item = next(items, none)
            if item is none:
                return
            yield item

    def _count_time(self, name: str) -> None:
        now = time.monotonic()
        self._since_log[f"{name}_seconds"] += now - self._clock
        if name not in _NOT_TRAINING:
            self.seconds += now - self._clock
            self._seconds_here["seconds"] += now - self._clock
        self._clock = now

    def add(
        self,
        step: int,
        metrics: Metrics,
        batch: dict[str, np.ndarray],
        pairs: np.ndarray,
        source_tokens: int,
        flops: float,
    ) -> None:
        """Adds a step: its metrics, its batch with the rows that this process counts (`sharding.first_copies`), and of
        the whole batch the indices of its pairs, the number of source tokens and the floating-point operations.
        """
        if self._seconds_here not in self.trained_on:  # not before a step: a call may only look at a finished run
            self.trained_on.append(self._seconds_here)
        positions = batch["inputs"].size + batch["targets"].size
        counts = {"positions": positions, "source_tokens": source_tokens, "flops": flops}
        self._pending.append((step, metrics, counts))
        self._checksum_of_own_rows += checksum(step, batch)
        self._pairs_crc32 = zlib.crc32(np.ascontiguousarray(pairs), self._pairs_crc32)  # the same in all processes
        while len(self._pending) > IN_FLIGHT:
            self._take()
        if step % self._log_interval == 0 or step == self._train_steps:
            self.flush()
            self._log(step)
        self._bar.update()

    def batches_checksum(self) -> int:
        """The sum of the checksums of all batches since step 0; all processes must call this together."""
        self._checksum += sum(sharding.gather(self._checksum_of_own_rows))
        self._checksum_of_own_rows = 0
        return self._checksum % 2**32

    def flush(self) -> None:
        """Waits for the metrics of every step so far."""
        while self._pending:
            self._take()

    def _take(self) -> None:
        step, metrics, counts = self._pending.popleft()
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self._watchdog.step_ended()
        finite = values.pop("finite")
        if not finite:
            self._nonfinite(step, values)
            return
        self._skipped_in_a_row = 0
        tokens = values.pop("target_tokens")
        self.tokens += tokens
        self.flops += counts["flops"]
        self._since_log.update(steps=1, tokens=tokens, gradient_norm=values.pop("gradient_norm"), **counts)
        self._since_log.update({name: value * tokens for name, value in values.items()})
        self._per_token = tuple(values)

    def _nonfinite(self, step: int, values: dict[str, float]) -> None:
        """Stops the run or counts a skipped update; all processes do the same, as they see the same numbers."""
        loss, norm = values["loss"], values["gradient_norm"]
        what = f"step {step}: loss {loss}, gradient norm {norm}, or a parameter behind it, is not finite"
        self.skipped += 1
        self._skipped_in_a_row += 1
        if not self._skip_nonfinite:
            raise DamagedError(
                f"{what}; no checkpoint holds such a number. Lower optimizer.learning_rate_factor, raise "
                f"optimizer.warmup_steps, or set train.on_nonfinite='skip', which skips up to {_MOST_SKIPPED} in a row"
            )
        if self._skipped_in_a_row > _MOST_SKIPPED:
            raise DamagedError(
                f"{what}, as those of the {_MOST_SKIPPED} steps before it, whose updates were skipped; lower "
                "optimizer.learning_rate_factor or raise optimizer.warmup_steps"
            )
        self.say(f"{what}: its update is skipped ({self.skipped} so far)")

    def _log(self, step: int) -> None:
        self._count_time("step")
        sums = self._since_log
        seconds = {f"{name}_seconds": sums[f"{name}_seconds"] for name in ("input", "step", *_NOT_TRAINING)}
        training = seconds["input_seconds"] + seconds["step_seconds"]
        if not sums["tokens"]:  # all steps were skipped, or held nothing but padding
            return
        record = {
            **{name: sums[name] / sums["tokens"] for name in self._per_token},
            "gradient_norm": sums["gradient_norm"] / sums["steps"],
            "learning_rate": float(self._schedule(step - 1)),
            "target_tokens_per_second": sums["tokens"] / training,
            "padding": 1 - (sums["source_tokens"] + sums["tokens"]) / sums["positions"],
            "batches_checksum": self.batches_checksum(),
            **seconds,
        }
        if self._skip_nonfinite:
            record["skipped_steps"] = self.skipped
        if self._peak_flops:
            record["flops_utilisation"] = sums["flops"] / training / self._peak_flops
        self._run.log(step, **record)
        self._logged_step = step
        utilisation = f", MFU {record['flops_utilisation']:.1%}" if self._peak_flops else ""
        self._bar.set_postfix_str(
            f"loss {record['loss']:.3f}, {record['target_tokens_per_second']:,.0f} target tokens/s, "
            f"padding {record['padding']:.1%}{utilisation}",
            refresh=is_live(),  # between two updates of a log file the rate would be an old one
        )
        self._since_log = collections.Counter()

    def has_evaluated(self, step: int) -> bool:
        """Whether the last evaluation was that of `step`; also True at step 0, which is never evaluated."""
        return self._evaluated_step == step

    def report(self, step: int, text: str, metrics: dict[str, Any]) -> None:
        """Logs an evaluation and prints it above the bar."""
        self._evaluated_step = step
        self._run.log(step, **metrics)
        self.say(text)

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._run.writes:
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Ends the bar, leaving its last state on the screen."""
        self._bar.close()
