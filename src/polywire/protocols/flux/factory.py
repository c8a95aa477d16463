"""The FLUX protocol for the server: recognise connections, open sessions, and share state between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from polywire.broker.permissions import Action
from polywire.protocols.flux import fetch, groups, produce, replicas, topics
from polywire.protocols.flux.carrying import CarryingFluxSession
from polywire.protocols.flux.context import WIRE, FluxBroker, FluxSettings
from polywire.protocols.flux.linked import LinkedFluxSession
from polywire.protocols.flux.messages import VERSION, WHITE, text_of
from polywire.protocols.flux.metadata import FluxState
from polywire.protocols.flux.reply_slots import ScratchArrays
from polywire.protocols.flux.session import Command, FluxSession
from polywire.protocols.runtime.commands import table
from polywire.protocols.runtime.links import CarryingFactory
from polywire.protocols.runtime.session import Output

DATA_COMMANDS: Final[Mapping[str, Command]] = table(
    Command("PING", topics.ping, (Action.CONNECT,), pipelined=True),
    Command("PRODUCE", produce.produce, (Action.PRODUCE, Action.TOPIC_CREATE), topic_at=0, pipelined=True),
    Command("CONSUME", fetch.consume, (Action.FETCH, Action.TOPIC_CREATE), topic_at=0),
    Command("JOIN", groups.join, (Action.GROUP_JOIN,), topic_at=1, pipelined=True),
    Command("SYNC", groups.sync, (Action.GROUP_JOIN,), topic_at=1, pipelined=True),
    Command("HEARTBEAT", groups.heartbeat, (Action.GROUP_JOIN,), topic_at=1, pipelined=True),
    Command("LEAVE", groups.leave, (Action.GROUP_JOIN,), topic_at=1, pipelined=True),
    Command("COMMIT", groups.commit, (Action.OFFSET_COMMIT,), topic_at=1, pipelined=True),
    Command("OFFSET", groups.offset, (Action.OFFSET_FETCH,), topic_at=1, pipelined=True),
    Command("REPLICA_FETCH", replicas.replica_fetch, (Action.CLUSTER_ALTER,)),
    Command("BROKER_FETCH", fetch.broker_fetch, (Action.FETCH,), topic_at=0),
    Command("BROKER_REPLICA_ACK", replicas.broker_replica_ack, (Action.CLUSTER_ALTER,)),
)

ADMIN_COMMANDS: Final[Mapping[str, Command]] = table(
    Command("SET_PARTITION_ROLE", topics.set_partition_role, (Action.CLUSTER_ALTER, Action.TOPIC_CREATE)),
    Command(
        "ADMIN_CREATE_TOPIC", topics.create_topic, (Action.TOPIC_CREATE, Action.TOPIC_ALTER), topic_at=0, pipelined=True
    ),
    Command("ADMIN_REGISTER_BROKER", topics.register_broker, (Action.CLUSTER_ALTER,), pipelined=True),
    Command("ADMIN_BROKER_HEARTBEAT", topics.broker_heartbeat, (Action.CLUSTER_ALTER,), pipelined=True),
    Command("ADMIN_SET_PARTITION_LEADER", topics.set_partition_leader, (Action.CLUSTER_ALTER,)),
    Command("ADMIN_GET_METADATA", topics.get_metadata, (Action.TOPIC_LIST,), pipelined=True),
    Command("ADMIN_FENCE_BROKER", topics.fence_broker, (Action.CLUSTER_ALTER,), pipelined=True),
    Command("ADMIN_UNFENCE_BROKER", topics.unfence_broker, (Action.CLUSTER_ALTER,), pipelined=True),
    Command("ADMIN_RECONCILE_BROKER_HEALTH", topics.reconcile_broker_health, (Action.CLUSTER_ALTER,), pipelined=True),
    Command("ADMIN_ELECT_TOPIC_LEADERS", topics.elect_topic_leaders, (Action.CLUSTER_ALTER,)),
)

_VERSION: Final = text_of(VERSION)
# bytes for white space and the version token of the first line; no client sends more white space
_PREFIX_BYTES: Final = 64


class FluxFactory:
    """Implements ``protocols.runtime.session.SessionFactory``."""

    __slots__ = ("_broker", "_scratch", "commands", "state")

    def __init__(self, broker: FluxBroker, settings: FluxSettings | None = None) -> None:
        self._broker = broker
        self.state = FluxState(broker, settings or FluxSettings())
        self._scratch = ScratchArrays()
        self.commands = {**DATA_COMMANDS, **(ADMIN_COMMANDS if self.state.settings.admin else {})}

    @property
    def wire(self) -> str:
        return WIRE

    def recognise(self, prefix: bytes) -> bool | None:
        """Return whether the first line begins with ``V1`` and a pipe; white space is allowed around the token.

        Returns None if the bytes are too few to decide. In other protocols, ``V1|`` may be three bytes of a length
        whose fourth byte is 0 or 1. Such a control character after the pipe is never part of a line.
        """
        text = text_of(prefix).lstrip(WHITE)
        undecided = None if len(prefix) < _PREFIX_BYTES else False
        if not text.startswith(_VERSION):
            return undecided if _VERSION.startswith(text) else False
        behind = text.removeprefix(_VERSION).lstrip(WHITE)
        if not behind.startswith("|"):
            return False if behind else undecided
        following = behind[1:2]
        return following.isprintable() or following in WHITE if following else undecided

    def open(self, output: Output, resume: Callable[[], None]) -> FluxSession:
        return FluxSession(self._broker, self.state, self._scratch, self.commands, output, resume)


class FluxLinkFactory(FluxFactory):
    """Opens sessions for connections from other processes of this broker.

    ``inside`` is the factory for clients. The sessions share all state with the sessions of that factory.
    """

    __slots__ = ()

    def __init__(self, inside: FluxFactory) -> None:
        self._broker = inside._broker
        self.state = inside.state
        self._scratch = inside._scratch
        self.commands = inside.commands

    def open(self, output: Output, resume: Callable[[], None]) -> FluxSession:
        return LinkedFluxSession(self._broker, self.state, self._scratch, self.commands, output, resume)


class CarryingFluxFactory(CarryingFactory[FluxFactory]):
    """Opens sessions that forward requests to other shards."""

    __slots__ = ()

    def open(self, output: Output, resume: Callable[[], None]) -> CarryingFluxSession:
        return CarryingFluxSession(self._shards, self._inside.commands, output, resume, self._inside.open)
