"""Edge cases of requests: trailing bytes, unused ids, groups of topics that grew."""

from __future__ import annotations

import pytest

from polywire.broker.settings import TopicSettings
from polywire.protocols.iggy import client_codec
from polywire.protocols.iggy.client_codec import ident as name_ident
from polywire.protocols.iggy.client_codec import name
from polywire.protocols.iggy.messages import U32, Code
from polywire.types import Assignor, TopicName
from tests.unit.protocols.iggy.dialogue import Dialogue
from tests.unit.protocols.iggy.test_documented import TOPIC, create_stream, create_topic, own_id, owned, peer
from tests.vectors.iggy.test_today import registered

__all__ = ["peer"]

EMPTY = (
    Code.PING,
    Code.GET_STATS,
    Code.GET_ME,
    Code.GET_CLIENTS,
    Code.GET_STREAMS,
    Code.GET_USERS,
    Code.GET_TOKENS,
    Code.LOGOUT,
)
FLAGS = bytes(10)


@pytest.mark.parametrize("code", EMPTY)
def test_bytes_after_a_command_without_payload_are_refused(peer: Dialogue, code: int) -> None:
    assert peer.classic(code, b"\0") == (3, b"")
    assert peer.classic(Code.PING) == (0, b"")


@pytest.mark.parametrize("code", EMPTY[1:])
def test_trailing_bytes_are_ignored_in_the_headered_framing(code: int) -> None:
    assert registered().headered(2, b"\0", code=code)[0] == 0


@pytest.mark.parametrize("number", [2**32 - 1, 2**32 - 16, 2**32 - 31])
def test_the_highest_ids_are_unused_by_streams_but_not_by_topics_and_groups(peer: Dialogue, number: int) -> None:
    assert create_stream(peer, number, "high") == 1014
    assert len(client_codec.read_streams(peer.classic(Code.GET_STREAMS)[1])) == 1
    assert create_topic(peer, number, "high") == 0
    assert create_topic(peer, number, "higher") == 2012
    assert peer.classic(Code.CREATE_GROUP, TOPIC + U32.pack(number))[0] == 0
    assert peer.classic(Code.GET_GROUP, TOPIC + U32.pack(number))[1][:4] == U32.pack(number)
    high = TOPIC[:6] + name_ident(number)
    assert peer.classic(Code.GET_TOPIC, high)[1][:4] == U32.pack(number)
    peer.world.restart()
    again = Dialogue(peer.world)
    assert again.classic(Code.GET_TOPIC, high)[1][:4] == U32.pack(number)
    assert again.classic(Code.GET_GROUP, TOPIC + U32.pack(number))[1][:4] == U32.pack(number)


def test_a_group_shows_the_current_partitions_of_its_topic(peer: Dialogue) -> None:
    five = TOPIC + U32.pack(5)
    assert peer.classic(Code.CREATE_GROUP, five)[0] == 0
    assert peer.classic(Code.JOIN_GROUP, five)[0] == 0
    assert owned(peer) == {own_id(peer): (1, 2, 3)}
    assert peer.classic(Code.CREATE_PARTITIONS, TOPIC + U32.pack(2))[0] == 0
    assert owned(peer) == {own_id(peer): (1, 2, 3, 4, 5)}
    assert U32.unpack_from(peer.classic(Code.GET_GROUP, five)[1], 4) == (5,)
    groups = peer.world.memory.broker.groups
    seen = groups.view("group-5", "s.t")
    assert seen is not None
    joined = groups.join("group-5", "s.t", f"iggy-{own_id(peer)}", wire="iggy", assignor=Assignor.ROUND_ROBIN)
    assert (seen.generation, seen.partition_count) == (joined.generation, 5), (
        "the group shows what members are assigned"
    )


def permissions(streams: bytes) -> bytes:
    body = FLAGS + streams
    return b"\1" + U32.pack(len(body)) + body


def test_permissions_on_missing_streams_and_topics_are_dropped() -> None:
    peer = registered()
    assert peer.headered(128, name("s"), number=1)[0] == 0
    missing_topic = U32.pack(0) + b"\1\1\0\0\0\0" + b"\1" + U32.pack(7) + b"\1\0\0\0" + b"\0"
    missing_stream = U32.pack(9) + bytes(6) + b"\0"
    given = permissions(b"\1" + missing_topic + b"\1" + missing_stream + b"\0")
    kept = permissions(b"\1" + U32.pack(0) + b"\1\1\0\0\0\0" + b"\0" + b"\0")
    status, made = peer.headered(141, name("ada") + name("secret") + b"\1" + given, number=2)
    assert status == 0
    assert made.endswith(kept)
    user = b"\1\4" + made[4:8]
    assert peer.headered(145, user + permissions(b"\1" + missing_stream + b"\0"), number=3) == (0, bytes(4))
    assert peer.headered(2, user, code=Code.GET_USER)[1].endswith(permissions(b"\0"))


def test_an_update_of_the_current_dialect_preserves_unnamed_settings() -> None:
    peer = registered()
    broker = peer.world.memory.broker
    broker.create_topic(TopicName("s", "t"), 1, TopicSettings(replication_factor=3, retention_age_us=5_000_000))
    peer.pass_by()
    assert peer.headered(133, name_ident("s") + name_ident("t") + name("u"), number=1) == (0, bytes(4))
    settings = broker.topic("s.t").settings
    assert (settings.replication_factor, settings.retention_age_us) == (3, 5_000_000)
    unlimited = b"\2\x0e\0\0\0max_topic_size\2\x09\0\0\0unlimited"
    limited = b"\2\x0e\0\0\0max_topic_size\2\4\0\0\0" + b"1000"
    place = name_ident("s") + name_ident("u") + name("u")
    for number, (options, size) in enumerate([(limited, 1000), (b"", 1000), (unlimited, None)], 2):
        assert peer.headered(133, place + options, number=number) == (0, bytes(4))
        assert broker.topic("s.t").settings.retention_bytes == size
