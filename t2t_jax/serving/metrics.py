"""What the server counts, in the text format of Prometheus."""

import collections
import threading
from collections.abc import Iterable, Iterator, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_COUNTERS = {
    "t2t_requests_total": "Requests answered, by HTTP status.",
    "t2t_refusals_total": "Valid requests refused: queue full, time up, out of memory, too many different searches.",
    "t2t_sentences_total": "Sentences translated.",
    "t2t_translation_seconds_total": "Seconds of translating, compilation and warm-up included.",
}
_GAUGES = {
    "t2t_waiting_sentences": "Sentences that wait for the device.",
    "t2t_batch_seconds": "Seconds since the batch at work began; 0 without one.",
}


class Metrics:
    """Counters that several threads may raise."""

    def __init__(self):
        # Those without labels are there from the beginning.
        zeros = {("t2t_sentences_total", ""): 0, ("t2t_translation_seconds_total", ""): 0.0}
        self._counts: collections.Counter[tuple[str, str]] = collections.Counter(zeros)
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1, **label: str | int) -> None:
        """Raises a counter of `_COUNTERS`, where it has a label that of this value."""
        labels = "".join(f'{{{key}="{value}"}}' for key, value in label.items())
        with self._lock:
            self._counts[name, labels] += amount

    def text(self, gauges: Mapping[str, float]) -> str:
        """The page that Prometheus reads; `gauges` are the present values of `_GAUGES`."""
        with self._lock:
            counts = sorted(self._counts.items())
        lines = []
        for name, meaning in _COUNTERS.items():
            lines += _metric(name, meaning, "counter", [(labels, n) for (of, labels), n in counts if of == name])
        for name, meaning in _GAUGES.items():
            lines += _metric(name, meaning, "gauge", [("", gauges[name])])
        return "\n".join(lines) + "\n"


def _metric(name: str, meaning: str, kind: str, values: Iterable[tuple[str, float]]) -> Iterator[str]:
    yield from (f"# HELP {name} {meaning}", f"# TYPE {name} {kind}")
    yield from (f"{name}{labels} {value}" for labels, value in values)
