"""History numbers of partitions, which clients of Iggy 0.12 send (spec: iggy#d4-contexts, iggy#d4-routes).

A partition that is deleted and created again gets a new history number: the broker's incarnation number. A request with
the old number is refused. Clients get the number from replies.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from polywire.broker.permissions import Action
from polywire.broker.topics import Partition
from polywire.protocols.iggy import errors
from polywire.protocols.iggy.context import Poller
from polywire.protocols.iggy.lookup import partition_at, topic_of
from polywire.protocols.iggy.messages import Refused
from polywire.protocols.iggy.reader import Reader
from polywire.protocols.iggy.reply_slots import Answer
from polywire.protocols.iggy.session import IggySession

REPLICA: Final = 0  # id of the only node that the broker reports to clients
ONLY_NODE: Final = bytes((1, REPLICA))  # a list that contains only this node
VIEW: Final = 0  # the view number, which never changes because this node always leads every partition
NO_CONTEXT: Final = bytes(24)
_CONTEXT: Final = Struct("<QQQ")
_ROUTE: Final = Struct("<QQIIB")


def incarnation_of(partition: Partition) -> int:
    """Return the partition's incarnation number. It is never 0, which clients send if they do not know it."""
    return partition.incarnation + 1


def context_bytes(partition: Partition, generation: int = 0, position: int = 0) -> bytes:
    """Encode the incarnation number and other data that replies have about a partition since protocol 0.12.

    Args:
        generation: generation of the group that polls.
        position: number of the metadata change that clients must have received before.
    """
    return _CONTEXT.pack(incarnation_of(partition), generation, position)


def check_history(session: Poller, answer: Answer, partition: Partition) -> None:
    """Raise Refused if the request has the incarnation number of a deleted partition with the same number."""
    named = session.named_incarnation(answer)
    if named and named != incarnation_of(partition):
        raise Refused(errors.HISTORY_GONE)


def get_route(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    """GET_PARTITION_ROUTE: return this node as the partition's leader. It leads all partitions."""
    del answer
    topic = topic_of(session, reader, Action.TOPIC_DESCRIBE)
    partition = partition_at(topic, reader.u32())
    if reader.left:
        raise Refused(errors.UNKNOWN_COMMAND)
    position = session.broker.clock.now_us()  # at least the position in the reply to any earlier change
    return _ROUTE.pack(incarnation_of(partition), position, VIEW, len(topic.partitions), REPLICA)
