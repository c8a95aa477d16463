"""Create the group objects of a broker, which share a coordinator and a table (concepts: groups#what-a-group-is)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from polywire.broker.groups import classic_groups, consumer_groups, coordinator, seats
from polywire.broker.groups.classic import ClassicGroup
from polywire.broker.groups.classic_groups import ClassicGroups
from polywire.broker.groups.commits import Commits
from polywire.broker.groups.consumer_groups import ConsumerGroups
from polywire.broker.groups.coordinator import Coordinator
from polywire.broker.groups.seats import Seats
from polywire.broker.owners import Owners
from polywire.broker.settings import BrokerSettings
from polywire.broker.sliced import SlicedWork
from polywire.broker.state import State
from polywire.clock import Clock, ElapsedClock
from polywire.log.base import Loop


class Host(coordinator.Host, seats.Host, classic_groups.Host, consumer_groups.Host, Protocol):
    """The broker as groups use it."""


class Groups(NamedTuple):
    """The group objects. table: all classic groups by name."""

    commits: Commits
    coordinator: Coordinator
    classic: ClassicGroups
    consumers: ConsumerGroups
    table: Mapping[str, ClassicGroup]


def open_groups(
    host: Host,
    state: State,
    *,
    settings: BrokerSettings,
    loop: Loop,
    clock: Clock,
    elapsed: ElapsedClock,
    owners: Owners,
    sliced: SlicedWork,
) -> Groups:
    """Create the groups of a broker that has recovered its state."""
    table: dict[str, ClassicGroup] = {}
    commits = Commits(state, settings, elapsed, owners, table)
    coordinated = Coordinator(host, state, settings, clock, elapsed)
    seated = Seats(host, coordinated)
    classic = ClassicGroups(
        host,
        state,
        settings=settings,
        loop=loop,
        clock=clock,
        commits=commits,
        coordinator=coordinated,
        seats=seated,
        table=table,
        sliced=sliced,
    )
    consumers = ConsumerGroups(
        host,
        state,
        settings=settings,
        loop=loop,
        clock=clock,
        commits=commits,
        coordinator=coordinated,
        seats=seated,
        sliced=sliced,
    )
    return Groups(commits, coordinated, classic, consumers, table)
