"""Groups over the Cursus wire: members have ids of the broker's making.

Promises: a member is known by the name its caller gave it; joining again is the same member. Must not know: connections.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from polywire.client.base import Membership
from polywire.client.cursus_replies import fields, number, numbers
from polywire.errors import ErrorCode, Missing

Ask = Callable[[str], Awaitable[bytes]]


class Groups:
    """The members one client has made. Invariant: ``_ids`` holds the broker's id of every member that joined and did not leave."""

    __slots__ = ("_ask", "_ids")

    def __init__(self, ask: Ask) -> None:
        self._ask: Final = ask
        self._ids: dict[tuple[str, str, str], str] = {}

    async def join(self, group: str, topic: str, member: str) -> Membership:
        """Join, or join again as the same member."""
        key = group, topic, member
        told = fields(await self._ask(f"JOIN_GROUP topic={topic} group={group} member={self._ids.get(key, member)}"))
        self._ids[key] = told.get("member", member)
        return Membership(number(told, "generation"), numbers(told, "assignments"))

    def _member(self, group: str, topic: str, member: str, generation: int) -> str:
        name = self._ids.get((group, topic, member), member)
        return f"topic={topic} group={group} member={name} generation={generation}"

    async def heartbeat(self, group: str, topic: str, member: str, generation: int) -> Membership:
        """Stay a member. Raises Conflict when the group has changed."""
        told = fields(await self._ask("SYNC_GROUP " + self._member(group, topic, member, generation)))
        return Membership(number(told, "generation"), numbers(told, "assignments"))

    async def leave(self, group: str, topic: str, member: str, generation: int) -> None:
        """Be no member any more."""
        fields(await self._ask("LEAVE_GROUP " + self._member(group, topic, member, generation)))
        self._ids.pop((group, topic, member), None)

    async def commit(
        self, group: str, topic: str, partition: int, offset: int, *, member: str, generation: int
    ) -> None:
        """Store a position; without a member in the positional dialect, which does not fence."""
        if member:
            place = f"partition={partition} offset={offset}"
            fields(await self._ask(f"COMMIT_OFFSET {place} {self._member(group, topic, member, generation)}"))
        else:
            fields(await self._ask(f"COMMIT {topic} {group} {partition} {offset}"))

    async def position(self, group: str, topic: str, partition: int) -> int | None:
        """The next offset to read; 0 also when nothing was ever committed, None when there is no such group."""
        try:
            told = fields(await self._ask(f"FETCH_OFFSET topic={topic} partition={partition} group={group}"))
        except Missing as error:
            if error.code is not ErrorCode.GROUP_MISSING:
                raise
            return None
        return number(told, "offset")
