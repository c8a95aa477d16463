"""Writers over real sockets: a connection lost at any point neither duplicates nor loses records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest

from polywire.client import writing
from polywire.client.bulk import BulkConnection
from polywire.client.writing import ProduceWriter, StageWriter
from polywire.errors import Busy, ErrorCode, Missing
from polywire.protocols.polywire.factory import COMMANDS
from polywire.protocols.polywire.messages import Stage, Verb
from polywire.protocols.polywire.session import Command, PolywireSession
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.records.split import with_producer
from polywire.types import Level
from tests.unit.client.served import Served
from tests.unit.client.test_bulk import values_in


@pytest.fixture
def connection(served: Served) -> Iterator[BulkConnection]:
    made = BulkConnection("127.0.0.1", served.port, timeout_s=10.0, reconnect_s=2.0)
    made.create_topic("t", 2)
    yield made
    made.close()


def batch(number: int) -> bytearray:
    return from_records([Record(b"%d" % number)])


def fill(writer: StageWriter, count: int) -> None:
    for number in range(count):
        writer.put("t", 0, batch(number))
    writer.finish()


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def test_staged_batches_are_visible_once_published_and_in_order(connection: BulkConnection) -> None:
    writer = StageWriter(connection)
    for number in range(50):
        writer.put("t", number % 2, batch(number))
    tokens = writer.finish()
    assert values_in(connection, "t") == []
    connection.publish("w", 0, tokens)
    assert values_in(connection, "t", 0) == numbers(50)[::2]
    assert values_in(connection, "t", 1) == numbers(50)[1::2]


@pytest.mark.parametrize("lost_after", [0, 1, 7, 8, 9, 29, 30])
def test_a_lost_connection_duplicates_no_staged_batch(
    served: Served, connection: BulkConnection, monkeypatch: pytest.MonkeyPatch, lost_after: int
) -> None:
    monkeypatch.setattr(writing, "TOKEN_BATCHES", 10)
    writer = StageWriter(connection)
    for number in range(30):
        if number == lost_after:
            served.drop_connections()
        writer.put("t", 0, batch(number))
    if lost_after == 30:
        served.drop_connections()
    tokens = writer.finish()
    connection.publish("w", 0, tokens)
    assert len(set(tokens)) == 3
    assert values_in(connection, "t") == numbers(30)


def test_abandoned_batches_are_gone(connection: BulkConnection) -> None:
    writer = StageWriter(connection)
    writer.put("t", 0, batch(1))
    tokens = writer.finish()
    writer.abandon()
    with pytest.raises(Missing):
        connection.publish("w", 0, tokens)


@pytest.mark.parametrize(
    ("refusals", "retry_after_ms", "pause_s", "published"),
    [
        (3, None, 0.5, True),
        (3, 70, 0.07, True),
        (3, 0, 0.01, True),
        (3, 86_400_000, 5.0, True),
        (1000, None, 0.5, False),
        (1000, 10_000, 5.0, False),
    ],
)
def test_a_broker_without_staging_capacity_is_retried_for_a_while(
    connection: BulkConnection,
    monkeypatch: pytest.MonkeyPatch,
    refusals: int,
    retry_after_ms: int | None,
    pause_s: float,
    published: bool,
) -> None:
    left = iter(range(refusals))
    slept: list[float] = []
    stage = COMMANDS[Verb.STAGE]

    def full(session: PolywireSession, correlation: int, request: Stage, payload: memoryview) -> None:
        if next(left, None) is not None:
            raise Busy(ErrorCode.STAGE_FULL, "staged batches exceed the limit", retry_after_ms=retry_after_ms)
        stage.handler(session, correlation, request, payload)

    monkeypatch.setattr(writing, "sleep", slept.append)
    monkeypatch.setitem(cast("dict[int, Command]", COMMANDS), Verb.STAGE, replace(stage, handler=full))
    writer = StageWriter(connection)
    if published:
        fill(writer, 30)
        connection.publish("w", 0, writer.finish())
        assert values_in(connection, "t") == numbers(30)
        assert set(slept) == {pause_s}
        return
    with pytest.raises(Busy) as refused:
        fill(writer, 30)
    assert refused.value.code is ErrorCode.STAGE_FULL
    assert slept == [pause_s] * int(30 / pause_s)
    writer.abandon()


def test_appending_again_after_a_lost_connection_stores_each_producer_batch_once(
    served: Served, connection: BulkConnection
) -> None:
    writer = ProduceWriter(connection, Level.WRITTEN)
    for number in range(30):
        if number in (3, 20):
            served.drop_connections()
        writer.put("t", 0, with_producer(batch(number), b"task", epoch=1, base_sequence=number))
    assert writer.finish() == []
    assert values_in(connection, "t") == numbers(30)


def test_appending_without_a_producer_stores_at_least_once(served: Served, connection: BulkConnection) -> None:
    writer = ProduceWriter(connection, Level.SYNCED)
    for number in range(30):
        if number == 20:
            served.drop_connections()
        writer.put("t", 0, batch(number))
    writer.finish()
    assert set(values_in(connection, "t")) == set(numbers(30))
