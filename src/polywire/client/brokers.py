"""Split a URL with several brokers into one URL per broker, in the same order.

All addresses are checked before any broker is contacted. Spark workers import this module, so it needs no asyncio.
"""

from __future__ import annotations

from typing import Final

from polywire.errors import ErrorCode, Invalid
from polywire.types import PORT_DIGITS_MAX, PORT_MAX

BETWEEN: Final = ","


def split_brokers(url: str) -> list[str]:
    """Return one URL for each broker of ``[scheme://][name:password@]host:port,host:port…[?options]``.

    Login and options apply to all brokers. So does the scheme, but a broker may have its own. Raises
    Invalid(INVALID_REQUEST).
    """
    _, separator, _ = url.partition("://")
    begin = url.rfind("@") + 1 or (url.index("://") + 3 if separator else 0)
    head, rest = url[:begin], url[begin:]
    places, mark, options = rest.partition("?")
    if BETWEEN not in places:
        return [url]
    given = [place.strip() for place in places.split(BETWEEN)]
    for place in given:
        split_address(place.rpartition("://")[2])
    return [f"{place if '://' in place else head + place}{mark}{options}" for place in given]


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
