"""Look up the streams, topics, partitions and consumers that a request names (spec: iggy#identifiers, iggy#consumers).

A client without permission gets the same error whether or not the object exists.
"""

from __future__ import annotations

from functools import partial

from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.protocols.iggy import errors
from polywire.protocols.iggy.context import Poller
from polywire.protocols.iggy.directory import Stream
from polywire.protocols.iggy.messages import Consumer, Refused
from polywire.protocols.iggy.names import find_named, namespace_of
from polywire.protocols.iggy.reader import Reader
from polywire.protocols.iggy.session import IggySession
from polywire.types import TopicName


def identifier(reader: Reader) -> int | str:
    """Read the number (counted from 0) or the name of a stream, topic or group."""
    found = reader.ident()
    return found - reader.dialect.base if isinstance(found, int) else found


def stream_of(session: IggySession, reader: Reader, action: Action) -> Stream:
    """Read an identifier of a stream, and return the stream.

    Raises Denied if the client may not perform the action on it, and Refused if it does not exist.
    """
    named = identifier(reader)
    found = find_named(session.shared.directory.find_stream, named, reader.dialect)
    session.authorize(action, found.stored.namespace if found is not None else _namespace(named))
    if found is None:
        raise Refused(errors.NO_STREAM_ID if isinstance(named, int) else errors.NO_STREAM_NAME)
    return found


def topic_of(session: IggySession, reader: Reader, action: Action) -> Topic:
    """Read identifiers of a stream and a topic, and return the topic.

    Raises Denied if the client may not perform the action on it, and Refused if it does not exist.
    """
    directory = session.shared.directory
    stream_named, named = identifier(reader), identifier(reader)
    stream = find_named(directory.find_stream, stream_named, reader.dialect)
    topic = None if stream is None else find_named(partial(directory.find_topic, stream), named, reader.dialect)
    if topic is not None:
        session.authorize(action, topic)
        return topic
    namespace = stream.stored.namespace if stream is not None else _namespace(stream_named)
    session.authorize(
        action, TopicName(namespace, named) if isinstance(named, str) and namespace is not None else namespace
    )
    if stream is None:
        raise Refused(errors.NO_STREAM_ID if isinstance(stream_named, int) else errors.NO_STREAM_NAME)
    raise Refused(errors.NO_TOPIC_ID if isinstance(named, int) else errors.NO_TOPIC_NAME)


def _namespace(named: int | str) -> str | None:
    """Return the name that a missing stream would have in other protocols.

    Return None for a number, which could be that of any stream.
    """
    return namespace_of(named) if isinstance(named, str) else None


def partition_at(topic: Topic, number: int) -> Partition:
    """Return the partition with this number, counted from 0. Raises Refused 3007."""
    if not 0 <= number < len(topic.partitions):
        raise Refused(errors.NO_PARTITION)
    return topic.partitions[number]


def consumers_partition(reader: Reader, number: int | None) -> int:
    """Return the partition number for a single consumer: that in the request, or the first partition.

    In the oldest protocol (D0), the request must have it (spec: iggy#polling).
    """
    if number is not None:
        return number
    if not reader.dialect.has_login:
        raise Refused(errors.NO_PARTITION)
    return 0


def consumer_name(session: Poller, topic: Topic, consumer: Consumer, reader: Reader) -> str:
    """Return the name under which the broker stores the committed offsets of a consumer or group.

    Raises Refused 5000 or 5003 if the group does not exist.
    """
    found = consumer.identifier
    if not consumer.group:
        return str(found)
    group = found - reader.dialect.base if isinstance(found, int) else found
    return session.shared.directory.group(topic, group)[1]
