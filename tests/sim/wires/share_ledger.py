"""The deliveries that the members of a Kafka share group have seen: who may hold a record, and which ones have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from polywire.share_settings import AUTO_OFFSET_RESET, DELIVERIES, HEARTBEAT_INTERVAL, LOCK_DURATION, SESSION_TIMEOUT
from polywire.types import Level
from tests.sim.promises import require

GROUP: Final = "sharers"
LOCK_S: Final = 1.5
SESSION_S: Final = 3.0
DELIVERIES_MAX: Final = 4
SETTINGS: Final = {
    AUTO_OFFSET_RESET: "earliest",
    LOCK_DURATION: str(int(LOCK_S * 1000)),
    SESSION_TIMEOUT: str(int(SESSION_S * 1000)),
    HEARTBEAT_INTERVAL: "500",
    DELIVERIES: str(DELIVERIES_MAX),
}

Spot = tuple[bytes, int, int]
"""Topic id, partition and offset of a record."""


@dataclass(slots=True)
class Hold:
    """A record that a member has received. deadline: the lock lasts until then at least. is_connected: whether the
    connection of the member is open at both ends.
    """

    member: str
    count: int
    deadline: float
    is_connected: Callable[[], bool]


@dataclass(slots=True)
class Seat:
    """A member as it knows itself. beaten_at: when it sent the last heartbeat that was confirmed. lost: heartbeats
    without a response since then.
    """

    epoch: int
    beaten_at: float
    lost: int = 0


@dataclass(slots=True)
class Record:
    """The deliveries of a record. ended_at: the delivery count with which it was accepted."""

    counts: set[int] = field(default_factory=set)
    hold: Hold | None = None
    ended_at: int = 0


class ShareLedger:
    """Guards: ``seats`` and holds belong to the present process."""

    def __init__(self, durability: Level, now: Callable[[], float]) -> None:
        self._durability: Final = durability
        self._now: Final = now
        self._records: Final[dict[Spot, Record]] = {}
        self.seats: Final[dict[str, Seat]] = {}

    def started(self, *, powerless: bool) -> None:
        """Account for a start: members and locks are not stored, and a power loss may take what was not synced."""
        self.seats.clear()
        for record in self._records.values():
            record.hold = None
        if powerless and self._durability is not Level.SYNCED:
            self._records.clear()

    def restarts(self) -> None:
        """Note that the process has ended, or may refuse everything."""
        self.seats.clear()
        for record in self._records.values():
            record.hold = None

    # Members

    def is_seated(self, member: str) -> bool:
        """Return whether the broker must know a member, which has sent heartbeats in time."""
        seat = self.seats.get(member)
        return seat is not None and self._now() - seat.beaten_at < SESSION_S

    def beaten(self, member: str, sent_at: float, epoch: int, *, joins: bool) -> None:
        """Note a confirmed heartbeat."""
        seat = self.seats.get(member)
        if seat is not None and not joins:
            require(epoch >= seat.epoch, "a member epoch does not decrease", member=member, was=seat.epoch, now=epoch)
        self.seats[member] = Seat(epoch, sent_at)

    def lost(self, member: str) -> None:
        """Note a heartbeat without a response."""
        if (seat := self.seats.get(member)) is not None:
            seat.lost += 1

    def unknown(self, member: str) -> None:
        """Check that a member is unknown for a reason."""
        require(not self.is_seated(member), "a member that sends heartbeats stays", member=member)
        self.leaves(member)

    def fenced(self, member: str) -> None:
        """Check that an epoch, which the member received last, is refused for a reason."""
        seat = self.seats.get(member)
        require(seat is None or seat.lost > 1, "the epoch of a member is accepted", member=member, seat=seat)

    def leaves(self, member: str) -> None:
        """Note that a member may be gone from now on."""
        self.seats.pop(member, None)
        self.frees(member)

    # Records

    def frees(self, member: str, spots: Iterable[Spot] | None = None) -> None:
        """Note that a member may hold these records no more, or any."""
        for spot in self._records if spots is None else spots:
            record = self._records.get(spot)
            if record is not None and record.hold is not None and record.hold.member == member:
                record.hold = None

    def holds(self, member: str, spot: Spot) -> bool:
        """Return whether a member certainly holds a record."""
        record = self._records.get(spot)
        hold = None if record is None else record.hold
        return hold is not None and hold.member == member and self._is_live(hold)

    def _is_live(self, hold: Hold) -> bool:
        return hold.deadline > self._now() and self.is_seated(hold.member) and hold.is_connected()

    def delivered(self, member: str, spot: Spot, count: int, sent_at: float, is_connected: Callable[[], bool]) -> None:
        """Check a delivery to a member, which it requested at some time."""
        record = self._records.setdefault(spot, Record())
        facts = {"member": member, "spot": spot[1:], "count": count}
        require(1 <= count <= DELIVERIES_MAX, "a record is delivered as often as permitted", **facts)
        require(count not in record.counts, "a delivery count is given once", **facts, earlier=record.counts)
        record.counts.add(count)
        is_late = count < max(record.counts)
        require(is_late or not record.ended_at, "a finished record is not delivered", **facts)
        if is_late:
            return
        hold = record.hold
        require(hold is None or not self._is_live(hold), "a record has one worker", **facts, hold=hold)
        record.hold = Hold(member, count, sent_at + LOCK_S, is_connected)

    def accepted(self, spot: Spot, count: int) -> None:
        """Note that a record was accepted."""
        record = self._records.get(spot)
        if record is not None:
            later = [known for known in record.counts if known > count]
            require(not later, "a finished record is not delivered", spot=spot[1:], count=count, later=later)
            record.ended_at = count
