"""Failure detection between the processes of one run: none waits for ever for one that was killed, stopped or cut off.

A collective operation waits for every process. JAX's heartbeats find a missing one late, and then abort the others
without naming it. Here each process has a TCP connection to process 0, with heartbeats. When a connection closes
without a message, or is silent for too long, all processes end with a line that names the lost one.
"""

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

from t2t_jax.errors import InterruptedProcess, InterruptedRun, stop_reason
from t2t_jax.signals import end_process

_LOOPBACK = ("127.0.0.1", "localhost")
_CONNECT_SECONDS = 60
_GRACE_SECONDS = 3.0  # for processes to end one after the other; several ticks
_LEAVES, _FAILS, _LOST = "leaves", "fails", "lost"  # messages; an empty one is a heartbeat


class Peer:
    """The connection to another process."""

    def __init__(self, connection: socket.socket, name: str):
        connection.settimeout(None)
        self.connection, self.name = connection, name
        self.silent_seconds, self.is_failing, self._rest = 0.0, False, b""

    def tell(self, *message: str) -> None:
        """Sends a message; `hear` reports a closed connection."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> list[list[str]] | None:
        """The messages received; None where the connection is closed."""
        try:
            data = self.connection.recv(4096)
        except OSError:
            data = b""
        if not data:
            return None
        self.silent_seconds = 0.0
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def wait_for_end(self, deadline: float) -> None:
        """Returns when the other process has closed the connection, or at the deadline."""
        with contextlib.suppress(OSError):
            self.connection.settimeout(max(0.01, deadline - time.monotonic()))
            while self.connection.recv(4096) and time.monotonic() < deadline:
                pass


class Peers:
    """The processes connected to this one: for process 0 all others, for the others process 0."""

    def __init__(self, peers: list[Peer], limit_seconds: float):
        self._peers, self._watched, self._limit = peers, list(peers), limit_seconds
        self._tick = min(1.0, limit_seconds / 10)
        self._is_failing = False
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def _watch(self) -> None:
        """Receives messages and sends heartbeats, in a thread, until all peers have left."""
        with selectors.DefaultSelector() as selector:
            for peer in self._watched:
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            last = beat = time.monotonic()
            while self._watched and not self._is_failing:
                for key, _ in selector.select(self._tick):
                    self._hear(key.data, selector)
                now = time.monotonic()
                # At most one turn of this loop: while this process was stopped (SIGSTOP), the others were not silent.
                passed, last = min(now - last, 2 * self._tick), now
                for peer in self._watched:
                    peer.silent_seconds += passed
                    if peer.is_failing and peer.silent_seconds > _GRACE_SECONDS / 2:
                        self._end_all(peer, "has stopped with an error of its own")
                    if peer.silent_seconds > self._limit:
                        self._end_all(peer, f"has been silent for {self._limit:g} s (machine.peer_timeout_seconds)")
                if now - beat >= self._tick:
                    beat = now
                    for peer in self._watched:
                        peer.tell()

    def _hear(self, peer: Peer, selector: selectors.BaseSelector) -> None:
        messages = peer.hear()
        if messages is None:
            if not peer.is_failing:
                self._end_all(peer, "is gone")
            selector.unregister(peer.connection)  # this process may have the same error: time to report it
        for what, *rest in filter(None, messages or []):
            if what == _LEAVES:
                selector.unregister(peer.connection)
                self._watched.remove(peer)
            elif what == _FAILS:
                peer.is_failing = True
            elif what == _LOST:
                end_process(*rest)

    def _end_all(self, lost: Peer, why: str) -> None:
        if self._is_failing:
            return
        line = f"error: {lost.name} {why}; without it the run stops. The same command resumes from the last checkpoint"
        others = [peer for peer in self._peers if peer is not lost]
        for peer in others:
            peer.tell(_LOST, line)
        _wait_for_end(others)
        end_process(line)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A block that all processes complete, or none: an error in one of them ends it and the others."""
        try:
            yield
        except InterruptedProcess as error:
            self._fail(error)
        except InterruptedRun:  # the same in all of them, after the same step
            self._leave()
            raise
        except Exception as error:
            if stop_reason(error) is None:  # perhaps a collective operation failed because a process is lost:
                time.sleep(_GRACE_SECONDS)  # then the thread detects that now and ends this process
            self._fail(error)
        self._leave()

    def _leave(self) -> None:
        for peer in self._peers:
            peer.tell(_LEAVES)

    def _fail(self, error: Exception) -> None:
        """Ends the process at once: an ordinary exit would deadlock with others that wait for this one in a step."""
        self._is_failing = True
        stop = stop_reason(error)
        if stop:
            print(f"error: {stop[0]}", file=sys.stderr)
        else:
            traceback.print_exception(error)
        for peer in self._peers:
            peer.tell(_FAILS)
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)
        sys.stdout.flush()
        sys.stderr.flush()
        _wait_for_end(self._peers)
        os._exit(stop[1] if stop else 1)


def _wait_for_end(peers: list[Peer]) -> None:
    """Waits for the peers to end: process 0 is JAX's coordinator, and if it ended first, JAX would abort the others."""
    deadline = time.monotonic() + _GRACE_SECONDS
    for peer in peers:
        peer.wait_for_end(deadline)


# --- Finding each other ------------------------------------------------------------------------------------


def connect(process_id: int, num_processes: int, coordinator: str, store: Any, limit_seconds: float) -> Peers:
    """Connects this process to its peers; of `coordinator`, HOST:PORT of process 0, only the host is used.

    `store` is JAX's key-value store: `key_value_set(key, text)`, `blocking_key_value_get(key, milliseconds)`.
    """
    host = coordinator.rpartition(":")[0].strip("[]")
    own_host = socket.gethostname()
    if process_id == 0:
        token = secrets.token_hex()
        with _listen(host) as listening:
            address = {"port": listening.getsockname()[1], "token": token, "host": own_host}
            store.key_value_set("t2t_jax/peers", json.dumps(address))
            return Peers(_accept(listening, token, num_processes - 1), limit_seconds)
    address = json.loads(store.blocking_key_value_get("t2t_jax/peers", 1000 * _CONNECT_SECONDS))
    try:
        connection = socket.create_connection((host, address["port"]), timeout=_CONNECT_SECONDS)
    except OSError as error:
        raise InterruptedRun(
            f"process 0 can't be reached at {host}:{address['port']} ({error.strerror or error}), a free port besides "
            "the coordinator's; let it through the firewall, and run the same command again"
        ) from None
    hello = {"token": address["token"], "process": process_id, "host": own_host}
    connection.sendall(json.dumps(hello).encode() + b"\n")
    return Peers([Peer(connection, f"process 0 on {address['host']}")], limit_seconds)


def _listen(host: str) -> socket.socket:
    """Listens on all interfaces, as JAX's coordinator does, or on the loopback one where that is the coordinator's."""
    return socket.create_server((host, 0)) if host in _LOOPBACK else listen_everywhere(0)


def listen_everywhere(port: int) -> socket.socket:
    """Listens on all interfaces, by IPv6 too where the machine has it; port 0 is a free one."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both)


def _accept(listening: socket.socket, token: str, count: int) -> list[Peer]:
    """Accepts the connections of `count` processes; closes those that do not send the token."""
    peers = {}
    deadline = time.monotonic() + _CONNECT_SECONDS
    while len(peers) < count:
        listening.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            missing = ", ".join(str(n) for n in range(1, count + 1) if n not in peers)
            raise InterruptedRun(f"processes {missing} did not connect; run the same command again") from None
        hello = _hello(connection)
        if hmac.compare_digest(ascii(hello.get("token")), ascii(token)):  # which takes ASCII text only
            peers[hello["process"]] = Peer(connection, f"process {hello['process']} on {hello['host']}")
        else:
            connection.close()
    return list(peers.values())


def _hello(connection: socket.socket) -> dict[str, Any]:
    """The JSON object in the first line of a new connection; {} where there is none."""
    connection.settimeout(5.0)
    try:
        line = b""
        while not line.endswith(b"\n") and len(line) < 4096:
            line += connection.recv(1) or b"\n"
        return dict(json.loads(line))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
