"""Iggy's commands for streams, topics and partitions.

Lists are sorted by number. A change is synced to disk before the reply.

(spec: iggy#d0-streams-and-topics, iggy#d1-requests, iggy#d1-replies, iggy#d3-bodies)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from struct import Struct
from typing import Final

import msgspec

from polywire.broker.permissions import Action
from polywire.broker.settings import TOPIC_RANGES, TopicSettings
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError
from polywire.protocols.iggy import errors
from polywire.protocols.iggy.dialect import Dialect
from polywire.protocols.iggy.directory import NUMBER_MAX, NUMBERS_END, StoredStream, StoredTopic, Stream
from polywire.protocols.iggy.histories import ONLY_NODE, context_bytes
from polywire.protocols.iggy.lookup import stream_of, topic_of
from polywire.protocols.iggy.messages import NO_OPTIONS, U32, Refused, TopicFields, name_bytes
from polywire.protocols.iggy.names import namespace_of, normalised
from polywire.protocols.iggy.options import described, encode_options, is_fixed, parse_options, topic_options
from polywire.protocols.iggy.reader import Reader
from polywire.protocols.iggy.reply_slots import Answer
from polywire.protocols.iggy.session import IggySession
from polywire.types import TopicName

NEVER: Final = 2**64 - 1  # an expiry or a size without a limit
_AGE_US_MAX: Final = TOPIC_RANGES["retention_age_us"].stop - 1
_BYTES_MAX: Final = TOPIC_RANGES["retention_bytes"].stop - 1
_STREAM: Final = Struct("<IQIQQ")
_TOPIC: Final = Struct("<IQI")
_SIZES: Final = Struct("<QQ")
_PARTITION: Final = Struct("<IQIQQQ")
_SECOND_US: Final = 1_000_000


def messages_of(topic: Topic) -> int:
    return sum(partition.log.readable_offset - partition.log.first_offset for partition in topic.partitions)


def bytes_of(topic: Topic) -> int:
    return sum(partition.log.stored_bytes for partition in topic.partitions)


# Encodings


def stream_parts(session: IggySession, stream: Stream, dialect: Dialect) -> Iterator[bytes]:
    """Encode a stream as an element of a list.

    Yields empty bytes after each topic, so that other connections are served.
    """
    topics = session.shared.directory.topics(stream)
    size, messages = 0, 0
    for topic in topics:
        size += bytes_of(topic)
        messages += messages_of(topic)
        yield b""
    yield stream_bytes(stream.stored, dialect, len(topics), size, messages)


def stream_bytes(stored: StoredStream, dialect: Dialect, topics: int, size: int, messages: int) -> bytes:
    """Encode a stream for a list of streams, with its numbers of topics, bytes and messages."""
    body = _STREAM.pack(stored.number + dialect.base, stored.created_at_us, topics, size, messages)
    return body + name_bytes(stored.name) + NO_OPTIONS * dialect.option_blocks


def stream_details(session: IggySession, stream: Stream, dialect: Dialect) -> Iterator[bytes]:
    topics = session.shared.directory.topics(stream)
    yield from stream_parts(session, stream, dialect)
    for topic in topics:
        yield topic_bytes(session, topic, dialect)


def topic_bytes(session: IggySession, topic: Topic, dialect: Dialect) -> bytes:
    stored = session.shared.directory.stored(topic)
    body = _TOPIC.pack(stored.number + dialect.base, topic.created_at_us, len(topic.partitions))
    age = topic.settings.retention_age_us
    if not dialect.contexts:
        body += _settings_bytes(topic, stored, dialect)
    body += _SIZES.pack(bytes_of(topic), messages_of(topic)) + name_bytes(stored.name)
    if dialect.framed:
        body += encode_options(
            stored.options, stored.compression, age or NEVER, stored.size_max or NEVER, today=dialect.contexts
        )
    return body


def _settings_bytes(topic: Topic, stored: StoredTopic, dialect: Dialect) -> bytes:
    """Encode a topic's settings as fields. Since protocol 0.12, replies have only the options instead."""
    age = topic.settings.retention_age_us
    if dialect.topic_settings < 3:
        body = U32.pack(min((age or 0) // _SECOND_US, 2**32 - 1))
    else:
        body = (age or NEVER).to_bytes(8, "little")
    if dialect.topic_settings >= 2:
        body += bytes((stored.compression,))
    if dialect.topic_settings >= 1:
        body += (stored.size_max or NEVER).to_bytes(8, "little")
        if not dialect.framed:
            body += bytes((min(topic.settings.replication_factor, 255),))
    return body


def topic_details(session: IggySession, topic: Topic, dialect: Dialect) -> Iterator[bytes]:
    partitions = list(topic.partitions)
    yield topic_bytes(session, topic, dialect)
    for partition in partitions:
        yield _partition_bytes(partition, dialect)


def _partition_bytes(partition: Partition, dialect: Dialect) -> bytes:
    log = partition.log
    body = _PARTITION.pack(
        partition.number + dialect.base,
        partition.topic.created_at_us,
        1,  # reported as the number of segments, because partitions share segments in this broker
        max(log.readable_offset - 1, 0),
        log.stored_bytes,
        log.readable_offset - log.first_offset,
    )
    if dialect.contexts:
        body += context_bytes(partition)
    return body + (ONLY_NODE + ONLY_NODE if dialect.member_lists else b"")


# Streams


def _name(name: str, dialect: Dialect, number: int) -> str:
    return normalised(name, number) if dialect.normalises else name


def _given_number(reader: Reader, number: int, end: int) -> int | None:
    """Read the number in a create request; None if the broker must choose one.

    Raises Refused with the error number ``number`` unless the chosen number is below ``end``.
    """
    dialect = reader.dialect
    if not dialect.chosen_ids:
        return None
    wanted = reader.u32()
    if wanted == 0 and dialect.auto_ids:
        return None
    if wanted == 0 or wanted - dialect.base >= end:
        raise Refused(number)
    return wanted - dialect.base


def _missing(reader: Reader, error: Refused) -> bytes:
    """Return the reply to a request for a missing object, or raise ``error`` if the dialect replies with an error."""
    if reader.dialect.empty_when_missing and error.number != errors.UNKNOWN_COMMAND:
        return b""
    try:
        raise error
    finally:
        del error  # breaks the reference cycle between the error and this frame


def require_current(session: IggySession, streams: Sequence[Stream]) -> None:
    """Raise Pending until other processes have reported the topics of these streams, and their sizes."""
    directory = session.shared.directory
    directory.refresh()
    topics = (topic for stream in streams for topic in directory.topics(stream))
    session.broker.require_current(partition for topic in topics for partition in topic.partitions)


def get_stream(session: IggySession, answer: Answer, reader: Reader, /) -> bytes | None:
    try:
        stream = stream_of(session, reader, Action.STREAM_DESCRIBE)
    except Refused as error:
        return _missing(reader, error)
    require_current(session, [stream])
    answer.make(stream_details(session, stream, reader.dialect))
    return None


def get_streams(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    session.broker.access.authorize_somewhere(session.principal, Action.STREAM_LIST)
    listed = session.shared.directory.streams()
    streams = [stream for stream in listed if session.permits(Action.STREAM_DESCRIBE, stream.stored.namespace)]
    require_current(session, streams)
    answer.make(part for stream in streams for part in stream_parts(session, stream, reader.dialect))


def create_stream(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    dialect = reader.dialect
    number = _given_number(reader, errors.BAD_STREAM_ID, NUMBER_MAX)
    written = reader.name()
    name = _name(written, dialect, errors.BAD_STREAM_NAME)
    if dialect.framed:
        parse_options(bytes(reader.take(reader.left)))
    session.authorize(Action.STREAM_CREATE, namespace_of(name))
    if written != name and session.shared.directory.find_stream(written) is not None:
        raise Refused(errors.STREAM_NAME_TAKEN)  # otherwise a lookup of the name as written would find that stream

    def created(stream: StoredStream | BrokerError) -> None:
        if dialect.returns_created and not isinstance(stream, BrokerError):
            answer.payload = stream_bytes(stream, dialect, 0, 0, 0)
        answer.done(stream)

    session.shared.directory.create_stream(name, number, session.caller, created)


def update_stream(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    stream = stream_of(session, reader, Action.STREAM_ALTER)
    name = _name(reader.name(), reader.dialect, errors.BAD_STREAM_NAME)
    # checked, because a rename could otherwise assign a name that the user may not create
    session.authorize(Action.STREAM_CREATE, namespace_of(name))
    session.shared.directory.rename_stream(stream, name, answer.done)


def delete_stream(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    stream = stream_of(session, reader, Action.STREAM_DELETE)
    session.shared.directory.delete_stream(stream, answer.done)


def purge_stream(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    stream = stream_of(session, reader, Action.STREAM_ALTER)
    session.shared.directory.refresh()
    session.broker.purge_topics(session.shared.directory.topics(stream), done=answer.done)


# Topics


def get_topic(session: IggySession, answer: Answer, reader: Reader, /) -> bytes | None:
    try:
        topic = topic_of(session, reader, Action.TOPIC_DESCRIBE)
    except Refused as error:
        return _missing(reader, error)
    session.broker.require_current(topic.partitions)
    answer.make(topic_details(session, topic, reader.dialect))
    return None


def get_topics(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    stream = stream_of(session, reader, Action.TOPIC_DESCRIBE)
    require_current(session, [stream])
    topics = session.shared.directory.topics(stream)
    count = U32.pack(len(topics)) if reader.dialect.framed else b""
    answer.make(chain([count], (topic_bytes(session, topic, reader.dialect) for topic in topics)))


def create_topic(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    dialect = reader.dialect
    stream = stream_of(session, reader, Action.TOPIC_CREATE)
    number = _given_number(reader, errors.BAD_TOPIC_ID, NUMBERS_END)
    partitions = reader.u32()
    fields = reader.topic_fields()
    name = _name(fields.name, dialect, errors.BAD_TOPIC_NAME)
    if fields.name != name and session.shared.directory.find_topic(stream, fields.name) is not None:
        raise Refused(errors.TOPIC_NAME_TAKEN)
    stored, settings = _settings(
        StoredTopic(0, name), TopicSettings(), fields, partitions, new=True, framed=dialect.framed
    )

    def on_created(topic: Topic) -> None:
        if dialect.returns_created:
            answer.later = topic_details(session, topic, dialect)

    session.shared.directory.create_topic(
        stream, stored, number, partitions, settings, session.caller, on_created, answer.done
    )


def update_topic(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    directory = session.shared.directory
    topic = topic_of(session, reader, Action.TOPIC_ALTER)
    fields = reader.topic_fields(is_patch=True)
    name = _name(fields.name or directory.stored(topic).name, reader.dialect, errors.BAD_TOPIC_NAME)
    # checked, because a rename could otherwise assign a name that the user may not create
    if name != directory.stored(topic).name:
        session.authorize(Action.TOPIC_CREATE, TopicName(topic.name.stream, name))
    directory.check_topic_name(directory.stream_of(topic), name, but=topic)
    was = msgspec.structs.replace(directory.stored(topic), name=name)
    count, framed = len(topic.partitions), reader.dialect.framed
    stored, settings = _settings(was, topic.settings, fields, count, new=False, framed=framed)
    directory.update_topic(topic, stored, settings, answer.done)


def _settings(
    stored: StoredTopic, settings: TopicSettings, fields: TopicFields, partitions: int, *, new: bool, framed: bool
) -> tuple[StoredTopic, TopicSettings]:
    """Return the stored data and the settings of a topic after a request.

    The size limit of the topic is divided by the number of partitions.
    """
    expiry_us, size_max, compression = fields.expiry_us, fields.size_max, fields.compression
    options = stored.options
    if framed:  # in a patch, fields that are not set do not change
        given = topic_options(fields.options, None if new else stored.options)
        expiry_us, size_max, compression, options = given.expiry_us, given.size_max, given.compression, given.given
    limit = None if size_max in (None, 0, NEVER) else size_max
    sets_expiry, sets_size = not framed or expiry_us is not None, not framed or size_max is not None
    stored = msgspec.structs.replace(
        stored,
        expiry_us=expiry_us if sets_expiry else stored.expiry_us,
        size_max=limit or 0 if sets_size else stored.size_max,
        compression=compression or stored.compression,
        options=options,
    )
    if stored.compression not in (1, 2):
        raise Refused(errors.UNKNOWN_COMMAND)
    if sets_expiry:
        settings = replace(
            settings,
            retention_age_us=None if expiry_us is None else min(expiry_us, _AGE_US_MAX),
        )
    if sets_size:
        share = None if limit is None else min(max(1, limit // max(1, partitions)), _BYTES_MAX)
        settings = replace(settings, retention_bytes=share)
    return stored, settings if framed else replace(settings, replication_factor=max(1, fields.replication))


def delete_topic(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    topic = topic_of(session, reader, Action.TOPIC_DELETE)
    session.broker.delete_topic(topic, done=answer.done)


def purge_topic(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    topic = topic_of(session, reader, Action.TOPIC_PURGE)
    session.broker.purge_topic(topic, done=answer.done)


# Partitions


def _partition_count(reader: Reader) -> int:
    count = reader.u32()
    if not 1 <= count <= 100_000:
        raise Refused(errors.BAD_PARTITION_COUNT)
    return count


def _resized_topic(session: IggySession, reader: Reader) -> Topic:
    """Return the topic whose number of partitions is to change.

    Raises Refused if that number is fixed, and Denied without permission.
    """
    topic = topic_of(session, reader, Action.TOPIC_ALTER)
    if is_fixed(session.shared.directory.stored(topic).options):
        raise Refused(errors.FIXED_PARTITIONS)
    return topic


def create_partitions(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    topic = _resized_topic(session, reader)
    count = _partition_count(reader)
    session.broker.grow_topic(topic, len(topic.partitions) + count, done=answer.done)


def delete_partitions(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    """DELETE_PARTITIONS: delete the partitions with the highest numbers, or all if the count is too high."""
    topic = _resized_topic(session, reader)
    count = _partition_count(reader)
    session.broker.shrink_topic(topic, max(len(topic.partitions) - count, 0), done=answer.done)


def delete_segments(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    """DELETE_SEGMENTS: refused, because a segment has records of several partitions. Retention frees space."""
    del answer
    topic_of(session, reader, Action.TOPIC_PURGE)
    raise Refused(errors.UNAVAILABLE)


# Options


def describe_options(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    """DESCRIBE_OPTIONS: return the options of topics. Streams and users have none."""
    del session, answer
    scope = reader.u8()
    if scope not in (1, 2, 3):
        raise Refused(errors.UNKNOWN_COMMAND)
    return described(today=reader.dialect.contexts) if scope == 1 else U32.pack(0)
