"""Nothing that a client does brings the server down, and other web sites cannot use it through a browser."""

import concurrent.futures
import contextlib
import functools
import http.client
import json
import socket
import time

import pytest

from tests.serving.conftest import held, served

pytest.importorskip("starlette", reason="needs the extra `serve`")
from t2t_jax.serving.limits import Limits

GOOD = {"source": "one two"}


@pytest.fixture
def raw(client):
    """Sends bytes and returns what comes back until the server closes or pauses; the server must then still work."""

    def send(data, seconds=5.0, until_closed=False):
        with socket.create_connection(("127.0.0.1", client.port), timeout=seconds) as connection:
            received = b""
            with contextlib.suppress(TimeoutError, ConnectionError):
                connection.sendall(data)
                while chunk := connection.recv(1 << 16):
                    received += chunk
                    if not until_closed and b"\r\n\r\n" in received:
                        break
            return received

    yield send
    assert client.post(GOOD)[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff\x16\x03\x01" * 100,
        b"GET\r\n\r\n",
        b"POST /translate HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /translate HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Type: application/json\r\n\r\nZZ\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 200_000,
    ],
)  # fmt: skip
def test_garbage_is_refused(raw, data):
    assert raw(data).startswith(b"HTTP/1.1 4")


def test_a_client_that_leaves_is_forgotten(client):
    body = json.dumps({"source": ["one two three four five"] * 32}).encode()
    head = (f"POST /translate HTTP/1.1\r\nHost: {client.host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n").encode()  # fmt: skip
    for sent in (head, head + body[:20], head + body, head + body, head[:30]):
        with socket.create_connection(("127.0.0.1", client.port)) as connection:
            connection.sendall(sent)
    assert client.post(GOOD)[0] == 200


def test_half_sent_requests_end_in_time_and_hold_up_nobody(translator):
    with served(translator, head_seconds=1.0, body_seconds=1.0) as client:
        head = (f"POST /translate HTTP/1.1\r\nHost: {client.host}\r\nContent-Type: application/json\r\n"
                "Content-Length: 100\r\n\r\n").encode()  # fmt: skip
        slow = []
        for sent in (b"", head[:40], head + b'{"source"'):
            slow.append(socket.create_connection(("127.0.0.1", client.port), timeout=60))
            slow[-1].sendall(sent)
        assert client.request("GET", "/info")[0] == 200
        slow[1].sendall(b"x")
        for _ in range(2):  # a byte now and then does not help
            time.sleep(0.1)
            with contextlib.suppress(ConnectionError):
                slow[1].sendall(b"x")
        answers = []
        for connection in slow:
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while chunk := connection.recv(1 << 16):
                    received += chunk
            answers.append(received)
            connection.close()
        assert answers[:2] == [b"", b""]
        assert answers[2].startswith(b"HTTP/1.1 408") and b"not complete after 1 s" in answers[2]


def connect(client, seconds=60):
    return contextlib.closing(http.client.HTTPConnection("127.0.0.1", client.port, timeout=seconds))


def get_info(connection):
    """The status of the answer on this connection, which is kept."""
    connection.request("GET", "/info")
    answer = connection.getresponse()
    answer.read()
    assert connection.sock
    return answer.status


def test_a_connection_is_kept_after_an_answer_longer_than_a_first_request_may_take(translator):
    with served(translator, head_seconds=1.0) as client, connect(client) as connection:
        assert get_info(connection) == 200
        time.sleep(1.4)
        assert get_info(connection) == 200
    with served(translator, keep_alive_seconds=0.3) as client, connect(client, seconds=4) as connection:
        assert get_info(connection) == 200 and connection.sock.recv(1) == b""


def test_an_answer_that_takes_longer_to_send_than_a_connection_is_kept_is_whole(translator):
    with served(translator, head_seconds=0.8, keep_alive_seconds=0.2) as client:
        client.demo._pages["large"] = "x" * (size := 30_000_000)  # more than the kernel buffers
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            connection.connect(("127.0.0.1", client.port))
            connection.sendall(f"GET /attention/large HTTP/1.1\r\nHost: {client.host}\r\n\r\n".encode())
            time.sleep(1)
            received = 0
            while chunk := connection.recv(1 << 20):
                received += len(chunk)
    assert received > size


def test_a_new_connection_takes_the_place_of_the_one_that_was_kept_for_longest(translator):
    with served(translator, connections=4) as client, contextlib.ExitStack() as stack:
        kept = [stack.enter_context(connect(client)) for _ in range(6)]
        assert [get_info(connection) for connection in kept] == [200] * 6
        assert [connection.sock.recv(1) for connection in kept[:3]] == [b""] * 3
        assert [get_info(connection) for connection in kept[3:]] == [200] * 3


def test_a_full_queue_leaves_room_for_monitoring(translator):
    limits = Limits()
    assert limits.connections - limits.waiting_sentences - limits.batch_sentences == 48
    counts = {"waiting_sentences": 3, "batch_sentences": 1, "connections": 6}
    pool = concurrent.futures.ThreadPoolExecutor()
    with served(translator, **counts) as client, pool, held(translator) as (begun, release):
        answers = [pool.submit(client.post, GOOD)]
        assert begun.wait(60)  # before that it waits, too
        answers += [pool.submit(client.post, GOOD) for _ in range(3)]
        for _ in range(3):
            while json.loads(client.request("GET", "/health")[2])["waiting_sentences"] < 3:
                time.sleep(0.01)
            status, answer = client.post(GOOD)
            assert status == 503 and "too many sentences are waiting" in answer["error"]
        assert b't2t_refusals_total{reason="full"} 3\n' in client.request("GET", "/metrics")[2]
        release.set()
        assert [answer.result()[0] for answer in answers] == [200] * 4


def test_a_request_that_takes_too_long_is_given_up(translator):
    with served(translator, request_seconds=0.0) as client:
        status, headers, content = client.request(
            "POST", "/translate", json.dumps(GOOD).encode(), Content_Type="application/json"
        )
        assert status == 503 and int(headers["retry-after"]) >= 1 and b"not done within 0 s" in content


def test_a_client_that_still_waits_when_the_server_stops_is_told_so(translator, caplog):
    with concurrent.futures.ThreadPoolExecutor() as pool, held(translator) as (begun, release):
        with served(translator, stop_seconds=0.2, batch_sentences=1) as client:
            request = functools.partial(client.request, "POST", "/translate", json.dumps(GOOD).encode())
            ask = lambda: pool.submit(request, Content_Type="application/json")
            asked = [ask()]
            assert begun.wait(60)  # before that it waits, too
            asked += [ask(), ask()]
            for answer in asked:
                answer.add_done_callback(lambda _: release.set())
            while json.loads(client.request("GET", "/health")[2])["waiting_sentences"] < 2:
                time.sleep(0.01)
        for status, headers, content in (answer.result() for answer in asked):
            assert (status, json.loads(content)) == (503, {"error": "the server is stopping; try again"})
            assert headers.get("connection") == "close", "a proxy would send its next request over this connection"
    assert not any(record.exc_info for record in caplog.records)


def test_a_full_queue_says_when_to_come_back(translator):
    with served(translator, waiting_sentences=2) as client:
        status, headers, content = client.request(
            "POST", "/translate", b'{"source": ["one", "two", "six"]}', Content_Type="application/json"
        )
        assert status == 503 and int(headers["retry-after"]) >= 1 and b"too many sentences are waiting" in content
        assert client.post(GOOD)[0] == 200


@pytest.mark.parametrize("declared", [True, False])
def test_a_huge_body_is_refused(client, declared):
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
    chunks = (b" " * 10_000 for _ in range(100))
    headers = {"Content-Type": "application/json"} | ({"Content-Length": "1000000"} if declared else {})
    connection.request("POST", "/translate", body=chunks, headers=headers, encode_chunked=not declared)
    answer = connection.getresponse()
    assert answer.status == 413 and "at most 65,536 bytes" in json.loads(answer.read())["error"]
    connection.close()
    assert client.request("POST", "/translate", b"", Content_Type="application/json", Content_Length="9" * 19)[0] == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/translate", 405),
        ("PUT", "/translate", 405),
        ("OPTIONS", "/translate", 405),
        ("POST", "/", 405),
        ("POST", "/translate/", 404),
        ("GET", "/nothing", 404),
        ("GET", "/../../../../etc/passwd", 404),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404),
        ("GET", "/attention/..%2f..%2fpage.html", 404),
        ("GET", "//etc/passwd", 404),
        ("GET", "http://elsewhere.example/", 421),
        ("GET", "http://a@127.0.0.1/info", 421),
        ("GET", "http://localhost/nothing", 404),
        ("GET", "HTTP://localhost", 200),
        ("GET", "http://127.0.0.1:1/info?x=1", 200),
        ("GET", "http:///info", 421),
        ("GET", "/page.html", 404),
        ("HEAD", "/", 200),
        ("GET", "/?x=1", 200),
    ],
)
def test_there_is_nothing_but_its_own_pages(client, method, path, status):
    content = {"Content_Type": "application/json"} if method == "POST" else {}
    found, headers, body = client.request(method, path, b"{}" if content else None, **content)
    assert found == status and "location" not in headers
    if status >= 400:
        assert "error" in json.loads(body)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/nothing"), ("GET", "/attention/"), ("POST", "/attention/x"), ("GET", "/attention/x/y")],
)
def test_an_unknown_path_or_method_is_told_what_there_is(client, method, path):
    content = {"Content_Type": "application/json"} if method == "POST" else {}
    _, _, body = client.request(method, path, b"{}" if content else None, **content)
    assert json.loads(body)["error"] == (
        f"{method} {path}: there are GET /, /info, /health and /metrics, POST /translate and /attention"
    )


def test_an_attention_page_that_is_gone_is_told_how_many_are_kept(client):
    body = client.request("GET", "/attention/x")[2]
    assert json.loads(body) == {"error": "only the newest 8 attention pages are kept"}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:8000", 200), ("192.168.0.7:80", 200),
        ("elsewhere.example", 421), ("127.0.0.1.elsewhere.example", 421), ("a@127.0.0.1", 421), ("[::1", 421),
        ("", 421), ("127.0.0.1:x", 200),
    ],
)  # fmt: skip
def test_the_host_must_be_this_machine(client, host, status):
    assert client.request("GET", "/info", Host=host)[0] == status


def test_the_names_of_a_reverse_proxy_are_allowed_with_their_origin(translator):
    with served(translator, hosts=["Translate.example.com"]) as client:
        for host, status in (("translate.example.com", 200), ("TRANSLATE.example.com:443", 200), ("a.example", 421)):
            assert client.request("GET", "/info", Host=host)[0] == status
        posted = [client.post({"source": ""}, Host="translate.example.com", Origin=f"https://{name}.example.com")[0]
                  for name in ("translate", "a")]  # fmt: skip
        assert posted == [200, 403]


def test_a_reverse_proxy_that_changes_host_is_told_to_keep_it(client):
    """nginx, unless told otherwise, sends the address of the server as Host."""
    status, answer = client.post({"source": ""}, Origin="https://translate.example.com")
    assert status == 403 and answer["error"].endswith("; a reverse proxy must keep Host")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://127.0.0.1:{port}"}, 200),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "http://elsewhere.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec_Fetch_Site": "same-origin"}, 200),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Content_Type": "application/json; charset=utf-8"}, 200),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content_Type": None}, 415),
        ({"Content_Encoding": "Identity"}, 200),
        ({"Content_Encoding": "gzip"}, 415),
    ],
)
def test_other_sites_cannot_post_nor_others_than_json(client, headers, status):
    given = {name: value and value.format(port=client.port) for name, value in headers.items()}
    found, answer = client.post(GOOD, **given)
    assert found == status and ("error" in answer) == (status != 200)


def test_every_answer_has_the_security_headers(client):
    answers = [client.request("GET", "/"), client.request("GET", "/x"), client.request("GET", "/", Host="evil.example"),
               client.request("POST", "/translate", b"x", Content_Type="application/json")]  # fmt: skip
    assert [status for status, _, _ in answers] == [200, 404, 421, 400]
    for _, headers, _ in answers:
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert not {"server", "access-control-allow-origin"} & headers.keys()
