"""``kill -9`` of a real broker while events of aggregates and plain records are written into one partition.

What was acknowledged is there, versions have no gaps, and every place that is kept leads to its own event, also after the journal was sealed.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from polywire.protocols.cursus.messages import frame
from tests.broker_process import BrokerProcess
from tests.unit.protocols.cursus.test_events import unpacked

KILLS = 1
LIFE_S = 0.6
KEYS = ("a", "b")


class Gone(Exception):
    """The broker died under the request."""


class Peer:
    """One connection that asks one thing at a time."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, timeout=5.0)
        self._data = b""

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def read(self) -> bytes:
        """The body of the next frame."""
        while len(self._data) < 4 or len(self._data) < 4 + int.from_bytes(self._data[:4], "big"):
            part = self._socket.recv(1 << 16)
            if not part:
                raise Gone
            self._data += part
        end = 4 + int.from_bytes(self._data[:4], "big")
        body, self._data = self._data[4:end], self._data[end:]
        return body

    def ask(self, text: str) -> str:
        self._socket.sendall(frame(text.encode()))
        return self.read().decode()


class Writer:
    """Appends the events of one aggregate, with plain records between. Invariant: ``done`` is the latest version that was acknowledged."""

    def __init__(self, broker: BrokerProcess, key: str) -> None:
        self._broker = broker
        self._key = key
        self.done = 0
        self.stopped = False
        self.fault: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopped:
                self._live()
        except BaseException as error:
            self.fault = error

    def _live(self) -> None:
        try:
            with Peer(self._broker.addresses["cursus"]) as peer:
                self._write(peer)
        except (OSError, Gone):
            time.sleep(0.02)

    def _write(self, peer: Peer) -> None:
        version = int(peer.ask(f"STREAM_VERSION topic=ev key={self._key}").removeprefix("OK version="))
        assert version >= self.done, "an acknowledged event was lost"
        while not self.stopped:
            version += 1
            answer = peer.ask(f"APPEND_STREAM topic=ev key={self._key} version={version} message={self._key}{version}")
            assert answer.startswith(f"OK version={version} "), answer
            self.done = version
            if version % 3 == 0:
                assert peer.ask("PUBLISH topic=ev producerId=p partition=0 message=plain").startswith("{")


@pytest.mark.timeout(120)
def test_killed_while_appending(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        with Peer(broker.addresses["cursus"]) as peer:
            assert peer.ask("CREATE topic=ev partitions=1 event_sourcing=true").startswith("OK")
        writers = [Writer(broker, key) for key in KEYS]
        threads = [threading.Thread(target=writer.run) for writer in writers]
        for thread in threads:
            thread.start()
        try:
            for _ in range(KILLS):
                time.sleep(LIFE_S)
                broker.kill()
                broker.start()
            time.sleep(LIFE_S)
        finally:
            for writer in writers:
                writer.stopped = True
            for thread in threads:
                thread.join()
        assert [writer.fault for writer in writers] == [None] * len(writers)
        check(broker, writers)
        assert broker.stop() == 0
        broker.start()
        check(broker, writers)


def check(broker: BrokerProcess, writers: list[Writer]) -> None:
    """Every stream is whole."""
    with Peer(broker.addresses["cursus"]) as peer:
        for key, writer in zip(KEYS, writers, strict=True):
            head = json.loads(peer.ask(f"READ_STREAM topic=ev key={key}"))
            events = unpacked(peer.read())
            assert head["count"] == len(events) >= writer.done > 0
            assert [event["version"] for event in events] == list(range(1, len(events) + 1))
            assert [event["payload"].decode() for event in events] == [f"{key}{n}" for n in range(1, len(events) + 1)]
