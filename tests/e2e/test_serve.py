"""`polywire serve` from outside: ready file, refusals at the start, drain, second signal."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polywire.protocols.cursus.compression import algorithm
from polywire.server.lifecycle import EXIT_OK, EXIT_SECOND_SIGNAL, EXIT_START
from polywire.server.lines import LINES_MAX
from polywire.testing.process import WIRES, BrokerProcess, silenced
from tests.processor import loop_seconds

WAIT_S = 60.0  # for what takes a moment on a quiet machine


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "data", "--any", "127.0.0.1:0") as process:
        yield process


def connect(broker: BrokerProcess, wire: str = "flux") -> socket.socket:
    return socket.create_connection(broker.addresses[wire], timeout=WAIT_S)


def lines(peer: socket.socket, count: int) -> list[bytes]:
    data = b""
    while data.count(b"\n") < count:
        more = peer.recv(65536)
        assert more, f"closed after {data!r}"
        data += more
    return data.splitlines()


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, "the condition was not reached in time"
        time.sleep(0.01)


def owe(broker: BrokerProcess, waiting: socket.socket) -> None:
    """Send a request that is answered late or never, and return once the broker itself has received it."""
    waiting.sendall(b"V1|1|PRODUCE|t a:1 acks=all\n")
    with connect(broker) as peer:

        def stored() -> bool:
            peer.sendall(b"V1|1|CONSUME|t 1 0\n")
            return b"messages=0:1" in lines(peer, 1)[0]

        wait_until(stored)


def serve(data_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a broker that is expected not to start."""
    command = [sys.executable, "-m", "polywire", "serve", "--data-dir", str(data_dir), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_S, env=os.environ, check=False)


def test_the_ready_file_names_every_listener(broker: BrokerProcess) -> None:
    assert set(broker.addresses) == {*WIRES, "any"}
    for wire in broker.addresses:
        connect(broker, wire).close()
    for name, (host, port) in broker.addresses.items():
        assert f"listener={name} address={host}:{port}" in broker.log_text()
    assert "durability=written" in broker.log_text()


def test_one_port_for_every_protocol(broker: BrokerProcess) -> None:
    with connect(broker, "any") as peer:
        peer.sendall(b"V1|1|PRO")
        peer.sendall(b"DUCE|t a:1\n")
        assert lines(peer, 1) == [b"V1|1|OK|partition=1 offset=0 hw=0"]
    with connect(broker, "any") as peer:
        peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert peer.recv(100) == b""


def test_settings_of_the_cursus_protocol(tmp_path: Path) -> None:
    options = ("--cursus-compression", "snappy", "--cursus-dialect", "modern", "--cursus-idle-timeout", "0.5")
    with BrokerProcess(tmp_path / "data", *options) as broker, connect(broker, "cursus") as peer:
        body = algorithm("snappy").compress(b"\0\0CREATE topic=t partitions=2")
        peer.sendall(len(body).to_bytes(4, "big") + body)
        size = int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "big")
        assert b"partitions=2" in peer.recv(size, socket.MSG_WAITALL)
        assert peer.recv(1) == b""  # nothing was sent for half a second


def test_a_start_waits_for_the_previous_process_to_end(tmp_path: Path) -> None:
    after = BrokerProcess(tmp_path / "data")
    with BrokerProcess(tmp_path / "data") as before, connect(before) as waiting, ThreadPoolExecutor() as threads:
        starting = threads.submit(after.start)
        wait_until(
            lambda: starting.done() or "waiting for another process to release the data directory" in after.log_text()
        )
        owe(before, waiting)
        assert before.stop() == EXIT_OK, "after a drain, which the other one waits for, too"
        starting.result()
    with connect(after) as peer:
        peer.sendall(b"V1|1|CONSUME|t 1 0\n")
        assert lines(peer, 1) == [b"V1|1|OK|messages=0:1 hw=0"]
    assert after.stop() == EXIT_OK


def test_log_lines_as_json(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", "--log-format", "json") as broker:
        reported = [json.loads(line) for line in broker.log_text().splitlines()]
    assert {line["listener"] for line in reported if line["event"] == "listening"} == set(WIRES)


def test_half_closed_connections_get_their_responses(broker: BrokerProcess) -> None:
    with connect(broker) as peer:
        peer.sendall(b"V1|1|PRODUCE|t a:1\nV1|2|CONSUME|t 1 0")
        peer.shutdown(socket.SHUT_WR)
        assert lines(peer, 2)[1] == b"V1|2|OK|messages=0:1 hw=0"
        assert peer.recv(100) == b""


def test_a_stop_answers_pending_requests(broker: BrokerProcess) -> None:
    with connect(broker) as waiting, connect(broker) as idle:
        owe(broker, waiting)
        assert broker.stop() == EXIT_OK
        assert waiting.recv(100) == b"V1|1|ERR|REPLICATION_TIMEOUT|acks=all timeout\n"
        assert idle.recv(100) == b""
    broker.start()
    with connect(broker) as peer:
        peer.sendall(b"V1|1|CONSUME|t 1 0\n")
        assert lines(peer, 1) == [b"V1|1|OK|messages=0:1 hw=0"]


def test_a_second_signal_ends_the_process_at_once(broker: BrokerProcess) -> None:
    with connect(broker) as waiting:
        owe(broker, waiting)
        os.kill(broker.pid, signal.SIGTERM)
        wait_until(lambda: "event=stopping" in broker.log_text())
        assert broker.stop() == EXIT_SECOND_SIGNAL


@pytest.mark.parametrize("output", ["closed pipe", "full disk", "none"])
def test_a_broker_works_and_stops_without_its_log(tmp_path: Path, output: str) -> None:
    ready = tmp_path / "ready"
    command = [sys.executable, "-m", "polywire", "serve", "--data-dir", str(tmp_path / "data"), *silenced("flux")]
    command += ["--flux", "127.0.0.1:0", "--ready-file", str(ready)]
    if output == "none":
        command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    reads, writes = os.pipe()
    os.close(reads)
    with open("/dev/full", "wb") as full, os.fdopen(writes, "wb") as closed:
        broken = full if output == "full disk" else closed
        process = subprocess.Popen(command, stdout=broken, stderr=broken, stdin=subprocess.DEVNULL)
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None)
        assert process.poll() is None
        if output == "none":
            standard = [os.readlink(f"/proc/{process.pid}/fd/{descriptor}") for descriptor in range(3)]
            assert standard == [os.devnull] * 3, "no other file has these descriptors, to which libraries write"
        host, port = json.loads(ready.read_text())["flux"].values()
        with socket.create_connection((host, port), timeout=WAIT_S) as peer:
            peer.sendall(b"V1|1|PRODUCE|t a:1\n")
            assert lines(peer, 1)[0].startswith(b"V1|1|OK|")
        process.terminate()
        assert process.wait(WAIT_S) == EXIT_OK
    finally:
        process.kill()
        process.wait()


def test_misbehaving_clients_do_not_affect_others(broker: BrokerProcess) -> None:
    stalled = [connect(broker) for _ in range(50)]
    for peer in stalled:
        peer.sendall(b"V1|1|PRODUCE|t a:" + b"x" * 30_000)
    deaf = connect(broker)
    deaf.setblocking(False)
    question = b"".join(b"V1|%d|CONSUME|big 1 0\n" % n for n in range(2_000))
    with connect(broker) as peer:
        for n in range(40):
            peer.sendall(b"V1|%d|PRODUCE|big a:" % n + b"y" * 50_000 + b"\n")
        lines(peer, 40)
        deaf.send(question)
        garbage = connect(broker, "polywire")
        garbage.sendall(os.urandom(100_000))
        long = connect(broker)
        long.sendall(b"z" * 65_536)
        assert long.makefile("rb").read().startswith(b"V1|0|ERR|BAD_REQUEST|"), "answered, then closed"
        before = loop_seconds(broker)
        for n in range(200):
            peer.sendall(b"V1|%d|PRODUCE|t k%d:v\n" % (n, n))
            assert b"|OK|" in lines(peer, 1)[0]
        assert loop_seconds(broker) - before < 5.0
    memory = Path(f"/proc/{broker.pid}/status").read_text()
    resident_kb = int(memory.split("VmRSS:")[1].split()[0])
    assert resident_kb < 500_000
    for peer in [*stalled, deaf, garbage, long]:
        peer.close()


def test_bad_connections_are_counted_in_the_log(broker: BrokerProcess) -> None:
    for _ in range(100):
        with connect(broker, "any") as peer:
            peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert peer.recv(100) == b""
    broker.stop()
    reported = [line for line in broker.log_text().splitlines() if "connection dropped" in line]
    left_out = sum(int(line.partition(" more=")[2].partition(" ")[0]) for line in reported if " more=" in line)
    assert left_out + sum(" more=" not in line for line in reported) == 100
    assert len(reported) <= 2 * (LINES_MAX + 1), "a machine so slow that it took two windows"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--flux", "0.0.0.0:0", *silenced("flux")), "needs --users or --insecure"),
        (silenced(), "all listeners are off"),
        (("--slot-mib", "16", *silenced("polywire")), "--slot-mib 17 or more"),
        (("--flux", "localhost"), "address is invalid (use HOST:PORT or off)"),
        (("--cursus-idle-timeout", "0"), "idle timeout is out of range"),
        (("--retention-hours", "-1"), "out of range name=retention_hours"),
        (("--flux", "127.0.0.1:70000"), "port is above 65535"),
    ],
)
def test_refusals_at_the_start(tmp_path: Path, options: tuple[str, ...], reason: str) -> None:
    result = serve(tmp_path / "data", *options)
    assert result.returncode == EXIT_START
    assert reason in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "users file does not exist"),
        ("", "users file is empty"),
        ("# name:hash:permissions\n\n", "users file is empty"),
    ],
)
def test_an_empty_users_file_does_not_open_the_broker(tmp_path: Path, content: str | None, reason: str) -> None:
    users = tmp_path / "users"
    if content is not None:
        users.write_text(content)
        users.chmod(0o600)
    place = ("--polywire", "127.0.0.1:0", *silenced("polywire"))
    result = serve(tmp_path / "data", "--users", str(users), *place)
    assert result.returncode == EXIT_START
    assert reason in result.stderr
    assert str(users) in result.stderr
    assert not (tmp_path / "data").exists(), "it is detected before anything is created"


def test_a_port_in_use_is_reported(broker: BrokerProcess, tmp_path: Path) -> None:
    host, port = broker.addresses["flux"]
    result = serve(tmp_path / "other", "--flux", f"{host}:{port}", *silenced("flux"))
    assert result.returncode == EXIT_START
    assert f"address={host}:{port}" in result.stderr


def test_a_directory_has_one_broker(broker: BrokerProcess) -> None:
    result = serve(broker.data_dir, "--flux", "127.0.0.1:0", *silenced("flux"))
    assert result.returncode == EXIT_START
    assert "Traceback" not in result.stderr
    assert "data directory is in use" in result.stderr
    assert f"pid={broker.pid}" in result.stderr


def test_the_ready_file_is_removed_at_the_end(broker: BrokerProcess) -> None:
    ready = broker.data_dir.with_name(broker.data_dir.name + ".ready")
    assert ready.exists()
    broker.stop()
    assert not ready.exists()
