"""The FLUX wire as the server sees it: recognises its connections and opens sessions for them.

Promises: everything that sessions of one listener share (commands, metadata, scratch arrays) is made once. Must not know: sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from polywire.broker.broker import Broker
from polywire.protocols.base import Output
from polywire.protocols.flux import admin, groups, records
from polywire.protocols.flux.answers import Scratch
from polywire.protocols.flux.messages import VERSION, WHITE
from polywire.protocols.flux.metadata import WIRE, FluxSettings, FluxState
from polywire.protocols.flux.session import Command, FluxSession

DATA_COMMANDS: Final[Mapping[str, Command]] = {
    "PRODUCE": Command(records.produce),
    "CONSUME": Command(records.consume, settled=True),
    "JOIN": Command(groups.join),
    "SYNC": Command(groups.sync),
    "HEARTBEAT": Command(groups.heartbeat),
    "LEAVE": Command(groups.leave),
    "COMMIT": Command(groups.commit),
    "OFFSET": Command(groups.offset),
    "REPLICA_FETCH": Command(records.replica_fetch, settled=True),
    "BROKER_FETCH": Command(records.broker_fetch, settled=True),
    "BROKER_REPLICA_ACK": Command(records.broker_replica_ack, settled=True),
}

ADMIN_COMMANDS: Final[Mapping[str, Command]] = {
    "SET_PARTITION_ROLE": Command(admin.set_partition_role, settled=True),
    "ADMIN_CREATE_TOPIC": Command(admin.create_topic),
    "ADMIN_REGISTER_BROKER": Command(admin.register_broker),
    "ADMIN_BROKER_HEARTBEAT": Command(admin.broker_heartbeat),
    "ADMIN_SET_PARTITION_LEADER": Command(admin.set_partition_leader, settled=True),
    "ADMIN_GET_METADATA": Command(admin.get_metadata),
    "ADMIN_FENCE_BROKER": Command(admin.fence_broker),
    "ADMIN_UNFENCE_BROKER": Command(admin.unfence_broker),
    "ADMIN_RECONCILE_BROKER_HEALTH": Command(admin.reconcile_broker_health),
    "ADMIN_ELECT_TOPIC_LEADERS": Command(admin.elect_topic_leaders, settled=True),
}

_PREFIX_BYTES: Final = 64  # white space and version token of the first line; a longer run of white space is nobody's


class FluxFactory:
    """Implements ``protocols.base.SessionFactory``."""

    __slots__ = ("_broker", "_commands", "_scratch", "state")

    def __init__(self, broker: Broker, settings: FluxSettings | None = None) -> None:
        self._broker = broker
        self.state: Final = FluxState(broker, settings or FluxSettings())
        self._scratch = Scratch()
        self._commands = {**DATA_COMMANDS, **(ADMIN_COMMANDS if self.state.settings.admin else {})}

    @property
    def wire(self) -> str:
        """Name of the wire."""
        return WIRE

    def recognise(self, prefix: bytes) -> bool | None:
        """Whether the first line begins with ``V1`` and a pipe, white space allowed around the token."""
        at = 0
        while (match := WHITE.match(prefix, at)) is not None:
            at = match.end()
        for expected in VERSION:
            if at == len(prefix):
                return None if len(prefix) < _PREFIX_BYTES else False
            if prefix[at] != expected:
                return False
            at += 1
        while (match := WHITE.match(prefix, at)) is not None:
            at = match.end()
        if at == len(prefix):
            return None if len(prefix) < _PREFIX_BYTES else False
        return prefix[at] == 0x7C

    def open(self, output: Output, resume: Callable[[], None]) -> FluxSession:
        """A session for a new connection."""
        return FluxSession(self._broker, self.state, self._scratch, self._commands, output, resume)
