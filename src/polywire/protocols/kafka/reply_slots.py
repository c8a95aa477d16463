"""Send the responses of a Kafka connection in the order of its requests (spec: kafka#framing, kafka#headers)."""

from __future__ import annotations

from typing import Protocol

from polywire.protocols.kafka.codec import encode_response
from polywire.protocols.kafka.messages import Request
from polywire.protocols.kafka.structures import Record
from polywire.protocols.runtime.pipelined import ReplyOwner, ReplySlot
from polywire.protocols.runtime.session import Output
from polywire.types import Buffer


class KafkaReplyOwner(ReplyOwner, Protocol):
    """The methods of the session that its responses use."""

    @property
    def output(self) -> Output: ...


class Answer(ReplySlot[KafkaReplyOwner]):
    """The slot of the response to ``request``. The response has the version of the request."""

    __slots__ = ("request",)

    def __init__(self, session: KafkaReplyOwner, request: Request, *, blocking: bool) -> None:
        self.session = session
        self.request = request
        self.blocking = blocking
        self.parts = None
        self.released = None
        self.cancel = None

    def ok(self, body: Record) -> None:
        self.fill(() if self.session.closed else self._encode(body))

    def large(self, body: Record) -> None:
        """Fill the slot without copying the record buffers of ``body``."""
        if self.session.closed:
            self.fill(())
        else:
            self.fill(self._encode(body), _nothing)

    def _encode(self, body: Record) -> list[Buffer]:
        """Encode a response, with the time for which quotas delay the client."""
        parts = encode_response(self.request, body)
        output = self.session.output
        if output.meter is None:
            return parts
        delay_ms = output.delay_ms(sum(map(len, parts)))
        if not delay_ms or not hasattr(body, "throttle_ms"):
            return parts
        body.throttle_ms = delay_ms
        return encode_response(self.request, body)

    def nothing(self) -> None:
        """Fill the slot of a request that has no response."""
        self.fill(())


def _nothing() -> None:
    pass
