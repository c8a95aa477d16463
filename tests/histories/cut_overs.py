"""Histories of cut-overs: producers and the members of a group move from a source to its copy, while processes are killed.

``python -m tests.histories.cut_overs --rounds 20 --seed 7``. In each round, a producer writes numbered records to a topic
that a link follows, and a group reads them. At a random moment the producer stops, the topic is cut over, and the producer
continues here; the group moves before or after. Half of the cut-overs are reversed, and half of those fall back. At the
end of each round, the topic must have every record that was acknowledged, once and in order, the source must have the
records up to the cut-over, or all if it is reversed, and the group must have read all. The pause is the time between the
last acknowledgement at one end and the first one at the other.

``--wire kafka`` lets the link follow the source over Kafka's protocol; cut-overs of the older ones cannot be reversed.
``--kafka`` uses Apache Kafka as the source (benchmarks/peers/kafka.py), and ``--confluent INTERPRETER`` confluent-kafka as
producer and member of the group.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, Protocol

from benchmarks.peers.kafka import JARS, Kafka
from benchmarks.peers.peer import find, server_process
from polywire.cli.admin import AdminApi
from polywire.cli.output import Failed
from polywire.client.base import Membership, WireClient
from polywire.client.copying import connected
from polywire.errors import BrokerError, PeerError
from polywire.link_orders import REVERSIBLE, Phase
from polywire.records.columns import Record
from tests.broker_process import BrokerProcess
from tests.histories.links import Wrong, workers

LINK: Final = "old"
GROUP: Final = "billing"
PARTITIONS: Final = 3
BATCH: Final = 20
PAUSE_S: Final = 0.02  # between batches
RUN_S: Final = (0.3, 3.0)  # before and after a cut-over
FAULTS_MAX: Final = 6  # of one round
CUT_OVER_S: Final = 120.0
END_S: Final = 60.0
DRIVER: Final = Path(__file__).parent / "cut_over_clients.driver"
LINE_BYTES_MAX: Final = 1 << 24
LOST = (BrokerError, PeerError, OSError)


class Source(Protocol):
    """The broker that the link follows."""

    def url(self, wire: str = ...) -> str: ...

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
    stopped_at: float = 0.0
    first_here_at: float = 0.0
    may_produce: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False
    moved: list[int] = field(default_factory=list)  # first number after each move of the producer
    failure: BaseException | None = None  # of the producer, the last
    producing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def produce(self) -> None:
        """Write records until the round is over. A record whose outcome is unknown is not sent again."""
        while not self.is_over:
            await self.may_produce.wait()
            url = self.producer_url
            try:
                async with connected(url) as client:
                    await self._send_all(client, url)
            except LOST as failure:
                self.failure = failure
            await asyncio.sleep(0.02)

    async def _send_all(self, client: WireClient, url: str) -> None:
        while url == self.producer_url and await self._send_next(client):  # noqa: ASYNC110 - it is the pace
            await asyncio.sleep(PAUSE_S)

    async def _send_next(self, client: WireClient) -> bool:
        async with self.producing:
            if not self.is_over and self.may_produce.is_set():
                await self._send(client)
                return True
        return False

    async def _send(self, client: WireClient) -> None:
        for partition in range(PARTITIONS):
            numbers = [next(self.numbers) for _ in range(BATCH)]
            self.sent.update(numbers)
            records = [Record(b"%d" % number, b"key") for number in numbers]
            await client.produce(self.topic, records, partition=partition)
            self.acknowledged.update(numbers)
            self.last_at = time.monotonic()
            self.first_here_at = self.first_here_at or self.last_at

    async def stop(self) -> None:
        """Produce nothing more. Return when the outcome of each record is known, or will never be."""
        self.may_produce.clear()
        async with self.producing:
            self.stopped_at = self.last_at
        self.first_here_at = 0.0

    def resume(self, url: str) -> None:
        """Produce at this broker."""
        self.producer_url = url
        self.may_produce.set()

    async def consume(self) -> None:
        """Read as the only member of the group until the round is over."""
        while not self.is_over:
            url = self.member_url
            with suppress(*LOST):
                async with connected(url) as client:
                    await self._read(client, url)
            await asyncio.sleep(0.05)

    async def _read_some(
        self, client: WireClient, number: int, offset: int, member: str, membership: Membership
    ) -> int:
        """Read and commit some records of a partition. Return the next offset."""
        records = await client.fetch(self.topic, number, offset, records_max=1000)
        if not records:
            return offset
        self.read[number] += [int(record.value or b"") for record in records]
        following, generation = records[-1].offset + 1, membership.generation
        await client.commit(GROUP, self.topic, number, following, member=member, generation=generation)
        return following

    async def _read(self, client: WireClient, url: str) -> None:
        member = "member"  # the same after a failure, because the broker has not removed it yet
        membership = await client.join(GROUP, self.topic, member)
        try:
            offsets = [await client.position(GROUP, self.topic, number) or 0 for number in range(PARTITIONS)]
            while not self.is_over and url == self.member_url:
                membership = await client.heartbeat(GROUP, self.topic, member, membership.generation)
                for number in range(PARTITIONS):
                    offsets[number] = await self._read_some(client, number, offsets[number], member, membership)
                await asyncio.sleep(PAUSE_S)
        finally:
            with suppress(*LOST):
                await client.leave(GROUP, self.topic, member, membership.generation)


class ConfluentRound(Round):
    """A round whose producer and member are confluent-kafka, each in a process for each end."""

    def __init__(self, topic: str, interpreter: str, url: str, other: str) -> None:
        super().__init__(topic, url, url)
        self._interpreter = interpreter
        self._urls = (url, other)
        self._producers: dict[str, Process] = {}
        self._paused: dict[str, asyncio.Event] = {}
        self._next = 0

    async def _start(self, role: str, url: str, *words: object) -> Process:
        command = [self._interpreter, str(DRIVER), role, url.partition("://")[2], self.topic, *map(str, words)]
        return await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=LINE_BYTES_MAX
        )

    async def produce(self) -> None:
        async with asyncio.TaskGroup() as group:
            for url in self._urls:
                process = self._producers[url] = await self._start("produce", url, PARTITIONS, BATCH)
                self._paused[url] = asyncio.Event()
                group.create_task(self._watch_producer(url, process))
            await self._paused[self.producer_url].wait()
            self._order(self.producer_url, f"go {self._next}")
            while not self.is_over:  # noqa: ASYNC110 - as in the other rounds, which have no event for it
                await asyncio.sleep(PAUSE_S)
            for url in self._urls:
                self._order(url, "end")

    def _order(self, url: str, order: str) -> None:
        stdin = self._producers[url].stdin
        assert stdin is not None
        stdin.write(order.encode() + b"\n")

    async def _watch_producer(self, url: str, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            found = json.loads(line)
            if "sent" in found:
                self.sent.update(range(*found["sent"]))
                self.acknowledged.update(found["acknowledged"])
                self._next = max(self._next, found["sent"][1])
            if found.get("acknowledged"):
                self.last_at = time.monotonic()
                self.first_here_at = self.first_here_at or self.last_at
            if "paused" in found:
                self._paused[url].set()
        await process.wait()

    async def stop(self) -> None:
        self._paused[self.producer_url].clear()
        self._order(self.producer_url, "pause")
        await asyncio.wait_for(self._paused[self.producer_url].wait(), CUT_OVER_S)
        self.stopped_at, self.first_here_at = self.last_at, 0.0

    def resume(self, url: str) -> None:
        self.producer_url = url
        self.moved.append(self._next)
        self._order(url, f"go {self._next}")

    async def consume(self) -> None:
        while not self.is_over:
            url = self.member_url
            process = await self._start("consume", url, GROUP)
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            watching = asyncio.create_task(self._watch_member(process))
            while self._stays(url) and process.returncode is None:  # noqa: ASYNC110
                await asyncio.sleep(PAUSE_S)
            with suppress(*LOST):
                process.stdin.write(b"end\n")
            await watching

    def _stays(self, url: str) -> bool:
        return url == self.member_url and not self.is_over

    async def _watch_member(self, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            for partition, number in json.loads(line)["read"]:
                self.read[partition].append(number)
        await process.wait()


@dataclass
class World:
    """A source, a broker that follows it, and the faults of this history."""

    source: Source
    broker: BrokerProcess
    chance: random.Random
    wire: str = "polywire"
    confluent: str = ""  # an interpreter with confluent-kafka
    pauses: list[float] = field(default_factory=list)
    calm_pauses: list[float] = field(default_factory=list)
    fall_backs: list[float] = field(default_factory=list)
    reversed: int = 0
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
        """Inject faults at random moments until the round ends. More would only delay the next start of the worker."""
        faults = (self.kill_worker, self.kill_worker, self.kill_broker, self.kill_source)
        for _ in range(FAULTS_MAX):
            with suppress(TimeoutError):
                async with asyncio.timeout(self.chance.uniform(0.05, 2.0)):
                    await ending.wait()
                    return
            await asyncio.to_thread(self.chance.choice(faults))
            self.faults += 1

    async def change(self, verb: str, phase: Phase, body: dict[str, object]) -> None:
        """Cut a topic over, or fall back, as the commands do."""
        admin, end = AdminApi(self.broker.url("http")), time.monotonic() + CUT_OVER_S
        while time.monotonic() < end:
            with suppress(Failed, *LOST):
                found = await asyncio.to_thread(admin.request, "POST", f"links/{LINK}/{verb}", body)
                if found["topics"] and all(row["phase"] == phase.value for row in found["topics"]):
                    return
            await asyncio.sleep(0.02)
        state = admin.request("GET", f"links/{LINK}")
        raise Wrong(f"the topic has not changed verb={verb} state={state}\n{self.broker.log_text()[-3000:]}")

    async def run_round(self, number: int, *, calm: bool) -> None:
        """Move one topic. Raises Wrong."""
        topic = f"orders{number}"
        async with connected(self.source.url()) as client:
            await client.create_topic(topic, PARTITIONS)
        round_ = self._round(topic)
        round_.may_produce.set()
        ending = asyncio.Event()
        tasks = [asyncio.create_task(round_.produce()), asyncio.create_task(round_.consume())]
        if not calm:
            tasks.append(asyncio.create_task(self.disturb(ending)))
        try:
            is_reversed = self.wire in REVERSIBLE and self.chance.random() < 0.5
            pause = await self._move(round_, is_reversed=is_reversed)
            await asyncio.sleep(self.chance.uniform(*RUN_S))
            if is_reversed and self.chance.random() < 0.5:
                self.fall_backs.append(await self._move_back(round_))
                await asyncio.sleep(self.chance.uniform(*RUN_S))
            ending.set()
            await self._finish(round_, is_equal=is_reversed)
        finally:
            ending.set()
            round_.is_over = True
            round_.may_produce.set()
            await asyncio.gather(*tasks)
        self.pauses.append(pause)
        self.reversed += is_reversed
        if calm:
            self.calm_pauses.append(pause)

    def _round(self, topic: str) -> Round:
        if not self.confluent:
            return Round(topic, self.source.url(), self.source.url())
        return ConfluentRound(topic, self.confluent, self.source.url("kafka"), self._here)

    @property
    def _here(self) -> str:
        return self.broker.url("kafka" if self.confluent else "polywire")

    @property
    def _there(self) -> str:
        return self.source.url("kafka" if self.confluent else "polywire")

    async def _move(self, round_: Round, *, is_reversed: bool) -> float:
        """Move the clients here, and return the pause of the producer."""
        while round_.topic not in await self._topics():  # noqa: ASYNC110 - the link finds it
            await asyncio.sleep(0.1)
        await asyncio.sleep(self.chance.uniform(*RUN_S))
        is_early = self.chance.random() < 0.5
        if is_early:
            round_.member_url = self._here
            await asyncio.sleep(self.chance.uniform(*RUN_S))
        await round_.stop()
        phase = Phase.REVERSED if is_reversed else Phase.CUT_OVER
        await self.change("cut-over", phase, {"topics": [round_.topic], "reverse": is_reversed})
        pause = await self._continue(round_, self._here)
        if not is_early:
            await asyncio.sleep(self.chance.uniform(0, 1))
            round_.member_url = self._here
        return pause

    async def _move_back(self, round_: Round) -> float:
        await round_.stop()
        await self.change("fall-back", Phase.FOLLOWING, {"topics": [round_.topic]})
        pause = await self._continue(round_, self._there)
        await asyncio.sleep(self.chance.uniform(0, 1))
        round_.member_url = self._there
        return pause

    async def _continue(self, round_: Round, url: str) -> float:
        round_.resume(url)
        end = time.monotonic() + END_S
        while not round_.first_here_at:
            if time.monotonic() > end:
                state = AdminApi(self.broker.url("http")).request("GET", f"links/{LINK}")
                where = f"url={url} topic={round_.topic} failure={round_.failure!r} state={state}"
                raise Wrong(f"nothing can be written {where}\n{self.broker.log_text()[-3000:]}")
            await asyncio.sleep(0.01)
        return round_.first_here_at - round_.stopped_at

    async def _topics(self) -> set[str]:
        with suppress(*LOST):
            async with connected(self.broker.url()) as client:
                return {info.name for info in await client.topics()}
        return set()

    async def _finish(self, round_: Round, *, is_equal: bool) -> None:
        """Stop the producer, let the group read the rest, and check the round. Raises Wrong."""
        await round_.stop()
        end = time.monotonic() + END_S
        while True:
            copy = await self._numbers(self.broker.url(), round_)
            original = await self._numbers(self.source.url(), round_)
            if not is_equal or copy == original or time.monotonic() > end:
                break
            await asyncio.sleep(0.2)
        if is_equal and copy != original:
            counts = [(len(ours), len(theirs)) for ours, theirs in zip(copy, original, strict=True)]
            state = AdminApi(self.broker.url("http")).request("GET", f"links/{LINK}")
            raise Wrong(f"the ends differ topic={round_.topic} records={counts} state={state}")
        for partition, (ours, theirs) in enumerate(zip(copy, original, strict=True)):
            where = f"topic={round_.topic} partition={partition}"
            if ours[: len(theirs)] != theirs:
                at = next(
                    (at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours)
                )
                around = f"position={at} copy={len(ours)} {ours[at - 2 : at + 3]} source={len(theirs)} {theirs[at - 2 : at + 3]}"
                raise Wrong(f"the copy differs from the source {where} {around} moved={round_.moved}")
            if ours != sorted(set(ours)):
                at = next(at for at in range(1, len(ours)) if ours[at] <= ours[at - 1])
                around = f"copy={ours[at - 3 : at + 3]} position={at} source={len(theirs)} {theirs[at - 3 : at + 3]}"
                raise Wrong(f"records are doubled or reordered {where} {around} moved={round_.moved}")
        found = {number for numbers in copy for number in numbers}
        if not round_.acknowledged <= found <= round_.sent:
            missing = sorted(round_.acknowledged - found)
            raise Wrong(f"records are lost topic={round_.topic} count={len(missing)} first={missing[:5]}")
        end = time.monotonic() + END_S  # the group reads the rest
        while {number for numbers in round_.read for number in numbers} != found:
            if time.monotonic() > end:
                missing = sorted(found - {number for numbers in round_.read for number in numbers})
                raise Wrong(f"the group has not read records topic={round_.topic} count={len(missing)} {missing[:5]}")
            await asyncio.sleep(0.05)
        self.records += len(found)
        self.read_again += sum([len(numbers) for numbers in round_.read]) - len(found)

    async def _numbers(self, url: str, round_: Round) -> list[list[int]]:
        end = time.monotonic() + END_S  # Apache Kafka may still start, on a busy machine for more than ten seconds
        while time.monotonic() < end:
            with suppress(*LOST):
                async with connected(url) as client:
                    return [await _read_all(client, round_.topic, number) for number in range(PARTITIONS)]
            await asyncio.sleep(0.1)
        raise Wrong(f"the topic cannot be read url={url} topic={round_.topic}")


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
    wire: str = "polywire",
    source: Source | None = None,
    options: Sequence[str] = (),
    confluent: str = "",
    report: Callable[[str], object] = print,
) -> World:
    """Run that many rounds, half of them without faults. Raises Wrong."""
    with BrokerProcess(folder / "data", *options, wires=["kafka", "polywire", "http"]) as broker, ExitStack() as stack:
        if source is None:
            wires = sorted({"polywire", "kafka", wire})
            source = stack.enter_context(BrokerProcess(folder / "source", wires=wires))
        return _run(World(source, broker, random.Random(seed), wire, confluent), rounds, report)


def _run(world: World, rounds: int, report: Callable[[str], object]) -> World:
    body = {"source": world.source.url(world.wire), "topics": ["orders*"]}
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


class ApacheKafka(Kafka):
    """Apache Kafka in one process, which can be killed and started again. Implements ``Source``."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder: Final = folder / "kafka"
        self._running = ExitStack()
        self._port = 0

    def url(self, wire: str = "kafka") -> str:
        assert wire in ("kafka", "polywire"), "it has one protocol"
        return f"kafka://127.0.0.1:{self._port}"

    def start(self) -> object:
        self._folder.mkdir(exist_ok=True)
        if self._port:
            command = [find("java", "openjdk-17-jre-headless"), "-Xmx1G", "-cp", os.environ[JARS], "kafka.Kafka"]
            command.append(str(self._folder / "server.properties"))
            running = server_process(command, self._port, self._folder, asked=self.ready)
        else:
            running = self.running(self._folder)
        self._port = self._running.enter_context(running).address[1]
        return self

    def kill(self) -> None:
        self._running.close()  # with SIGKILL

    def __enter__(self) -> ApacheKafka:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def main() -> int:
    """Run one history; the exit code is 0 if nothing is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--wire",
        default="polywire",
        choices=["polywire", "kafka", "iggy", "cursus", "flux"],
        help="protocol of the source",
    )
    parser.add_argument("--kafka", action="store_true", help="Apache Kafka as the source")
    parser.add_argument("--confluent", default="", metavar="INTERPRETER", help="clients are confluent-kafka")
    given = parser.parse_args()
    options = ("--processes", str(given.processes)) if given.processes > 1 else ()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))
        source = stack.enter_context(ApacheKafka(folder)) if given.kafka else None
        wire = "kafka" if given.kafka else given.wire
        world = run(
            folder,
            seed=given.seed,
            rounds=given.rounds,
            wire=wire,
            source=source,
            options=options,
            confluent=given.confluent,
        )
    measured = {"cut-over without faults": world.calm_pauses, "cut-over": world.pauses, "fall-back": world.fall_backs}
    for name, pauses in measured.items():
        if pauses:
            print(f"pause, {name}: median {median(pauses):.3f} s, worst {max(pauses):.3f} s, {len(pauses)} rounds")
    print(f"{world.records} records, {world.faults} faults, {world.read_again} read again by the group")
    return 0


if __name__ == "__main__":
    sys.exit(main())
