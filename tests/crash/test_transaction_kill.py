"""``kill -9`` of a real broker during transactions: each is stored as a whole with its offsets, or not at all.

One client counts from transaction to transaction over Cursus: transaction n writes n into three partitions of two
topics and commits n as a group's offset. After every kill it resumes from what the broker reports.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path

from polywire.client.connect import connect
from tests.broker_process import BrokerProcess
from tests.crash.cursus_peer import Peer, Worker

KILLS = 3
LIFE_S = (0.15, 0.5)
PLACES = (("a", 0), ("a", 1), ("b", 0))


class Committer(Worker):
    """Commits one transaction after the other."""

    def work(self, peer: Peer) -> None:
        words = peer.sure("INIT_PRODUCER_ID transactional_id=T").split()
        who = " ".join(words[1:])
        joined = peer.sure("JOIN_GROUP topic=a group=g member=m").split()
        member, generation = joined[2], joined[1]
        committed = peer.sure("FETCH_OFFSET topic=a partition=0 group=g")
        number = int(committed.partition("offset=")[2])
        assert number >= self.done, "an acknowledged commit was lost"
        while not self.stopped:
            number += 1
            peer.sure(f"BEGIN_TXN {who}")
            for sequence, (topic, partition) in enumerate(PLACES, 1):
                place = f"topic={topic} partition={partition} seqNum={sequence}"
                peer.sure(f"TXN_PUBLISH {who} {place} message={number}")
            scope = f"topic=a group=g {member} {generation}"
            peer.sure(f"SEND_OFFSETS_TO_TXN {who} {scope} P0:{number}")
            peer.sure(f"END_TXN {who} result=commit")
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


def test_killed_during_transactions(tmp_path: Path) -> None:
    chance = random.Random(7)
    with BrokerProcess(tmp_path / "data") as broker:
        worker = Committer(broker)
        with Peer(broker) as peer:
            for topic in ("a", "b"):
                peer.sure(f"CREATE topic={topic} partitions=2")
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            for _ in range(KILLS):
                time.sleep(chance.uniform(*LIFE_S))
                broker.kill()
                broker.start()
            worker.until(KILLS)
        finally:
            worker.stopped = True
            thread.join()
        assert worker.fault is None, worker.fault
        assert worker.done > KILLS
        stored = asyncio.run(_stored(broker))
        assert stored[0] == stored[1] == stored[2]
        assert stored[0] == list(range(1, len(stored[0]) + 1)), "each once, none missing"
        assert len(stored[0]) >= worker.done
        with Peer(broker) as peer:
            committed = peer.sure("FETCH_OFFSET topic=a partition=0 group=g")
        assert committed == f"OK offset={len(stored[0])}", "offsets are committed with the records"
