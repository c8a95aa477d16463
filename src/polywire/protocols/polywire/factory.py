"""The entry point of the `polywire` protocol: detect its connections and create their sessions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Final, cast

from polywire.broker.permissions import Action
from polywire.protocols.polywire import groups, produce, queues, sealed_ranges, topics, transactions
from polywire.protocols.polywire.codec import NAME
from polywire.protocols.polywire.messages import Verb
from polywire.protocols.polywire.routed import RoutedPolywireBroker, RoutedSession, routed
from polywire.protocols.polywire.session import Command, PolywireSession
from polywire.protocols.runtime.commands import table
from polywire.protocols.runtime.session import Output, begins_with

if TYPE_CHECKING:
    from polywire.protocols.polywire.context import PolywireBroker

WIRE: Final = "polywire"
COMMANDS: Final[Mapping[int, Command]] = table(
    Command(Verb.PING, PolywireSession.ping, (Action.CONNECT,)),
    Command(Verb.CANCEL, PolywireSession.cancel, (Action.CONNECT,)),
    Command(Verb.LOGIN, PolywireSession.log_in, (Action.CONNECT,)),
    Command(Verb.TOPICS, topics.list_topics, (Action.TOPIC_LIST,)),
    Command(Verb.CREATE_TOPIC, topics.create, (Action.TOPIC_CREATE,)),
    Command(Verb.DESCRIBE, topics.describe, (Action.TOPIC_DESCRIBE,)),
    Command(Verb.GROW_TOPIC, topics.grow, (Action.TOPIC_ALTER,)),
    Command(Verb.CONFIGURE_TOPIC, topics.configure, (Action.TOPIC_ALTER,)),
    Command(Verb.LINK_TOPIC, topics.link, (Action.TOPIC_LINK,)),
    Command(Verb.PURGE_TOPIC, topics.purge, (Action.TOPIC_PURGE,)),
    Command(Verb.DELETE_TOPIC, topics.delete, (Action.TOPIC_DELETE,)),
    Command(Verb.BEGIN_PARTITION, topics.begin, (Action.TOPIC_CREATE,)),
    Command(Verb.BOUNDS, topics.ask_bounds, (Action.TOPIC_DESCRIBE,)),
    Command(Verb.FETCH, PolywireSession.fetch, (Action.FETCH,)),
    Command(Verb.PRODUCE, produce.produce, (Action.PRODUCE, Action.TOPIC_CREATE)),
    Command(Verb.STAGE, produce.stage, (Action.PRODUCE,)),
    Command(Verb.PUBLISH, produce.publish, (Action.STAGED_PUBLISH, Action.PRODUCE)),
    Command(Verb.ABANDON, produce.abandon, (Action.STAGED_PUBLISH, Action.PRODUCE)),
    Command(Verb.BEGIN_EPOCH, produce.begin_epoch, (Action.STAGED_PUBLISH,)),
    Command(Verb.LOCATE, sealed_ranges.locate, (Action.FETCH,)),
    Command(Verb.COMMIT, groups.commit, (Action.OFFSET_COMMIT, Action.POSITION_COMMIT)),
    Command(Verb.POSITION, groups.ask_position, (Action.OFFSET_FETCH, Action.POSITION_FETCH)),
    Command(Verb.JOIN, groups.join, (Action.GROUP_JOIN,)),
    Command(Verb.SYNC, groups.sync, (Action.GROUP_JOIN,)),
    Command(Verb.HEARTBEAT, groups.heartbeat, (Action.GROUP_JOIN,)),
    Command(Verb.LEAVE, groups.leave, (Action.GROUP_JOIN,)),
    Command(Verb.GROUPS, groups.list_groups, (Action.GROUP_LIST,)),
    Command(Verb.DELETE_GROUP, groups.delete, (Action.GROUP_DELETE,)),
    Command(Verb.ACQUIRE, queues.acquire, (Action.FETCH, Action.GROUP_JOIN)),
    Command(Verb.ACKNOWLEDGE, queues.acknowledge, (Action.FETCH, Action.GROUP_JOIN)),
    Command(Verb.QUEUES, queues.list_queues, (Action.GROUP_LIST,)),
    Command(Verb.CONFIGURE_QUEUE, queues.configure, (Action.GROUP_CREATE,)),
    Command(Verb.RESET_QUEUE, queues.reset, (Action.OFFSET_COMMIT,)),
    Command(Verb.DELETE_QUEUE, queues.delete, (Action.GROUP_DELETE,)),
    Command(Verb.TRANSACTIONS, transactions.list_transactions, (Action.TRANSACTION,)),
    Command(Verb.DELETE_TRANSACTION, transactions.delete_transaction, (Action.TRANSACTION,)),
    Command(Verb.WRITERS, transactions.list_writers, (Action.STAGED_PUBLISH,)),
    Command(Verb.DELETE_WRITER, transactions.delete_writer, (Action.STAGED_PUBLISH,)),
)
ROUTED_COMMANDS: Final = routed(COMMANDS)


class PolywireFactory:
    """Opens sessions of the ``polywire`` protocol. Implements ``protocols.runtime.session.SessionFactory``."""

    __slots__ = ("_broker", "_round_robin")

    def __init__(self, broker: PolywireBroker) -> None:
        self._broker: Final = broker
        self._round_robin: Final = count()

    @property
    def wire(self) -> str:
        return WIRE

    def recognise(self, prefix: bytes) -> bool | None:
        """Return whether a connection begins with the protocol's name, in any version; None if more bytes are needed."""
        return begins_with(prefix, NAME)

    def open(self, output: Output, resume: Callable[[], None]) -> PolywireSession:
        return PolywireSession(self._broker, COMMANDS, self._round_robin, output, resume)


class RoutedPolywireFactory(PolywireFactory):
    """Opens sessions that forward requests to the other processes of the broker."""

    __slots__ = ("_router",)

    def __init__(self, router: RoutedPolywireBroker) -> None:
        super().__init__(cast("PolywireBroker", router))
        self._router: Final = router

    def open(self, output: Output, resume: Callable[[], None]) -> PolywireSession:
        return RoutedSession(self._router, ROUTED_COMMANDS, self._round_robin, output, resume)
