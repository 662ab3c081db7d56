"""Bounds compilation: most options of a search are static, so each new combination compiles programs of its own."""

import threading
import time
from collections.abc import Callable, Hashable

import jax

from t2t_jax.serving.limits import Limits

_NEVER = 1e9  # seconds


class Searches:
    """Which combinations of options may be compiled. `own`, that of the run, always may.

    Others are admitted by a token bucket of `limits.searches`, refilled once in `limits.search_seconds`. When there are
    more combinations than that, all compiled programs are dropped and those still in use are compiled again.
    """

    def __init__(self, own: Hashable, limits: Limits, clock: Callable[[], float] = time.monotonic):
        self._own, self._limits, self._clock = own, limits, clock
        self._known: set[Hashable] = set()
        self._tokens, self._filled = float(limits.searches), clock()
        self._drop = False
        self._lock = threading.Lock()
        self._usual = jax.config.jax_persistent_cache_min_compile_time_secs

    def admit(self, search: Hashable) -> float:
        """0 if the search may be compiled, or is compiled already; else the seconds until it may."""
        with self._lock:
            if search == self._own or search in self._known:
                return 0.0
            now = self._clock()
            gained = (now - self._filled) / self._limits.search_seconds
            self._tokens, self._filled = min(self._tokens + gained, float(self._limits.searches)), now
            if self._tokens < 1:
                return (1 - self._tokens) * self._limits.search_seconds
            self._tokens -= 1
            if len(self._known) == self._limits.searches:
                self._known.clear()
                self._drop = True
            self._known.add(search)
            return 0.0

    def prepare(self, search: Hashable) -> None:
        """Called by the thread that compiles, before it runs a search.

        On disk, in JAX's persistent compilation cache, which nothing bounds, only the run's own search is kept.
        """
        with self._lock:
            drop, self._drop = self._drop, False
        if drop:
            jax.clear_caches()
        seconds = self._usual if search == self._own else _NEVER
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)

    def close(self) -> None:
        """Restores JAX's setting."""
        jax.config.update("jax_persistent_cache_min_compile_time_secs", self._usual)
