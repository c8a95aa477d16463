"""Look up the topics and partitions that requests name (spec: kafka#metadata, kafka#errors).

A client without permission gets the same error whether or not the topic exists. This module is compiled.
"""

from __future__ import annotations

import cython

from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError, ErrorCode, Missing, NotOwner
from polywire.protocols.kafka.errors import wire_error
from polywire.protocols.kafka.messages import NO_ID, WireError
from polywire.protocols.kafka.peer import Peer

if cython.compiled:
    from cython.cimports.polywire.protocols.runtime.shapes import is_open
else:
    from polywire.protocols.runtime.shapes import is_open


def topic_of(peer: Peer, action: Action, name: str, topic_id: bytes = NO_ID) -> Topic:
    """Return the topic that a request names, by its id if there is one.

    Raises Missing(TOPIC_MISSING), or Denied.
    """
    broker = peer.broker
    if topic_id != NO_ID:
        topic = broker.topic_of_id(topic_id)
        if topic is None or not peer.permits(action, topic):
            raise Missing(ErrorCode.TOPIC_MISSING, "no such topic id")
        return topic
    resource = broker.resource(name)
    if isinstance(resource, Topic) and is_open(broker.access, peer.principal, resource):
        return resource
    peer.authorize(action, resource)
    return resource if isinstance(resource, Topic) else broker.topic(name)


def led_topic(peer: Peer, action: Action, name: str, topic_id: bytes = NO_ID) -> Topic:
    """Return the topic like ``topic_of``. Raises NotOwner(NOT_OWNER) if it belongs to another process."""
    topic = topic_of(peer, action, name, topic_id)
    if not peer.leads(topic):
        raise NotOwner(ErrorCode.NOT_OWNER, f"another process owns the topic name={topic.name.full!r}")
    return topic


def partition_of(topic: Topic, number: int) -> Partition:
    """Return a partition of a topic. Raises Missing(PARTITION_MISSING)."""
    if not 0 <= number < len(topic.partitions):
        raise Missing(ErrorCode.PARTITION_MISSING, f"no such partition topic={topic.name.full!r} partition={number}")
    return topic.partitions[number]


def missing_error(error: BrokerError, topic_id: bytes) -> WireError:
    """Return the Kafka error for a topic that cannot be used. It depends on whether the request named the topic by id."""
    if topic_id != NO_ID and error.code is ErrorCode.TOPIC_MISSING:
        return WireError.UNKNOWN_TOPIC_ID
    return wire_error(error)
