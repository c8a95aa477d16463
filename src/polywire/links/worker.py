"""The process that runs the links of one broker.

It reads its links from its standard input, reports the state of each topic to its standard output, and ends with the
input. It writes over a socket pair whose other end is the broker, so it needs neither an address nor a login.

* Each link has its own connection to its source and copies one topic after the other, some records each time.
* A step that fails is reported, and repeated after a pause, which grows with each failure. Other topics and links are
  not affected.
* A topic is writable for clients only after the broker has stored its cut-over, or the end of its link, and this
  process has ended its last write to it. So no crash makes it writable while the link still writes.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, Final

import msgspec

from polywire.choices import listed, missing
from polywire.client.base import Ability, WireClient
from polywire.client.copying import connected
from polywire.client.kafka import KafkaClient
from polywire.client.listings import names_matching
from polywire.client.partition_reader import reader_of, uses_offsets
from polywire.client.polywire import PolywireClient
from polywire.errors import BrokerError, Busy, ErrorCode, Invalid, Missing, PeerError, Unavailable
from polywire.link_orders import (
    WRITER_PREFIX,
    Closing,
    CutOver,
    GroupReport,
    LinkDefinition,
    LinkOrders,
    LinkPlan,
    LinkReport,
    Phase,
    PlannedTopic,
)
from polywire.links.groups import Carried, GroupSync, can_list_groups, matching_groups
from polywire.links.kafka_return import KafkaReturn
from polywire.links.settings import access_notes
from polywire.links.topic import READ_S, LinkedTopic
from polywire.matching import is_pattern, matches

PAUSE_FIRST_S: Final = 0.5
PAUSE_MAX_S: Final = 30.0
IDLE_S: Final = 0.2  # pause when no topic has new records
CLOSING_IDLE_S: Final = 0.02  # the same while a cut-over waits; the clients' pause includes this time
LATE_S: Final = 5.0  # interval of searches for records that were written after a cut-over
LIST_S: Final = 10.0  # interval of searches for new topics
REPORT_S: Final = 1.0
TOPICS_MAX: Final = 10_000
NAME_CHARS_MAX: Final = 1_000  # length of a topic's name at the source; no broker allows more
REASON_CHARS_MAX: Final = 2_000
MEMORY_BYTES_MAX: Final = 4 << 30  # address space of this process; above it, an attempt fails with MemoryError
LINE_BYTES_MAX: Final = 1 << 27  # length of an order with all links and all of their cut-overs
NICE: Final = 5  # the broker and its clients come first
EXIT_LOST: Final = 3  # the broker closed the socket pair

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
        found = [info.name for info in await source.topics()]
        if any(len(name) > NAME_CHARS_MAX for name in found):
            raise Invalid(
                ErrorCode.INVALID_TOPIC, f"a topic of the source has a name above {NAME_CHARS_MAX} characters"
            )
        for pattern in patterns:
            names |= dict.fromkeys(names_matching(pattern, found))
    if len(names) > TOPICS_MAX:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"too many topics match topics={len(names)} limit={TOPICS_MAX}")
    return list(names)


def _longer(pause_s: float) -> float:
    """Return the pause after another failure."""
    return min(max(PAUSE_FIRST_S, 2 * pause_s), PAUSE_MAX_S)


class _Attempts:
    """The attempts to copy a topic in one direction, and for how long the end that is read has not changed.

    Attributes:
        due: time of the next attempt; the pause before it was ``retry_s``.
        error: error in the last report.
        ends: ends of the partitions that are read, as last seen; they have not changed since ``rests_since``.
        waits_since: since when a cut-over or fall-back waits; None if none does.
        settled: number of the request whose outcome was proposed to the broker. Nothing is copied until that request
            has ended.
    """

    def __init__(self) -> None:
        self.due = 0.0
        self.retry_s = 0.0
        self.error = ""
        self.ends: tuple[int, ...] = ()
        self.rests_since = 0.0
        self.waits_since: float | None = None
        self.settled = 0
        self._reported_at = float("-inf")

    def failed(self) -> None:
        """Let the next attempt wait longer."""
        self.retry_s = _longer(self.retry_s)
        self.due = time.monotonic() + self.retry_s

    def see(self, ends: tuple[int, ...], at: float) -> None:
        """Note the ends, which were read after the time ``at``."""
        if ends != self.ends:
            self.ends, self.rests_since = ends, at

    def is_held(self, closing: Closing | None) -> bool:
        """Return whether this request waits for the broker's decision. Nothing may be copied until then."""
        return closing is not None and (closing.is_held or closing.number == self.settled)

    def rests(self, closing: Closing) -> bool:
        """Return whether the end that is read has not changed for as long as the request requires."""
        return time.monotonic() - self.rests_since >= closing.quiet_ms / 1e3

    def takes(self, error: str) -> bool:
        """Note an error, or that there is none. Return whether it is time for a report."""
        now = time.monotonic()
        if error == self.error and now - self._reported_at < REPORT_S:
            return False
        self.error, self._reported_at = error, now
        return True


class _TopicTask(_Attempts):
    """A topic that the link follows.

    ``fall_back_s``: duration of the fall-back after which the topic is followed again, if there was one.
    """

    def __init__(self, topic: LinkedTopic) -> None:
        super().__init__()
        self.topic: Final = topic
        self.fall_back_s = 0.0

    def report(self, *, error: str = "") -> LinkReport:
        """Return the state of the topic."""
        phase = Phase.FOLLOWING if self.waits_since is None else Phase.WAITING
        return msgspec.structs.replace(self.topic.report(), error=error, phase=phase, pause_s=self.fall_back_s)


async def _prepare_to_write(source: WireClient) -> int:
    """Return the producer id for a reversed cut-over, or -1 over `polywire`. Raises Denied if the user may not write."""
    if isinstance(source, KafkaClient):
        return await source.new_producer()
    assert isinstance(source, PolywireClient), "REVERSIBLE"
    await source.writers(WRITER_PREFIX)
    return -1


class _Ended(_Attempts):
    """A topic that was cut over.

    Attributes:
        is_open: whether clients may write to the topic here.
        is_locked: a fall-back has made the topic read-only again, and waits for the broker's decision.
        back: copies to the source, if the cut-over is reversed and there is a connection.
    """

    def __init__(self, cut_over: CutOver, rested_since: float | None) -> None:
        """``rested_since`` is the time since which the source has been at rest."""
        super().__init__()
        self.cut_over = cut_over
        self._rested_since: Final = rested_since
        self.is_open = False
        self.is_locked = False
        self.back: LinkedTopic | KafkaReturn | None = None
        self.pause_s = 0.0
        self.late = 0
        self.late_command = ""

    @property
    def carried(self) -> Carried:
        """The end of the copy by partition; None where the offsets differ."""
        pairs = zip(self.cut_over.ends, self.cut_over.here, strict=True)
        ends = tuple([end if end == here else None for end, here in pairs])
        if self.back is not None and self.back.carried:
            pushed = zip(ends, self.back.carried, strict=True)
            ends = tuple([None if end is None else position for end, position in pushed])
        return Carried(ends, is_reversed=self.cut_over.reverse and self.is_open)

    def end_return(self, cut_over: CutOver) -> None:
        """Stop copying to the source."""
        self.cut_over, self.back, self.error, self.due = cut_over, None, "", 0.0

    def opened(self) -> None:
        self.is_open = True
        self.pause_s = 0.0 if self._rested_since is None else time.monotonic() - self._rested_since

    def report(self, link: str) -> LinkReport:
        phase = Phase.REVERSED if self.cut_over.reverse else Phase.CUT_OVER
        if not self.is_open or self.is_locked:
            phase = Phase.WAITING
        if self.back is not None:
            found = self.back.report()
            return msgspec.structs.replace(found, error=self.error, phase=phase, pause_s=self.pause_s)
        return LinkReport(
            link,
            self.cut_over.topic,
            partitions=len(self.cut_over.ends),
            phase=phase,
            late=self.late,
            late_command=self.late_command,
            pause_s=self.pause_s,
        )


class Follower:
    """One link, until it is stopped."""

    def __init__(self, link: LinkDefinition, target: PolywireClient, report: Report) -> None:
        self.link = link
        self._target: Final = target
        self._report: Final = report
        self._tokens: Final[dict[bytes, None]] = {}
        self._back_tokens: Final[dict[bytes, None]] = {}
        self._tasks: dict[str, _TopicTask] = {}
        self._ended: Final[dict[str, _Ended]] = {}
        self._closing: dict[str, Closing] = {}
        self._fallen_back: Final[dict[str, float]] = {}  # by topic, since when clients write nothing here
        self._listed_at = float("-inf")
        self._groups: Final = GroupSync(link.source, link.groups, target, self._carried, self._carried_groups)
        self._last_report = LinkReport(link.name)
        self._stopping: Final = asyncio.Event()
        self._ordered: Final = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """End after the current write."""
        self._stopping.set()
        self._ordered.set()

    def order(self, link: LinkDefinition, closing: dict[str, Closing]) -> None:
        """Continue with another definition of the same link, and with these requests for cut-overs."""
        self.link = link
        self._closing = closing
        for cut_over in link.cut_overs:
            if cut_over.topic not in self._ended:
                task = self._tasks.pop(cut_over.topic, None)
                since = None if task is None or task.waits_since is None else max(task.rests_since, task.waits_since)
                self._ended[cut_over.topic] = _Ended(cut_over, since)
            elif self._ended[cut_over.topic].cut_over.reverse and not cut_over.reverse:
                self._ended[cut_over.topic].end_return(cut_over)
        for name in self._ended.keys() - {cut_over.topic for cut_over in link.cut_overs}:
            ended = self._ended.pop(name)
            self._fallen_back[name] = max(ended.rests_since, ended.waits_since or 0.0)
            self._listed_at = float("-inf")
        known: dict[str, _Attempts] = {**self._tasks, **self._ended}
        for name, waiting in known.items():
            if name not in closing:
                waiting.waits_since = None
            elif waiting.waits_since is None:
                waiting.waits_since = time.monotonic()
        self._ordered.set()

    async def run(self) -> None:
        """Copy until ``stop`` is called. Raises Unavailable if the broker is lost."""
        groups = asyncio.create_task(self._groups.run()) if self.link.groups else None
        try:
            await self._run()
        finally:
            if groups is not None:
                groups.cancel()
                with suppress(asyncio.CancelledError, BrokerError):
                    await groups

    def _report_link(self, **changes: Any) -> None:
        """Report the state of the link as a whole."""
        self._last_report = msgspec.structs.replace(self._last_report, **changes)
        self._report(self._last_report)

    def _carried(self) -> dict[str, Carried]:
        """Return, by topic, the range in which offsets are the same at both ends."""
        found = {name: Carried(task.topic.carried) for name, task in self._tasks.items()}
        for name, ended in self._ended.items():
            found[name] = ended.carried
        return found

    def _carried_groups(self, groups: tuple[GroupReport, ...], error: str) -> None:
        self._report_link(groups=groups, group_error=error)

    async def _run(self) -> None:
        pause_s = 0.0
        while not self._stopping.is_set():
            await self._open_ended()
            try:
                async with connected(self.link.source) as source:
                    self._report_link(error="")
                    pause_s = 0.0
                    await self._follow(source)
            except (BrokerError, PeerError, OSError, MemoryError) as error:
                await self._target.ping()
                pause_s = _longer(pause_s)
                self._report_link(error=reason_of(error))
                await self._wait(pause_s)

    async def _wait(self, seconds: float) -> None:
        """Wait, at most until new orders arrive."""
        self._ordered.clear()
        if self._stopping.is_set():
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ordered.wait()

    async def _follow(self, source: WireClient) -> None:
        self._tasks = {}
        for ended in self._ended.values():
            ended.back = None
        self._listed_at = float("-inf")
        while not self._stopping.is_set():
            if time.monotonic() - self._listed_at >= LIST_S:
                self._listed_at = time.monotonic()
                await self._list(source)
            moved = False
            for name in list(self._tasks):
                if self._stopping.is_set():
                    return
                task = self._tasks.get(name)  # None if the topic was cut over in the meantime
                if task is not None and not task.is_held(self._closing.get(name)) and task.due <= time.monotonic():
                    moved |= await self._step(source, task)
            await self._open_ended()
            moved |= await self._push(source)
            await self._watch_ended(source)
            if not moved:
                await self._wait(CLOSING_IDLE_S if self._closing else IDLE_S)

    async def _list(self, source: WireClient) -> None:
        """Find the topics to follow."""
        async with asyncio.timeout(READ_S):
            names = await matching_topics(source, self.link)
        self._tasks = {
            name: self._tasks.get(name)
            or _TopicTask(LinkedTopic(self.link, name, source, self._target, self._tokens, claims=True))
            for name in names
            if self.link.cut_over(name) is None
        }
        for name in self._fallen_back.keys() & self._tasks.keys():
            self._tasks[name].fall_back_s = time.monotonic() - self._fallen_back.pop(name)
        self.order(self.link, self._closing)
        self._report_link(topics=len(self._tasks) + len(self._ended))

    async def _step(self, source: WireClient, task: _TopicTask) -> bool:
        begun, moved, error = time.monotonic(), False, ""
        try:
            moved = await task.topic.step()
            task.retry_s = 0.0
        except Unavailable as failure:
            task.topic.forget()
            self._report(msgspec.structs.replace(task.topic.report(), error=reason_of(failure)))
            raise
        except BrokerError as failure:
            task.topic.forget()
            await self._target.ping()
            task.failed()
            error = reason_of(failure)
        task.see(task.topic.ends, begun)
        try:
            if not error and await self._settle(source, task):
                return moved
        except Unavailable:
            raise
        except BrokerError as failure:  # the user may not write to the source, for example
            error = reason_of(failure)
        if task.takes(error):
            self._report(task.report(error=error))
        return moved

    async def _settle(self, source: WireClient, task: _TopicTask) -> bool:
        """Propose a cut-over if it was requested and everything is copied. Return whether it was proposed."""
        name = task.topic.topic
        closing = self._closing.get(name)
        if closing is None or not task.topic.is_complete or not task.rests(closing):
            return False
        here = tuple([part.next_offset for part in await self._target.bounds(name)])
        producer = await _prepare_to_write(source) if closing.reverse else -1
        settled = CutOver(name, task.topic.locations, here, reverse=closing.reverse, producer=producer)
        task.settled = closing.number  # if that request has ended meanwhile, the broker ignores the report
        self._report(msgspec.structs.replace(task.report(), settled=settled, closing=closing.number))
        return True

    async def _open_ended(self) -> None:
        """Let clients write to the topics that were cut over. Raises Unavailable if the broker is lost."""
        for name, ended in self._ended.items():
            if ended.is_locked and name not in self._closing:  # the fall-back was cancelled
                ended.is_locked = ended.is_open = False
        waiting = [
            (name, ended)
            for name, ended in self._ended.items()
            if not ended.is_open and not (name in self._closing and self._closing[name].is_held)
        ]
        if waiting and self.link.groups:
            await self._groups.carry_now()
        for name, ended in waiting:
            try:
                await self._target.link_topic(name, "")
            except Missing:  # it was deleted
                pass
            except Busy:  # the disk is full
                return
            ended.opened()
            self._report(ended.report(self.link.name))

    async def _push(self, source: WireClient) -> bool:
        """Copy to the source what clients write here after a reversed cut-over. Return whether there were records."""
        moved = False
        for name, ended in list(self._ended.items()):
            if not ended.is_open or not ended.cut_over.reverse or ended.due > time.monotonic():
                continue
            if ended.is_held(self._closing.get(name)):
                continue
            moved |= await self._push_one(source, name, ended)
        return moved

    async def _push_one(self, source: WireClient, name: str, ended: _Ended) -> bool:
        begun, moved, error = time.monotonic(), False, ""
        back = ended.back = ended.back or self._back(source, ended.cut_over)
        try:
            moved = await back.step()
            ended.retry_s = 0.0
            if back.is_shifted and ended.cut_over.ends == ended.cut_over.here:
                error = "other clients write to the source, so offsets differ: stop them, or fall back"
            ended.see(back.ends, begun)
            await self._fall_back(name, ended, back)
        except Unavailable:
            back.forget()
            raise
        except BrokerError as failure:
            back.forget()
            await self._target.ping()
            ended.failed()
            error = reason_of(failure)
        if ended.takes(error):
            self._report(ended.report(self.link.name))
        return moved

    def _back(self, source: WireClient, cut_over: CutOver) -> LinkedTopic | KafkaReturn:
        if isinstance(source, KafkaClient):
            return KafkaReturn(self.link.name, cut_over, self._target, source)
        assert isinstance(source, PolywireClient), "REVERSIBLE"
        begins_at = cut_over.here
        return LinkedTopic(self.link, cut_over.topic, self._target, source, self._back_tokens, begins_at=begins_at)

    async def _fall_back(self, name: str, ended: _Ended, back: LinkedTopic | KafkaReturn) -> None:
        """Propose to follow the topic again, if a fall-back waits and the source has everything."""
        closing = self._closing.get(name)
        if closing is None or not back.is_complete or not ended.rests(closing):
            return
        await self._target.link_topic(name, self.link.name)
        ended.is_locked = True
        while await back.step():  # copies what was written until now
            pass
        if not back.is_complete:
            return
        if self.link.groups:  # clients return at once, and must not read records again
            await self._groups.carry_now()
        ends = await reader_of(back.copy, name).extents(len(back.ends))
        forward = LinkedTopic(self.link, name, back.copy, self._target, self._tokens)
        await forward.skip_to([end for _, end in ends])
        settled = CutOver(name, tuple([end for _, end in ends]), back.ends)
        ended.settled = closing.number
        self._report(msgspec.structs.replace(ended.report(self.link.name), settled=settled, closing=closing.number))

    def _late_command(self, cut_over: CutOver, late: Sequence[int]) -> str:
        """Return the command that shows records which were written at the source after a cut-over."""
        for number, count in enumerate(late):
            if count:
                where = f"--partition {number} --from {cut_over.ends[number]} --address {self.link.address}"
                return f"polywire record consume {shlex.quote(cut_over.topic)} {where}"
        return ""

    async def _watch_ended(self, source: WireClient) -> None:
        """Count the records that were written at the source after a cut-over."""
        for name, ended in list(self._ended.items()):
            if not ended.is_open or ended.cut_over.reverse or ended.due > time.monotonic():
                continue
            ended.due = time.monotonic() + LATE_S
            with suppress(Missing, Invalid):  # the topic was deleted at the source
                ends = await reader_of(source, name).extents(len(ended.cut_over.ends))
                late = [max(0, end - at) for (_, end), at in zip(ends, ended.cut_over.ends, strict=False)]
                ended.late = sum(late)
                ended.late_command = self._late_command(ended.cut_over, late)
            self._report(ended.report(self.link.name))


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


def _restarts(now: LinkDefinition, was: LinkDefinition) -> bool:
    """Return whether a link must connect again for a new definition."""
    return now.paused or msgspec.structs.replace(now, cut_overs=()) != msgspec.structs.replace(was, cut_overs=())


async def _follow_orders(
    followers: dict[str, Follower], orders: LinkOrders, target: PolywireClient, report: Report
) -> None:
    """Stop links that are not ordered any more, wait for their last writes, and start new ones."""
    ordered = {link.name: link for link in orders.links}
    ending = [
        follower
        for name, follower in followers.items()
        if name not in ordered or _restarts(ordered[name], follower.link)
    ]
    for follower in ending:
        follower.stop()
        del followers[follower.link.name]
    await asyncio.gather(*(follower.task for follower in ending if follower.task is not None))
    for name, link in ordered.items():
        if link.paused:
            continue
        closing = orders.closing.get(name, {})
        if name in followers:
            followers[name].order(link, closing)
        else:
            follower = followers[name] = Follower(link, target, report)
            follower.order(link, closing)
            follower.task = asyncio.create_task(follower.run())
    await _release(ordered, followers, target)


async def _release(
    links: Mapping[str, LinkDefinition], followers: Mapping[str, Follower], target: PolywireClient
) -> None:
    """Let clients write to topics of links that were deleted, or that were cut over and are paused.

    This process has ended its own writes to them, and those of its predecessors ended before it was started.
    """
    for info in await target.topics():
        link = links.get(info.link)
        if info.link and (link is None or (info.link not in followers and link.cut_over(info.name) is not None)):
            with suppress(Missing):
                await target.link_topic(info.name, "")


async def plan_of(link: LinkDefinition, target: PolywireClient) -> LinkPlan:
    """Check a link against its source, and return what it would do."""
    try:
        async with connected(link.source) as source:
            names = await _existing_topics(source, link)
            await _check_not_same(source, target)
            topics = tuple([await LinkedTopic(link, name, source, target).plan() for name in names])
            counts = {topic.topic: topic.partitions for topic in topics if not topic.error}
            groups = await matching_groups(source, counts, link.groups)
            notes = (*_notes(source), *_group_notes(source, link, topics), *await access_notes(source))
            return LinkPlan(topics, notes, groups=tuple(groups))
    except BrokerError as error:
        return LinkPlan(kind=type(error).__name__, code=error.code.value, message=error.message)
    except OSError as error:
        return LinkPlan(kind="Unavailable", code=ErrorCode.UNREACHABLE.value, message=reason_of(error))


async def _existing_topics(source: WireClient, link: LinkDefinition) -> list[str]:
    """Return the topics that a new link follows. Raises Missing for a name or pattern without a topic."""
    names = await matching_topics(source, link)
    try:
        known = [info.name for info in await source.topics()]
    except Invalid:  # the protocol cannot list topics; a missing one is detected when it is read
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


def _group_notes(source: WireClient, link: LinkDefinition, topics: Sequence[PlannedTopic]) -> list[str]:
    if not link.groups:
        return []
    if Ability.POSITIONS not in source.abilities or not uses_offsets(source):
        return ["the source protocol has no committed offsets of groups, so they are not carried"]
    notes = []
    if not can_list_groups(source) and any(is_pattern(group) for group in link.groups):
        notes.append("the source protocol cannot list groups: name them with --groups to carry their offsets")
    differing = [topic.topic for topic in topics if topic.offsets != "same"]
    if differing:
        notes.append(f"offsets of groups are not carried where offsets differ topics={listed(differing)}")
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
    with suppress(ValueError, OSError):  # the process already has a lower limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        return asyncio.run(_serve(int(arguments[0]), checks=arguments[1:] == ["check"]))
    except (BrokenPipeError, BrokerError):
        return EXIT_LOST
    finally:
        sys.stdout = None  # a closed pipe must not become an error at exit
