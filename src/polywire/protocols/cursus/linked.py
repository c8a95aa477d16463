"""The receiving end of a link: a session for another process of this broker, on behalf of its client (decision 0127).

* A request has the same effect as in the process that received it from the client.
* The client is authenticated over the link too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

from polywire.protocols.cursus.compression import Algorithm, algorithm
from polywire.protocols.cursus.context import CursusState
from polywire.protocols.cursus.long_frame import Stored
from polywire.protocols.cursus.messages import PREFIX_BYTES, Dialect
from polywire.protocols.cursus.reply_slots import Answer, ReplyOwner
from polywire.protocols.cursus.session import Command, CursusSession, Pushing, TakeBatch
from polywire.protocols.cursus.shard_link import (
    MAGIC,
    REQUEST_HEAD_BYTES_MAX,
    STREAM,
    STREAM_END,
    UNUSED,
    Context,
    Kind,
    answer_head,
    decode_context,
    decode_head,
)
from polywire.protocols.runtime import carrying
from polywire.protocols.runtime.links import check_opening
from polywire.protocols.runtime.off_loop import LONG_BYTES
from polywire.protocols.runtime.session import Output
from polywire.types import Buffer


class LinkedAnswer(Answer):
    """A response that is sent with its size and flags before it."""

    __slots__ = ("flags",)

    def __init__(
        self, session: ReplyOwner, dialect: Dialect, packing: Algorithm | None = None, *, blocking: bool = False
    ) -> None:
        super().__init__(session, dialect, packing, blocking=blocking)
        self.flags = 0

    def fill(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        super().fill([answer_head(sum(map(len, parts)), self.flags), *parts], released)


class LinkedSession(carrying.LinkedSession, CursusSession):
    """One link. ``_packing`` is the compression of the client's current frame."""

    byte_order: ClassVar[Literal["big", "little"]] = "big"
    answer_type: ClassVar[type[Answer]] = LinkedAnswer

    __slots__ = ("_context", "_epoch_min", "_opening", "_packing")

    def __init__(
        self,
        key: bytes,
        state: CursusState,
        commands: Mapping[str, Command],
        take_batch: TakeBatch,
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        super().__init__(state, commands, take_batch, output, resume)
        self._opening = MAGIC + key
        self._context = Context("", 0, "", "", frozenset())
        self._epoch_min = 0
        self._packing: Algorithm | None = None

    @property
    def frame_bytes_max(self) -> int:
        """Longest frame. The sending process has the shared key, and has checked the length."""
        return PREFIX_BYTES + REQUEST_HEAD_BYTES_MAX + self.state.settings.frame_bytes_max

    def _take(self, data: memoryview, at: int, end: int) -> bool:
        if self._opening:
            check_opening(bytes(data[at:end]), self._opening)
            self._opening = b""
            return True
        head = decode_head(data, at)
        body = data[head.begin : end]
        if head.kind is Kind.CONTEXT:
            if self._settled():
                self._rest_on(decode_context(body))
                return True
            return False
        self.spoken, self._epoch_min = head.dialect, head.epoch_min
        self._packing = algorithm(head.packing) if head.packing else None
        if len(body) > LONG_BYTES:
            return self._begin_long(body, None)
        return self._take_plain(body, body, self._packing)

    def _rest_on(self, context: Context) -> None:
        self._context, self._leader, self._caller = context, "", None
        self.group, self.features = context.group, context.features

    def _begin_long(self, body: memoryview, packed: Algorithm | None) -> bool:
        return super()._begin_long(body, None)  # the sending process has decompressed the frame

    def take_long(self, body: memoryview, packed: Algorithm | None) -> Stored | None:
        """``_packing`` replaces ``packed``, because frames arrive over a link already decompressed."""
        return super().take_long(body, self._packing)

    # Methods for commands

    @property
    def address(self) -> tuple[str, int]:
        return self._context.host, self._context.port

    @property
    def peer_address(self) -> str:
        return self._context.peer

    @property
    def epoch_min(self) -> int:
        return self._epoch_min

    def close_unused(self) -> None:
        """Have the sending process close the client's connection, unless the client soon sends another request."""
        answer = self._answers[-1]
        assert isinstance(answer, LinkedAnswer), "all answers of a link have this type"
        answer.flags |= UNUSED

    def push(self, pushing: Pushing) -> None:
        """Announce that the frames of a stream follow."""
        self.output.write(answer_head(0, STREAM))
        super().push(pushing)

    def pull(self) -> None:
        self._pushing = None
        self.output.write(STREAM_END)
        self.end()

    def _look_idle(self) -> None:
        """The sending process closes the link."""
