"""The receiving end of a link: a session for another process, on behalf of its client (decision 0128).

* The requests run with the permissions of the client, which are checked here.
* Offsets are stored in the order of a group's generations, even if a request arrives late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from polywire.broker.access import Principal
from polywire.errors import Busy, PeerError
from polywire.protocols.kafka import positions, transactions
from polywire.protocols.kafka.context import Shared
from polywire.protocols.kafka.messages import Api, Served
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import LENGTH_BYTES, Command, KafkaSession
from polywire.protocols.kafka.shard_link import MAGIC, OPENING_BYTES, Context, decode_context
from polywire.protocols.runtime.links import check_opening
from polywire.protocols.runtime.session import Output

NO_GENERATION: Final = -1
BETWEEN: Final = {Api.BETWEEN_SHARDS: Served(0, 0, 0)}


class LinkedKafkaSession(KafkaSession):
    """One link. It accepts first the shared key, then the client's identity, then requests."""

    __slots__ = ("_context", "_is_open", "_key")

    def __init__(
        self,
        key: bytes,
        shared: Shared,
        table: Mapping[Api, Command],
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        super().__init__(shared, table, output, resume, {**shared.served, **BETWEEN})
        self._key: Final = key
        self._is_open = False
        self._context: Context | None = None

    def _frame_bytes(self, data: memoryview, at: int) -> int:
        return super()._frame_bytes(data, at) if self._is_open else OPENING_BYTES

    def _take(self, data: memoryview, at: int, end: int) -> bool:
        if not self._is_open:
            check_opening(bytes(data[at:end]), MAGIC + self._key)
            self._is_open = True
            return True
        if self._context is None:
            self._rest_on(decode_context(data[at + LENGTH_BYTES : end]))
            return True
        return super()._take(data, at, end)

    def _rest_on(self, context: Context) -> None:
        """Run further requests as the user of this context. Raises PeerError if this process does not know the user."""
        self._context = context
        if context.user is None:
            return
        found = self.broker.access.certified(context.user)
        if found is None:
            raise PeerError(
                f"this process does not know the user (with --processes, define users in the users file) user={context.user!r}",
                fatal=True,
            )
        principal = Principal(found.user_id, found.name, found.login, peer=context.peer)
        try:
            self.logged_in(principal)
        except Busy as busy:
            raise PeerError(busy.message, fatal=True) from None

    # Used by handlers

    @property
    def context(self) -> Context:
        assert self._context is not None, "the context arrives before any request"
        return self._context

    @property
    def address(self) -> tuple[str, int]:
        """The host and port at which the client at the other end of the link reaches this process and no other."""
        return self.shared.own_address(self.context.host, self.context.listener)

    @property
    def peer_address(self) -> str:
        return self.context.peer


def offset_commit(session: KafkaSession, answer: Answer, request: Any, /) -> None:
    """Commit offsets for a group that another shard coordinates.

    That shard has checked the member and the generation.
    """
    assert isinstance(session, LinkedKafkaSession), "only links have this handler"
    fence = partial(session.shared.fences.check, request.group_id, session.context.start, request.generation)
    request.generation = NO_GENERATION  # only the coordinator can interpret this number
    positions.store(session, answer, request, fence)


def txn_offset_commit(session: KafkaSession, answer: Answer, request: Any, /) -> None:
    """Stage offsets in a transaction for a group that another shard coordinates.

    The transaction's coordinator has permitted it.
    """
    assert isinstance(session, LinkedKafkaSession), "only links have this handler"
    fence = partial(session.shared.fences.check, request.group_id, session.context.start, request.generation_id)
    request.generation_id = NO_GENERATION
    transactions.move(session, answer, request, fence)
