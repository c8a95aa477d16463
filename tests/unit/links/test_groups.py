"""Offsets of groups between the ends of a link: which end leads, how far, and when an offset moves back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count

import pytest

from polywire.client.base import WireClient
from polywire.client.connect import connect
from polywire.client.polywire import PolywireClient
from polywire.errors import Missing
from polywire.link_orders import GroupReport
from polywire.links.groups import Carried, GroupSync, matching_groups
from polywire.records.columns import Record
from polywire.testing.thread import BrokerThread

GROUP = "group-1"  # Iggy's groups of 2023 have such names
NAMES = (f"topic{number}" for number in count())
Offsets = tuple[int | None, int | None]


@pytest.fixture(scope="module")
def source() -> Iterator[BrokerThread]:
    with BrokerThread() as running:
        yield running


@pytest.fixture(scope="module")
def target() -> Iterator[BrokerThread]:
    with BrokerThread(wires=["polywire"]) as running:
        yield running


class Ends:
    """A topic with 100 records in two partitions at both ends of a link."""

    def __init__(self, old: WireClient, new: PolywireClient, topic: str, patterns: Sequence[str]) -> None:
        self.old = old
        self.new = new
        self.topic = topic
        self.ends: tuple[int | None, ...] = (100, 100)
        self.is_reversed = False
        self.reports: tuple[GroupReport, ...] = ()
        self.sync = GroupSync("", patterns, new, self._carried, self._report)

    def _report(self, groups: tuple[GroupReport, ...], error: str) -> None:
        assert not error
        self.reports = groups

    def _carried(self) -> dict[str, Carried]:
        return {self.topic: Carried(self.ends, is_reversed=self.is_reversed)}

    async def carry(self) -> GroupReport:
        await self.sync.carry_once(self.old)
        (found,) = self.reports
        return found

    async def commit(self, client: WireClient, *offsets: int) -> None:
        for number, offset in enumerate(offsets):
            await client.commit(GROUP, self.topic, number, offset)

    async def offsets(self, client: WireClient) -> Offsets:
        return await client.position(GROUP, self.topic, 0), await client.position(GROUP, self.topic, 1)


def play(
    scenario: Callable[[Ends], Awaitable[None]],
    source: BrokerThread,
    target: BrokerThread,
    wire: str = "polywire",
    patterns: Sequence[str] = ("*",),
) -> None:
    async def run() -> None:
        admin, old, new = await connect(source.url()), await connect(source.url(wire)), await connect(target.url())
        assert isinstance(new, PolywireClient)
        topic = next(NAMES)
        for client in (admin, new):
            await client.create_topic(topic, 2)
            for number in range(2):
                await client.produce(topic, [Record(b"value")] * 100, partition=number)
        try:
            if wire == "iggy":
                membership = await old.join(GROUP, topic, "member")
                await old.leave(GROUP, topic, "member", membership.generation)
            await scenario(Ends(old, new, topic, patterns))
        finally:
            for client in (admin, old, new):
                await client.close()
            await asyncio.sleep(0)

    asyncio.run(run())


@pytest.mark.parametrize("wire", ["polywire", "kafka", "iggy"])
def test_the_group_moves_here_and_back(source: BrokerThread, target: BrokerThread, wire: str) -> None:
    async def run(ends: Ends) -> None:
        await ends.commit(ends.old, 10, 20)
        await ends.carry()
        assert await ends.offsets(ends.new) == (10, 20)
        membership = await ends.new.join(GROUP, ends.topic, "member")
        await ends.new.commit(GROUP, ends.topic, 0, 50, member="member", generation=membership.generation)
        assert (await ends.carry()).active == "here"
        assert await ends.offsets(ends.old) == (50, 20)
        # the last commit of the member is carried after it has left
        await ends.new.commit(GROUP, ends.topic, 1, 60, member="member", generation=membership.generation)
        await ends.new.leave(GROUP, ends.topic, "member", membership.generation)
        await ends.carry()
        assert await ends.offsets(ends.old) == (50, 60)
        membership = await ends.old.join(GROUP, ends.topic, "member")
        await ends.old.commit(GROUP, ends.topic, 0, 70, member="member", generation=membership.generation)
        assert (await ends.carry()).active == "source"
        assert await ends.offsets(ends.new) == (70, 60)
        await ends.old.leave(GROUP, ends.topic, "member", membership.generation)

    play(run, source, target, wire)


def test_offsets_end_with_the_copy(source: BrokerThread, target: BrokerThread) -> None:
    async def run(ends: Ends) -> None:
        ends.ends = (40, None)
        await ends.commit(ends.old, 90, 90)
        assert (await ends.carry()).skipped == 1
        assert await ends.offsets(ends.new) == (40, None)
        ends.ends = (100, 100)
        await ends.carry()
        assert await ends.offsets(ends.new) == (90, 90)

    play(run, source, target)


def test_an_offset_moves_back_only_after_a_reset(source: BrokerThread, target: BrokerThread) -> None:
    async def run(ends: Ends) -> None:
        await ends.commit(ends.old, 30, 30)
        await ends.commit(ends.new, 50, 20)
        await ends.carry()
        assert await ends.offsets(ends.new) == (50, 30)
        await ends.commit(ends.old, 60, 60)
        await ends.carry()
        await ends.commit(ends.old, 5, 60)  # a user resets it
        await ends.carry()
        assert await ends.offsets(ends.new) == (5, 60)

    play(run, source, target)


def test_members_at_both_ends_are_an_error(source: BrokerThread, target: BrokerThread) -> None:
    async def run(ends: Ends) -> None:
        await ends.commit(ends.old, 30, 30)
        clients = {client: await client.join(GROUP, ends.topic, "member") for client in (ends.old, ends.new)}
        found = await ends.carry()
        assert (found.active, "both ends" in found.error) == ("both", True)
        assert await ends.offsets(ends.new) == (None, None)
        for client, membership in clients.items():
            await client.leave(GROUP, ends.topic, "member", membership.generation)

    play(run, source, target)


def test_only_chosen_groups_are_carried(source: BrokerThread, target: BrokerThread) -> None:
    async def run(ends: Ends) -> None:
        await ends.commit(ends.old, 30, 30)
        await ends.sync.carry_once(ends.old)
        assert (ends.reports, await ends.offsets(ends.new)) == ((), (None, None))
        assert await matching_groups(ends.old, {ends.topic: 2}, ["group*"]) == [GROUP]
        with pytest.raises(Missing, match="did you mean 'group-1'"):
            await matching_groups(ends.old, {ends.topic: 2}, ["group1"])

    play(run, source, target, patterns=("billing",))


def test_a_group_that_began_here_is_carried_only_if_the_link_is_reversed(
    source: BrokerThread, target: BrokerThread
) -> None:
    async def run(ends: Ends) -> None:
        membership = await ends.new.join(GROUP, ends.topic, "member")
        await ends.commit(ends.new, 30, 30)
        await ends.carry()
        assert await ends.offsets(ends.old) == (None, None)
        ends.is_reversed = True  # so that it can go back
        await ends.carry()
        assert await ends.offsets(ends.old) == (30, 30)
        await ends.new.leave(GROUP, ends.topic, "member", membership.generation)

    play(run, source, target)
