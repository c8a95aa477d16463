"""To whom a piece of the broker's state belongs, and who may use what is somebody's (decision 0029).

An owner is one number: a user's id, which is never given twice; below zero the address that a peer without a user came from; or UNOWNED.
Only a user's things are refused to others: who has no user cannot prove to be the same one tomorrow. What is nobody's, as everything that
was stored before owners were, becomes the first user's who uses it. Whoever may manage servers may use what is others'; it stays theirs.

Promises: on an open broker everybody is the same principal. Must not know: what is owned, wires, sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from ipaddress import IPv6Address, ip_address
from typing import Final, Protocol

from polywire.broker.actions import Action
from polywire.broker.users import Principal
from polywire.errors import Denied, ErrorCode
from polywire.types import host_of

UNOWNED: Final = 0
ANONYMOUS: Final = "anonymous"  # the user that stands for all peers of a wire without a login
NETWORK_BITS: Final = 64  # of an IPv6 address: who has one has the whole network


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the principal where there is one, and the owner that what it makes belongs to and is counted for."""

    principal: Principal | None
    owner: int


NOBODY: Final = Caller(None, UNOWNED)
ITSELF: Final = Caller(None, UNOWNED)
"""The broker: for what has to end with a connection, whoever it was. Known by identity, so nobody else is ever equal to it."""


def caller_of(principal: Principal | None, peer: str) -> Caller:
    """Who asks over a connection from this address."""
    if principal is not None and principal.user_id > UNOWNED and principal.name != ANONYMOUS:
        return Caller(principal, principal.user_id)
    return Caller(principal, owner_of_address(peer))


def owner_of_address(peer: str) -> int:
    """The number of an address, which may have a port behind it; addresses of one IPv6 network have one number."""
    host = host_of(peer) or peer
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        text = host
    else:
        if isinstance(address, IPv6Address):
            shared = 128 - NETWORK_BITS
            text = str(address.ipv4_mapped or int(address) >> shared << shared)
        else:
            text = str(address)
    return -1 - (int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big") >> 1)


def heir(owner: int, caller: Caller) -> int:
    """Whose it is once this caller has used it: a user's stays that user's."""
    if owner > UNOWNED:
        return owner
    return caller.owner if caller.owner > UNOWNED or owner == UNOWNED else owner


class Permissions(Protocol):
    """Who may do what, as far as owners concern it."""

    @property
    def is_open(self) -> bool:
        """Whether nobody has to log in."""

    def permits(self, principal: Principal | None, action: Action, /) -> bool:
        """Whether somebody may do it everywhere."""


class Owners:
    """Refuses what is somebody else's."""

    __slots__ = ("_access",)

    def __init__(self, access: Permissions) -> None:
        self._access: Final = access

    def may_use(self, caller: Caller, owner: int) -> bool:
        """Whether this caller may use what belongs to this owner."""
        if owner <= UNOWNED or owner == caller.owner or caller is ITSELF or self._access.is_open:
            return True
        principal = caller.principal
        return principal is not None and self._access.permits(principal, Action.CLUSTER_ALTER)

    def check(self, caller: Caller, owner: int, what: str, name: str) -> None:
        """Refuse what belongs to another user. Raises Denied(DENIED), without saying whose it is."""
        if not self.may_use(caller, owner):
            raise Denied(ErrorCode.DENIED, f"it belongs to another user, ask an administrator {what}={name!r}")
