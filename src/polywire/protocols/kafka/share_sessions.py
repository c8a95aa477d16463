"""Share sessions: which partitions a member of a share group reads over a connection (spec: kafka#share-sessions).

* A session belongs to the connection that opened it. When it ends, the member's records are released.
* A member has one session. A new one replaces the old one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from polywire.protocols.kafka.messages import WireError

OPENING: Final = 0  # epoch of a request that opens a session
CLOSING: Final = -1  # epoch of a request that closes it
EPOCH_MAX: Final = 2**31 - 1
SESSIONS_MAX: Final = 10_000  # sessions of one listener
PARTITIONS_MAX: Final = 100_000  # partitions of one session
_NONE: Final = WireError.NONE  # read for every request; a module constant is ten times as fast as an attribute

Place = tuple[bytes, int]
"""Topic id and partition number."""


class ShareSession:
    """The session of one member.

    Attributes:
        epoch: the epoch that the next request must have.
        partitions: the partitions that the member reads, as keys, those first that were not served last.
        is_over: whether the session has ended.
    """

    __slots__ = ("epoch", "group", "is_over", "member", "partitions")

    def __init__(self, group: str, member: str) -> None:
        self.group: Final = group
        self.member: Final = member
        self.epoch = 1
        self.partitions: dict[Place, None] = {}
        self.is_over = False

    def advance(self) -> None:
        self.epoch = 1 if self.epoch == EPOCH_MAX else self.epoch + 1

    def move_back(self, place: Place) -> None:
        """Read a partition after the others in the next request."""
        if place in self.partitions:
            del self.partitions[place]
            self.partitions[place] = None


class ShareSessions:
    """The share sessions of one listener.

    Args:
        ended: called with the group and the member of a session that has ended, to release its records.
    """

    __slots__ = ("_ended", "_sessions")

    def __init__(self, ended: Callable[[str, str], None]) -> None:
        self._ended: Final = ended
        self._sessions: dict[tuple[str, str], ShareSession] = {}

    def open(self, group: str, member: str) -> ShareSession | None:
        """Open the session of a member, and end an older one. Return None if there are too many sessions."""
        key = group, member
        older = self._sessions.get(key)
        if older is not None:
            self.end(older)
        if len(self._sessions) >= SESSIONS_MAX:
            return None
        session = self._sessions[key] = ShareSession(group, member)
        return session

    def end(self, session: ShareSession) -> None:
        """End a session, unless it has ended."""
        if not session.is_over:
            session.is_over = True
            del self._sessions[session.group, session.member]
            self._ended(session.group, session.member)


def session_error(session: ShareSession | None, group: str, member: str, epoch: int) -> WireError:
    """Return the error of a request in a session, or NONE."""
    if session is None or session.is_over or (session.group, session.member) != (group, member):
        return WireError.SHARE_SESSION_NOT_FOUND
    if epoch not in (CLOSING, session.epoch):
        return WireError.INVALID_SHARE_SESSION_EPOCH
    return _NONE
