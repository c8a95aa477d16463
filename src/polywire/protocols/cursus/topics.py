"""Commands for topics: CREATE, DELETE, LIST, DESCRIBE, METADATA, LIST_OFFSETS (spec: cursus#topics)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from polywire.broker.access import Principal
from polywire.broker.permissions import Action
from polywire.broker.settings import TopicSettings
from polywire.broker.topic_verbs import Then
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode, Invalid
from polywire.log.base import Completion
from polywire.protocols.cursus.context import CursusBroker
from polywire.protocols.cursus.messages import (
    Dialect,
    Refused,
    Request,
    encoded,
    integer,
    quote,
    topic_fault,
    topic_word,
)
from polywire.protocols.cursus.policies import (
    POLICY_KEYS,
    REPLICATION_FACTOR,
    is_governed,
    policy_of,
    read_policy,
    with_policy,
)
from polywire.protocols.cursus.session import Command, CursusSession, Reply
from polywire.types import TopicName, spell_address

CREATE_PARTITIONS: Final = 4  # default number of partitions (spec: cursus#create)
DONE: Final = "\u2705"
REMOVED: Final = "\U0001f5d1\ufe0f"


def find_topic(session: CursusSession, name: str) -> Topic:
    """Return the topic with this name. Raises Refused ``topic_not_found``."""
    topic = session.state.local.find_topic(name)
    if topic is None:
        raise Refused("topic_not_found", f"topic={topic_word(name)}", legacy=f"topic '{topic_word(name)}' not found")
    return topic


def create(session: CursusSession, request: Request, /) -> Reply | None:
    name = _name(request, "CREATE topic=<name> [partitions=<N>]")
    # only names of new topics are checked: topics of other protocols may have other names, and can still grow
    if session.state.local.find_topic(name) is None:
        _check_name(name)
    count = _positive(request, "partitions", CREATE_PARTITIONS)
    factor = _positive(request, "replication_factor", REPLICATION_FACTOR)
    policy = read_policy(request)
    broker = session.state.local
    answer = session.later(request.dialect, blocking=True)
    topic = broker.find_topic(name)

    def on_created(topic: Topic) -> None:
        if request.dialect is Dialect.LEGACY:
            answer.body = encoded(f"{DONE} Topic '{topic_word(name)}' now has {len(topic.partitions)} partitions")
        else:
            answer.body = encoded(
                f"OK topic={topic_word(name)} partitions={len(topic.partitions)} {policy_of(topic).encoded()}"
            )

    def done(result: int | BrokerError) -> None:
        if isinstance(result, (Invalid, Conflict, Busy)):
            answer.refuse(_refused(name, result))
        else:
            answer.done(result)

    try:
        if topic is not None:
            _change(session, topic, request, count, on_created, done)
        else:
            settings = TopicSettings(
                replication_factor=factor,
                idempotent=request.is_set("idempotent"),
                event_sourcing=request.is_set("event_sourcing"),
            )
            given = with_policy(settings, policy)
            broker.make_topic(TopicName.parse(name), count, given, by=session.caller, then=on_created, done=done)
    except (Invalid, Conflict, Busy) as error:
        if isinstance(error, Busy):
            session.state.broker.find_topic(name)  # raises Pending if another process has begun to create the topic
        raise _refused(name, error) from None
    return None


def _change(
    session: CursusSession, topic: Topic, request: Request, count: int, on_created: Then, done: Completion[int]
) -> None:
    """Apply CREATE to an existing topic: add partitions, and replace its policy.

    The settings of a topic of another protocol are unchanged until a CREATE has a policy: clients send a CREATE without
    one whenever they start.
    """
    broker, name, partitions = session.state.local, topic.name.full, len(topic.partitions)
    if count < partitions:
        if request.dialect is not Dialect.LEGACY:
            reason = f"cannot decrease partition count for topic '{topic_word(name)}': {partitions} -> {count}"
            raise Refused("create_topic_failed", f"topic={topic_word(name)} reason={quote(reason)}")
        count = partitions
    settings = topic.settings
    if is_governed(topic) or POLICY_KEYS & request.options.keys():
        settings = with_policy(settings, read_policy(request))
    settings = replace(settings, idempotent=settings.idempotent or request.is_set("idempotent"))
    if request.is_set("event_sourcing") and not settings.event_sourcing:
        if any(partition.log.next_offset for partition in topic.partitions):
            reason = "the topic has records that are not events"
            raise Refused("create_topic_failed", f"topic={topic_word(name)} reason={quote(reason)}")
        settings = replace(settings, event_sourcing=True)
    if settings.event_sourcing and settings.compaction:
        raise Refused(
            "invalid_topic_policy",
            'field=cleanup_policy reason="compaction is not supported for event-sourcing topics"',
        )
    if settings != topic.settings:
        broker.configure_topic(topic, settings)
    broker.grow_topic(topic, count, then=on_created, done=done)


def _refused(name: str, error: BrokerError) -> Refused:
    if error.code is ErrorCode.INVALID_TOPIC:
        return Refused("invalid_topic_name", f"topic={quote(name)} reason={quote(error.message)}", legacy=error.message)
    return Refused(
        "create_topic_failed", f"topic={topic_word(name)} reason={quote(error.message)}", legacy=error.message
    )


def _name(request: Request, expected: str) -> str:
    name = request.options.get("topic", "")
    if not name:
        raise Refused("missing_topic", f"expected={quote(expected)}", legacy="missing topic name")
    return name


def _check_name(name: str) -> None:
    fault = topic_fault(name)
    if fault is not None:
        raise Refused("invalid_topic_name", f"topic={quote(name)} reason={quote(fault)}", legacy=fault)


def _positive(request: Request, key: str, default: int) -> int:
    given = request.options.get(key)
    if given is None:
        return default
    value = integer(given)
    if value is None or value < 1:
        raise Refused(
            f"invalid_{key}", 'reason="must be a positive integer"', legacy=f"{key} must be a positive integer"
        )
    return value


def delete(session: CursusSession, request: Request, /) -> Reply | None:
    name = _name(request, "DELETE topic=<name>")
    if session.state.local.find_topic(name) is None:
        _check_name(name)
    topic = find_topic(session, name)
    answer = session.later(request.dialect, blocking=True)
    if request.dialect is Dialect.LEGACY:
        answer.body = encoded(f"{REMOVED} Topic '{topic_word(name)}' deleted")
    else:
        answer.body = encoded(f"OK topic={topic_word(name)} deleted=true")
    try:
        session.state.local.delete_topic(topic, done=answer.done)
    except Busy as error:
        raise Refused(
            "delete_topic_failed", f"topic={topic_word(name)} reason={quote(error.message)}", legacy=error.message
        ) from None
    return None


def list_topics(session: CursusSession, request: Request, /) -> Reply | None:
    """LIST: return the names of topics.

    If the request names a topic, the response is the same as for METADATA, because Java's producer expects that
    (spec: cursus#list).
    """
    name = request.options.get("topic")
    if name:
        session.state.guard.admit_topic(session, session.state.local.resource(name), Action.TOPIC_DESCRIBE)
        return metadata(session, request)
    if request.dialect is Dialect.MODERN and request.arguments:
        raise Refused("unknown_command", f"command={quote(request.text)}")
    session.state.require_latest()
    answer = session.later(request.dialect, blocking=True)
    answer.make(_list(session.broker, session.state.guard.acting, legacy=request.dialect is Dialect.LEGACY))
    return None


def _list(broker: CursusBroker, acting: Principal | None, *, legacy: bool) -> Iterator[bytes]:
    """Yield the response with the names of topics.

    Before it, empty bytes are yielded, so that other requests can run. ``acting`` is the user of the request: the
    connection may have begun other requests meanwhile.
    """
    names: list[str] = []
    for topic in broker.topics():
        if broker.access.permits(acting, Action.FETCH, topic):
            names.append(topic_word(topic.name.full))
        yield b""
    if legacy:
        yield encoded(", ".join(names) or "(no topics)")
    else:
        yield encoded(f"OK count={len(names)} topics={','.join(names)}")


def describe(session: CursusSession, request: Request, /) -> Reply | None:
    topic = find_topic(session, _name(request, "DESCRIBE topic=<name>"))
    session.later(request.dialect, blocking=True).make(_description(topic))
    return None


def _description(topic: Topic) -> Iterator[bytes]:
    """Yield the JSON that ``json.dumps`` with an indent would return, one partition at a time."""
    policy = json.dumps({"policy": policy_of(topic).described()}, indent=2, ensure_ascii=False)
    yield encoded(f'{{\n  "status": "OK",\n  "topic": {quote(topic_word(topic.name.full))},\n  "partitions": [')
    for partition in list(topic.partitions):
        log = partition.log
        comma = "," if partition.number else ""
        yield encoded(
            f'{comma}\n    {{\n      "id": {partition.number},\n      "leader": "",\n      "replicas": null,\n      "isr": null,'
            f'\n      "leo": {log.next_offset},\n      "hwm": {log.readable_offset}\n    }}'
        )
    end = "\n  ]" if topic.partitions else "]"
    yield encoded(end + "," + policy[1:])


def metadata(session: CursusSession, request: Request, /) -> Reply:
    """METADATA: report this process as the leader of every partition.

    The address remains valid after a failover, because producers request it only once.
    """
    topic = find_topic(session, request.need("topic"))
    count, places, at = len(topic.partitions), session.state.places, session.address
    leaders = ",".join([spell_address(*(at if places is None else places.alone(at)))] * count)
    epochs = ",".join(["0"] * count)
    return encoded(
        f"OK topic={topic_word(topic.name.full)} partitions={count} leaders={leaders} epochs={epochs} {policy_of(topic).encoded()}"
    )


def list_offsets(session: CursusSession, request: Request, /) -> Reply | None:
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
    session.later(request.dialect, blocking=True).make(_offsets(topic.name.full, list(chosen)))
    return None


def _offsets(name: str, partitions: Sequence[Partition]) -> Iterator[bytes]:
    yield encoded(f"OK topic={topic_word(name)} partitions={len(partitions)} offsets=")
    comma = ""
    for partition in partitions:
        log = partition.log
        yield encoded(
            f"{comma}P{partition.number}:earliest={log.first_offset}:latest={log.readable_offset}"
            f":leo={log.next_offset}:hwm={log.readable_offset}"
        )
        comma = ","


COMMANDS: Final = (
    Command("CREATE", create, (Action.TOPIC_CREATE, Action.TOPIC_ALTER)),
    Command("DELETE", delete, (Action.TOPIC_DELETE,)),
    Command("LIST", list_topics, (Action.TOPIC_LIST,), alone=True),
    Command("DESCRIBE", describe, (Action.TOPIC_DESCRIBE,)),
    Command("METADATA", metadata, (Action.TOPIC_DESCRIBE,)),
    Command("LIST_OFFSETS", list_offsets, (Action.TOPIC_DESCRIBE,)),
)
