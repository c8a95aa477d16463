"""Reply slots: they keep the responses of one connection in order (spec: kafka#framing, kafka#headers).

A slot is filled once, immediately or by a later callback of the broker. The response has the version of its request.
"""

from __future__ import annotations

from typing import Any

from polywire.protocols.kafka.codec import encode_response
from polywire.protocols.kafka.messages import Request
from polywire.protocols.runtime.pipelined import ReplyOwner, ReplySlot


class Answer(ReplySlot[ReplyOwner]):
    """The slot of one response. ``request`` is the request that it answers."""

    __slots__ = ("request",)

    def __init__(self, session: ReplyOwner, request: Request, *, blocking: bool) -> None:
        self.session = session
        self.request = request
        self.blocking = blocking
        self.parts = None
        self.released = None
        self.cancel = None

    def ok(self, body: Any) -> None:
        self.fill(() if self.session.closed else encode_response(self.request, body))

    def large(self, body: Any) -> None:
        """Fill the slot with a body. Its record buffers are sent without a copy."""
        if self.session.closed:
            self.fill(())
        else:
            self.fill(encode_response(self.request, body), _nothing)

    def nothing(self) -> None:
        """Send no response for this request, so that later responses can be sent."""
        self.fill(())


def _nothing() -> None:
    pass
