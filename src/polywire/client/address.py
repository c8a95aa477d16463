"""Parse the URL of a broker: addresses, login and TLS.

All addresses are checked before any broker is contacted. Error messages and the ``repr`` of a ``Login`` never contain a
password. ``+tls`` selects TLS: the broker's certificate and host name are verified. The client trusts the
authorities of the system, or those in ``SSL_CERT_FILE`` and ``SSL_CERT_DIR``.

Spark workers import this module, so it needs no asyncio.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

from polywire.errors import ErrorCode, Invalid
from polywire.types import PORT_DIGITS_MAX, PORT_MAX

BETWEEN: Final = ","
PASSWORD_VARIABLE: Final = "POLYWIRE_PASSWORD"
SCHEME_SUFFIX: Final = "+tls"


def split_brokers(url: str) -> list[str]:
    """Return one URL for each broker of ``[scheme://][name:password@]host:port,host:port…[?options]``.

    Each URL has the login and the options, and the scheme unless the broker has its own. Raises
    Invalid(INVALID_REQUEST).
    """
    _, separator, _ = url.partition("://")
    begin = url.rfind("@") + 1 or (url.index("://") + 3 if separator else 0)
    head, rest = url[:begin], url[begin:]
    hosts, mark, options = rest.partition("?")
    if BETWEEN not in hosts:
        return [url]
    brokers = [host.strip() for host in hosts.split(BETWEEN)]
    for host in brokers:
        split_address(host.rpartition("://")[2])
    return [f"{host if '://' in host else head + host}{mark}{options}" for host in brokers]


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``[polywire://]host:port``.

    An IPv6 host is written in brackets. Raises Invalid(INVALID_REQUEST).
    """
    bare = address.removeprefix("polywire://").rstrip("/")
    host, colon, port = bare.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"address is not host:port address={address!r}")
    if len(port) > PORT_DIGITS_MAX or not 0 < int(port) <= PORT_MAX:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"port is not between 1 and {PORT_MAX} address={address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(frozen=True, slots=True)
class Login:
    """A user name with a password, or an access token."""

    name: str
    password: str = field(repr=False)


def login_of(name: str, password: str | None) -> Login:
    """Return the login for a name. If ``password`` is None, the environment variable ``POLYWIRE_PASSWORD`` has it.

    Raises Invalid(INVALID_REQUEST) for a password without a name, and for a name without a password.
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

    Name and password may contain escapes such as ``%40``. Without a password, that of the environment is used. Raises
    Invalid(INVALID_REQUEST).
    """
    scheme, separator, rest = address.rpartition("://")
    words, at, host = rest.rpartition("@")
    if not at:
        return None, address
    name, _, password = words.partition(":")
    return login_of(unquote(name), unquote(password)), f"{scheme}{separator}{host}"


def client_context() -> ssl.SSLContext:
    """Return a context for TLS 1.2 and newer that verifies certificates and host names.

    It trusts the authorities of the system, or those in the environment variables ``SSL_CERT_FILE`` and
    ``SSL_CERT_DIR``.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def secured(context: ssl.SSLContext | None, host: str) -> dict[str, Any]:
    """Return the arguments of ``create_connection`` for TLS to this host, or no arguments if ``context`` is None."""
    return {} if context is None else {"ssl": context, "server_hostname": host}
