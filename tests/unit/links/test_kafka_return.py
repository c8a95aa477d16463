"""Copies from here to a Kafka source after a reversed cut-over: late requests, and records of other clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from itertools import count

import pytest

from polywire.client.connect import connect
from polywire.client.kafka import KafkaClient
from polywire.client.polywire import PolywireClient
from polywire.errors import BrokerError, Conflict
from polywire.link_orders import CutOver
from polywire.links.kafka_return import KafkaReturn
from polywire.records.columns import Header, HeaderKind, Record
from polywire.testing.thread import BrokerThread

NAMES = (f"topic{number}" for number in count())
SHIFT = 5  # the source has more records before the cut-over


@pytest.fixture(scope="module")
def source() -> Iterator[BrokerThread]:
    with BrokerThread(wires=["polywire", "kafka"]) as running:
        yield running


@pytest.fixture(scope="module")
def target() -> Iterator[BrokerThread]:
    with BrokerThread(wires=["polywire"]) as running:
        yield running


def record(number: int) -> Record:
    header = Header(b"h", b"x", HeaderKind.STRING, HeaderKind.RAW)
    return Record(b"value-%d" % number, b"key", (header,), origin_time_us=1_700_000_000_000_000 + number * 1000)


class Ends:
    """A topic with one partition at both ends, and the cut-over of it."""

    def __init__(self, here: PolywireClient, there: KafkaClient, topic: str, producer: int) -> None:
        self.here = here
        self.there = there
        self.topic = topic
        self.cut_over = CutOver(topic, (SHIFT + 10,), (10,), reverse=True, producer=producer)

    def worker(self) -> KafkaReturn:
        """Return the copy as a new process has it."""
        return KafkaReturn("old", self.cut_over, self.here, self.there)

    async def write(self, first: int, last: int) -> None:
        await self.here.produce(self.topic, [record(number) for number in range(first, last)], partition=0)

    async def written(self) -> list[Record]:
        return await self.there.fetch(self.topic, 0, SHIFT + 10)


def play(scenario: Callable[[Ends], Awaitable[None]], source: BrokerThread, target: BrokerThread) -> None:
    async def run() -> None:
        here, there = await connect(target.url()), await connect(source.url("kafka"))
        assert isinstance(here, PolywireClient)
        assert isinstance(there, KafkaClient)
        topic = next(NAMES)
        for client, records in ((here, 10), (there, SHIFT + 10)):
            await client.create_topic(topic, 1)
            await client.produce(topic, [Record(b"before")] * records, partition=0)
        try:
            await scenario(Ends(here, there, topic, await there.new_producer()))
        finally:
            await here.close()
            await there.close()
            await asyncio.sleep(0)

    asyncio.run(run())


def test_each_field_is_copied_and_offsets_keep_their_distance(source: BrokerThread, target: BrokerThread) -> None:
    async def run(ends: Ends) -> None:
        await ends.write(0, 3000)
        worker = ends.worker()
        while await worker.step():
            pass
        assert worker.is_complete
        assert worker.report().copied == 3000
        found = await ends.written()
        assert [one.offset for one in found] == list(range(SHIFT + 10, SHIFT + 10 + len(found)))
        assert [(one.key, one.value, one.origin_time_us) for one in found[:2]] == [
            (b"key", b"value-%d" % number, record(number).origin_time_us) for number in range(2)
        ]
        assert found[0].headers[0].value == b"x"

    play(run, source, target)


@pytest.mark.parametrize("more", [0, 7])
def test_a_late_request_of_a_killed_process_doubles_nothing(
    source: BrokerThread, target: BrokerThread, more: int
) -> None:
    """Its request arrives after the next process has written the same records, or more."""

    async def run(ends: Ends) -> None:
        await ends.write(0, 20)
        late = ends.worker()
        late._positions, late._ends = await _opened(ends, late)
        await ends.write(20, 20 + more)
        assert await ends.worker().step()
        try:
            await late._copy(0)
        except BrokerError:
            assert more
        assert [one.value for one in await ends.written()] == [b"value-%d" % number for number in range(20 + more)]
        await ends.write(20 + more, 30 + more)
        assert await ends.worker().step()
        assert len(await ends.written()) == 30 + more

    play(run, source, target)


async def _opened(ends: Ends, worker: KafkaReturn) -> tuple[list[int], list[int]]:
    worker._ends = [part.next_offset for part in await ends.here.bounds(ends.topic)]
    return await worker._open(), worker._ends


@pytest.mark.parametrize("copied", [0, 5])
def test_records_of_other_clients_are_found(source: BrokerThread, target: BrokerThread, copied: int) -> None:
    async def run(ends: Ends) -> None:
        if copied:
            await ends.write(0, copied)
            assert await ends.worker().step()
        await ends.there.produce(ends.topic, [Record(b"of another client")], partition=0)
        await ends.write(copied, copied + 5)
        worker = ends.worker()
        with pytest.raises(Conflict, match="other clients have written"):
            await worker.step()
        worker.forget()
        assert worker.report().lag >= 5, "what was copied by another process is not known"
        assert not worker.is_complete

    play(run, source, target)


def test_records_of_other_clients_are_found_while_it_runs(source: BrokerThread, target: BrokerThread) -> None:
    async def run(ends: Ends) -> None:
        await ends.write(0, 5)
        worker = ends.worker()
        assert await worker.step()
        await ends.there.produce(ends.topic, [Record(b"of another client")], partition=0)
        await ends.write(5, 6)
        with pytest.raises(BrokerError):
            await worker.step()
        worker.forget()
        assert worker.report().lag == 1
        assert not worker.is_complete

    play(run, source, target)
