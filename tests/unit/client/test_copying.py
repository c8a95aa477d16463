"""Copying between protocols: every pair on one broker, and recovery when a side dies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from polywire.client import copying
from polywire.client.connect import connect
from polywire.client.copying import FOLLOW_S, RUNS_MAX, Copy, CopyState, End, PartitionProgress, Span, connected
from polywire.client.polywire import PolywireClient
from polywire.errors import BrokerError, Conflict, Invalid, Missing, Unavailable
from polywire.records.columns import Header, HeaderKind, Record
from polywire.testing.process import WIRES
from polywire.testing.thread import BrokerThread

PARTITIONS = 3
RECORDS = 250


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerThread]:
    with BrokerThread() as running:
        asyncio.run(fill(running.url(), "source"))
        yield running


async def fill(url: str, topic: str, first: int = 0) -> None:
    client = await connect(url)
    if topic not in {known.name for known in await client.topics()}:
        await client.create_topic(topic, PARTITIONS)
    for partition in range(PARTITIONS - 1):  # the last partition stays empty
        await client.produce(
            topic, [record(partition, number) for number in range(first, first + RECORDS)], partition=partition
        )
    await client.close()


def record(partition: int, number: int) -> Record:
    return Record(b"value-%d-%d" % (partition, number), b"key%d" % (number % 7))


async def contents(url: str, topic: str) -> list[list[Record]]:
    client = await connect(url)
    found = []
    for part in await client.bounds(topic):
        records: list[Record] = []
        while (offset := records[-1].offset + 1 if records else part.first_offset) < part.next_offset:
            records += await client.fetch(topic, part.partition, offset)
        found.append(records)
    await client.close()
    return found


def values(parts: list[list[Record]]) -> list[list[bytes | None]]:
    return [[record.value for record in part] for part in parts]


def copy(
    source: End, target: End, *, state: CopyState | None = None, span: Span | None = None, skip: bool = False
) -> Copy:
    kept = state or CopyState(str(source), str(target))
    return Copy(source, target, kept, span=span or Span(), skip=skip, patience_s=20)


@pytest.mark.parametrize("to", WIRES)
@pytest.mark.parametrize("of", WIRES)
def test_every_pair_of_protocols(of: str, to: str, broker: BrokerThread) -> None:
    topic = f"copy-{of}-{to}"
    work = copy(End(broker.url(of), "source"), End(broker.url(to), topic))

    async def run() -> tuple[list[list[Record]], list[list[Record]]]:
        await work.run()
        return await contents(broker.url(), "source"), await contents(broker.url(), topic)

    before, after = asyncio.run(run())
    assert (work.outcome.written, work.outcome.found, work.outcome.skipped) == (2 * RECORDS, 0, 0)
    if to == "flux":
        assert Counter(value for part in values(after) for value in part) == Counter(
            value for part in values(before) for value in part
        )
    else:
        assert values(after) == values(before)
    if {of, to} <= {"polywire", "kafka", "cursus"}:
        assert [[one.key for one in part] for part in after] == [[one.key for one in part] for part in before]


@pytest.mark.parametrize("to", WIRES)
def test_records_written_but_not_recorded_are_not_copied_twice(to: str, broker: BrokerThread, tmp_path: Path) -> None:
    """A copy dies after a write, before it records it: the next run finds those records."""
    topic = f"doubt-{to}"
    source, target = End(broker.url(), "source"), End(broker.url(to), topic)
    path = tmp_path / "state"

    class Dying(CopyState):
        def save(self) -> None:
            if self.records:
                raise OSError("killed")
            super().save()

    with pytest.raises(OSError, match="killed"):
        asyncio.run(copy(source, target, state=Dying(str(source), str(target), path=path)).run())
    again = copy(source, target, state=CopyState.load(path, str(source), str(target)))
    asyncio.run(again.run())
    assert again.outcome.found == RECORDS
    assert again.outcome.written == RECORDS
    after = asyncio.run(contents(broker.url(), topic))
    assert Counter(value for part in values(after) for value in part) == Counter(
        record(partition, number).value for partition in range(2) for number in range(RECORDS)
    )


def test_a_copy_resumes_from_its_state(broker: BrokerThread, tmp_path: Path) -> None:
    source, target, path = End(broker.url(), "grows"), End(broker.url("kafka"), "grows-copy"), tmp_path / "state"
    for first in (0, RECORDS):
        asyncio.run(fill(broker.url(), "grows", first))
        work = copy(source, target, state=CopyState.load(path, str(source), str(target)))
        asyncio.run(work.run())
        assert (work.outcome.written, work.outcome.found) == (2 * RECORDS, 0)
    before, after = (asyncio.run(contents(broker.url(), topic)) for topic in ("grows", "grows-copy"))
    assert values(before) == values(after)
    with pytest.raises(Invalid, match="another copy"):
        CopyState.load(path, str(source), str(End(broker.url(), "other")))
    path.write_text("{")
    with pytest.raises(Invalid, match="not the state of a copy"):
        CopyState.load(path, str(source), str(target))


def test_a_group_of_an_iggy_sdk_is_copied_with_a_login_only(broker: BrokerThread) -> None:
    bare = End(broker.url("iggy"), "shop.named")
    source = End(broker.url("iggy").replace("://", "://iggy:iggy@"), "shop.named")
    target = End(broker.url(), "shop.named-copy")

    async def run() -> None:
        client = await connect(source.url)
        await client.create_topic(source.topic, 1)
        await client.produce(source.topic, [Record(b"%d" % number) for number in range(4)], partition=0)
        await client.join("billing", source.topic, "m")
        await client.commit("billing", source.topic, 0, 3)
        await client.close()
        with pytest.raises(
            Missing, match=r"known=group-1 \(without a login, Iggy groups have numbers only: use iggy://na"
        ):
            await copy(bare, target).check_groups(["billing"])
        work = copy(source, target)
        await work.run()
        assert await work.commit_positions(["billing"]) == [("billing", 0, 3, 3)]
        reader = await connect(broker.url())
        assert await reader.position("billing", target.topic, 0) == 3
        await reader.close()

    asyncio.run(run())


def test_headers_times_and_ids_are_copied_if_the_target_has_them(broker: BrokerThread) -> None:
    headers = (
        Header(b"h", b"\x01\x02\x03\x04", value_kind=HeaderKind.INT32),
        Header(b"t", b"x", value_kind=HeaderKind.STRING),
    )
    full = Record(b"v", b"k", headers, id=b"i" * 16, origin_time_us=1_700_000_000_123_456)

    async def run() -> None:
        client = await connect(broker.url())
        await client.create_topic("full", 1)
        await client.produce("full", [full, Record(None, b"k")], partition=0)
        lost = {}
        for wire in ("polywire", "kafka", "cursus", "iggy"):
            work = copy(End(broker.url(), "full"), End(broker.url(wire), f"full-{wire}"), skip=True)
            await work.run()
            lost[wire] = {name for name, count in work.outcome.lost.items() if count}, work.outcome.skipped
            assert (await client.bounds(f"full-{wire}"))[0].next_offset == 2 - work.outcome.skipped
        assert lost == {
            "polywire": (set(), 0),
            "kafka": ({"ids", "microseconds", "kinds_of_headers"}, 0),
            "cursus": ({"ids", "times", "headers", "null_values_made_empty"}, 0),
            "iggy": ({"keys", "times", "null_values_made_empty"}, 1),
        }
        [one, none] = (await contents(broker.url(), "full-polywire"))[0]
        assert (one.value, one.key, one.headers, one.id) == (full.value, full.key, full.headers, full.id)
        assert one.origin_time_us == full.origin_time_us
        assert none.value is None
        [one, none] = (await contents(broker.url(), "full-kafka"))[0]
        assert [(header.key, header.value) for header in one.headers] == [(h.key, h.value) for h in headers]
        assert one.origin_time_us == 1_700_000_000_123_000
        with pytest.raises(Invalid, match=r"a record cannot be copied .* partition=0 offset=1"):
            await copy(End(broker.url(), "full"), End(broker.url("iggy"), "full-again")).run()
        await client.close()

    asyncio.run(run())


def test_ranges(broker: BrokerThread) -> None:
    async def run() -> list[list[Record]]:
        source = End(broker.url(), "source")
        moment = (await contents(broker.url(), "source"))[1][0].append_time_us
        await copy(source, End(broker.url(), "range"), span=Span(0, begin=10, until=20)).run()
        timed = copy(source, End(broker.url(), "timed"), span=Span(1, begin_time_us=moment))
        await timed.run()
        assert timed.outcome.written == RECORDS
        with pytest.raises(Missing, match="no such partition"):
            await copy(source, End(broker.url(), "range"), span=Span(9)).run()
        with pytest.raises(Missing):
            await copy(End(broker.url(), "nowhere"), End(broker.url(), "range-b")).run()
        return await contents(broker.url(), "range")

    assert values(asyncio.run(run())) == [[record(0, number).value for number in range(10, 20)], [], []]


@pytest.mark.parametrize("to", ["polywire", "cursus", "iggy"])
def test_offsets_of_groups_are_copied(to: str, broker: BrokerThread) -> None:
    topic = f"groups-{to}"

    async def run() -> dict[int, int | None]:
        client = await connect(broker.url())
        await client.create_topic(topic, PARTITIONS)
        await client.produce(topic, [Record(b"x")] * 5, partition=0)  # so that offsets differ from those of the source
        for partition, offset in ((0, 17), (1, RECORDS)):
            await client.commit("billing", "source", partition, offset)
        work = copy(End(broker.url(), "source"), End(broker.url(to), topic))
        await work.run()
        moved = await work.commit_positions(["billing"])
        assert moved == [("billing", 0, 17, 22), ("billing", 1, RECORDS, RECORDS)]
        wire = await connect(broker.url(to))
        found = {number: await wire.position("billing", topic, number) for number in (0, 1)}
        await wire.close()
        await client.close()
        return found

    assert asyncio.run(run()) == {0: 22, 1: RECORDS}
    with pytest.raises(Invalid, match="cannot be translated"):
        asyncio.run(copy(End(broker.url("kafka07"), "source"), End(broker.url(), topic)).commit_positions(["billing"]))


def test_records_of_another_producer_are_reported_and_nothing_is_lost(broker: BrokerThread, tmp_path: Path) -> None:
    source, target, path = End(broker.url(), "source"), End(broker.url(), "shared"), tmp_path / "state"

    async def run() -> Copy:
        await copy(source, target, state=CopyState.load(path, str(source), str(target)), span=Span(until=100)).run()
        client = await connect(broker.url())
        await client.produce("shared", [Record(b"foreign")] * 3, partition=0)
        work = copy(source, target, state=CopyState.load(path, str(source), str(target)))
        await work.run()
        await client.close()
        return work

    work = asyncio.run(run())
    assert work.outcome.written == 2 * RECORDS - 200
    assert list(work.outcome.remarks) == ["another producer writes to the target records=3"]
    found = values(asyncio.run(contents(broker.url(), "shared")))
    assert [value for value in found[0] if value != b"foreign"] == [
        record(0, number).value for number in range(RECORDS)
    ]


@pytest.mark.parametrize("killed", ["source", "target"])
@pytest.mark.parametrize("to", ["polywire", "kafka", "iggy", "kafka07", "flux"])
def test_a_broker_killed_during_a_copy(killed: str, to: str) -> None:
    with BrokerThread(wires=["polywire"]) as old, BrokerThread(wires=["polywire", to]) as new:
        asyncio.run(fill(old.url(), "orders"))
        victim = old if killed == "source" else new
        kills: list[int] = []

        class Killing(CopyState):
            def save(self) -> None:
                super().save()
                if self.records and len(kills) < 2:
                    kills.append(self.records)
                    victim.kill()
                    victim.start()

        source, target = End(old.url(), "orders"), End(new.url(to), "orders")
        work = copy(source, target, state=Killing(str(source), str(target)))
        asyncio.run(work.run())
        before, after = (asyncio.run(contents(broker.url(), "orders")) for broker in (old, new))
    assert kills
    assert Counter(v for part in values(after) for v in part) == Counter(v for part in values(before) for v in part)


async def until_count(url: str, topic: str, count: int) -> None:
    """Wait until a topic has that many records."""
    found = 0
    for _ in range(600):
        with suppress(BrokerError):
            async with connected(url) as client:
                found = sum(part.next_offset for part in await client.bounds(topic))
        if found == count:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"the topic has other records than expected found={found} expected={count}")


@pytest.mark.parametrize("to", ["polywire", "kafka07"])
def test_a_copy_follows_new_records_until_it_is_stopped(to: str, tmp_path: Path) -> None:
    """Both brokers restart while the copy has nothing to do."""
    each = RECORDS * (PARTITIONS - 1)

    async def run(old: BrokerThread, new: BrokerThread) -> None:
        source, target = End(old.url(), "orders"), End(new.url(to), "orders")
        state = CopyState.load(tmp_path / "state", str(source), str(target))
        lags: list[int] = []
        work = Copy(
            source, target, state, span=Span(), follow=True, on_progress=lambda outcome: lags.append(outcome.lag)
        )
        task = asyncio.create_task(work.run())
        await until_count(new.url(), "orders", each)
        await fill(old.url(), "orders", RECORDS)
        await until_count(new.url(), "orders", 2 * each)
        for broker in (old, new):
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.start)
        await fill(old.url(), "orders", 2 * RECORDS)
        await until_count(new.url(), "orders", 3 * each)
        await asyncio.sleep(3 * FOLLOW_S)
        work.stop()
        await asyncio.wait_for(task, 30)
        assert work.outcome.lag == 0
        assert max(lags) > 0
        again = copy(source, target, state=CopyState.load(tmp_path / "state", str(source), str(target)))
        await again.run()
        assert (again.outcome.written, again.outcome.found) == (0, 0)

    with BrokerThread(wires=["polywire"]) as old, BrokerThread(wires=sorted({"polywire", to})) as new:
        asyncio.run(fill(old.url(), "orders"))
        asyncio.run(run(old, new))
        before, after = (asyncio.run(contents(broker.url(), "orders")) for broker in (old, new))
    assert values(after) == values(before)


def test_new_partitions_end_a_copy_that_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "COUNT_S", 0.0)

    async def run(url: str) -> None:
        await fill(url, "grows")
        work = Copy(End(url, "grows"), End(url, "copy"), CopyState("a", "b"), span=Span(), follow=True)
        task = asyncio.create_task(work.run())
        await until_count(url, "copy", RECORDS * (PARTITIONS - 1))
        async with connected(url) as client:
            assert isinstance(client, PolywireClient)
            await client.grow_topic("grows", PARTITIONS + 1)
        with pytest.raises(Conflict, match="partitions of the source has changed"):
            await asyncio.wait_for(task, 30)

    with BrokerThread(wires=["polywire"]) as broker:
        asyncio.run(run(broker.url()))


def test_an_unreachable_broker_is_reported_at_once() -> None:
    work = copy(End("polywire://127.0.0.1:1", "a"), End("polywire://127.0.0.1:1", "b"))
    with pytest.raises(Unavailable, match="connection refused"):
        asyncio.run(work.run())


def test_source_offsets_map_to_target_offsets() -> None:
    part = PartitionProgress()
    for source, target in ((5, 0), (6, 1), (9, 2), (10, 3), (11, 7)):
        part.note(source, target)
    assert [part.target_of(offset) for offset in (0, 5, 6, 7, 8, 9, 10, 11, 12, 99)] == [0, 0, 1, 2, 2, 2, 3, 7, 8, 8]
    wide = PartitionProgress()
    for number in range(RUNS_MAX + 10):
        wide.note(2 * number, number)
    assert len(wide.runs) <= RUNS_MAX
    assert all(wide.target_of(2 * number) <= number for number in range(RUNS_MAX + 10)), "no record is missing"
