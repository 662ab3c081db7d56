"""§5: what is seen of a run while it trains: the progress bar, metrics.jsonl and TensorBoard."""

import collections
import math
import sys
import time
from typing import Any

import jax
import optax
from tqdm import tqdm

from t2t_jax.errors import DamagedError
from t2t_jax.run_folder import RunFolder
from t2t_jax.training.train_step import Metrics

_IN_FLIGHT = 2  # steps handed to the devices before the oldest one's numbers are waited for


class Progress:
    """Collects each step's numbers and reports their mean over `log_interval` steps.

    Stops the run when a loss is not finite.
    """

    def __init__(
        self,
        run: RunFolder,
        step: int,
        train_steps: int,
        log_interval: int,
        schedule: optax.Schedule,
        saved: dict[str, Any],
    ):
        """`saved` is what `totals` said at `step`, nothing at step 0."""
        self._run, self._log_interval, self._schedule = run, log_interval, schedule
        run.start_metrics(step)
        # A person watches a terminal; a log file gets a line now and then.
        interval = 0.5 if sys.stderr.isatty() else 60
        self._bar = tqdm(
            total=train_steps, initial=step, unit="step", file=sys.stderr, mininterval=interval, maxinterval=interval,
            dynamic_ncols=True, smoothing=0.05,
        )  # fmt: skip
        self._pending = collections.deque()
        self._since_log = collections.Counter(saved.get("since_log"))
        self.tokens, self.seconds = saved.get("tokens", 0.0), saved.get("seconds", 0.0)
        self._resumed = time.monotonic()

    def totals(self) -> dict[str, Any]:
        """What a resumed run needs to log what an unbroken one would have logged."""
        return {"since_log": dict(self._since_log), "tokens": self.tokens, "seconds": self.seconds}

    def add(self, step: int, metrics: Metrics, positions: int) -> None:
        """One more step; `positions` is the number of target positions of its batch, padding included."""
        self._pending.append((step, metrics, positions))
        while len(self._pending) > _IN_FLIGHT:
            self._take()
        if step % self._log_interval == 0:
            self.flush()
            self._log(step)
        self._bar.update()

    def flush(self) -> None:
        """Waits for the numbers of every step so far."""
        while self._pending:
            self._take()

    def _take(self) -> None:
        step, metrics, positions = self._pending.popleft()
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not (math.isfinite(values["loss"]) and math.isfinite(values["gradient_norm"])):
            raise DamagedError(
                f"step {step}: loss {values['loss']}, gradient norm {values['gradient_norm']}; the last checkpoint is "
                "intact. Lower optimizer.learning_rate_factor or raise optimizer.warmup_steps"
            )
        tokens = values.pop("target_tokens")
        self.tokens += tokens
        self._since_log.update(steps=1, tokens=tokens, positions=positions, gradient_norm=values["gradient_norm"])
        self._since_log.update({name: values[name] * tokens for name in ("loss", "nll")})

    def pause(self) -> None:
        """Stops the clock: what follows is not training."""
        self.flush()
        self.seconds += time.monotonic() - self._resumed

    def resume(self) -> None:
        """Starts the clock again."""
        self._resumed = time.monotonic()

    def _log(self, step: int) -> None:
        self.pause()
        self.resume()
        sums, seconds = self._since_log, self.seconds - self._since_log["seconds_before"]
        record = {
            "loss": sums["loss"] / sums["tokens"],
            "nll": sums["nll"] / sums["tokens"],
            "gradient_norm": sums["gradient_norm"] / sums["steps"],
            "learning_rate": float(self._schedule(step - 1)),
            "target_tokens_per_second": sums["tokens"] / seconds,
            "padding": 1 - sums["tokens"] / sums["positions"],
        }
        self._run.log(step, **record)
        self._bar.set_postfix_str(
            f"loss {record['loss']:.3f}, {record['target_tokens_per_second']:,.0f} target tokens/s, "
            f"padding {record['padding']:.1%}"
        )
        self._since_log = collections.Counter(seconds_before=self.seconds)

    def report(self, step: int, text: str, metrics: dict[str, Any]) -> None:
        """Logs an evaluation and prints it above the bar."""
        self._run.log(step, **metrics)
        self.say(text)

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Ends the bar, leaving its last state on the screen."""
        self._bar.close()
