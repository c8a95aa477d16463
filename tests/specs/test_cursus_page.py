"""Statements of the Cursus pages on positional commands."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator

import pytest

from polywire.protocols.cursus.messages import enveloped, frame
from tests.broker_process import BrokerProcess
from tests.specs.pages import CURSUS_JAVA as PAGE
from tests.unit.protocols.cursus.test_produce import batch

PORTS = ("cursus", "any")


@pytest.fixture(params=PORTS)
def peer(broker: BrokerProcess, request: pytest.FixtureRequest) -> Iterator[Peer]:
    with Peer(broker, request.param) as peer:
        yield peer


class Peer:
    """A connection, and an unused topic."""

    def __init__(self, broker: BrokerProcess, port: str) -> None:
        self.topic = f"t{random.getrandbits(60)}"
        self.address = broker.addresses[port]
        self.socket = socket.create_connection(self.address, timeout=20)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, body: bytes) -> str:
        """Return the body of the only response."""
        self.socket.sendall(frame(body))
        return self._take(int.from_bytes(self._take(4), "big")).decode()

    def ask(self, text: str) -> str:
        """Send a raw command; ``$`` stands for the topic."""
        return self.say(text.replace("$", self.topic).encode())

    def reported(self, text: str, envelope: str = "admin") -> str:
        """Send a text in an envelope."""
        return self.say(enveloped(envelope, text.replace("$", self.topic).encode()))

    def joined(self) -> str:
        """Join the group ``g`` in its first generation, with both partitions."""
        assert self.ask("CREATE topic=$ partitions=2").startswith("OK")
        self.group = f"g{self.topic}"
        answer = self.ask(f"JOIN_GROUP $ {self.group} c1")
        assert answer.endswith("assignments=[0 1]")
        return answer.partition("member=")[2].partition(" ")[0]

    def committed(self) -> list[str]:
        """Return the offset that the group has committed."""
        return [self.ask(f"FETCH_OFFSET topic=$ partition={number} group={self.group}") for number in range(2)]

    def _take(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            part = self.socket.recv(size - len(found))
            assert part, "the broker closed the connection"
            found += part
        return found


@PAGE.says(57, "what is no list of offsets is refused whole")
@pytest.mark.parametrize(
    "pairs", ["P0:6 P1:3", "0:6 1:3", "P0:6, P1:3", "P0:6,P1:3 P0:7", "P0:6,P1", "P0=6,P1=3", "{0:6,1:3}", "P0:6,", ""]
)
def test_an_invalid_batch_commit_is_refused_as_a_whole(peer: Peer, pairs: str) -> None:
    member = peer.joined()
    for command in (
        f"BATCH_COMMIT $ {peer.group} {member} 1 {pairs}",
        f"BATCH_COMMIT topic=$ group={peer.group} member={member} generation=1 {pairs}",
    ):
        assert peer.ask(command).startswith("ERROR: invalid_")
    assert peer.committed() == ["OK offset=0", "OK offset=0"]


@PAGE.says(57, "the offsets are one word of partition and offset, with or without the letter P")
@pytest.mark.parametrize("pairs", ["P0:6,P1:3", "0:6,1:3"])
def test_a_batch_commit_returns_how_many_it_stored(peer: Peer, pairs: str) -> None:
    member = peer.joined()
    assert peer.ask(f"BATCH_COMMIT $ {peer.group} {member} 1 {pairs}") == "OK batched=2"
    assert peer.committed() == ["OK offset=6", "OK offset=3"]


@PAGE.says(55, "COMMIT for a topic or partition that is not there is an error")
def test_a_commit_for_a_missing_topic_or_partition_is_an_error(peer: Peer) -> None:
    assert peer.ask("COMMIT $ workers 0 5") == f"ERROR: topic_not_found topic={peer.topic}"
    assert peer.ask("CREATE topic=$ partitions=2").startswith("OK")
    assert peer.ask("COMMIT $ workers 2 5") == "ERROR: partition_not_found partition=2"
    assert peer.ask("COMMIT $ workers 1 5") == "OK"


@PAGE.says(144, "every acknowledgement has the leader")
def test_the_leader_of_an_acknowledgement_is_the_one_of_metadata(peer: Peer) -> None:
    assert peer.ask("CREATE topic=$ partitions=1").startswith("OK")
    _, _, leaders = peer.ask("METADATA topic=$").partition("leaders=")
    leader = leaders.partition(" ")[0]
    assert leader == "{}:{}".format(*peer.address)
    answer = peer.ask("PUBLISH topic=$ producerId=p partition=0 message=hello")
    assert json.loads(answer)["leader"] == leader
    message = {"seq": 1, "pid": "p", "payload": b"hello"}
    acknowledged = json.loads(peer.say(batch(peer.topic, 0, [message])))
    assert list(acknowledged) == [
        *("status", "last_offset", "producer_epoch", "producer_id", "seq_start", "seq_end", "leader", "error")
    ]
    assert (acknowledged["status"], acknowledged["leader"]) == ("OK", leader)


def test_other_clients_get_codes_for_it(peer: Peer) -> None:
    assert peer.ask("CREATE topic=$ partitions=1").startswith("OK")
    assert peer.reported("FOO", "") == "ERROR: malformed_input reason=missing_topic_or_payload"
    assert peer.ask("FOO") == 'ERROR: decode_failed reason="invalid topic length"'
    assert peer.say(b"") == 'ERROR: decode_failed reason="data too short"'
