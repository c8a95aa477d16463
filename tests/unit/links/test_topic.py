"""Topics of a link: copies over every protocol, failures between writes, and topics that are no copies."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count

import pytest

from polywire.broker.users import LINKS
from polywire.client.base import WireClient
from polywire.client.connect import connect
from polywire.client.partition_reader import PartitionReader, reader_of
from polywire.client.polywire import PolywireClient
from polywire.errors import BrokerError, Conflict, ErrorCode, Invalid, Unavailable
from polywire.link_orders import LinkDefinition, LinkStart
from polywire.links import topic as topic_module
from polywire.links.topic import LinkedTopic
from polywire.links.worker import plan_of
from polywire.protocols.polywire import messages
from polywire.records.columns import Event, Header, HeaderKind, Record
from polywire.records.pieces import covering, piece_of_records
from polywire.records.rows import from_records
from polywire.server.child import connect_child
from polywire.server.config import ServeConfig
from polywire.server.wires import factories_of
from polywire.testing.process import WIRES
from polywire.testing.thread import BrokerThread

PARTITIONS = 2
NAMES = (f"topic{number}" for number in count())


@pytest.fixture(scope="module")
def source() -> Iterator[BrokerThread]:
    with BrokerThread() as running:
        yield running


@pytest.fixture(scope="module")
def target() -> Iterator[BrokerThread]:
    with BrokerThread(wires=["polywire"]) as running:
        yield running


def record(number: int) -> Record:
    header = Header(b"h", b"x", HeaderKind.STRING, HeaderKind.RAW)
    return Record(b"value-%d" % number, b"key-%d" % number, (header,), origin_time_us=1_700_000_000_000_000 + number)


OPEN: list[WireClient] = []


async def as_link(broker: BrokerThread) -> PolywireClient:
    """Connect as the process that runs the links of a broker."""
    ours, theirs = socket.socketpair()

    async def serve() -> None:
        memory = broker._memory
        assert memory is not None
        [factory] = [one for one in factories_of(memory.broker, ServeConfig()) if one.wire == "polywire"]
        await connect_child(broker._hub, [factory], None, ours, LINKS)

    broker._call(serve())
    return await PolywireClient.over(theirs)


def play(scenario: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run a scenario, and close its connections."""

    async def run() -> None:
        try:
            await scenario()
        finally:
            for client in OPEN:
                await client.close()
            OPEN.clear()
            await asyncio.sleep(0)  # transports close in the next pass of the loop

    asyncio.run(run())


class Rig:
    """A topic at a source, and connections to both brokers."""

    def __init__(self, old: PolywireClient, new: PolywireClient, writer: PolywireClient, wire_url: str) -> None:
        """``writer`` is the connection of the process that runs links."""
        self.old = old
        self.new = new
        self.writer = writer
        self.wire_url = wire_url
        self.topic = next(NAMES)
        self.link = LinkDefinition("test", wire_url, (self.topic,))

    async def fill(self, first: int, last: int) -> None:
        for partition in range(PARTITIONS):
            await self.old.produce(self.topic, [record(number) for number in range(first, last)], partition=partition)

    async def rows(self, client: PolywireClient) -> list[list[tuple[int, bytes | None, bytes | None]]]:
        found = []
        for part in await client.bounds(self.topic):
            records: list[Record] = []
            while (offset := records[-1].offset + 1 if records else part.first_offset) < part.next_offset:
                more = await client.fetch(self.topic, part.partition, offset)
                if not more:  # a gap at the end
                    break
                records += more
            found.append([(one.offset, one.key, one.value) for one in records])
        return found

    async def running(self) -> LinkedTopic:
        """Copy everything, and keep the connection."""
        client = await connect(self.wire_url)
        OPEN.append(client)
        linked = LinkedTopic(self.link, self.topic, client, self.writer)
        while await linked.step():
            pass
        return linked

    async def copied(self) -> LinkedTopic:
        """Copy everything with a new connection, as a new process does."""
        client = await connect(self.wire_url)
        try:
            linked = LinkedTopic(self.link, self.topic, client, self.writer)
            while await linked.step():
                pass
            return linked
        finally:
            await client.close()


async def opened(source: BrokerThread, target: BrokerThread, wire: str = "polywire") -> Rig:
    old, new = await connect(source.url()), await connect(target.url())
    assert isinstance(old, PolywireClient)
    assert isinstance(new, PolywireClient)
    writer = await as_link(target)
    OPEN.extend((old, new, writer))
    rig = Rig(old, new, writer, source.url(wire))
    await old.create_topic(rig.topic, PARTITIONS)
    return rig


@pytest.mark.parametrize("wire", WIRES)
def test_every_protocol_can_be_followed(source: BrokerThread, target: BrokerThread, wire: str) -> None:
    async def run() -> None:
        rig = await opened(source, target, wire)
        await rig.fill(0, 3000)
        first = await rig.copied()
        await rig.fill(3000, 3010)
        second = await rig.copied()
        old, new = await rig.rows(rig.old), await rig.rows(rig.new)
        has_keys = wire in ("polywire", "kafka", "cursus")
        assert [[(o, k if has_keys else None, v) for o, k, v in part] for part in old] == new
        assert (first.report().copied, second.report().copied) == (3000 * PARTITIONS, 10 * PARTITIONS)
        assert second.report().lag == 0

    play(run)


def test_headers_and_times_are_copied(source: BrokerThread, target: BrokerThread) -> None:
    async def run() -> None:
        rig = await opened(source, target)
        await rig.fill(0, 1)
        await rig.copied()
        [copy] = await rig.new.fetch(rig.topic, 0, 0)
        assert (copy.headers, copy.origin_time_us) == (record(0).headers, record(0).origin_time_us)

    play(run)


def test_events_are_copied(source: BrokerThread, target: BrokerThread) -> None:
    async def run() -> None:
        rig = await opened(source, target)
        writer = await as_link(source)  # events can otherwise only be written over Cursus
        OPEN.append(writer)
        event = replace(record(1), event=Event("created", 3, 7, b"by test"))
        await writer.stage(token := os.urandom(16), rig.topic, 0, from_records([event, record(2)]))
        await writer.publish(f"events/{rig.topic}", 1, [token])
        await rig.copied()
        first, second = await rig.new.fetch(rig.topic, 0, 0)
        assert (first.event, second.event) == (event.event, None)

    play(run)


class Failing:
    """A client of the target whose requests fail before or after they are executed, in turn."""

    def __init__(self, client: PolywireClient, *, fails_at: int, after: bool) -> None:
        self._client = client
        self._left = fails_at
        self._after = after

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)

    @property
    def abilities(self) -> object:
        return self._client.abilities

    def _fails(self) -> bool:
        self._left -= 1
        return self._left == 0

    async def stage(self, *arguments: object, **options: object) -> int:
        fails = self._fails()
        if fails and not self._after:
            raise Unavailable(ErrorCode.UNREACHABLE, "lost")
        stored = await self._client.stage(*arguments, **options)  # type: ignore[arg-type]
        if fails:
            raise Unavailable(ErrorCode.UNREACHABLE, "lost")
        return stored

    async def publish(self, writer: str, number: int, tokens: Sequence[bytes]) -> messages.Published:
        fails = self._fails()
        if fails and not self._after:
            raise Unavailable(ErrorCode.UNREACHABLE, "lost")
        published = await self._client.publish(writer, number, tokens)
        if fails:
            raise Unavailable(ErrorCode.UNREACHABLE, "lost")
        return published


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_a_write_may_fail_at_any_request(
    source: BrokerThread, target: BrokerThread, fails_at: int, after: bool
) -> None:
    async def run() -> None:
        rig = await opened(source, target)
        await rig.fill(0, 500)
        client = await connect(rig.wire_url)
        failing = Failing(rig.writer, fails_at=fails_at, after=after)
        linked = LinkedTopic(rig.link, rig.topic, client, failing)  # type: ignore[arg-type]
        for _ in range(4):
            try:
                await linked.step()
            except Unavailable:
                linked.forget()
                await rig.fill(500, 510)  # the next attempt reads more
        assert await rig.rows(rig.old) == await rig.rows(rig.new)
        await client.close()

    play(run)


def test_a_late_publish_of_a_failed_attempt_is_refused(source: BrokerThread, target: BrokerThread) -> None:
    """The failed attempt's publish arrives after the next attempt has begun."""

    class Late(Failing):
        late: tuple[str, int, Sequence[bytes]] | None = None

        async def publish(self, writer: str, number: int, tokens: Sequence[bytes]) -> messages.Published:
            if self.late is None:
                self.late = writer, number, tokens
                raise Unavailable(ErrorCode.UNREACHABLE, "no answer yet")
            with suppress(BrokerError):
                await self._client.publish(*self.late)
            return await self._client.publish(writer, number, tokens)

    async def run() -> None:
        rig = await opened(source, target)
        await rig.fill(0, 50)
        client = await connect(rig.wire_url)
        late = Late(rig.writer, fails_at=0, after=False)
        linked = LinkedTopic(rig.link, rig.topic, client, late)  # type: ignore[arg-type]
        with pytest.raises(Unavailable):
            await linked.step()
        linked.forget()
        await rig.fill(50, 60)
        while await linked.step():
            pass
        assert await rig.rows(rig.old) == await rig.rows(rig.new)
        await client.close()

    play(run)


def test_positions_far_apart_are_reached_in_steps(
    source: BrokerThread, target: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_module, "NUMBER_STEP", 3)

    async def run() -> None:
        rig = await opened(source, target)
        await rig.fill(0, 10)
        await rig.copied()
        assert await rig.rows(rig.old) == await rig.rows(rig.new)

    play(run)


def test_latest_begins_after_the_present_records(source: BrokerThread, target: BrokerThread) -> None:
    async def run() -> None:
        rig = await opened(source, target)
        rig.link = LinkDefinition("test", rig.wire_url, (rig.topic,), LinkStart.LATEST)
        await rig.fill(0, 5)
        assert (await rig.copied()).report().copied == 0
        await rig.fill(5, 7)
        assert (await rig.copied()).report().shifted == 0
        assert [[row[::2] for row in part] for part in await rig.rows(rig.new)] == [
            [(5, b"value-5"), (6, b"value-6")]
        ] * 2

    play(run)


def test_latest_continues_after_a_failure_between_partitions(
    source: BrokerThread, target: BrokerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        rig = await opened(source, target)
        rig.link = LinkDefinition("test", rig.wire_url, (rig.topic,), LinkStart.LATEST)
        await rig.fill(0, 5)
        publish, calls = PolywireClient.publish, count()

        async def once(client: PolywireClient, writer: str, number: int, tokens: Sequence[bytes]) -> messages.Published:
            if next(calls):
                raise Unavailable(ErrorCode.UNREACHABLE, "connection lost")
            return await publish(client, writer, number, tokens)

        with monkeypatch.context() as patch:
            patch.setattr(PolywireClient, "publish", once)
            with pytest.raises(Unavailable):
                await rig.copied()
        await rig.copied()
        await rig.fill(5, 7)
        await rig.copied()
        assert [[row[0] for row in part] for part in await rig.rows(rig.new)] == [[5, 6]] * 2

    play(run)


def test_a_topic_that_is_no_copy_is_not_touched(source: BrokerThread, target: BrokerThread) -> None:
    async def run() -> None:
        rig = await opened(source, target)
        await rig.fill(0, 5)
        await rig.new.create_topic(rig.topic, PARTITIONS + 1)
        with pytest.raises(Conflict, match="another number of partitions"):
            await rig.copied()
        await rig.new.delete_topic(rig.topic)
        await rig.new.create_topic(rig.topic, PARTITIONS)
        await rig.new.produce(rig.topic, [Record(b"other")], partition=1)
        with pytest.raises(Conflict, match="records that this link did not write"):
            await rig.copied()
        plan = await plan_of(rig.link, rig.new)
        assert "records that this link did not write" in plan.topics[0].error
        await rig.new.delete_topic(rig.topic)
        await rig.copied()
        await rig.new.delete_topic(rig.topic)  # copied again, from the beginning
        await rig.copied()
        assert await rig.rows(rig.old) == await rig.rows(rig.new)

    play(run)


def test_a_topic_that_was_created_again_at_the_source_is_an_error(source: BrokerThread, target: BrokerThread) -> None:
    async def run() -> None:
        rig = await opened(source, target)
        await rig.fill(0, 5)
        await rig.copied()
        await rig.old.delete_topic(rig.topic)
        await rig.old.create_topic(rig.topic, PARTITIONS)
        await rig.fill(0, 1)
        with pytest.raises(Conflict, match="created again"):
            await rig.copied()

    play(run)


@pytest.mark.parametrize("wire", ["polywire", "kafka"])
@pytest.mark.parametrize(("again", "is_idle"), [(8, False), (5, True), (0, True)])
def test_a_running_link_finds_that_a_topic_was_created_again(
    source: BrokerThread, target: BrokerThread, monkeypatch: pytest.MonkeyPatch, wire: str, again: int, *, is_idle: bool
) -> None:
    """No record of the new topic is published, however soon it has as many records as the old one."""
    monkeypatch.setattr(topic_module, "COUNT_S", 0.0 if is_idle else 1e6)

    async def run() -> None:
        rig = await opened(source, target, wire)
        await rig.fill(0, 5)
        linked = await rig.running()
        before = await rig.rows(rig.new)
        await rig.old.delete_topic(rig.topic)
        await rig.old.create_topic(rig.topic, PARTITIONS)
        await rig.fill(100, 100 + again)
        for _ in range(2):
            with pytest.raises(Conflict, match="created again at the source"):
                await linked.step()
            assert not linked.is_complete
        assert await rig.rows(rig.new) == before

    play(run)


def test_a_running_link_finds_that_a_topic_is_empty(source: BrokerThread, target: BrokerThread) -> None:
    """Cursus has no ids of topics, but reports the end of an empty partition."""

    async def run() -> None:
        rig = await opened(source, target, "cursus")
        await rig.fill(0, 5)
        linked = await rig.running()
        await rig.old.delete_topic(rig.topic)
        await rig.old.create_topic(rig.topic, PARTITIONS)
        with pytest.raises(Conflict, match="created again, or lost records"):
            await linked.step()

    play(run)


def test_more_partitions_at_the_source_are_an_error_until_they_exist_here(
    source: BrokerThread, target: BrokerThread
) -> None:
    async def run() -> None:
        rig = await opened(source, target)
        await rig.fill(0, 5)
        await rig.copied()
        await rig.old.grow_topic(rig.topic, PARTITIONS + 1)
        await rig.old.produce(rig.topic, [record(9)], partition=PARTITIONS)
        with pytest.raises(Conflict, match="add partitions"):
            await rig.copied()
        await rig.new.grow_topic(rig.topic, PARTITIONS + 1)
        await rig.copied()
        assert await rig.rows(rig.old) == await rig.rows(rig.new)

    play(run)


def test_plans_name_what_exists(source: BrokerThread, target: BrokerThread) -> None:
    async def run() -> None:
        rig = await opened(source, target)
        await rig.fill(0, 5)
        plan = await plan_of(rig.link, rig.new)
        assert (plan.topics[0].records, plan.topics[0].creates, plan.topics[0].offsets) == (10, True, "same")
        for pattern in ("nothing", "nothing*"):
            missing = await plan_of(LinkDefinition("test", rig.wire_url, (pattern,)), rig.new)
            assert missing.code == "topic_missing"
            assert "known=" in missing.message
        own = await plan_of(LinkDefinition("test", rig.wire_url, (rig.topic,)), rig.old)
        assert "this broker" in own.message
        unreachable = await plan_of(LinkDefinition("test", "kafka://127.0.0.1:1", ("a",)), rig.new)
        assert unreachable.code == "unreachable"

    play(run)


async def fill_with_gaps(rig: Rig, source: BrokerThread, offsets: Sequence[int], end: int) -> None:
    """Write records at these offsets of the source, as compaction leaves them."""
    writer = await as_link(source)
    OPEN.append(writer)
    for partition in range(PARTITIONS):
        [part] = [part for part in await rig.old.bounds(rig.topic) if part.partition == partition]
        pieces = [piece_of_records([replace(record(offset), offset=offset)]) for offset in offsets]
        ends = [*[piece.first for piece in pieces[1:]], end]
        pieces = [
            piece._replace(next_offset=min(piece.first + 3, stop)) for piece, stop in zip(pieces, ends, strict=True)
        ]
        batches = list(covering(pieces, part.next_offset, end))
        await writer.stage(token := os.urandom(16), rig.topic, partition, b"".join(batches))
        await writer.publish(f"gaps/{rig.topic}/{partition}", end, [token])


OFFSETS = (3, 4, 9, 50_000, 50_001, 50_020)


@pytest.mark.parametrize("wire", ["polywire", "kafka", "iggy", "cursus"])
def test_offsets_without_records_are_copied(source: BrokerThread, target: BrokerThread, wire: str) -> None:
    async def run() -> None:
        rig = await opened(source, target, wire)
        await fill_with_gaps(rig, source, OFFSETS, 50_100)
        first = await rig.copied()
        await rig.fill(50_100, 50_110)
        second = await rig.copied()
        old, new = await rig.rows(rig.old), await rig.rows(rig.new)
        assert [[row[::2] for row in part] for part in old] == [[row[::2] for row in part] for part in new]
        assert [row[0] for row in new[0]][:6] == list(OFFSETS)
        ends = [[part.next_offset for part in await client.bounds(rig.topic)] for client in (rig.old, rig.new)]
        assert ends[0] == ends[1] == [50_110] * PARTITIONS
        assert (first.report().shifted, second.report().shifted) == (0, 0)

    play(run)


def test_a_copy_begins_at_the_first_offset_of_the_source(source: BrokerThread, target: BrokerThread) -> None:
    async def run() -> None:
        rig = await opened(source, target)
        for partition in range(PARTITIONS):
            await rig.old.begin_partition(rig.topic, partition, 5_000_000_000)
        await rig.fill(0, 10)
        linked = await rig.copied()
        assert linked.report().shifted == 0
        old, new = await rig.rows(rig.old), await rig.rows(rig.new)
        assert old == new
        assert [part.first_offset for part in await rig.new.bounds(rig.topic)] == [5_000_000_000] * PARTITIONS

    play(run)


async def everything(reader: PartitionReader) -> list[Record]:
    """Return the records of partition 0."""
    found: list[Record] = []
    location = await reader.first(0)
    while True:
        records, following = await reader.read(0, location)
        if following == location:
            return found
        found += records
        location = following


@pytest.mark.parametrize("wire", WIRES)
def test_every_protocol_reads_the_gaps_of_a_copy(source: BrokerThread, target: BrokerThread, wire: str) -> None:
    """The copy is in ``source``, which serves all protocols."""

    async def run() -> None:
        rig = await opened(target, source)
        await rig.new.create_topic(rig.topic, PARTITIONS)
        await rig.new.delete_topic(rig.topic)
        await fill_with_gaps(rig, target, OFFSETS, 50_100)
        await rig.copied()
        client = await connect(source.url(wire))
        if wire == "flux":  # its responses do not say where a value ends, so only the first one is certain
            found = [(await client.fetch(rig.topic, 0, offset))[0] for offset in OFFSETS]
            found = [replace(one, value=(one.value or b"").partition(b",")[0]) for one in found]
        else:
            found = await everything(reader_of(client, rig.topic))
        assert [one.value for one in found] == [b"value-%d" % offset for offset in OFFSETS]
        if wire != "kafka07":
            assert [one.offset for one in found] == list(OFFSETS)
            for offset in (0, 3, 5, 6, 7, 8, 10, 11, 12, 13, 49_999, 50_002, 50_005, 50_019):
                following = (await client.fetch(rig.topic, 0, offset))[0].offset
                assert following == next(one for one in OFFSETS if one >= offset), offset
        await client.close()

    play(run)


def test_other_clients_cannot_write_gaps(source: BrokerThread, target: BrokerThread) -> None:
    async def run() -> None:
        rig = await opened(source, target)
        batch = next(covering([piece_of_records([replace(record(5), offset=5)])], 0, 10))
        with pytest.raises(Invalid, match="clients must not send"):
            await rig.old.stage(os.urandom(16), rig.topic, 0, batch)
        with pytest.raises(Invalid, match="clients must not send"):
            await rig.old.produce_batch(rig.topic, 0, batch)

    play(run)


def test_a_gap_that_is_too_wide_shifts_the_offsets(source: BrokerThread, target: BrokerThread) -> None:
    async def run() -> None:
        rig = await opened(source, target)
        await rig.fill(0, 2)
        assert (await rig.copied()).report().shifted == 0
        await rig.old.purge_topic(rig.topic)
        for partition in range(PARTITIONS):
            await rig.old.begin_partition(rig.topic, partition, 1 << 33)
        await rig.fill(2, 4)
        linked = await rig.copied()
        report = linked.report()
        assert (report.shifted, report.skipped, report.copied) == (PARTITIONS, PARTITIONS * ((1 << 33) - 2), 4)
        assert [[row[2] for row in part] for part in await rig.rows(rig.new)] == [
            [b"value-%d" % number for number in range(4)]
        ] * PARTITIONS
        await rig.fill(4, 6)
        assert (await rig.copied()).report().shifted == PARTITIONS

    play(run)
