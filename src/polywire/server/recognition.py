"""Detect the protocol of a new connection from its first bytes, and format its local and remote address."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any, Final

from polywire.errors import PeerError
from polywire.protocols.runtime.session import SessionFactory
from polywire.types import spell_address

_MAPPED: Final = "::ffff:"  # prefix of an IPv4 address in IPv6 notation
PREFIX_BYTES_MAX: Final = 64  # enough to detect every protocol


def recognise(factories: Sequence[SessionFactory], received: memoryview) -> SessionFactory | None:
    """Return the factory of the protocol that the first bytes of a connection belong to; None if more bytes are needed.

    Raises PeerError if they belong to no protocol.
    """
    prefix, undecided = bytes(received[:PREFIX_BYTES_MAX]), False
    for factory in factories:
        known = factory.recognise(prefix)
        if known:
            return factory
        undecided = undecided or known is None
    if not undecided or len(prefix) >= PREFIX_BYTES_MAX:
        raise PeerError("the first bytes belong to no protocol", fatal=True)
    return None


def format_address(name: Any) -> str:
    """Return an address as text: ``localhost`` for a process of the broker, whose socket pair has no address."""
    return spell_address(*host_and_port(name)) if isinstance(name, tuple) else str(name or "localhost")


def host_and_port(name: Any) -> tuple[str, int]:
    """Return host and port of an address. An IPv4 address in IPv6 notation is converted to IPv4."""
    if not isinstance(name, tuple):
        return "localhost", 0
    host: str = name[0]
    return host.removeprefix(_MAPPED) if "." in host else host, name[1]


def is_loopback(name: Any) -> bool:
    return not isinstance(name, tuple) or ip_address(host_and_port(name)[0].partition("%")[0]).is_loopback
