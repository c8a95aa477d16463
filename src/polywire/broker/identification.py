"""Who somebody is: logins by password, token, certificate and proof, and when they end.

Promises: a wrong name costs what a wrong password costs, and is answered the same; a login that is over is nobody's, whatever connection
still holds it, and who keeps the connections is notified. Must not know: wires, sockets, how users are changed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final, Protocol

from polywire.broker.actions import Action
from polywire.broker.audit import AuditEvent, AuditSink, Outcome
from polywire.broker.authorization import Authorization, KnownStreams
from polywire.broker.login_queue import origin_of
from polywire.broker.owners import ANONYMOUS
from polywire.broker.passwords import Passwords
from polywire.broker.scram import Mechanism, Verifier, no_verifier
from polywire.broker.users import DEFAULT_NAME, DEFAULT_PASSWORD, ROOT, Principal, Token, User, digest_of, is_password
from polywire.clock import Clock
from polywire.errors import BrokerError, Busy, Denied, ErrorCode
from polywire.log.base import Completion, Loop
from polywire.types import Level

ANONYMOUS_NAME: Final = (
    ANONYMOUS  # whom peers of wires without a login are taken for, where the operator has configured it
)
NAME_LOGGED_MAX: Final = 255  # of a name that somebody made up, in the audit log
KEPT_AS: Final = "scram"  # what names without a verifier are answered with, the same after each start
KEY: Final = "key"
KEY_BYTES: Final = 32
# Verified when there is no such user, so that the time an answer takes gives nothing away: a hash of random bytes that nobody kept.
NOBODYS_HASH: Final = (
    "$argon2id$v=19$m=19456,t=2,p=1$r5Q8OkCwjhaF8jZg/WiMlA$gfy+gp6xGZf2cuwZLv3BPEXD2/9s65PTsU3PA111PhI"
)


class Host(Protocol):
    """What users ask of the broker."""

    @property
    def streams(self) -> KnownStreams:
        """Which streams there are."""

    def wire_state(self, wire: str, /) -> Mapping[str, bytes]:
        """A live view of what is kept under this name."""

    def set_wire_state(
        self, wire: str, key: str, value: bytes | None, *, level: Level, done: Completion[int] | None = None
    ) -> None:
        """Keep a value, None removes it. Raises Busy."""


class Identification(Authorization):
    """Who the peers of this broker are; which users there are is a subclass's.

    Invariant: ``_logins`` counts how often the logins of a user were ended. ``_salting``: the secret that could not be kept, or nothing.
    """

    __slots__ = ("_on_end", "_salting")

    audit: AuditSink
    _broker: Host
    _by_digest: dict[bytes, tuple[int, Token]]
    _by_name: dict[str, User]
    _clock: Clock
    _logins: dict[int, int]
    _loop: Loop
    _on_end: Callable[[int], None] | None
    _passwords: Passwords
    _salting: bytes
    _users: dict[int, User]

    def close(self) -> None:
        """Verify nothing more."""
        self._passwords.close()

    # Logging in

    def anonymous(self) -> Principal:
        """Who somebody is without a login. Raises Denied(LOGIN_REQUIRED) unless the broker is open."""
        if not self.is_open:
            raise Denied(ErrorCode.LOGIN_REQUIRED, "log in first")
        return ROOT

    def certified(self, name: str) -> Principal | None:
        """Which configured user a peer is whose TLS certificate was issued to this name. On an open broker a certificate is nobody."""
        user = None if self.is_open else self._by_name.get(name)
        return None if user is None or not user.configured else self._principal(user)

    def nameless(self, certified: Principal | None) -> Principal:
        """Who a peer of a wire without a login is: by its TLS certificate, without one the configured user ``anonymous``.

        Raises Denied(LOGIN_REQUIRED) when there is none.
        """
        if self.is_open:
            return ROOT
        if certified is not None:
            return certified
        user = self._by_name.get(ANONYMOUS_NAME)
        if user is None or not user.configured:
            raise Denied(ErrorCode.LOGIN_REQUIRED, "this broker has users, and this wire has no login")
        return self._principal(user)

    @property
    def has_anonymous(self) -> bool:
        """Whether peers of wires without a login are somebody."""
        user = self._by_name.get(ANONYMOUS_NAME)
        return self.is_open or (user is not None and user.configured)

    def log_in(self, name: str, password: str, done: Completion[Principal], *, peer: str = "") -> None:
        """Call ``done``, later, with who this is, or Denied(LOGIN_FAILED) without saying which of the two was wrong, or Busy(BUSY)
        when others had to go first. ``peer``: address of the connection, by which logins queue.

        Raises Busy(BUSY) when too many logins wait to be verified.
        """
        user = self._by_name.get(name)
        if user is None and self.is_open and (name, password) == (DEFAULT_NAME, DEFAULT_PASSWORD):
            self._passwords.soon(done, ROOT)
            return
        kept = NOBODYS_HASH if user is None else user.password_hash
        if not is_password(password):
            kept, password = NOBODYS_HASH, "-"

        def verified(right: bool | Busy) -> None:
            done(self._let_in(name, right, peer, lambda user: user.password_hash == kept))

        if self._passwords.known(kept, password):
            self._passwords.soon(verified, True)
            return
        self._passwords.verify(kept, password, verified, origin=origin_of(peer, name))

    def recall(self, name: str, password: str, *, peer: str = "") -> Principal | None:
        """Who this is when the same words were verified a short time ago; None proves nothing, ``log_in`` does."""
        user = self._by_name.get(name)
        if user is None or not user.active or not is_password(password):
            return None
        return self._principal(user, peer) if self._passwords.known(user.password_hash, password) else None

    def log_in_with_token(self, token: str, *, peer: str = "", name: str | None = None) -> Principal:
        """Who holds this token, of this name if one is given. Raises Denied(LOGIN_FAILED), also when it has expired."""
        held = self._by_digest.get(digest_of(token))
        if held is not None:
            user_id, kept = held
            user = self._users[user_id]
            if self._is_alive(kept.expires_at_us) and user.active and name in (None, user.name):
                return replace(self._principal(user, peer), token=kept.digest, expires_at_us=kept.expires_at_us)
        if name is None:  # with a name it may be a password
            self._record("login", Outcome.REFUSED, peer=peer, reason="no such token, or it has expired")
        raise Denied(ErrorCode.LOGIN_FAILED, "no such token, or it has expired")

    def log_in_with_either(self, name: str, secret: str, done: Completion[Principal], *, peer: str = "") -> None:
        """As ``log_in``; an access token of the user may stand for its password."""
        try:
            found = self.log_in_with_token(secret, peer=peer, name=name)
        except Denied:
            self.log_in(name, secret, done, peer=peer)
        else:
            self._passwords.soon(done, found)

    def is_verifying(self, peer: str) -> bool:
        """Whether a login that came over the connection of this address is being verified, or waits to be."""
        return self._passwords.is_verifying(peer)

    def verifier(self, name: str, mechanism: Mechanism) -> Verifier:
        """What who gives this name has to prove its password by; one that nobody's fits where there is none."""
        user = self._by_name.get(name)
        kept = () if user is None else user.verifiers
        found = next((verifier for verifier in kept if verifier.mechanism is mechanism), None)
        return no_verifier(self._secret(), name, mechanism) if found is None else found

    def log_in_with_proof(
        self,
        name: str,
        verifier: Verifier,
        messages: bytes,
        proof: bytes,
        done: Completion[Principal],
        *,
        peer: str = "",
    ) -> None:
        """As ``log_in``, by what proves the password after these messages; takes its turn as a password does, though it takes no time."""

        def verified(right: bool | Busy) -> None:
            done(self._let_in(name, right, peer, lambda user: verifier in user.verifiers))

        self._passwords.prove(lambda: verifier.admits(messages, proof), verified, origin=origin_of(peer, name))

    def _secret(self) -> bytes:
        """What the salts of names without a verifier are made from; kept, so that they stay the same as those of others do."""
        kept = self._broker.wire_state(KEPT_AS).get(KEY, self._salting)
        if not kept:
            self._salting = kept = secrets.token_bytes(KEY_BYTES)
            with suppress(BrokerError):  # the disk is full: it is as good for as long as the broker runs
                self._broker.set_wire_state(KEPT_AS, KEY, kept, level=Level.WRITTEN)
        return kept

    def _let_in(
        self, name: str, right: bool | Busy, peer: str, counts: Callable[[User], bool]
    ) -> Principal | BrokerError:
        """Who it is whose words were right. counts: whether what they were held against is still the user's."""
        if isinstance(right, Busy):
            self._record("login", Outcome.REFUSED, user=name, peer=peer, reason=right.message)
            return right
        user = self._by_name.get(name)  # once more: it may have changed while the hash was made
        if right and user is not None and user.active and counts(user):
            return self._principal(user, peer)
        self._record("login", Outcome.REFUSED, user=name, peer=peer, reason="wrong user or password")
        return Denied(ErrorCode.LOGIN_FAILED, "wrong user or password")

    def _principal(self, user: User, peer: str = "") -> Principal:
        return Principal(user.id, user.name, self._logins.get(user.id, 0), peer=peer)

    # Logins that end

    def on_end(self, callback: Callable[[int], None]) -> None:
        """Call back, on the loop, with the id of a user of whom some logins do not count any more: ask ``is_current``."""
        self._on_end = callback

    def is_current(self, principal: Principal) -> bool:
        """Whether a login still counts: its user is there and active, its password was not replaced since, its token not ended."""
        if principal is ROOT:
            return self.is_open
        user = self._users.get(principal.user_id)
        if user is None or not user.active or principal.login != self._logins.get(user.id, 0):
            return False
        return principal.token is None or (
            principal.token in self._by_digest and self._is_alive(principal.expires_at_us)
        )

    def is_administrator(self, principal: Principal) -> bool:
        """Whether somebody may manage the server: connections are kept for such."""
        return self.permits(principal, Action.CLUSTER_ALTER)

    def renewed(self, principal: Principal) -> Principal:
        """Who this is after it has itself replaced its password or name, which ends all its other logins."""
        user = self._users.get(principal.user_id)
        return principal if user is None else self._principal(user, principal.peer)

    def _end_logins(self, user_id: int) -> None:
        self._logins[user_id] = self._logins.get(user_id, 0) + 1

    def _notify_end(self, user_id: int) -> None:
        """Notify so late that what was answered has been written: the connection that asked for it may be one of them."""
        if self._on_end is not None:
            self._loop.call_soon(self._on_end, user_id)

    # What an auditor sees

    def _record(
        self, action: str, outcome: Outcome, *, user: str = "", peer: str = "", resource: str = "", reason: str = ""
    ) -> None:
        self.audit(AuditEvent(action, outcome, user[:NAME_LOGGED_MAX], peer, resource, reason))

    def _is_alive(self, expires_at_us: int | None) -> bool:
        return expires_at_us is None or expires_at_us > self._clock.now_us()
