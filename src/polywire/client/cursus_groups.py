"""Consumer groups over the Cursus protocol, where the broker chooses the ids of members.

A caller names its member. If it joins again with the same name, it remains the same member for the broker.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from polywire.client.base import Membership
from polywire.client.cursus_replies import fields, number, numbers
from polywire.errors import ErrorCode, Missing

Ask = Callable[[str], Awaitable[bytes]]


class Groups:
    """The group members of one client. ``_ids`` has the broker's id of every member that has joined and not left."""

    __slots__ = ("_ask", "_ids")

    def __init__(self, ask: Ask) -> None:
        self._ask: Final = ask
        self._ids: dict[tuple[str, str, str], str] = {}

    async def join(self, group: str, topic: str, member: str) -> Membership:
        """Join, or join again as the same member."""
        key = group, topic, member
        reply = fields(await self._ask(f"JOIN_GROUP topic={topic} group={group} member={self._ids.get(key, member)}"))
        self._ids[key] = reply.get("member", member)
        return Membership(number(reply, "generation"), numbers(reply, "assignments"))

    def _member(self, group: str, topic: str, member: str, generation: int) -> str:
        name = self._ids.get((group, topic, member), member)
        return f"topic={topic} group={group} member={name} generation={generation}"

    async def heartbeat(self, group: str, topic: str, member: str, generation: int) -> Membership:
        """Send a heartbeat. Raises Conflict if the assignment has changed."""
        reply = fields(await self._ask("SYNC_GROUP " + self._member(group, topic, member, generation)))
        return Membership(number(reply, "generation"), numbers(reply, "assignments"))

    async def leave(self, group: str, topic: str, member: str, generation: int) -> None:
        """Leave the group."""
        fields(await self._ask("LEAVE_GROUP " + self._member(group, topic, member, generation)))
        self._ids.pop((group, topic, member), None)

    async def commit(
        self, group: str, topic: str, partition: int, offset: int, *, member: str, generation: int
    ) -> None:
        """Commit an offset. Without a member, use the positional command, which does not check the generation."""
        if member:
            place = f"partition={partition} offset={offset}"
            fields(await self._ask(f"COMMIT_OFFSET {place} {self._member(group, topic, member, generation)}"))
        else:
            fields(await self._ask(f"COMMIT {topic} {group} {partition} {offset}"))

    async def position(self, group: str, topic: str, partition: int) -> int | None:
        """Return the next offset to read, 0 if nothing was committed, or None if the group does not exist."""
        try:
            reply = fields(await self._ask(f"FETCH_OFFSET topic={topic} partition={partition} group={group}"))
        except Missing as error:
            if error.code is not ErrorCode.GROUP_MISSING:
                raise
            return None
        return number(reply, "offset")
