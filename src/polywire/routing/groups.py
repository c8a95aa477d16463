"""Consumer groups of all processes. The process that owns a topic coordinates its groups."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

from polywire.broker.groups.coordinator import Coordinator
from polywire.broker.groups.group import GroupView
from polywire.routing.calls import Router, aggregated, routed


def _all_pairs(found: Sequence[list[tuple[str, str]]]) -> list[tuple[str, str]]:
    return list(chain.from_iterable(found))


def _joined_views(found: Sequence[list[GroupView]]) -> list[GroupView]:
    return sorted(chain.from_iterable(found), key=lambda view: (view.topic, view.name))


def _all_bound(found: Sequence[dict[str, str]]) -> dict[str, str]:
    return dict(chain.from_iterable(bound.items() for bound in reversed(found)))


class RoutedGroups:
    """Executes methods of ``Coordinator`` in the process that owns the topic."""

    __slots__ = ("local", "router")

    def __init__(self, router: Router, local: Coordinator) -> None:
        self.router: Final = router
        self.local: Final = local

    bind = routed("groups.bind", Coordinator.bind, "topic")
    bound = aggregated("groups.bound", Coordinator.bound, _all_bound)
    commit = routed("groups.commit", Coordinator.commit, "topic")
    commit_all = routed("groups.commit_all", Coordinator.commit_all, "topic")
    create = routed("groups.create", Coordinator.create, "topic")
    delete = routed("groups.delete", Coordinator.delete, "topic")
    has_member = routed("groups.has_member", Coordinator.has_member, "topic")
    heartbeat = routed("groups.heartbeat", Coordinator.heartbeat, "topic")
    join = routed("groups.join", Coordinator.join, "topic")
    leave = routed("groups.leave", Coordinator.leave, "topic")
    names = routed("groups.names", Coordinator.names, "topic")
    pairs = aggregated("groups.pairs", Coordinator.pairs, _all_pairs)
    sync = routed("groups.sync", Coordinator.sync, "topic")
    view = routed("groups.view", Coordinator.view, "topic")
    _all_views = aggregated("groups.views", Coordinator.views, _joined_views)
    _views_of_topic = routed("groups.views", Coordinator.views, "topic")

    def bound_to(self, wire: str, group: str) -> str | None:
        """See ``Coordinator.bound_to``. The bindings of a process are known once it has reported its topics."""
        return self.local.bound_to(wire, group)

    def views(self, topic: str | None = None) -> list[GroupView]:
        """Return all groups, or the groups of one topic, sorted by topic and name."""
        return self._all_views() if topic is None else self._views_of_topic(topic)
