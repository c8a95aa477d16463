"""Types for users, access tokens and logged-in principals, and their stored encoding.

Passwords are stored as hashes and tokens as digests. A user has SCRAM verifiers only if they were set explicitly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

import msgspec

from polywire.broker.passwords import PASSWORD_BYTES_MAX
from polywire.broker.permissions import Grants
from polywire.broker.scram import Verifier
from polywire.errors import Corrupt, Denied, ErrorCode, Invalid

DEFAULT_NAME: Final = "iggy"
DEFAULT_PASSWORD: Final = "iggy"  # the default of Iggy's clients
ROOT_ID: Final = 0


class Token(msgspec.Struct, frozen=True, array_like=True):
    """A personal access token, used instead of name and password."""

    name: str
    digest: bytes
    expires_at_us: int | None = None


class User(msgspec.Struct, frozen=True, array_like=True):
    """A stored user.

    Attributes:
        configured: whether it comes from the operator's file and cannot be changed over a protocol.
    """

    id: int
    name: str
    password_hash: str
    created_at_us: int
    grants: Grants | None = None
    active: bool = True
    configured: bool = False
    tokens: tuple[Token, ...] = ()
    verifiers: tuple[Verifier, ...] = ()


@dataclass(frozen=True, slots=True)
class Principal:
    """The authenticated user of a connection.

    Attributes:
        login: how often the user's logins had been ended (by a new password, for example) before this login. If the
            count is higher now, the login is invalid.
        token: digest of the token that was used to log in.
        expires_at_us: expiry time of that token.
        peer: address of the connection, for the audit log.
    """

    user_id: int
    name: str
    login: int = field(default=0, compare=False)
    token: bytes | None = field(default=None, compare=False)
    expires_at_us: int | None = field(default=None, compare=False)
    peer: str = field(default="", compare=False)


class ConfiguredUser(msgspec.Struct, frozen=True):
    """A user in the operator's file."""

    name: str
    password_hash: str
    grants: Grants
    verifiers: tuple[Verifier, ...] = ()


ROOT: Final = Principal(ROOT_ID, DEFAULT_NAME)
TABLES: Final = Principal(-1, "polywire-tables")
"""The process that writes tables, as a client of its own broker. It may read every topic. No client can log in as it."""
LINKS: Final = Principal(-2, "polywire-links")
"""The process that runs links, as a client of its own broker. No client can log in as it.

It may create, read and write every topic, and commit the offsets of every group.
"""


_ENCODER: Final = msgspec.msgpack.Encoder()
_USERS: Final = msgspec.msgpack.Decoder(User)


def decode_user(value: bytes) -> User:
    """Decode a stored user. Raises Corrupt(CORRUPT)."""
    try:
        return _USERS.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(ErrorCode.CORRUPT, f"stored user is unreadable reason={error}") from error


def encode_user(user: User) -> bytes:
    return _ENCODER.encode(user)


def check_changeable(user: User) -> None:
    if user.configured:
        raise Denied(
            ErrorCode.DENIED,
            f"a user of the users file cannot be changed over a protocol (edit the file) name={user.name!r}",
        )


def is_password(password: str) -> bool:
    try:
        return 1 <= len(password.encode()) <= PASSWORD_BYTES_MAX
    except UnicodeEncodeError:
        return False


def check_password_given(password: str) -> None:
    if not is_password(password):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"password must have 1 to {PASSWORD_BYTES_MAX} bytes")


def digest_of(token: str) -> bytes:
    return blake2b(token.encode("utf-8", "replace"), digest_size=32).digest()
