"""The FLUX wire as the server sees it: recognises its connections and opens sessions for them.

Promises: everything that sessions of one listener share (commands, metadata, scratch arrays) is made once. Must not know: sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from polywire.broker.actions import Action
from polywire.broker.broker import Broker
from polywire.protocols.flux import fetch, groups, produce, replicas, topics
from polywire.protocols.flux.context import WIRE, FluxSettings
from polywire.protocols.flux.messages import VERSION, WHITE, text_of
from polywire.protocols.flux.metadata import FluxState
from polywire.protocols.flux.reply_slots import Scratch
from polywire.protocols.flux.session import Command, FluxSession
from polywire.protocols.runtime.session import Output

DATA_COMMANDS: Final[Mapping[str, Command]] = {
    "PING": Command(topics.ping, (Action.CONNECT,)),
    "PRODUCE": Command(produce.produce, (Action.PRODUCE, Action.TOPIC_CREATE), topic_at=0),
    "CONSUME": Command(fetch.consume, (Action.FETCH, Action.TOPIC_CREATE), topic_at=0, settled=True),
    "JOIN": Command(groups.join, (Action.GROUP_JOIN,), topic_at=1),
    "SYNC": Command(groups.sync, (Action.GROUP_JOIN,), topic_at=1),
    "HEARTBEAT": Command(groups.heartbeat, (Action.GROUP_JOIN,), topic_at=1),
    "LEAVE": Command(groups.leave, (Action.GROUP_JOIN,), topic_at=1),
    "COMMIT": Command(groups.commit, (Action.OFFSET_COMMIT,), topic_at=1),
    "OFFSET": Command(groups.offset, (Action.OFFSET_FETCH,), topic_at=1),
    "REPLICA_FETCH": Command(replicas.replica_fetch, (Action.CLUSTER_ALTER,), settled=True),
    "BROKER_FETCH": Command(fetch.broker_fetch, (Action.FETCH,), topic_at=0, settled=True),
    "BROKER_REPLICA_ACK": Command(replicas.broker_replica_ack, (Action.CLUSTER_ALTER,), settled=True),
}

ADMIN_COMMANDS: Final[Mapping[str, Command]] = {
    "SET_PARTITION_ROLE": Command(topics.set_partition_role, (Action.CLUSTER_ALTER, Action.TOPIC_CREATE), settled=True),
    "ADMIN_CREATE_TOPIC": Command(topics.create_topic, (Action.TOPIC_CREATE, Action.TOPIC_ALTER), topic_at=0),
    "ADMIN_REGISTER_BROKER": Command(topics.register_broker, (Action.CLUSTER_ALTER,)),
    "ADMIN_BROKER_HEARTBEAT": Command(topics.broker_heartbeat, (Action.CLUSTER_ALTER,)),
    "ADMIN_SET_PARTITION_LEADER": Command(topics.set_partition_leader, (Action.CLUSTER_ALTER,), settled=True),
    "ADMIN_GET_METADATA": Command(topics.get_metadata, (Action.TOPIC_LIST,)),
    "ADMIN_FENCE_BROKER": Command(topics.fence_broker, (Action.CLUSTER_ALTER,)),
    "ADMIN_UNFENCE_BROKER": Command(topics.unfence_broker, (Action.CLUSTER_ALTER,)),
    "ADMIN_RECONCILE_BROKER_HEALTH": Command(topics.reconcile_broker_health, (Action.CLUSTER_ALTER,)),
    "ADMIN_ELECT_TOPIC_LEADERS": Command(topics.elect_topic_leaders, (Action.CLUSTER_ALTER,), settled=True),
}

_VERSION: Final = text_of(VERSION)
_PREFIX_BYTES: Final = 64  # white space and version token of the first line; a longer run of white space is nobody's


class FluxFactory:
    """Implements ``protocols.runtime.session.SessionFactory``."""

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
        text = text_of(prefix).lstrip(WHITE)
        undecided = None if len(prefix) < _PREFIX_BYTES else False
        if not text.startswith(_VERSION):
            return undecided if _VERSION.startswith(text) else False
        behind = text.removeprefix(_VERSION).lstrip(WHITE)
        return behind.startswith("|") if behind else undecided

    def open(self, output: Output, resume: Callable[[], None]) -> FluxSession:
        """A session for a new connection."""
        return FluxSession(self._broker, self.state, self._scratch, self._commands, output, resume)
