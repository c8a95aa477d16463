"""The links of a broker: their definitions, the process that runs them, and its reports (concepts: links).

* Definitions are values in the broker's state, like users: they are journalled, and survive a restart and a failover.
* With several processes, the first one has the links, because it has the values.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from polywire import errors
from polywire.broker.users import LINKS, Principal
from polywire.choices import missing
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode, Invalid, Unavailable
from polywire.http.links import CHECK_S
from polywire.link_orders import LinkDefinition, LinkOrders, LinkPlan, LinkReport, LinkView
from polywire.matching import WORD, consists_of
from polywire.server.child import connect_child, kill, start_child
from polywire.server.worker_process import WorkerProcess
from polywire.types import Level

if TYPE_CHECKING:
    from polywire.broker.broker import Broker
    from polywire.broker.changes import WireStateSet
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
PLAN_BYTES_MAX: Final = 1 << 26  # a plan of 10,000 topics with their settings has about 5 MB
STALE_S: Final = 60.0  # interval of warnings about a link that fails


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
        for name, value in broker.wire_state(KEPT_AS).items():
            self._definitions[name] = msgspec.msgpack.decode(value, type=LinkDefinition)
        broker.watch_wire_state(self._value_changed)

    def begin(self) -> None:
        """Start the process if there are links."""
        self._send(is_needed=bool(self._orders().links))

    def _orders(self) -> LinkOrders:
        return LinkOrders(tuple([link for _, link in sorted(self._definitions.items()) if not link.paused]))

    def _value_changed(self, change: WireStateSet) -> None:
        if change.wire != KEPT_AS:
            return
        self._reports.pop(change.key, None)
        self._warned_at.pop(change.key, None)
        if change.value is None:
            self._definitions.pop(change.key, None)
        else:
            self._definitions[change.key] = msgspec.msgpack.decode(change.value, type=LinkDefinition)
        self.begin()

    def _reported(self, line: bytes) -> None:
        try:
            report = msgspec.json.decode(line, type=LinkReport)
        except msgspec.DecodeError:
            return
        link = self._definitions.get(report.link)
        if link is None or link.paused:
            return
        self._reports.setdefault(link.name, {})[report.topic] = report
        now = time.monotonic()
        if report.error and now - self._warned_at.get(link.name, float("-inf")) >= STALE_S:
            self._warned_at[link.name] = now
            self._log.warning("a link fails: trying again", link=link.name, topic=report.topic, reason=report.error)

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

    async def _store(self, name: str, link: LinkDefinition | None) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        value = None if link is None else msgspec.msgpack.encode(link)
        self._broker.set_wire_state(KEPT_AS, name, value, level=Level.SYNCED, done=partial(_complete, done))
        await done

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
