"""Owners of groups, producers, transactional ids and staged data, and which users may use them (decision 0115).

An owner is one number:

* the id of a user, which is never reused
* a negative number, which stands for the address of a client without a user
* UNOWNED

Rules:

* Only the state of users and of links is protected, because a client without a user cannot prove its identity later.
* The first user that uses unowned state becomes its owner. State stored before owners existed is unowned.
* Users who may manage servers may use any state without becoming its owner.
* On a broker without users all clients are the same principal.
"""

from __future__ import annotations

from hashlib import blake2b
from ipaddress import IPv6Address, ip_address
from typing import Final, Protocol

import msgspec

from polywire.broker.permissions import Action
from polywire.broker.users import LINKS, Principal
from polywire.errors import Denied, ErrorCode
from polywire.types import host_of

UNOWNED: Final = 0
ANONYMOUS: Final = "anonymous"  # the user of all clients whose protocol has no authentication
# leading bits of an IPv6 address that identify its network, because one site controls the whole network
NETWORK_BITS: Final = 64


class Caller(msgspec.Struct, frozen=True):
    """The client that sent a request.

    Attributes:
        principal: authenticated user, if any.
        owner: user or address against whose quota the request's topics, groups and other state count.
    """

    principal: Principal | None
    owner: int


NO_CALLER: Final = Caller(None, UNOWNED)
ITSELF: Final = Caller(None, UNOWNED)
"""The broker as caller, for example to remove a member when its connection ends.

It is not equal to the caller of any client.
"""
LINKS_CALLER: Final = Caller(LINKS, LINKS.user_id)
"""The process that runs links. Its owner number is not that of any address, because those are hashes of 63 bits."""


def caller_of(principal: Principal | None, peer: str) -> Caller:
    """Return the caller for a connection from this address."""
    if principal is LINKS:
        return LINKS_CALLER
    if principal is not None and principal.user_id > UNOWNED and principal.name != ANONYMOUS:
        return Caller(principal, principal.user_id)
    return Caller(principal, owner_of_address(peer))


def owner_of_address(peer: str) -> int:
    """Return a number for quotas of unauthenticated clients, from an address with or without a port.

    All addresses of one IPv6 network have the same number.
    """
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


def next_owner(owner: int, caller: Caller) -> int:
    """Return the owner of a group, producer or other state after this caller has used it.

    State that belongs to a user keeps its owner.
    """
    if owner > UNOWNED:
        return owner
    return caller.owner if caller.owner > UNOWNED or owner == UNOWNED else owner


class Permissions(Protocol):
    """The permission checks that ``Owners`` uses."""

    @property
    def is_open(self) -> bool: ...

    def permits(self, principal: Principal | None, action: Action, /) -> bool:
        """Return whether a principal may perform an action on all resources."""

    def name_of(self, owner: int) -> str: ...

    def audit_refusal(self, principal: Principal, action: str, resource: str, reason: str) -> None: ...


class Owners:
    """Checks access to groups, producers and unpublished batches that belong to other users."""

    __slots__ = ("_access",)

    def __init__(self, access: Permissions) -> None:
        self._access: Final = access

    def may_use(self, caller: Caller, owner: int) -> bool:
        if owner == caller.owner or caller is ITSELF or self._access.is_open:
            return True
        if owner <= UNOWNED and owner != LINKS_CALLER.owner:
            return True
        principal = caller.principal
        return principal is not None and self._access.permits(principal, Action.CLUSTER_ALTER)

    def check(self, caller: Caller, owner: int, what: str, name: str) -> None:
        """Raise Denied(DENIED) if the caller may not use state that belongs to ``owner``.

        The audit log contains the owner's name; the error does not.
        """
        if self.may_use(caller, owner):
            return
        message = "not allowed: it belongs to another user (ask an administrator)"
        if caller.principal is not None:
            reason = f"{message} owner={self._access.name_of(owner)!r}"
            self._access.audit_refusal(caller.principal, f"{what}.use", name, reason)
        raise Denied(ErrorCode.DENIED, f"{message} {what}={name!r}")
