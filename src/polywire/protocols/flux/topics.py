"""Commands for topics, brokers, roles and leaders (spec: flux#commands, flux#topics).

The response to a change is sent when the change is synced. A rejected command changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from polywire.broker.permissions import Action
from polywire.broker.settings import TopicSettings
from polywire.broker.topics import Partition, Topic
from polywire.protocols.flux.messages import (
    Request,
    bad,
    flag,
    integer,
    integers,
    listed,
    plain_name,
    role,
    topic_name,
    topic_word,
    usage,
)
from polywire.protocols.flux.reply_slots import Answer
from polywire.protocols.flux.session import FluxSession
from polywire.types import TopicName


def _answer(session: FluxSession, request: Request) -> Answer:
    return Answer(session, request.id)


def _finish(session: FluxSession, answer: Answer, payload: str) -> None:
    answer.payload = payload.encode("utf-8", "surrogateescape")
    session.append(answer)


def find_partition(topic: Topic | None, number: int) -> Partition:
    """Return the partition with this number. Raises Refused ``invalid partition``."""
    if topic is None or not 0 <= number < len(topic.partitions):
        raise bad("invalid partition")
    return topic.partitions[number]


def _known_partition(session: FluxSession, name: str, number: int) -> Partition:
    """Return a partition. Raises Refused with the text of metadata commands if it does not exist."""
    if number < 0:
        raise bad("partition must be >= 0")
    topic = session.broker.find_topic(name)
    if topic is None:
        raise bad(f"topic not found: {topic_word(name)}")
    if number >= len(topic.partitions):
        raise bad(f"partition not found: topic={topic_word(name)} partition={number}")
    return topic.partitions[number]


def set_partition_role(session: FluxSession, request: Request, /) -> None:
    """SET_PARTITION_ROLE: set this broker's role for a partition, until the next such request (spec: flux#our-choices)."""
    usage(request, "<topic> <partition> <leader|follower>", 3)
    number = integer(request.args[1], "partition")
    name = topic_name(request.args[0])
    session.ensure_topic(name)
    wanted = role(request.args[2])
    partition = _known_partition(session, name, number)
    answer = _answer(session, request)
    session.state.set_role(partition, wanted, by=session.caller, done=answer.done)
    hw = session.state.hw(partition)
    _finish(session, answer, f"topic={topic_word(name)} partition={number} role={wanted.value.decode()} hw={hw}")


def create_topic(session: FluxSession, request: Request, /) -> None:
    """ADMIN_CREATE_TOPIC: create a topic, or add partitions to an existing one.

    A topic never gets fewer partitions, and its records are unchanged (spec: flux#our-choices).
    """
    usage(request, "<topic> <partitions> <replication_factor>", 3)
    count = integer(request.args[1], "partitions")
    factor = integer(request.args[2], "replication_factor")
    name = topic_name(request.args[0])
    if count <= 0:
        raise bad("partitions must be > 0")
    if factor <= 0:
        raise bad("replication factor must be > 0")
    if factor > session.state.settings.replication_factor_max:
        raise bad(f"replication factor must be <= {session.state.settings.replication_factor_max}")
    answer, by = _answer(session, request), session.caller
    topic = session.broker.find_topic(name)

    def on_created(topic: Topic) -> None:
        if is_new:
            session.state.created(topic, automatic=False, factor=factor, by=by)
        else:
            session.state.recreated(topic, factor, by=by)
        text = (
            f"topic={topic_word(name)} partitions={count} replication_factor={factor} {session.state.term_and_index()}"
        )
        answer.payload = text.encode("utf-8", "surrogateescape")

    is_new = topic is None
    if topic is None:
        settings = TopicSettings(replication_factor=factor)
        begun = session.broker.make_topic(
            TopicName.parse(name), count, settings, by=by, then=on_created, done=answer.done
        )
    elif count < len(topic.partitions):
        raise bad(f"topic has more partitions: topic={topic_word(name)} partitions={len(topic.partitions)}")
    else:
        begun = session.broker.grow_topic(topic, count, then=on_created, done=answer.done)
    answer.blocking = not begun  # so that the next request finds the topic
    session.append(answer)


def register_broker(session: FluxSession, request: Request, /) -> None:
    usage(request, "<broker_id> <host> <port> [epoch]", 3, 4)
    number = integer(request.args[0], "broker_id")
    port = integer(request.args[2], "port")
    epoch = integer(request.args[3], "epoch") if len(request.args) == 4 else 0
    if number < 0:
        raise bad("broker id must be >= 0")
    if port <= 0:
        raise bad("broker port must be > 0")
    host = plain_name(request.args[1], "host")
    answer = _answer(session, request)
    session.state.register(number, host, port, epoch, by=session.caller, done=answer.done)
    _finish(session, answer, f"broker_id={number} host={host} port={port} {session.state.term_and_index()}")


def broker_heartbeat(session: FluxSession, request: Request, /) -> None:
    usage(request, "<broker_id>", 1)
    number = integer(request.args[0], "broker_id")
    if number < 0:
        raise bad("invalid broker heartbeat command")
    answer = _answer(session, request)
    session.state.heartbeat(number, done=answer.done)
    _finish(session, answer, f"broker_id={number} heartbeat=ok {session.state.term_and_index()}")


def set_partition_leader(session: FluxSession, request: Request, /) -> None:
    """ADMIN_SET_PARTITION_LEADER: set the leader and the in-sync replicas, which need not be registered."""
    usage(request, "<topic> <partition> <leader_id> <isr_csv>", 4)
    number, leader = integer(request.args[1], "partition"), integer(request.args[2], "leader_id")
    isr = integers(request.args[3])
    name = topic_name(request.args[0])
    if leader < -1:
        raise bad("leader id must be >= -1")
    partition = _known_partition(session, name, number)
    answer = _answer(session, request)
    session.state.set_leader(partition, leader, isr, by=session.caller, done=answer.done)
    tail = session.state.term_and_index()
    _finish(session, answer, f"topic={topic_word(name)} partition={number} leader={leader} isr={listed(isr)} {tail}")


def ping(session: FluxSession, request: Request, /) -> bytes:
    del session
    if request.args:
        raise bad("PING requires no args")
    return b""


def get_metadata(session: FluxSession, request: Request, /) -> None:
    if request.args:
        raise bad("ADMIN_GET_METADATA requires no args")
    brokers, fenced = listed(session.state.brokers()), listed(session.state.fenced())
    session.later(request, blocking=True).make(metadata(session, f"brokers={brokers} fenced={fenced}".encode()))


def metadata(session: FluxSession, brokers: bytes) -> Iterator[bytes]:
    """Yield the metadata in pieces, because there may be thousands of topics. ``brokers`` is the text at the end."""
    permits, who = session.broker.access.permits, session.principal
    before = b"topics=["
    for topic in session.topics():
        if permits(who, Action.TOPIC_DESCRIBE, topic):
            yield before + topic_word(topic.name.full).encode()
            before = b" "
        else:
            yield b""
    yield (b"topics=[" if before != b" " else b"") + b"] " + brokers


def _fence(session: FluxSession, request: Request, fenced: bool) -> None:
    usage(request, "<broker_id>", 1)
    number = integer(request.args[0], "broker_id")
    if number < 0:
        raise bad("broker id must be >= 0")
    answer = _answer(session, request)
    session.state.fence(number, fenced, done=answer.done)
    _finish(session, answer, f"broker_id={number} fenced={flag(fenced)} {session.state.term_and_index()}")


def fence_broker(session: FluxSession, request: Request, /) -> None:
    _fence(session, request, True)


def unfence_broker(session: FluxSession, request: Request, /) -> None:
    _fence(session, request, False)


def reconcile_broker_health(session: FluxSession, request: Request, /) -> None:
    usage(request, "<timeout_ms>", 1)
    timeout_ms = integer(request.args[0], "timeout_ms")
    if timeout_ms <= 0:
        raise bad("timeout must be > 0")
    answer = _answer(session, request)
    _finish(session, answer, f"reconciled={session.state.reconcile(timeout_ms, done=answer.done)}")


def elect_topic_leaders(session: FluxSession, request: Request, /) -> None:
    usage(request, "<topic>", 1)
    name = topic_name(request.args[0])
    topic = session.broker.find_topic(name)
    if topic is None:
        raise bad(f"topic not found: {topic_word(name)}")
    answer = _answer(session, request)
    changes = session.state.elect(topic, done=answer.done)
    _finish(session, answer, f"topic={topic_word(name)} elected_changes={changes}")
