"""A real server on a free port, in a thread, and a real client."""

import contextlib
import http.client
import json
import threading

import pytest

from tests.decoding.conftest import translator  # noqa: F401  (a fixture)

pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("uvicorn", reason="needs the extra `serve`")
from t2t_jax.serving.app import Demo
from t2t_jax.serving.limits import Limits
from t2t_jax.serving.server import listen, running

DEFAULTS = {"beam_size": 2, "alpha": 0.6, "max_extra_length": 6}
_SECONDS = 600  # a loaded machine compiles slowly
ABOUT = {"run": "tiny", "checkpoint": "checkpoint 1", "source_language": "en", "target_language": "de"}


class Client:
    """A client of the server on a port; each request has a connection of its own."""

    def __init__(self, port: int, demo: Demo):
        self.port, self.host, self.demo = port, f"127.0.0.1:{port}", demo

    def request(self, method, path, body=None, **headers):
        """(status, headers, body) of the answer; a header's _ is -, and None leaves it out."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_SECONDS)
        given = {"Host": self.host} | {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            if body is not None and "Content-Length" not in given:
                given["Content-Length"] = str(len(body))
            for name, value in given.items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders()
            with contextlib.suppress(ConnectionError):  # it may be refused before it has been sent
                connection.send(body or b"")
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def post(self, value, path="/translate", **headers):
        """(status, JSON of the answer)."""
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        headers = {"Content_Type": "application/json"} | headers
        status, _, content = self.request("POST", path, body, **headers)
        assert content.count(b"\n") <= 1, "an answer is one line"
        return status, json.loads(content)


@contextlib.contextmanager
def served(translator, defaults=DEFAULTS, hosts=(), **limits):  # noqa: F811
    limits = Limits(**{"request_seconds": _SECONDS, **limits})
    with contextlib.closing(listen("127.0.0.1", 0)) as listener:
        demo = Demo(translator, defaults, about=ABOUT, limits=limits, hosts=hosts)
        with contextlib.closing(demo), running(demo.app, listener, limits):
            yield Client(listener.getsockname()[1], demo)


@contextlib.contextmanager
def held(translator):  # noqa: F811
    """Yields two events: `begun`, set when the first batch has begun, and `release`; batches wait for it or the end."""
    begun, release, translate = threading.Event(), threading.Event(), translator.translate

    def wait(*arguments, **options):
        begun.set()
        return release.wait(60) and translate(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(translator, "translate", wait)
        try:
            yield begun, release
        finally:
            release.set()


@pytest.fixture(scope="module")
def client(translator):  # noqa: F811
    with served(translator) as client:
        yield client
