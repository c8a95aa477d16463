"""Execute Kafka requests that another process of the broker forwards for its client (decision 0128).

* The client's permissions are checked here.
* Offsets are stored in the order of a group's generations, even if a request arrives late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from polywire.log.base import Completion
from polywire.protocols.kafka import positions, transactions
from polywire.protocols.kafka.context import Shared
from polywire.protocols.kafka.messages import Api
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import Command, KafkaSession
from polywire.protocols.runtime.forwarded import ForwardedRequests, Sender
from polywire.protocols.runtime.session import Output

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import OffsetCommitRequest, TxnOffsetCommitRequest

NO_GENERATION: Final = -1


class Origin(NamedTuple):
    """The process that forwards a request: its shard, and the number of starts of its broker."""

    shard: int
    start: int

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


class ForwardedKafkaSession(KafkaSession):
    """Executes the requests of a client of another process."""

    __slots__ = ("origin",)

    def __init__(
        self,
        shared: Shared,
        table: Mapping[Api, Command],
        sender: Sender,
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        """Open the session. Raises Denied if the client's user was deleted."""
        super().__init__(shared, table, output, resume)
        self.origin: Final = msgspec.msgpack.decode(sender.context, type=Origin)
        if sender.user is not None:
            self._principal = shared.broker.access.vouched(sender.user, sender.peer)


def execute(
    shared: Shared, table: Mapping[Api, Command], sender: Sender, requests: memoryview, then: Completion[bytes]
) -> ForwardedRequests:
    """Execute forwarded requests (see ``Executor``).

    They are rejected if this process does not know the client's user.
    """
    run = ForwardedRequests(shared.broker.loop, requests, sender.peer, None, then)
    return run.run(partial(ForwardedKafkaSession, shared, table, sender))


def offset_commit(session: KafkaSession, answer: Answer, request: OffsetCommitRequest, /) -> None:
    """Commit offsets for a group that another shard coordinates.

    The coordinator has checked the member and its generation.
    """
    assert isinstance(session, ForwardedKafkaSession), "only forwarded requests have this handler"
    fence = partial(session.shared.fences.check, request.group_id, session.origin.start, request.generation)
    request.generation = NO_GENERATION  # only the coordinator can interpret this number
    positions.store(session, answer, request, fence)


def txn_offset_commit(session: KafkaSession, answer: Answer, request: TxnOffsetCommitRequest, /) -> None:
    """Stage offsets in a transaction, for a group that another shard coordinates.

    The coordinator of the transaction has checked the producer.
    """
    assert isinstance(session, ForwardedKafkaSession), "only forwarded requests have this handler"
    fence = partial(session.shared.fences.check, request.group_id, session.origin.start, request.generation_id)
    request.generation_id = NO_GENERATION
    transactions.move(session, answer, request, fence)
