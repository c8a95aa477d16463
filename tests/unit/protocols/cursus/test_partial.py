"""Acknowledgements of batches that were stored in part, or before."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polywire.broker.broker import Broker
from polywire.broker.settings import BrokerSettings
from polywire.errors import Busy, ErrorCode
from polywire.protocols.cursus.messages import enveloped, frame
from tests.unit.protocols.cursus.dialogue import Dialogue, World
from tests.unit.protocols.cursus.test_produce import batch, messages, started, stored


def reported(peer: Dialogue, *sent: dict[str, Any]) -> dict[str, Any]:
    """Return the acknowledgement of an idempotent batch."""
    acknowledged: dict[str, Any] = json.loads(peer.ask(batch("orders", 0, list(sent), idempotent=1)))
    return acknowledged


def test_a_gap_ends_the_stored_part() -> None:
    world, peer = started()
    answer = reported(peer, *messages(1, 2, 3, 7, 8))
    assert (answer["status"], answer["last_offset"]) == ("PARTIAL", 2)
    assert (answer["seq_start"], answer["seq_end"]) == (1, 3)
    assert answer["error"] == "idempotency gap for producer p: expected 4, got 7"
    assert reported(peer, *messages(4, 5))["status"] == "OK"
    assert [record.sequence for record in stored(world, "orders")] == [1, 2, 3, 4, 5]


def test_a_gap_after_duplicates() -> None:
    _, peer = started()
    reported(peer, *messages(1, 2))
    reported(peer, *messages(1, pid="q"))
    answer = reported(peer, *messages(1, 2, 4))
    assert (answer["status"], answer["last_offset"], answer["seq_end"]) == ("PARTIAL", 1, 2)


def test_a_message_that_is_too_long_ends_the_stored_part() -> None:
    world = World(broker=BrokerSettings(batch_bytes_max=200 * 1024, record_bytes_max=100_000))
    peer = world.connect()
    assert peer.ask("CREATE topic=orders partitions=1").startswith("OK")
    sent = messages(1, 2, 3, 4)
    sent[2]["payload"] = bytes(300_000)
    answer = json.loads(peer.ask(batch("orders", 0, sent)))
    assert (answer["status"], answer["last_offset"], answer["seq_end"]) == ("PARTIAL", 1, 2)
    assert "too large" in answer["error"]
    assert [record.sequence for record in stored(world, "orders")] == [1, 2]


def test_a_batch_of_which_nothing_is_stored_is_an_error() -> None:
    world, peer = started()
    answer = reported(peer, *messages(2, 3, 9))
    assert (answer["status"], answer["last_offset"], answer["seq_start"], answer["seq_end"]) == ("ERROR", 0, 2, 9)
    assert stored(world, "orders") == []


def test_a_duplicate_keeps_its_offsets() -> None:
    _, peer = started()
    first = reported(peer, *messages(1, 2))
    reported(peer, *messages(1, 2, 3, pid="q"))
    assert reported(peer, *messages(1, 2)) == first
    assert reported(peer, *messages(1))["last_offset"] == 0


def test_a_fenced_producer_is_given_the_epoch() -> None:
    _, peer = started()
    reported(peer, *messages(1, epoch=3))
    answer = reported(peer, *messages(2, epoch=2))
    assert (answer["status"], answer["producer_epoch"]) == ("ERROR", 3)


def test_a_long_batch_waits_for_a_log_that_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    world, peer = started()
    sent = batch("orders", 0, [{"seq": n, "pid": "p", "payload": bytes(6_000_000)} for n in range(1, 6)])
    take = Broker.produce
    for wait_s, status, count in ((5.0, "OK", 5), (3600.0, "PARTIAL", 7)):
        tries = 0
        begun = world.memory.broker.clock.monotonic()

        def produce(self: Broker, *given: Any, begun: float = begun, wait_s: float = wait_s, **named: Any) -> None:
            nonlocal tries
            tries += 1
            if tries > 2 and self.clock.monotonic() < begun + wait_s:
                raise Busy(ErrorCode.BUSY, "too much waits", retry_after_ms=50)
            take(self, *given, **named)

        monkeypatch.setattr(Broker, "produce", produce)
        assert peer.say(sent) == []
        world.memory.advance(4.9)
        assert (peer.take_bodies(), 50 < tries <= 101) == ([], True)
        world.memory.advance(6.0)
        (answer,) = peer.take_bodies()
        reported = json.loads(answer)
        assert (reported["status"], len(stored(world, "orders"))) == (status, count)
        assert reported["last_offset"] == count - 1


@pytest.mark.parametrize(("busy_s", "statuses"), [(5.0, ["OK", "OK", "OK"]), (3600.0, ["OK", "ERROR", "ERROR"])])
def test_a_short_batch_waits_for_a_log_that_is_busy(
    busy_s: float, statuses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, peer = started()
    take, begun = Broker.produce, world.memory.broker.clock.monotonic()
    tries = 0

    def produce(self: Broker, *given: Any, **named: Any) -> None:
        nonlocal tries
        tries += 1
        if tries > 1 and self.clock.monotonic() < begun + busy_s:
            raise Busy(ErrorCode.BUSY, "too much waits", retry_after_ms=50)
        take(self, *given, **named)

    monkeypatch.setattr(Broker, "produce", produce)
    peer.feed(b"".join(frame(batch("orders", 0, messages(n))) for n in (1, 2, 3)))
    peer.pass_by()
    answers = peer.take_bodies()
    world.memory.advance(4.9)
    answers += peer.take_bodies()
    assert len(answers) == 1
    world.memory.advance(30.0)
    answers += peer.take_bodies()
    assert [json.loads(answer)["status"] for answer in answers] == statuses
    assert len(stored(world, "orders")) == statuses.count("OK")


@pytest.mark.parametrize("busy_s", [5.0, 3600.0])
@pytest.mark.parametrize("command", ["PUBLISH orders {}", "PUBLISH topic=orders producerId=p message={}"])
def test_a_single_record_waits_for_a_busy_log_like_a_batch(
    command: str, busy_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, peer = started()
    take, begun = Broker.produce, world.memory.broker.clock.monotonic()

    def produce(self: Broker, *given: Any, **named: Any) -> None:
        if self.clock.monotonic() < begun + busy_s:
            raise Busy(ErrorCode.BUSY, "too much waits", retry_after_ms=50)
        take(self, *given, **named)

    monkeypatch.setattr(Broker, "produce", produce)
    bodies = [enveloped("admin", command.format(number).encode()) for number in range(3)]
    peer.feed(b"".join(map(frame, bodies)))
    peer.pass_by()
    world.memory.advance(4.8)
    assert peer.take_bodies() == []
    world.memory.advance(40.0)
    is_stored = busy_s == 5.0
    assert [b"too much waits" in answer for answer in peer.take_bodies()] == [not is_stored] * 3
    found = [record.value for number in (0, 1) for record in stored(world, "orders", number)]
    assert sorted(value or b"" for value in found) == ([b"0", b"1", b"2"] if is_stored else [])
