"""Commands for the stored offsets of consumers and groups (spec: iggy#stored-offsets).

Iggy's stored offset is that of the last message consumed. The broker's committed offset is the next one to read.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from polywire.broker.permissions import Action
from polywire.broker.topics import Partition
from polywire.log.base import Completion
from polywire.protocols.iggy import errors
from polywire.protocols.iggy.context import Poller
from polywire.protocols.iggy.histories import check_history
from polywire.protocols.iggy.lookup import consumer_name, consumers_partition, partition_at, topic_of
from polywire.protocols.iggy.messages import Refused
from polywire.protocols.iggy.reader import Reader
from polywire.protocols.iggy.reply_slots import Answer
from polywire.protocols.iggy.session import IggySession
from polywire.types import PositionKind

_OFFSET: Final = Struct("<IQQ")


def store(
    session: Poller,
    partition: Partition,
    owner: tuple[PositionKind, str],
    offset: int,
    done: Completion[int] | None,
) -> None:
    kind, name = owner
    full_name, by = partition.topic.name.full, session.caller
    session.broker.commit_position(full_name, partition.number, kind, name, offset + 1, by=by, done=done)


def _owner(
    session: IggySession, reader: Reader, *, group: Action, consumer: Action
) -> tuple[Partition, tuple[PositionKind, str]]:
    """Read the partition and the consumer or group of a stored offset, and return them.

    Raises Denied if the client may not perform the action.
    """
    named = reader.consumer()
    topic = topic_of(session, reader, group if named.group else consumer)
    number = reader.partition()
    name = consumer_name(session, topic, named, reader)
    if not named.group:
        return partition_at(topic, consumers_partition(reader, number)), (PositionKind.CONSUMER, name)
    if number is None:
        number = session.members.get((topic.id, name), (topic, -1))[1]
    return partition_at(topic, number), (PositionKind.GROUP, name)


def _require_owned(session: IggySession, reader: Reader, partition: Partition, owner: tuple[PositionKind, str]) -> None:
    """Raise Refused 5009 if a member of the group stores an offset of another member's partition.

    A member that lost the partition may still process buffered messages; its offset would overwrite that of the new
    member. SDKs of older dialects do not know this error.
    """
    kind, name = owner
    topic = partition.topic
    if not reader.dialect.framed or kind is not PositionKind.GROUP or (topic.id, name) not in session.members:
        return
    if partition.number not in session.shared.membership(session, topic, name).partitions:
        raise Refused(errors.NOT_OWNED)


def get_offset(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    del answer
    try:
        partition, owner = _owner(session, reader, group=Action.OFFSET_FETCH, consumer=Action.POSITION_FETCH)
    except Refused as error:
        if reader.dialect.empty_when_missing and error.number != errors.UNKNOWN_COMMAND:
            return b""
        raise
    position = session.broker.position(partition.topic.name.full, partition.number, *owner)
    if position is None and reader.dialect.empty_when_missing:
        return b""
    session.broker.require_current([partition])
    newest = max(partition.log.readable_offset - 1, 0)
    return _OFFSET.pack(partition.number + reader.dialect.base, newest, max((position or 0) - 1, 0))


def store_offset(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    """STORE_CONSUMER_OFFSET: store an offset. Raises Refused 4100 if it is above that of the newest message."""
    partition, owner = _owner(session, reader, group=Action.OFFSET_COMMIT, consumer=Action.POSITION_COMMIT)
    offset = reader.u64()
    if reader.dialect.framed:
        reader.u8()
    check_history(session, answer, partition)
    _require_owned(session, reader, partition, owner)
    if offset >= partition.log.readable_offset:
        session.broker.require_current([partition])
    if offset >= max(partition.log.readable_offset, 1):
        raise Refused(errors.BAD_OFFSET)
    store(session, partition, owner, offset, answer.done)


def delete_offset(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    partition, (kind, name) = _owner(session, reader, group=Action.OFFSET_COMMIT, consumer=Action.POSITION_COMMIT)
    check_history(session, answer, partition)
    full_name = partition.topic.name.full
    if session.broker.position(full_name, partition.number, kind, name, latest=True) is None:
        raise Refused(errors.NO_STORED_OFFSET)
    session.broker.delete_positions(
        kind, name, full_name=full_name, partition_number=partition.number, by=session.caller, done=answer.done
    )
