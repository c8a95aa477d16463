"""The process that runs the links of one broker.

It reads its links from its standard input, reports the state of each topic to its standard output, and ends with the
input. It writes over a socket pair whose other end is the broker, so it needs neither an address nor a login.

* Each link has its own connection to its source and copies one topic after the other, some records each time.
* Whatever fails is tried again, with growing pauses, and reported. Other topics and links are not affected.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import BinaryIO, Final

import msgspec

from polywire.choices import listed, missing
from polywire.client.base import Ability, WireClient
from polywire.client.copying import connected
from polywire.client.kafka import KafkaClient
from polywire.client.partition_reader import uses_offsets
from polywire.client.polywire import PolywireClient
from polywire.errors import BrokerError, ErrorCode, Invalid, Missing, PeerError, Unavailable
from polywire.link_orders import LinkDefinition, LinkOrders, LinkPlan, LinkReport
from polywire.links.topic import READ_S, LinkedTopic
from polywire.matching import is_pattern, matches

PAUSE_FIRST_S: Final = 0.5
PAUSE_MAX_S: Final = 30.0
IDLE_S: Final = 0.2  # pause when no topic has new records
LIST_S: Final = 10.0  # interval of searches for new topics
REPORT_S: Final = 1.0
TOPICS_MAX: Final = 10_000
NAME_CHARS_MAX: Final = 1_000  # of a topic at the source; no broker allows more
REASON_CHARS_MAX: Final = 2_000
MEMORY_BYTES_MAX: Final = 4 << 30  # addresses of this process; beyond, an attempt fails with MemoryError
LINE_BYTES_MAX: Final = 1 << 22
NICE: Final = 5  # the broker and its clients come first
EXIT_LOST: Final = 3  # the broker closed the socket pair
INTERNAL: Final = "__"  # Kafka's own topics begin with this

Report = Callable[[LinkReport], object]


def reason_of(error: BaseException) -> str:
    """Return the message of an error, shortened: a hostile source chooses parts of it."""
    return (getattr(error, "message", "") or str(error) or type(error).__name__)[:REASON_CHARS_MAX]


async def matching_topics(source: WireClient, link: LinkDefinition) -> list[str]:
    """Return the names of the source's topics that a link follows.

    Names without a wildcard are returned without a check. Raises Invalid if there are too many, or if the protocol
    cannot list topics.
    """
    names = dict.fromkeys(topic for topic in link.topics if not is_pattern(topic))
    patterns = [topic for topic in link.topics if is_pattern(topic)]
    if patterns:
        found = [info.name for info in await source.topics() if not info.name.startswith(INTERNAL)]
        if any(len(name) > NAME_CHARS_MAX for name in found):
            raise Invalid(
                ErrorCode.INVALID_TOPIC, f"a topic of the source has a name above {NAME_CHARS_MAX} characters"
            )
        names |= dict.fromkeys(name for name in found if any(matches(pattern, name) for pattern in patterns))
    if len(names) > TOPICS_MAX:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"too many topics match topics={len(names)} limit={TOPICS_MAX}")
    return list(names)


class _TopicTask:
    """A topic with the time of its next attempt, and of its last report."""

    def __init__(self, topic: LinkedTopic) -> None:
        self.topic: Final = topic
        self.due = 0.0
        self.pause_s = 0.0
        self.reported_at = float("-inf")
        self.error = ""


class Follower:
    """One link, until it is stopped."""

    def __init__(self, link: LinkDefinition, target: PolywireClient, report: Report) -> None:
        self.link: Final = link
        self._target: Final = target
        self._report: Final = report
        self._tokens: Final[dict[bytes, None]] = {}
        self._stopping: Final = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """End after the current write."""
        self._stopping.set()

    async def run(self) -> None:
        """Copy until ``stop`` is called. Raises Unavailable if the broker is lost."""
        pause_s = 0.0
        while not self._stopping.is_set():
            try:
                async with connected(self.link.source) as source:
                    self._report(LinkReport(self.link.name))
                    pause_s = 0.0
                    await self._follow(source)
            except (BrokerError, PeerError, OSError, MemoryError) as error:
                await self._target.ping()
                pause_s = min(max(PAUSE_FIRST_S, 2 * pause_s), PAUSE_MAX_S)
                self._report(LinkReport(self.link.name, error=reason_of(error)))
                await self._wait(pause_s)

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _follow(self, source: WireClient) -> None:
        tasks: dict[str, _TopicTask] = {}
        listed_at = float("-inf")
        while not self._stopping.is_set():
            if time.monotonic() - listed_at >= LIST_S:
                async with asyncio.timeout(READ_S):
                    names = await matching_topics(source, self.link)
                listed_at = time.monotonic()
                tasks = {
                    name: tasks.get(name)
                    or _TopicTask(LinkedTopic(self.link, name, source, self._target, self._tokens))
                    for name in names
                }
            moved = False
            for task in list(tasks.values()):
                if self._stopping.is_set():
                    return
                if task.due <= time.monotonic():
                    moved |= await self._step(task)
            if not moved:
                await self._wait(IDLE_S)

    async def _step(self, task: _TopicTask) -> bool:
        moved, error = False, ""
        try:
            moved = await task.topic.step()
            task.pause_s = 0.0
        except Unavailable as failure:
            task.topic.forget()
            self._report(msgspec.structs.replace(task.topic.report(), error=reason_of(failure)))
            raise
        except BrokerError as failure:
            task.topic.forget()
            await self._target.ping()
            task.pause_s = min(max(PAUSE_FIRST_S, 2 * task.pause_s), PAUSE_MAX_S)
            task.due = time.monotonic() + task.pause_s
            error = reason_of(failure)
        now = time.monotonic()
        if error != task.error or now - task.reported_at >= REPORT_S:
            task.error, task.reported_at = error, now
            self._report(msgspec.structs.replace(task.topic.report(), error=error))
        return moved


async def run_links(source: asyncio.StreamReader, target: PolywireClient, report: Report) -> int:
    """Run links until the input ends. Return the exit code."""
    followers: dict[str, Follower] = {}
    line = asyncio.ensure_future(source.readline())
    while True:
        running = {follower.task for follower in followers.values() if follower.task is not None}
        await asyncio.wait({line, *running}, return_when=asyncio.FIRST_COMPLETED)
        if any(task.done() and not task.cancelled() and task.exception() for task in running):
            return EXIT_LOST
        if not line.done():
            followers = {name: one for name, one in followers.items() if one.task is not None and not one.task.done()}
            continue
        if not (content := line.result()):
            return 0
        await _follow_orders(followers, msgspec.json.decode(content, type=LinkOrders), target, report)
        line = asyncio.ensure_future(source.readline())


async def _follow_orders(
    followers: dict[str, Follower], orders: LinkOrders, target: PolywireClient, report: Report
) -> None:
    """Stop links that are not ordered any more, wait for their last writes, and start new ones."""
    ordered = {link.name: link for link in orders.links}
    ending = [follower for name, follower in followers.items() if ordered.get(name) != follower.link]
    for follower in ending:
        follower.stop()
        del followers[follower.link.name]
    await asyncio.gather(*(follower.task for follower in ending if follower.task is not None))
    for name, link in ordered.items():
        if name not in followers:
            follower = followers[name] = Follower(link, target, report)
            follower.task = asyncio.create_task(follower.run())


async def plan_of(link: LinkDefinition, target: PolywireClient) -> LinkPlan:
    """Check a link against its source, and return what it would do."""
    try:
        async with connected(link.source) as source:
            names = await _existing_topics(source, link)
            await _check_not_same(source, target)
            topics = tuple([await LinkedTopic(link, name, source, target).plan() for name in names])
            return LinkPlan(topics, tuple(_notes(source)))
    except BrokerError as error:
        return LinkPlan(kind=type(error).__name__, code=error.code.value, message=error.message)
    except OSError as error:
        return LinkPlan(kind="Unavailable", code=ErrorCode.UNREACHABLE.value, message=reason_of(error))


async def _existing_topics(source: WireClient, link: LinkDefinition) -> list[str]:
    """Return the topics that a new link follows. Raises Missing for a name or pattern without a topic."""
    names = await matching_topics(source, link)
    try:
        known = [info.name for info in await source.topics()]
    except Invalid:  # the protocol cannot list topics; an unknown one is found when it is read
        return names
    for topic in link.topics:
        if not is_pattern(topic) and topic not in known:
            raise missing(ErrorCode.TOPIC_MISSING, "topic", topic, known, facts="end=source")
        if is_pattern(topic) and not any(matches(topic, name) for name in names):
            raise Missing(
                ErrorCode.TOPIC_MISSING, f"no topic of the source matches pattern={topic!r} known={listed(known)}"
            )
    return names


async def _check_not_same(source: WireClient, target: PolywireClient) -> None:
    """Raise Invalid if the source is this broker, which would copy its topics to themselves without end."""
    try:
        ids = {info.id for info in await source.topics() if any(info.id)}
    except Invalid:
        return
    if ids & {info.id for info in await target.topics()}:
        raise Invalid(ErrorCode.INVALID_REQUEST, "the source of the link is this broker: use the URL of another one")


def _notes(source: WireClient) -> list[str]:
    notes = []
    if Ability.KEYS_READ not in source.abilities:
        notes.append("the source protocol does not expose keys, so keys are not copied")
    if Ability.HEADERS not in source.abilities and not isinstance(source, KafkaClient):
        notes.append("the source protocol has no headers")
    if not uses_offsets(source):
        notes.append("the source protocol has byte positions instead of offsets")
    if isinstance(source, KafkaClient):
        notes.append("records of aborted transactions are not copied")
    return notes


def _reporting(output: BinaryIO) -> Callable[[msgspec.Struct], None]:
    def report(found: msgspec.Struct) -> None:
        output.write(msgspec.json.encode(found) + b"\n")
        output.flush()

    return report


async def _serve(descriptor: int, *, checks: bool) -> int:
    report = _reporting(sys.stdout.buffer)
    orders = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin.buffer)
    target = await PolywireClient.over(socket.socket(fileno=descriptor))
    if not checks:
        return await run_links(orders, target, report)
    report(await plan_of(msgspec.json.decode(await orders.readline(), type=LinkDefinition), target))
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run the process. The arguments are the descriptor of the socket and, to check a link, ``check``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the broker, which then ends the input
    os.nice(NICE)
    with suppress(ValueError, OSError):  # there is a lower limit already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        return asyncio.run(_serve(int(arguments[0]), checks=arguments[1:] == ["check"]))
    except (BrokenPipeError, BrokerError):
        return EXIT_LOST
    finally:
        sys.stdout = None  # a closed pipe must not become an error at exit
