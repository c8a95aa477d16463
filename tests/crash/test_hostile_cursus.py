"""Hostile Cursus clients against a real broker: other clients are served."""

from __future__ import annotations

import random
import socket
import time
from pathlib import Path

from polywire.protocols.cursus.compression import algorithm
from polywire.protocols.cursus.messages import frame
from tests.broker_process import BrokerProcess
from tests.crash.test_hostile_peers import MEMORY_MB_MAX, memory_mb
from tests.unit.protocols.cursus.test_produce import batch, messages

ANSWERED_S_MAX = 5.0  # far above what any request takes, far below what a blocked broker takes
CREATE = frame(b"CREATE topic=good partitions=1")
GOOD = frame(batch("good", 0, messages(1)))


def connect(broker: BrokerProcess) -> socket.socket:
    return socket.create_connection(broker.addresses["cursus"], timeout=ANSWERED_S_MAX)


def ask(broker: BrokerProcess, request: bytes) -> bytes:
    """Send one request on a new connection."""
    with connect(broker) as peer:
        try:
            peer.sendall(request)
            return peer.recv(65_536)[4:]
        except ConnectionError as error:
            raise AssertionError(f"{error!r}\n{broker.log_text()}") from error


def is_turned_away(broker: BrokerProcess, request: bytes) -> bool:
    """Return whether a request closes its connection, possibly with a reset."""
    with connect(broker) as peer:
        try:
            peer.sendall(request)
            return peer.recv(65_536) == b""
        except ConnectionError:
            return True


def test_hostile_clients_do_not_affect_others(tmp_path: Path) -> None:
    chance = random.Random(2)
    with BrokerProcess(tmp_path / "data") as broker:
        assert ask(broker, CREATE).startswith(b"OK")
        for _ in range(80):  # garbage, and valid frames that are truncated or damaged
            with connect(broker) as peer:
                damaged = bytearray(GOOD * 3)
                damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
                peer.sendall(
                    chance.choice(
                        [chance.randbytes(chance.randrange(1, 3000)), bytes(damaged[: chance.randrange(400)])]
                    )
                )
        assert b'"status":"OK"' in ask(broker, GOOD)
        liars = [connect(broker) for _ in range(100)]  # each announces 64 MiB and sends a little
        for liar in liars:
            liar.sendall((64 << 20).to_bytes(4, "big") + b"\xba\x7c\x00\x04good")
        for name in ("gzip", "lz4", "xerial"):  # bombs: below the limit an error, above it the connection is closed
            answer = ask(broker, frame(algorithm(name).compress(bytes(32 << 20))))  # in the compression of the request
            assert bytes(algorithm(name).expand(memoryview(answer), 1 << 20)).startswith(b"ERROR: ")
            assert is_turned_away(broker, frame(algorithm(name).compress(bytes(100 << 20))))
        assert b'"status":"OK"' in ask(broker, GOOD)
        for liar in liars:
            liar.close()
        log = broker.log_text()
        assert not [word for word in ("Traceback", "level=error", "level=critical") if word in log], log
        assert memory_mb(broker) < MEMORY_MB_MAX
        assert broker.stop() == 0


def test_unread_streams_block_no_other_client(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        assert ask(broker, CREATE).startswith(b"OK")
        deaf = [connect(broker) for _ in range(20)]
        for number, peer in enumerate(deaf):
            peer.sendall(frame(f"STREAM topic=good partition=0 group=g{number} offset=0".encode()))
        large = frame(batch("good", 0, [{"seq": n, "pid": "p", "payload": bytes(1_000)} for n in range(1, 1_001)]))
        with connect(broker) as writer:
            for _ in range(40):
                writer.sendall(large)
                assert b'"status":"OK"' in writer.recv(65_536)
        begun = time.monotonic()
        assert b'"status":"OK"' in ask(broker, GOOD)
        assert time.monotonic() - begun < ANSWERED_S_MAX
        assert memory_mb(broker) < MEMORY_MB_MAX
        for peer in deaf:
            peer.close()
        assert broker.stop() == 0
