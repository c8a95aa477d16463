"""The session: handshake, framing, request order, topics, produce, fetch."""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import count

import pytest

from polywire.broker.settings import TOPIC_RANGES, BrokerSettings, TableFormat
from polywire.errors import Conflict, ErrorCode, Invalid, Missing, PeerError
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import MAGIC, PREFIX, decode_answer, decode_prefix, encode_head
from polywire.protocols.polywire.factory import PolywireFactory
from polywire.protocols.polywire.messages import Head, Verb
from polywire.protocols.polywire.session import REQUESTS_MAX
from polywire.records.batch import read_header, walk
from polywire.testing.loop import SimulatedClock
from tests.unit.protocols.polywire.peer import CapturedOutput, Peer, batch_of


@pytest.fixture
def peer() -> Peer:
    return Peer()


def create(peer: Peer, name: str = "t", partition_count: int = 1) -> messages.TopicDescription:
    return peer.ask(Verb.CREATE_TOPIC, messages.CreateTopic(name, partition_count)).decode(messages.TopicDescription)


def test_the_handshake_returns_magic_and_limits(peer: Peer) -> None:
    assert peer.opening[:8] == b"\xf1PWIRE\x00\x01"
    prefix = decode_prefix(peer.opening, 8)
    assert (prefix.verb, prefix.correlation) == (Verb.HELLO, 0)
    limits = decode_answer(peer.opening[24:], messages.Limits)
    assert limits.answer_bytes_max == 4 << 20
    assert limits.stage_expiry_ms == 3_600_000


def test_another_version_is_sent_ours_and_closed(peer: Peer) -> None:
    output = CapturedOutput()
    session = PolywireFactory(peer.broker).open(output, lambda: None)
    with pytest.raises(PeerError) as caught:
        session.receive(memoryview(b"\xf1PWIRE\x00\x02"))
    assert caught.value.fatal
    assert bytes(output.written[:8]) == MAGIC


@pytest.mark.parametrize("opening", [b"GET / HT", b"\xf1PWIRF", b"\x00"])
def test_another_protocol_is_refused_and_not_detected(peer: Peer, opening: bytes) -> None:
    factory = PolywireFactory(peer.broker)
    assert factory.recognise(opening) is False
    with pytest.raises(PeerError):
        factory.open(CapturedOutput(), lambda: None).receive(memoryview(opening))


def test_the_protocol_is_detected_once_its_magic_is_complete(peer: Peer) -> None:
    factory = PolywireFactory(peer.broker)
    assert [factory.recognise(MAGIC[:size]) for size in (1, 5, 6, 8)] == [None, None, True, True]


def test_a_stream_split_at_every_byte_gets_the_same_responses() -> None:
    frames = b"".join(
        [
            encode_head(Verb.CREATE_TOPIC, 1, messages.CreateTopic("t", 1, level=1)),
            encode_head(Verb.PRODUCE, 2, messages.Produce("t", 0), payload_bytes=len(batch_of(b"a"))) + batch_of(b"a"),
            encode_head(Verb.FETCH, 3, messages.Fetch("t", 0, 0)),
            encode_head(Verb.PING, 4, Head()),
        ]
    )
    seen = set()
    for cut in range(len(frames)):
        peer = Peer()
        buffer = bytearray(frames[:cut])
        taken = peer.session.receive(memoryview(buffer))
        if cut - taken >= 16:
            assert peer.session.wanted() > cut - taken
        rest = bytearray(frames[taken:])
        assert peer.session.receive(memoryview(rest)) == len(rest)
        peer.loop.run_due()
        found = sorted(peer.frames(), key=lambda frame: frame.correlation)
        assert [frame.correlation for frame in found] == [1, 2, 3, 4]
        seen.add((found[1].head, read_header(found[2].payload).record_count, found[3].head))
    assert len(seen) == 1


@pytest.mark.parametrize(
    "prefix",
    [
        PREFIX.pack(4, Verb.PING, 0, 0, 1, 5),
        PREFIX.pack(4, Verb.PING, 0, 7, 1, 0),
        PREFIX.pack(4, Verb.PING, 4, 0, 1, 0),
        PREFIX.pack(0xFFFF_FFFF, Verb.PING, 0, 0, 1, 0),
        PREFIX.pack(2 << 20, Verb.BOUNDS, 0, 0, 1, 2 << 20),
    ],
)
def test_an_invalid_prefix_gets_an_error_and_closes(peer: Peer, prefix: bytes) -> None:
    with pytest.raises(PeerError) as caught:
        peer.session.receive(memoryview(prefix))
    assert caught.value.fatal
    assert peer.frames()[0].error.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("verb", "head"), [(99, b"\x90"), (Verb.FETCH, b"\x90"), (Verb.FETCH, b"\xc1"), (Verb.PRODUCE, b"")]
)
def test_an_unreadable_head_gets_an_error_and_the_connection_stays_open(peer: Peer, verb: int, head: bytes) -> None:
    frame = PREFIX.pack(len(head), verb, 0, 0, 7, len(head)) + head
    assert peer.session.receive(memoryview(frame)) == len(frame)
    [answer] = peer.frames()
    assert (answer.correlation, answer.error.code) == (7, ErrorCode.INVALID_REQUEST)
    assert isinstance(answer.error, Invalid)
    peer.ask(Verb.PING, Head()).decode(Head)


def test_a_fatal_error_of_a_request_closes_the_connection(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise PeerError("nothing behind this can be read", fatal=True)

    monkeypatch.setattr(type(peer.session.admission), "check", broken)
    with pytest.raises(PeerError):
        peer.session.receive(memoryview(PREFIX.pack(1, Verb.PING, 0, 0, 7, 1) + b"\x90"))


def test_topics_are_configured(peer: Peer) -> None:
    given: dict[str, messages.SettingValue] = {"retention_bytes": 5, "compaction": 1, "key_hash": "xxh32"}
    before = peer.ask(Verb.CREATE_TOPIC, messages.CreateTopic("orders", 1, settings=given))
    before_settings = before.decode(messages.TopicDescription).settings
    changed: dict[str, messages.SettingValue] = {"retention_bytes": None, "compression": "lz4"}
    peer.ask(Verb.CONFIGURE_TOPIC, messages.ConfigureTopic("orders", changed)).decode(Head)
    after = peer.ask(Verb.DESCRIBE, messages.Describe("orders")).decode(messages.TopicDescription).settings
    assert after == {**before_settings, **changed}
    for name, value in (("key_hash", "fnv32"), ("colour", "red"), ("compaction", "yes"), ("compression", "rar")):
        wrong = peer.ask(Verb.CONFIGURE_TOPIC, messages.ConfigureTopic("orders", {name: value}))
        assert wrong.error.code is ErrorCode.INVALID_REQUEST, name
    missing = peer.ask(Verb.CONFIGURE_TOPIC, messages.ConfigureTopic("none", {}))
    assert missing.error.code is ErrorCode.TOPIC_MISSING
    assert peer.ask(Verb.DESCRIBE, messages.Describe("orders")).decode(messages.TopicDescription).settings == after


def test_configuring_a_topic_preserves_options_of_other_protocols(peer: Peer) -> None:
    create(peer, "orders", 1)
    broker = peer.broker
    topic = broker.topic("orders")
    broker.configure_topic(topic, replace(topic.settings, idempotent=True, wire_options={"iggy": b"x"}))
    peer.ask(Verb.CONFIGURE_TOPIC, messages.ConfigureTopic("orders", {"compaction": 1})).decode(Head)
    now = topic.settings
    assert (now.idempotent, now.wire_options, now.compaction) == (True, {"iggy": b"x"}, True)


def test_topics_are_created_listed_described_grown_and_deleted(peer: Peer) -> None:
    made = create(peer, "orders", 2)
    assert (made.name, len(made.id), len(made.incarnations)) == ("orders", 16, 2)
    listed = peer.ask(Verb.TOPICS, messages.ListTopics()).decode(messages.TopicList)
    assert [(t.name, t.id, t.partition_count) for t in listed.topics] == [("orders", made.id, 2)]
    peer.ask(Verb.GROW_TOPIC, messages.GrowTopic("orders", 3)).decode(Head)
    grown = peer.ask(Verb.DESCRIBE, messages.Describe("orders")).decode(messages.TopicDescription)
    assert grown.incarnations[:2] == made.incarnations
    assert len(grown.incarnations) == 3
    peer.ask(Verb.DELETE_TOPIC, messages.DeleteTopic("orders")).decode(Head)
    assert peer.ask(Verb.DESCRIBE, messages.Describe("orders")).error.code is ErrorCode.TOPIC_MISSING


def test_settings_of_a_topic_are_stored_and_invalid_ones_named(peer: Peer) -> None:
    head = messages.CreateTopic("t", 1, settings={"retention_bytes": 5, "key_hash": "xxh32"})
    made = peer.ask(Verb.CREATE_TOPIC, head).decode(messages.TopicDescription)
    assert made.settings == {
        "compaction": 0,
        "compression": "none",
        "key_hash": "xxh32",
        "replication_factor": 1,
        "retention_age_us": None,
        "retention_bytes": 5,
        "table": None,
        "table_columns": "",
        "table_freshness_s": None,
        "table_history_hours": None,
    }
    wrong = peer.ask(Verb.CREATE_TOPIC, messages.CreateTopic("u", 1, settings={"retention": 5})).error
    assert wrong.message.startswith("no such topic setting")
    assert (
        peer.ask(Verb.CREATE_TOPIC, messages.CreateTopic("u", 1, settings={"key_hash": "md5"})).error.code
        is ErrorCode.INVALID_REQUEST
    )
    assert peer.ask(Verb.CREATE_TOPIC, messages.CreateTopic("t", 1)).error.code is ErrorCode.TOPIC_EXISTS


@pytest.mark.parametrize(
    ("own", "default", "url"),
    [
        (None, TableFormat.NONE, ""),
        ("none", TableFormat.DELTA, ""),
        (None, TableFormat.DELTA, "s3://bucket/tables/sales/orders"),
        ("delta,iceberg", TableFormat.NONE, "s3://bucket/tables/sales/orders"),
    ],
)
def test_a_topic_with_a_table_has_its_url(own: str | None, default: TableFormat, url: str) -> None:
    peer = Peer(BrokerSettings(table=default, tables_url="s3://bucket/tables"))
    head = messages.CreateTopic("sales.orders", 1, settings={"table": own})
    assert peer.ask(Verb.CREATE_TOPIC, head).decode(messages.TopicDescription).table == url
    found = peer.ask(Verb.DESCRIBE, messages.Describe("sales.orders")).decode(messages.TopicDescription)
    assert found.table == url


@pytest.mark.parametrize("name", TOPIC_RANGES)
def test_numbers_of_a_topic_have_a_range(peer: Peer, name: str) -> None:
    allowed = TOPIC_RANGES[name]
    create(peer, "there")
    for value in (allowed.start - 1, allowed.stop, 2**63 - 1):
        for verb, head in (
            (Verb.CREATE_TOPIC, messages.CreateTopic("new", 1, settings={name: value})),
            (Verb.CONFIGURE_TOPIC, messages.ConfigureTopic("there", {name: value})),
        ):
            refused = peer.ask(verb, head).error
            assert refused.code is ErrorCode.INVALID_REQUEST
            assert name in refused.message
    for value in (allowed.start, allowed.stop - 1):
        made = peer.ask(Verb.CREATE_TOPIC, messages.CreateTopic(f"of{value}", 1, settings={name: value}))
        assert made.decode(messages.TopicDescription).settings[name] == value


def test_batches_are_returned_verbatim_except_for_their_numbers(peer: Peer) -> None:
    create(peer)
    batches = [batch_of(b"one", b"two"), batch_of((b"k", None))]
    payload = b"".join(batches)
    produced = peer.ask(Verb.PRODUCE, messages.Produce("t", 0), payload).decode(messages.Produced)
    assert [(a.partition, a.base_offset, a.record_count) for a in produced.appended] == [(0, 0, 2), (0, 2, 1)]
    answer = peer.ask(Verb.FETCH, messages.Fetch("t", 0, 0))
    fetched = answer.decode(messages.Fetched)
    assert (fetched.next_offset, fetched.readable_offset) == (3, 3)
    places = walk(answer.payload)
    assert [read_header(answer.payload, at).base_offset for at in places] == [0, 2]
    assert answer.payload[places[1] + 104 :] == batches[1][104:]


def test_a_fetch_sees_records_produced_in_the_same_buffer(peer: Peer) -> None:
    create(peer)
    peer.send(Verb.PRODUCE, messages.Produce("t", 0), batch_of(b"x"))
    peer.send(Verb.FETCH, messages.Fetch("t", 0, 0))
    assert sorted(frame.verb for frame in peer.frames()) == [Verb.FETCH, Verb.PRODUCE]


def test_a_missing_topic_is_created_only_on_request(peer: Peer) -> None:
    assert peer.ask(Verb.PRODUCE, messages.Produce("new", 0), batch_of(b"x")).error.code is ErrorCode.TOPIC_MISSING
    peer.ask(Verb.PRODUCE, messages.Produce("new", 0, create=True), batch_of(b"x")).decode(messages.Produced)
    assert len(peer.ask(Verb.DESCRIBE, messages.Describe("new")).decode(messages.TopicDescription).incarnations) == 3


@pytest.mark.parametrize("place", [0, 5, 8, 100, 108, -9])
def test_damaged_batches_are_refused_before_anything_is_stored(peer: Peer, place: int) -> None:
    create(peer)
    damaged = batch_of(b"some value")
    damaged[place] ^= 0x40
    answer = peer.ask(Verb.PRODUCE, messages.Produce("t", 0), bytes(batch_of(b"good")) + damaged)
    assert answer.error.code is ErrorCode.INVALID_BATCH
    bounds = peer.ask(Verb.BOUNDS, messages.AskBounds(["t"])).decode(messages.BoundsList)
    assert bounds.topics[0].partitions[0].next_offset == 0


def test_requests_without_a_batch_or_with_a_wrong_partition_or_level_are_refused(peer: Peer) -> None:
    create(peer)
    assert peer.ask(Verb.PRODUCE, messages.Produce("t", 0)).error.code is ErrorCode.INVALID_BATCH
    assert peer.ask(Verb.PRODUCE, messages.Produce("t", 4), batch_of(b"x")).error.code is ErrorCode.PARTITION_MISSING
    assert (
        peer.ask(Verb.PRODUCE, messages.Produce("t", 0, level=4), batch_of(b"x")).error.code
        is ErrorCode.INVALID_REQUEST
    )


def test_records_with_keys_are_routed_and_the_response_has_the_partition(peer: Peer) -> None:
    create(peer, "t", 3)
    keys = [b"a", b"b", b"c", b"a", b"d", b"b", b"a"]
    batch = batch_of(*[(key, key + b"%d" % number) for number, key in enumerate(keys)])
    answer = peer.ask(Verb.PRODUCE, messages.Produce("t", -1), batch)
    produced = answer.decode(messages.Produced)
    chosen = struct.unpack(f"<{len(keys)}I", answer.payload)
    assert len(set(chosen)) > 1
    assert dict(zip(keys, chosen, strict=True)) == {key: _fnv1a_32(key) % 3 for key in keys}
    assert sum(a.record_count for a in produced.appended) == len(keys)
    for appended in produced.appended:
        fetched = peer.ask(Verb.FETCH, messages.Fetch("t", appended.partition, 0)).payload
        wanted = [key + b"%d" % n for n, key in enumerate(keys) if chosen[n] == appended.partition]
        assert b"".join(wanted) in fetched


def test_batches_without_keys_take_turns(peer: Peer) -> None:
    create(peer, "t", 3)
    places = [
        peer.ask(Verb.PRODUCE, messages.Produce("t", -1), batch_of(b"x"))
        .decode(messages.Produced)
        .appended[0]
        .partition
        for _ in range(6)
    ]
    assert sorted(places[:3]) == [0, 1, 2]
    assert places[:3] == places[3:]


def test_bounds_have_synced_offsets_and_offsets_of_times(peer: Peer) -> None:
    create(peer)
    peer.ask(Verb.PRODUCE, messages.Produce("t", 0), batch_of(b"a", b"b"))
    early = peer.loop.clock.now_us()
    peer.loop.advance(1.0)
    peer.ask(Verb.PRODUCE, messages.Produce("t", 0), batch_of(b"c"))
    head = messages.AskBounds(["t"], [early, early + 1, early + 10_000_000])
    [topic] = peer.ask(Verb.BOUNDS, head).decode(messages.BoundsList).topics
    [bounds] = topic.partitions
    assert (bounds.first_offset, bounds.next_offset, bounds.epoch) == (0, 3, 1)
    assert bounds.offsets == [0, 2, 3]
    assert peer.ask(Verb.BOUNDS, messages.AskBounds(["t", "gone"])).error.code is ErrorCode.TOPIC_MISSING
    too_many = peer.ask(Verb.BOUNDS, messages.AskBounds(["t"] * 1001)).error
    assert too_many.code is ErrorCode.INVALID_REQUEST


def test_bounds_are_limited_and_duplicate_names_count_once() -> None:
    peer = Peer(BrokerSettings(partitions_max=20_000))
    create(peer, "wide", 9000)
    again = peer.ask(Verb.BOUNDS, messages.AskBounds(["wide"] * 900)).decode(messages.BoundsList)
    assert [len(topic.partitions) for topic in again.topics] == [9000]
    error = peer.ask(Verb.BOUNDS, messages.AskBounds(["wide"], [0] * 16)).error
    assert "count=153000" in error.message


def test_another_incarnation_of_the_partition_is_a_conflict(peer: Peer) -> None:
    incarnation = create(peer).incarnations[0]
    peer.ask(Verb.PRODUCE, messages.Produce("t", 0), batch_of(b"a"))
    peer.ask(Verb.FETCH, messages.Fetch("t", 0, 0, incarnation=incarnation)).decode(messages.Fetched)
    peer.ask(Verb.DELETE_TOPIC, messages.DeleteTopic("t"))
    create(peer)
    error = peer.ask(Verb.FETCH, messages.Fetch("t", 0, 0, incarnation=incarnation)).error
    assert isinstance(error, Conflict)
    assert error.code is ErrorCode.TOPIC_REPLACED


def test_offsets_outside_the_partition_are_missing(peer: Peer) -> None:
    create(peer)
    peer.ask(Verb.PRODUCE, messages.Produce("t", 0), batch_of(b"a"))
    error = peer.ask(Verb.FETCH, messages.Fetch("t", 0, 2)).error
    assert isinstance(error, Missing)
    assert error.code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert peer.ask(Verb.FETCH, messages.Fetch("t", 0, 5, 2)).error.code is ErrorCode.INVALID_REQUEST
    assert peer.ask(Verb.FETCH, messages.Fetch("t", 0, 1)).payload == b""


def test_reading_pauses_above_the_limit_of_pending_responses(peer: Peer) -> None:
    create(peer)
    frame = encode_head(
        Verb.PRODUCE, 9, messages.Produce("t", 0, level=2), payload_bytes=len(batch_of(b"x"))
    ) + batch_of(b"x")
    data = bytearray(frame * (REQUESTS_MAX + 5))
    taken = peer.session.receive(memoryview(data))
    assert taken == len(frame) * REQUESTS_MAX
    assert peer.session.paused()
    peer.loop.run_due()
    assert peer.resumes == 1
    assert not peer.session.paused()
    assert peer.session.receive(memoryview(data)[taken:]) == 5 * len(frame)
    peer.loop.run_due()
    assert len(peer.frames()) == REQUESTS_MAX + 5


def test_reading_resumes_after_a_response_that_is_ready_at_once(peer: Peer) -> None:
    create(peer)
    peer.ask(Verb.PRODUCE, messages.Produce("t", 0), batch_of(b"a"))
    fetch = encode_head(Verb.FETCH, 8, messages.Fetch("t", 0, 0))
    batch = batch_of(b"x")
    stored = encode_head(Verb.PRODUCE, 9, messages.Produce("t", 0, level=2), payload_bytes=len(batch)) + batch
    requests = fetch + stored * (REQUESTS_MAX - 1)
    data = bytearray(requests + encode_head(Verb.PING, 10, Head()))
    assert peer.session.receive(memoryview(data)) == len(requests), "the limit of pending responses is reached"
    assert peer.session.paused(), "the rest is offered again only to a session that was paused"
    peer.loop.run_due()
    assert peer.resumes == 1
    assert peer.session.receive(memoryview(data)[len(requests) :]) == len(data) - len(requests)


def test_nothing_is_written_after_close(peer: Peer) -> None:
    create(peer)
    peer.send(Verb.PRODUCE, messages.Produce("t", 0, level=2), batch_of(b"x"))
    peer.send(Verb.FETCH, messages.Fetch("t", 0, 1, wait_ms=1000))
    peer.output.written.clear()
    peer.session.close()
    peer.loop.advance(5.0)
    assert not peer.output.written


def _fnv1a_32(data: bytes) -> int:
    digest = 0x811C9DC5
    for byte in data:
        digest = ((digest ^ byte) * 0x01000193) & 0xFFFF_FFFF
    return digest


def test_a_late_response_does_not_depend_on_the_receive_buffer(peer: Peer) -> None:
    create(peer)
    batch = batch_of(b"a", b"b")
    frame = bytearray(encode_head(Verb.PRODUCE, 5, messages.Produce("t", 0, level=2), payload_bytes=len(batch)) + batch)
    peer.session.receive(memoryview(frame))
    peer.broker.commit()
    frame[:] = b"\xff" * len(frame)  # the connection may reuse the buffer once the turn was committed
    peer.loop.run_due()
    [answer] = peer.frames()
    assert [(a.base_offset, a.record_count) for a in answer.decode(messages.Produced).appended] == [(0, 2)]


def test_a_connection_yields_to_others(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock takes a whole pass, so that every request needs its own."""
    times = count()
    monkeypatch.setattr(SimulatedClock, "monotonic", lambda _: float(next(times)))
    frames = b"".join(encode_head(Verb.PING, number, Head()) for number in range(3))
    rest = memoryview(frames)
    for left in (2, 1):
        taken = peer.session.receive(rest)
        assert taken == len(rest) - left * len(frames) // 3
        assert peer.session.paused()
        resumes = peer.resumes
        peer.loop.run_pass()
        assert peer.resumes == resumes + 1
        assert not peer.session.paused()
        rest = rest[taken:]
    assert peer.session.receive(rest) == len(rest)
    assert not peer.session.paused()
    assert [answer.correlation for answer in peer.frames()] == [0, 1, 2]


@pytest.mark.parametrize("number", [2**63, 2**64 - 1])
def test_numbers_beyond_64_bits_are_refused(peer: Peer, number: int) -> None:
    for verb, head in (
        (Verb.BOUNDS, messages.AskBounds(["t"], [number])),
        (Verb.FETCH, messages.Fetch("t", 0, number)),
        (Verb.CREATE_TOPIC, messages.CreateTopic("u", settings={"retention_bytes": number})),
    ):
        assert peer.ask(verb, head).error.code is ErrorCode.INVALID_REQUEST
