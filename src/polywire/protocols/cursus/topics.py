"""Commands on topics: CREATE, DELETE, LIST, DESCRIBE, METADATA, LIST_OFFSETS (dossier §2.1–§2.4).

Promises: what a topic was created with is what is told of it; deleting removes the data. Must not know: sockets, records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from polywire.broker.settings import TopicSettings
from polywire.broker.topics import Topic
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode, Invalid
from polywire.protocols.cursus.answers import Answer
from polywire.protocols.cursus.messages import Dialect, Refused, Request, encoded, integer, quote, topic_fault
from polywire.protocols.cursus.policies import (
    POLICY_KEYS,
    REPLICATION_FACTOR,
    is_governed,
    policy_of,
    read_policy,
    with_policy,
)
from polywire.protocols.cursus.session import Command, CursusSession, Reply
from polywire.protocols.cursus.state import Operation
from polywire.types import DEFAULT_STREAM, TopicName

CREATE_PARTITIONS: Final = 4  # when CREATE gives no number (dossier §2.1)
DONE: Final = "\u2705"
REMOVED: Final = "\U0001f5d1\ufe0f"


def find_topic(session: CursusSession, name: str) -> Topic:
    """A topic that exists. Raises Refused ``topic_not_found``."""
    topic = session.state.broker.find_topic(name)
    if topic is None:
        raise Refused("topic_not_found", f"topic={name}", legacy=f"topic '{name}' not found")
    return topic


def create(session: CursusSession, request: Request, /) -> Reply | None:
    """CREATE: makes a topic, or changes one that exists."""
    name = _name(request, "CREATE topic=<name> [partitions=<N>]")
    fault = topic_fault(name)
    if fault is not None:
        raise Refused("invalid_topic_name", f"topic={quote(name)} reason={quote(fault)}", legacy=fault)
    count = _positive(request, "partitions", CREATE_PARTITIONS)
    factor = _positive(request, "replication_factor", REPLICATION_FACTOR)
    policy = read_policy(request)
    broker = session.state.broker
    answer = session.later(request.dialect, blocking=True)
    topic = broker.find_topic(name)
    try:
        if topic is not None:
            _change(session, topic, request, count, answer)
        else:
            settings = TopicSettings(
                replication_factor=factor,
                idempotent=request.is_set("idempotent"),
                event_sourcing=request.is_set("event_sourcing"),
            )
            given = with_policy(settings, policy)
            topic = broker.create_topic(TopicName(DEFAULT_STREAM, name), count, given, done=answer.done)
    except (Invalid, Conflict, Busy) as error:
        raise _refused(name, error) from None
    if request.dialect is Dialect.LEGACY:
        answer.body = encoded(f"{DONE} Topic '{name}' now has {len(topic.partitions)} partitions")
    else:
        answer.body = encoded(f"OK topic={name} partitions={len(topic.partitions)} {policy_of(topic).spelled()}")
    return None


def _change(session: CursusSession, topic: Topic, request: Request, count: int, answer: Answer) -> None:
    """CREATE of a topic that exists: it may grow, and its policy is replaced.

    A topic that other wires made keeps what they set until a CREATE names a policy: clients send a bare CREATE whenever they start.
    """
    broker, name, partitions = session.state.broker, topic.name.full, len(topic.partitions)
    if count < partitions:
        if request.dialect is not Dialect.LEGACY:
            reason = f"cannot decrease partition count for topic '{name}': {partitions} -> {count}"
            raise Refused("create_topic_failed", f"topic={name} reason={quote(reason)}")
        count = partitions
    settings = topic.settings
    if is_governed(topic) or POLICY_KEYS & request.options.keys():
        settings = with_policy(settings, read_policy(request))
    settings = replace(settings, idempotent=settings.idempotent or request.is_set("idempotent"))
    if request.is_set("event_sourcing") and not settings.event_sourcing:
        if any(partition.log.next_offset for partition in topic.partitions):
            reason = "the topic has records that are no events"
            raise Refused("create_topic_failed", f"topic={name} reason={quote(reason)}")
        settings = replace(settings, event_sourcing=True)
    if settings.event_sourcing and settings.compaction:
        raise Refused(
            "invalid_topic_policy",
            'field=cleanup_policy reason="compaction is not supported for event-sourcing topics"',
        )
    growing = count > partitions
    if settings != topic.settings:
        broker.configure_topic(topic, settings, done=None if growing else answer.done)
        if growing:
            broker.grow_topic(topic, count, done=answer.done)
    else:
        broker.grow_topic(topic, count, done=answer.done)


def _refused(name: str, error: BrokerError) -> Refused:
    if error.code is ErrorCode.INVALID_TOPIC:
        return Refused("invalid_topic_name", f"topic={quote(name)} reason={quote(error.message)}", legacy=error.message)
    return Refused("create_topic_failed", f"topic={name} reason={quote(error.message)}", legacy=error.message)


def _name(request: Request, expected: str) -> str:
    name = request.options.get("topic", "")
    if not name:
        raise Refused("missing_topic", f"expected={quote(expected)}", legacy="missing topic name")
    return name


def _positive(request: Request, key: str, usual: int) -> int:
    given = request.options.get(key)
    if given is None:
        return usual
    value = integer(given)
    if value is None or value < 1:
        raise Refused(
            f"invalid_{key}", 'reason="must be a positive integer"', legacy=f"{key} must be a positive integer"
        )
    return value


def delete(session: CursusSession, request: Request, /) -> Reply | None:
    """DELETE: the topic with its data."""
    name = _name(request, "DELETE topic=<name>")
    topic = find_topic(session, name)
    answer = session.later(request.dialect, blocking=True)
    if request.dialect is Dialect.LEGACY:
        answer.body = encoded(f"{REMOVED} Topic '{name}' deleted")
    else:
        answer.body = encoded(f"OK topic={name} deleted=true")
    try:
        session.state.broker.delete_topic(topic, done=answer.done)
    except Busy as error:
        raise Refused(
            "delete_topic_failed", f"topic={name} reason={quote(error.message)}", legacy=error.message
        ) from None
    return None


def list_topics(session: CursusSession, request: Request, /) -> Reply | None:
    """LIST; with a topic the same line as METADATA, which Java's producer looks for (dossier §2.3)."""
    if request.options.get("topic"):
        return metadata(session, request)
    if request.dialect is Dialect.MODERN and request.arguments:
        raise Refused("unknown_command", f"command={quote(request.text)}")
    names = [topic.name.full for topic in session.state.broker.topics() if _may_read(session, topic)]
    if request.dialect is Dialect.LEGACY:
        return encoded(", ".join(names) or "(no topics)")
    return encoded(f"OK count={len(names)} topics={','.join(names)}")


def _may_read(session: CursusSession, topic: Topic) -> bool:
    try:
        session.state.guard.admit_topic(session, topic, Operation.READ)
    except Refused:
        return False
    return True


def describe(session: CursusSession, request: Request, /) -> Reply:
    """DESCRIBE, indented JSON."""
    topic = find_topic(session, _name(request, "DESCRIBE topic=<name>"))
    shown = {
        "status": "OK",
        "topic": topic.name.full,
        "partitions": [
            {
                "id": partition.number,
                "leader": "",
                "replicas": None,
                "isr": None,
                "leo": partition.log.next_offset,
                "hwm": partition.log.readable_offset,
            }
            for partition in topic.partitions
        ],
        "policy": policy_of(topic).described(),
    }
    return encoded(json.dumps(shown, indent=2, ensure_ascii=False))


def metadata(session: CursusSession, request: Request, /) -> Reply:
    """METADATA: every partition is led by the address this client came to."""
    topic = find_topic(session, request.need("topic"))
    host, port = session.address
    count = len(topic.partitions)
    leaders = ",".join([f"{host}:{port}"] * count)
    epochs = ",".join(["0"] * count)
    return encoded(
        f"OK topic={topic.name.full} partitions={count} leaders={leaders} epochs={epochs} {policy_of(topic).spelled()}"
    )


def list_offsets(session: CursusSession, request: Request, /) -> Reply:
    """LIST_OFFSETS, of one partition or all."""
    topic = find_topic(session, request.need("topic"))
    chosen = topic.partitions
    given = request.options.get("partition")
    if given is not None:
        number = integer(given)
        if number is None:
            raise Refused("invalid_partition", f"command={request.name}")
        if not 0 <= number < len(chosen):
            raise Refused("partition_not_found", f"partition={number}")
        chosen = [chosen[number]]
    logs = [(partition.number, partition.log) for partition in chosen]
    shown = ",".join(
        f"P{number}:earliest={log.first_offset}:latest={log.readable_offset}:leo={log.next_offset}:hwm={log.readable_offset}"
        for number, log in logs
    )
    return encoded(f"OK topic={topic.name.full} partitions={len(logs)} offsets={shown}")


COMMANDS: Final[Mapping[str, Command]] = {
    "CREATE": Command(create, permissions=("admin",)),
    "DELETE": Command(delete, permissions=("admin",)),
    "LIST": Command(list_topics, alone=True, permissions=("topic.read",)),
    "DESCRIBE": Command(describe, permissions=("topic.read",)),
    "METADATA": Command(metadata, permissions=("topic.read",)),
    "LIST_OFFSETS": Command(list_offsets, permissions=("topic.read",)),
}
