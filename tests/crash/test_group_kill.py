"""``kill -9`` of a real broker under a classic Kafka group: its members do not notice."""

from __future__ import annotations

import socket
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.messages import Api, WireError
from tests.broker_process import BrokerProcess

KILLS = 2
MEMBERS = ("first", "second", "static")
SECONDS_MAX = 120.0


class Peer:
    """A connection over the Kafka protocol that waits for each response."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._socket = socket.create_connection(broker.addresses["kafka"], timeout=SECONDS_MAX)
        self._stream = self._socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        self._socket.close()

    def tell(self, api: Api, version: int, **fields: Any) -> None:
        self._socket.sendall(encode_request(api, version, 1, schema.request(api)(**fields), client_id="test"))

    def heard(self, api: Api, version: int) -> Any:
        size = int.from_bytes(self._stream.read(4), "big")
        return decode_response(api, version, self._stream.read(size))[1]

    def ask(self, api: Api, version: int, **fields: Any) -> Any:
        self.tell(api, version, **fields)
        return self.heard(api, version)


def join(peer: Peer, name: str, member_id: str = "") -> None:
    asked = schema.request(Api.JOIN_GROUP).Protocols(name="range", metadata=name.encode())
    peer.tell(
        Api.JOIN_GROUP,
        9,
        group_id="g",
        session_timeout_ms=45_000,
        rebalance_timeout_ms=45_000,
        member_id=member_id,
        instance_id=name if name == "static" else None,
        protocol_type="consumer",
        protocols=[asked],
    )


def ids_of(broker: BrokerProcess) -> dict[str, tuple[str, int]]:
    """Let all members join, and the leader assign each its own name; return id and generation by name."""
    peers = {name: Peer(broker) for name in MEMBERS}
    ids = dict.fromkeys(MEMBERS, "")
    for name in MEMBERS[:2]:
        join(peers[name], name)
        reported = peers[name].heard(Api.JOIN_GROUP, 9)
        assert reported.error == WireError.MEMBER_ID_REQUIRED
        ids[name] = reported.member_id
    for name in reversed(MEMBERS):  # the coordinator waits for members that have an id and have not joined
        join(peers[name], name, ids[name])
    joined = {name: peers[name].heard(Api.JOIN_GROUP, 9) for name in MEMBERS}
    [lead] = [name for name, reported in joined.items() if reported.members]
    one = schema.request(Api.SYNC_GROUP).Assignments
    dealt = [one(member_id=reported.member_id, assignment=name.encode()) for name, reported in joined.items()]
    found = {name: (reported.member_id, reported.generation_id) for name, reported in joined.items()}
    for name in sorted(MEMBERS, key=lambda name: name != lead):
        assert sync(peers[name], found, name, dealt if name == lead else []) == (WireError.NONE, name.encode())
    for peer in peers.values():
        peer.__exit__(None, None, None)
    return found


def sync(peer: Peer, ids: dict[str, tuple[str, int]], name: str, dealt: list[Any]) -> tuple[int, bytes]:
    member_id, generation = ids[name]
    instance = name if name == "static" else None
    reported = peer.ask(
        Api.SYNC_GROUP,
        5,
        group_id="g",
        generation_id=generation,
        member_id=member_id,
        instance_id=instance,
        protocol_type="consumer",
        protocol_name="range",
        assignments=dealt,
    )
    return reported.error, bytes(reported.assignment)


def beat(peer: Peer, ids: dict[str, tuple[str, int]], name: str) -> int:
    member_id, generation = ids[name]
    instance = name if name == "static" else None
    fields = {"group_id": "g", "generation_id": generation, "member_id": member_id, "instance_id": instance}
    error: int = peer.ask(Api.HEARTBEAT, 4, **fields).error
    return error


def test_members_keep_their_generation_over_kills(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "data")
    try:
        broker.start()
        ids = ids_of(broker)
        for _ in range(KILLS):
            broker.kill()
            broker.start()
            with Peer(broker) as peer:
                assert [beat(peer, ids, name) for name in MEMBERS] == [WireError.NONE] * len(MEMBERS)
                assert [sync(peer, ids, name, [])[1] for name in MEMBERS] == [name.encode() for name in MEMBERS]
                join(peer, "static")
                reported = peer.heard(Api.JOIN_GROUP, 9)
                assert (reported.error, reported.generation_id) == (WireError.NONE, ids["static"][1])
                was, ids["static"] = ids, (reported.member_id, reported.generation_id)
                assert beat(peer, ids, "static") == WireError.NONE
                assert was["first"] == ids["first"]
        with Peer(broker) as peer:
            gone = schema.request(Api.LEAVE_GROUP).Members(member_id=ids["first"][0])
            peer.ask(Api.LEAVE_GROUP, 5, group_id="g", members=[gone])
        broker.kill()
        broker.start()
        with Peer(broker) as peer:
            assert beat(peer, ids, "second") == WireError.UNKNOWN_MEMBER_ID, (
                "the remaining member rejoins and waits for no other"
            )
    finally:
        broker.kill()
