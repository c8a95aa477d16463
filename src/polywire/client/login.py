"""Who logs in: a name and a password out of an address, or out of an address and the environment.

Promises: a password is never part of a text that is shown, neither of an error nor of a value that is printed. Must not know: any wire.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote

from polywire.errors import ErrorCode, Invalid

PASSWORD_VARIABLE: Final = "POLYWIRE_PASSWORD"


@dataclass(frozen=True, slots=True)
class Login:
    """A name and its password, or an access token in the password's place."""

    name: str
    password: str = field(repr=False)


def login_of(name: str, password: str | None) -> Login:
    """The login of a name, with the password of the environment where none is given. Raises Invalid(INVALID_REQUEST)."""
    password = password or os.environ.get(PASSWORD_VARIABLE)
    if not name:
        raise Invalid(ErrorCode.INVALID_REQUEST, "password has no user name (use name:password@host:port)")
    if not password:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"user has no password (set the variable {PASSWORD_VARIABLE}, or use name:password@host:port)"
            f" name={name!r}",
        )
    return Login(name, password)


def split_login(address: str) -> tuple[Login | None, str]:
    """Return who logs in to ``[scheme://][name[:password]@]host:port``, and the address without that.

    ``%40`` and the like stand for what an address cannot hold; without a password it is the one of the environment. Raises
    Invalid(INVALID_REQUEST).
    """
    scheme, separator, rest = address.rpartition("://")
    words, at, place = rest.rpartition("@")
    if not at:
        return None, address
    name, _, password = words.partition(":")
    return login_of(unquote(name), unquote(password)), f"{scheme}{separator}{place}"
