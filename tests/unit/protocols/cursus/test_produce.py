"""Batches and PUBLISH: stored records and responses."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from polywire.broker.settings import BrokerSettings
from polywire.broker.topics import Partition
from polywire.log.base import Read
from polywire.records.columns import Event, Record
from polywire.records.rows import to_records
from tests.unit.protocols.cursus.dialogue import World


def s16(text: str) -> bytes:
    return struct.pack(">H", len(text.encode())) + text.encode()


def batch(topic: str, partition: int, messages: list[dict[str, Any]], *, acks: str = "1", idempotent: int = 0) -> bytes:
    """Return a batch in the modern layout."""
    out = bytearray(
        b"\xba\x7c" + s16(topic) + struct.pack(">iB", partition, len(acks)) + acks.encode() + bytes([idempotent])
    )
    first, last = (messages[0]["seq"], messages[-1]["seq"]) if messages else (0, 0)
    out += struct.pack(">QQi", first, last, len(messages))
    for message in messages:
        value = message["payload"]
        out += struct.pack(">QQ", 0, message["seq"]) + s16(message.get("pid", "")) + s16(message.get("key", ""))
        out += struct.pack(">qI", message.get("epoch", 0), len(value)) + value + s16(message.get("type", ""))
        out += struct.pack(">IQ", message.get("schema", 0), message.get("version", 0)) + s16(message.get("meta", ""))
    return bytes(out)


def messages(*sequences: int, pid: str = "p", epoch: int = 0) -> list[dict[str, Any]]:
    return [{"seq": n, "pid": pid, "epoch": epoch, "payload": b"v%d" % n} for n in sequences]


def stored(world: World, topic: str, partition: int = 0) -> list[Record]:
    """Return all records of a partition."""
    place: Partition = world.memory.broker.topic(topic).partitions[partition]
    records: list[Record] = []
    while len(records) < place.log.next_offset:
        read = world.memory.broker.fetch(place, len(records), bytes_max=1 << 20, then=lambda _: None)
        assert isinstance(read, Read)
        for chunk in read.chunks:
            at = 0
            while at < len(chunk):
                records += to_records(chunk, at)
                at += int.from_bytes(chunk[at + 4 : at + 8], "little")
        read.pin.release()
    return records


def started(settings: str = "partitions=2") -> tuple[World, Any]:
    world = World()
    peer = world.connect()
    assert peer.ask(f"CREATE topic=orders {settings}").startswith("OK")
    return world, peer


def test_a_batch_is_stored_with_all_its_fields() -> None:
    world, peer = started()
    sent = [
        {"seq": 1, "pid": "py-1", "key": "k1", "epoch": 7, "payload": b"hello"},
        {
            "seq": 2,
            "pid": "py-1",
            "epoch": 7,
            "payload": "h\u00e9".encode(),
            "type": "Paid",
            "schema": 2,
            "version": 7,
            "meta": "{}",
        },
    ]
    answer = peer.ask(batch("orders", 1, sent, acks="-1"))
    assert answer == (
        '{"status":"OK","last_offset":1,"producer_epoch":7,"producer_id":"py-1","seq_start":1,"seq_end":2,"leader":"127.0.0.1:9000","error":""}'
    )
    first, second = stored(world, "orders", 1)
    assert (first.key, first.value, first.sequence, first.event) == (b"k1", b"hello", 1, None)
    assert second.event == Event("Paid", 2, 7, b"{}")
    assert second.key is None


def test_every_level_is_acknowledged_with_all_keys() -> None:
    _, peer = started()
    for number, acks in enumerate(("", "0", "1", "-1", "all", "ALL")):
        answer = json.loads(peer.ask(batch("orders", 0, messages(1), acks=acks)))
        assert answer["status"] == "OK"
        assert answer["last_offset"] == number
        assert len(answer) == 8


def test_the_sequence_range_of_a_batch_header_is_ignored() -> None:
    """cursus-java writes a wrong range; the sequences of the messages are checked and acknowledged."""
    world, peer = started()
    sent = bytearray(batch("orders", 0, messages(3, 4, 9)))
    at = 2 + 2 + len("orders") + 4 + 2 + 1
    assert struct.unpack_from(">QQi", sent, at) == (3, 9, 3)
    struct.pack_into(">QQ", sent, at, 7, 9_999)
    answer = json.loads(peer.ask(bytes(sent)))
    assert (answer["status"], answer["seq_start"], answer["seq_end"]) == ("OK", 3, 9)
    assert [record.sequence for record in stored(world, "orders")] == [3, 4, 9]


def test_an_empty_command_is_an_error() -> None:
    world, peer = started()
    for empty in (b"", b" \0\r\n"):
        assert peer.ask(empty, "admin") == "ERROR: empty command"
        assert peer.ask(empty, "orders") == "ERROR: empty command"
    assert peer.ask(b"", "") == "ERROR: empty command"
    modern = peer.beside()
    assert modern.ask(b"", "") == "ERROR: empty command"
    modern.ask("PROTOCOL_INFO")
    assert modern.ask(b"", "") == "ERROR: malformed_input reason=missing_topic_or_payload"
    assert stored(world, "orders") == []


def test_batches_are_refused_in_the_reference_order() -> None:
    world, peer = started()
    assert peer.ask(batch("__consumer_offsets", 0, messages(1), acks="5")).endswith("topic=__consumer_offsets")
    assert peer.ask(batch("orders", 0, messages(1), acks="5")) == "ERROR: invalid_acks value=5"
    assert peer.ask(batch("orders", 7, messages(1))) == "ERROR: partition_not_found partition=7"
    assert peer.ask(batch("orders", 0, [])) == 'ERROR: broker_error reason="empty batch messages"'
    cut = batch("orders", 0, messages(1, 2))[:-1]
    reason = "failed to read message[1] metadata length: unexpected EOF"
    assert peer.ask(cut) == f'ERROR: batch_decode_failed reason="{reason}"'
    assert peer.say(batch("nope", 0, messages(1))) == []
    world.memory.advance(0.6)
    assert peer.take_bodies() == [b"ERROR: topic_not_found topic=nope"]


def test_a_topic_that_is_being_created_is_waited_for() -> None:
    world, peer = started()
    assert peer.say(batch("soon", 0, messages(1))) == []
    world.memory.advance(0.1)
    assert world.connect().ask("CREATE topic=soon").startswith("OK")
    world.memory.advance(0.1)
    assert json.loads(peer.take_bodies()[0])["status"] == "OK"


def test_idempotent_producers_by_flag_or_by_topic() -> None:
    for settings, flag in (("partitions=1 idempotent=true", 0), ("partitions=1", 1)):
        world, peer = started(settings)

        def put(*sequences: int, epoch: int = 1, peer: Any = peer, flag: int = flag) -> Any:
            return json.loads(peer.ask(batch("orders", 0, messages(*sequences, epoch=epoch), idempotent=flag)))

        assert put(2)["error"] == "idempotency error: first message for producer p must have seqNum 1, got 2"
        assert put(1, 2, 3)["last_offset"] == 2
        assert put(1, 2, 3) == put(1, 2, 3)
        assert put(3, 4)["last_offset"] == 3
        assert put(6)["error"] == "idempotency gap for producer p: expected 5, got 6"
        assert put(5, epoch=0)["error"] == "stale_producer_epoch producer=p current=1 got=0"
        assert put(2, epoch=2)["error"].endswith("producer p must have seqNum 1, got 2")
        assert put(1, epoch=2)["last_offset"] == 4
        assert [record.value for record in stored(world, "orders")] == [b"v1", b"v2", b"v3", b"v4", b"v1"]


def test_sequences_are_checked_only_on_request() -> None:
    world, peer = started()
    for sequences in ((5, 6), (5, 6), (1, 9)):
        assert json.loads(peer.ask(batch("orders", 0, messages(*sequences, epoch=3))))["status"] == "OK"
    assert [record.sequence for record in stored(world, "orders")] == [5, 6, 5, 6, 1, 9]


def test_a_batch_of_several_producers_is_stored_in_order() -> None:
    world, peer = started()
    mixed = messages(1, 2, pid="a") + messages(1, pid="b") + messages(3, pid="a")
    assert json.loads(peer.ask(batch("orders", 0, mixed)))["last_offset"] == 3
    assert [record.value for record in stored(world, "orders")] == [b"v1", b"v2", b"v1", b"v3"]
    many = [message for n in range(1, 400) for message in messages(n, pid=f"p{n}")]
    assert json.loads(peer.ask(batch("orders", 1, many)))["last_offset"] == 398


def test_a_run_without_events_beside_one_with_events() -> None:
    world, peer = started()
    event = {"seq": 1, "pid": "a", "payload": b"e", "type": "Paid", "schema": 1, "version": 1}
    assert json.loads(peer.ask(batch("orders", 0, [event, *messages(1, pid="b")])))["status"] == "OK"
    assert [record.event is None for record in stored(world, "orders")] == [False, True]


def test_publish_in_every_dialect() -> None:
    world, peer = started("partitions=1")
    answer = peer.ask("PUBLISH topic=orders producerId=p1 partition=0 message=hello world")
    assert answer == (
        '{"status":"OK","last_offset":0,"producer_epoch":0,"producer_id":"p1","seq_start":0,"seq_end":0,'
        '"leader":"127.0.0.1:9000","error":""}'
    )
    assert peer.ask("PUBLISH topic=orders producerId=p1 acks=0 message= a topic=b ") == "OK"
    assert peer.ask('PUBLISH orders {"a": 1}', "admin") == "\U0001f4e4 Published to 'orders'"
    assert peer.ask("hello direct", "orders") == "OK"
    assert [record.value for record in stored(world, "orders")] == [
        b"hello world",
        b"a topic=b",
        b'{"a": 1}',
        b"hello direct",
    ]
    assert peer.ask("CRAETE x", "admin") == "ERROR: unknown command: CRAETE"


def test_pipelined_batches_are_acknowledged_in_order() -> None:
    _, peer = started("partitions=1")
    from polywire.protocols.cursus.messages import frame

    peer.feed(
        b"".join(frame(batch("orders", 0, messages(n), acks=acks)) for n, acks in enumerate(("all", "0", "1"), 1))
    )
    peer.feed(frame(b"LIST_OFFSETS topic=orders"))
    peer.pass_by()
    *acked, offsets = peer.take_bodies()
    assert [json.loads(body)["last_offset"] for body in acked] == [0, 1, 2]
    assert offsets == b"OK topic=orders partitions=1 offsets=P0:earliest=0:latest=3:leo=3:hwm=3"


def test_a_batch_is_stored_as_one_even_with_small_journal_files() -> None:
    world = World(broker=BrokerSettings(batch_bytes_max=16 * 1024, record_bytes_max=8000))
    peer = world.connect()
    assert peer.ask("CREATE topic=orders partitions=1").startswith("OK")
    appended = world.memory.broker.appended
    peer.ask(batch("orders", 0, [{"seq": n + 1, "pid": "p", "payload": b"." * 4000} for n in range(3)]))
    assert world.memory.broker.appended == appended + 1


@pytest.mark.parametrize("size", [1, 300, 20_000])
def test_a_batch_larger_than_a_stored_one_becomes_several(size: int) -> None:
    limit = 200 * 1024
    world = World(broker=BrokerSettings(batch_bytes_max=limit, record_bytes_max=100_000))
    peer = world.connect()
    assert peer.ask("CREATE topic=orders partitions=1").startswith("OK")
    count = 3 * limit // (size + 48)
    sent = [{"seq": n + 1, "pid": "p", "payload": b"%d" % (n % 10) * size} for n in range(count)]
    assert json.loads(peer.ask(batch("orders", 0, sent)))["last_offset"] == count - 1
    assert [record.value for record in stored(world, "orders")] == [message["payload"] for message in sent]
