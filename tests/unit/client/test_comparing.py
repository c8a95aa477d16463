"""Comparisons of topics: over every pair of protocols, each kind of difference, and what counts as equal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import count

import pytest

from polywire.client import comparing
from polywire.client.comparing import Compared, Comparison, Pair, Rules, topics_matching
from polywire.client.copying import Copy, CopyState, End, Span, connected
from polywire.client.polywire import PolywireClient
from polywire.errors import Invalid, Missing
from polywire.records.columns import Header, HeaderKind, Record
from polywire.testing.process import WIRES
from polywire.testing.thread import BrokerThread

NAMES = (f"topic{number}" for number in count())


@pytest.fixture(scope="module")
def old() -> Iterator[BrokerThread]:
    with BrokerThread() as running:
        yield running


@pytest.fixture(scope="module")
def new() -> Iterator[BrokerThread]:
    with BrokerThread() as running:
        yield running


def record(number: int) -> Record:
    header = Header(b"h", b"x", HeaderKind.STRING, HeaderKind.RAW)
    return Record(b"value-%d" % number, b"key-%d" % number, (header,), origin_time_us=1_700_000_000_000_000 + number)


def records(first: int, last: int) -> list[Record]:
    return [record(number) for number in range(first, last)]


def changed(number: int, **fields: object) -> Record:
    base = record(number)
    values = {"value": base.value, "key": base.key, "headers": base.headers, "origin_time_us": base.origin_time_us}
    return Record(**{**values, **fields})  # type: ignore[arg-type]


def fill(url: str, topic: str, content: Sequence[Record], partitions: int = 1) -> None:
    async def run() -> None:
        async with connected(url) as client:
            await client.create_topic(topic, partitions)
            for number in range(partitions):
                await client.produce(topic, content, partition=number)

    asyncio.run(run())


def compare(
    source: str, copy: str, topic: str, rules: Rules | None = None, *, may_continue: bool = False
) -> list[Compared]:
    async def run() -> list[Compared]:
        async with connected(source) as ours, connected(copy) as theirs:
            comparison = Comparison(ours, theirs, rules or Rules())
            return [row async for row in comparison.run(Pair(topic, topic), may_continue=may_continue)]

    return asyncio.run(run())


def one(
    old: BrokerThread, new: BrokerThread, ours: Sequence[Record], theirs: Sequence[Record], **rules: bool
) -> Compared:
    topic = next(NAMES)
    fill(old.url(), topic, ours)
    fill(new.url(), topic, theirs)
    [row] = compare(old.url(), new.url(), topic, Rules(**rules))  # type: ignore[arg-type]
    return row


@pytest.mark.parametrize("wire", WIRES)
def test_a_copy_over_every_protocol_is_equal(old: BrokerThread, new: BrokerThread, wire: str) -> None:
    topic = next(NAMES)
    fill(old.url(), topic, records(0, 2_500), partitions=2)
    ends = End(old.url(wire), topic), End(new.url(), topic)
    asyncio.run(Copy(*ends, CopyState.load(None, *map(str, ends)), span=Span()).run())
    rows = compare(old.url(wire), new.url(), topic)
    assert [(row.result, row.source_records, row.copy_records) for row in rows] == [("equal", 2_500, 2_500)] * 2
    assert rows[0].source_checksum == rows[0].copy_checksum
    assert rows[0].source_last == (None if wire == "kafka07" else 2_499)
    backwards = compare(new.url(), old.url(wire), topic, Rules(ignored=frozenset({"timestamp"})))
    assert [row.result for row in backwards] == ["equal"] * 2


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("key", changed(7, key=b"other")),
        ("key", changed(7, key=None)),
        ("value", changed(7, value=b"other")),
        ("value", changed(7, value=None)),
        ("headers", changed(7, headers=())),
        ("headers", changed(7, headers=(Header(b"h", b"x", HeaderKind.STRING, HeaderKind.STRING),))),
        ("timestamp", changed(7, origin_time_us=1)),
    ],
)
def test_the_first_difference_is_found(old: BrokerThread, new: BrokerThread, name: str, other: Record) -> None:
    row = one(old, new, records(0, 20), [*records(0, 7), other, *records(8, 20)])
    assert row.result == "different"
    assert row.difference is not None
    assert (row.difference.offset, row.difference.field) == (7, name)
    assert row.difference.source != row.difference.copy
    assert row.source_checksum != row.copy_checksum


def test_a_record_that_is_missing_in_the_middle(old: BrokerThread, new: BrokerThread) -> None:
    row = one(old, new, records(0, 20), [*records(0, 7), *records(8, 20)], is_prefix_equal=True)
    assert row.result == "different"
    assert row.difference is not None
    assert (row.difference.offset, row.difference.field) == (7, "key")


def test_ranges_that_differ_are_listed(old: BrokerThread, new: BrokerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "RANGE", 10)
    monkeypatch.setattr(comparing, "RANGES_MAX", 2)
    theirs = records(0, 100)
    for number in (15, 55, 56, 99):
        theirs[number] = changed(number, value=b"")
    row = one(old, new, records(0, 100), theirs)
    assert [found.first for found in row.ranges] == [10, 50]
    assert (row.different_ranges, row.ranges[0].source_records) == (3, 10)


def test_a_prefix_is_equal_only_if_it_may_be(old: BrokerThread, new: BrokerThread) -> None:
    row = one(old, new, records(0, 20), records(0, 15), is_prefix_equal=True)
    assert (row.result, row.missing, row.source_records, row.only_source) == ("prefix", 5, 15, 0)
    row = one(old, new, records(0, 20), records(0, 15))
    assert (row.result, row.only_source) == ("different", 5)
    row = one(old, new, records(0, 15), records(0, 20), is_prefix_equal=True)
    assert (row.result, row.only_copy) == ("different", 5)
    assert row.difference is not None
    [row] = compare(old.url(), new.url(), row.topic, may_continue=True)
    assert (row.result, row.copy_records, row.continued) == ("equal", 15, 5)
    row = one(old, new, records(0, 15), [], is_prefix_equal=True)
    assert (row.result, row.missing) == ("prefix", 15)
    assert one(old, new, [], []).result == "equal"


def test_records_are_compared_in_order_without_offsets(old: BrokerThread, new: BrokerThread) -> None:
    topic = next(NAMES)
    fill(old.url(), topic, records(0, 20))
    fill(new.url(), topic, records(0, 15))
    [row] = compare(old.url("kafka07"), new.url(), topic, Rules(is_prefix_equal=True))
    assert (row.result, row.missing, row.source_last) == ("prefix", 5, None)
    [row] = compare(old.url("kafka07"), new.url(), topic)
    assert (row.result, row.only_source) == ("different", 5)
    assert row.difference is not None
    assert row.difference.offset == 15
    with pytest.raises(Invalid, match="by offset only"):
        compare(old.url("kafka07"), new.url(), topic, Rules(is_overlap_only=True))


def test_ignored_fields_are_not_compared(old: BrokerThread, new: BrokerThread) -> None:
    topic = next(NAMES)
    fill(old.url(), topic, records(0, 5))
    fill(new.url(), topic, [changed(number, key=None, value=b"") for number in range(5)])
    [row] = compare(old.url(), new.url(), topic, Rules(ignored=frozenset({"key", "value"})))
    assert row.result == "equal"
    with pytest.raises(Invalid, match="known="):
        compare(old.url(), new.url(), topic, Rules(ignored=frozenset({"kee"})))


def test_a_missing_topic_or_partition_is_a_difference(old: BrokerThread, new: BrokerThread) -> None:
    topic = next(NAMES)
    fill(old.url(), topic, records(0, 5), partitions=2)
    rows = compare(old.url(), new.url(), topic, Rules(is_prefix_equal=True))
    assert [row.difference and row.difference.field for row in rows] == ["partition"] * 2
    fill(new.url(), topic, records(0, 5), partitions=3)
    assert [row.result for row in compare(old.url(), new.url(), topic)] == ["equal", "equal", "different"]


def test_a_change_at_the_end_of_a_long_value_is_shown(old: BrokerThread, new: BrokerThread) -> None:
    row = one(old, new, [Record(b"x" * 5000 + b"\xffa")], [Record(b"x" * 5000 + b"\x1b[2Jb")])
    assert row.difference is not None
    assert row.difference.source == "…xxxxxxxxxx\\xffa"
    assert row.difference.copy == "…xxxxxxxxxx\x1b[2Jb"  # escaped when it is printed


def test_names_that_do_not_exist_are_named(old: BrokerThread) -> None:
    topic = next(NAMES)
    fill(old.url(), f"some.{topic}", [])

    async def run() -> None:
        async with connected(old.url()) as client:
            assert isinstance(client, PolywireClient)
            assert await topics_matching(client, [f"some.{topic}*", f"some.{topic}"], role="source") == [
                f"some.{topic}"
            ]
            with pytest.raises(Missing, match="no topic matches"):
                await topics_matching(client, ["none*"], role="source")
            with pytest.raises(Missing, match=f"did you mean 'some.{topic}'"):
                await topics_matching(client, [f"some.{topic}s"], role="source")
        async with connected(old.url("kafka07")) as client:
            assert await topics_matching(client, ["a"], role="source") == ["a"]
            with pytest.raises(Invalid):
                await topics_matching(client, ["a*"], role="source")

    asyncio.run(run())
