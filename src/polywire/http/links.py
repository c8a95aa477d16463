"""The endpoints for links. Responses never contain passwords."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from polywire.broker.permissions import Action
from polywire.choices import choice
from polywire.errors import ErrorCode, Invalid, Unavailable
from polywire.http.endpoints import ApiCall, Endpoint
from polywire.link_orders import LinkDefinition, LinkStart, LinkView

if TYPE_CHECKING:
    from polywire.broker.broker import Broker
    from polywire.http.process import Links, Process

TOPICS_MAX: Final = 1_000  # topics in one response
CHECK_S: Final = 20.0  # time to check the source of a new link


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
        rows = [msgspec.to_builtins(report) for report in topics[:TOPICS_MAX]]
        found = {**_summary(view), "topic_reports": rows, "more": len(topics) > TOPICS_MAX}
        return found | {"can_alter": self._can_alter(call)}

    def _can_alter(self, call: ApiCall) -> bool:
        return self._broker.access.permits(call.principal, Action.CLUSTER_ALTER)

    async def _create(self, call: ApiCall) -> Any:
        topics = call.body.get("topics")
        if not isinstance(topics, list) or not all(isinstance(topic, str) for topic in topics):
            raise Invalid(ErrorCode.INVALID_REQUEST, "topics must be a list of names and patterns")
        start = choice(LinkStart, str(call.body.get("start", LinkStart.EARLIEST.value)), "start")
        link = LinkDefinition(call.path["link"], call.text("source"), tuple(topics), start)
        dry_run = _boolean(call, "dry_run", default=False)
        plan = await self._links.create(link, dry_run=dry_run)
        return {
            "name": link.name,
            "dry_run": dry_run,
            "topics": [msgspec.to_builtins(topic) for topic in plan.topics[:TOPICS_MAX]],
            "notes": list(plan.notes),
        }

    async def _pause(self, call: ApiCall) -> Any:
        return _summary(await self._links.pause(call.path["link"], paused=_boolean(call, "paused")))

    async def _delete(self, call: ApiCall) -> Any:
        await self._links.delete(call.path["link"])
        return {"name": call.path["link"]}


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
        "followed": len(reports),
        "lag": sum([report.lag for report in reports]),
        "lag_s": max([report.lag_s for report in reports], default=0.0),
        "rate": sum([report.rate for report in reports]),
        "created_at_us": link.created_at_us,
    }


def _boolean(call: ApiCall, name: str, *, default: bool | None = None) -> bool:
    """Return a field of the body. Raises Invalid(INVALID_REQUEST) if it is not a boolean."""
    value = call.body.get(name, default)
    if not isinstance(value, bool):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"{name} must be true or false got={value!r:.40}")
    return value
