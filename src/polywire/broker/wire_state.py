"""State of single protocols: values under keys, which the broker does not interpret.

A value that a client stores is charged to the client's quota. A value that the protocol itself stores is not charged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from polywire.broker.changes import WireStateSet
from polywire.broker.owners import ITSELF, Caller, heir
from polywire.broker.quotas import Kind
from polywire.broker.settings import BrokerSettings
from polywire.broker.state import State, key_size
from polywire.broker.write_batch import WriteBatchVerbs
from polywire.errors import Busy, ErrorCode, Invalid
from polywire.log.base import Completion
from polywire.types import Level


def wire_change(
    state: State, settings: BrokerSettings, by: Caller, *, wire: str, key: str, value: bytes | None
) -> WireStateSet:
    """Return the change that stores a value, or removes it if it is None. Raises as ``set_wire_state``."""
    kept, owner = state.wire_state(wire), state.wire_owner(wire, key)
    if value is None:
        return WireStateSet(wire, key, None)
    if len(value) > settings.wire_state_bytes_max:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"value is too large bytes={len(value)} limit={settings.wire_state_bytes_max}",
        )
    new = key not in kept
    if new and by is ITSELF and len(kept) >= settings.wire_state_keys_max:
        raise Busy(ErrorCode.BUSY, f"too many keys wire={wire} limit={settings.wire_state_keys_max}")
    size = key_size(key, value) if new else len(value) - len(kept[key])
    state.quotas.admit(Kind.KEYS, by, size, count=int(new), owner=owner)
    return WireStateSet(wire, key, value, heir(owner, by))


class WireStateVerbs(WriteBatchVerbs, Protocol):
    """A base of ``Broker``: the verbs use its state."""

    __slots__ = ()

    settings: BrokerSettings

    def wire_state(self, wire: str) -> Mapping[str, bytes]:
        """Return a live view of a protocol's values."""
        return self._state.wire_state(wire)

    def set_wire_state(
        self,
        wire: str,
        key: str,
        value: bytes | None,
        *,
        by: Caller = ITSELF,
        level: Level = Level.WRITTEN,
        done: Completion[int] | None = None,
    ) -> None:
        """Store a value for a protocol; None removes it. ``by``: the owner of the value, by default the protocol
        itself.

        Raises Invalid(INVALID_REQUEST), and Busy(BUSY) if there are too many keys, or one owner has too many bytes.
        """
        change = wire_change(self._state, self.settings, by, wire=wire, key=key, value=value)
        self.change_all([change], level=level, done=done)

    def wire_owner(self, wire: str, key: str) -> int:
        """Return the owner of a protocol's value."""
        return self._state.wire_owner(wire, key)
