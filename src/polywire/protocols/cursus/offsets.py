"""Committed offsets of groups: COMMIT_OFFSET, BATCH_COMMIT, COMMIT and FETCH_OFFSET.

Over this protocol, a committed offset never decreases. A list is committed completely or not at all (spec:
cursus#group-requests, cursus#group-answers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from polywire.broker.permissions import Action
from polywire.errors import BrokerError
from polywire.protocols.cursus.context import WIRE
from polywire.protocols.cursus.groups import GroupRequest, admit, check_topic, member_request, number
from polywire.protocols.cursus.messages import POSITIONS, Dialect, Refused, Request, encoded, integer, quote, topic_word
from polywire.protocols.cursus.read_arguments import DEFAULT_GROUP
from polywire.protocols.cursus.reply_slots import Answer
from polywire.protocols.cursus.session import Command, CursusSession, Reply
from polywire.types import PARTITION_COUNT_MAX, PositionKind

Pairs = Mapping[int, int]
"""Next offsets by partition."""


def commit_offset(session: CursusSession, request: Request, /) -> Reply | None:
    """COMMIT_OFFSET: commit one offset, unless the member is fenced or the offset would decrease."""
    topic, partition = request.need("topic"), number(request, "partition")
    group, offset = request.need("group"), number(request, "offset")
    check_topic(session, request, topic, group)
    group_request = member_request(session, request)
    pairs = {partition: offset}
    if request.is_set("validate_only"):
        check_offsets(group_request, pairs, _single_regression)
        return b"OK validated=true"
    return _commit(request, group_request, pairs, _single_regression, b"OK")


def batch_commit(session: CursusSession, request: Request, /) -> Reply | None:
    group_request = member_request(session, request)
    pairs = read_pairs(request, group_request.group, group_request.topic)
    return _commit(request, group_request, pairs, _batch_regression, encoded(f"OK batched={len(pairs)}"))


def read_pairs(request: Request, group: str, topic: str) -> dict[int, int]:
    """Parse a list such as ``P0:1,P1:2`` among the arguments; the letter is optional (spec: cursus#group-answers).

    Raises Refused for a malformed list.
    """
    words = [word for word in request.words if "=" not in word]
    if request.dialect is not Dialect.MODERN:
        words = list(request.words[len(POSITIONS[request.name]) - 1 :]) or [""]
    if len(words) > 1:  # a client that separates the list by blanks must not believe that all offsets were committed
        raise Refused("invalid_batch_commit_entry", f"entry={quote(' '.join(words))}")
    entries = (words or request.words or ("",))[-1].split(",")
    if len(entries) > PARTITION_COUNT_MAX:
        raise Refused("invalid_batch_commit_entry", f"reason={quote(f'more than {PARTITION_COUNT_MAX} entries')}")
    pairs: dict[int, int] = {}
    for entry in entries:
        name, colon, text = entry.partition(":")
        if not colon:
            raise Refused("invalid_batch_commit_entry", f"entry={quote(entry)}")
        partition, offset = integer(name.removeprefix("P")), integer(text)
        if partition is None or not 0 <= partition < PARTITION_COUNT_MAX:
            raise Refused("invalid_partition", f"entry={quote(entry)}")
        if offset is None or offset < 0:
            raise Refused("invalid_offset", f"entry={quote(entry)}")
        if partition in pairs:
            raise Refused("duplicate_partition", f"partition={partition} group={group} topic={topic_word(topic)}")
        pairs[partition] = offset
    return pairs


Regression = Callable[[GroupRequest, int, int, int], str]
"""    Formats why an offset may not decrease, given the request, the partition, and the current and the new offset."""


def _single_regression(group_request: GroupRequest, partition: int, current: int, got: int) -> str:
    return (
        f"offset regression group={group_request.group} topic={topic_word(group_request.topic)} partition={partition}"
        f" current={current} got={got}"
    )


def _batch_regression(group_request: GroupRequest, partition: int, current: int, got: int) -> str:
    return (
        f"offset regression for group={group_request.group} topic={topic_word(group_request.topic)} partition={partition}:"
        f" current={current} attempted={got}"
    )


def check_offsets(group_request: GroupRequest, pairs: Pairs, regression: Regression) -> None:
    """Raise Refused if the member may not commit these offsets. This counts as a heartbeat."""
    assert group_request.generation is not None, "a fenced commit has a generation"
    groups, by = group_request.session.state.local.groups, group_request.session.caller
    who = group_request.group, group_request.topic, group_request.member, group_request.generation
    try:
        owned = groups.heartbeat(*who, wire=WIRE, by=by).partitions
    except BrokerError as error:
        raise group_request.refused(error, next(iter(pairs), None)) from None
    foreign = pairs.keys() - set(owned)
    if foreign:
        raise group_request.not_owner(next(partition for partition in pairs if partition in foreign))
    group_request.session.state.generations_used.mark(group_request.key, group_request.member, group_request.generation)
    _check_forward(group_request, pairs, regression)


def _check_forward(group_request: GroupRequest, pairs: Pairs, regression: Regression) -> None:
    positions = group_request.session.state.local.positions_in(
        group_request.topic, PositionKind.GROUP, group_request.group, pairs, latest=True
    )
    for partition, offset in pairs.items():
        current = positions.get(partition)
        if current is not None and offset < current:
            reason = regression(group_request, partition, current, offset)
            raise Refused("offset_regression", f"reason={quote(reason)}")


def _commit(
    request: Request, group_request: GroupRequest, pairs: Pairs, regression: Regression, reply: bytes
) -> Reply | None:
    check_offsets(group_request, pairs, regression)
    answer = group_request.session.later(request.dialect, blocking=True)
    answer.body = reply
    _store(group_request, pairs, answer)
    return None


def _store(group_request: GroupRequest, pairs: Pairs, answer: Answer) -> None:
    generation = -1 if group_request.generation is None else group_request.generation
    group_request.session.state.local.commit_positions(
        group_request.topic,
        pairs,
        PositionKind.GROUP,
        group_request.group,
        generation=generation,
        by=group_request.session.caller,
        done=answer.done,
    )


def commit_unfenced(session: CursusSession, request: Request, /) -> Reply | None:
    """COMMIT of older clients, which need not be members of the group.

    Offsets must not decrease (spec: cursus#group-answers).
    """
    topic, group = request.need("topic"), request.need("group")
    pairs = {number(request, "partition"): number(request, "offset")}
    admit(session, topic, Action.OFFSET_COMMIT)
    _check_partitions(session, topic, pairs)
    group_request = GroupRequest(session, topic, group)
    _check_forward(group_request, pairs, _single_regression)
    answer = session.later(request.dialect, blocking=True)
    answer.body = b"OK"
    _store(group_request, pairs, answer)
    return None


def _check_partitions(session: CursusSession, name: str, pairs: Pairs) -> None:
    topic = session.state.local.find_topic(name)
    if topic is None:
        raise Refused("topic_not_found", f"topic={topic_word(name)}")
    missing = pairs.keys() - range(len(topic.partitions))
    if missing:
        raise Refused("partition_not_found", f"partition={min(missing)}")


def fetch_offset(session: CursusSession, request: Request, /) -> Reply:
    """FETCH_OFFSET: return the committed offset; 0 if the group has not committed one."""
    topic = request.need("topic")
    partition = number(request, "partition")
    group = request.need("group")
    admit(session, topic, Action.OFFSET_FETCH)
    broker = session.state.local
    offset = broker.position(topic, partition, PositionKind.GROUP, group)
    if offset is None and broker.groups.view(group, topic) is None:
        check_topic(session, request, topic, group)
        if group != DEFAULT_GROUP and broker.groups.bound_to(WIRE, group) is None:
            raise Refused("group_not_found", f"group={group}")
    return encoded(f"OK offset={offset or 0}")


COMMANDS: Final = (
    Command("COMMIT", commit_unfenced, (Action.OFFSET_COMMIT,)),
    Command("COMMIT_OFFSET", commit_offset, (Action.OFFSET_COMMIT,)),
    Command("BATCH_COMMIT", batch_commit, (Action.OFFSET_COMMIT,)),
    Command("FETCH_OFFSET", fetch_offset, (Action.OFFSET_FETCH,)),
)
