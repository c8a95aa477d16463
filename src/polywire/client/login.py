"""Login data from an address and the environment.

Error messages and the ``repr`` of a ``Login`` never contain a password.
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
    """A user name with a password, or an access token."""

    name: str
    password: str = field(repr=False)


def login_of(name: str, password: str | None) -> Login:
    """Return the login for a name. If ``password`` is None, it is taken from the environment.

    Raises Invalid(INVALID_REQUEST).
    """
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
    """Return the login in ``[scheme://][name[:password]@]host:port``, and the address without it.

    Characters that an address cannot contain are written as escapes such as ``%40``. Without a password, the one in the
    environment is used. Raises Invalid(INVALID_REQUEST).
    """
    scheme, separator, rest = address.rpartition("://")
    words, at, place = rest.rpartition("@")
    if not at:
        return None, address
    name, _, password = words.partition(":")
    return login_of(unquote(name), unquote(password)), f"{scheme}{separator}{place}"
