"""The conditions that a run's scores hold under, as they stand in the notes below a table."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.records import Record, training_seconds
from t2t_jax.run_folder import changes


def conditions(
    record: Record, full_steps: int, expected: Mapping[str, Any], measured: Sequence[str], of: str = "its config"
) -> str:
    """Training steps, first weights, averaging, departures from the `expected` config fields, seed, what was
    `measured`, time, code.

    `full_steps` are the training steps of the whole experiment; `of` is what the text calls `expected`.
    """
    steps, averaged = record["steps"], len(record["averaged_steps"])
    short = f", a shortened run: {full_steps:,} are the whole" if steps < full_steps else ""
    times = list(training_seconds(record).items())
    changed = [f"{name}={value}" for name, value in changes(record["config"], expected).items()]
    return "; ".join(
        [
            f"{steps:,} steps{short}",
            *([f"from the weights of {record['init_from']}"] if record.get("init_from") else []),
            *([f"{skipped:,} updates skipped"] if (skipped := record.get("skipped_steps")) else []),
            f"average of the last {averaged} checkpoints" if averaged > 1 else "the last checkpoint alone",
            *([f"departs from {of} in {', '.join(changed)}"] if changed else []),
            f"seed {record['seed']}",
            *measured,
            " and ".join([_hours(*times[0], of=" of training"), *(_hours(*time) for time in times[1:])]),
            f"{record['date']}, commit {record['commit'][:12]}",
        ]
    )


def _hours(hardware: str, seconds: float, of: str = "") -> str:
    return f"{seconds / 3600:.1f} hours{of} on {hardware}"
