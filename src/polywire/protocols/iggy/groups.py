"""Iggy's commands for consumer groups, whose members are connections (spec: iggy#consumer-groups, iggy#d3-groups).

A group can also have members on other protocols, because the broker assigns the partitions.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from polywire.broker.groups.group import GroupView
from polywire.broker.permissions import Action
from polywire.broker.topics import Topic
from polywire.errors import BrokerError
from polywire.protocols.iggy import errors
from polywire.protocols.iggy.dialect import Dialect
from polywire.protocols.iggy.directory import NUMBERS_END
from polywire.protocols.iggy.lookup import topic_of
from polywire.protocols.iggy.messages import U32, U64, Refused, name_bytes
from polywire.protocols.iggy.reader import Reader
from polywire.protocols.iggy.reply_slots import Answer
from polywire.protocols.iggy.session import IggySession

_GROUP: Final = Struct("<III")
_MEMBER: Final = Struct("<II")


def _group(session: IggySession, reader: Reader, topic: Topic) -> tuple[int, str]:
    found = reader.group()
    return session.shared.directory.group(topic, found - reader.dialect.base if isinstance(found, int) else found)


def _group_bytes(topic: Topic, number: int, name: str, view: GroupView | None, dialect: Dialect) -> bytes:
    members = 0 if view is None else len(view.members)
    body = _GROUP.pack(number + dialect.base, len(topic.partitions), members)
    return body + name_bytes(name) if dialect.named_groups else body


def group_details(session: IggySession, topic: Topic, number: int, name: str, dialect: Dialect) -> bytes:
    view = session.broker.groups.view(name, topic.name.full)
    body = _group_bytes(topic, number, name, view, dialect)
    for member in () if view is None else view.members:
        client = member.id.removeprefix("iggy-")
        known = int(client) & 0xFFFFFFFF if client.isascii() and client.isdigit() else 0
        body += _MEMBER.pack(known, len(member.partitions))
        body += b"".join(U32.pack(partition + dialect.base) for partition in member.partitions)
    return body


def get_group(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    del answer
    try:
        topic = topic_of(session, reader, Action.GROUP_DESCRIBE)
        number, name = _group(session, reader, topic)
    except Refused as error:
        if reader.dialect.empty_when_missing and error.number != errors.UNKNOWN_COMMAND:
            return b""
        raise
    return group_details(session, topic, number, name, reader.dialect)


def get_groups(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    del answer
    topic = topic_of(session, reader, Action.GROUP_DESCRIBE)
    views = {view.name: view for view in session.broker.groups.views(topic.name.full)}
    groups = sorted(session.shared.directory.groups(topic).items())
    return b"".join(_group_bytes(topic, number, name, views.get(name), reader.dialect) for number, name in groups)


def create_group(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    dialect = reader.dialect
    topic = topic_of(session, reader, Action.GROUP_CREATE)
    number = None
    if dialect.chosen_ids:
        wanted = reader.u32()
        if (wanted == 0 and not dialect.auto_ids) or wanted - dialect.base >= NUMBERS_END:
            raise Refused(errors.BAD_GROUP_ID)
        number = wanted - dialect.base if wanted else None
        name = reader.name() if dialect.named_groups else f"group-{wanted}"
    else:
        name = reader.name()

    def created(number: int | BrokerError) -> None:
        if dialect.returns_created and not isinstance(number, BrokerError):
            answer.payload = _group_bytes(topic, number, name, None, dialect)
        answer.done(number)

    session.shared.directory.create_group(topic, name, number, session.caller, created)


def delete_group(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    topic = topic_of(session, reader, Action.GROUP_DELETE)
    number, name = _group(session, reader, topic)

    def deleted(result: int | BrokerError) -> None:
        if not isinstance(result, BrokerError):
            session.shared.forget_members(topic.id, name)
        answer.done(result)

    session.shared.directory.delete_group(topic, number, session.caller, deleted)


def join_group(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    del answer
    topic = topic_of(session, reader, Action.GROUP_JOIN)
    _, name = _group(session, reader, topic)
    session.shared.membership(session, topic, name)
    session.members.setdefault((topic.id, name), (topic, -1))
    return b""


def leave_group(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    del answer
    topic = topic_of(session, reader, Action.GROUP_JOIN)
    _, name = _group(session, reader, topic)
    if (topic.id, name) not in session.members:
        raise Refused(errors.NO_MEMBER)
    session.leave_group(topic.id, name)
    return b""


def sync_group(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    """SYNC_CONSUMER_GROUP: return the member's partitions; none to a client that is not a member."""
    del answer
    topic = topic_of(session, reader, Action.GROUP_JOIN)
    _, name = _group(session, reader, topic)
    if (topic.id, name) not in session.members:
        return b""
    place = session.shared.membership(session, topic, name)
    partitions = b"".join(map(U32.pack, place.partitions))
    return U64.pack(place.generation) + U32.pack(len(place.partitions)) + partitions
