"""Mechanisms of connections and sessions, with a switch that disables one in the wires simulation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any, Final

import pytest

from polywire.broker.access import Access, User
from polywire.broker.authentication import Authentication
from polywire.broker.authorization import Authorization
from polywire.broker.groups.coordinator import Coordinator
from polywire.broker.groups.group import Holdings
from polywire.broker.passwords import Passwords
from polywire.broker.producers import Producers
from polywire.broker.scram import Verifier
from polywire.broker.staging import StagedPublish
from polywire.broker.transactions import Transactions
from polywire.protocols.flux.session import FluxSession
from polywire.protocols.iggy.session import IggySession
from polywire.protocols.kafka import produce
from polywire.protocols.kafka import transactions as kafka_transactions
from polywire.protocols.kafka.factory import KafkaFactory
from polywire.protocols.kafka07.messages import Request
from polywire.protocols.kafka07.session import KafkaSession
from polywire.protocols.runtime.append_queue import AppendQueue
from polywire.protocols.runtime.framed import FramedSession
from polywire.protocols.runtime.pipelined import BarePipelined, PipelinedSession
from polywire.server.connection import Connection
from polywire.server.connection_slots import ConnectionSlots
from polywire.server.hub import Hub
from polywire.server.receive_buffer import ReceiveBuffer
from polywire.server.scheduling import RunQueue
from polywire.server.sending import SendingHalf
from polywire.types import Level
from tests.sim.broker_mutations import any_generation, any_partition
from tests.sim.mutation import Mutation, nothing, replaced, wrapped
from tests.sim.wires.network import SimulatedTransport
from tests.unit.broker import test_consumer_groups
from tests.unit.protocols.kafka import test_auth
from tests.unit.protocols.kafka.dialogue import World
from tests.unit.protocols.kafka07 import test_stored
from tests.unit.protocols.runtime import test_append_queue

WiresMutation: Final = partial(Mutation, world="wires")


def _settled_early(old: Callable[..., memoryview], connection: Connection, size: int) -> memoryview:
    """Read into memory that a write batch views."""
    connection._hub.memory.batch_committed()
    return old(connection, size)


def _unpaused(connection: Connection, reason: int) -> None:
    connection._pauses |= reason


def _dropped(connection: Connection) -> bool:
    """Drop pending responses of a half-closed client."""
    connection._stop_offering()
    return False


def _kept(connection: Connection, error: Exception | None) -> None:
    """Keep the slot, session and memory of a lost connection."""
    connection._unclog()


def _one_too_many(old: Callable[[ReceiveBuffer, int], None], buffer: ReceiveBuffer, count: int) -> None:
    """Offer the last consumed byte again."""
    old(buffer, max(count - 1, 0))


def _answered_in_any_order(old: Callable[[Any], None], session: PipelinedSession[Any, Any]) -> None:
    """Send responses as soon as they are known."""
    session._slots = deque(sorted(session._slots, key=lambda slot: slot.parts is None))
    old(session)


def _committed(old: Callable[..., Any], transactions: Transactions, transaction: Any, **named: Any) -> Any:
    """Commit what the holder aborts."""
    if "raises_epoch" in named or named["done"] is None:
        return old(transactions, transaction, **named)
    transactions.commit(transaction, **named)
    return transaction


def _stored_at_once(
    session: Any, transactional_id: str, version: int, partition: Any, head: Any, batch: bytearray, done: Any
) -> None:
    """Store records of a transaction before its end."""
    session.broker.produce(partition, batch, by=session.caller, level=Level.SYNCED, done=done)


def _reported_at_once(session: KafkaSession, data: memoryview, request: Request) -> None:
    """Answer a request after sets before they are stored."""
    session._commands[request.kind].handler(session, data, request)


def _overtakes(old: Callable[..., None], queue: AppendQueue, *args: Any, **named: Any) -> None:
    """Let later records overtake those that wait for the log."""
    held = list(queue.waiting)
    queue.waiting.clear()
    old(queue, *args, **named)
    queue.waiting.extendleft(reversed(held))


def _takes_more(old: Callable[..., bool], session: PipelinedSession[Any, Any]) -> bool:
    """Accept requests while records wait for the log."""
    return PipelinedSession._waits(session)


def _recognised_early(old: Callable[..., bool | None], factory: KafkaFactory, prefix: bytes) -> bool | None:
    """Take a prefix that may become a Kafka request for one."""
    return old(factory, prefix) is not False


def _never_repeats(old: Callable[..., Any], *args: Any, **named: Any) -> None:
    """Treat every batch as new."""
    old(*args, **named)


def _all_is_one(patch: pytest.MonkeyPatch) -> None:
    """Treat all levels of acknowledgement alike."""
    patch.setattr(produce, "ALL", None)
    patch.setattr(produce, "LEVELS", {0: Level.MEMORY, 1: Level.WRITTEN, -1: Level.WRITTEN})


def _overtaken(patch: pytest.MonkeyPatch) -> None:
    """Accept requests while records wait, and let them overtake."""
    wrapped(AppendQueue, "produce", _overtakes)(patch)
    for kind in (FluxSession, IggySession):
        wrapped(kind, "_waits", _takes_more)(patch)


def _no_positions(*_: object, **__: object) -> Iterator[Any]:
    """Leave offsets out of a commit."""
    return iter(())


def _in_part(old: Callable[..., Any], staging: Any, writer: str, number: int, tokens: Any, **named: Any) -> Any:
    """Leave out the last token of a publish."""
    return old(staging, writer, number, tokens[:-1] or tokens, **named)


def _reported_before(old: Callable[..., None], access: Access, user: User, done: Any, **named: Any) -> None:
    """Acknowledge a changed user before it is stored."""
    old(access, user, None, **named)
    if done is not None:
        access._loop.call_soon(done, user)


def _whatever_counts(
    old: Callable[..., Any], access: Authentication, name: str, right: Any, peer: str, _: object
) -> Any:
    """Accept credentials that were valid when the login began."""
    return old(access, name, right, peer, lambda _: True)


@wraps(test_auth.test_verifiers_of_a_user_changed_during_the_login_are_refused)
def _proved_meanwhile() -> None:
    world = World()
    world.memory.broker.access.configure([test_auth.ALICE, test_auth.BOB])
    world.memory.run()
    test_auth.test_verifiers_of_a_user_changed_during_the_login_are_refused(world)


WIRES_MUTATIONS: Final[Sequence[Mutation]] = (
    WiresMutation(
        "viewed-memory", "what a write batch views is not read into", wrapped(Connection, "get_buffer", _settled_early)
    ),
    WiresMutation(
        "paused-reading", "a paused connection is not read", replaced(SimulatedTransport, "pause_reading", nothing)
    ),
    WiresMutation(
        "pauses", "a session is not offered bytes while it is paused", replaced(Connection, "_pause", nothing)
    ),
    WiresMutation(
        "resumed", "a session that takes requests again is offered them", replaced(Connection, "resume", nothing)
    ),
    WiresMutation(
        "drained", "a peer that reads again is answered", replaced(Connection, "resume_writing", SendingHalf._unclog)
    ),
    WiresMutation(
        "half-closed", "who sends nothing more is answered", replaced(Connection, "eof_received", _dropped), first=21
    ),
    WiresMutation("finished", "a session closes once it owes nothing", replaced(FramedSession, "finish", nothing)),
    WiresMutation("lost", "a lost connection leaves nothing behind", replaced(Connection, "connection_lost", _kept)),
    WiresMutation("slots", "connections have a limit", replaced(ConnectionSlots, "enter", lambda *_: True)),
    WiresMutation("queue-turns", "who waits for its turn has it", replaced(RunQueue, "_call", nothing)),
    WiresMutation("relief", "who waits for the log goes on", replaced(Hub, "_relieved", nothing)),
    WiresMutation(
        "consumed", "what was consumed is not offered again", wrapped(ReceiveBuffer, "consumed", _one_too_many)
    ),
    WiresMutation(
        "backlog", "who does not read is read no further", replaced(Connection, "backlog", property(lambda _: 0))
    ),
    WiresMutation(
        "answer-order",
        "answers keep the order of requests",
        wrapped(BarePipelined, "slot_filled", _answered_in_any_order),
    ),
    WiresMutation("sent-again", "repeated requests store records once", wrapped(Producers, "find", _never_repeats)),
    WiresMutation(
        "wire-positions", "positions come with a commit", replaced(Transactions, "_positions", _no_positions)
    ),
    WiresMutation("wire-publish", "a publish has all that it names", wrapped(StagedPublish, "publishing", _in_part)),
    WiresMutation(
        "wire-publish-once", "a number is published once", replaced(StagedPublish, "_is_published", lambda *_: False)
    ),
    WiresMutation("permissions", "who may not is refused", replaced(Authorization, "permits", lambda *_: True)),
    WiresMutation(
        "ended-logins", "a revoked token ends its logins", replaced(Authentication, "is_current", lambda *_: True)
    ),
    WiresMutation("proofs", "who proves nothing is kept out", replaced(Verifier, "admits", lambda *_: True)),
    WiresMutation(
        "proofs-current",
        "a password counts no more once it is replaced",
        wrapped(Authentication, "_verified_principal", _whatever_counts),
        test=_proved_meanwhile,
    ),
    WiresMutation("passwords", "another password is another", replaced(Passwords, "known", lambda *_: True)),
    WiresMutation(
        "ended-passwords", "a replaced password ends its logins", replaced(Authentication, "_end_logins", nothing)
    ),
    WiresMutation(
        "rights-synced",
        "permissions are synced before they are acknowledged",
        wrapped(Access, "_store_user", _reported_before),
    ),
    WiresMutation("acks", "acks=all waits for the disk", _all_is_one, first=9),
    WiresMutation(
        "wire-generation",
        "a member of an old generation stores nothing",
        wrapped(Coordinator, "_check", any_generation),
    ),
    WiresMutation(
        "wire-ownership", "a member stores what is its own", wrapped(Coordinator, "check_member", any_partition)
    ),
    WiresMutation("holdings", "a partition has one reader", replaced(Holdings, "owned", lambda _, __, share: share)),
    WiresMutation(
        "not-back",
        "who has not come back stores nothing that others were dealt",
        replaced(Coordinator, "has_changed", lambda *_: False),
        test=test_consumer_groups.test_a_member_cannot_commit_after_a_restart_once_partitions_were_reassigned,
    ),
    WiresMutation("wire-abort", "what is aborted is not there", wrapped(Transactions, "abort", _committed)),
    WiresMutation(
        "wire-staged",
        "records of a transaction wait for its end",
        replaced(kafka_transactions, "stage", _stored_at_once),
    ),
    WiresMutation(
        "stored-first",
        "over Kafka 0.7 an answer waits for the sets before it",
        replaced(KafkaSession, "_begin", _reported_at_once),
        test=test_stored.test_requests_after_sets_wait_for_the_durability_of_the_broker,
    ),
    WiresMutation(
        "settled",
        "who reads is shown what this connection has stored",
        replaced(BarePipelined, "_earlier_answered", lambda _: True),
    ),
    WiresMutation(
        "busy-order",
        "what waits for the log is not overtaken",
        _overtaken,
        test=test_append_queue.test_waiting_batches_keep_their_order,
    ),
    WiresMutation(
        "recognised", "a wire is recognised once enough has come", wrapped(KafkaFactory, "recognise", _recognised_early)
    ),
)
