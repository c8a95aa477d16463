"""Topics of a link: copies over every protocol, failures between writes, and topics that are no copies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from itertools import count

import pytest

from polywire.client.connect import connect
from polywire.client.polywire import PolywireClient
from polywire.errors import BrokerError, Conflict, ErrorCode, Unavailable
from polywire.link_orders import LinkDefinition, LinkStart
from polywire.links import topic as topic_module
from polywire.links.topic import LinkedTopic
from polywire.links.worker import plan_of
from polywire.protocols.polywire import messages
from polywire.records.columns import Header, HeaderKind, Record
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


OPEN: list[PolywireClient] = []


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

    def __init__(self, old: PolywireClient, new: PolywireClient, wire_url: str) -> None:
        self.old = old
        self.new = new
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
            while (offset := records[-1].offset + 1 if records else 0) < part.next_offset:
                records += await client.fetch(self.topic, part.partition, offset)
            found.append([(one.offset, one.key, one.value) for one in records])
        return found

    async def copied(self) -> LinkedTopic:
        """Copy everything with a new connection, as a new process does."""
        client = await connect(self.wire_url)
        try:
            linked = LinkedTopic(self.link, self.topic, client, self.new)
            while await linked.step():
                pass
            return linked
        finally:
            await client.close()


async def opened(source: BrokerThread, target: BrokerThread, wire: str = "polywire") -> Rig:
    old, new = await connect(source.url()), await connect(target.url())
    assert isinstance(old, PolywireClient)
    assert isinstance(new, PolywireClient)
    OPEN.extend((old, new))
    rig = Rig(old, new, source.url(wire))
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
        failing = Failing(rig.new, fails_at=fails_at, after=after)
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
        late = Late(rig.new, fails_at=0, after=False)
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
        assert (await rig.copied()).report().shifted == PARTITIONS
        assert [[value for _, _, value in part] for part in await rig.rows(rig.new)] == [[b"value-5", b"value-6"]] * 2

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
