"""Users, tokens and permissions, for all protocols with authentication.

* Changes of users are written to the journal, so they survive restarts.
* Passwords are stored as Argon2id hashes and tokens as digests. A user has SCRAM verifiers only if they were set
  explicitly.
* User ids are never reused.
* A change of permissions applies to the next request of every logged-in connection.
* A change may end a login, for example by deleting the user. Connections that use this login are then notified.
* A user can grant or revoke only permissions that it has itself.

A broker without configured users requires no login. It also accepts the default login of an Iggy server.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeVar

import msgspec

from polywire.broker.authentication import ANONYMOUS_NAME, SALTS, UNKNOWN_USER_HASH, AuthBroker, Authentication
from polywire.broker.authorization import AuditSink, Outcome, Where, discard, resource_text
from polywire.broker.client_quotas import (
    QUOTAS_MAX,
    ClientQuotas,
    Entity,
    Quota,
    check_entity,
    decode_quota,
    encode_quota,
    entity_text,
    key_of,
)
from polywire.broker.client_quotas import STORED_AS as QUOTAS
from polywire.broker.id_tokens import IdTokens
from polywire.broker.passwords import Origin, Passwords
from polywire.broker.permissions import ADMINISTRATION, EVERYTHING, Action, Grants
from polywire.broker.scram import Mechanism, Verifier
from polywire.broker.settings import BrokerSettings, check_name
from polywire.broker.users import (
    DEFAULT_NAME,
    DEFAULT_PASSWORD,
    ROOT,
    ROOT_ID,
    ConfiguredUser,
    Principal,
    Token,
    User,
    check_changeable,
    check_password_given,
    decode_user,
    digest_of,
    encode_user,
    is_password,
)
from polywire.choices import missing
from polywire.clock import Clock
from polywire.errors import BrokerError, Busy, Conflict, Denied, ErrorCode, Invalid, Missing
from polywire.log.base import Completion, Loop
from polywire.types import Level

__all__ = [
    "ANONYMOUS_NAME",
    "DEFAULT_NAME",
    "DEFAULT_PASSWORD",
    "ROOT",
    "ROOT_ID",
    "Access",
    "ConfiguredUser",
    "Principal",
    "User",
    "Where",
]

KEPT_AS: Final = "access"  # users are stored like the state of a protocol of this name, one value per user
NEXT_ID_KEY: Final = "next_id"  # stored with the users, so that a restart does not reuse ids
REPLICATED: Final = (KEPT_AS, SALTS, QUOTAS)  # state that the first process of a broker copies to its other processes
TOKEN_BYTES: Final = 32
_Stored = TypeVar("_Stored")


def new_token() -> str:
    """Return a random access token."""
    return secrets.token_hex(TOKEN_BYTES)


class Access(Authentication):
    """All users of this broker.

    In a broker with several processes, the first process makes all changes (``routing.users``). The other processes
    apply them with ``replicate``.
    """

    __slots__ = (
        "_broker",
        "_by_digest",
        "_by_name",
        "_changing",
        "_clock",
        "_has_file",
        "_logins",
        "_loop",
        "_next_id",
        "_passwords",
        "_rights",
        "_settings",
        "_streams",
        "_users",
        "audit",
        "id_tokens",
        "is_open",
        "quotas",
    )

    def __init__(self, broker: AuthBroker, settings: BrokerSettings, loop: Loop, clock: Clock) -> None:
        self._broker = broker
        self._streams = broker.streams
        self._settings = settings
        self._clock = clock
        self._loop = loop
        self._on_end: Callable[[int], None] | None = None
        self._logins: dict[int, int] = {}
        self._passwords = Passwords(
            loop, clock, waiting_max=settings.logins_waiting_max, cached_max=settings.logins_cached_max
        )
        self._users: dict[int, User] = {}
        self._by_name: dict[str, User] = {}
        # (user's id, token) by digest of the token
        self._by_digest: dict[bytes, tuple[int, Token]] = {}
        # decoded grants by user id, expanded with all included permissions
        self._rights: dict[int, Grants] = {}
        self._salting = b""
        # users with a change in progress: their connections are notified when it has ended (``begin_change``)
        self._changing: Counter[int] = Counter()
        self._has_file = False
        self.audit: AuditSink = discard
        self.id_tokens: IdTokens | None = None
        self.is_open = True
        # above every id ever used
        self._next_id = ROOT_ID + 1
        self.quotas: Final = ClientQuotas(settings.quotas, clock)
        for value in broker.wire_state(QUOTAS).values():
            quota = decode_quota(value)
            self.quotas.put(quota.entity, quota)
        for key, value in broker.wire_state(KEPT_AS).items():
            if key == NEXT_ID_KEY:
                self._next_id = int.from_bytes(value, "big")
            else:
                self._put(decode_user(value))
        self._next_id = max(
            self._next_id, max(self._users, default=ROOT_ID) + 1
        )  # for directories written by releases that did not store the next id

    # Audit

    def _administered(self, action: str, by: Principal | None, resource: str, reason: str = "") -> None:
        """Audit a change of users or permissions. The operator made the change if ``by`` is None."""
        user, peer = ("", "") if by is None else (by.name, by.peer)
        self._record(action, Outcome.ALLOWED, user=user, peer=peer, resource=resource, reason=reason)

    def _refused(self, action: str, by: Principal, where: str, message: str) -> Denied:
        self.audit_refusal(by, action, where, message)
        return Denied(ErrorCode.DENIED, message)

    def audit_refusal(self, principal: Principal, action: str, resource: str, reason: str) -> None:
        self._record(
            action, Outcome.REFUSED, user=principal.name, peer=principal.peer, resource=resource, reason=reason
        )

    # Permissions

    def authorize(self, principal: Principal | None, action: Action, where: Where = None) -> None:
        """Raise Denied unless the user may perform an action.

        Audits administrative actions.
        """
        if not self.permits(principal, action, where):
            raise self.refusal(principal, action, where)
        if action in ADMINISTRATION:
            self.administers(principal, action, where)

    def administers(self, principal: Principal | None, action: Action, where: Where = None) -> None:
        """Audit an administrative action that was permitted. On a broker without users the event names no user."""
        if principal is not None and not self.is_open:
            self._administered(action.word, principal, resource_text(where))

    def refusal(self, principal: Principal | None, action: Action, where: Where = None) -> Denied:
        """Audit a refusal and return the error."""
        denied = super().refusal(principal, action, where)
        if principal is not None:
            self.audit_refusal(principal, action.word, resource_text(where), denied.message)
        return denied

    def _rights_of(self, principal: Principal) -> Grants | None:
        return self._rights.get(principal.user_id) if self.is_current(principal) else None

    def _check_covers(self, by: Principal | None, grants: Grants | None) -> None:
        if by is None or grants is None or (by is ROOT and self.is_open):
            return
        rights = self._rights_of(by)
        if rights is None or not rights.cover(grants.opened()):
            message = f"not allowed: this needs permissions that you do not have yourself (ask an administrator) user={by.name!r}"
            raise self._refused("manage_users", by, "", message)

    def _check_over(self, by: Principal | None, user: User) -> None:
        check_changeable(user)
        if by is None or by.user_id != user.id:
            self._check_covers(by, user.grants)

    # Users

    def users(self) -> list[User]:
        """Return all users by id. On a broker without configured users the default user comes first."""
        users = [self._users[user_id] for user_id in sorted(self._users)]
        return [self._default(), *users] if self.is_open else users

    def sees_files(self, *, on_loopback: bool) -> bool:
        """Return whether a client may see paths of the broker's files.

        If users are configured, only clients on the broker's machine may see them.
        """
        return self.is_open or on_loopback

    def find_user(self, who: int | str) -> User | None:
        """Return the user with this id or name, or None."""
        if self.is_open and who in (ROOT_ID, DEFAULT_NAME) and DEFAULT_NAME not in self._by_name:
            return self._default()
        return self._users.get(who) if isinstance(who, int) else self._by_name.get(who)

    def name_of(self, owner: int) -> str:
        """Return the name of the user with this id, for lists of owned objects.

        Return ``#id`` if the user was deleted, and an empty string if ``owner`` is not the id of a user.
        """
        if owner <= 0:
            return ""
        user = self._users.get(owner)
        return f"#{owner}" if user is None else user.name

    def user(self, who: int | str) -> User:
        """Return the user with this id or name. Raises Missing(USER_MISSING) if there is none."""
        user = self.find_user(who)
        if user is None:
            raise Missing(ErrorCode.USER_MISSING, f"no such user user={who!r}")
        return user

    def create_user(
        self,
        name: str,
        password: str,
        grants: Grants | None,
        *,
        active: bool = True,
        by: Principal | None = None,
        done: Completion[User],
    ) -> None:
        """Create a user. ``done`` is called with the user once it is synced.

        Raises Invalid(INVALID_NAME, INVALID_REQUEST), Conflict(USER_EXISTS), Busy(BUSY), and Denied(DENIED) if the
        grants include permissions that ``by`` does not have.

        Args:
            by: the caller. None for the operator or on a broker without users.
        """
        self._check_covers(by, grants)
        self._check_new(name)
        check_password_given(password)

        def hashed(password_hash: str | Busy) -> None:
            if isinstance(password_hash, Busy):
                done(password_hash)
                return
            try:
                # check again: the permissions of the caller may have changed while the hash was computed
                self._check_covers(by, grants)
                self._check_new(name)
                self._store_user(User(self._new_id(), name, password_hash, self._clock.now_us(), grants, active), done)
                self._administered("user.create", by, name)
            except BrokerError as error:
                done(error)

        self._passwords.hash(password, hashed)

    def update_user(
        self,
        user: User,
        *,
        name: str | None = None,
        active: bool | None = None,
        by: Principal | None = None,
        done: Completion[User] | None = None,
    ) -> None:
        """Rename, activate or deactivate a user. Renaming and deactivating end the user's logins.

        Raises the same errors as ``create_user``, and Denied(DENIED) for a configured user.
        """
        self._check_over(by, user)
        if name is not None and name != user.name:
            self._check_new(name)
        changed = msgspec.structs.replace(
            user, name=user.name if name is None else name, active=user.active if active is None else active
        )
        if changed.name != user.name:
            self._move_quotas(user.name, changed.name)
        self._store_user(changed, done, ends=changed.name != user.name or not changed.active)
        facts = f"name={changed.name!r} active={changed.active}"
        self._administered("user.alter", by, user.name, facts)

    def grant(
        self, user: User, grants: Grants | None, *, by: Principal | None = None, done: Completion[User] | None = None
    ) -> None:
        """Replace a user's grants.

        Raises Denied(DENIED) for a configured user, or if ``by`` lacks one of the old or new permissions.
        """
        self._check_over(by, user)
        self._check_covers(by, grants)
        self._store_user(msgspec.structs.replace(user, grants=grants), done)
        self._administered("user.grant", by, user.name)

    def change_password(
        self, user: User, old: str, new: str, *, by: Principal | None = None, done: Completion[User]
    ) -> None:
        """Replace a password. This ends the user's logins and deletes its tokens.

        If the old password is wrong, ``done`` is called with Denied(LOGIN_FAILED). Raises Denied(DENIED) for a
        configured user, Invalid(INVALID_REQUEST), Busy(BUSY).
        """
        self._check_over(by, user)
        check_password_given(new)
        peer = "" if by is None else by.peer

        def verified(right: bool | Busy) -> None:
            if right is not True:
                wrong = Denied(ErrorCode.LOGIN_FAILED, "the old password is wrong")
                self._record("user.password", Outcome.REFUSED, user=user.name, peer=peer, reason=wrong.message)
                done(right if isinstance(right, Busy) else wrong)
                return
            try:
                self._replace_password(user, new, by, done)
            except BrokerError as error:
                done(error)

        # limits the rate of guesses: someone who hijacked a connection could guess the password here
        origin = Origin(name=user.name)
        self._passwords.verify(user.password_hash, old if is_password(old) else "-", verified, origin=origin)

    def reset_password(self, user: User, new: str, *, by: Principal | None = None, done: Completion[User]) -> None:
        """Replace another user's password without the old one. This ends the user's logins and deletes its tokens.

        Raises the same errors as ``change_password``. Also raises Denied(DENIED) for the caller's own password, so that
        someone who hijacked a connection cannot take over the account.
        """
        if by is not None and by.user_id == user.id:
            raise self._refused("user.password", by, user.name, "changing your own password needs the old password")
        self._check_over(by, user)
        check_password_given(new)
        self._replace_password(user, new, by, done)

    def _replace_password(self, user: User, new: str, by: Principal | None, done: Completion[User]) -> None:
        """Hash a password in the thread and store the hash.

        Raises Busy(BUSY) if too many logins wait for the thread.
        """

        def hashed(password_hash: str | Busy) -> None:
            if isinstance(password_hash, Busy):
                done(password_hash)
                return
            now = self._users.get(user.id)
            if now is None or now.password_hash != user.password_hash:
                done(Denied(ErrorCode.LOGIN_FAILED, "another request changed the user (retry)"))
                return
            try:
                self._check_over(by, now)
                self._store_user(
                    msgspec.structs.replace(now, password_hash=password_hash, tokens=(), verifiers=()), done, ends=True
                )
                self._administered("user.password", by, now.name)
            except BrokerError as error:
                done(error)

        self._passwords.hash(new, hashed)

    def set_verifiers(
        self,
        name: str,
        verifiers: Mapping[Mechanism, Verifier | None],
        *,
        by: Principal | None = None,
        done: Completion[User] | None = None,
    ) -> None:
        """Replace a user's SCRAM verifiers and end the user's logins. A value of None removes that verifier.

        If no user has this name, a user without a password and without permissions is created. Removing the last
        verifier deletes such a user.

        Raises Missing(USER_MISSING) if there is nothing to remove, Invalid(INVALID_NAME), Busy(BUSY, DISK_FULL), and
        Denied(DENIED) for a configured user or one with permissions that ``by`` does not have.
        """
        user = self.find_user(name)
        kept = {} if user is None else {verifier.mechanism: verifier for verifier in user.verifiers}
        if not {mechanism for mechanism, verifier in verifiers.items() if verifier is None} <= kept.keys():
            raise Missing(ErrorCode.USER_MISSING, f"no such SCRAM verifier user={name!r}")
        made = tuple(verifier for verifier in (kept | dict(verifiers)).values() if verifier is not None)
        if user is None:
            self._check_new(name)
            user = User(self._new_id(), name, UNKNOWN_USER_HASH, self._clock.now_us())
        else:
            self._check_over(by, user)
        if made or user.password_hash != UNKNOWN_USER_HASH:
            self._store_user(msgspec.structs.replace(user, verifiers=made), done, ends=True)
        else:
            self._forget(user, done)
        self._administered("user.scram", by, name)

    def delete_user(self, user: User, *, by: Principal | None = None, done: Completion[User] | None = None) -> None:
        """Delete a user and its tokens, and end its logins. Raises Denied(DENIED) for a configured user."""
        self._check_over(by, user)
        self._forget(user, done)
        self._administered("user.delete", by, user.name)

    # Quotas

    def set_quota(
        self,
        user: str | None,
        client_id: str | None,
        limits: dict[str, float | None] | None,
        *,
        by: Principal | None = None,
        done: Completion[Quota] | None = None,
    ) -> None:
        """Change limits of a user, a client id, or both. Other limits of the entity do not change.

        Raises Missing(USER_MISSING), Invalid(INVALID_REQUEST), Busy(BUSY, DISK_FULL).

        Args:
            user, client_id: see ``client_quotas.Entity``.
            limits: new limits by kind; None for a kind removes its limit. None instead of a mapping removes all limits
                that were set at run time, so that the configured quota applies.
        """
        entity = user, client_id
        quota = self.check_quota(entity, limits)
        if quota is not None and self.quotas.is_as_configured(quota):
            quota = None
        if quota is not None and self.quotas.stored_count >= QUOTAS_MAX:
            raise Busy(ErrorCode.BUSY, f"too many quotas limit={QUOTAS_MAX}")
        effective = quota or self.quotas.configured(entity)
        self._store_quota(entity, quota, _completion(effective, done))
        self._administered("quota.alter", by, entity_text(entity), str(effective.limits))

    def check_quota(self, entity: Entity, limits: dict[str, float | None] | None) -> Quota | None:
        """Return the quota that an entity would have after a change, None if ``limits`` is None.

        Raises the same errors as ``set_quota``.
        """
        check_entity(entity)
        if limits is None:
            return None
        self._check_quota_user(entity)
        return self.quotas.of(entity).altered(limits)

    def check_quota_users(self) -> None:
        """Raise Missing(USER_MISSING) if a configured quota is for a user who does not exist."""
        for quota in self._settings.quotas:
            self._check_quota_user(quota.entity)

    def configure_quotas(self, quotas: tuple[Quota, ...]) -> None:
        """Replace the configured quotas. Quotas set at run time still take precedence. Raises Missing(USER_MISSING)."""
        for quota in quotas:
            self._check_quota_user(quota.entity)
        self.quotas.configure(quotas)

    def _check_quota_user(self, entity: Entity) -> None:
        name = entity[0]
        if name and self.find_user(name) is None:
            raise missing(ErrorCode.USER_MISSING, "user", name, (user.name for user in self.users()))

    def _store_quota(self, entity: Entity, quota: Quota | None, done: Completion[int] | None = None) -> None:
        value = None if quota is None else encode_quota(quota)
        self._broker.set_wire_state(QUOTAS, key_of(entity), value, level=Level.SYNCED, done=done)
        self.quotas.put(entity, quota)

    def _move_quotas(self, name: str, new: str | None) -> None:
        """Move a user's quotas to its new name. Delete them if ``new`` is None, which means that the user is deleted."""
        for quota in self.quotas.stored(name):
            self._store_quota(quota.entity, None)
            if new is not None:
                moved = msgspec.structs.replace(quota, user=new)
                self._store_quota(moved.entity, moved)

    # Tokens

    def create_token(
        self,
        user: User,
        name: str,
        expires_at_us: int | None,
        *,
        by: Principal | None = None,
        done: Completion[User] | None = None,
    ) -> str:
        """Create an access token and return it. Only its digest is stored. Raises the same errors as ``add_token``."""
        token = new_token()
        self.add_token(user, name, digest_of(token), expires_at_us, by=by, done=done)
        return token

    def add_token(
        self,
        user: User,
        name: str,
        digest: bytes,
        expires_at_us: int | None,
        *,
        by: Principal | None = None,
        done: Completion[User] | None = None,
    ) -> None:
        """Store an access token.

        Raises Invalid(INVALID_NAME), Conflict(TOKEN_EXISTS), Busy(BUSY), Denied(DENIED).
        """
        check_name(name, self._settings.name_bytes_max)
        if user.id not in self._users or (by is not None and not self.is_current(by)):
            raise Denied(ErrorCode.DENIED, "tokens need an authenticated user")
        now_us = self._clock.now_us()
        tokens = tuple(token for token in user.tokens if token.expires_at_us is None or token.expires_at_us > now_us)
        if any(token.name == name for token in tokens):
            raise Conflict(ErrorCode.TOKEN_EXISTS, f"token exists name={name!r}")
        if len(tokens) >= self._settings.tokens_max:
            raise Busy(ErrorCode.BUSY, f"too many tokens limit={self._settings.tokens_max}")
        kept = Token(name, digest, expires_at_us)
        self._store_user(msgspec.structs.replace(user, tokens=(*tokens, kept)), done)
        self._administered("token.create", by, f"{user.name}/{name}")

    def delete_token(
        self, user: User, name: str, *, by: Principal | None = None, done: Completion[User] | None = None
    ) -> None:
        """Delete a token and end logins made with it. Raises Missing(TOKEN_MISSING)."""
        rest = tuple(token for token in user.tokens if token.name != name)
        if len(rest) == len(user.tokens):
            raise Missing(ErrorCode.TOKEN_MISSING, f"no such token name={name!r}")
        self._store_user(msgspec.structs.replace(user, tokens=rest), self._then_notify(user.id, done))
        self._administered("token.delete", by, f"{user.name}/{name}")

    # Configured users

    def configure(self, users: Sequence[ConfiguredUser]) -> None:
        """Replace the configured users by these.

        A configured user replaces a user of the same name that was created over a protocol, and gets its id. Users that
        are deleted or get a new password are logged out. Raises Invalid(INVALID_REQUEST) for an empty list, because a
        broker without users is open to everyone.
        """
        if not users:
            raise Invalid(ErrorCode.INVALID_REQUEST, "the list of configured users is empty (add at least one user)")
        named: Mapping[str, ConfiguredUser] = {user.name: user for user in users}
        for user in list(self._users.values()):
            if user.configured and user.name not in named:
                self._forget(user, None)
                self._administered("user.delete", None, user.name, "no longer in the users file")
        for name, given in named.items():
            was = self._by_name.get(name) or User(self._new_id(), name, "", self._clock.now_us())
            is_same = was.configured and (was.password_hash, was.verifiers) == (given.password_hash, given.verifiers)
            now = msgspec.structs.replace(
                was,
                password_hash=given.password_hash,
                verifiers=given.verifiers,
                grants=given.grants,
                active=True,
                configured=True,
                tokens=was.tokens if is_same else (),
            )
            if now != was:
                self._store_user(now, None, ends=was.id in self._users and not is_same)
                self._administered("user.configure", None, name)

    # Several processes

    def require_login(self) -> None:
        """Require a login even if the first process has not reported its users yet, because there is a users file."""
        self._has_file, self.is_open = True, False

    def replicate(self, wire: str, key: str, value: bytes | None) -> None:
        """Apply a value that the first process has stored or removed.

        This process stores the value, too, so that it can start while the first process is unavailable.
        """
        if wire not in REPLICATED:
            return
        if self._broker.wire_state(wire).get(key) != value:
            with suppress(BrokerError):  # after a restart of this process, the first one sends it again
                self._broker.set_wire_state(wire, key, value, level=Level.WRITTEN)
        if wire == QUOTAS:
            user, client_id = msgspec.json.decode(key)
            self.quotas.put((user, client_id), None if value is None else decode_quota(value))
        if wire != KEPT_AS or key == NEXT_ID_KEY:
            return
        user_id, user = int(key), None if value is None else decode_user(value)
        was = self._users.get(user_id)
        if user == was:
            return
        self._drop(user_id)
        if user is not None:
            self._put(user)
        if was is not None:
            if user is None or not user.active or _identity(user) != _identity(was):
                self._end_logins(user_id)
            self._notify_end(user_id)

    def begin_change(self, who: User | str) -> Callable[[], None]:
        """Delay notifications of a user's connections until the returned function is called.

        The first process sends a change to this process before it responds to the request for the change. Without the
        delay, the connection that sent the request could be closed before it gets the response.
        """
        user = self.find_user(who) if isinstance(who, str) else who
        if user is None:
            return _nothing
        user_id = user.id
        self._changing[user_id] += 1

        def end() -> None:
            self._changing[user_id] -= 1
            if not self._changing[user_id]:
                del self._changing[user_id]
                self._notify_end(user_id)

        return end

    def _notify_end(self, user_id: int) -> None:
        if user_id not in self._changing:
            super()._notify_end(user_id)

    # Storage

    def _check_new(self, name: str) -> None:
        check_name(name, self._settings.name_bytes_max)
        if self.find_user(name) is not None:
            raise Conflict(ErrorCode.USER_EXISTS, f"user exists name={name!r}")
        if len(self._users) >= self._settings.users_max:
            raise Busy(ErrorCode.BUSY, f"too many users limit={self._settings.users_max}")

    def _new_id(self) -> int:
        """Return an unused id.

        The next id is journalled first, so that ids are never reused. Raises Busy(DISK_FULL).
        """
        found = self._next_id
        kept = (found + 1).to_bytes(8, "big")
        self._broker.set_wire_state(KEPT_AS, NEXT_ID_KEY, kept, level=Level.SYNCED)
        self._next_id = found + 1
        return found

    def _default(self) -> User:
        return User(ROOT_ID, DEFAULT_NAME, "", 0, EVERYTHING, configured=True)

    def _store_user(self, user: User, done: Completion[User] | None, *, ends: bool = False) -> None:
        """Journal a user and apply the change. Raises Busy(DISK_FULL).

        Args:
            ends: whether the user's existing logins become invalid.
        """
        completed = _completion(user, self._then_notify(user.id, done) if ends else done)
        self._broker.set_wire_state(KEPT_AS, str(user.id), encode_user(user), level=Level.SYNCED, done=completed)
        self._drop(user.id)
        self._put(user)
        if ends:
            self._end_logins(user.id)

    def _forget(self, user: User, done: Completion[User] | None) -> None:
        self._move_quotas(user.name, None)
        completed = _completion(user, self._then_notify(user.id, done))
        self._broker.set_wire_state(KEPT_AS, str(user.id), None, level=Level.SYNCED, done=completed)
        self._drop(user.id)
        self._logins.pop(user.id, None)

    def _then_notify(self, user_id: int, done: Completion[User] | None) -> Completion[User]:
        """Return a completion that calls ``done`` and then notifies the connections of the user."""

        def completed(user: User | BrokerError) -> None:
            if done is not None:
                done(user)
            self._notify_end(user_id)

        return completed

    def _put(self, user: User) -> None:
        self._users[user.id] = user
        self._by_name[user.name] = user
        if user.active and user.grants is not None:
            self._rights[user.id] = user.grants.opened()
        for token in user.tokens:
            self._by_digest[token.digest] = (user.id, token)
        self.is_open = self.is_open and not user.configured

    def _drop(self, user_id: int) -> None:
        user = self._users.pop(user_id, None)
        if user is None:
            return
        if self._by_name.get(user.name) is user:
            del self._by_name[user.name]
        self._rights.pop(user_id, None)
        for token in user.tokens:
            self._by_digest.pop(token.digest, None)
        self.is_open = not self._has_file and not any(other.configured for other in self._users.values())


def _completion(value: _Stored, done: Completion[_Stored] | None) -> Completion[int] | None:
    if done is None:
        return None
    return lambda stored: done(stored if isinstance(stored, BrokerError) else value)


def _identity(user: User) -> tuple[object, ...]:
    """Return those properties of a user whose change ends the user's logins."""
    return user.name, user.password_hash, user.verifiers


def _nothing() -> None:
    """Do nothing."""
