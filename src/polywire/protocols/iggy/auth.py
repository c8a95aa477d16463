"""Iggy's commands for logins, users, permissions and personal access tokens.

Passwords are verified in a thread, off the event loop. Changes are synced to disk before the reply. Every user may read
its own entry and change its own password.

(spec: iggy#d1-login, iggy#d3-register, iggy#users-and-tokens)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from struct import Struct
from typing import Final

from polywire.broker.access import Principal, User
from polywire.broker.permissions import Action, Grants, Permission, resource_name, split_resource_name
from polywire.errors import BrokerError, Busy, Denied, ErrorCode
from polywire.log.base import Completion
from polywire.protocols.iggy import errors, vsr
from polywire.protocols.iggy.directory import Directory
from polywire.protocols.iggy.messages import (
    NO_OPTIONS,
    U32,
    U64,
    PermissionFlags,
    Refused,
    name_bytes,
    permission_bytes,
)
from polywire.protocols.iggy.reader import Reader
from polywire.protocols.iggy.reply_slots import Answer
from polywire.protocols.iggy.session import IggySession
from polywire.types import TopicName

USERNAME_BYTES: Final = range(3, 51)
PASSWORD_BYTES: Final = range(3, 101)
TOKEN_NAME_BYTES: Final = range(3, 31)
SECRET_BYTES: Final = 32
_USER: Final = Struct("<IQB")
_NEVER: Final = 2**64 - 1
# The protocol's permission flags, in the protocol's order. The last two also grant what clients of other protocols need
# to read and write records.
_EVERYWHERE: Final = (
    Permission.MANAGE_SERVERS,
    Permission.READ_SERVERS,
    Permission.MANAGE_USERS,
    Permission.READ_USERS,
    Permission.MANAGE_STREAMS,
    Permission.READ_STREAMS,
    Permission.MANAGE_TOPICS,
    Permission.READ_TOPICS,
    Permission.CONSUME | Permission.GROUP,
    Permission.PRODUCE | Permission.TRANSACTION,
)
_IN_STREAM: Final = _EVERYWHERE[4:]
_IN_TOPIC: Final = _EVERYWHERE[6:]


# Logins


def log_in(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    if reader.dialect.framed:
        _register(session, answer, reader)
        return
    name, password = reader.name(), reader.name()
    session.broker.access.log_in(
        name, password, lambda principal: _logged_in(session, answer, principal), peer=session.peer
    )


def log_in_with_token(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    token = reader.name()
    try:
        principal = session.broker.access.log_in_with_token(token, peer=session.peer)
    except BrokerError:
        raise Refused(errors.BAD_TOKEN) from None
    _logged_in(session, answer, principal)


def _logged_in(session: IggySession, answer: Answer, principal: Principal | BrokerError) -> None:
    """Reply to a login with the user, or with the error."""
    framed = answer.dialect.framed
    if not isinstance(principal, BrokerError):
        principal = _set_user(session, principal)
    if isinstance(principal, BrokerError):
        if framed:
            answer.evict(vsr.EVICT_BUSY if isinstance(principal, Busy) else vsr.EVICT_CREDENTIALS)
        else:
            answer.refuse(principal)
        return
    user = U32.pack(principal.user_id + answer.dialect.base)
    if framed:
        session.epoch = session.shared.next_epoch()
        user += session.epoch.to_bytes(8, "little") + U32.pack(answer.dialect.protocols[0])
        user += name_bytes(answer.dialect.server_version)
    answer.ok(user)


def _set_user(session: IggySession, principal: Principal) -> Principal | BrokerError:
    try:
        session.logged_in(principal)
    except BrokerError as error:
        return error
    return principal


def _register(session: IggySession, answer: Answer, reader: Reader) -> None:
    """Log in with a user and password, or with a token that is encoded in their place (spec: iggy#d3-register)."""
    try:
        version = reader.u32()
        reader.name()
        reader.name()
    except Refused:
        answer.evict(vsr.EVICT_LOGIN)
        return
    if not session.recognition.see_protocol(version):
        answer.evict(vsr.EVICT_VERSION, session.recognition.protocols)
        return
    answer.dialect = session.recognition.dialect
    if answer.dialect.contexts and not _skip_secret(reader):
        answer.evict(vsr.EVICT_LOGIN)
        return
    at = reader.at
    words = _exactly(reader, lambda: (reader.name(), reader.name(), reader.str32()))
    if words is not None:
        try:
            session.broker.access.log_in(
                words[0], words[1], lambda principal: _logged_in(session, answer, principal), peer=session.peer
            )
        except BrokerError:  # too many logins are being verified; the client may retry
            answer.evict(vsr.EVICT_BUSY)
        return
    reader.at = at
    token = _exactly(reader, lambda: (reader.name(), reader.str32()))
    if token is None:
        answer.evict(vsr.EVICT_LOGIN)
        return
    try:
        principal = session.broker.access.log_in_with_token(token[0], peer=session.peer)
    except BrokerError:
        answer.evict(vsr.EVICT_TOKEN)
        return
    _logged_in(session, answer, principal)


def _skip_secret(reader: Reader) -> bool:
    """Skip the secret at the end of a login. Return whether there was one.

    With a secret, clients can bind further connections to the login. The broker does not support it (spec:
    iggy#d4-logins).
    """
    try:
        reader.take(SECRET_BYTES)
    except Refused:
        return False
    return True


def _exactly(reader: Reader, read: Callable[[], tuple[str, ...]]) -> tuple[str, ...] | None:
    try:
        words = read()
    except Refused:
        return None
    return words if reader.left == 0 else None


def log_out(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    del answer, reader
    session.logged_out()
    return b""


# Conversion between the protocol's permissions and the broker's


def _granted(flags: tuple[bool, ...], rights: tuple[Permission, ...]) -> int:
    return sum(int(right) for flag, right in zip(flags, rights, strict=True) if flag)


def grants_of(flags: PermissionFlags | None, directory: Directory, base: int) -> Grants | None:
    """Convert the protocol's permissions to the broker's.

    The protocol's refer to numbers of streams and topics, the broker's to names. Missing streams and topics are
    skipped, because their numbers may later be assigned to other users' streams and topics.
    """
    if flags is None:
        return None
    streams: dict[str, int] = {}
    topics: dict[str, int] = {}
    for number, rights, inner in flags.streams:
        stream = directory.find_stream(number - base)
        if stream is None:
            continue
        streams[stream.stored.namespace] = _granted(rights, _IN_STREAM)
        for topic_number, topic_rights in inner:
            topic = directory.find_topic(stream, topic_number - base)
            if topic is None:
                continue
            topics[resource_name(topic.name.stream, topic.name.topic)] = _granted(topic_rights, _IN_TOPIC)
    return Grants(_granted(flags.everywhere, _EVERYWHERE), streams, topics)


def _flags(granted: int, rights: tuple[Permission, ...]) -> tuple[bool, ...]:
    return tuple(bool(granted & right) for right in rights)


def flags_of(grants: Grants | None, directory: Directory, base: int) -> PermissionFlags | None:
    """Convert the broker's permissions to the protocol's. Missing streams and topics are skipped."""
    if grants is None:
        return None
    inner: dict[str, dict[str, int]] = {namespace: {} for namespace in grants.streams}
    for resource, rights in grants.topics.items():
        namespace, name = split_resource_name(resource)
        inner.setdefault(namespace, {})[name] = rights
    streams = []
    for namespace, topics in sorted(inner.items()):
        stream = directory.find_namespace(namespace)
        if stream is None:
            continue
        topic_flags = []
        for name, rights in sorted(topics.items()):
            topic = directory.find_full(TopicName(namespace, name))
            if topic is not None:
                topic_flags.append((directory.stored(topic).number + base, _flags(rights, _IN_TOPIC)))
        streams.append((stream.number + base, _flags(grants.streams.get(namespace, 0), _IN_STREAM), tuple(topic_flags)))
    return PermissionFlags(_flags(grants.everywhere, _EVERYWHERE), tuple(streams))


# Encoding of users


def _user_bytes(user: User, reader: Reader) -> bytes:
    body = _USER.pack(user.id + reader.dialect.base, user.created_at_us, 1 if user.active else 2)
    return body + name_bytes(user.name) + NO_OPTIONS * reader.dialect.option_blocks


def _user_details(session: IggySession, user: User, reader: Reader) -> bytes:
    flags = flags_of(user.grants, session.shared.directory, reader.dialect.base)
    return _user_bytes(user, reader) + permission_bytes(flags)


def _user_identifier(reader: Reader) -> int | str:
    found = reader.ident()
    return found - reader.dialect.base if isinstance(found, int) else found


def _current_user(session: IggySession) -> User:
    assert session.principal is not None, "commands on users require a login"
    return session.broker.access.user(session.principal.user_id)


def _allow(session: IggySession, action: Action, user: User) -> None:
    """Raise Denied if the client may not perform an action on a user. Users may perform every action on themselves."""
    if session.principal is None or session.principal.user_id != user.id:
        session.authorize(action)


def _completed(answer: Answer, user: User | BrokerError) -> None:
    if isinstance(user, BrokerError):
        answer.refuse(user)
    else:
        answer.ok(answer.payload)


def _renewing(session: IggySession, answer: Answer, user: User) -> Completion[User]:
    """Return a callback that replies after a change of a user.

    The change ends the user's logins. If users change themselves, this connection stays logged in.
    """

    def done(changed: User | BrokerError) -> None:
        principal = session.principal
        is_itself = principal is not None and principal.user_id == user.id
        if principal is not None and is_itself and not isinstance(changed, BrokerError):
            session.renew(session.broker.access.renewed(principal))
        _completed(answer, changed)

    return done


# Users


def get_user(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    del answer
    user = session.broker.access.find_user(_user_identifier(reader))
    if user is None:
        session.authorize(Action.USER_DESCRIBE)
        if reader.dialect.empty_when_missing:
            return b""
        raise Refused(errors.NO_RESOURCE)
    _allow(session, Action.USER_DESCRIBE, user)
    return _user_details(session, user, reader)


def get_users(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    del answer
    session.authorize(Action.USER_DESCRIBE)
    return b"".join(_user_bytes(user, reader) for user in session.broker.access.users())


def _checked(text: str, sizes: range, number: int) -> str:
    if len(text.encode()) not in sizes:
        raise Refused(number)
    return text


def create_user(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    name = _checked(reader.name(), USERNAME_BYTES, errors.BAD_USERNAME)
    password = _checked(reader.name(), PASSWORD_BYTES, errors.BAD_PASSWORD)
    active = _status(reader)
    flags = reader.permissions()
    session.authorize(Action.USER_CREATE)
    grants = grants_of(flags, session.shared.directory, reader.dialect.base)
    dialect = reader.dialect

    def made(user: User | BrokerError) -> None:
        if dialect.returns_created and not isinstance(user, BrokerError):
            answer.payload = _user_details(session, user, Reader(memoryview(b""), dialect))
        _completed(answer, user)

    session.broker.users.create_user(name, password, grants, active=active, by=session.principal, done=made)


def _status(reader: Reader) -> bool:
    status = reader.u8()
    if status not in (1, 2):
        raise Refused(errors.BAD_STATUS)
    return status == 1


def delete_user(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    session.authorize(Action.USER_DELETE)
    user = session.broker.access.user(_user_identifier(reader))
    if user.configured:
        raise Refused(errors.CANNOT_DELETE_USER)
    session.broker.users.delete_user(user, by=session.principal, done=partial(_completed, answer))


def update_user(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    session.authorize(Action.USER_ALTER)
    user = session.broker.access.user(_user_identifier(reader))
    name = _checked(reader.name(), USERNAME_BYTES, errors.BAD_USERNAME) if reader.flag() else None
    active = _status(reader) if reader.flag() else None
    done = _renewing(session, answer, user)
    session.broker.users.update_user(user, name=name, active=active, by=session.principal, done=done)


def update_permissions(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    session.authorize(Action.USER_ALTER)
    user = session.broker.access.user(_user_identifier(reader))
    flags = reader.permissions()
    grants = grants_of(flags, session.shared.directory, reader.dialect.base)
    session.broker.users.grant(user, grants, by=session.principal, done=partial(_completed, answer))


def change_password(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    named = _user_identifier(reader)
    found = session.broker.access.find_user(named)
    if found is None:
        session.authorize(Action.USER_ALTER)
    else:
        _allow(session, Action.USER_ALTER, found)
    user = session.broker.access.user(named)
    old, new = reader.name(), _checked(reader.name(), PASSWORD_BYTES, errors.BAD_PASSWORD)
    done = _renewing(session, answer, user)
    session.broker.users.change_password(user, old, new, by=session.principal, done=done)


# Tokens


def get_tokens(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    """GET_PERSONAL_ACCESS_TOKENS: return the user's tokens."""
    del answer, reader
    tokens = _current_user(session).tokens
    return b"".join(name_bytes(token.name) + U64.pack(token.expires_at_us or 0) for token in tokens)


def create_token(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    """CREATE_PERSONAL_ACCESS_TOKEN: create a token, which is returned only in this reply."""
    name = _checked(reader.name(), TOKEN_NAME_BYTES, errors.BAD_TOKEN_NAME)
    if reader.dialect.topic_settings >= 3:
        expiry_us = reader.u64()
    else:
        expiry_us = reader.u32() * 1_000_000
    now_us = session.broker.clock.now_us()
    expires_at_us = None if expiry_us in (0, _NEVER) else min(now_us + expiry_us, 2**62)
    user = _current_user(session)
    if user.configured and user.id == 0:
        raise Denied(ErrorCode.DENIED, "tokens need an authenticated user")
    raw = session.broker.users.create_token(
        user, name, expires_at_us, by=session.principal, done=partial(_completed, answer)
    )
    answer.payload = name_bytes(raw)


def delete_token(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    session.broker.users.delete_token(
        _current_user(session), reader.name(), by=session.principal, done=partial(_completed, answer)
    )
