"""``kill -9`` of a real broker while events of aggregates and plain records are written into one partition.

Acknowledged events survive, versions have no gaps, and every stored offset leads to its own event, also after sealing.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from tests.broker_process import BrokerProcess
from tests.crash.cursus_peer import Peer, Worker
from tests.unit.protocols.cursus.test_events import unpacked

KILLS = 1
LIFE_S = 0.6
KEYS = ("a", "b")


class Writer(Worker):
    """Appends the events of one aggregate, with plain records in between."""

    def __init__(self, broker: BrokerProcess, key: str) -> None:
        super().__init__(broker)
        self._key = key

    def work(self, peer: Peer) -> None:
        version = int(peer.ask(f"STREAM_VERSION topic=ev key={self._key}").removeprefix("OK version="))
        assert version >= self.done, "an acknowledged event was lost"
        while not self.stopped:
            version += 1
            answer = peer.ask(f"APPEND_STREAM topic=ev key={self._key} version={version} message={self._key}{version}")
            assert answer.startswith(f"OK version={version} "), answer
            self.done = version
            if version % 3 == 0:
                assert peer.ask("PUBLISH topic=ev producerId=p partition=0 message=plain").startswith("{")


def test_killed_while_appending(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        with Peer(broker) as peer:
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
            for writer in writers:
                writer.until(writer.done)
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
    """Assert that every stream is complete."""
    with Peer(broker) as peer:
        for key, writer in zip(KEYS, writers, strict=True):
            head = json.loads(peer.ask(f"READ_STREAM topic=ev key={key}"))
            events = unpacked(peer.read())
            assert head["count"] == len(events) >= writer.done > 0
            assert [event["version"] for event in events] == list(range(1, len(events) + 1))
            assert [event["payload"].decode() for event in events] == [f"{key}{n}" for n in range(1, len(events) + 1)]
