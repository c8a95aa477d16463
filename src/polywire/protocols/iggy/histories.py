"""Histories of partitions, as clients since protocol 0.12 see them: routes, contexts, and requests that name a history.

Promises: a partition that was deleted and created again never has the number of before; a request for a history that is gone is refused.
Must not know: frames, messages.

spec: iggy#d4-contexts, iggy#d4-routes
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from polywire.broker.actions import Action
from polywire.broker.topics import Partition
from polywire.protocols.iggy import errors
from polywire.protocols.iggy.lookup import partition_at, topic_of
from polywire.protocols.iggy.messages import Reader, Refused
from polywire.protocols.iggy.reply_slots import Answer
from polywire.protocols.iggy.session import IggySession

REPLICA: Final = 0  # the id of the one node that clients are shown
ONLY_NODE: Final = bytes((1, REPLICA))  # a list of nodes
VIEW: Final = 0  # the one node leads every partition, always
NO_CONTEXT: Final = bytes(24)
_CONTEXT: Final = Struct("<QQQ")
_ROUTE: Final = Struct("<QQIIB")


def incarnation_of(partition: Partition) -> int:
    """Return the number of a partition's history; 0 is left for clients that know none."""
    return partition.incarnation + 1


def context_bytes(partition: Partition, generation: int = 0, position: int = 0) -> bytes:
    """Return a partition's context. generation: of the group that polls it. position: of the change that clients wait for."""
    return _CONTEXT.pack(incarnation_of(partition), generation, position)


def check_history(session: IggySession, answer: Answer, partition: Partition) -> None:
    """Raise Refused for a request that means an earlier partition of the same number."""
    named = session.named_incarnation(answer)
    if named and named != incarnation_of(partition):
        raise Refused(errors.HISTORY_GONE)


def get_route(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    """GET_PARTITION_ROUTE: every partition is led by the node that was asked."""
    del answer
    topic = topic_of(session, reader, Action.TOPIC_DESCRIBE)
    partition = partition_at(topic, reader.u32())
    if reader.left:
        raise Refused(errors.UNKNOWN_COMMAND)
    position = session.broker.clock.now_us()  # as the replies to changes have it, which are no later
    return _ROUTE.pack(incarnation_of(partition), position, VIEW, len(topic.partitions), REPLICA)
