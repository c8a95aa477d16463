"""Who a new peer is before it has said who: the wire it speaks, and the names of both ends of its socket.

Promises: a wire is recognised as soon as its first bytes can be no other's. Must not know: sockets, any one wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any, Final

from polywire.errors import PeerError
from polywire.protocols.runtime.session import SessionFactory
from polywire.types import spell_address

_MAPPED: Final = "::ffff:"  # prefix of an IPv4 address in IPv6 notation
PREFIX_BYTES_MAX: Final = 64  # within which every wire is recognised


def recognise(factories: Sequence[SessionFactory], received: memoryview) -> SessionFactory | None:
    """Find out which wire begins with these bytes; None when more are needed. Raises PeerError when none does."""
    prefix, undecided = bytes(received[:PREFIX_BYTES_MAX]), False
    for factory in factories:
        known = factory.recognise(prefix)
        if known:
            return factory
        undecided = undecided or known is None
    if not undecided or len(prefix) >= PREFIX_BYTES_MAX:
        raise PeerError("no protocol starts with these bytes", fatal=True)
    return None


def format_address(name: Any) -> str:
    """The address of a socket's end, for logs."""
    return spell_address(*host_and_port(name)) if isinstance(name, tuple) else str(name)


def host_and_port(name: Any) -> tuple[str, int]:
    """Host and port of a socket's end; an IPv4 address of a socket that accepts both families is spelled as IPv4."""
    if not isinstance(name, tuple):
        return "localhost", 0
    host: str = name[0]
    return host.removeprefix(_MAPPED) if "." in host else host, name[1]


def is_loopback(name: Any) -> bool:
    """Whether an end of a socket is on this machine."""
    return not isinstance(name, tuple) or ip_address(host_and_port(name)[0].partition("%")[0]).is_loopback
