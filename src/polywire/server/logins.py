"""Who the connections of one server are: how long a login may take, which slots are reserved for whom, and which logins have ended.

Promises:
* Strangers (connections that have neither logged in nor been served as the user ``anonymous``) never take the last slots of users, and
  users never take the last slots of administrators.
* When slots are short, a new connection takes the slot of the oldest stranger. Strangers on protocols that have a login go first.
* A connection that is served as ``anonymous`` loses its slot to a new connection only when no stranger is left.
* A logged-in connection never loses its slot, and is closed when its login ends.

A broker without users has no logins, and none of this applies. Must not know: the bytes of any protocol, passwords, sockets.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from polywire.broker.audit import AuditEvent, AuditSink, Outcome, discard
from polywire.broker.owners import ANONYMOUS
from polywire.errors import Busy, ErrorCode

if TYPE_CHECKING:
    from polywire.broker.access import Principal

LOGIN_WIRES: Final = frozenset({"cursus", "iggy", "kafka", "polywire"})  # those with words for a login
NAMELESS_WIRES: Final = frozenset({"flux", "kafka07"})  # those without: their peers are served as ``anonymous``
LOGIN_SECONDS_MAX: Final = 10  # for a peer to say who it is: a hash takes some 40 ms, a slow network a second or two
USERS_RESERVED: Final = 1_024  # slots that who is nobody cannot take; a quarter of all where there are few
ADMINISTRATORS_RESERVED: Final = (
    16  # slots that users who cannot manage the server cannot take; an eighth where there are few
)
STRANGERS_RESERVED: Final = (
    256  # slots for logins that connections of ``anonymous`` leave free; half where there are few
)
QUIET_TICKS: Final = 10  # seconds without a byte after which a connection of ``anonymous`` may become a stranger again
GRACE_TICKS: Final = 2  # seconds that a new connection has to begin its login before it is the first to be evicted
CANDIDATES_MAX: Final = (
    512  # strangers that are checked for one to evict: twice as many as logins can wait to be verified
)


class Standing(IntEnum):
    """How well a peer is known; who is known less goes first when anything is short."""

    SILENT = 0
    UNKNOWN = 1
    ANONYMOUS = 2
    IDENTIFIED = 3
    ADMINISTRATOR = 4


class Identities(Protocol):
    """Who may log in, as far as connections concern it; the broker's users are."""

    @property
    def is_open(self) -> bool:
        """Whether nobody has to log in."""

    def is_current(self, principal: Principal, /) -> bool:
        """Whether a login still counts."""

    def is_administrator(self, principal: Principal, /) -> bool:
        """Whether it may manage the server."""

    def is_verifying(self, peer: str, /) -> bool:
        """Whether a login that came over the connection of this address is being verified, or waits to be."""

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
    def seen_tick(self) -> int:
        """When it last sent something."""

    def abort(self, reason: str) -> None:
        """Close at once."""

    def vacate(self) -> None:
        """Free the slot of a connection that was closed."""

    def end(self, reason: str) -> None:
        """Close once what was written is sent, and carry out nothing more."""


class Logins:
    """The peers of one server by who they are.

    Invariant: a guest that entered is in exactly one of ``_strangers`` (with the tick at which it became one, oldest first), ``_anonymous``
    and ``_known``. ``_by_user`` holds those of ``_known`` by the id of their user; ``_administrators`` counts them. ``_quiet`` lists
    ``_anonymous`` as it was at the tick ``_sorted_at``, the one quiet longest first.
    """

    __slots__ = (
        "_administrators",
        "_anonymous",
        "_by_user",
        "_identities",
        "_known",
        "_quiet",
        "_sorted_at",
        "_strangers",
        "audit",
        "slots_max",
        "tick",
    )

    def __init__(self, identities: Identities | None, slots_max: int) -> None:
        """identities: none where nobody ever logs in."""
        self._identities: Final = identities
        self._strangers: dict[Guest, int] = {}
        self._anonymous: dict[Guest, None] = {}
        self._quiet: deque[Guest] = deque()
        self._sorted_at = -1
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
    def strangers_max(self) -> int:
        """How many may be strangers or anonymous at once."""
        return self.slots_max - self.administrators_reserved - min(USERS_RESERVED, self.slots_max // 4)

    @property
    def anonymous_max(self) -> int:
        """How many of ``strangers_max`` keep their slots as ``anonymous``; more are served, and stay strangers."""
        return self.strangers_max - min(STRANGERS_RESERVED, self.strangers_max // 2)

    def enter(self, guest: Guest) -> bool:
        """Give a new connection a slot; False when there is none even if others give way."""
        if self.is_open:
            return True
        others = len(self._strangers) + len(self._anonymous)
        if others >= self.strangers_max or others + len(self._known) >= self.slots_max:
            evicted = self._stranger_to_evict()
            if evicted is None and not self._strangers:  # users have taken all slots that anonymous has left
                evicted = self._quietest_anonymous(quiet_ticks=0)
            if evicted is None:
                return False
            self.leave(evicted)
            evicted.abort("all slots are taken, and this connection did not log in")
            evicted.vacate()
        self._strangers[guest] = self.tick
        return True

    def _stranger_to_evict(self) -> Guest | None:
        """The oldest stranger on a protocol with a login that had time to log in, else the oldest one on another protocol, else the oldest.

        Strangers whose login is being verified are not evicted.
        """
        nameless = oldest = None
        for guest, since in islice(self._strangers.items(), CANDIDATES_MAX):
            if self._is_verifying(guest):
                continue
            is_new = self.tick - since < GRACE_TICKS
            if is_new and oldest is not None:
                break  # the rest are new, too
            if guest.wire in NAMELESS_WIRES:
                nameless = nameless or guest
            elif not is_new:
                return guest
            oldest = oldest or guest
        return nameless or oldest

    def _is_verifying(self, guest: Guest) -> bool:
        return self._identities is not None and self._identities.is_verifying(guest.peer)

    def _quietest_anonymous(self, *, quiet_ticks: int) -> Guest | None:
        """The connection of ``anonymous`` that has been quiet longest, and for at least so many seconds. They are sorted once a second."""
        if self._sorted_at != self.tick:
            self._sorted_at = self.tick
            self._quiet = deque(sorted(self._anonymous, key=lambda guest: guest.seen_tick))
        while self._quiet:
            guest = self._quiet[0]
            if guest in self._anonymous and self.tick - guest.seen_tick < quiet_ticks:
                return None
            self._quiet.popleft()
            if guest in self._anonymous:
                return guest
        return None

    def standing(self, guest: Guest) -> Standing:
        """How well a peer that has said something is known."""
        known = self._known.get(guest)
        if known is None:
            return Standing.ANONYMOUS if guest in self._anonymous else Standing.UNKNOWN
        return Standing.ADMINISTRATOR if known[1] else Standing.IDENTIFIED

    def name_of(self, guest: Guest) -> str:
        """The user that a peer is, empty for a stranger."""
        known = self._known.get(guest)
        if known is None:
            return ANONYMOUS if guest in self._anonymous else ""
        return known[0].name

    def leave(self, guest: Guest) -> None:
        """The connection is gone."""
        self._strangers.pop(guest, None)
        self._anonymous.pop(guest, None)
        self._unknow(guest)

    # Who is who

    def identify(self, guest: Guest, principal: Principal | None) -> None:
        """A peer has logged in, as somebody else perhaps, or out. Raises Busy(BUSY) when all slots for such are taken."""
        if self._identities is None or self._identities.is_open:
            return
        known = self._known.get(guest)
        if known is not None and known[0] is principal:
            return
        if known is None and guest not in self._strangers:
            return  # it has left meanwhile, or is served as anonymous already
        if principal is None:
            self._unknow(guest)
            self._strangers.setdefault(guest, self.tick)
            return
        if principal.name == ANONYMOUS and guest.wire in NAMELESS_WIRES:
            self._serve(guest)
            return
        administrator = self._identities.is_administrator(principal)
        users_max = self.slots_max - self.administrators_reserved
        if known is None and not administrator and len(self._known) - self._administrators >= users_max:
            raise Busy(ErrorCode.BUSY, f"too many connections limit={users_max}", retry_after_ms=1_000)
        if known is None or known[0] != principal:
            method = "token" if principal.token is not None else "password or certificate"
            self.audit(AuditEvent("login", Outcome.ALLOWED, principal.name, guest.peer, reason=method))
        self._unknow(guest)
        self._strangers.pop(guest, None)
        self._known[guest] = principal, administrator
        self._by_user.setdefault(principal.user_id, set()).add(guest)
        self._administrators += administrator

    def _serve(self, guest: Guest) -> None:
        """A stranger is served as ``anonymous``. If those have all their slots, one that has been quiet becomes a stranger in its place."""
        if len(self._anonymous) >= self.anonymous_max:
            quiet = self._quietest_anonymous(quiet_ticks=QUIET_TICKS)
            if quiet is None:
                return
            del self._anonymous[quiet]
            self._strangers[quiet] = self.tick
        del self._strangers[guest]
        self._anonymous[guest] = None

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
        for guest, since in list(self._strangers.items()):
            if self.tick - since <= LOGIN_SECONDS_MAX:
                break  # the others came later
            if guest.wire in LOGIN_WIRES and not self._is_verifying(guest):
                guest.abort("the peer did not log in in time")
        expiring = [guest for guest, (principal, _) in self._known.items() if principal.expires_at_us is not None]
        for guest in expiring:
            self._end_if_over(guest)
