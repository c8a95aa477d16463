"""``kill -9`` of a real broker while transactions are under way: each is there as a whole, with its positions, or not at all.

One client counts from transaction to transaction over the Cursus wire: transaction n writes n into three partitions of two topics and
moves a group's position to n. It goes on after every kill from what the broker tells it.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from polywire.client.connect import connect
from polywire.protocols.cursus.messages import frame
from tests.broker_process import BrokerProcess

KILLS = 3
LIFE_S = (0.15, 0.5)
PLACES = (("a", 0), ("a", 1), ("b", 0))


class Gone(Exception):
    """The broker died under the request."""


class Worker:
    """Ends one transaction after the other. Invariant: ``done`` is the number of the latest whose commit was acknowledged."""

    def __init__(self, address: Callable[[], tuple[str, int]]) -> None:
        self.address = address
        self.done = 0
        self.fault: BaseException | None = None
        self.stopped = False

    def run(self) -> None:
        try:
            while not self.stopped:
                self._live()
        except BaseException as error:
            self.fault = error

    def _live(self) -> None:
        """One connection's life."""
        try:
            with socket.create_connection(self.address(), timeout=5.0) as peer:
                self._work(peer)
        except (OSError, Gone):
            time.sleep(0.02)

    def _ask(self, peer: socket.socket, text: str) -> str:
        peer.sendall(frame(text.encode()))
        data = b""
        while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
            part = peer.recv(65536)
            if not part:
                raise Gone
            data += part
        return data[4:].decode()

    def _sure(self, peer: socket.socket, text: str) -> str:
        answer = self._ask(peer, text)
        assert answer.startswith("OK"), (text, answer)
        return answer

    def _work(self, peer: socket.socket) -> None:
        words = self._sure(peer, "INIT_PRODUCER_ID transactional_id=T").split()
        who = " ".join(words[1:])
        joined = self._sure(peer, "JOIN_GROUP topic=a group=g member=m").split()
        member, generation = joined[2], joined[1]
        committed = self._sure(peer, "FETCH_OFFSET topic=a partition=0 group=g")
        number = int(committed.partition("offset=")[2])
        assert number >= self.done, "an acknowledged commit was lost"
        while not self.stopped:
            number += 1
            self._sure(peer, f"BEGIN_TXN {who}")
            for sequence, (topic, partition) in enumerate(PLACES, 1):
                place = f"topic={topic} partition={partition} seqNum={sequence}"
                self._sure(peer, f"TXN_PUBLISH {who} {place} message={number}")
            scope = f"topic=a group=g {member} {generation}"
            self._sure(peer, f"SEND_OFFSETS_TO_TXN {who} {scope} P0:{number}")
            self._sure(peer, f"END_TXN {who} result=commit")
            self.done = number


async def _stored(broker: BrokerProcess) -> list[list[int]]:
    client = await connect(broker.url("polywire"))
    try:
        found = []
        for topic, partition in PLACES:
            numbers: list[int] = []
            while records := await client.fetch(topic, partition, len(numbers)):
                numbers += [int(record.value or b"-1") for record in records]
            found.append(numbers)
        return found
    finally:
        await client.close()


@pytest.mark.timeout(120)
def test_killed_in_mid_transaction(tmp_path: Path) -> None:
    chance = random.Random(7)
    with BrokerProcess(tmp_path / "data") as broker:
        worker = Worker(lambda: broker.addresses["cursus"])
        with socket.create_connection(broker.addresses["cursus"]) as peer:
            for topic in ("a", "b"):
                worker._sure(peer, f"CREATE topic={topic} partitions=2")
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            for _ in range(KILLS):
                time.sleep(chance.uniform(*LIFE_S))
                broker.kill()
                broker.start()
            time.sleep(0.3)
        finally:
            worker.stopped = True
            thread.join()
        assert worker.fault is None, worker.fault
        assert worker.done > KILLS
        stored = asyncio.run(_stored(broker))
        assert stored[0] == stored[1] == stored[2]
        assert stored[0] == list(range(1, len(stored[0]) + 1)), "each once, none left out"
        assert len(stored[0]) >= worker.done
        with socket.create_connection(broker.addresses["cursus"]) as peer:
            committed = worker._sure(peer, "FETCH_OFFSET topic=a partition=0 group=g")
        assert committed == f"OK offset={len(stored[0])}", "positions move with the records"
