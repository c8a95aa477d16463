"""Users, what they prove themselves with, and who is logged in as one: the values that access is made of.

Promises: plain values that encode themselves; a password is kept as a hash, a token as a digest; what SCRAM takes is
there only where it was asked for. Must not know: who is logged in, what permissions mean.
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
DEFAULT_PASSWORD: Final = "iggy"  # what Iggy's clients send by default
ROOT_ID: Final = 0


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
    verifiers: tuple[Verifier, ...] = ()


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a connection is, once it is somebody.

    login: which of the user's logins count: one from before its password was replaced, say, does not. token: digest of the token it came
    with. expires_at_us: when that ends. peer: address of its connection, for the audit.
    """

    user_id: int
    name: str
    login: int = field(default=0, compare=False)
    token: bytes | None = field(default=None, compare=False)
    expires_at_us: int | None = field(default=None, compare=False)
    peer: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ConfiguredUser:
    """A user of the operator's file."""

    name: str
    password_hash: str
    grants: Grants
    verifiers: tuple[Verifier, ...] = ()


ROOT: Final = Principal(ROOT_ID, DEFAULT_NAME)


_ENCODER: Final = msgspec.msgpack.Encoder()
_USERS: Final = msgspec.msgpack.Decoder(User)


def decode_user(value: bytes) -> User:
    """A user as it was kept. Raises Corrupt(CORRUPT)."""
    try:
        return _USERS.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(ErrorCode.CORRUPT, f"stored user does not decode reason={error}") from error


def encode_user(user: User) -> bytes:
    """A user as it is kept."""
    return _ENCODER.encode(user)


def check_changeable(user: User) -> None:
    """Raises Denied(DENIED) for a configured user."""
    if user.configured:
        raise Denied(ErrorCode.DENIED, f"a configured user is changed where it was configured name={user.name!r}")


def is_password(password: str) -> bool:
    """Whether this can be a password."""
    try:
        return 1 <= len(password.encode()) <= PASSWORD_BYTES_MAX
    except UnicodeEncodeError:
        return False


def check_password_given(password: str) -> None:
    """Raises Invalid(INVALID_REQUEST) for what cannot be a password."""
    if not is_password(password):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"a password has 1 to {PASSWORD_BYTES_MAX} bytes")


def digest_of(token: str) -> bytes:
    """What is kept of a token."""
    return blake2b(token.encode("utf-8", "replace"), digest_size=32).digest()
