"""What of decoding has been compiled, and how often."""

import contextlib
from collections.abc import Iterator

import jax

from t2t_jax.decoding import continuous_batching

_COMPILED = "/jax/core/compile/backend_compile_duration"


def num_compiled() -> list[int]:
    """How often each function of continuous batching has been."""
    names = ("_start", "_source", "_decode", "_resize")
    return [getattr(continuous_batching, name)._cache_size() for name in names]


@contextlib.contextmanager
def programs_compiled() -> Iterator[list[str]]:
    """The names of the functions that are compiled from here on, each as often as it is."""
    names = []

    def on_event(event: str, seconds: float, **of: str) -> None:
        if event == _COMPILED:
            names.append(of["fun_name"].removeprefix("jit(").removesuffix(")"))

    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(on_event)
