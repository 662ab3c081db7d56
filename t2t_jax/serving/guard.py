"""Refuses requests that other web sites make a browser send, and adds the security headers to every answer."""

import ipaddress
import json
import re
import urllib.parse
from collections.abc import Callable, Iterable, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from t2t_jax.errors import InputError

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_SAFE_METHODS = ("GET", "HEAD")
_ABSOLUTE = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")


def host_names(text: str | None) -> list[str]:
    """The names of --allowed_hosts, separated by commas, in lower case; ports and patterns are refused."""
    names = [] if text is None else [name.strip().lower() for name in text.split(",")]
    for name in names:
        if not _NAME.fullmatch(name):
            raise InputError(
                f"allowed_hosts: {name!r} is no host name; give names without port, such as translate.example.com,"
                "localhost"
            )
    return names


def error_response(status: int, reason: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error as one line of JSON."""
    return Response(json.dumps({"error": reason}) + "\n", status, dict(headers or {}), media_type="application/json")


class Guard:
    """ASGI middleware. `names` are what the server may be called besides localhost and IP addresses.

    `count` is called with the status of every answer.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str], count: Callable[[int], None]):
        self._app, self._count = app, count
        self._names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                self._count(message["status"])
            await send(message)

        scope = _origin_form(scope)
        refusal = self.refusal(scope["method"], Headers(scope=scope))
        app = error_response(*refusal) if refusal else self._app
        await app(scope, receive, send_guarded)

    def refusal(self, method: str, headers: Headers) -> tuple[int, str] | None:
        """The status and the reason to refuse a request with; None for one that is allowed."""
        host = headers.get("host", "")
        if not self._is_ours(host):  # DNS rebinding: a name of another site that now resolves to this machine
            names = " or ".join(sorted(self._names))
            return 421, f"Host must be an IP address or {names}; got {host[:100]!r}; --allowed_hosts=NAME adds a name"
        if method in _SAFE_METHODS:
            return None
        origin = headers.get("origin")
        if origin not in (None, f"http://{host}", f"https://{host}"):
            reason = f"Origin must be that of this server, http://{host}; got {origin[:100]!r}"
            return 403, f"{reason}; a reverse proxy must keep Host"
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return 403, "Sec-Fetch-Site must be same-origin or none: other sites may not post here"
        kind = headers.get("content-type", "")
        if method == "POST" and kind.partition(";")[0].strip().lower() != "application/json":
            return 415, f"Content-Type must be application/json; got {kind[:100]!r}"
        coding = headers.get("content-encoding") or "identity"
        if coding.lower() != "identity":
            return 415, f"Content-Encoding must be identity; got {coding[:100]!r}; send the JSON uncompressed"
        return None

    def _is_ours(self, host: str) -> bool:
        """Whether a Host header is an IP address or one of our names, with any port: tunnels change it."""
        try:
            name = urllib.parse.urlsplit(f"//{host}").hostname
            if not name or "@" in host:
                return False
            return name in self._names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def _origin_form(scope: Scope) -> Scope:
    """The request as if its target were a path; the authority of a whole URL replaces Host (RFC 9112, 3.2.2)."""
    if not (url := _ABSOLUTE.fullmatch(scope["raw_path"])):
        return scope
    raw_path = url[2] or b"/"
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    path = urllib.parse.unquote(raw_path.decode("ascii"))
    return {**scope, "path": path, "raw_path": raw_path, "headers": [(b"host", url[1]), *headers]}
