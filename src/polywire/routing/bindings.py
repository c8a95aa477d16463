"""The topics to which other processes have bound group names, for protocols whose group names do not include a topic.

A process reports its bindings to all others. If two processes have bound one name, the binding with the higher version
wins, or else that of the lower shard. The other process removes its binding and the protocol's members.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from polywire.broker.state import Binding
from polywire.errors import BrokerError
from polywire.routing.messages import Topics, Value

if TYPE_CHECKING:
    from polywire.broker.broker import Broker

WIRE: Final = "bindings"  # the values with which bindings are reported
_BETWEEN: Final = "\0"  # between the protocol and the group name in a key
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Binding)


def value_of(wire: str, name: str, binding: Binding | None) -> Value:
    """Return the value that reports a binding, or its removal."""
    return Value(WIRE, f"{wire}{_BETWEEN}{name}", None if binding is None else _encoder.encode(binding))


class Bindings:
    """The bindings of other processes."""

    def __init__(self, local: Broker, own: int) -> None:
        self._groups: Final = local.groups
        self._own: Final = own
        self._reported: Final[dict[int, dict[str, Binding]]] = {}

    def apply(self, shard: int, report: Topics) -> None:
        """Apply the bindings in a report of a shard."""
        known = self._reported.setdefault(shard, {})
        changed = {value.key: value.value for value in report.values if value.wire == WIRE}
        if report.begins:
            changed = {**dict.fromkeys(known), **changed}
        for key, value in changed.items():
            known.pop(key, None)
            if value is not None:
                known[key] = _decoder.decode(value)
            self._choose(key)

    def _choose(self, key: str) -> None:
        """Let the groups of this process use the newest binding of a name by another process."""
        wire, _, name = key.partition(_BETWEEN)
        found = [
            (self._reported[shard][key].version, -shard) for shard in self._reported if key in self._reported[shard]
        ]
        if not found:
            self._groups.remote_bindings.pop((wire, name), None)
            return
        version, shard = max(found)
        self._groups.remote_bindings[wire, name] = self._reported[-shard][key]
        own = self._groups.binding(wire, name)
        if own is not None and (own.version, -self._own) < (version, shard):
            with suppress(BrokerError):  # the disk is full: the name stays bound twice
                self._groups.release(wire, name)
