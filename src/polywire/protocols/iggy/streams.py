"""Streams, topics and partitions: the commands on them and how they are spelled (dossier §3.3, §6.2, §6.3, §7.4, §8.4).

Promises: lists are sorted by number; what a request asks to change is changed and synced before its answer. Must not know: frames, messages.
"""

from __future__ import annotations

from dataclasses import replace
from struct import Struct
from typing import Final

import msgspec

from polywire.broker.permissions import Permission
from polywire.broker.settings import TopicSettings
from polywire.broker.topics import Partition, Topic
from polywire.protocols.iggy import errors
from polywire.protocols.iggy.answers import Answer
from polywire.protocols.iggy.dialect import Dialect
from polywire.protocols.iggy.directory import NUMBER_MAX, Stream, TopicKept, normalised
from polywire.protocols.iggy.messages import U32, Reader, Refused, TopicFields, name_bytes
from polywire.protocols.iggy.options import parse_options, topic_options
from polywire.protocols.iggy.records import bytes_of, messages_of, topic_of, totals, who
from polywire.protocols.iggy.session import IggySession
from polywire.types import Level

NEVER: Final = 2**64 - 1  # an expiry or a size without a limit, where the wire has 64 bits for it
_STREAM: Final = Struct("<IQIQQ")
_TOPIC: Final = Struct("<IQI")
_SIZES: Final = Struct("<QQ")
_PARTITION: Final = Struct("<IQIQQQ")
_SECOND_US: Final = 1_000_000


# How they are spelled


def stream_bytes(session: IggySession, stream: Stream, dialect: Dialect) -> bytes:
    """A stream as an element of a list."""
    kept = stream.kept
    topics, size, messages = totals(session, stream)
    body = _STREAM.pack(kept.number + dialect.base, kept.created_at_us, topics, size, messages)
    return body + name_bytes(kept.name) + (bytes(4) if dialect.framed else b"")


def stream_details(session: IggySession, stream: Stream, dialect: Dialect) -> bytes:
    """A stream and its topics."""
    topics = session.shared.directory.topics(stream)
    return stream_bytes(session, stream, dialect) + b"".join(topic_bytes(session, topic, dialect) for topic in topics)


def topic_bytes(session: IggySession, topic: Topic, dialect: Dialect) -> bytes:
    """A topic as an element of a list."""
    kept = session.shared.directory.kept(topic)
    body = _TOPIC.pack(kept.number + dialect.base, topic.created_at_us, len(topic.partitions))
    age = topic.settings.retention_age_us
    if dialect.topic_settings >= 3:
        body += (age or NEVER).to_bytes(8, "little")
    else:
        body += U32.pack(min((age or 0) // _SECOND_US, 2**32 - 1))
    if dialect.topic_settings >= 2:
        body += bytes((kept.compression,))
    if dialect.topic_settings >= 1:
        body += (kept.size_max or NEVER).to_bytes(8, "little")
        if not dialect.framed:
            body += bytes((min(topic.settings.replication_factor, 255),))
    body += _SIZES.pack(bytes_of(topic), messages_of(topic)) + name_bytes(kept.name)
    if dialect.framed:
        body += U32.pack(len(kept.options)) + kept.options + bytes(4)
    return body


def topic_details(session: IggySession, topic: Topic, dialect: Dialect) -> bytes:
    """A topic and its partitions."""
    partitions = b"".join(_partition_bytes(partition, dialect) for partition in topic.partitions)
    return topic_bytes(session, topic, dialect) + partitions


def _partition_bytes(partition: Partition, dialect: Dialect) -> bytes:
    log = partition.log
    return _PARTITION.pack(
        partition.number + dialect.base,
        partition.topic.created_at_us,
        1,  # segments are shared by partitions here
        max(log.readable_offset - 1, 0),
        log.stored_bytes,
        log.readable_offset - log.first_offset,
    )


# Streams


def _name(name: str, dialect: Dialect, number: int) -> str:
    return normalised(name, number) if dialect.normalises else name


def _given_number(reader: Reader, number: int) -> int | None:
    """The number a create request chooses, None when the broker picks one. Raises Refused with ``number``."""
    dialect = reader.dialect
    if not dialect.chosen_ids:
        return None
    wanted = reader.u32()
    if wanted == 0 and dialect.auto_ids:
        return None
    if wanted == 0 or wanted - dialect.base >= NUMBER_MAX:
        raise Refused(number)
    return wanted - dialect.base


def _missing(reader: Reader, error: Refused) -> bytes:
    """What asking for something that is not there is answered with. Raises Refused."""
    if reader.dialect.empty_when_missing and error.number != errors.UNKNOWN_COMMAND:
        return b""
    raise error


def get_stream(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    """GET_STREAM."""
    del answer
    try:
        stream = session.shared.directory.stream(who(reader))
    except Refused as error:
        return _missing(reader, error)
    session.check(Permission.READ_STREAMS, stream=stream.kept.space)
    return stream_details(session, stream, reader.dialect)


def get_streams(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    """GET_STREAMS."""
    del answer
    session.check(Permission.READ_STREAMS)
    return b"".join(stream_bytes(session, stream, reader.dialect) for stream in session.shared.directory.streams())


def create_stream(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    """CREATE_STREAM."""
    dialect = reader.dialect
    number = _given_number(reader, errors.BAD_STREAM_ID)
    name = _name(reader.name(), dialect, errors.BAD_STREAM_NAME)
    if dialect.framed:
        parse_options(bytes(reader.take(reader.left)))
    session.check(Permission.MANAGE_STREAMS)
    stream = session.shared.directory.create_stream(name, number, answer.done)
    if dialect.tells_created:
        answer.payload = stream_details(session, stream, dialect)


def update_stream(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    """UPDATE_STREAM."""
    stream = session.shared.directory.stream(who(reader))
    name = _name(reader.name(), reader.dialect, errors.BAD_STREAM_NAME)
    session.check(Permission.MANAGE_STREAMS, stream=stream.kept.space)
    session.shared.directory.rename_stream(stream, name, answer.done)


def delete_stream(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    """DELETE_STREAM."""
    stream = session.shared.directory.stream(who(reader))
    session.check(Permission.MANAGE_STREAMS, stream=stream.kept.space)
    session.shared.directory.delete_stream(stream, answer.done)


def purge_stream(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    """PURGE_STREAM."""
    stream = session.shared.directory.stream(who(reader))
    session.check(Permission.MANAGE_STREAMS, stream=stream.kept.space)
    for topic in session.shared.directory.topics(stream):
        session.broker.purge_topic(topic)
    session.broker.change_all((), level=Level.SYNCED, done=answer.done)


# Topics


def get_topic(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    """GET_TOPIC."""
    del answer
    try:
        topic = topic_of(session, reader)
    except Refused as error:
        return _missing(reader, error)
    session.check(Permission.READ_TOPICS, topic)
    return topic_details(session, topic, reader.dialect)


def get_topics(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    """GET_TOPICS."""
    del answer
    stream = session.shared.directory.stream(who(reader))
    session.check(Permission.READ_TOPICS, stream=stream.kept.space)
    topics = session.shared.directory.topics(stream)
    count = U32.pack(len(topics)) if reader.dialect.framed else b""
    return count + b"".join(topic_bytes(session, topic, reader.dialect) for topic in topics)


def create_topic(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    """CREATE_TOPIC."""
    dialect = reader.dialect
    stream = session.shared.directory.stream(who(reader))
    number = _given_number(reader, errors.BAD_TOPIC_ID)
    partitions = reader.u32()
    fields = reader.topic_fields()
    session.check(Permission.MANAGE_TOPICS, stream=stream.kept.space)
    name = _name(fields.name, dialect, errors.BAD_TOPIC_NAME)
    kept, settings = _settings(TopicKept(0, name), TopicSettings(), fields, partitions, framed=dialect.framed)
    topic = session.shared.directory.create_topic(stream, kept, number, partitions, settings, answer.done)
    if dialect.tells_created:
        answer.payload = topic_details(session, topic, dialect)


def update_topic(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    """UPDATE_TOPIC."""
    directory = session.shared.directory
    topic = topic_of(session, reader)
    fields = reader.topic_fields()
    session.check(Permission.MANAGE_TOPICS, topic)
    name = _name(fields.name, reader.dialect, errors.BAD_TOPIC_NAME)
    directory.check_topic_name(directory.stream_of(topic), name, but=topic)
    was = msgspec.structs.replace(directory.kept(topic), name=name)
    kept, settings = _settings(was, topic.settings, fields, len(topic.partitions), framed=reader.dialect.framed)
    directory.update_topic(topic, kept, settings, answer.done)


def _settings(
    kept: TopicKept, settings: TopicSettings, fields: TopicFields, partitions: int, *, framed: bool
) -> tuple[TopicKept, TopicSettings]:
    """What a request's fields make of a topic's settings; a size is divided among its partitions."""
    expiry_us, size_max, compression = fields.expiry_us, fields.size_max, fields.compression
    if framed:  # a patch: what is not given stays
        given = topic_options(fields.options)
        expiry_us = kept.expiry_us if given.expiry_us is None else given.expiry_us
        size_max, compression = given.size_max or kept.size_max, given.compression
    limit = None if size_max in (None, 0, NEVER) else size_max
    kept = msgspec.structs.replace(
        kept,
        expiry_us=expiry_us,
        size_max=limit or 0,
        compression=compression or kept.compression,
        options=fields.options or kept.options,
    )
    if kept.compression not in (1, 2):
        raise Refused(errors.UNKNOWN_COMMAND)
    return kept, replace(
        settings,
        retention_age_us=None if expiry_us is None else min(expiry_us, 2**62),
        retention_bytes=None if limit is None else min(max(1, limit // max(1, partitions)), 2**62),
        replication_factor=max(1, fields.replication),
    )


def delete_topic(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    """DELETE_TOPIC."""
    topic = topic_of(session, reader)
    session.check(Permission.MANAGE_TOPICS, topic)
    session.broker.delete_topic(topic, done=answer.done)


def purge_topic(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    """PURGE_TOPIC."""
    topic = topic_of(session, reader)
    session.check(Permission.MANAGE_TOPICS, topic)
    session.broker.purge_topic(topic, done=answer.done)


# Partitions


def _partition_count(reader: Reader) -> int:
    count = reader.u32()
    if not 1 <= count <= 100_000:
        raise Refused(errors.BAD_PARTITION_COUNT)
    return count


def create_partitions(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    """CREATE_PARTITIONS."""
    topic = topic_of(session, reader)
    count = _partition_count(reader)
    session.check(Permission.MANAGE_TOPICS, topic)
    session.broker.grow_topic(topic, len(topic.partitions) + count, done=answer.done)


def delete_partitions(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    """DELETE_PARTITIONS: the highest go; more than there are is all of them."""
    topic = topic_of(session, reader)
    count = _partition_count(reader)
    session.check(Permission.MANAGE_TOPICS, topic)
    session.broker.shrink_topic(topic, max(len(topic.partitions) - count, 0), done=answer.done)


def delete_segments(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    """DELETE_SEGMENTS: segments hold records of several partitions here, so none can be taken out; retention frees space instead."""
    del answer
    topic = topic_of(session, reader)
    session.check(Permission.MANAGE_TOPICS, topic)
    raise Refused(errors.UNAVAILABLE)
