"""The exported files of groups and offsets have the groups of all processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest

from polywire.errors import BrokerError
from polywire.log.base import Completion
from polywire.protocols.flux.exports import (
    AGAIN_S,
    BYTES_MAX,
    GROUPS,
    INTERVAL_S,
    OFFSETS,
    PART,
    REPORTS_S,
    Exports,
    RemoteGroups,
    Report,
)
from polywire.routing import link
from polywire.routing.session import Part
from polywire.store.base import BlobMissing
from polywire.testing.loop import ManualLoop
from tests.memory_store import MemoryStore
from tests.unit.protocols.flux.test_processes import Conversation

TOPICS = ("ccc", "a", "bb")  # by shard
WAIT_S = 2.0  # the greatest age of exported groups


class InlineWorker:
    """A worker without a thread."""

    def __init__(self, loop: ManualLoop) -> None:
        self._loop = loop

    def run(self, job: Callable[[], Any], on_completed: Completion[Any]) -> None:
        self._loop.call_soon(on_completed, job())

    def stop(self) -> None:
        """Do nothing."""


class Exporting(Conversation):
    """A client of three processes. The first one writes the groups of all to ``store``."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        super().__init__(3)
        self.store = MemoryStore()
        self.exports: dict[int, Exports] = {}
        self.bytes_max = bytes_max
        for shard in (2, 1, 0):
            self.start(shard)

    def start(self, shard: int) -> None:
        """Start the exports of a process, as after a start of it."""
        if shard in self.exports:
            timer = self.exports[shard]._timer
            assert timer is not None
            timer.cancel()
        broker = self.shards.brokers[shard]
        if shard:
            made = Exports(broker, None, None, bytes_max=self.bytes_max)
        else:
            parts, worker = self.shards.routers[0], InlineWorker(self.shards.loop)
            made = Exports(broker, self.store, worker, bytes_max=self.bytes_max, parts=parts)
        self.exports[shard] = made
        self.shards.factories[shard].add(Part(PART, made, [Exports.report]))  # type: ignore[attr-defined]
        made.start()

    def join(self, group: str, topic: str) -> None:
        self.ask(f"PRODUCE|{topic} k:v")
        assert self.ask(f"JOIN|{group} {topic} m").startswith("OK")

    def wait(self, seconds: float = WAIT_S) -> None:
        for _ in range(round(seconds / INTERVAL_S)):
            self.pass_by(INTERVAL_S)

    def file(self, name: str = GROUPS) -> dict[str, Any]:
        with suppress(BlobMissing):
            found: dict[str, Any] = json.loads(self.store.get(name))
            return found
        return {}

    def groups(self) -> dict[str, str]:
        """Return the topics of all exported groups, in which they are at most ``WAIT_S`` old."""
        self.wait()
        return {name: group["topic"] for name, group in self.file().items()}


@pytest.fixture
def exporting() -> Exporting:
    return Exporting()


def test_groups_of_all_processes_are_exported(exporting: Exporting) -> None:
    assert exporting.groups() == {}
    for topic in TOPICS:
        exporting.join(f"g-{topic}", topic)
        exporting.ask(f"COMMIT|g-{topic} {topic} m 2 0 1")
    assert exporting.groups() == {f"g-{topic}": topic for topic in TOPICS}
    assert exporting.file(OFFSETS) == {f"g-{topic}": {topic: {"0": 1}} for topic in TOPICS}
    exporting.ask("JOIN|g-a ccc m")
    assert exporting.groups()["g-a"] == "ccc"
    broker = exporting.shards.brokers[2]
    broker.delete_topic(broker.topic("bb"))
    assert "g-bb" not in exporting.groups()


def test_only_changed_groups_are_reported(exporting: Exporting, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[Report] = []
    apply = RemoteGroups._apply

    def record(groups: RemoteGroups, shard: int, report: Report | BrokerError) -> None:
        if shard == 1 and isinstance(report, Report):
            reports.append(report)
        apply(groups, shard, report)

    monkeypatch.setattr(RemoteGroups, "_apply", record)
    for name in ("one", "two"):
        exporting.join(name, "a")
    assert exporting.groups() == {"one": "a", "two": "a"}
    reports.clear()
    exporting.ask("COMMIT|two a m 2 0 5")
    exporting.wait()
    assert [names for names in map(_names, reports) if any(names.values())] == [{GROUPS: [], OFFSETS: ["two"]}]
    assert not any(report.is_whole for report in reports)


def _names(report: Report) -> Mapping[str, list[str]]:
    return {file: sorted(content) for file, content in (report.content or {}).items()}


def test_a_report_that_was_lost_is_repeated(exporting: Exporting) -> None:
    exporting.join("g", "a")
    exporting.wait()
    exporting.link(1).pause()
    Conversation(3, 1, exporting.shards).ask("COMMIT|g a m 2 0 5")
    exporting.wait()
    assert exporting.file(OFFSETS) == {}
    exporting.link(1).break_off()
    exporting.wait()
    assert exporting.file(OFFSETS) == {"g": {"a": {"0": 5}}}


def test_groups_of_a_process_that_does_not_respond_remain(exporting: Exporting) -> None:
    for topic in TOPICS:
        exporting.join(f"g-{topic}", topic)
    exporting.wait()
    exporting.link(1).pause()
    exporting.join("late", "ccc")
    assert exporting.groups() == {"late": "ccc", **{f"g-{topic}": topic for topic in TOPICS}}
    exporting.link(1).break_off()
    assert exporting.groups().keys() == {"late", *(f"g-{topic}" for topic in TOPICS)}


def test_a_group_that_was_moved_from_a_lost_process_has_its_new_topic(exporting: Exporting) -> None:
    for own in (2, 1):
        exporting.join(f"g-{own}", TOPICS[own])
    exporting.wait()
    for own in (2, 1):
        exporting.link(own).pause()  # the process receives requests, but its responses get lost
    exporting.ask("PRODUCE|ccc k:v")
    for own in (2, 1):
        assert exporting.ask(f"JOIN|g-{own} ccc m").startswith("OK")
    assert exporting.groups() == {"g-1": "ccc", "g-2": "ccc"}


@pytest.mark.parametrize("shard", range(3))
def test_no_group_is_missing_after_the_start_of_a_process(exporting: Exporting, shard: int) -> None:
    for topic in TOPICS:
        exporting.join(f"g-{topic}", topic)
    before = exporting.groups()
    exporting.start(shard)
    for _ in range(20):
        exporting.pass_by(INTERVAL_S / 4)
        assert exporting.file().keys() == before.keys()
    exporting.join("next", TOPICS[shard])
    assert exporting.groups() == {**before, "next": TOPICS[shard]}


def test_a_start_waits_for_the_groups_of_other_processes_shortly(exporting: Exporting) -> None:
    for topic in TOPICS:
        exporting.join(f"g-{topic}", topic)
    before = exporting.groups()
    exporting.link(1).pause()
    exporting.start(0)
    exporting.wait(REPORTS_S - 1)
    assert exporting.file().keys() == before.keys()
    exporting.exports[0].stop()
    assert exporting.file().keys() == before.keys()
    exporting.start(0)
    exporting.wait(REPORTS_S + 1)
    assert exporting.file().keys() == before.keys() - {"g-a"}


def test_too_many_groups_of_one_process() -> None:
    exporting = Exporting(bytes_max=600)
    exporting.join("g", "ccc")
    assert exporting.groups() == {"g": "ccc"}
    many = [f"g-{number}" for number in range(4)]
    for name in many:
        exporting.join(name, "a")
    assert exporting.groups() == {}
    exporting.wait(AGAIN_S)
    assert exporting.groups() == {}, "there are still too many"
    groups = exporting.shards.brokers[1].groups
    for name in many:
        groups.delete(name, "a", done=None)
    exporting.wait(2 * AGAIN_S)
    assert exporting.groups() == {"g": "ccc"}


def test_too_many_groups_of_all_processes() -> None:
    exporting = Exporting(bytes_max=700)
    for topic in TOPICS:
        exporting.join(f"g-{topic}", topic)
    assert exporting.groups().keys() == {f"g-{topic}" for topic in TOPICS}
    exporting.join("more", "a")
    assert exporting.groups() == {}
    exporting.shards.brokers[1].groups.delete("more", "a", done=None)
    exporting.wait(AGAIN_S)
    assert exporting.groups().keys() == {f"g-{topic}" for topic in TOPICS}


def test_a_clogged_link_delays_a_report(exporting: Exporting, monkeypatch: pytest.MonkeyPatch) -> None:
    clogged = exporting.shards.routers[0]._links[1]
    monkeypatch.setattr(link, "UNANSWERED_BYTES_MAX", 0)
    clogged.unanswered_bytes += 1
    exporting.wait()
    monkeypatch.undo()
    clogged.unanswered_bytes -= 1
    exporting.join("g", "a")
    assert exporting.groups() == {"g": "a"}
