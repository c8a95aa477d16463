"""The history of a broker's state: one entry for the state after each change.

After a stop, the broker must have recovered exactly one of these states, not an earlier one than the last acknowledged
state. So the check of a start needs no separate rules for topics, offsets, groups and transactions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from polywire.types import Level
from tests.sim.promises import Acknowledged, require

Key = tuple[str | int, ...]
"""Names one part of a state: its kind, its topic, and its name in that topic."""

State = Mapping[Key, object]


class History:
    """Guards: ``latest`` is the state after ``moment`` changes since the last start."""

    __slots__ = ("_base", "_changes", "acknowledged", "latest", "moment")

    def __init__(self) -> None:
        self.moment = 0
        self.latest: State = {}
        self.acknowledged = Acknowledged()
        self._base: State = {}
        self._changes: Final[dict[Key, list[tuple[int, object]]]] = {}

    def note(self, state: State) -> State:
        """Add a moment with this state; return what differs, None for removed parts."""
        self.moment += 1
        differing: dict[Key, object] = {}
        for key in {**self.latest, **state}:
            value = state.get(key)
            if self.latest.get(key) != value:
                differing[key] = value
                self._changes.setdefault(key, []).append((self.moment, value))
        self.latest = state
        return differing

    def acknowledge(self, moment: int, level: Level) -> None:
        """Note that everything up to this moment is stored."""
        self.acknowledged.note(moment, level)

    def show(self, key: Key, value: object) -> None:
        """Note that a client can see this value, which may be an older one: it must survive every stop from now on."""
        moments = self._moments(key, value)
        require(moments, "clients see values that were stored", key=key, value=value)
        self.acknowledge((moments & -moments).bit_length() - 1, Level.SYNCED)

    def settle(self, found: State, *, powerless: bool) -> int:
        """Check the state that a start recovered; return its moment, at which the next history begins. Raises
        Violation.
        """
        possible = (2 << self.moment) - 1
        for key in {**self._base, **dict.fromkeys(self._changes), **found}:
            left = possible & self._moments(key, found.get(key))
            if not left:
                then = [value for at, value in self._changes.get(key, []) if possible >> at][-3:]
                require(
                    False, "a start finds one moment", key=key, found=found.get(key), was=self._base.get(key), then=then
                )
            possible = left
        moment, floor = possible.bit_length() - 1, self.acknowledged.floor(powerless=powerless)
        require(
            moment >= floor,
            "what was acknowledged is there",
            found=moment,
            acknowledged=floor,
            lost=self._lost(moment, floor),
        )
        self.begin(found)
        return moment

    def begin(self, state: State) -> None:
        """Begin with this stored state."""
        self.moment, self.acknowledged = 0, Acknowledged()
        self.latest = self._base = state
        self._changes.clear()

    def _moments(self, key: Key, value: object) -> int:
        """Return the moments at which a part had this value, as a bit mask."""
        since, was, found = 0, self._base.get(key), 0
        for at, now in self._changes.get(key, []):
            if was == value:
                found |= (1 << at) - (1 << since)
            since, was = at, now
        return found | ((2 << self.moment) - (1 << since) if was == value else 0)

    def _lost(self, moment: int, floor: int) -> list[Key]:
        return [key for key, changes in self._changes.items() if any(moment < at <= floor for at, _ in changes)]
