"""A client that produces what it fetched: all requests get responses, and a killed broker starts again."""

from __future__ import annotations

from pathlib import Path

from polywire.client.sockets import FramedSocket
from polywire.client.sync import SyncClient
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.messages import Verb
from polywire.records.batch import stamp
from polywire.records.columns import Record
from polywire.records.rows import from_records
from tests.broker_process import BrokerProcess


def test_fetched_batches_are_accepted_again(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "data", wires=("polywire",)).start()
    try:
        with SyncClient(broker.url("polywire")) as client:
            client.create_topic("back", 1)
            client.create_topic("other", 1)
        peer = FramedSocket(*broker.addresses["polywire"], timeout_s=20)
        fetched = from_records([Record(b"again")])
        stamp(fetched, 0, 1, 1, 7, 105, 12345)
        sent = []
        for _ in range(20):  # small enough to arrive in one piece, and so to be one write batch
            for topic, batch in (("other", from_records([Record(b"mine")])), ("back", fetched), ("back", fetched)):
                sent.append(peer.send(Verb.PRODUCE, messages.Produce(name=topic, partition=0), [batch]))
        answered: list[int] = []
        while len(answered) < len(sent):  # in any order
            prefix, _ = peer._receive_frame()
            peer.receive_payload(prefix)
            answered.append(prefix.correlation)
        assert sorted(answered) == sent
        peer.close()
        broker.kill()
        broker.start()
        with SyncClient(broker.url("polywire")) as client:
            assert [record.value for record in client.fetch("other", 0, 0)] == [b"mine"] * 20
            assert [record.value for record in client.fetch("back", 0, 0)] == [b"again"] * 40
    finally:
        broker.kill()
