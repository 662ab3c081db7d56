"""The server as its users start it: a process of its own, ended by a signal."""

import asyncio
import contextlib
import errno
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("uvicorn", reason="needs the extra `serve`")
import main
from t2t_jax.errors import InputError
from t2t_jax.files import read_object, write_object
from t2t_jax.serving.server import listen
from tests.interop import models

ROOT = Path(__file__).parents[2]
SECONDS = 600  # a loaded machine is slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Its shortest searches are all: the warm-up compiles few."""
    run = models.random_run(tmp_path_factory.mktemp("serve") / "run")
    config = read_object(run / "config.json")
    config["decode"]["max_extra_length"] = 4
    write_object(run / "config.json", config)
    return run


def command(*arguments, **options):
    return [sys.executable, *arguments], {"cwd": ROOT, "text": True, **options}


@contextlib.contextmanager
def process(run, *program):
    """(process, port) of a server on a free port; `program` is what Python runs in place of main.py."""
    words, options = command(*(program or ["main.py"]), "--mode=serve", f"--workdir={run}", "--port=0")
    server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    try:
        for line in server.stderr:
            if found := re.fullmatch(r"serving .* on http://127.0.0.1:(\d+)/; Ctrl-C ends it\n", line):
                yield server, int(found[1])
                break
        else:
            pytest.fail(f"the server ended with code {server.wait()}")
    finally:
        server.kill()
        server.wait()


def ask(port, *request):
    """(status, JSON of the answer)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)  # not urllib: it would ask a proxy
    with contextlib.closing(connection):
        connection.request(*request)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def wait_until_warm(port):
    """Until then a request may wait for a compilation longer than a stopping server waits for it."""
    end = time.monotonic() + SECONDS
    while not (answer := ask(port, "GET", "/health"))[1]["warm"]:
        assert answer[0] == 200 and time.monotonic() < end
        time.sleep(0.1)


def post(port, value):
    return ask(port, "POST", "/translate", json.dumps(value), {"Content-Type": "application/json"})


@pytest.mark.slow
def test_it_answers_as_the_command_line_and_ends_with_code_0_after_the_requests_in_progress(run):
    options = {"n_best": 2, "beam_size": 3}
    flags = [f"--{name}={value}" for name, value in options.items()]
    words, given = command("main.py", "--mode=translate", f"--workdir={run}", "--output_format=jsonl", *flags)
    wanted = subprocess.run(words, input="one two\nthree\n", capture_output=True, check=True, **given).stdout
    with process(run) as (server, port):
        wait_until_warm(port)
        status, answer = post(port, {"source": ["one two", "three"], **options})
        assert status == 200 and answer == [json.loads(line) for line in wanted.splitlines()]
        body = json.dumps({"source": ["one two", "three"], **options}).encode()
        late = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        late.putrequest("POST", "/translate")
        late.putheader("Content-Type", "application/json")
        late.putheader("Content-Length", str(len(body)))
        late.endheaders(body[:10])
        assert post(port, {"source": ""})[0] == 200  # so that the half-sent request has been read
        server.send_signal(signal.SIGTERM)
        assert server.stderr.readline() == "stopping; a second signal ends it at once\n"
        late.send(body[10:])
        answered = late.getresponse()
        assert (answered.status, json.loads(answered.read())) == (200, answer)
        output, errors = server.communicate(timeout=SECONDS)
    assert (server.returncode, output, errors) == (0, "", "")


@pytest.mark.slow
def test_ctrl_c_ends_it_with_code_0(run):
    with process(run) as (server, _):
        server.send_signal(signal.SIGINT)
        output, _ = server.communicate(timeout=SECONDS)
    assert (server.returncode, output) == (0, "")


def test_a_compilation_is_not_waited_for_without_limit(run):
    program = """
import functools, sys
import main
from t2t_jax.serving import server
server.Limits = functools.partial(server.Limits, stop_seconds=0.01)
sys.exit(main.main(sys.argv))
"""
    with process(run, "-c", program) as (server, _):  # it has begun to warm up
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=SECONDS)
    assert server.returncode == 3 and errors.endswith("stopped before a batch or a compilation had ended\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port={taken}"], "port: {taken} on 127.0.0.1 is in use; give another one, or --port=0"),
        (["--port=65536"], "port must be at least 0 and at most 65535 (0 takes a free one); got 65536"),
        (["--port=-1"], "port must be at least 0"),
        (["--host=no.such.host.invalid", "--port=0"], "host: 'no.such.host.invalid' is no address of this machine"),
        (["--host=192.0.2.1", "--port=0"], "host: '192.0.2.1' is no address of this machine"),
        (["--workdir={folder}"], "is not a run folder"),
        (["--allowed_hosts=a.example,https://b"], "allowed_hosts: 'https://b' is no host name; give names without"),
        (["--allowed_hosts="], "allowed_hosts: '' is no host name"),
        (["--allowed_hosts=*.example.com"], "allowed_hosts: '*.example.com' is no host name"),
        (["--beam_size=3"], "--beam_size is not used by --mode=serve"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_code_2(run, tmp_path, capsys, flags, message):
    with contextlib.closing(listen("127.0.0.1", 0)) as other:
        values = {"taken": other.getsockname()[1], "folder": tmp_path}
        given = ["main.py", "--mode=serve", f"--workdir={run}", *(flag.format(**values) for flag in flags)]
        assert main.main(given) == 2
    output, errors = capsys.readouterr()
    assert output == "" and errors.count("\n") == 1 and message.format(**values) in errors


def test_an_address_of_a_family_that_the_machine_lacks_is_none_of_its_own(monkeypatch):
    def lacking(*_):  # what Linux answers where IPv6 is off, although it reads the address
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(socket, "socket", lacking)
    with pytest.raises(InputError, match="host: '::1' is no address of this machine"):
        listen("::1", 0)


def test_answers_are_not_held_back_by_nagle_s_algorithm():
    """asyncio turns it off on sockets that know their protocol only; with it each answer takes 40 ms more."""

    async def option_of_a_connection():
        options = asyncio.Queue()

        async def note(reader, writer):
            options.put_nowait(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = listen("127.0.0.1", 0)
        async with await asyncio.start_server(note, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.close()
            return await options.get()

    assert asyncio.run(option_of_a_connection())


def test_without_its_packages_the_mode_says_what_to_install(run, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("t2t_jax.serving", "uvicorn"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main.main(["main.py", "--mode=serve", f"--workdir={run}"]) == 2
    assert "--mode=serve needs the package uvicorn; pip install 't2t_jax[serve]'" in capsys.readouterr().err


def test_it_listens_on_this_machine_alone_by_default():
    args = main.parse(["main.py", "--mode=serve"])
    assert (args.host, args.port) == ("127.0.0.1", 8000)
