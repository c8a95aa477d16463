"""Reply slots: the order of answers of one Kafka connection, and how what fills them is framed (spec: kafka#framing, kafka#headers).

Promises: an answer is filled once, at once or by a callback of the broker, in the version of its request. Must not know: how requests are
carried out, sockets.
"""

from __future__ import annotations

from typing import Any

from polywire.protocols.kafka.codec import encode_response
from polywire.protocols.kafka.messages import Request
from polywire.protocols.runtime.pipelined import ReplyOwner, ReplySlot


class Answer(ReplySlot[ReplyOwner]):
    """A slot in the order of answers. request: what it answers."""

    __slots__ = ("request",)

    def __init__(self, session: ReplyOwner, request: Request, *, blocking: bool) -> None:
        self.session = session
        self.request = request
        self.blocking = blocking
        self.parts = None
        self.released = None
        self.cancel = None

    def ok(self, body: Any) -> None:
        """The body of the answer is known."""
        self.fill(() if self.session.closed else encode_response(self.request, body))

    def large(self, body: Any) -> None:
        """The same for a body whose parts are not worth a copy."""
        if self.session.closed:
            self.fill(())
        else:
            self.fill(encode_response(self.request, body), _nothing)

    def nothing(self) -> None:
        """This request has no answer; those behind it wait no longer."""
        self.fill(())


def _nothing() -> None:
    """Nobody waits for the parts to be sent."""
