"""Who may do what: users, their tokens and permissions, for every wire that has words for a login.

Promises: users are changed by journalled changes and outlive restarts and snapshots; passwords are kept as Argon2id hashes, tokens as
digests; a change counts from the next request on, for whoever is logged in already. A broker without configured users is open:
nobody has to log in, and the reference systems' default user is accepted. Must not know: wires, sockets, files.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec

from polywire.broker.passwords import PASSWORD_BYTES_MAX, Passwords
from polywire.broker.permissions import EVERYTHING, Grants, Permission
from polywire.broker.settings import BrokerSettings, check_name
from polywire.clock import Clock
from polywire.errors import BrokerError, Busy, Conflict, Corrupt, Denied, ErrorCode, Invalid, Missing
from polywire.log.base import Loop
from polywire.types import Level, TopicName

if TYPE_CHECKING:
    from polywire.broker.broker import Broker

KEPT_AS: Final = "access"  # users lie beside the wires' own state, one value each
DEFAULT_NAME: Final = "iggy"
DEFAULT_PASSWORD: Final = "iggy"  # what Iggy's clients send when nobody told them anything
ROOT_ID: Final = 0
TOKEN_BYTES: Final = 32
# Verified when there is no such user, so that the time an answer takes does not tell: a hash of random bytes nobody kept.
_NOBODY: Final = "$argon2id$v=19$m=19456,t=2,p=1$r5Q8OkCwjhaF8jZg/WiMlA$gfy+gp6xGZf2cuwZLv3BPEXD2/9s65PTsU3PA111PhI"


class Token(msgspec.Struct, frozen=True, array_like=True):
    """A personal access token: what stands in for a name and a password."""

    name: str
    digest: bytes
    expires_at_us: int | None = None


class User(msgspec.Struct, frozen=True, array_like=True):
    """A user as kept; ``configured`` ones come from the operator's file and cannot be changed over a wire."""

    id: int
    name: str
    password_hash: str
    created_at_us: int
    grants: Grants | None = None
    active: bool = True
    configured: bool = False
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a connection is, once it is somebody."""

    user_id: int
    name: str


@dataclass(frozen=True, slots=True)
class ConfiguredUser:
    """A user of the operator's file."""

    name: str
    password_hash: str
    grants: Grants


ROOT: Final = Principal(ROOT_ID, DEFAULT_NAME)

LoggedIn = Callable[[Principal | BrokerError], None]
UserMade = Callable[[User | None, BrokerError | None], None]


class Access:
    """All users of this broker.

    Invariant: ``_users`` is what the kept state holds; ``_by_name`` and ``_by_digest`` point into it, ``_rights`` has its opened grants.
    """

    __slots__ = (
        "_broker",
        "_by_digest",
        "_by_name",
        "_clock",
        "_passwords",
        "_rights",
        "_settings",
        "_users",
        "is_open",
    )

    def __init__(self, broker: Broker, settings: BrokerSettings, loop: Loop, clock: Clock) -> None:
        self._broker = broker
        self._settings = settings
        self._clock = clock
        self._passwords = Passwords(
            loop, waiting_max=settings.logins_waiting_max, cached_max=settings.logins_cached_max
        )
        self._users: dict[int, User] = {}
        self._by_name: dict[str, User] = {}
        self._by_digest: dict[bytes, tuple[int, Token]] = {}
        self._rights: dict[int, Grants] = {}
        self.is_open = True
        for value in broker.wire_state(KEPT_AS).values():
            self._put(_decode(value))

    def close(self) -> None:
        """Verify nothing more."""
        self._passwords.close()

    # Logging in

    def anonymous(self) -> Principal:
        """Who somebody is without a login. Raises Denied(LOGIN_REQUIRED) unless the broker is open."""
        if not self.is_open:
            raise Denied(ErrorCode.LOGIN_REQUIRED, "log in first")
        return ROOT

    def log_in(self, name: str, password: str, done: LoggedIn) -> None:
        """Tell ``done``, later on the loop, who this is, or Denied(LOGIN_FAILED) without saying which of the two was wrong.

        Raises Busy(BUSY) when too many logins wait to be verified.
        """
        user = self._by_name.get(name)
        if user is None and self.is_open and (name, password) == (DEFAULT_NAME, DEFAULT_PASSWORD):
            self._passwords.soon(done, ROOT)
            return
        kept = _NOBODY if user is None else user.password_hash
        if not _is_password(password):
            kept, password = _NOBODY, "-"
        if self._passwords.known(kept, password):
            self._passwords.soon(lambda right: done(self._let_in(name, kept, right)), True)
            return
        self._passwords.verify(kept, password, lambda right: done(self._let_in(name, kept, right)))

    def recall(self, name: str, password: str) -> Principal | None:
        """Who this is when the same words were verified a short time ago; None proves nothing, ``log_in`` does."""
        user = self._by_name.get(name)
        if user is None or not user.active or not _is_password(password):
            return None
        return Principal(user.id, name) if self._passwords.known(user.password_hash, password) else None

    def log_in_with_token(self, token: str) -> Principal:
        """Who holds this token. Raises Denied(LOGIN_FAILED), also when it has expired."""
        held = self._by_digest.get(_digest(token))
        if held is not None:
            user_id, kept = held
            alive = kept.expires_at_us is None or kept.expires_at_us > self._clock.now_us()
            user = self._users[user_id]
            if alive and user.active:
                return Principal(user.id, user.name)
        raise Denied(ErrorCode.LOGIN_FAILED, "no such token, or it has expired")

    def _let_in(self, name: str, verified: str, right: bool) -> Principal | BrokerError:
        user = self._by_name.get(name)  # once more: it may have changed while the hash was made
        if right and user is not None and user.active and user.password_hash == verified:
            return Principal(user.id, user.name)
        return Denied(ErrorCode.LOGIN_FAILED, "wrong user or password")

    # What is allowed

    def check(
        self, principal: Principal, permission: Permission, name: TopicName | None = None, *, stream: str | None = None
    ) -> None:
        """Refuse what a user may not do, with a topic, in a stream or (with neither) everywhere. Raises Denied(DENIED)."""
        if not self.allows(principal, permission, name, stream=stream):
            where = name.full if name is not None else stream
            raise Denied(
                ErrorCode.DENIED,
                f"not allowed user={principal.name!r} permission={permission.name} where={where!r}",
            )

    def allows(
        self, principal: Principal, permission: Permission, name: TopicName | None = None, *, stream: str | None = None
    ) -> bool:
        """Whether a user may do it; nothing any more once it was deleted or made inactive."""
        if principal is ROOT:
            return self.is_open
        rights = self._rights.get(principal.user_id)
        return rights is not None and rights.allow(permission, name, stream)

    def allows_somewhere(self, principal: Principal, permission: Permission) -> bool:
        """Whether a user may do it everywhere, in some stream or with some topic."""
        if principal is ROOT:
            return self.is_open
        rights = self._rights.get(principal.user_id)
        return rights is not None and rights.allow_somewhere(permission)

    # Users

    def users(self) -> list[User]:
        """All users by id; on an open broker the default user stands before them."""
        users = [self._users[user_id] for user_id in sorted(self._users)]
        return [self._default(), *users] if self.is_open else users

    def find_user(self, who: int | str) -> User | None:
        """A user by id or name."""
        if self.is_open and who in (ROOT_ID, DEFAULT_NAME) and DEFAULT_NAME not in self._by_name:
            return self._default()
        return self._users.get(who) if isinstance(who, int) else self._by_name.get(who)

    def user(self, who: int | str) -> User:
        """A user by id or name. Raises Missing(USER_MISSING)."""
        user = self.find_user(who)
        if user is None:
            raise Missing(ErrorCode.USER_MISSING, f"no such user user={who!r}")
        return user

    def create_user(
        self, name: str, password: str, grants: Grants | None, *, active: bool = True, done: UserMade
    ) -> None:
        """Make a user; ``done`` gets it once that is synced.

        Raises Invalid(INVALID_NAME, INVALID_REQUEST), Conflict(USER_EXISTS), Busy(BUSY).
        """
        self._check_new(name)
        _check_password(password)

        def hashed(password_hash: str) -> None:
            try:
                self._check_new(name)
            except BrokerError as error:
                done(None, error)
                return
            user = User(self._next_id(), name, password_hash, self._clock.now_us(), grants, active)
            self._keep(user, done)

        self._passwords.hash(password, hashed)

    def update_user(
        self, user: User, *, name: str | None = None, active: bool | None = None, done: UserMade | None = None
    ) -> None:
        """Give a user another name or state. Raises as ``create_user``, and Denied(DENIED) for a configured one."""
        _check_changeable(user)
        if name is not None and name != user.name:
            self._check_new(name)
        changed = msgspec.structs.replace(
            user, name=user.name if name is None else name, active=user.active if active is None else active
        )
        self._keep(changed, done)

    def grant(self, user: User, grants: Grants | None, *, done: UserMade | None = None) -> None:
        """Replace what a user may do. Raises Denied(DENIED) for a configured one."""
        _check_changeable(user)
        self._keep(msgspec.structs.replace(user, grants=grants), done)

    def change_password(self, user: User, old: str, new: str, *, done: UserMade) -> None:
        """Replace a password; ``done`` gets Denied(LOGIN_FAILED) when the old one is wrong.

        Raises Denied(DENIED) for a configured user, Invalid(INVALID_REQUEST), Busy(BUSY).
        """
        _check_changeable(user)
        _check_password(new)

        def verified(right: bool) -> None:
            if not right:
                done(None, Denied(ErrorCode.LOGIN_FAILED, "the old password is wrong"))
                return
            try:
                self._passwords.hash(new, hashed)
            except BrokerError as error:
                done(None, error)

        def hashed(password_hash: str) -> None:
            now = self._users.get(user.id)
            if now is None:
                done(None, Missing(ErrorCode.USER_MISSING, f"no such user user={user.name!r}"))
            else:
                self._keep(msgspec.structs.replace(now, password_hash=password_hash), done)

        self._passwords.verify(user.password_hash, old if _is_password(old) else "-", verified)

    def delete_user(self, user: User, *, done: UserMade | None = None) -> None:
        """End a user and its tokens. Raises Denied(DENIED) for a configured one."""
        _check_changeable(user)
        self._forget(user, done)

    # Tokens

    def create_token(self, user: User, name: str, expires_at_us: int | None, *, done: UserMade | None = None) -> str:
        """A new token, told this once. Raises Invalid(INVALID_NAME), Conflict(TOKEN_EXISTS), Busy(BUSY), Denied(DENIED)."""
        check_name(name, self._settings.name_bytes_max)
        if user.id not in self._users:
            raise Denied(ErrorCode.DENIED, "the default user of an open broker can have no tokens")
        now_us = self._clock.now_us()
        tokens = tuple(token for token in user.tokens if token.expires_at_us is None or token.expires_at_us > now_us)
        if any(token.name == name for token in tokens):
            raise Conflict(ErrorCode.TOKEN_EXISTS, f"token exists name={name!r}")
        if len(tokens) >= self._settings.tokens_max:
            raise Busy(ErrorCode.BUSY, f"too many tokens limit={self._settings.tokens_max}")
        raw = secrets.token_hex(TOKEN_BYTES)
        kept = Token(name, _digest(raw), expires_at_us)
        self._keep(msgspec.structs.replace(user, tokens=(*tokens, kept)), done)
        return raw

    def delete_token(self, user: User, name: str, *, done: UserMade | None = None) -> None:
        """End a token. Raises Missing(TOKEN_MISSING)."""
        rest = tuple(token for token in user.tokens if token.name != name)
        if len(rest) == len(user.tokens):
            raise Missing(ErrorCode.TOKEN_MISSING, f"no such token name={name!r}")
        self._keep(msgspec.structs.replace(user, tokens=rest), done)

    # The operator's users

    def configure(self, users: Sequence[ConfiguredUser]) -> None:
        """Make these the configured users: new ones are added, others updated, those no longer named are deleted.

        Called once, before anybody is served. A user made over a wire gives way to a configured one of its name, and keeps its id.
        """
        named: Mapping[str, ConfiguredUser] = {user.name: user for user in users}
        for user in list(self._users.values()):
            if user.configured and user.name not in named:
                self._forget(user, None)
        for name, given in named.items():
            was = self._by_name.get(name) or User(self._next_id(), name, "", self._clock.now_us())
            now = msgspec.structs.replace(
                was, password_hash=given.password_hash, grants=given.grants, active=True, configured=True
            )
            if now != was:
                self._keep(now, None)

    # Keeping

    def _check_new(self, name: str) -> None:
        check_name(name, self._settings.name_bytes_max)
        if self.find_user(name) is not None:
            raise Conflict(ErrorCode.USER_EXISTS, f"user exists name={name!r}")
        if len(self._users) >= self._settings.users_max:
            raise Busy(ErrorCode.BUSY, f"too many users limit={self._settings.users_max}")

    def _next_id(self) -> int:
        return max(self._users, default=ROOT_ID) + 1

    def _default(self) -> User:
        return User(ROOT_ID, DEFAULT_NAME, "", 0, EVERYTHING, configured=True)

    def _keep(self, user: User, done: UserMade | None) -> None:
        """Journal a user as it is now and make it true. Raises Busy(DISK_FULL)."""
        value = _ENCODER.encode(user)
        self._broker.set_wire_state(KEPT_AS, str(user.id), value, level=Level.SYNCED, done=_told(user, done))
        self._drop(user.id)
        self._put(user)

    def _forget(self, user: User, done: UserMade | None) -> None:
        self._broker.set_wire_state(KEPT_AS, str(user.id), None, level=Level.SYNCED, done=_told(user, done))
        self._drop(user.id)

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
        del self._by_name[user.name]
        self._rights.pop(user_id, None)
        for token in user.tokens:
            self._by_digest.pop(token.digest, None)
        self.is_open = not any(other.configured for other in self._users.values())


_ENCODER: Final = msgspec.msgpack.Encoder()
_USERS: Final = msgspec.msgpack.Decoder(User)


def _decode(value: bytes) -> User:
    try:
        return _USERS.decode(value)
    except msgspec.DecodeError as error:
        raise Corrupt(ErrorCode.CORRUPT, f"stored user does not decode reason={error}") from error


def _told(user: User, done: UserMade | None) -> Callable[[int, BrokerError | None], None] | None:
    if done is None:
        return None
    return lambda _, error: done(None if error else user, error)


def _check_changeable(user: User) -> None:
    if user.configured:
        raise Denied(ErrorCode.DENIED, f"a configured user is changed where it was configured name={user.name!r}")


def _is_password(password: str) -> bool:
    try:
        return 1 <= len(password.encode()) <= PASSWORD_BYTES_MAX
    except UnicodeEncodeError:
        return False


def _check_password(password: str) -> None:
    if not _is_password(password):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"a password has 1 to {PASSWORD_BYTES_MAX} bytes")


def _digest(token: str) -> bytes:
    return blake2b(token.encode("utf-8", "replace"), digest_size=32).digest()
