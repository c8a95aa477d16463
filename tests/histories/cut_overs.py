"""Histories of cut-overs: producers and the members of a group move from a source to its copy, while processes are killed.

``python -m tests.histories.cut_overs --rounds 20 --seed 7``. In each round, a producer writes numbered records to a topic
that a link follows, and a group reads them. At a random moment the producer stops, the topic is cut over, and the producer
continues here; the group moves before or after. At the end of each round, the topic must have every record that was
acknowledged, once and in order, the source must have the records up to the cut-over, and the group must have read all.
The pause is the time between the last acknowledgement at the source and the first one here.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, Protocol

from polywire.cli.admin import AdminApi
from polywire.cli.output import Failed
from polywire.client.base import WireClient
from polywire.client.copying import connected
from polywire.errors import BrokerError, PeerError
from polywire.link_orders import Phase
from polywire.records.columns import Record
from polywire.testing.process import BrokerProcess
from tests.histories.links import Wrong, workers

LINK: Final = "old"
GROUP: Final = "billing"
PARTITIONS: Final = 3
BATCH: Final = 20
PAUSE_S: Final = 0.02  # between batches
RUN_S: Final = (0.3, 3.0)  # before and after a cut-over
CUT_OVER_S: Final = 120.0
END_S: Final = 60.0
LOST = (BrokerError, PeerError, OSError)


class Source(Protocol):
    """The broker that the link follows."""

    def url(self) -> str: ...

    def kill(self) -> None: ...

    def start(self) -> object: ...


@dataclass
class Round:
    """One topic, its producer and its group. ``url`` is where each of them is now."""

    topic: str
    producer_url: str
    member_url: str
    numbers: count[int] = field(default_factory=count)
    sent: set[int] = field(default_factory=set)
    acknowledged: set[int] = field(default_factory=set)
    read: list[list[int]] = field(default_factory=lambda: [[] for _ in range(PARTITIONS)])
    last_at: float = 0.0
    first_here_at: float = 0.0
    may_produce: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False
    producing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def produce(self) -> None:
        """Write records until the round is over. A record whose outcome is unknown is not sent again."""
        while not self.is_over:
            await self.may_produce.wait()
            url = self.producer_url
            with suppress(*LOST):
                async with connected(url) as client:
                    while not self.is_over and self.may_produce.is_set() and url == self.producer_url:
                        async with self.producing:
                            if self.may_produce.is_set():
                                await self._send(client)
                        await asyncio.sleep(PAUSE_S)
            await asyncio.sleep(0.02)

    async def _send(self, client: WireClient) -> None:
        for partition in range(PARTITIONS):
            numbers = [next(self.numbers) for _ in range(BATCH)]
            self.sent.update(numbers)
            records = [Record(b"%d" % number, b"key") for number in numbers]
            await client.produce(self.topic, records, partition=partition)
            self.acknowledged.update(numbers)
            self.last_at = time.monotonic()
            self.first_here_at = self.first_here_at or self.last_at

    async def consume(self) -> None:
        """Read as the only member of the group until the round is over."""
        while not self.is_over:
            url = self.member_url
            with suppress(*LOST):
                async with connected(url) as client:
                    await self._read(client, url)
            await asyncio.sleep(0.05)

    async def _read(self, client: WireClient, url: str) -> None:
        member = "member"  # the same after a failure, because the broker has not removed it yet
        membership = await client.join(GROUP, self.topic, member)
        try:
            offsets = [await client.position(GROUP, self.topic, number) or 0 for number in range(PARTITIONS)]
            while not self.is_over and url == self.member_url:
                membership = await client.heartbeat(GROUP, self.topic, member, membership.generation)
                for number in range(PARTITIONS):
                    records = await client.fetch(self.topic, number, offsets[number], records_max=1000)
                    if records:
                        self.read[number] += [int(record.value or b"") for record in records]
                        offsets[number] = records[-1].offset + 1
                        await client.commit(
                            GROUP,
                            self.topic,
                            number,
                            offsets[number],
                            member=member,
                            generation=membership.generation,
                        )
                await asyncio.sleep(PAUSE_S)
        finally:
            with suppress(*LOST):
                await client.leave(GROUP, self.topic, member, membership.generation)


@dataclass
class World:
    """A source, a broker that follows it, and the faults of this history."""

    source: Source
    broker: BrokerProcess
    chance: random.Random
    pauses: list[float] = field(default_factory=list)
    calm_pauses: list[float] = field(default_factory=list)
    faults: int = 0
    records: int = 0
    read_again: int = 0

    def kill_worker(self) -> None:
        for pid in workers(self.broker):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_broker(self) -> None:
        self.broker.kill()
        self.broker.start()

    def kill_source(self) -> None:
        self.source.kill()
        self.source.start()

    async def disturb(self, ending: asyncio.Event) -> None:
        """Inject faults at random moments until the round ends."""
        faults = (self.kill_worker, self.kill_worker, self.kill_broker, self.kill_source)
        while not ending.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self.chance.uniform(0.05, 2.0)):
                    await ending.wait()
                    return
            await asyncio.to_thread(self.chance.choice(faults))
            self.faults += 1

    async def cut_over(self, topic: str) -> None:
        """Cut a topic over, as the command does."""
        end = time.monotonic() + CUT_OVER_S
        while time.monotonic() < end:
            with suppress(Failed, *LOST):
                found = await asyncio.to_thread(
                    AdminApi(self.broker.url("http")).request, "POST", f"links/{LINK}/cut-over", {"topics": [topic]}
                )
                if all(row["phase"] == Phase.CUT_OVER.value for row in found["topics"]):
                    return
            await asyncio.sleep(0.02)
        state = AdminApi(self.broker.url("http")).request("GET", f"links/{LINK}")
        raise Wrong(f"the topic is not cut over state={state}\n{self.broker.log_text()[-3000:]}")

    async def run_round(self, number: int, *, calm: bool) -> None:
        """Move one topic. Raises Wrong."""
        topic = f"orders{number}"
        async with connected(self.source.url()) as client:
            await client.create_topic(topic, PARTITIONS)
        round_ = Round(topic, self.source.url(), self.source.url())
        round_.may_produce.set()
        ending = asyncio.Event()
        tasks = [asyncio.create_task(round_.produce()), asyncio.create_task(round_.consume())]
        if not calm:
            tasks.append(asyncio.create_task(self.disturb(ending)))
        try:
            await self._move(round_)
            await asyncio.sleep(self.chance.uniform(*RUN_S))
            ending.set()
            await self._finish(round_)
        finally:
            ending.set()
            round_.is_over = True
            round_.may_produce.set()
            await asyncio.gather(*tasks)
        pause = round_.first_here_at - self._stopped_at
        self.pauses.append(pause)
        if calm:
            self.calm_pauses.append(pause)

    async def _move(self, round_: Round) -> None:
        while round_.topic not in await self._topics():  # noqa: ASYNC110 - the link finds it
            await asyncio.sleep(0.1)
        await asyncio.sleep(self.chance.uniform(*RUN_S))
        is_early = self.chance.random() < 0.5
        if is_early:
            round_.member_url = self.broker.url()
            await asyncio.sleep(self.chance.uniform(*RUN_S))
        round_.may_produce.clear()
        async with round_.producing:
            self._stopped_at = round_.last_at
        round_.first_here_at = 0.0
        await self.cut_over(round_.topic)
        round_.producer_url = self.broker.url()
        round_.may_produce.set()
        if not is_early:
            await asyncio.sleep(self.chance.uniform(0, 1))
            round_.member_url = self.broker.url()

    async def _topics(self) -> set[str]:
        with suppress(*LOST):
            async with connected(self.broker.url()) as client:
                return {info.name for info in await client.topics()}
        return set()

    async def _finish(self, round_: Round) -> None:
        """Stop the producer, let the group read the rest, and check the round. Raises Wrong."""
        round_.may_produce.clear()
        async with round_.producing:
            pass
        if not round_.first_here_at:
            raise Wrong(f"nothing was written here topic={round_.topic}\n{self.broker.log_text()[-3000:]}")
        copy, original = await self._numbers(self.broker.url(), round_), await self._numbers(self.source.url(), round_)
        for partition, (ours, theirs) in enumerate(zip(copy, original, strict=True)):
            where = f"topic={round_.topic} partition={partition}"
            if ours[: len(theirs)] != theirs:
                raise Wrong(f"the copy differs from the source {where}")
            if ours != sorted(set(ours)):
                raise Wrong(f"records are doubled or reordered {where}")
        found = {number for numbers in copy for number in numbers}
        if not round_.acknowledged <= found <= round_.sent:
            missing = sorted(round_.acknowledged - found)
            raise Wrong(f"records are lost topic={round_.topic} count={len(missing)} first={missing[:5]}")
        end = time.monotonic() + END_S
        while {number for numbers in round_.read for number in numbers} != found:
            if time.monotonic() > end:
                missing = sorted(found - {number for numbers in round_.read for number in numbers})
                raise Wrong(f"the group has not read records topic={round_.topic} count={len(missing)} {missing[:5]}")
            await asyncio.sleep(0.05)
        self.records += len(found)
        self.read_again += sum([len(numbers) for numbers in round_.read]) - len(found)

    async def _numbers(self, url: str, round_: Round) -> list[list[int]]:
        for _ in range(100):
            with suppress(*LOST):
                async with connected(url) as client:
                    return [await _read_all(client, round_.topic, number) for number in range(PARTITIONS)]
            await asyncio.sleep(0.1)
        raise Wrong(f"the topic cannot be read url={url} topic={round_.topic}")

    _stopped_at: float = 0.0


async def _read_all(client: WireClient, topic: str, partition: int) -> list[int]:
    found: list[int] = []
    offset = 0
    while records := await client.fetch(topic, partition, offset):
        found += [int(record.value or b"") for record in records]
        offset = records[-1].offset + 1
    return found


def run(
    folder: Path,
    *,
    seed: int,
    rounds: int,
    source: Source | None = None,
    options: Sequence[str] = (),
    report: Callable[[str], object] = print,
) -> World:
    """Run that many rounds, half of them without faults. Raises Wrong."""
    with BrokerProcess(folder / "data", *options, wires=["polywire", "http"]) as broker:
        if source is not None:
            return _run(World(source, broker, random.Random(seed)), rounds, report)
        with BrokerProcess(folder / "source", wires=["polywire"]) as original:
            return _run(World(original, broker, random.Random(seed)), rounds, report)


def _run(world: World, rounds: int, report: Callable[[str], object]) -> World:
    body = {"source": world.source.url(), "topics": ["orders*"]}
    # a link needs a topic that it can follow
    asyncio.run(_create(world.source.url(), "orders"))
    AdminApi(world.broker.url("http")).request("POST", f"links/{LINK}", body)
    for number in range(rounds):
        asyncio.run(world.run_round(number, calm=number % 2 == 0))
        report(f"round {number}: pause {world.pauses[-1]:.3f} s, {world.records} records, {world.faults} faults")
    return world


async def _create(url: str, topic: str) -> None:
    async with connected(url) as client:
        await client.create_topic(topic, PARTITIONS)


def main() -> int:
    """Run one history; the exit code is 0 if nothing is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    options = ("--processes", str(given.processes)) if given.processes > 1 else ()
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        world = run(Path(folder), seed=given.seed, rounds=given.rounds, options=options)
    for name, pauses in (("without faults", world.calm_pauses), ("all", world.pauses)):
        print(f"pause, {name}: median {median(pauses):.3f} s, worst {max(pauses):.3f} s, {len(pauses)} rounds")
    print(f"{world.records} records, {world.faults} faults, {world.read_again} read again by the group")
    return 0


if __name__ == "__main__":
    sys.exit(main())
