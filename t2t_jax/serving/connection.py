"""HTTP/1.1 connections that end when a client is too slow: uvicorn itself waits for ever for a request's headers."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from t2t_jax.serving.limits import Limits


class Connection(H11Protocol):
    """A connection that is closed `head_seconds` after it was opened, or after an answer, if no request has come.

    One with a request is closed when reading it, working on it and sending the answer take longer than they may.
    """

    def __init__(self, *arguments: Any, limits: Limits, **options: Any):
        super().__init__(*arguments, **options)
        self._idle_seconds = limits.head_seconds
        self._busy_seconds = limits.body_seconds + limits.request_seconds + limits.head_seconds
        self._stage: Any = None  # the request in progress
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._restart_clock()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._deadline:
            self._deadline.cancel()

    def _follow(self) -> None:
        """Restarts the clock when a request begins or its answer ends, not when a few more bytes arrive."""
        stage = None if self.cycle is None or self.cycle.response_complete else self.cycle
        if stage is not self._stage:
            self._stage = stage
            self._restart_clock()

    def _restart_clock(self) -> None:
        if self._deadline:
            self._deadline.cancel()
        seconds = self._idle_seconds if self._stage is None else self._busy_seconds
        self._deadline = self.loop.call_later(seconds, self.transport.abort)
