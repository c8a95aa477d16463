"""Send the responses of a Kafka connection in the order of its requests (spec: kafka#framing, kafka#headers)."""

from __future__ import annotations

from polywire.protocols.kafka.codec import encode_response
from polywire.protocols.kafka.messages import Request
from polywire.protocols.kafka.structures import Record
from polywire.protocols.runtime.pipelined import ReplyOwner, ReplySlot


class Answer(ReplySlot[ReplyOwner]):
    """The slot of the response to ``request``. The response has the version of the request."""

    __slots__ = ("request",)

    def __init__(self, session: ReplyOwner, request: Request, *, blocking: bool) -> None:
        self.session = session
        self.request = request
        self.blocking = blocking
        self.parts = None
        self.released = None
        self.cancel = None

    def ok(self, body: Record) -> None:
        self.fill(() if self.session.closed else encode_response(self.request, body))

    def large(self, body: Record) -> None:
        """Fill the slot without copying the record buffers of ``body``."""
        if self.session.closed:
            self.fill(())
        else:
            self.fill(encode_response(self.request, body), _nothing)

    def nothing(self) -> None:
        """Fill the slot of a request that has no response."""
        self.fill(())


def _nothing() -> None:
    pass
