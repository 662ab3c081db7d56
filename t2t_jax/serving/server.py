"""Serves until a signal comes, then ends when the requests in progress are answered (`main.py --mode=serve`)."""

import contextlib
import errno
import functools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from t2t_jax import signals
from t2t_jax.decoding.trained_model import first_run, restore_all
from t2t_jax.decoding.translator import translator_of
from t2t_jax.errors import InputError
from t2t_jax.serving.app import Demo
from t2t_jax.serving.connection import Connection
from t2t_jax.serving.guard import host_names
from t2t_jax.serving.limits import Limits
from t2t_jax.temporary_folders import original_of
from t2t_jax.validation import Range

_BACKLOG = 512  # connections that wait to be accepted


def serve_run(
    workdir: str, *, host: str, port: int, allowed_hosts: str | None, step: int | str | None, dtype: str | None
) -> None:
    """Serves the translator of a run, or of an ensemble of runs, until a signal comes."""
    hosts = [host, *host_names(allowed_hosts)]
    defaults = first_run(workdir).decode_options()
    with contextlib.closing(listen(host, port)) as listener:
        members = restore_all(workdir, step)
        data = members[0].run.config["data"]
        about = {
            "run": ", ".join(Path(member.run.path).name for member in members),
            "checkpoint": members[0].checkpoint,
            "source_language": data["source_language"],
            "target_language": data["target_language"],
        }
        names, limits = ", ".join(original_of(member.run.path) for member in members), Limits()
        demo = Demo(translator_of(members, dtype or "float32"), defaults, about=about, limits=limits, hosts=hosts)
        demo.warm_up()
        try:
            with running(demo.app, listener, limits) as server:
                wait_for_signal(server, f"serving {names} on {address(listener)}; Ctrl-C ends it")
        finally:
            with signals.time_limit(limits.stop_seconds, "stopped before a batch or a compilation had ended"):
                demo.close()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on this address; port 0 is a free one."""
    Range(0, 65535, hint="0 takes a free one").check("port", port)
    try:
        options = {"type": socket.SOCK_STREAM, "proto": socket.IPPROTO_TCP, "flags": socket.AI_PASSIVE}
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, **options)[0]
        # With the protocol's number: without it asyncio leaves Nagle's algorithm on, and each answer takes 40 ms more.
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError):
        raise InputError(f"host: {host!r} is no address of this machine; 127.0.0.1 is for this machine alone") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise InputError(f"host: {host!r} is no address of this machine; try 127.0.0.1") from None
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({os.strerror(error.errno)})"
        raise InputError(f"port: {port} on {host} {reason}; give another one, or --port=0 for a free one") from None
    return listener


def address(listener: socket.socket) -> str:
    """The URL of the page."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


@contextlib.contextmanager
def running(app: ASGIApp, listener: socket.socket, limits: Limits) -> Iterator[threading.Thread]:
    """Runs a server in a thread, which it yields; at the end of the block it is given `stop_seconds` to finish."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    config = uvicorn.Config(
        app, loop="asyncio", http=functools.partial(Connection, limits=limits), ws="none", lifespan="off",
        log_config=None, access_log=False, proxy_headers=False, server_header=False,
        limit_concurrency=limits.connections, timeout_keep_alive=limits.keep_alive_seconds,
        timeout_graceful_shutdown=limits.stop_seconds,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="server", daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not server.started:
            time.sleep(0.01)
        yield thread
    finally:
        server.should_exit = True
        thread.join()


def wait_for_signal(server: threading.Thread, ready: str) -> None:
    """Prints the line `ready` and returns at the first signal; a second one ends the process at once."""
    requests, stopped = signals.Requests(), threading.Event()

    def note(number: int) -> None:
        if requests.add(number) > 1:
            signals.end_at_once(number)
        stopped.set()

    # The handler stays: the requests in progress are still to be answered.
    signals.set_handler(note)
    print(ready, file=sys.stderr, flush=True)
    while not stopped.wait(0.5):
        if not server.is_alive():
            raise RuntimeError("the server has ended by itself")
    print("stopping; a second signal ends it at once", file=sys.stderr, flush=True)
