"""HTTP of a real process, next to the other protocols."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from polywire.server.config import HTTP_ADDRESS
from polywire.server.lifecycle import EXIT_OK, EXIT_START
from tests.broker_process import BrokerProcess, child_environment, silenced

LOADED_LATER = ("starlette", "h11", "prometheus_client", "jinja2", "anyio")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("http") / "data", wires=("flux", "http")) as process:
        yield process


def ask(broker: BrokerProcess, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*broker.addresses["http"], timeout=30)
    with closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_health_and_metrics(broker: BrokerProcess) -> None:
    with socket.create_connection(broker.addresses["flux"], timeout=60) as peer:
        peer.sendall(b"V1|1|PRODUCE|seen a:1\n")
        assert peer.recv(100).startswith(b"V1|1|OK")
        assert ask(broker, "/livez") == (200, b"alive\n")
        assert ask(broker, "/readyz") == (200, b"ready\n")
        status, text = ask(broker, "/metrics")
    assert status == 200
    lines = text.decode().splitlines()
    assert 'polywire_topic_records_total{topic="seen"} 1.0' in lines
    assert 'polywire_connections{wire="flux"} 1.0' in lines
    assert 'polywire_received_bytes_total{wire="flux"} 22.0' in lines
    assert any(line.startswith('polywire_log_work_seconds_count{work="sync"}') for line in lines)


def test_requests_of_a_foreign_page_are_rejected(broker: BrokerProcess) -> None:
    assert ask(broker, "/metrics", Host="evil.example")[0] == 403
    assert ask(broker, "/metrics", Origin="https://evil.example")[0] == 403
    assert ask(broker, "/metrics", "POST")[0] == 403


def test_pipelined_requests_are_answered_in_order(broker: BrokerProcess) -> None:
    with socket.create_connection(broker.addresses["http"], timeout=30) as peer:
        request = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
        peer.sendall(request % b"livez" + request % b"nothing" + request % b"livez")
        peer.shutdown(socket.SHUT_WR)
        answers = b""
        while more := peer.recv(65536):
            answers += more
    assert [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404", b"200"]


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nX: " + b"y" * 20_000, b"\0" * 20_000, b"GET / HTTP/1.1\r\n\r\n"])
def test_an_invalid_request_closes_its_own_connection_only(broker: BrokerProcess, data: bytes) -> None:
    with socket.create_connection(broker.addresses["http"], timeout=30) as peer:
        peer.sendall(data)
        answer = b""
        while more := peer.recv(65536):
            answer += more
        assert answer.startswith(b"HTTP/1.1 4")
    assert ask(broker, "/livez")[0] == 200


def test_a_default_http_port_in_use_is_logged_and_does_not_prevent_a_start(tmp_path: Path) -> None:
    host, _, port = HTTP_ADDRESS.rpartition(":")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind((host, int(port)))
            other.listen()
        except OSError:
            pass  # another program uses it, which serves the test as well
        ready = tmp_path / "ready"
        words = [*silenced("flux", "http"), "--flux", "127.0.0.1:0", "--ready-file", str(ready)]
        command = [sys.executable, "-m", "polywire", "serve", "--data-dir", str(tmp_path / "data"), *words]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=child_environment())
        try:
            while not ready.exists():
                assert process.poll() is None
                time.sleep(0.05)
            assert set(json.loads(ready.read_text())) == {"flux"}
            process.terminate()
            assert "HTTP is off" in process.communicate(timeout=180)[1]
            assert process.returncode == EXIT_OK
            asked = subprocess.run(
                [*command, "--http", HTTP_ADDRESS],
                capture_output=True,
                text=True,
                timeout=180,
                env=child_environment(),
                check=False,
            )
            assert asked.returncode == EXIT_START
            assert "choose another address with --http HOST:PORT" in asked.stderr
        finally:
            process.kill()


def test_http_modules_are_not_loaded_at_the_start() -> None:
    code = (
        "import polywire.cli.main, polywire.server.lifecycle, sys;"
        f" print(*(name for name in {LOADED_LATER!r} if name in sys.modules))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=child_environment(), check=True
    )
    assert loaded.stdout.strip() == ""
