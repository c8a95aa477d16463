"""Count the broker state of each owner, and limit it (decision 0115).

All state that clients can create is counted by owner (``broker.owners``), in items by kind and in bytes of memory. An
owner may use a share of each limit, so no owner can lock out others. Every user has a small reserve that other owners
cannot use up.

Counts are computed from the state alone, so they are the same after a restart.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from polywire.broker.owners import ITSELF, UNOWNED, Caller, next_owner
from polywire.broker.settings import BrokerSettings
from polywire.errors import Busy, ErrorCode

# Measured memory of one item of each kind with its objects, keys and table slots, but without names and values.
GROUP_BYTES: Final = 600
MEMBER_BYTES: Final = 300
BINDING_BYTES: Final = 250
TRANSACTIONAL_ID_BYTES: Final = 500
WRITER_BYTES: Final = 300
READER_BYTES: Final = 400
POSITION_BYTES: Final = 150
NUMBER_BYTES: Final = 100  # memory of an integer in a dictionary with integer keys
KEY_BYTES: Final = 200
AGGREGATE_BYTES: Final = 300
EVENT_BYTES: Final = 8


class Kind(Enum):
    """Kinds of state. The values are used in messages."""

    __hash__ = object.__hash__  # members are singletons; an enum's own hash is a Python call for every look-up

    GROUPS = "groups"
    MEMBERS = "members of groups"
    BINDINGS = "names of groups"
    TRANSACTIONAL_IDS = "transactional ids"
    WRITERS = "writers"
    READERS = "consumers and groups with offsets"
    POSITIONS = "positions"
    KEYS = "keys of a protocol's state"
    AGGREGATES = "aggregates"
    EVENTS = "events"
    SNAPSHOT_BYTES = "bytes of aggregates' snapshots"
    TOPICS = "topics"
    PARTITIONS = "partitions"


BULK: Final = frozenset({Kind.TOPICS, Kind.PARTITIONS, Kind.AGGREGATES, Kind.EVENTS, Kind.SNAPSHOT_BYTES})
"""Kinds of which one owner often creates most items. One owner may use a larger share of their limits."""


class Usage:
    """Number of items of each kind of state, and their bytes, by owner.

    Attributes:
        bytes: bytes of all owners together.
    """

    __slots__ = ("_bytes", "_counts", "_totals", "bytes")

    def __init__(self) -> None:
        self._counts: dict[tuple[Kind, int], int] = {}
        self._totals: dict[Kind, int] = {}
        self._bytes: dict[int, int] = {}
        self.bytes = 0

    def charge(self, kind: Kind, owner: int, count: int, size: int) -> None:
        """Add items of a kind, with ``size`` bytes, to an owner. Negative numbers subtract."""
        if count:
            key = kind, owner
            left = self._counts.get(key, 0) + count
            if left:
                self._counts[key] = left
            else:
                self._counts.pop(key, None)
            self._totals[kind] = self._totals.get(kind, 0) + count
        if size:
            self.bytes += size
            left = self._bytes.get(owner, 0) + size
            if left:
                self._bytes[owner] = left
            else:
                self._bytes.pop(owner, None)

    def count(self, kind: Kind) -> int:
        return self._totals.get(kind, 0)

    def count_of(self, kind: Kind, owner: int) -> int:
        return self._counts.get((kind, owner), 0)

    def bytes_of(self, owner: int) -> int:
        return self._bytes.get(owner, 0)

    def owners(self) -> dict[int, int]:
        return dict(self._bytes)


class Quotas:
    """Checks whether a user or address may create more topics, groups and other state."""

    __slots__ = ("_limits", "_settings", "usage")

    def __init__(self, usage: Usage, settings: BrokerSettings) -> None:
        self.usage: Final = usage
        self._settings: Final = settings
        self._limits: Final = {
            Kind.GROUPS: settings.groups_max,
            Kind.MEMBERS: settings.members_total_max,
            Kind.BINDINGS: settings.groups_max,
            Kind.TRANSACTIONAL_IDS: settings.transactional_ids_max,
            Kind.WRITERS: settings.writers_max,
            Kind.READERS: settings.position_owners_max,
            Kind.POSITIONS: settings.positions_max,
            Kind.KEYS: settings.wire_state_keys_max,
            Kind.AGGREGATES: settings.aggregates_max,
            Kind.EVENTS: settings.events_max,
            Kind.SNAPSHOT_BYTES: settings.aggregate_snapshots_bytes_max,
            Kind.TOPICS: settings.topics_max,
            Kind.PARTITIONS: settings.partitions_max,
        }

    def admit(self, kind: Kind, by: Caller, size: int, *, count: int = 1, owner: int = UNOWNED) -> None:
        """Raise Busy(BUSY) if an owner's quota does not permit ``count`` more items of a kind, with ``size`` bytes.

        Args:
            owner: user or address against whose quota they count. UNOWNED stands for the caller.
        """
        if by is ITSELF:
            return
        whose, usage, settings = next_owner(owner, by), self.usage, self._settings
        if count > 0:
            limit = self._limits[kind]
            own, share = usage.count_of(kind, whose) + count, self.share(limit, kind)
            reserved = settings.reserved_bytes if kind is Kind.SNAPSHOT_BYTES else settings.reserved_count
            self._check(kind.value, whose, own, usage.count(kind) + count, limit, share, reserved)
        if size > 0:
            own = usage.bytes_of(whose) + size
            what = f"bytes of state, including these {kind.value}"
            limit = settings.state_bytes_max
            self._check(what, whose, own, usage.bytes + size, limit, self.share(limit), settings.reserved_bytes)

    def _check(self, what: str, owner: int, own: int, total: int, limit: int, share: int, reserved: int) -> None:
        if owner != UNOWNED and own > share:
            raise Busy(ErrorCode.BUSY, f"one user or address has too many {what} limit={share}")
        if total > limit and (owner <= UNOWNED or own > reserved):
            raise Busy(ErrorCode.BUSY, f"too many {what} limit={limit}")

    def share(self, limit: int, kind: Kind | None = None) -> int:
        settings = self._settings
        part = settings.bulk_share if kind in BULK else settings.owner_share
        return max(int(limit * part), 1)
