"""What monitoring reads: health and metrics; and the warm-up."""

import json
import socket
import time

import jax.numpy as jnp
import pytest

from tests.decoding.compiled import num_compiled
from tests.serving.conftest import held, served

pytest.importorskip("starlette", reason="needs the extra `serve`")
from t2t_jax.data.tokenizer import EOS
from t2t_jax.decoding.batch_shapes import bucket_length, window_rows
from t2t_jax.decoding.preprocessing import Preprocessor
from t2t_jax.errors import DamagedError, InputError
from t2t_jax.serving import warm_up
from t2t_jax.serving.limits import Limits
from t2t_jax.serving.warm_up import sample_batches


def health(client):
    status, _, content = client.request("GET", "/health")
    return status, json.loads(content)


def metrics(client):
    """The values of the page, by name and label."""
    status, headers, content = client.request("GET", "/metrics")
    assert status == 200 and headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = [line for line in content.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_server_is_unhealthy_while_a_batch_takes_longer_than_a_client_waits(translator):
    with served(translator, request_seconds=0.5) as client, held(translator) as (_, release):
        assert health(client) == (200, {"healthy": True, "warm": True, "batch_seconds": 0.0, "waiting_sentences": 0})
        assert client.post({"source": "one"})[0] == 503
        wait_until(lambda: health(client)[0] == 503)  # the batch may have begun later than its request
        status, found = health(client)
        assert status == 503 and not found["healthy"] and found["batch_seconds"] >= 0.5
        release.set()
        wait_until(lambda: health(client)[0] == 200)
        assert metrics(client)['t2t_refusals_total{reason="time"}'] == 1


def test_the_server_is_unhealthy_once_nothing_is_translated_any_more(translator):
    with served(translator) as client:
        client.demo.close()
        assert health(client)[0] == 503 and client.post({"source": "one"})[0] == 503
        assert metrics(client)['t2t_refusals_total{reason="full"}'] == 1


def test_metrics_count_answers_by_status_and_sentences(translator):
    with served(translator) as client:
        assert metrics(client)["t2t_sentences_total"] == 0
        assert client.post({"source": ["one", "two"]})[0] == 200
        assert client.post({"source": 1})[0] == 400 and client.request("GET", "/", Host="evil.example")[0] == 421
        wait_until(lambda: metrics(client)["t2t_batch_seconds"] == 0)  # an answer comes just before the batch ends
        found = metrics(client)
    assert found["t2t_sentences_total"] == 2 and found["t2t_translation_seconds_total"] > 0
    assert [found[f't2t_requests_total{{status="{status}"}}'] for status in (400, 421)] == [1, 1]
    assert found['t2t_requests_total{status="200"}'] >= 3 and found["t2t_waiting_sentences"] == 0


def test_a_client_that_leaves_is_not_counted_as_one_with_a_mistake(translator):
    with served(translator) as client, held(translator):
        head = f"POST /translate HTTP/1.1\r\nHost: {client.host}\r\nContent-Type: application/json\r\n"
        for body in (b'{"source": "one"}', b'{"sour'):  # in the queue, and half sent
            with socket.create_connection(("127.0.0.1", client.port)) as connection:
                connection.sendall(f"{head}Content-Length: 17\r\n\r\n".encode() + body)
                time.sleep(0.1)
        wait_until(lambda: metrics(client).get('t2t_requests_total{status="499"}') == 2)
        assert 't2t_requests_total{status="400"}' not in metrics(client)


def test_a_device_whose_memory_is_too_small_is_no_bug_of_the_server(translator, monkeypatch):
    with served(translator) as client, monkeypatch.context() as patch:
        patch.setattr(translator, "translate", lambda *_, **__: jnp.zeros(1 << 50, jnp.int8))
        status, headers, content = client.request(
            "POST", "/translate", b'{"source": "one"}', Content_Type="application/json"
        )
        assert status == 503 and int(headers["retry-after"]) >= 1
        assert json.loads(content)["error"].startswith("out of memory (")
        assert metrics(client)['t2t_refusals_total{reason="memory"}'] == 1
        patch.undo()
        assert client.post({"source": "one"})[0] == 200


def test_the_warm_up_has_sentences_of_each_bucket_length(translator):
    batches = list(sample_batches(translator, Limits()))
    lengths = [{bucket_length(len(ids)) for ids in translator.preprocessor.encode_sources(batch)} for batch in batches]
    assert lengths == [{16}, {32}, {64}] * (len(batches) // 3)
    rows = [window_rows(16, len(batch), translator.mesh) for batch in batches[::3]]
    assert len(set(rows)) == len(rows) and set(rows) == {window_rows(16, n, translator.mesh) for n in range(1, 17)}


def test_there_is_no_warm_up_where_a_task_makes_nothing_of_its_sentences(translator, monkeypatch):
    def refuse(self, sources):
        raise InputError("not a word")

    for encode in (lambda self, sources: [[EOS]], refuse):
        monkeypatch.setattr(Preprocessor, "encode_sources", encode)
        assert list(sample_batches(translator, Limits())) == []


def test_after_the_warm_up_the_first_request_compiles_nothing(translator, monkeypatch):
    monkeypatch.setattr(warm_up, "_LONGEST", 16)
    with served(translator, batch_sentences=4) as client:
        client.demo.warm_up()
        wait_until(lambda: health(client)[1]["warm"], 600)
        compiled = num_compiled()
        for count in range(1, 5):
            assert client.post({"source": ["one two"] * count})[0] == 200
        assert num_compiled() == compiled
        assert metrics(client)["t2t_sentences_total"] == 10, "those of the warm-up are not counted"


def test_a_damaged_model_is_unhealthy_and_says_so(translator, monkeypatch, caplog):
    def translate(*_, **__):
        raise DamagedError("the model computes NaN")

    monkeypatch.setattr(warm_up, "_LONGEST", 16)
    monkeypatch.setattr(translator, "translate", translate)
    with served(translator) as client:
        client.demo.warm_up()
        wait_until(lambda: health(client)[1]["warm"])
        assert health(client)[0] == 503 and "warm-up: the model computes NaN" in caplog.text
        assert client.post({"source": "one"}) == (500, {"error": "the model computes NaN"})
