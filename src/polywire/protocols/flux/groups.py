"""Commands for consumer groups (spec: flux#groups). The broker's coordinator implements groups for all protocols."""

from __future__ import annotations

from typing import Final

from polywire.protocols.flux.context import WIRE
from polywire.protocols.flux.messages import (
    Request,
    bad,
    integer,
    listed,
    named,
    plain_name,
    text_of,
    topic_name,
    usage,
)
from polywire.protocols.flux.reply_slots import Answer
from polywire.protocols.flux.session import FluxSession
from polywire.types import Assignor, PositionKind

# generation of a new group before its first member, so that the first JOIN is answered with generation 2
FIRST_GENERATION: Final = 1
_MEMBER: Final = "<group> <topic> <consumer_id> <generation>"


def _assignor(text: bytes) -> Assignor:
    name, _, value = text.decode("utf-8", "replace").partition("=")
    if name == "assignor" and value in ("round_robin", "range"):
        return Assignor(value)
    raise bad("invalid assignor; expected assignor=round_robin|range")


def _assignment(generation: int, partitions: tuple[int, ...]) -> bytes:
    return f"generation={generation} assigned={listed(partitions)}".encode()


def join(session: FluxSession, request: Request, /) -> None:
    usage(request, "<group> <topic> <consumer_id> [assignor=round_robin|range]", 3, 4)
    assignor = _assignor(request.args[3]) if len(request.args) == 4 else None
    group, member = plain_name(request.args[0], "group"), plain_name(request.args[2], "consumer_id")
    topic = topic_name(request.args[1])
    answer = Answer(session, request.id)
    place = session.broker.groups.join(
        group,
        topic,
        member,
        wire=WIRE,
        assignor=assignor,
        first_generation=FIRST_GENERATION,
        named_alone=True,
        by=session.caller,
        done=answer.done,
    )
    answer.payload = _assignment(place.generation, place.partitions)
    session.append(answer)


def _names(request: Request) -> tuple[str, str, str, int]:
    """Return group, topic, member and generation. An invalid name is treated like an unknown one."""
    group, member = text_of(request.args[0]), text_of(request.args[2])
    return group, named(request.args[1]), member, integer(request.args[3], "generation")


def sync(session: FluxSession, request: Request, /) -> bytes:
    usage(request, _MEMBER, 4)
    place = session.broker.groups.sync(*_names(request), wire=WIRE, by=session.caller)
    return _assignment(place.generation, place.partitions)


def heartbeat(session: FluxSession, request: Request, /) -> bytes:
    usage(request, _MEMBER, 4)
    session.broker.groups.heartbeat(*_names(request), wire=WIRE, by=session.caller)
    return b"heartbeat=ok"


def leave(session: FluxSession, request: Request, /) -> None:
    usage(request, _MEMBER, 4)
    answer = Answer(session, request.id)
    answer.payload = b"left=true"
    session.broker.groups.leave(*_names(request), wire=WIRE, by=session.caller, done=answer.done)
    session.append(answer)


def commit(session: FluxSession, request: Request, /) -> None:
    """COMMIT: store the group's offset. The partition need not have a record at it."""
    usage(request, "<group> <topic> <consumer_id> <generation> <partition> <offset>", 6)
    names = _names(request)
    place = integer(request.args[4], "partition"), integer(request.args[5], "offset")
    answer = Answer(session, request.id)
    answer.payload = b"committed=true"
    session.broker.groups.commit(*names, *place, wire=WIRE, by=session.caller, done=answer.done)
    session.append(answer)


def offset(session: FluxSession, request: Request, /) -> bytes:
    """OFFSET: return the group's committed offset; 0 if there is none."""
    usage(request, "<group> <topic> <partition>", 3)
    number = integer(request.args[2], "partition")
    group, topic = text_of(request.args[0]), named(request.args[1])
    return b"offset=%d" % (session.broker.position(topic, number, PositionKind.GROUP, group) or 0)
