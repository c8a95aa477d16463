"""What single wires keep beside everything else: a value under a key, opaque here.

Promises: a value has an owner, whose share it counts for; what a wire keeps for itself counts for nobody's. Must not know: what wires keep.
"""

from __future__ import annotations

from polywire.broker.changes import WireStateSet
from polywire.broker.owners import ITSELF, Caller, heir
from polywire.broker.quotas import Kind
from polywire.broker.settings import BrokerSettings
from polywire.broker.state import State, key_size
from polywire.errors import Busy, ErrorCode, Invalid


def wire_change(
    state: State, settings: BrokerSettings, by: Caller, *, wire: str, key: str, value: bytes | None
) -> WireStateSet:
    """The change that keeps a value, or with None removes it. Raises as ``Broker.set_wire_state``."""
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
