"""The endpoints for links. Responses never contain passwords."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from polywire.broker.permissions import Action
from polywire.choices import choice
from polywire.errors import ErrorCode, Invalid, Unavailable
from polywire.http.endpoints import ApiCall, Endpoint
from polywire.link_orders import (
    EVERY_GROUP,
    FAILING,
    QUIET_MS,
    QUIET_MS_MAX,
    STARTING,
    LinkDefinition,
    LinkReport,
    LinkStart,
    LinkView,
)

if TYPE_CHECKING:
    from polywire.broker.broker import Broker
    from polywire.http.process import Links, Process

TOPICS_MAX: Final = 1_000  # topics in one response


class LinkEndpoints:
    """The HTTP API's endpoints for links."""

    def __init__(self, process: Process, broker: Broker) -> None:
        self._process: Final = process
        self._broker: Final = broker

    def table(self) -> Sequence[Endpoint]:
        path = "/links/{link}"
        new = {
            "source": "URL of the broker to read from: scheme://host:port, with a login if it needs one",
            "topics": "list of topics and patterns with * and ?",
            "start": "earliest (default) or latest",
            "groups": "list of groups and patterns whose offsets are carried; all by default",
            "dry_run": "true only shows what the link would do",
        }
        describe, alter = Action.SERVER_DESCRIBE, Action.CLUSTER_ALTER
        return [
            Endpoint("GET", "/links", describe, "List links", self._list),
            Endpoint("GET", path, describe, "Describe a link, with the lag of each topic", self._find),
            Endpoint("POST", path, alter, "Create a link", self._create, new),
            Endpoint(
                "POST",
                f"{path}/paused",
                alter,
                "Pause or resume a link",
                self._pause,
                {"paused": "true or false"},
            ),
            Endpoint(
                "POST",
                f"{path}/cut-over",
                alter,
                "Cut over topics as soon as everything is copied: repeat it until all are; without it, the link follows "
                "them again after some seconds",
                self._cut_over,
                {
                    "topics": "list of topics and patterns; all topics of the link by default",
                    "quiet_ms": f"milliseconds for which nothing must arrive at the source; {QUIET_MS} by default",
                    "reverse": "true copies later records to the source",
                },
            ),
            Endpoint(
                "POST",
                f"{path}/fall-back",
                alter,
                "Follow topics again whose cut-over was reversed, as soon as the source has everything: repeat it until all "
                "are followed",
                self._fall_back,
                {
                    "topics": "list of topics and patterns; all topics of the link by default",
                    "quiet_ms": f"milliseconds for which nothing must be written here; {QUIET_MS} by default",
                },
            ),
            Endpoint(
                "POST",
                f"{path}/cut-over/cancel",
                alter,
                "Let the link follow topics again whose cut-over waits",
                self._cancel_cut_over,
                {"topics": "list of topics and patterns; all topics of the link by default"},
            ),
            Endpoint("DELETE", path, alter, "Delete a link; topics remain", self._delete),
        ]

    @property
    def _links(self) -> Links:
        if self._process.links is None:
            raise Unavailable(ErrorCode.STOPPING, "links are not available: the broker is starting")
        return self._process.links

    async def _list(self, call: ApiCall) -> Any:
        return {"links": [_summary(view) for view in self._links.all()], "can_alter": self._can_alter(call)}

    async def _find(self, call: ApiCall) -> Any:
        view = self._links.find(call.path["link"])
        topics = list(view.topics())
        rows = [_report(report, view) for report in topics[:TOPICS_MAX]]
        groups = [msgspec.to_builtins(group) for group in view.groups]
        found = {**_summary(view), "topic_reports": rows, "more": len(topics) > TOPICS_MAX, "group_reports": groups}
        return found | {"can_alter": self._can_alter(call)}

    def _can_alter(self, call: ApiCall) -> bool:
        return self._broker.access.permits(call.principal, Action.CLUSTER_ALTER)

    async def _create(self, call: ApiCall) -> Any:
        topics = _patterns(call, "topics", None)
        start = choice(LinkStart, str(call.body.get("start", LinkStart.EARLIEST.value)), "start")
        groups = _patterns(call, "groups", (EVERY_GROUP,))
        link = LinkDefinition(call.path["link"], call.text("source"), topics, start, groups=groups)
        dry_run = _boolean(call, "dry_run", default=False)
        plan = await self._links.create(link, dry_run=dry_run)
        return {
            "name": link.name,
            "dry_run": dry_run,
            "topics": [msgspec.to_builtins(topic) for topic in plan.topics[:TOPICS_MAX]],
            "notes": list(plan.notes),
            "groups": list(plan.groups[:TOPICS_MAX]),
        }

    async def _pause(self, call: ApiCall) -> Any:
        return _summary(await self._links.pause(call.path["link"], paused=_boolean(call, "paused")))

    async def _cut_over(self, call: ApiCall) -> Any:
        patterns, reverse = _patterns(call, "topics", ()), _boolean(call, "reverse", default=False)
        link = call.path["link"]
        return _phases(await self._links.cut_over(link, patterns, quiet_ms=_quiet_ms(call), reverse=reverse))

    async def _fall_back(self, call: ApiCall) -> Any:
        patterns = _patterns(call, "topics", ())
        return _phases(await self._links.fall_back(call.path["link"], patterns, quiet_ms=_quiet_ms(call)))

    async def _cancel_cut_over(self, call: ApiCall) -> Any:
        return _phases(await self._links.cancel_cut_over(call.path["link"], _patterns(call, "topics", ())))

    async def _delete(self, call: ApiCall) -> Any:
        await self._links.delete(call.path["link"])
        return {"name": call.path["link"]}


def failing_links(process: Process) -> list[str]:
    """Return the names of the links that fail, sorted."""
    views = () if process.links is None else process.links.all()
    return [view.link.name for view in views if view.state == FAILING][:TOPICS_MAX]


def _summary(view: LinkView) -> Mapping[str, Any]:
    link, reports = view.link, list(view.topics())
    return {
        "name": link.name,
        "source": link.address,
        "user": link.user,
        "topics": list(link.topics),
        "start": link.start.value,
        "state": view.state,
        "error": view.error,
        "groups": list(link.groups),
        "carried_groups": len({group.group for group in view.groups}),
        "group_error": view.group_error,
        "followed": len(reports),
        **_lags(reports, is_known=view.state not in (STARTING, FAILING)),
        "rate": sum([report.rate for report in reports]),
        "created_at_us": link.created_at_us,
    }


def _phases(view: LinkView) -> Mapping[str, Any]:
    rows = [
        {
            "topic": report.topic,
            "phase": report.phase.value,
            "lag": report.lag,
            "pause_s": report.pause_s,
            "error": report.error,
        }
        for report in view.topics()
    ]
    return {"name": view.link.name, "error": view.error, "topics": rows}


def _lags(reports: Sequence[LinkReport], *, is_known: bool) -> Mapping[str, Any]:
    """Return the lag of topics together, or null if it is not known."""
    if not is_known:
        return {"lag": None, "lag_s": None}
    return {
        "lag": sum([report.lag for report in reports]),
        "lag_s": max([report.lag_s for report in reports], default=0.0),
    }


def _report(report: LinkReport, view: LinkView) -> Mapping[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(report)
    row |= _lags([report], is_known=view.knows_lag(report))
    for name in ("settled", "closing", "groups", "group_error"):
        del row[name]
    return row


def _patterns(call: ApiCall, name: str, default: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return a list of names and patterns in the body. Raises Invalid(INVALID_REQUEST)."""
    found = call.body.get(name, default)
    if not isinstance(found, list | tuple) or not all(isinstance(pattern, str) for pattern in found):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"{name} must be a list of names and patterns")
    return tuple(found)


def _quiet_ms(call: ApiCall) -> int:
    quiet_ms = call.body.get("quiet_ms", QUIET_MS)
    if type(quiet_ms) is not int or not 0 <= quiet_ms <= QUIET_MS_MAX:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"quiet_ms is out of range limit={QUIET_MS_MAX} got={quiet_ms!r:.40}")
    return quiet_ms


def _boolean(call: ApiCall, name: str, *, default: bool | None = None) -> bool:
    """Return a field of the body. Raises Invalid(INVALID_REQUEST) if it is not a boolean."""
    value = call.body.get(name, default)
    if not isinstance(value, bool):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"{name} must be true or false got={value!r:.40}")
    return value
