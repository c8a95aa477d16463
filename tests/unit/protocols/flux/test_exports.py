"""The exported files of groups and offsets: contents, when they are written, and failed writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from polywire.broker.settings import BrokerSettings
from polywire.broker.topics import Topic
from polywire.log.base import Completion
from polywire.log.worker import attempt
from polywire.protocols.flux.exports import AGAIN_S, GROUPS, INTERVAL_S, OFFSETS, RETRY_S, Exports, group_json, remove
from polywire.store.base import BlobMissing
from polywire.testing.faulty_store import Fault, FaultyStore, Verb
from polywire.types import Assignor, PositionKind, TopicName
from tests.memory_store import MemoryStore
from tests.unit.protocols.flux.dialogue import World

SECOND = 1.0


class Inline:
    """A worker without a thread; ``held`` collects jobs until the test runs them."""

    def __init__(self, world: World) -> None:
        self._loop = world.memory.broker.loop
        self.held: list[tuple[Callable[[], Any], Completion[Any]]] | None = None

    def run(self, job: Callable[[], Any], on_completed: Completion[Any]) -> None:
        if self.held is not None:
            self.held.append((job, on_completed))
            return
        self._loop.call_soon_threadsafe(on_completed, attempt(job))

    def stop(self) -> None:
        assert not self.held


class Place:
    """A broker in memory with exported files."""

    def __init__(self, world: World | None = None, **limits: Any) -> None:
        self.world = world or World()
        self.store = FaultyStore(MemoryStore())
        self.worker = Inline(self.world)
        self.peer = self.world.connect()
        self._limits = limits
        self.begin()

    def begin(self) -> None:
        self.exports = Exports(self.world.memory.broker, self.store, self.worker, **self._limits)
        self.exports.start()
        self.world.memory.run()

    def ask(self, line: str) -> str:
        return self.peer.ask(f"V1|1|{line}").removeprefix("V1|1|")

    def wait(self, seconds: float = SECOND) -> None:
        self.world.memory.advance(seconds)

    def text(self, name: str) -> str:
        return self.store.get(name).decode()

    def said(self, name: str) -> Any:
        try:
            return json.loads(self.text(name))
        except BlobMissing:
            return None

    def puts(self) -> int:
        """Return how many writes there were."""
        return sum(verb is Verb.PUT for verb, _ in self.store.calls)


def test_groups_and_offsets_are_exported_within_a_second() -> None:
    place = Place()
    assert (place.said(GROUPS), place.said(OFFSETS)) == (None, None), "without groups there are no files"
    now_ms = place.world.memory.clock.now_us() // 1000
    place.ask("JOIN|g t c1")
    place.wait()
    assert place.text(GROUPS) == (
        '{"g":{"topic":"t","generation":2,"assignor":"round_robin","member_order":["c1"],"assignments":{"c1":[0,1,2]},'
        f'"members":[{{"consumer_id":"c1","last_heartbeat_unix_ms":{now_ms}}}]}}}}\n'
    )
    assert place.said(OFFSETS) is None
    for partition, offset in ((0, 5), (2, 7)):
        place.ask(f"COMMIT|g t c1 2 {partition} {offset}")
    place.wait()
    assert place.text(OFFSETS) == '{"g":{"t":{"0":5,"2":7}}}\n'
    place.ask("JOIN|a other c1")
    place.ask("LEAVE|g t c1 2")
    place.wait()
    groups = place.said(GROUPS)
    assert list(groups) == ["a", "g"]
    assert groups["g"] == {
        "topic": "t",
        "generation": 3,
        "assignor": "round_robin",
        "member_order": None,
        "assignments": {},
        "members": [],
    }


def test_members_without_partitions_and_unusual_names() -> None:
    place = Place()
    for member in ("b", "a<&>", "\u2028", "日本"):
        place.ask(f"JOIN|<g> t {member}" if member != "\u2028" else "JOIN|<g> t \u200b")
    place.wait()
    text = place.text(GROUPS)
    assert "<" not in text
    assert "&" not in text
    group = place.said(GROUPS)["<g>"]
    assert group["member_order"] == ["b", "a<&>", "\u200b", "日本"]
    assert group["assignments"] == {"a<&>": [0], "b": [1], "\u200b": [2], "日本": None}
    assert list(group["assignments"]) == ["a<&>", "b", "\u200b", "日本"]


def test_nothing_is_written_without_changes() -> None:
    place = Place()
    place.ask("JOIN|g t c1")
    place.wait()
    before = place.puts()
    place.ask("OFFSET|g t 0")
    place.ask("PRODUCE|t a:x")
    place.wait(8 * SECOND)
    assert place.puts() == before
    place.ask("HEARTBEAT|g t c1 2")
    place.wait(8 * SECOND)
    assert place.puts() == before + 1, "a heartbeat changes one file once"


def test_a_heartbeat_is_exported() -> None:
    place = Place()
    place.ask("JOIN|g t c1")
    place.wait(3 * SECOND)
    now_ms = place.world.memory.clock.now_us() // 1000
    place.ask("HEARTBEAT|g t c1 2")
    place.wait()
    assert place.said(GROUPS)["g"]["members"] == [{"consumer_id": "c1", "last_heartbeat_unix_ms": now_ms}]


def test_expired_members_are_exported_until_the_group_removes_them() -> None:
    place = Place()
    place.ask("JOIN|g t c1")
    place.ask("JOIN|g t c2")
    place.wait(11 * SECOND)
    assert place.said(GROUPS)["g"]["member_order"] == ["c1", "c2"]
    place.ask("JOIN|g t c2")
    place.wait()
    assert place.said(GROUPS)["g"]["member_order"] == ["c2"]


def test_only_groups_of_flux_are_exported() -> None:
    place = Place()
    broker = place.world.memory.broker
    broker.groups.join("theirs", "t", "m", wire="cursus")
    broker.commit_position("t", 0, PositionKind.GROUP, "theirs", 3)
    place.ask("JOIN|shared t c1")
    broker.groups.join("shared", "t", "c2", wire="cursus", connected=True)
    broker.commit_position("t", 1, PositionKind.GROUP, "shared", 9)
    broker.commit_position("t", 1, PositionKind.CONSUMER, "shared", 4)
    place.wait()
    assert list(place.said(GROUPS)) == ["shared"]
    assert place.said(GROUPS)["shared"]["member_order"] == ["c1", "c2"]
    assert place.said(OFFSETS) == {"shared": {"t": {"1": 9}}}


def test_a_group_is_exported_with_its_current_topic() -> None:
    place = Place()
    place.ask("JOIN|g t c1")
    place.ask("COMMIT|g t c1 2 0 5")
    place.ask("JOIN|g u c1")
    place.wait()
    assert place.said(GROUPS)["g"]["topic"] == "u"
    assert place.said(OFFSETS) is None
    assert place.ask("OFFSET|g t 0") == "OK|offset=5"
    place.ask("JOIN|g t c1")
    place.wait()
    assert place.said(OFFSETS) == {"g": {"t": {"0": 5}}}


@pytest.mark.parametrize("end", ["group", "topic", "positions", "partitions"])
def test_deleted_groups_and_offsets_are_no_longer_exported(end: str) -> None:
    place = Place()
    broker = place.world.memory.broker
    topic: Topic = broker.create_topic(TopicName.parse("t"), 3)
    for name in ("g", "h"):
        place.ask(f"JOIN|{name} {'t' if name == 'g' else 'u'} c1")
        place.ask(f"COMMIT|{name} {'t' if name == 'g' else 'u'} c1 2 2 5")
    place.wait()
    assert place.said(OFFSETS) == {"g": {"t": {"2": 5}}, "h": {"u": {"2": 5}}}
    match end:
        case "group":
            broker.groups.delete("g", "t")
        case "topic":
            broker.delete_topic(topic)
        case "positions":
            broker.delete_positions(PositionKind.GROUP, "g")
        case _:
            broker.shrink_topic(topic, 2)
    place.wait()
    assert place.said(OFFSETS) == {"h": {"u": {"2": 5}}}
    assert ("g" in place.said(GROUPS)) is (end in ("positions", "partitions"))


def test_files_of_an_earlier_start_are_rewritten() -> None:
    place = Place()
    place.ask("JOIN|g t c1")
    place.ask("COMMIT|g t c1 2 1 5")
    place.wait()
    place.world.restart()
    place.store.put(OFFSETS, [b"older"])
    place.begin()
    place.wait()
    assert place.said(GROUPS)["g"]["generation"] == 2
    assert place.said(OFFSETS) == {"g": {"t": {"1": 5}}}
    place.world.memory.broker.groups.delete("g", "t")
    place.world.restart()
    place.begin()
    place.wait()
    assert (place.said(GROUPS), place.said(OFFSETS)) == (None, None)


def test_the_last_change_is_written_at_a_stop() -> None:
    place = Place()
    place.ask("JOIN|g t c1")
    place.exports.stop()
    assert list(place.said(GROUPS)) == ["g"]
    remove(place.store)
    assert place.said(GROUPS) is None


def test_a_failed_write_affects_no_client_and_is_retried() -> None:
    place = Place()
    place.store.fail(Verb.PUT, Fault.ERROR)
    place.ask("JOIN|g t c1")
    place.wait()
    assert place.said(GROUPS) is None
    assert place.ask("HEARTBEAT|g t c1 2") == "OK|heartbeat=ok"
    before = place.puts()
    place.wait(RETRY_S / 2)
    assert place.puts() == before, "it is not retried immediately"
    place.wait(RETRY_S)
    assert list(place.said(GROUPS)) == ["g"]


def test_changes_during_a_write_are_written_next() -> None:
    place = Place()
    place.worker.held = []
    place.ask("JOIN|g t c1")
    place.wait()
    place.ask("JOIN|h t c1")
    place.wait(5 * SECOND)
    ((job, on_completed),) = place.worker.held
    place.worker.held = None
    on_completed(attempt(job))
    assert list(place.said(GROUPS)) == ["g"]
    place.wait()
    assert list(place.said(GROUPS)) == ["g", "h"]


def test_an_export_over_the_limit_is_not_written_in_part() -> None:
    place = Place(bytes_max=1_000)
    place.ask("JOIN|g t c1")
    place.wait()
    assert list(place.said(GROUPS)) == ["g"]
    for number in range(10):
        place.ask(f"JOIN|g{number} t c1")
    place.wait()
    assert place.said(GROUPS) is None
    assert place.ask("JOIN|g t c1") == "OK|generation=2 assigned=[0 1 2]"
    for number in range(10):
        place.world.memory.broker.groups.delete(f"g{number}", "t")
    place.wait(AGAIN_S + SECOND)
    assert list(place.said(GROUPS)) == ["g"]


def test_more_changes_than_are_tracked_export_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polywire.protocols.flux.exports.NAMES_MAX", 5)
    monkeypatch.setattr("polywire.protocols.flux.exports.CHUNK_BYTES", 500)
    place = Place()
    for number in range(20):
        place.peer.feed(f"V1|1|JOIN|g{number:02} t c1\n".encode())
    place.wait()
    assert list(place.said(GROUPS)) == [f"g{number:02}" for number in range(20)]


def test_many_groups_are_encoded_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice ends when its time is over: here after every group."""
    place = Place(World(broker=BrokerSettings()))
    for number in range(50):
        place.peer.feed(f"V1|1|JOIN|g{number} t c1\n".encode())
    place.world.memory.run()
    monkeypatch.setattr("polywire.broker.sliced.SLICE_S", 0.0)
    loop = place.world.memory.loop
    place.world.memory.clock.advance(INTERVAL_S)  # type: ignore[attr-defined]
    passes = 0
    while place.said(GROUPS) is None:
        loop.run_pass()  # type: ignore[attr-defined]
        passes += 1
    assert passes > 50
    assert len(place.said(GROUPS)) == 50


def test_a_wide_group_is_exported_completely() -> None:
    place = Place()
    place.ask("ADMIN_CREATE_TOPIC|wide 1000 1")
    place.ask("JOIN|g wide c1 assignor=range")
    view = place.world.memory.broker.groups.kept("g", "wide")
    assert view is not None
    assert view.assignor is Assignor.RANGE
    assert json.loads(group_json(view, now_us=0))["assignments"] == {"c1": list(range(1000))}
