"""The positional dialect: responses use the layout of its page, and only frames that the page knows."""

from __future__ import annotations

from polywire.protocols.cursus.messages import enveloped
from tests.unit.protocols.cursus.dialogue import Dialogue, World
from tests.unit.protocols.cursus.test_produce import batch, messages

OPENING = b"\xba\x7c\x00\x02c1\x00\x011\x00\x011\x00"  # topic c1, partition and acks as texts, not idempotent


def message(offset: int) -> bytes:
    """Return a message of ``filled`` in the layout of the page."""
    head = offset.to_bytes(8, "big") + (offset + 1).to_bytes(8, "big") + b"\0\x01p" + b"\0\0" + bytes(8)
    return head + b"\0\0\0\x02v%d" % (offset + 1) + b"\0\0" + bytes(12) + b"\0\0"


def pushed(*offsets: int) -> bytes:
    """Return a batch of the page with these messages of ``filled``."""
    first, last = offsets[0] + 1, offsets[-1] + 1
    sequences = first.to_bytes(8, "big") + last.to_bytes(8, "big") + len(offsets).to_bytes(4, "big")
    return OPENING + sequences + b"".join(map(message, offsets))


def filled(count: int) -> tuple[World, Dialogue]:
    world = World()
    peer = world.connect()
    peer.ask("CREATE c1 2")
    if count:
        peer.ask(batch("c1", 1, messages(*range(1, count + 1))))
    return world, peer


def test_consume_responds_in_the_layout_of_the_page() -> None:
    _, peer = filled(3)
    assert peer.say(b"CONSUME c1 1 1") == [pushed(1, 2)]
    assert peer.say(b"CONSUME c1 1 3") == [OPENING + bytes(20)]
    assert peer.say(enveloped("", b"CONSUME c1 1 0")) == [b"v1", b"v2", b"v3"], "envelopes belong to the older dialect"


def test_a_partition_of_two_digits_is_written_with_two() -> None:
    peer = World().connect()
    peer.ask("CREATE c1 12")
    assert peer.say(b"CONSUME c1 11 0") == [b"\xba\x7c\x00\x02c1\x00\x0211\x00\x011\x00" + bytes(20)]


def test_a_stream_sends_batches_only() -> None:
    world, peer = filled(2)
    assert peer.say(b"STREAM c1 1 1") == [pushed(1)]
    world.memory.advance(3600)
    assert peer.take_bodies() == []
    assert not peer.closed
    world.connect().ask(batch("c1", 1, messages(3)))
    peer.pass_by()
    assert peer.take_bodies() == [pushed(2)]


def test_a_stream_ends_with_an_error_and_the_connection_stays_open() -> None:
    world, peer = filled(1)
    assert peer.say(b"STREAM c1 1 0") == [pushed(0)]
    world.connect().ask("DELETE c1")
    peer.pass_by()
    assert peer.take_bodies() == [b"ERROR: topic_not_found topic=c1"]
    assert peer.ask("LIST") == "OK count=0 topics="


def test_a_stream_whose_next_message_was_removed_ends_with_the_bounds() -> None:
    world, peer = filled(2)
    broker = world.memory.broker
    broker.purge_topic(broker.topic("c1"))
    peer.ask(batch("c1", 1, messages(3)))
    for command in ("STREAM", "CONSUME"):
        assert peer.ask(f"{command} c1 1 0") == "ERROR: OFFSET_OUT_OF_RANGE requested=0 earliest=2 latest=3"
    assert peer.say(b"STREAM c1 1 2") == [pushed(2)]


def test_the_modern_dialect_sees_one_topic_of_a_group_of_several() -> None:
    _, peer = filled(0)
    peer.ask("CREATE topic=c2 partitions=1")
    for topic in ("c1", "c2", "c2"):
        assert peer.ask(f"SUBSCRIBE {topic} g") == f"OK group=g topic={topic} registered=true"
    member = peer.ask("JOIN_GROUP c2 g m").split()[2].removeprefix("member=")
    other = "topic_not_assigned_to_group expected=c1 actual=c2"
    assert peer.ask("JOIN_GROUP topic=c2 group=g member=n") == f"ERROR: {other}"
    assert peer.ask(f"HEARTBEAT c2 g m {member} 1").startswith("OK")
    assert peer.ask("JOIN_GROUP topic=c1 group=g member=n").startswith("OK generation=1 ")
    assert peer.ask(f"HEARTBEAT c2 g m {member} 1").startswith("OK")


def test_a_member_of_another_protocol_is_unknown() -> None:
    world, peer = filled(0)
    peer.ask("CREATE topic=c2 partitions=1")
    peer.ask("SUBSCRIBE c1 g")
    world.memory.broker.groups.join("g", "c2", "m", wire="flux")
    assert peer.ask("HEARTBEAT c2 g m m 1") == "ERROR: group_not_found group=g hint=REBALANCE_REQUIRED"
