"""HTTP/1.1 connections that end when a client is too slow: uvicorn itself waits for ever for a request's headers."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from t2t_jax.serving.limits import Limits


class Connection(H11Protocol):
    """A connection that is closed `head_seconds` after it was opened if no request has come.

    One with a request is closed when reading it, working on it and sending the answer take longer than they may; after
    that when no other request comes in `keep_alive_seconds`, or sooner where new connections need its place.
    """

    def __init__(self, *arguments: Any, limits: Limits, **options: Any):
        super().__init__(*arguments, **options)
        self._limits = limits
        self._stage: Any = None  # the request in progress
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._restart_clock()
        if len(self.connections) >= self._limits.connections:  # from this number on uvicorn refuses requests
            self._close_one_kept()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    def shutdown(self) -> None:
        """The answer of a request in progress says that its connection is closed then, so that nobody uses it again."""
        super().shutdown()
        if self.cycle is not None:
            self.cycle.scope["headers"].append((b"connection", b"close"))  # as if the client had asked for it

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
        limits = self._limits
        if self._is_kept():
            seconds = limits.keep_alive_seconds
        elif self.cycle is None:
            seconds = limits.head_seconds
        else:
            seconds = limits.body_seconds + limits.request_seconds + limits.head_seconds
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _is_kept(self) -> bool:
        """Whether the last answer has been sent, its last byte too, and no other request has come."""
        is_sent = self.cycle is not None and self._stage is None and not self.transport.get_write_buffer_size()
        return is_sent and not self.transport.is_closing()

    def _close_one_kept(self) -> None:
        """Closes the connection that has been kept for longest."""
        kept = [connection for connection in self.connections if connection._is_kept()]
        if kept:
            min(kept, key=lambda connection: connection._deadline.when()).timeout_keep_alive_handler()
