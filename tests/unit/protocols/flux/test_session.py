"""The FLUX session: response order, waiting, framing limits, restarts."""

from __future__ import annotations

from typing import Any

import pytest

from polywire.broker.settings import BrokerSettings
from polywire.errors import Busy, ErrorCode, Unavailable
from polywire.log.base import Completion, Read
from polywire.protocols.flux.context import FluxSettings
from polywire.protocols.flux.decoder import LINE_BYTES_MAX, RUN_RECORDS_MAX, RUN_TOPICS_MAX
from polywire.protocols.flux.session import LINE_END_S
from polywire.records.columns import Header, Record
from polywire.records.compression import Compression, compress_body
from polywire.records.rows import from_records, to_records
from polywire.types import Level
from tests.unit.protocols.flux.dialogue import Dialogue, World


def produced(count: int, *, topic: str = "t", key: str = "k") -> bytes:
    return b"".join(b"V1|%d|PRODUCE|%b %b:v%d\n" % (n, topic.encode(), key.encode(), n) for n in range(count))


def line(length: int) -> bytes:
    """Return a PRODUCE line of that many bytes without its ending."""
    head = b"V1|1|PRODUCE|t a:"
    return head + b"x" * (length - len(head))


def test_a_long_pipeline_is_answered_in_order() -> None:
    peer = World().connect()
    count = 3 * RUN_RECORDS_MAX + 5
    peer.feed(produced(count))
    peer.pass_by()
    answers = peer.take().decode().splitlines()
    assert answers == [f"V1|{n}|OK|partition=0 offset={n} hw={n}" for n in range(count)]


def test_many_topics_in_one_buffer_keep_the_response_order() -> None:
    peer = World().connect()
    topics = RUN_TOPICS_MAX + 3
    stream = b"".join(b"V1|%d|PRODUCE|t%d k%d:v\n" % (n, n % topics, n % 5) for n in range(500))
    peer.feed(stream)
    peer.pass_by()
    answers = peer.take().decode().splitlines()
    assert [answer.split("|")[1] for answer in answers] == [str(n) for n in range(500)]
    assert all("|OK|" in answer for answer in answers)


# ApiVersions as sent by librdkafka, and with a client id that contains a line end; Metadata 10, which is a line end
KAFKA_OPENINGS = (
    b"\x00\x00\x00\x25\x00\x12\x00\x03\x00\x00\x00\x01\x00\x07rdkafka\x00\x0blibrdkafka\x062.3.0\x00",
    b"\x00\x00\x00\x0d\x00\x12\x00\x00\x00\x00\x00\x01\x00\x03a\nb",
    b"\x00\x00\x00\x18\x00\x03\x00\n\x00\x00\x00\x01\x00\x08polywire\x00\x00\x00\x00\x00\x00",
)


@pytest.mark.parametrize("opening", KAFKA_OPENINGS)
def test_a_kafka_client_is_named_in_the_log_and_disconnected(opening: bytes) -> None:
    peer = World().connect()
    assert peer.exchange(opening[:6]) == b""
    assert peer.gave_up is None
    assert peer.exchange(opening[6:]) == b""
    assert peer.gave_up is not None
    assert peer.gave_up.message.startswith("a Kafka client connected to the FLUX port (use the Kafka listener")


def test_a_line_that_begins_with_nul_is_answered() -> None:
    peer = World().connect()
    assert peer.ask(b"\x00\x00\x00\x25\x00\x13\x00\x03").startswith("V1|0|ERR|BAD_REQUEST|")
    assert peer.gave_up is None


def test_bulk_and_single_lines_have_the_same_results() -> None:
    bulk, single = World().connect(), World().connect()
    stream = b"".join(b"V1|%d|PRODUCE|t%d key-%d:value-%d\n" % (n, n % 3, n % 17, n) for n in range(200))
    bulk.feed(stream)
    bulk.pass_by()
    answers = [single.ask(text) for text in stream.splitlines()]
    assert bulk.take().decode().splitlines() == answers
    for partition in range(3):
        question = f"V1|c|CONSUME|t1 {partition} 0"
        assert bulk.ask(question) == single.ask(question)


def test_keys_are_stored() -> None:
    world = World()
    world.connect().ask("V1|1|PRODUCE|t some-key:v")
    topic = world.memory.broker.topic("t")
    stored = [
        record
        for partition in topic.partitions
        if isinstance(read := partition.log.read(0, bytes_max=1000, then=lambda _: None), Read)
        for chunk in read.chunks
        for record in to_records(chunk)
    ]
    assert [(record.key, record.value) for record in stored] == [(b"some-key", b"v")]


@pytest.mark.parametrize(("ending", "content"), [(b"\n", LINE_BYTES_MAX - 1), (b"\r\n", LINE_BYTES_MAX - 2)])
def test_the_longest_line_is_accepted(ending: bytes, content: int) -> None:
    peer = World().connect()
    peer.feed(line(content) + ending)
    peer.pass_by()
    assert peer.take() == b"V1|1|OK|partition=1 offset=0 hw=0\n"
    assert not peer.closed


@pytest.mark.parametrize("stream", [line(LINE_BYTES_MAX) + b"\n", line(LINE_BYTES_MAX), b"x" * LINE_BYTES_MAX])
def test_a_longer_line_closes_after_earlier_requests_are_answered(stream: bytes) -> None:
    world = World()
    peer = world.connect()
    peer.feed(b"V1|0|PRODUCE|t a:first\n" + stream)
    peer.pass_by()
    reported = b"V1|0|ERR|BAD_REQUEST|a line has more than 65536 bytes\n"
    assert peer.take() == b"V1|0|OK|partition=1 offset=0 hw=0\n" + reported
    assert peer.closed == stream.endswith(b"\n"), "the end of the line is waited for"
    world.memory.advance(LINE_END_S)
    assert peer.closed


def test_a_line_without_ending_is_answered_at_the_end_of_the_stream() -> None:
    peer = World().connect()
    peer.feed(b"V1|1|PRODUCE|t a:1\nV1|2|CONSUME|t 1 0")
    peer.finish()
    assert peer.take() == b"V1|1|OK|partition=1 offset=0 hw=0\nV1|2|OK|messages=0:1 hw=0\n"
    assert peer.closed


def test_a_half_closed_client_gets_its_pending_response() -> None:
    world = World()
    peer = world.connect()
    peer.feed(b"V1|1|PRODUCE|t a:1 acks=all\n")
    peer.pass_by()
    peer.finish()
    assert not peer.closed
    world.memory.advance(2.1)
    assert peer.take() == b"V1|1|ERR|REPLICATION_TIMEOUT|acks=all timeout\n"
    assert peer.closed


@pytest.mark.parametrize("acks", ["", " acks=1", " acks=all"])
def test_a_bucket_outage_is_not_reported_as_a_missing_replica(monkeypatch: pytest.MonkeyPatch, acks: str) -> None:
    world = World()
    peer = world.connect()
    peer.ask("V1|1|PRODUCE|t a:1")
    broken = Unavailable(ErrorCode.REPLICATION_TIMEOUT, "the bucket accepted no writes for too long")

    def produce(*_: Any, done: Completion[int], **__: Any) -> None:
        done(broken)

    monkeypatch.setattr(type(world.memory.broker), "produce", produce)
    assert peer.ask(f"V1|2|PRODUCE|t a:2{acks}") == f"V1|2|ERR|REPLICATION_TIMEOUT|{broken.message}"


def test_acks_all_delays_this_connection_only() -> None:
    world = World()
    waiting, other = world.connect(), world.connect()
    waiting.feed(b"V1|1|PRODUCE|t a:1 acks=all\nV1|2|OFFSET|g t 0\n")
    waiting.pass_by()
    assert waiting.take() == b""
    assert other.ask("V1|3|PRODUCE|t a:2") == "V1|3|OK|partition=1 offset=1 hw=1"
    world.memory.advance(2.1)
    assert waiting.take() == b"V1|1|ERR|REPLICATION_TIMEOUT|acks=all timeout\nV1|2|OK|offset=0\n"
    assert other.ask("V1|4|CONSUME|t 1 0") == "V1|4|OK|messages=0:1,1:2 hw=1"


def test_a_waiting_client_that_disconnects_leaves_nothing_behind() -> None:
    world = World()
    peer = world.connect()
    peer.feed(b"V1|1|PRODUCE|t a:1 acks=all\n")
    peer.pass_by()
    peer.session.close()
    world.memory.advance(5)
    assert world.connect().ask("V1|1|REPLICA_FETCH|t 1 1 0").startswith("V1|1|OK|replica=1")
    assert peer.take() == b""


def test_synced_durability_keeps_reads_behind_writes() -> None:
    world = World(broker=BrokerSettings(durability=Level.SYNCED))
    peer = world.connect()
    peer.feed(b"V1|1|PRODUCE|t a:1\nV1|2|CONSUME|t 1 0\nV1|3|PRODUCE|t a:2\nV1|4|CONSUME|t 1 0\n")
    assert peer.take() == b""
    peer.pass_by()
    assert peer.take().decode().splitlines() == [
        "V1|1|OK|partition=1 offset=0 hw=0",
        "V1|2|OK|messages=0:1 hw=0",
        "V1|3|OK|partition=1 offset=1 hw=1",
        "V1|4|OK|messages=0:1,1:2 hw=1",
    ]


class Crowded:
    """Makes a broker refuse records for lack of capacity a given number of times."""

    def __init__(self, world: World, times: int) -> None:
        self.times = times
        self._append = world.memory.log.append
        world.memory.broker._append = self.append

    def append(self, *args: object, **options: object) -> None:
        if self.times:
            self.times -= 1
            raise Busy(ErrorCode.BUSY, "no room", retry_after_ms=5)
        self._append(*args, **options)  # type: ignore[arg-type]


def test_records_wait_for_capacity_in_the_log_and_keep_their_order() -> None:
    world = World()
    Crowded(world, 5)
    peer = world.connect()
    peer.feed(produced(3) + b"V1|c|CONSUME|t 0 0\n")
    assert peer.session.paused()
    world.memory.advance(1)
    assert peer.take().decode().splitlines() == [
        *[f"V1|{n}|OK|partition=0 offset={n} hw={n}" for n in range(3)],
        "V1|c|OK|messages=0:v0,1:v1,2:v2 hw=2",
    ]


def test_records_without_capacity_in_time_are_refused() -> None:
    world = World()
    crowded = Crowded(world, 10**9)
    peer = world.connect()
    peer.feed(produced(2) + b"V1|x|PRODUCE|t a:3\n")
    world.memory.advance(10)
    answers = peer.take().decode().splitlines()
    assert [answer.split("|")[2:4] for answer in answers] == [["ERR", "BAD_REQUEST"]] * 3
    crowded.times = 0
    assert peer.ask("V1|y|PRODUCE|t a:4") == "V1|y|OK|partition=1 offset=0 hw=0"


def test_a_full_disk_is_reported_at_once() -> None:
    world = World()
    peer = world.connect()
    peer.ask("V1|1|PRODUCE|t a:1")
    world.memory.log.disk_full = True
    assert peer.ask("V1|2|PRODUCE|t a:2").startswith("V1|2|ERR|BAD_REQUEST|")
    assert peer.ask("V1|3|CONSUME|t 1 0") == "V1|3|OK|messages=0:1 hw=0"


def restarted(world: World) -> Dialogue:
    world.restart()
    return world.connect()


def test_everything_survives_a_restart() -> None:
    world = World()
    peer = world.connect()
    for request in (
        "V1|1|ADMIN_CREATE_TOPIC|six 6 2",
        "V1|2|PRODUCE|six order-1:a",
        "V1|3|JOIN|g six w",
        "V1|4|COMMIT|g six w 2 1 1",
        "V1|5|ADMIN_REGISTER_BROKER|7 h 1",
        "V1|6|ADMIN_FENCE_BROKER|7",
        "V1|7|SET_PARTITION_ROLE|six 2 follower",
        "V1|8|ADMIN_SET_PARTITION_LEADER|six 3 7 7",
    ):
        assert "|OK|" in peer.ask(request)
    index = int(peer.ask("V1|9|ADMIN_BROKER_HEARTBEAT|0").rpartition("=")[2])
    peer = restarted(world)
    assert peer.ask("V1|1|ADMIN_GET_METADATA|") == "V1|1|OK|topics=[six] brokers=[0 7] fenced=[7]"
    assert peer.ask("V1|2|CONSUME|six 1 0") == "V1|2|OK|messages=0:a hw=0"
    assert peer.ask("V1|3|OFFSET|g six 1") == "V1|3|OK|offset=1"
    assert peer.ask("V1|4|HEARTBEAT|g six w 2") == "V1|4|OK|heartbeat=ok"
    assert "NOT_LEADER" in peer.ask("V1|5|PRODUCE|six host-a:x")
    assert "NOT_LEADER" in peer.ask("V1|6|BROKER_FETCH|six 2 1 0")
    assert int(peer.ask("V1|7|ADMIN_BROKER_HEARTBEAT|0").rpartition("=")[2]) == index + 1


def test_state_of_a_deleted_topic_is_not_restored() -> None:
    world = World()
    peer = world.connect()
    peer.ask("V1|1|SET_PARTITION_ROLE|t 1 follower")
    assert "NOT_LEADER" in peer.ask("V1|2|PRODUCE|t a:x")
    world.memory.broker.delete_topic(world.memory.broker.topic("t"))
    assert peer.ask("V1|3|PRODUCE|t a:x") == "V1|3|OK|partition=1 offset=0 hw=0"
    assert restarted(world).ask("V1|4|PRODUCE|t a:x") == "V1|4|OK|partition=1 offset=1 hw=1"


def test_hw_never_falls_while_leader() -> None:
    world = World(flux=FluxSettings(lag_max=10))
    peer = world.connect()
    for n in range(5):
        assert peer.ask(f"V1|1|PRODUCE|t a:{n}").endswith(f"hw={n}")
    assert "hw=4 isr=[0 1]" in peer.ask("V1|2|REPLICA_FETCH|t 1 1 1")
    assert peer.ask("V1|3|PRODUCE|t a:x") == "V1|3|OK|partition=1 offset=5 hw=4"
    assert peer.ask("V1|4|CONSUME|t 1 4") == "V1|4|OK|messages=4:4 hw=4"
    peer.feed(b"V1|5|PRODUCE|t a:y\nV1|6|PRODUCE|t a:z\n")
    peer.pass_by()
    assert peer.take() == b"V1|5|OK|partition=1 offset=6 hw=4\nV1|6|OK|partition=1 offset=7 hw=4\n"
    assert "hw=7" in peer.ask("V1|7|REPLICA_FETCH|t 1 1 7")


def test_a_follower_without_heartbeats_is_removed() -> None:
    world = World()
    peer = world.connect()
    peer.ask("V1|1|PRODUCE|t a:0")
    assert "isr=[0 1]" in peer.ask("V1|2|REPLICA_FETCH|t 1 1 0")
    world.memory.advance(10.5)
    assert "isr=[0 2]" in peer.ask("V1|3|REPLICA_FETCH|t 1 2 0")


def test_strict_leaders_leave_a_created_topic_unwritable() -> None:
    peer = World(flux=FluxSettings(strict_leaders=True)).connect()
    peer.ask("V1|1|ADMIN_CREATE_TOPIC|audit 4 2")
    assert "NOT_LEADER" in peer.ask("V1|2|PRODUCE|audit a:x")
    assert peer.ask("V1|3|ADMIN_ELECT_TOPIC_LEADERS|audit") == "V1|3|OK|topic=audit elected_changes=4"
    assert "OK" in peer.ask("V1|4|PRODUCE|audit a:x")


def test_admin_commands_can_be_switched_off() -> None:
    peer = World(flux=FluxSettings(admin=False)).connect()
    assert peer.ask("V1|1|ADMIN_GET_METADATA|") == "V1|1|ERR|UNKNOWN_COMMAND|unsupported command"
    assert peer.ask("V1|2|SET_PARTITION_ROLE|t 0 leader") == "V1|2|ERR|UNKNOWN_COMMAND|unsupported command"
    assert "OK" in peer.ask("V1|3|PRODUCE|t a:x")


def test_partitions_of_new_topics_are_spread_over_the_known_brokers() -> None:
    peer = World().connect()
    peer.ask("V1|1|ADMIN_REGISTER_BROKER|1 h 1")
    assert "NOT_LEADER" in peer.ask("V1|2|PRODUCE|t a:x")
    assert "OK" in peer.ask("V1|3|PRODUCE|t host-a:x")


AWKWARD = [
    (b"two words", b"two words"),
    (b"a\nb", b"a%0Ab"),
    (b"100%\r", b"100%25%0D"),
    (b"50% off", b"50% off"),
    (b"x hw=3", b"x%20hw=3"),
    (b"\xff", b"%FF"),
    (b"\x00\x1f\x7f", b"%00%1F%7F"),
    ("日本 語".encode(), "日本 語".encode()),
    (b"\xed\xa0\x80", b"%ED%A0%80"),
    (b"\xe6\x97", b"%E6%97"),
    (b"", b""),
    (None, b""),
    (b"a,1:b", b"a,1:b"),
]


@pytest.mark.parametrize(("value", "shown"), AWKWARD)
def test_values_of_other_protocols_are_escaped_in_lines(value: bytes | None, shown: bytes) -> None:
    world = World()
    peer = world.connect()
    topic = world.memory.broker.ensure_topic("t")
    record = Record(value, key=b"k", headers=(Header(b"h", b"x"),))
    world.memory.broker.produce(
        topic.partitions[0], from_records([record, Record(b"ok")]), level=Level.WRITTEN, done=None
    )
    world.memory.run()
    peer.feed(b"V1|1|CONSUME|t 0 0\n")
    peer.pass_by()
    assert peer.take() == b"V1|1|OK|messages=0:" + shown + b",1:ok hw=1\n"


@pytest.mark.parametrize("kind", [Compression.LZ4, Compression.ZSTD])
def test_compressed_batches_between_others_are_read(kind: Compression) -> None:
    world = World()
    peer = world.connect()
    topic = world.memory.broker.ensure_topic("t")
    plain = [Record(b"%d" % n) for n in range(3)]
    packed = compress_body(from_records([Record(b"packed" * 100) for _ in range(3)]), kind)
    for batch in (from_records(plain), packed, from_records(plain)):
        world.memory.broker.produce(topic.partitions[0], batch, level=Level.WRITTEN, done=None)
    world.memory.run()
    middle = ",".join(f"{n}:{'packed' * 100}" for n in (4, 5))
    assert peer.ask("V1|1|CONSUME|t 0 4") == f"V1|1|OK|messages={middle},6:0,7:1,8:2 hw=8"
    assert peer.ask("V1|2|CONSUME|t 0 7") == "V1|2|OK|messages=7:1,8:2 hw=8"


def test_limited_replies_have_at_least_one_record() -> None:
    world = World(flux=FluxSettings(reply_bytes_max=1000))
    peer = world.connect()
    for value in ("x" * 3000, "y" * 400, "z" * 400, "w" * 400):
        peer.ask(f"V1|1|PRODUCE|t a:{value}")
    assert peer.ask("V1|2|CONSUME|t 1 0 max=1") == f"V1|2|OK|messages=0:{'x' * 3000} hw=3"
    assert peer.ask("V1|3|CONSUME|t 1 1 max=5000") == f"V1|3|OK|messages=1:{'y' * 400},2:{'z' * 400} hw=3"
    assert (
        peer.ask("V1|4|BROKER_FETCH|t 1 1 0") == f"V1|4|OK|topic=t partition=1 follower=1 hw=3 records=0:{'x' * 3000}"
    )


def test_reading_below_the_first_offset_starts_at_the_first_record() -> None:
    world = World()
    peer = world.connect()
    for n in range(5):
        peer.ask(f"V1|1|PRODUCE|t a:{n}")
    world.memory.log.trim(world.memory.broker.topic("t").partitions[1].incarnation, 3)
    world.memory.run()
    assert peer.ask("V1|2|CONSUME|t 1 0") == "V1|2|OK|messages=3:3,4:4 hw=4"


def test_a_large_reply_is_sent_from_a_reusable_buffer() -> None:
    world = World()
    peer = world.connect()
    values = [b"%d" % n * 1000 for n in range(300)]
    peer.feed(b"".join(b"V1|%d|PRODUCE|t a:%b\n" % pair for pair in enumerate(values)))
    peer.pass_by()
    peer.take()
    peer.feed(b"V1|c|CONSUME|t 1 0\n")
    peer.pass_by()
    expected = b",".join(b"%d:%b" % pair for pair in enumerate(values))
    assert peer.take() == b"V1|c|OK|messages=" + expected + b" hw=299\n"
    assert peer.ask("V1|d|CONSUME|t 1 299") == f"V1|d|OK|messages=299:{'299' * 1000} hw=299"
