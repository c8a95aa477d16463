"""Who the connections of one server are: how long a peer may stay nobody, which slots are kept for whom, and whose login is over.

Promises: peers that have not logged in never take the last slots of those who do, nor these the last ones of administrators; when slots
are short, who has been nobody longest gives way to who comes; a connection whose login counts no more is closed. A broker without users
asks nobody who it is, and none of this counts. Must not know: any wire, passwords, sockets.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from polywire.broker.audit import AuditEvent, AuditSink, Outcome, discard
from polywire.errors import Busy, ErrorCode

if TYPE_CHECKING:
    from polywire.broker.access import Principal

LOGIN_WIRES: Final = frozenset({"cursus", "iggy", "kafka", "polywire"})  # those with words for a login
LOGIN_SECONDS_MAX: Final = 10  # for a peer to say who it is: a hash takes some 40 ms, a slow network a second or two
USERS_RESERVED: Final = 1_024  # slots that who is nobody cannot take; a quarter of all where there are few
ADMINISTRATORS_RESERVED: Final = (
    16  # slots that users who cannot manage the server cannot take; an eighth where there are few
)
LOOKED_AT_MAX: Final = 128  # of those who may have to go: more than logins can wait to be verified at once


class Standing(IntEnum):
    """How well a peer is known; who is known less goes first when anything is short."""

    SILENT = 0
    UNKNOWN = 1
    IDENTIFIED = 2
    ADMINISTRATOR = 3


class Identities(Protocol):
    """Who may log in, as far as connections concern it; the broker's users are."""

    @property
    def is_open(self) -> bool:
        """Whether nobody has to log in."""

    def is_current(self, principal: Principal, /) -> bool:
        """Whether a login still counts."""

    def is_administrator(self, principal: Principal, /) -> bool:
        """Whether it may manage the server."""

    def certified(self, name: str, /) -> Principal | None:
        """Who a peer is whose TLS certificate was issued to this name."""


class Guest(Protocol):
    """A connection, as far as it matters who it is."""

    @property
    def peer(self) -> str:
        """Address of the peer."""

    @property
    def wire(self) -> str:
        """Name of the wire it speaks, empty while that is not known."""

    @property
    def is_waiting(self) -> bool:
        """Whether it is owed an answer, as who is logging in is."""

    def abort(self, reason: str) -> None:
        """Close at once."""

    def end(self, reason: str) -> None:
        """Close once what was written is sent, and carry out nothing more."""


class Logins:
    """The peers of one server by who they are.

    Invariant: a guest that entered is in exactly one of ``_nobody`` (with the tick since which it is, oldest first) and ``_known``;
    ``_by_user`` holds those of ``_known`` by the id of their user; ``_administrators`` counts them.
    """

    __slots__ = ("_administrators", "_by_user", "_identities", "_known", "_nobody", "audit", "slots_max", "tick")

    def __init__(self, identities: Identities | None, slots_max: int) -> None:
        """identities: none where nobody ever logs in."""
        self._identities: Final = identities
        self._nobody: dict[Guest, int] = {}
        self._known: dict[Guest, tuple[Principal, bool]] = {}
        self._by_user: dict[int, set[Guest]] = {}
        self._administrators = 0
        self.audit: AuditSink = discard
        self.slots_max = slots_max
        self.tick = 0

    @property
    def is_open(self) -> bool:
        """Whether nobody has to log in."""
        return self._identities is None or self._identities.is_open

    # Slots

    @property
    def administrators_reserved(self) -> int:
        """Slots that only administrators may take."""
        return min(ADMINISTRATORS_RESERVED, self.slots_max // 8)

    @property
    def nobody_max(self) -> int:
        """How many may be nobody at once."""
        return self.slots_max - self.administrators_reserved - min(USERS_RESERVED, self.slots_max // 4)

    def enter(self, guest: Guest) -> bool:
        """Give a new connection a slot; False when there is none even if others give way."""
        if self.is_open:
            return True
        total = len(self._nobody) + len(self._known)
        if (len(self._nobody) >= self.nobody_max or total >= self.slots_max) and not self._give_way():
            return False
        self._nobody[guest] = self.tick
        return True

    def _give_way(self) -> bool:
        """Who has been nobody longest goes, of those who are not just logging in."""
        for guest in islice(self._nobody, LOOKED_AT_MAX):
            if not guest.is_waiting:
                del self._nobody[guest]
                guest.abort("the peer did not log in, and others want its slot")
                return True
        return False

    def standing(self, guest: Guest) -> Standing:
        """How well a peer that has said something is known."""
        known = self._known.get(guest)
        if known is None:
            return Standing.UNKNOWN
        return Standing.ADMINISTRATOR if known[1] else Standing.IDENTIFIED

    def name_of(self, guest: Guest) -> str:
        """The user that a peer is, empty for nobody."""
        known = self._known.get(guest)
        return "" if known is None else known[0].name

    def leave(self, guest: Guest) -> None:
        """The connection is gone."""
        self._nobody.pop(guest, None)
        self._unknow(guest)

    # Who is who

    def identify(self, guest: Guest, principal: Principal | None) -> None:
        """A peer has logged in, as somebody else perhaps, or out. Raises Busy(BUSY) when all slots for such are taken."""
        if self._identities is None or self._identities.is_open:
            return
        known = self._known.get(guest)
        if known is not None and known[0] is principal:
            return
        if known is None and guest not in self._nobody:
            return  # it has left meanwhile
        if principal is None:
            self._unknow(guest)
            self._nobody.setdefault(guest, self.tick)
            return
        administrator = self._identities.is_administrator(principal)
        users_max = self.slots_max - self.administrators_reserved
        if known is None and not administrator and len(self._known) - self._administrators >= users_max:
            raise Busy(ErrorCode.BUSY, f"too many connections of users limit={users_max}", retry_after_ms=1_000)
        if known is None or known[0] != principal:
            method = "token" if principal.token is not None else "password or certificate"
            self.audit(AuditEvent("login", Outcome.ALLOWED, principal.name, guest.peer, reason=method))
        self._unknow(guest)
        self._nobody.pop(guest, None)
        self._known[guest] = principal, administrator
        self._by_user.setdefault(principal.user_id, set()).add(guest)
        self._administrators += administrator

    def certify(self, guest: Guest, name: str) -> Principal | None:
        """Who a peer with a certificate of this name is, and is from now on; None when it is nobody. Raises Busy(BUSY) as ``identify``."""
        principal = None if self._identities is None else self._identities.certified(name)
        if principal is not None:
            principal = replace(principal, peer=guest.peer)
            self.identify(guest, principal)
        return principal

    def _unknow(self, guest: Guest) -> None:
        known = self._known.pop(guest, None)
        if known is None:
            return
        principal, administrator = known
        self._administrators -= administrator
        guests = self._by_user[principal.user_id]
        guests.discard(guest)
        if not guests:
            del self._by_user[principal.user_id]

    # Ends

    def end(self, user_id: int) -> None:
        """Close the connections of a user whose login does not count any more."""
        for guest in list(self._by_user.get(user_id, ())):
            self._end_if_over(guest)

    def _end_if_over(self, guest: Guest) -> None:
        assert self._identities is not None, "somebody has logged in"
        if not self._identities.is_current(self._known[guest][0]):
            guest.end("the login is over: its user, password or token is gone")

    def sweep(self) -> None:
        """A second has passed: who did not log in in time goes, and whose token has expired."""
        self.tick += 1
        if self.is_open:
            return
        for guest, since in list(self._nobody.items()):
            if self.tick - since <= LOGIN_SECONDS_MAX:
                break  # the others came later
            if guest.wire in LOGIN_WIRES and not guest.is_waiting:
                guest.abort("the peer did not log in in time")
        expiring = [guest for guest, (principal, _) in self._known.items() if principal.expires_at_us is not None]
        for guest in expiring:
            self._end_if_over(guest)
