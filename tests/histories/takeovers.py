"""Histories of three brokers on one bucket: the leader is killed, suspended, raced and drained, and another takes over.

``python -m tests.histories.takeovers --count 30 --seed 7``. The bucket is versitygw if ``POLYWIRE_S3_SERVER`` names it,
otherwise a directory. With versitygw, a proxy before each broker cuts it off from the bucket, delays or loses responses,
and returns errors.

The seed determines the order; every killed broker is restarted.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import uvloop

from polywire.types import NODE_TIMEOUT_S
from tests.broker_process import BrokerProcess, StartedBroker
from tests.histories.clients import PAUSE_S, read_everything
from tests.histories.clocks import JUMP, JUMPED_S, JUMPS, TRUE, SkewedClock
from tests.histories.driven import Copier, drivers
from tests.histories.faulty_proxy import (
    FAULTS,
    LOST_REPLIES,
    NONE,
    RESET,
    SILENT,
    SILENT_REPLIES,
    UNAVAILABLE,
    FaultyProxy,
)
from tests.histories.history import Commit, Fault, History, Outcome, Transaction
from tests.histories.repeat import Histories, parser_of, repeat
from tests.histories.run import COPY, GROUP, ONCE, PARTITIONS, TOPIC, WIRES, copiers, create, everybody, working
from tests.ledger import Command
from tests.s3_server import BUCKET, S3Server, bucket_kind, s3_binary

BROKERS: Final = ("a", "b", "c")
ENDPOINT: Final = "AWS_ENDPOINT_URL"
LED: Final = b"leading the shard"
PART: Final = 25  # takeovers of one history, which is kept in memory, by default
CALM_S: Final = (0.5, 2.5)  # in which clients make progress, with the default timeout
LED_S: Final = 60.0  # in which there is a leader again
TRANSACTION_EACH: Final = 4  # faults until one after which a transaction is committed before the next fault
COMMIT_EACH: Final = 20  # faults until one after which a member of a group commits, which takes the group a while
PROGRESS_S: Final = 120.0  # in which they do


class Cluster:
    """Three brokers, and their leader according to their logs."""

    def __init__(
        self,
        folder: Path,
        bucket: str,
        proxies: Sequence[FaultyProxy],
        chance: random.Random,
        *,
        have_clocks: bool,
        timeout_s: float = NODE_TIMEOUT_S,
        kind: type[StartedBroker] = BrokerProcess,
    ) -> None:
        options = ["--bucket", bucket, "--slot-mib", "17"]
        if timeout_s != NODE_TIMEOUT_S:  # earlier versions do not have this option
            options += ["--node-timeout-s", f"{timeout_s:g}"]
        self._timeout_s: Final = timeout_s
        self._read: Final = {name: (0, list[int]()) for name in BROKERS}
        environments = [{ENDPOINT: f"http://127.0.0.1:{proxy.port}"} for proxy in proxies] or [{} for _ in BROKERS]
        self.clocks: Final = [SkewedClock(folder / f"{name}.clock") for name in BROKERS if have_clocks]
        for environment, clock in zip(environments, self.clocks, strict=False):
            environment |= clock.environment
        self.brokers: Final = [
            kind(folder / name, *options, "--node", name, wires=WIRES, environment=environment)
            for name, environment in zip(BROKERS, environments, strict=True)
        ]
        self.proxies: Final = dict(zip(self.brokers, proxies, strict=False))
        self._clock_of: Final = dict(zip(self.brokers, self.clocks, strict=False))
        self._chance: Final = chance

    async def restart(self, broker: StartedBroker) -> None:
        """Start a broker. An operator sets its clock first: with a wrong one, a bucket refuses its requests."""
        if broker in self._clock_of:
            self._clock_of[broker].set(TRUE)
        await asyncio.to_thread(broker.start)

    def url(self, wire: str) -> str:
        """Return the address of any of them: standbys forward."""
        return self._chance.choice(self.brokers).url(wire)

    def scaled(self, seconds: float) -> float:
        """Return a time for the timeout of these brokers, from one for the default timeout."""
        return seconds * self._timeout_s / NODE_TIMEOUT_S

    def takeovers(self) -> int:
        """Return how often a broker has started to lead."""
        return sum(len(self._starts(broker)) for broker in self.brokers)

    def leader(self) -> StartedBroker:
        """Return the broker that started to lead last."""
        return max(self.brokers, key=lambda broker: max(self._starts(broker), default=0))

    def others(self) -> list[StartedBroker]:
        """Return the standbys."""
        leader = self.leader()
        return [broker for broker in self.brokers if broker is not leader]

    def _starts(self, broker: StartedBroker) -> list[int]:
        """Return the starts under which a broker has led. Only new lines of its log are read."""
        size, starts = self._read[broker.data_dir.name]
        with suppress(FileNotFoundError), broker.data_dir.with_name(f"{broker.data_dir.name}.log").open("rb") as log:
            log.seek(size)
            new = log.read()
            new = new[: new.rfind(b"\n") + 1]
            starts += [int(line.rpartition(b"start=")[2].split()[0]) for line in new.splitlines() if LED in line]
            self._read[broker.data_dir.name] = size + len(new), starts
        return starts


class Nemesis:
    """The faults of the brokers."""

    def __init__(self, cluster: Cluster, server: S3Server | None, history: History, chance: random.Random) -> None:
        self._cluster: Final = cluster
        self._server: Final = server
        self._history: Final = history
        self._chance: Final = chance
        deeds: Mapping[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "kill -9": (8, self._kill),
            "stop": (4, self._stop),
            "race": (3, self._race),
            "kill who tries": (3, self._kill_twice),
            "go": (2, self._go),
            "pause": (2, self._pause),
            "bucket restarts": (2 if server is not None else 0, self._restart_bucket),
            "leader cut off": (6 if server is not None else 0, self._cut_off),
            "network": (6 if server is not None else 0, self._disturb),
            JUMP: (8 if cluster.clocks else 0, self._jump),
        }
        self._deeds: Final = {name: deed for name, (_, deed) in deeds.items()}
        self._weights: Final = [weight for weight, _ in deeds.values()]

    async def act(self) -> None:
        """Inject one fault, and make sure that all three run afterwards and one leads."""
        (name,) = self._chance.choices(list(self._deeds), self._weights)
        begun = time.monotonic_ns()
        for broker in self._cluster.brokers:
            assert not broker.stopped, f"a broker has ended by itself\n{broker.log_text()[-4000:]}"
        await self._deeds[name]()
        self._history.events.append(Fault(name, begun, time.monotonic_ns()))

    async def _wait_for_leader(self, before: int) -> None:
        async with asyncio.timeout(LED_S):
            while self._cluster.takeovers() <= before:  # noqa: ASYNC110 - looking is the point
                await asyncio.sleep(0.05)

    async def _kill(self) -> None:
        leader, before = self._cluster.leader(), self._cluster.takeovers()
        await asyncio.to_thread(leader.kill)
        await self._wait_for_leader(before)
        await self._cluster.restart(leader)

    async def _go(self) -> None:
        leader, before = self._cluster.leader(), self._cluster.takeovers()
        assert await asyncio.to_thread(leader.stop) == 0, leader.log_text()[-4000:]
        await self._wait_for_leader(before)
        await self._cluster.restart(leader)

    async def _stop(self) -> None:
        """Suspend the leader during another's start, and perhaps longer."""
        leader, before = self._cluster.leader(), self._cluster.takeovers()
        os.kill(leader.pid, signal.SIGSTOP)
        try:
            await self._wait_for_leader(before)
            await asyncio.sleep(self._chance.choice((0.0, 0.0, 0.1, self._cluster.scaled(1.0))))
        finally:
            os.kill(leader.pid, signal.SIGCONT)

    async def _race(self) -> None:
        """Let both standbys notice the leader's death at once, while a suspended broker wakes."""
        leader, before = self._cluster.leader(), self._cluster.takeovers()
        sleeper, other = self._chance.sample(self._cluster.others(), 2)
        os.kill(sleeper.pid, signal.SIGSTOP)
        os.kill(leader.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._cluster.scaled(self._chance.uniform(6.0, 9.5)))
            os.kill(sleeper.pid, signal.SIGCONT)
            await asyncio.sleep(self._cluster.scaled(self._chance.uniform(0.0, 0.6)))
            os.kill(other.pid, signal.SIGSTOP)
            await asyncio.sleep(self._cluster.scaled(self._chance.uniform(0.0, 0.6)))
        finally:
            for broker in (other, leader, sleeper):
                os.kill(broker.pid, signal.SIGCONT)
        await asyncio.sleep(self._cluster.scaled(1.0))
        if self._cluster.takeovers() <= before:  # the leader woke in time
            await self._kill()

    async def _kill_twice(self) -> None:
        """Kill the second leader while it takes over, or just after."""
        first, before = self._cluster.leader(), self._cluster.takeovers()
        await asyncio.to_thread(first.kill)
        await asyncio.sleep(self._cluster.scaled(self._chance.uniform(0.5, 3.0)))
        second = self._chance.choice([broker for broker in self._cluster.brokers if broker is not first])
        await asyncio.to_thread(second.kill)
        await self._wait_for_leader(before)
        for broker in (first, second):
            await self._cluster.restart(broker)

    async def _cut_off(self) -> None:
        """Let the leader reach its bucket no more, or hear nothing from it, until another one leads."""
        leader, before = self._cluster.leader(), self._cluster.takeovers()
        proxy = self._cluster.proxies[leader]
        proxy.fault = self._chance.choice((SILENT, SILENT_REPLIES, RESET, LOST_REPLIES, UNAVAILABLE))
        try:
            await self._wait_for_leader(before)
            await asyncio.sleep(self._chance.choice((0.0, 0.2, self._cluster.scaled(2.0))))
        finally:
            proxy.fault = NONE

    async def _disturb(self) -> None:
        """Disturb the network of any brokers for a while. They may or may not change the leader."""
        proxies = self._chance.sample(list(self._cluster.proxies.values()), self._chance.choice((1, 1, 2, 3)))
        for proxy in proxies:
            proxy.fault = self._chance.choice(FAULTS)
        await asyncio.sleep(self._cluster.scaled(self._chance.uniform(0.2, 8.0)))
        for proxy in proxies:
            proxy.fault = NONE

    async def _jump(self) -> None:
        """Set the clock of one broker. The others have the right time again: a bucket refuses requests of another day."""
        for clock in self._cluster.clocks:
            clock.set(TRUE)
        self._chance.choice(self._cluster.clocks).set(self._chance.choice(JUMPS))
        await asyncio.sleep(JUMPED_S)

    async def _pause(self) -> None:
        """Suspend it for less than any timeout."""
        leader = self._cluster.leader()
        os.kill(leader.pid, signal.SIGSTOP)
        await asyncio.sleep(self._cluster.scaled(self._chance.uniform(0.1, 3.0)))
        os.kill(leader.pid, signal.SIGCONT)

    async def _restart_bucket(self) -> None:
        assert self._server is not None, "otherwise its weight is 0"
        await asyncio.to_thread(self._server.kill)
        await asyncio.sleep(self._cluster.scaled(self._chance.uniform(0.0, 3.0)))
        await asyncio.to_thread(self._server.start)


@contextmanager
def bucket_in(folder: Path) -> Iterator[tuple[str, S3Server | None]]:
    """Return a bucket: its URL, and its server if it has one."""
    binary = s3_binary()
    if binary is None:
        yield f"file://{folder / 'bucket'}", None
        return
    server = S3Server(binary, folder / "bucket")
    server.start()
    os.environ.update(server.environment)
    try:
        yield f"s3://{BUCKET}/log", server
    finally:
        server.kill()
        for name in server.environment:
            del os.environ[name]


def run(
    folder: Path,
    *,
    seed: int,
    count: int,
    have_clocks: bool = False,
    programs: Mapping[str, Sequence[str]] = {},
    timeout_s: float = NODE_TIMEOUT_S,
    pause_s: float = PAUSE_S,
) -> History:
    """Make a history in which a broker starts to lead that many times.

    have_clocks: the clocks of brokers jump. programs: drivers of other projects' clients, which copy in transactions.
    timeout_s: of the brokers; the faults are as much shorter or longer. pause_s: between two requests of a client.
    """
    chance = random.Random(seed)
    with bucket_in(folder) as (url, server), ExitStack() as running:
        ports = [] if server is None else [server.port] * len(BROKERS)
        proxies = [running.enter_context(FaultyProxy(port, random.Random(chance.random()))) for port in ports]
        cluster = Cluster(folder, url, proxies, chance, have_clocks=have_clocks, timeout_s=timeout_s)
        for broker in cluster.brokers:
            running.enter_context(broker)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
            history = loop.run(_run(cluster, server, chance, count, programs, pause_s))
        for broker in (*cluster.others(), cluster.leader()):
            assert broker.stop() == 0, broker.log_text()[-4000:]
    return history


async def _run(
    cluster: Cluster,
    server: S3Server | None,
    chance: random.Random,
    count: int,
    programs: Mapping[str, Sequence[str]],
    pause_s: float,
) -> History:
    history = History()
    driven = copiers(cluster.url, history, programs)
    copies = [COPY, *(client.name for client in driven if isinstance(client, Copier))]
    topics = dict.fromkeys((TOPIC, ONCE, *copies), PARTITIONS)
    await create(topics, lambda wire: cluster.leader().url(wire))
    nemesis = Nemesis(cluster, server, history, chance)
    begun = cluster.takeovers()
    async with working([*everybody(cluster.url, history, pause_s), *driven]):
        for fault in itertools.count(1):
            await asyncio.sleep(cluster.scaled(chance.uniform(*CALM_S)))
            await nemesis.act()
            if cluster.takeovers() >= begun + count:
                break
            awaited = ((Transaction, TRANSACTION_EACH), (Commit, COMMIT_EACH))
            await _progress(history, {kind for kind, each in awaited if fault % each == 0})
    moment = time.monotonic_ns()
    history.events += [Fault("takeover", moment, moment) for _ in range(cluster.takeovers() - begun)]
    await read_everything(cluster.url("polywire"), topics, dict.fromkeys((GROUP, *copies), TOPIC), history)
    return history


async def _progress(history: History, missing: set[type[Commit | Transaction]]) -> None:
    """Wait until requests of these kinds were acknowledged. Clients with few requests do not get so far between all faults."""
    at = len(history.events)
    try:
        async with asyncio.timeout(PROGRESS_S):
            while missing:
                await asyncio.sleep(0.02)
                new, at = history.events[at:], len(history.events)
                missing = missing - {type(event) for event in new if getattr(event, "outcome", None) is Outcome.DONE}
    except TimeoutError as error:
        names = sorted(kind.__name__ for kind in missing)
        raise AssertionError(f"without a fault, clients made no progress in {PROGRESS_S} s missing={names}") from error


def main(words: Sequence[str] | None = None) -> int:
    """Make histories until there were enough takeovers, or one of them is wrong."""
    parser = parser_of("tests.histories.takeovers", __doc__)
    parser.add_argument("--count", type=int, default=30, help="how often a broker takes over")
    parser.add_argument("--clocks", action="store_true", help="let the clocks of brokers jump (needs libfaketime)")
    parser.add_argument("--libraries", action="store_true", help="let the Kafka clients that are here copy, too")
    parser.add_argument("--part", type=int, default=PART, help="takeovers of one history")
    parser.add_argument(
        "--node-timeout-s", type=float, default=NODE_TIMEOUT_S, help="of the brokers; scales the faults"
    )
    parser.add_argument("--pause-s", type=float, default=PAUSE_S, help="between two requests of a client")
    given = parser.parse_args(words)
    part = given.part if given.ledger else min(given.count, given.part)
    options = f"{' --clocks' if given.clocks else ''}{' --libraries' if given.libraries else ''}"
    for option, value, default in (
        ("part", part, PART),
        ("node-timeout-s", given.node_timeout_s, NODE_TIMEOUT_S),
        ("pause-s", given.pause_s, PAUSE_S),
    ):
        options += f" --{option} {value:g}" if value != default else ""
    histories = Histories(
        Command(f"tests.histories.takeovers --count {part}{options}", bucket_kind()),
        lambda folder, seed, _: run(
            folder,
            seed=seed,
            count=part,
            have_clocks=given.clocks,
            programs=drivers() if given.libraries else {},
            timeout_s=given.node_timeout_s,
            pause_s=given.pause_s,
        ),
    )
    return repeat(
        histories,
        seed=given.seed,
        is_enough=lambda totals: totals["takeover"] >= given.count,
        is_recorded=given.ledger,
    )


if __name__ == "__main__":
    sys.exit(main())
