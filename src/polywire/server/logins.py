"""The logins of a server's connections: time limits, reserved connection slots, and ended logins.

A *stranger* is a connection that has not logged in and is not served as the user ``anonymous``.

* Some slots are reserved for users, so strangers cannot take all of them. Some of the reserved slots are only for
  administrators.
* When all slots are taken, a new connection replaces the oldest stranger. Strangers on protocols that have a login are
  closed first.
* A connection that is served as ``anonymous`` is closed in favour of a new one only if there is no stranger.
* A connection that has logged in is never closed in favour of another. It is closed when its login ends.

A broker without users has no logins, so these rules do not apply to it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from polywire.broker.authorization import AuditEvent, AuditSink, Outcome, discard
from polywire.broker.owners import ANONYMOUS
from polywire.errors import Busy, ErrorCode

if TYPE_CHECKING:
    from polywire.broker.access import Principal

LOGIN_WIRES: Final = frozenset({"cursus", "iggy", "kafka", "polywire"})  # protocols with a login
NAMELESS_WIRES: Final = frozenset(
    {"flux", "kafka07"}
)  # protocols without a login; their clients are served as ``anonymous``
# seconds for a client to log in; checking a password takes 40 ms, and a slow network a second or two
LOGIN_SECONDS_MAX: Final = 10
USERS_RESERVED: Final = 1_024  # slots for users who have logged in; with few slots, a quarter of them
ADMINISTRATORS_RESERVED: Final = 16  # slots for users who can manage the server; with few slots, an eighth of them
STRANGERS_RESERVED: Final = 256  # slots for logins that ``anonymous`` cannot take; with few slots, half of them
# seconds without a byte after which an ``anonymous`` connection can lose its permanent slot and become a stranger
QUIET_TICKS: Final = 10
GRACE_TICKS: Final = 2  # seconds for a new connection to begin its login, during which it is not closed
# strangers to check when one must be closed; twice as many as logins that can wait to be verified
CANDIDATES_MAX: Final = 512


class Standing(IntEnum):
    """How well a client is identified.

    When connections or memory are short, connections with a lower standing are closed first.
    """

    SILENT = 0
    UNKNOWN = 1
    ANONYMOUS = 2
    IDENTIFIED = 3
    ADMINISTRATOR = 4


class Identities(Protocol):
    """The users of the broker."""

    @property
    def is_open(self) -> bool: ...

    def is_current(self, principal: Principal, /) -> bool: ...

    def is_administrator(self, principal: Principal, /) -> bool:
        """Return whether the user may manage the server."""

    def is_verifying(self, peer: str, /) -> bool:
        """Return whether a login from this address is being verified or is in the queue."""

    def certified(self, name: str, /) -> Principal | None:
        """Return the user with the common name of a TLS certificate; None if there is none."""


class LoginHolder(Protocol):
    """The methods of a connection that ``Logins`` uses."""

    @property
    def peer(self) -> str: ...

    @property
    def wire(self) -> str:
        """Name of the connection's protocol; empty until it is detected."""

    @property
    def seen_tick(self) -> int:
        """The second in which the client last sent something, as counted by ``Hub.tick``."""

    def abort(self, reason: str) -> None: ...

    def free_slot(self) -> None: ...

    def end(self, reason: str) -> None: ...


class Logins:
    """Limits the connections of users and of clients that are not logged in.

    Each connection is in exactly one of ``_strangers`` (not logged in), ``_anonymous`` and ``_known``.
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
        """``identities`` is None if there is no authentication."""
        self._identities: Final = identities
        self._strangers: dict[LoginHolder, int] = {}  # with the tick at which each became a stranger, oldest first
        self._anonymous: dict[LoginHolder, None] = {}
        # ``_anonymous`` at the tick ``_sorted_at``; the one that was quiet for longest is first
        self._quiet: deque[LoginHolder] = deque()
        self._sorted_at = -1
        # connections that have logged in: the user, and whether it is an administrator
        self._known: dict[LoginHolder, tuple[Principal, bool]] = {}
        self._by_user: dict[int, set[LoginHolder]] = {}
        self._administrators = 0  # number of connections of administrators
        self.audit: AuditSink = discard
        self.slots_max = slots_max
        self.tick = 0

    @property
    def is_open(self) -> bool:
        return self._identities is None or self._identities.is_open

    # Slots

    @property
    def administrators_reserved(self) -> int:
        """Number of connections that only administrators can use."""
        return min(ADMINISTRATORS_RESERVED, self.slots_max // 8)

    @property
    def strangers_max(self) -> int:
        """Maximum number of connections that are not logged in, or logged in as ``anonymous``."""
        return self.slots_max - self.administrators_reserved - min(USERS_RESERVED, self.slots_max // 4)

    @property
    def anonymous_max(self) -> int:
        """Maximum number of connections that count as logged in as ``anonymous``.

        Further connections are served as ``anonymous`` but count as not logged in, so they are closed first.
        """
        return self.strangers_max - min(STRANGERS_RESERVED, self.strangers_max // 2)

    def enter(self, connection: LoginHolder) -> bool:
        """Register a new connection, and close another one if necessary. Return False if none may be closed."""
        if self.is_open:
            return True
        others = len(self._strangers) + len(self._anonymous)
        if others >= self.strangers_max or others + len(self._known) >= self.slots_max:
            evicted = self._stranger_to_evict()
            if evicted is None and not self._strangers:  # users and anonymous connections occupy all slots
                evicted = self._quietest_anonymous(quiet_ticks=0)
            if evicted is None:
                return False
            self.leave(evicted)
            evicted.abort("all slots are taken, and this connection did not log in")
            evicted.free_slot()
        self._strangers[connection] = self.tick
        return True

    def _stranger_to_evict(self) -> LoginHolder | None:
        """Return the connection without a login to close for a new connection; None if there is no suitable one.

        Candidates, in this order: the oldest that had time to log in, the oldest on a protocol without a login, and the
        oldest. A connection whose login is being verified is not closed.
        """
        nameless = oldest = None
        for connection, since in islice(self._strangers.items(), CANDIDATES_MAX):
            if self._is_verifying(connection):
                continue
            is_new = self.tick - since < GRACE_TICKS
            if is_new and oldest is not None:
                break  # all later strangers are new, too
            if connection.wire in NAMELESS_WIRES:
                nameless = nameless or connection
            elif not is_new:
                return connection
            oldest = oldest or connection
        return nameless or oldest

    def _is_verifying(self, connection: LoginHolder) -> bool:
        return self._identities is not None and self._identities.is_verifying(connection.peer)

    def _quietest_anonymous(self, *, quiet_ticks: int) -> LoginHolder | None:
        """Return the ``anonymous`` connection that has been quiet longest; None if none may be closed.

        It must have been quiet for at least ``quiet_ticks`` seconds. Connections are sorted only once a second.
        """
        if self._sorted_at != self.tick:
            self._sorted_at = self.tick
            self._quiet = deque(sorted(self._anonymous, key=lambda connection: connection.seen_tick))
        while self._quiet:
            connection = self._quiet[0]
            if connection in self._anonymous and self.tick - connection.seen_tick < quiet_ticks:
                return None
            self._quiet.popleft()
            if connection in self._anonymous:
                return connection
        return None

    def standing(self, connection: LoginHolder) -> Standing:
        known = self._known.get(connection)
        if known is None:
            return Standing.ANONYMOUS if connection in self._anonymous else Standing.UNKNOWN
        return Standing.ADMINISTRATOR if known[1] else Standing.IDENTIFIED

    def name_of(self, connection: LoginHolder) -> str:
        known = self._known.get(connection)
        if known is None:
            return ANONYMOUS if connection in self._anonymous else ""
        return known[0].name

    def leave(self, connection: LoginHolder) -> None:
        self._strangers.pop(connection, None)
        self._anonymous.pop(connection, None)
        self._forget_login(connection)

    # Logins and logouts

    def identify(self, connection: LoginHolder, principal: Principal | None) -> None:
        """Record a login, or a logout if ``principal`` is None.

        A client can log in as another user without a logout. Raises Busy(BUSY) if users have too many connections.
        """
        if self._identities is None or self._identities.is_open:
            return
        known = self._known.get(connection)
        if known is not None and known[0] is principal:
            return
        if known is None and connection not in self._strangers:
            return  # the connection has closed in the meantime, or is already served as anonymous
        if principal is None:
            self._forget_login(connection)
            self._strangers.setdefault(connection, self.tick)
            return
        if principal.name == ANONYMOUS and connection.wire in NAMELESS_WIRES:
            self._serve(connection)
            return
        administrator = self._identities.is_administrator(principal)
        users_max = self.slots_max - self.administrators_reserved
        if known is None and not administrator and len(self._known) - self._administrators >= users_max:
            raise Busy(ErrorCode.BUSY, f"too many connections limit={users_max}", retry_after_ms=1_000)
        if known is None or known[0] != principal:
            method = "token" if principal.token is not None else "password or certificate"
            self.audit(AuditEvent("login", Outcome.ALLOWED, principal.name, connection.peer, reason=method))
        self._forget_login(connection)
        self._strangers.pop(connection, None)
        self._known[connection] = principal, administrator
        self._by_user.setdefault(principal.user_id, set()).add(connection)
        self._administrators += administrator

    def _serve(self, connection: LoginHolder) -> None:
        """Serve a connection without a login as ``anonymous``.

        If there are too many ``anonymous`` connections, a quiet one counts as not logged in again.
        """
        if len(self._anonymous) >= self.anonymous_max:
            quiet = self._quietest_anonymous(quiet_ticks=QUIET_TICKS)
            if quiet is None:
                return
            del self._anonymous[quiet]
            self._strangers[quiet] = self.tick
        del self._strangers[connection]
        self._anonymous[connection] = None

    def certify(self, connection: LoginHolder, name: str) -> Principal | None:
        """Log in the user that a TLS certificate names, and return it; None if there is no such user.

        Raises Busy(BUSY) if users have too many connections.
        """
        principal = None if self._identities is None else self._identities.certified(name)
        if principal is not None:
            principal = replace(principal, peer=connection.peer)
            self.identify(connection, principal)
        return principal

    def _forget_login(self, connection: LoginHolder) -> None:
        known = self._known.pop(connection, None)
        if known is None:
            return
        principal, administrator = known
        self._administrators -= administrator
        guests = self._by_user[principal.user_id]
        guests.discard(connection)
        if not guests:
            del self._by_user[principal.user_id]

    # Logins that end

    def end(self, user_id: int) -> None:
        """Close all connections of a user whose logins are no longer valid."""
        for connection in list(self._by_user.get(user_id, ())):
            self._end_if_over(connection)

    def _end_if_over(self, connection: LoginHolder) -> None:
        assert self._identities is not None, "the client has logged in"
        if not self._identities.is_current(self._known[connection][0]):
            connection.end("the login is no longer valid: its user, password or token was changed or deleted")

    def sweep(self) -> None:
        """Close connections that did not log in in time, and those with an expired token. Call it once a second."""
        self.tick += 1
        if self.is_open:
            return
        for connection, since in list(self._strangers.items()):
            if self.tick - since <= LOGIN_SECONDS_MAX:
                break  # all later strangers are newer
            if connection.wire in LOGIN_WIRES and not self._is_verifying(connection):
                connection.abort("the client did not log in in time")
        expiring = [
            connection for connection, (principal, _) in self._known.items() if principal.expires_at_us is not None
        ]
        for connection in expiring:
            self._end_if_over(connection)
