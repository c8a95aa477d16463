"""The entry point of the FLUX protocol: detect FLUX connections and create their sessions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from polywire.broker.permissions import Action
from polywire.log.base import Completion
from polywire.protocols.flux import fetch, groups, produce, replicas, topics
from polywire.protocols.flux.context import WIRE, FluxBroker, FluxRouter, FluxSettings
from polywire.protocols.flux.messages import VERSION, WHITE, text_of
from polywire.protocols.flux.metadata import FluxState
from polywire.protocols.flux.reply_slots import ScratchArrays
from polywire.protocols.flux.routed import ForwardedBatches, ForwardedFluxSession, RoutedFluxSession
from polywire.protocols.flux.session import Command, FluxSession
from polywire.protocols.runtime.commands import table
from polywire.protocols.runtime.forwarded import ForwardedRequests, Sender
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
    """Opens sessions of the FLUX protocol. Implements ``protocols.runtime.session.SessionFactory``."""

    __slots__ = ("_broker", "_router", "_scratch", "_waiting", "commands", "state")

    def __init__(
        self, broker: FluxBroker, settings: FluxSettings | None = None, *, router: FluxRouter | None = None
    ) -> None:
        """``broker`` has the topics of this process.

        ``router`` is the broker of all processes, if there are several.
        """
        self._broker = broker
        self._router = router
        self._waiting = ForwardedBatches(broker)
        self.state = FluxState(broker, settings or FluxSettings(), router)
        self._scratch = ScratchArrays()
        self.commands = {**DATA_COMMANDS, **(ADMIN_COMMANDS if self.state.settings.admin else {})}

    @property
    def wire(self) -> str:
        return WIRE

    def recognise(self, prefix: bytes) -> bool | None:
        """Return whether the first line begins with ``V1`` and a pipe; white space around ``V1`` is allowed.

        Returns None if more bytes are needed. In other protocols, ``V1|`` can be the first three bytes of a length,
        whose fourth byte is then 0 or 1. No FLUX line has such a control character after the pipe.
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
        shared = self._broker, self.state, self._scratch, self.commands
        if self._router is not None:
            return RoutedFluxSession(self._router, *shared, output, resume)
        return FluxSession(*shared, output, resume)

    def execute(self, sender: Sender, requests: memoryview, then: Completion[bytes]) -> ForwardedRequests:
        """Execute requests of a client that is connected to another process.

        Raises Denied if its user was deleted.
        """
        certified = None if sender.user is None else self._broker.access.vouched(sender.user, sender.peer)
        run = ForwardedRequests(self._broker.loop, requests, sender.peer, certified, then)
        return run.run(
            partial(ForwardedFluxSession, self._waiting, self._broker, self.state, self._scratch, self.commands)
        )
