"""The links of a broker: their definitions, the process that runs them, and its reports (concepts: links).

* Definitions are values in the broker's state, like users: they are journalled, and survive a restart and a failover.
* With several processes, the first one has the links, because it has the values.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from polywire import errors
from polywire.broker.users import LINKS, Principal
from polywire.choices import missing
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode, Invalid, Unavailable
from polywire.link_orders import (
    REVERSIBLE,
    Closing,
    CutOver,
    LinkDefinition,
    LinkOrders,
    LinkPlan,
    LinkReport,
    LinkView,
    Phase,
)
from polywire.matching import WORD, consists_of, matches
from polywire.server.child import connect_child, kill, start_child
from polywire.server.worker_process import WorkerProcess
from polywire.types import Level

if TYPE_CHECKING:
    from polywire.broker.broker import Broker
    from polywire.broker.changes import WireStateSet
    from polywire.broker.topics import Topic
    from polywire.protocols.runtime.session import SessionFactory
    from polywire.server.hub import Hub
    from polywire.server.readiness import ReadinessDriver

KEPT_AS: Final = "links"
LINKS_MAX: Final = 100
NAME_CHARS_MAX: Final = 64  # the name is part of the names of writers
SOURCE_CHARS_MAX: Final = 4_096
PATTERNS_MAX: Final = 1_000
PATTERN_CHARS_MAX: Final = 511
CHECKS_MAX: Final = 4
CHECK_S: Final = 20.0  # time to check the source of a new link
LEASE_S: Final = 3.0  # a cut-over ends if its client does not ask for it in this time
EARLY_S: Final = 0.1  # timers have milliseconds, so they may fire before the exact time
CHANGE_S: Final = 1.0  # for which a request waits for the end of a cut-over
HELD_POLL_S: Final = 0.02
RELEASE_S: Final = 15.0  # after a start, all processes have reported their topics in this time
PLAN_BYTES_MAX: Final = 1 << 26  # a plan of 10,000 topics with their settings has about 5 MB
STALE_S: Final = 60.0  # interval of warnings about a link that fails


class _Waiting(msgspec.Struct):
    """A cut-over of a topic that waits until the source is at rest. It is cancelled when no client waits for it any more."""

    closing: Closing
    until: float


class Links(WorkerProcess):
    """The links of one broker. Implements ``http.process.Links``."""

    MODULE: ClassVar[str] = "polywire.links"
    JOB: ClassVar[str] = "runs links"
    USER: ClassVar[Principal] = LINKS

    def __init__(self, broker: Broker, hub: Hub, factory: SessionFactory, driver: ReadinessDriver | None) -> None:
        super().__init__(hub, factory, driver)
        self._broker: Final = broker
        self._definitions: Final[dict[str, LinkDefinition]] = {}
        self._reports: Final[dict[str, dict[str, LinkReport]]] = {}
        self._warned_at: Final[dict[str, float]] = {}
        self._checks = 0
        # definitions that are synced. Only they are ordered, because an order to open a topic must not precede the
        # cut-over, which may be in the journal of another process
        self._synced: Final[dict[str, LinkDefinition]] = {}
        self._stored: Final[dict[str, int]] = {}  # number of the last store of each definition that is synced
        self._closing: Final[dict[str, dict[str, _Waiting]]] = {}
        self._numbers: Final = count(1)
        self._changed: Final = asyncio.Condition()
        self._tasks: Final[set[asyncio.Task[None]]] = set()
        for name, value in broker.wire_state(KEPT_AS).items():
            self._definitions[name] = self._synced[name] = msgspec.msgpack.decode(value, type=LinkDefinition)
        broker.watch_wire_state(self._value_changed)

    def begin(self) -> None:
        """Start the process if there are links."""
        self._send(is_needed=bool(self._synced))

    def release(self, topics: Callable[[], Sequence[Topic]]) -> None:
        """Start the process if topics still belong to a deleted link. The process makes them writable for clients.

        Such topics exist if the broker crashed after its last link was deleted. ``topics`` returns the topics of all
        processes.
        """
        if any(topic.settings.link for topic in topics()):
            self._send(is_needed=True)
        elif not self._synced:  # other processes may not have reported their topics yet
            asyncio.get_running_loop().call_later(RELEASE_S, self._release_again, topics)

    def _release_again(self, topics: Callable[[], Sequence[Topic]]) -> None:
        if any(topic.settings.link for topic in topics()):
            self._send(is_needed=True)

    def _orders(self) -> LinkOrders:
        closing = {
            name: {topic: waiting.closing for topic, waiting in topics.items()}
            for name, topics in self._closing.items()
        }
        return LinkOrders(tuple([link for _, link in sorted(self._synced.items())]), closing)

    def _value_changed(self, change: WireStateSet) -> None:
        if change.wire != KEPT_AS:
            return
        link = None if change.value is None else msgspec.msgpack.decode(change.value, type=LinkDefinition)
        if link is None or link.paused:
            self._reports.pop(change.key, None)
        self._warned_at.pop(change.key, None)
        if link is None:
            self._definitions.pop(change.key, None)
        else:
            self._definitions[change.key] = link

    def _reported(self, line: bytes) -> None:
        try:
            report = msgspec.json.decode(line, type=LinkReport)
        except msgspec.DecodeError:
            return
        link = self._definitions.get(report.link)
        if link is None or link.paused:
            return
        last = self._reports.setdefault(link.name, {}).get(report.topic)
        self._reports[link.name][report.topic] = report
        if report.settled is not None:
            self._settled(link.name, report.settled, report.closing)
        if report.late > (0 if last is None else last.late):
            self._log.warning(
                "records were written at the source after the cut-over: they are not copied",
                link=link.name,
                topic=report.topic,
                records=report.late,
                command=report.late_command,
            )
        self._start(self._notify())
        now = time.monotonic()
        if report.error and now - self._warned_at.get(link.name, float("-inf")) >= STALE_S:
            self._warned_at[link.name] = now
            self._log.warning("a link fails: trying again", link=link.name, topic=report.topic, reason=report.error)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # Cut-over

    def _settled(self, name: str, cut_over: CutOver, number: int) -> None:
        """Store a cut-over or a fall-back that the process proposes, unless the request has ended."""
        waiting = self._closing.get(name, {}).get(cut_over.topic)
        if waiting is None or waiting.closing.is_held or waiting.closing.number != number:
            return
        waiting.closing = msgspec.structs.replace(waiting.closing, is_held=True)
        self._start(self._store_cut_over(name, cut_over))

    async def _store_cut_over(self, name: str, cut_over: CutOver) -> None:
        link = self._definitions.get(name)
        if link is None:
            return  # it was deleted
        others = tuple([other for other in link.cut_overs if other.topic != cut_over.topic])
        stored = msgspec.structs.replace(cut_over, at_us=self._broker.clock.now_us())
        now = others if len(others) < len(link.cut_overs) else (*others, stored)  # without it after a fall-back
        error: BrokerError | None = None
        try:
            await self._store(name, msgspec.structs.replace(link, cut_overs=now), sends=False)
        except BrokerError as failure:
            error = failure
            self._log.warning("cannot store a cut-over", link=name, topic=cut_over.topic, reason=failure.message)
        self._end_closing(name, [cut_over.topic], error)
        self.begin()

    def _end_closing(self, name: str, topics: Iterable[str], error: BrokerError | None = None) -> None:
        """Let the link follow these topics again, unless their cut-overs are stored."""
        for topic in topics:
            if self._closing.get(name, {}).pop(topic, None) is not None and error is not None:
                report = self._reports.get(name, {}).get(topic, LinkReport(name, topic))
                self._reports.setdefault(name, {})[topic] = msgspec.structs.replace(report, error=error.message)
        if not self._closing.get(name, True):
            del self._closing[name]

    def _expire(self, name: str) -> None:
        """End the cut-overs of a link whose client has not asked for a while."""
        now = time.monotonic()
        late = [
            topic
            for topic, waiting in self._closing.get(name, {}).items()
            if not waiting.closing.is_held and waiting.until <= now
        ]
        if late:
            self._end_closing(name, late)
            self.begin()

    async def cut_over(self, name: str, patterns: Sequence[str], *, quiet_ms: int, reverse: bool = False) -> LinkView:
        """Request that topics are cut over as soon as everything is copied, and wait for a change of their state.

        The call must be repeated: after ``LEASE_S`` without a call, the link follows the topics as before. Raises
        Missing(LINK_MISSING, TOPIC_MISSING), Conflict(TOPIC_LINKED) if the link is paused, and Invalid(INVALID_REQUEST)
        if the protocol of the source does not permit ``reverse``.

        If ``reverse`` is not set, matching topics that were cut over with ``reverse`` cannot fall back any more.
        """
        if patterns and not reverse:
            await self._end_returns(name, patterns)
        link = self._definition(name)
        scheme = link.address.partition("://")[0].partition("+")[0]
        if reverse and scheme not in REVERSIBLE:
            raise Invalid(
                ErrorCode.INVALID_REQUEST,
                f"a link cannot write each record exactly once to a source over {scheme}: cut over without --reverse"
                f" protocols={','.join(REVERSIBLE)}",
            )
        topics = [topic for topic in self._matching(link, patterns) if link.cut_over(topic) is None]
        phase = Phase.REVERSED if reverse else Phase.CUT_OVER
        done = [topic for topic in self._matching(link, patterns) if link.cut_over(topic) is not None]
        return await self._close(link, topics, Closing(0, quiet_ms, reverse=reverse), phase, done)

    async def _end_returns(self, name: str, patterns: Sequence[str]) -> None:
        """Stop copying records of clients back to the source, for matching topics that were cut over with ``reverse``."""
        link = self._definition(name)
        topics = [topic for topic in self._matching(link, patterns) if (end := link.cut_over(topic)) and end.reverse]
        if not topics:
            return
        await self.cancel_cut_over(name, topics)  # a fall-back that waits
        link = self._definition(name)
        ends = [msgspec.structs.replace(end, reverse=False) if end.topic in topics else end for end in link.cut_overs]
        await self._store(name, msgspec.structs.replace(link, cut_overs=tuple(ends)))

    async def fall_back(self, name: str, patterns: Sequence[str], *, quiet_ms: int) -> LinkView:
        """Request that the link follows topics again that were cut over with ``reverse``. See ``cut_over``.

        A topic falls back as soon as the source has all of its records. Raises Conflict(TOPIC_LINKED) if a matching
        topic was cut over without ``reverse``.
        """
        link = self._definition(name)
        known = self._matching(link, patterns)
        found = {topic: link.cut_over(topic) for topic in known}
        topics = [topic for topic, cut_over in found.items() if cut_over is not None and cut_over.reverse]
        done = [topic for topic, cut_over in found.items() if cut_over is None]
        others = [topic for topic, cut_over in found.items() if cut_over is not None and not cut_over.reverse]
        if others:
            raise Conflict(
                ErrorCode.TOPIC_LINKED,
                "topics were cut over without --reverse, so the source does not have what was written here"
                f" (name the others with --topics) link={name!r} topics={','.join(others[:10])}",
            )
        return await self._close(link, topics, Closing(0, quiet_ms), Phase.FOLLOWING, done)

    async def _close(
        self, link: LinkDefinition, topics: Sequence[str], request: Closing, phase: Phase, done: Sequence[str]
    ) -> LinkView:
        """Request that topics reach a phase, and wait for that, at most ``CHANGE_S``.

        ``done``: further topics to wait for, which have probably reached the phase already.
        """
        name = link.name
        if link.paused:
            raise Conflict(
                ErrorCode.TOPIC_LINKED,
                f"the link is paused: resume it first (polywire link resume {name}) link={name!r}",
            )
        until, is_new = time.monotonic() + LEASE_S, False
        closing = self._closing.setdefault(name, {})
        for topic in topics:
            if topic not in closing:
                closing[topic] = _Waiting(msgspec.structs.replace(request, number=next(self._numbers)), until)
                is_new = True
            closing[topic].until = until
        topics = sorted([*topics, *done])
        if is_new:
            self.begin()
        if not closing:
            del self._closing[name]
        asyncio.get_running_loop().call_later(LEASE_S + EARLY_S, self._expire, name)
        with suppress(TimeoutError):
            async with asyncio.timeout(CHANGE_S), self._changed:
                await self._changed.wait_for(lambda: self._are_in(phase, name, topics))
        return self._chosen(name, topics)

    async def cancel_cut_over(self, name: str, patterns: Sequence[str]) -> LinkView:
        """Let the link follow the topics as before. Topics that were cut over remain so. Raises Missing."""
        topics = self._known(self._definition(name), patterns)
        while True:
            held = [topic for topic, waiting in self._closing.get(name, {}).items() if waiting.closing.is_held]
            if not set(held) & set(topics):
                break
            await asyncio.sleep(HELD_POLL_S)
        self._end_closing(name, topics)
        self.begin()
        return self._chosen(name, topics)

    def _matching(self, link: LinkDefinition, patterns: Sequence[str]) -> list[str]:
        """Return the topics of a link that match; none if the link has not found all its topics yet.

        After a start of the broker, the link finds its topics one after the other, and a part of them must not be
        mistaken for all. Raises Missing(TOPIC_MISSING) for a name or pattern that matches none.
        """
        if not self._view(link).is_complete:
            return []
        known = self._known(link)
        for pattern in patterns:
            if not any(matches(pattern, topic) for topic in known):
                raise missing(ErrorCode.TOPIC_MISSING, "topic", pattern, known, facts=f"link={link.name!r}")
        return self._known(link, patterns)

    def _known(self, link: LinkDefinition, patterns: Sequence[str] = ()) -> list[str]:
        """Return the topics that match among those that were reported or cut over, sorted."""
        known = {report.topic for report in self._view(link).topics()} | {c.topic for c in link.cut_overs}
        return sorted(
            [topic for topic in known if not patterns or any(matches(pattern, topic) for pattern in patterns)]
        )

    def _are_in(self, phase: Phase, name: str, topics: Sequence[str]) -> bool:
        reports = self._reports.get(name, {})
        return name not in self._definitions or (
            bool(topics) and all(topic in reports and reports[topic].phase is phase for topic in topics)
        )

    def _chosen(self, name: str, topics: Iterable[str]) -> LinkView:
        reports = self._reports.get(name, {})
        return LinkView(self._definition(name), {topic: reports[topic] for topic in topics if topic in reports})

    # The interface of the HTTP API

    def all(self) -> Sequence[LinkView]:
        """Return all links, sorted by name."""
        return [self._view(link) for _, link in sorted(self._definitions.items())]

    def find(self, name: str) -> LinkView:
        """Return a link. Raises Missing(LINK_MISSING)."""
        return self._view(self._definition(name))

    def _view(self, link: LinkDefinition) -> LinkView:
        return LinkView(link, self._reports.get(link.name, {}))

    def _definition(self, name: str) -> LinkDefinition:
        if name not in self._definitions:
            raise missing(ErrorCode.LINK_MISSING, "link", name, self._definitions)
        return self._definitions[name]

    async def create(self, link: LinkDefinition, *, dry_run: bool) -> LinkPlan:
        """Check a link against its source and store it. Return what it does with each topic.

        Raises Invalid, Conflict(LINK_EXISTS), Busy(BUSY), and the errors of the source.
        """
        self._check_new(link)
        plan = await self._plan(link)
        failed = [topic for topic in plan.topics if topic.error]
        if dry_run:
            return plan
        if failed:
            raise Conflict(ErrorCode.TOPIC_EXISTS, failed[0].error)
        self._check_new(link)
        await self._store(link.name, msgspec.structs.replace(link, created_at_us=self._broker.clock.now_us()))
        return plan

    def _check_new(self, link: LinkDefinition) -> None:
        check_definition(link)
        if link.name in self._definitions:
            raise Conflict(ErrorCode.LINK_EXISTS, f"a link with this name exists link={link.name!r}")
        if len(self._definitions) >= LINKS_MAX:
            raise Busy(ErrorCode.BUSY, f"too many links limit={LINKS_MAX}")

    async def pause(self, name: str, *, paused: bool) -> LinkView:
        """Pause or resume a link. Raises Missing(LINK_MISSING)."""
        link = msgspec.structs.replace(self._definition(name), paused=paused)
        await self._store(name, link)
        return self._view(link)

    async def delete(self, name: str) -> None:
        """Delete a link. Topics and positions remain. Raises Missing(LINK_MISSING)."""
        self._definition(name)
        await self._store(name, None)

    async def _store(self, name: str, link: LinkDefinition | None, *, sends: bool = True) -> None:
        """Store a definition, or delete it, and send the orders when it is synced."""
        number = next(self._numbers)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        value = None if link is None else msgspec.msgpack.encode(link)
        self._broker.set_wire_state(KEPT_AS, name, value, level=Level.SYNCED, done=partial(_complete, done))
        await done
        if number < self._stored.get(name, 0):
            return  # a later store was synced with this one
        self._stored[name] = number
        if link is None:
            self._synced.pop(name, None)
            self._closing.pop(name, None)
        else:
            self._synced[name] = link
        if sends:
            self.begin()

    async def _plan(self, link: LinkDefinition) -> LinkPlan:
        if self._checks >= CHECKS_MAX:
            raise Busy(ErrorCode.BUSY, f"too many links are being checked limit={CHECKS_MAX}", retry_after_ms=1_000)
        self._checks += 1
        try:
            plan = await self._checked(link)
        finally:
            self._checks -= 1
        if plan.code:
            kind = getattr(errors, plan.kind)
            raise (Unavailable if issubclass(kind, errors.NotOwner) else kind)(ErrorCode(plan.code), plan.message)
        return plan

    async def _checked(self, link: LinkDefinition) -> LinkPlan:
        try:
            process, ours = await start_child(self.MODULE, "check", limit=PLAN_BYTES_MAX)
        except OSError as error:
            raise Busy(ErrorCode.BUSY, f"cannot check the link: {error.strerror}") from error
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        try:
            await connect_child(self._hub, [self._factory], self._driver, ours, self.USER)
            process.stdin.write(msgspec.json.encode(link) + b"\n")
            line = await asyncio.wait_for(process.stdout.readline(), CHECK_S)
            return msgspec.json.decode(line, type=LinkPlan)
        except TimeoutError:
            raise Unavailable(
                ErrorCode.UNREACHABLE, f"the source did not respond in time source={link.address} limit_s={CHECK_S:g}"
            ) from None
        except (OSError, ValueError):
            raise Busy(ErrorCode.BUSY, "the process that checks the link has ended unexpectedly: try again") from None
        finally:
            await kill(process)


def _complete(done: asyncio.Future[None], result: int | BrokerError) -> None:
    if done.done():
        return
    if isinstance(result, BrokerError):
        done.set_exception(result)
    else:
        done.set_result(None)


def check_definition(link: LinkDefinition) -> None:
    """Raise Invalid(INVALID_REQUEST) for a link with an invalid name, source or pattern."""
    if not 0 < len(link.name) <= NAME_CHARS_MAX or not consists_of(link.name, WORD + "._-"):
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"link name is invalid (use 1 to {NAME_CHARS_MAX} letters, digits, '.', '_' and '-') link={link.name[:80]!r}",
        )
    if not 0 < len(link.source) <= SOURCE_CHARS_MAX or not link.source.isprintable():
        raise Invalid(ErrorCode.INVALID_REQUEST, "the source of the link is invalid (use scheme://host:port)")
    if link.source.startswith("memory:"):
        raise Invalid(ErrorCode.INVALID_REQUEST, "the source of a link must be another broker scheme=memory")
    if not 0 < len(link.topics) <= PATTERNS_MAX or not all(
        0 < len(topic) <= PATTERN_CHARS_MAX for topic in link.topics
    ):
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"a link needs 1 to {PATTERNS_MAX} topics or patterns of 1 to {PATTERN_CHARS_MAX} characters each",
        )
    if len(link.groups) > PATTERNS_MAX or not all(0 < len(group) <= PATTERN_CHARS_MAX for group in link.groups):
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"a link has up to {PATTERNS_MAX} groups or patterns of 1 to {PATTERN_CHARS_MAX} characters each",
        )
