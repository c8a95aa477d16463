"""Authenticate by password, token, certificate or SCRAM proof, and end logins.

* An unknown user name gets the same response as a wrong password, after the same time.
* A login that has ended is invalid on every connection, and each of these connections is notified.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final, Protocol

from polywire.broker.authorization import AuditEvent, AuditSink, Authorization, Outcome
from polywire.broker.id_tokens import IdTokens
from polywire.broker.owners import ANONYMOUS
from polywire.broker.passwords import Passwords, origin_of
from polywire.broker.permissions import Action
from polywire.broker.scram import Mechanism, Verifier, no_verifier
from polywire.broker.topics import Streams
from polywire.broker.users import (
    DEFAULT_NAME,
    DEFAULT_PASSWORD,
    LINKS,
    ROOT,
    TABLES,
    Principal,
    Token,
    User,
    digest_of,
    is_password,
)
from polywire.clock import Clock
from polywire.errors import BrokerError, Busy, Denied, ErrorCode
from polywire.log.base import Completion, Loop
from polywire.types import Level

ANONYMOUS_NAME: Final = (
    ANONYMOUS  # the user of clients whose protocol has no authentication, if the operator has configured this user
)
NAME_LOGGED_MAX: Final = 255  # length at which a name sent by a client is cut off in the audit log
# Name under which the secret for salts is stored. With a stored secret, the salts of unknown names are the same after a
# restart and in every process.
SALTS: Final = "scram"
KEY: Final = "key"
KEY_BYTES: Final = 32
# A hash of random bytes that are not stored. It is verified for unknown users, so that response times reveal nothing.
UNKNOWN_USER_HASH: Final = (
    "$argon2id$v=19$m=19456,t=2,p=1$r5Q8OkCwjhaF8jZg/WiMlA$gfy+gp6xGZf2cuwZLv3BPEXD2/9s65PTsU3PA111PhI"
)


class AuthBroker(Protocol):
    """The methods of the broker that authentication calls."""

    @property
    def streams(self) -> Streams:
        """Existing streams."""

    def wire_state(self, wire: str, /) -> Mapping[str, bytes]:
        """Return the values that a protocol has stored, by key. The mapping shows later changes, too."""

    def set_wire_state(
        self, wire: str, key: str, value: bytes | None, *, level: Level, done: Completion[int] | None = None
    ) -> None:
        """Store a value of a protocol under a key. None removes the key. Raises Busy."""


class Authentication(Authorization):
    """The identity of clients. A subclass provides the users."""

    __slots__ = ("_on_end", "_salting")

    audit: AuditSink
    _broker: AuthBroker
    _by_digest: dict[bytes, tuple[int, Token]]
    _by_name: dict[str, User]
    _clock: Clock
    id_tokens: IdTokens | None
    # how often the logins of each user were ended
    _logins: dict[int, int]
    _loop: Loop
    _on_end: Callable[[int], None] | None
    _passwords: Passwords
    # secret for salts, used only if the secret could not be stored
    _salting: bytes
    _users: dict[int, User]

    def close(self) -> None:
        """Stop verifying logins."""
        self._passwords.close()

    # Login

    def anonymous(self) -> Principal:
        """Return the principal of an unauthenticated client.

        Raises Denied(LOGIN_REQUIRED) if users are configured.
        """
        if not self.is_open:
            raise Denied(ErrorCode.LOGIN_REQUIRED, "log in first")
        return ROOT

    def certified(self, name: str) -> Principal | None:
        """Return the principal of the user that a TLS certificate names, or None if no such user is configured."""
        user = None if self.is_open else self._by_name.get(name)
        return None if user is None or not user.configured else self._principal(user)

    def vouched(self, name: str, peer: str = "") -> Principal:
        """Return the principal of a user that another process of this broker has authenticated.

        Raises Denied(LOGIN_REQUIRED) if the user was deleted or deactivated in the meantime.
        """
        user = self._by_name.get(name)
        if user is None and self.is_open and name == DEFAULT_NAME:
            return ROOT
        if user is None or not user.active:
            raise Denied(ErrorCode.LOGIN_REQUIRED, f"the user does not exist any more, or is inactive user={name!r}")
        return self._principal(user, peer)

    def acting(self, sent: Principal) -> Principal:
        """Return the principal for a user that another process of this broker has authenticated.

        Raises the same errors as ``vouched``.
        """
        known = self.vouched(sent.name, sent.peer)
        return known if known is ROOT else replace(known, token=sent.token, expires_at_us=sent.expires_at_us)

    def nameless(self, certified: Principal | None) -> Principal:
        """Return the principal of a client whose protocol has no authentication.

        This is the user of the client's TLS certificate or, without one, the user ``anonymous``. Raises
        Denied(LOGIN_REQUIRED) if neither exists.
        """
        if self.is_open:
            return ROOT
        if certified is not None:
            return certified
        user = self._by_name.get(ANONYMOUS_NAME)
        if user is None or not user.configured:
            raise Denied(
                ErrorCode.LOGIN_REQUIRED,
                "authentication is required, but this protocol has no login (use a TLS client certificate, or configure the user anonymous)",
            )
        return self._principal(user)

    @property
    def has_anonymous(self) -> bool:
        """Return whether there is a user for clients of protocols without authentication."""
        user = self._by_name.get(ANONYMOUS_NAME)
        return self.is_open or (user is not None and user.configured)

    def log_in(self, name: str, password: str, done: Completion[Principal], *, peer: str = "") -> None:
        """Verify a password and call ``done`` later with the principal or an error.

        The error is Denied(LOGIN_FAILED), which does not say what was wrong, or Busy(BUSY) if the queue of logins
        became full and dropped this one. Raises Busy(BUSY) if the queue is full now.

        Args:
            peer: address of the connection. Logins are queued by address.
        """
        user = self._by_name.get(name)
        if user is None and self.is_open and (name, password) == (DEFAULT_NAME, DEFAULT_PASSWORD):
            self._passwords.soon(done, ROOT)
            return
        kept = UNKNOWN_USER_HASH if user is None else user.password_hash
        if not is_password(password):
            kept, password = UNKNOWN_USER_HASH, "-"

        def verified(right: bool | Busy) -> None:
            done(self._verified_principal(name, right, peer, lambda user: user.password_hash == kept))

        if self._passwords.known(kept, password):
            self._passwords.soon(verified, True)
            return
        self._passwords.verify(kept, password, verified, origin=origin_of(peer, name))

    def recall(self, name: str, password: str, *, peer: str = "") -> Principal | None:
        """Return the principal if the same credentials were verified recently.

        If the result is None, use ``log_in``.
        """
        user = self._by_name.get(name)
        if user is None or not user.active or not is_password(password):
            return None
        return self._principal(user, peer) if self._passwords.known(user.password_hash, password) else None

    def log_in_with_token(self, token: str, *, peer: str = "", name: str | None = None) -> Principal:
        """Return the principal of an access token. If a name is given, the token must belong to the user of this name.

        Raises Denied(LOGIN_FAILED) if the token is unknown or expired.
        """
        held = self._by_digest.get(digest_of(token))
        if held is not None:
            user_id, kept = held
            user = self._users[user_id]
            if self._is_alive(kept.expires_at_us) and user.active and name in (None, user.name):
                return replace(self._principal(user, peer), token=kept.digest, expires_at_us=kept.expires_at_us)
        if self.id_tokens is not None and token.count(".") == 2:
            return self._log_in_with_id_token(self.id_tokens, token, peer, name)
        if name is None:  # with a name, the caller may try the secret as a password next
            self._record("login", Outcome.REFUSED, peer=peer, reason="no such token, or it has expired")
        raise Denied(ErrorCode.LOGIN_FAILED, "no such token, or it has expired")

    def _log_in_with_id_token(self, id_tokens: IdTokens, token: str, peer: str, name: str | None) -> Principal:
        """Return the principal for a token of an OpenID Connect provider. The login ends when the token expires."""
        try:
            found, expires_at_us = id_tokens.verify(token)
        except Denied as denied:
            reason, found, expires_at_us = denied.message, "", 0
        else:
            user = self._by_name.get(found)
            if user is not None and user.active and name in (None, found) and self._is_alive(expires_at_us):
                return replace(self._principal(user, peer), expires_at_us=expires_at_us)
            reason = "the token is for no user of the broker, or for another one"
        if name is None:  # see ``log_in_with_token``
            self._record("login", Outcome.REFUSED, user=found, peer=peer, reason=reason)
        raise Denied(ErrorCode.LOGIN_FAILED, "no such token, or it has expired")

    def log_in_with_either(self, name: str, secret: str, done: Completion[Principal], *, peer: str = "") -> None:
        """Log in with a password or an access token. Calls ``done`` with the principal or an error."""
        try:
            found = self.log_in_with_token(secret, peer=peer, name=name)
        except Denied:
            self.log_in(name, secret, done, peer=peer)
        else:
            self._passwords.soon(done, found)

    def is_verifying(self, peer: str) -> bool:
        """Return whether a login from this address is queued or is being verified."""
        return self._passwords.is_verifying(peer)

    def verifier(self, name: str, mechanism: Mechanism) -> Verifier:
        """Return the SCRAM verifier of a user. For an unknown name, return a verifier that no password matches."""
        user = self._by_name.get(name)
        kept = () if user is None else user.verifiers
        found = next((verifier for verifier in kept if verifier.mechanism is mechanism), None)
        return no_verifier(self.salting_secret(), name, mechanism) if found is None else found

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
        """Log in with a SCRAM proof over these messages. Calls ``done`` with the principal or an error.

        Proofs are queued like passwords, which limits how fast an attacker can guess.
        """

        def verified(right: bool | Busy) -> None:
            done(self._verified_principal(name, right, peer, lambda user: verifier in user.verifiers))

        self._passwords.prove(lambda: verifier.admits(messages, proof), verified, origin=origin_of(peer, name))

    def salting_secret(self) -> bytes:
        """Return the secret from which salts for unknown names are computed, and store it if it is new.

        If these salts changed at a restart, a client could distinguish unknown names from users.
        """
        kept = self._broker.wire_state(SALTS).get(KEY, self._salting)
        if not kept:
            self._salting = kept = secrets.token_bytes(KEY_BYTES)
            with suppress(BrokerError):  # the disk is full: use this secret until the broker stops
                self._broker.set_wire_state(SALTS, KEY, kept, level=Level.WRITTEN)
        return kept

    def _verified_principal(
        self, name: str, right: bool | Busy, peer: str, counts: Callable[[User], bool]
    ) -> Principal | BrokerError:
        """Return the principal, or the error of a failed login.

        Args:
            right: whether the credentials were correct.
            counts: returns whether the user still has these credentials.
        """
        if isinstance(right, Busy):
            self._record("login", Outcome.REFUSED, user=name, peer=peer, reason=right.message)
            return right
        user = self._by_name.get(name)  # look up again: the user may have changed while the hash was computed
        if right and user is not None and user.active and counts(user):
            return self._principal(user, peer)
        self._record("login", Outcome.REFUSED, user=name, peer=peer, reason="wrong user or password")
        return Denied(ErrorCode.LOGIN_FAILED, "wrong user or password")

    def _principal(self, user: User, peer: str = "") -> Principal:
        return Principal(user.id, user.name, self._logins.get(user.id, 0), peer=peer)

    # End of logins

    def on_end(self, callback: Callable[[int], None]) -> None:
        """Call ``callback`` on the loop with a user's id whenever logins of this user have ended.

        ``is_current`` returns whether a certain login is still valid.
        """
        self._on_end = callback

    def is_current(self, principal: Principal) -> bool:
        """Return whether a login is valid: the user is active, and its password or token has not changed."""
        if principal is ROOT:
            return self.is_open
        if principal is TABLES or principal is LINKS:
            return True
        user = self._users.get(principal.user_id)
        if user is None or not user.active or principal.login != self._logins.get(user.id, 0):
            return False
        is_revoked = principal.token is not None and principal.token not in self._by_digest
        return not is_revoked and self._is_alive(principal.expires_at_us)

    def is_administrator(self, principal: Principal) -> bool:
        """Return whether a principal may manage the server."""
        return self.permits(principal, Action.CLUSTER_ALTER)

    def renewed(self, principal: Principal) -> Principal:
        """Return the new principal for the connection on which a user changed its own password or name.

        All other logins of the user have ended.
        """
        user = self._users.get(principal.user_id)
        return principal if user is None else self._principal(user, principal.peer)

    def _end_logins(self, user_id: int) -> None:
        self._logins[user_id] = self._logins.get(user_id, 0) + 1

    def _notify_end(self, user_id: int) -> None:
        """Notify the connections of a user in the loop's next pass.

        The delay lets the connection that made the change receive its response before it is closed.
        """
        if self._on_end is not None:
            self._loop.call_soon(self._on_end, user_id)

    # Audit

    def _record(
        self, action: str, outcome: Outcome, *, user: str = "", peer: str = "", resource: str = "", reason: str = ""
    ) -> None:
        self.audit(AuditEvent(action, outcome, user[:NAME_LOGGED_MAX], peer, resource, reason))

    def _is_alive(self, expires_at_us: int | None) -> bool:
        return expires_at_us is None or expires_at_us > self._clock.now_us()
