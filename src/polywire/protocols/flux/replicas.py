"""Reports of follower replicas about the records that they have: REPLICA_FETCH and BROKER_REPLICA_ACK.

A report affects FLUX readers and ``acks=all`` only, never the log (spec: flux#replica_fetch, flux#broker_replica_ack).
"""

from __future__ import annotations

from polywire.protocols.flux.messages import Request, bad, flag, integer, listed, topic_name, usage
from polywire.protocols.flux.metadata import Replication
from polywire.protocols.flux.session import FluxSession
from polywire.protocols.flux.topics import find_partition


def _report(session: FluxSession, request: Request, field: str, offset_field: str) -> tuple[int, int, int, Replication]:
    number = integer(request.args[1], "partition")
    follower = integer(request.args[2], field)
    offset = integer(request.args[3], offset_field)
    topic = session.broker.find_topic(topic_name(request.args[0]))
    if not 1 <= follower < session.state.factor_of(topic):
        raise bad("invalid replica id")
    partition = find_partition(topic, number)
    if not session.state.is_leader(partition):
        raise bad("partition is not leader")
    return number, follower, offset, session.state.acknowledge(partition, follower, offset)


def _replicated(offset: int, now: Replication) -> str:
    return f"acked_offset={offset} hw={now.hw} isr={listed(now.isr)} under_replicated={flag(now.under_replicated)}"


def replica_fetch(session: FluxSession, request: Request, /) -> bytes:
    """REPLICA_FETCH: record the offset that the follower has reached. No records are returned."""
    usage(request, "<topic> <partition> <replica_id> <offset>", 4)
    _, follower, offset, now = _report(session, request, "replica_id", "offset")
    return f"replica={follower} {_replicated(offset, now)}".encode()


def broker_replica_ack(session: FluxSession, request: Request, /) -> bytes:
    """BROKER_REPLICA_ACK: record the offset that a follower has reached, as reported by another broker."""
    usage(request, "<topic> <partition> <follower_id> <acked_offset>", 4)
    number, follower, offset, now = _report(session, request, "follower_id", "acked_offset")
    head = b"topic=%b partition=%d follower=%d " % (request.args[0], number, follower)
    return head + _replicated(offset, now).encode()
