"""Event sourcing over Cursus: every response and refusal (spec: cursus#event-sourcing), and long streams."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from polywire.broker.settings import BrokerSettings
from polywire.broker.sliced import SLICE_S
from polywire.log.base import Read
from polywire.protocols.cursus.messages import frame
from polywire.testing.loop import ManualLoop
from polywire.testing.memory_log import MemoryPartition
from polywire.types import Level
from tests.unit.protocols.cursus.dialogue import Dialogue, World


@pytest.fixture
def peer() -> Dialogue:
    peer = World().connect()
    peer.ask("CREATE topic=ev partitions=2 event_sourcing=true")
    peer.ask("CREATE topic=plain partitions=1")
    return peer


def unpacked(body: bytes) -> list[dict[str, Any]]:
    """Return the messages of a batch; an independent decoder of the modern layout (spec: cursus#batch-layout)."""
    at = 0

    def take(form: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from(">" + form, body, at)
        at += struct.calcsize(">" + form)
        return value

    def text(form: str = "H") -> bytes:
        nonlocal at
        size = take(form)
        at += size
        return body[at - size : at]

    assert take("H") == 0xBA7C
    text(), take("i"), text("B"), take("B"), take("Q"), take("Q")
    found = []
    for _ in range(take("i")):
        one: dict[str, Any] = {
            "offset": take("Q"),
            "seq": take("Q"),
            "producer": text(),
            "key": text(),
            "epoch": take("q"),
        }
        one |= {"payload": text("I"), "type": text(), "schema": take("I"), "version": take("Q"), "metadata": text()}
        found.append(one)
    assert at == len(body)
    return found


def stream(peer: Dialogue, rest: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    head, batch = peer.say(f"READ_STREAM topic=ev {rest}".encode())
    return json.loads(head), unpacked(batch)


def test_events_are_appended_and_read_and_aggregates_described(peer: Dialogue) -> None:
    # FNV-1a 64 of order-1 is 16061103592383113325, odd: partition 1 (spec: cursus#partitioning)
    append = "APPEND_STREAM topic=ev key=order-1"
    text = f'{append} version=1 event_type=Created schema_version=2 metadata={{"u":1}} producerId=x message={{"item": "a b"}}'
    assert peer.ask(text) == "OK version=1 offset=0 partition=1"
    assert peer.ask("APPEND_STREAM topic=ev key=other version=1 message=o").startswith("OK version=1")
    assert peer.ask(f"{append} version=2 message=second").startswith("OK version=2 offset=")
    assert peer.ask("STREAM_VERSION topic=ev key=order-1") == "OK version=2"
    assert peer.ask("STREAM_VERSION topic=ev key=unknown") == "OK version=0"
    head, events = stream(peer, "key=order-1")
    assert head == {"status": "OK", "topic": "ev", "key": "order-1", "partition": 1, "count": 2}
    assert list(head) == ["status", "topic", "key", "partition", "count"]
    assert events[0] == {
        "offset": 0, "seq": 0, "producer": b"", "key": b"order-1", "epoch": 0, "payload": b'{"item": "a b"}',
        "type": b"Created", "schema": 2, "version": 1, "metadata": b'{"u":1}',
    }  # fmt: skip
    assert (events[1]["version"], events[1]["schema"], events[1]["type"]) == (2, 1, b"")
    assert [event["version"] for event in stream(peer, "key=order-1 from_version=2")[1]] == [2]
    assert stream(peer, "key=order-1 from_version=3") == ({**head, "count": 0}, [])
    assert stream(peer, "key=unknown")[0]["count"] == 0


def test_a_snapshot_replaces_the_events_before_it(peer: Dialogue) -> None:
    for version in (1, 2, 3):
        peer.ask(f"APPEND_STREAM topic=ev key=o1 version={version} message=v{version}")
    assert peer.ask("READ_SNAPSHOT topic=ev key=o1") == "OK snapshot=null"
    saved = peer.ask('SAVE_SNAPSHOT topic=ev key=o1 version=2 message={"s": 2}')
    assert saved.startswith("OK version=2 partition=")
    assert peer.ask("READ_SNAPSHOT topic=ev key=o1") == 'OK snapshot={"version":2,"payload":"{\\"s\\": 2}"}'
    head, events = stream(peer, "key=o1")
    assert head["snapshot"] == {"version": 2, "payload": '{"s": 2}'}
    assert (head["count"], [event["version"] for event in events]) == (1, [3])
    head, events = stream(peer, "key=o1 from_version=3")  # newer than the snapshot, which is skipped
    assert "snapshot" not in head
    assert [event["version"] for event in events] == [3]
    assert peer.ask("SAVE_SNAPSHOT topic=ev key=o1 version=1 message=older").startswith("OK version=1")
    assert [event["version"] for event in stream(peer, "key=o1")[1]] == [2, 3]
    peer.world.restart()
    peer = peer.beside()
    assert peer.ask("READ_SNAPSHOT topic=ev key=o1") == 'OK snapshot={"version":1,"payload":"older"}'
    assert peer.ask("STREAM_VERSION topic=ev key=o1") == "OK version=3"


def test_errors_of_event_commands(peer: Dialogue) -> None:
    peer.ask("APPEND_STREAM topic=ev key=a version=1 message=x")
    conflict = "version_conflict current=1 expected="
    for text, answer in (
        ("APPEND_STREAM key=a version=1 message=x", "missing_topic command=APPEND_STREAM"),
        ("APPEND_STREAM topic=ev version=1 message=x", "missing_key command=APPEND_STREAM"),
        ("APPEND_STREAM topic=ev key=a message=x", "missing_version command=APPEND_STREAM"),
        ("APPEND_STREAM topic=ev key=a version=2", "missing_message command=APPEND_STREAM"),
        ("APPEND_STREAM topic=ev key=a version=-2 message=x", "invalid_version value=-2"),
        ("APPEND_STREAM topic=ev key=a version=2 schema_version=x message=x", "invalid_schema_version value=x"),
        ("APPEND_STREAM topic=none key=a version=2 message=x", "topic_not_found topic=none"),
        ("APPEND_STREAM topic=plain key=a version=2 message=x", "event_sourcing_not_enabled topic=plain"),
        *(
            (f"APPEND_STREAM topic=ev key=a version={version} message=x", f"{conflict}{version}")
            for version in (0, 1, 3)
        ),
        ("SAVE_SNAPSHOT topic=ev key=a version=9 message=x", "snapshot_version_exceeds_stream version=9 current=1"),
        ("SAVE_SNAPSHOT topic=ev key=a version=1", "missing_message command=SAVE_SNAPSHOT"),
        ("STREAM_VERSION topic=ev", "missing_key command=STREAM_VERSION"),
        ("READ_SNAPSHOT topic=none key=a", "topic_not_found topic=none"),
    ):
        assert peer.ask(text) == f"ERROR: {answer}", text
    too_long = f"APPEND_STREAM topic=ev key={'k' * 2000} version=1 message=x"
    assert peer.ask(too_long).startswith("ERROR: append_stream_failed reason=")
    for text, answer in (
        ("READ_STREAM topic=none key=a", "topic_not_found topic=none"),
        ("READ_STREAM topic=ev", "missing_key command=READ_STREAM"),
        ("READ_STREAM topic=ev key=a from_version=x", "invalid_from_version value=x"),
        ("READ_STREAM topic=ev key=a from_version=0", "invalid_from_version value=0"),
        ("READ_STREAM topic=none key=a from_version=0", "invalid_from_version value=0"),
        ("READ_STREAM topic=plain key=a", "event_sourcing_not_enabled topic=plain"),
    ):
        assert peer.ask(text) == f'{{"error":"{answer}","status":"ERROR"}}', text


def test_events_are_consumed_like_records_and_plain_records_are_not_events(peer: Dialogue) -> None:
    peer.ask("APPEND_STREAM topic=ev key=order-1 version=1 message=x")
    peer.ask("PUBLISH topic=ev producerId=p partition=1 key=order-1 message=plain")
    peer.ask("APPEND_STREAM topic=ev key=order-1 version=2 message=y")
    (batch,) = peer.say(b"CONSUME topic=ev partition=1 offset=0 member=m")
    assert [one["payload"] for one in unpacked(batch)] == [b"x", b"plain", b"y"]
    assert [one["payload"] for one in stream(peer, "key=order-1")[1]] == [b"x", b"y"]


def test_a_topic_of_events_does_not_grow(peer: Dialogue) -> None:
    assert peer.ask("CREATE topic=ev partitions=3 event_sourcing=true").startswith(
        "ERROR: create_topic_failed topic=ev"
    )
    assert peer.ask("CREATE topic=ev partitions=2 event_sourcing=true").startswith("OK topic=ev partitions=2")


def test_a_stream_that_is_too_large_is_refused_as_a_whole(peer: Dialogue) -> None:
    for version in range(1, 11):
        peer.feed(frame(f"APPEND_STREAM topic=ev key=a version={version} message={'x' * 900_000}".encode()))
        peer.pass_by()
    peer.take_bodies()
    assert peer.ask("READ_STREAM topic=ev key=a").startswith('{"error":"read_stream_failed')
    assert len(stream(peer, "key=a from_version=4")[1]) == 7


Reported = Callable[[Read], None]


class Pin:
    """A pin that counts its releases."""

    releases = 0

    def release(self) -> None:
        self.releases += 1


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Reported, Read]]:
    """Make every read wait for the disk; return the waiting callbacks and their reads."""
    waiting: list[tuple[Reported, Read]] = []
    read = MemoryPartition.read

    def later(log: MemoryPartition, offset: int, *, then: Reported, **limits: Any) -> object:
        found = read(log, offset, then=lambda _: None, **limits)
        assert isinstance(found, Read)
        waiting.append((then, found))
        return object()

    monkeypatch.setattr(MemoryPartition, "read", later)
    return waiting


def test_readers_of_the_same_bytes_take_turns(peer: Dialogue, fetched: list[tuple[Reported, Read]]) -> None:
    peers = [peer, *(Dialogue(peer.world) for _ in range(9))]
    peer.ask("APPEND_STREAM topic=ev key=a version=1 message=x")
    for one in peers:
        one.feed(frame(b"READ_STREAM topic=ev key=a"))
    peer.pass_by()
    assert len(fetched) == len(peers)
    for reported, read in fetched:
        reported(read)
    assert not any(one.sent for one in peers), "no response is built inside the callback"
    for one in peers:
        one.pass_by()
        assert len(one.take_bodies()) == 2


def test_readers_after_the_same_write_batch_take_turns(peer: Dialogue, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, read = peer.world.memory, MemoryPartition.read
    loop = memory.loop
    assert isinstance(loop, ManualLoop)
    peers = [peer, *(Dialogue(peer.world) for _ in range(9))]
    peer.ask("APPEND_STREAM topic=ev key=a version=1 message=x")

    def slowly(log: MemoryPartition, offset: int, **limits: Any) -> object:
        loop.clock.advance(SLICE_S)
        return read(log, offset, **limits)

    monkeypatch.setattr(MemoryPartition, "read", slowly)
    begun = loop.clock.monotonic()
    for one in peers:
        one.feed(frame(b"READ_STREAM topic=ev key=a"))
    took = [loop.clock.monotonic() - begun]
    for _ in range(50):
        begun = loop.clock.monotonic()
        memory.broker.commit()
        loop.run_pass()
        took.append(loop.clock.monotonic() - begun)
    assert max(took) <= 2 * SLICE_S
    assert all(len(one.take_bodies()) == 2 for one in peers)


def test_a_disconnected_client_releases_its_pending_read(peer: Dialogue, fetched: list[tuple[Reported, Read]]) -> None:
    peer.ask("APPEND_STREAM topic=ev key=a version=1 message=x")
    peer.feed(frame(b"READ_STREAM topic=ev key=a"))
    peer.pass_by()
    ((reported, read),) = fetched
    pin = Pin()
    peer.session.close()
    peer.closed = True
    reported(replace(read, pin=pin))
    peer.pass_by()
    assert pin.releases == 1


def test_long_streams_among_many_others(peer: Dialogue) -> None:
    for version in range(1, 301):
        for key in "abc":
            peer.feed(frame(f"APPEND_STREAM topic=ev key={key} version={version} message={key}{version}".encode()))
        peer.pass_by()
    assert {body.split()[0] for body in peer.take_bodies()} == {b"OK"}
    for key in "abc":
        head, events = stream(peer, f"key={key}")
        assert head["count"] == 300
        assert [event["payload"].decode() for event in events] == [f"{key}{version}" for version in range(1, 301)]
        assert [event["version"] for event in events] == list(range(1, 301))


def test_versions_and_snapshots_are_shown_when_they_are_durable() -> None:
    world = World(broker=BrokerSettings(durability=Level.SYNCED))
    writer, reader = world.connect(), world.connect()
    writer.ask("CREATE topic=ev partitions=1 event_sourcing=true")
    writer.feed(frame(b"APPEND_STREAM topic=ev key=k version=1 event_type=e message=x"))
    writer.feed(frame(b"SAVE_SNAPSHOT topic=ev key=k version=1 message=s"))
    reader.feed(frame(b"STREAM_VERSION topic=ev key=k"))
    reader.feed(frame(b"READ_SNAPSHOT topic=ev key=k"))
    assert reader.take_bodies() == [], "a power loss would take back what it would show"
    world.memory.run()
    assert reader.take_bodies() == [b"OK version=1", b'OK snapshot={"version":1,"payload":"s"}']
