"""Mechanisms of classic groups, with a switch that disables one in the wires simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from polywire.broker.groups import classic_groups
from polywire.broker.groups.classic import ClassicGroup
from polywire.broker.groups.classic_groups import ClassicGroups
from polywire.broker.groups.classic_members import Member
from polywire.testing.memory_broker import MemoryBroker
from tests.sim.mutation import Mutation, nothing, prepared, replaced, wrapped
from tests.unit.broker import test_classic_groups

ClassicMutation: Final = partial(Mutation, world="wires")


def _any_member(group: ClassicGroup, member_id: str, generation: int, **_: object) -> None:
    """Let any client that knows the generation commit offsets."""
    group._check_generation(generation)


def _everybody_leads(old: Callable[..., None], group: ClassicGroup, member: Member, **named: Any) -> None:
    """Tell each member that it is the leader."""
    named["leader"] = member.id
    old(group, member, **named)


def _first_caller_assigns(
    old: Callable[..., None], group: ClassicGroup, member_id: str, *args: Any, **named: Any
) -> None:
    """Let the first member that syncs assign."""
    group.leader = member_id if member_id in group._members else group.leader
    old(group, member_id, *args, **named)


def _rejoins_as_new(old: Callable[..., str], group: ClassicGroup, *args: Any) -> str:
    """Make a returning static member cause a rebalance."""
    found = old(group, *args)
    group._rebalance(args[-1])
    return found


def _unheard(old: Callable[..., None], group: ClassicGroup, member_id: str, *args: Any, **named: Any) -> None:
    """Do not count a heartbeat as a sign of life."""
    member = group.member(member_id)
    heard_at = 0.0 if member is None else member.heard_at
    old(group, member_id, *args, **named)
    if member is not None:
        member.heard_at = heard_at


def _long_silent(old: Callable[..., ClassicGroup], *args: Any) -> ClassicGroup:
    """Count members as silent since long before the start."""
    return old(*args[:-1], 0.0)


CLASSIC_MUTATIONS: Final[Sequence[Mutation]] = (
    ClassicMutation(
        "classic-kept",
        "what members have settled on is kept",
        replaced(ClassicGroups, "_store_generation", nothing),
        test=prepared(
            test_classic_groups.test_members_keep_their_generation_over_a_restart, memory=MemoryBroker, snapshot=bool
        ),
    ),
    ClassicMutation(
        "classic-session",
        "members have a whole session from a start",
        wrapped(classic_groups, "restored", _long_silent),
    ),
    ClassicMutation(
        "classic-generation",
        "a generation stores under its number",
        replaced(ClassicGroup, "_check_generation", nothing),
    ),
    ClassicMutation(
        "classic-members", "only members store positions", replaced(ClassicGroup, "check_commit", _any_member)
    ),
    ClassicMutation("classic-leader", "one member leads", wrapped(ClassicGroup, "_answer_joined", _everybody_leads)),
    ClassicMutation("classic-assigned", "the leader assigns", wrapped(ClassicGroup, "sync", _first_caller_assigns)),
    ClassicMutation("classic-static", "who is back has its place", wrapped(ClassicGroup, "_replace", _rejoins_as_new)),
    ClassicMutation("classic-heartbeat", "who is heard of stays", wrapped(ClassicGroup, "heartbeat", _unheard)),
    ClassicMutation("classic-expiry", "who is silent is gone", replaced(ClassicGroup, "expire", nothing)),
    ClassicMutation("classic-timer", "a phase ends in time", replaced(ClassicGroups, "_on_timer", nothing)),
)
