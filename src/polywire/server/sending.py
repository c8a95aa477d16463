"""The sending half of a connection: writes responses, and counts the bytes that are not sent yet.

This module is compiled.

* The parts of responses are sent in order.
* The memory of a part is released when the kernel has accepted its bytes, or the connection is closed.
* The number of unsent bytes is always known. The total of all connections is limited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import cython

from polywire.protocols.runtime.session import Session
from polywire.server.hub import Hub
from polywire.server.recognition import format_address, host_and_port, is_loopback
from polywire.types import Buffer

if TYPE_CHECKING:
    from polywire.broker.client_quotas import Meter


@cython.cclass
class SendingHalf:
    """The methods of a connection that write.

    Attributes:
        clogged_tick: the second in which the kernel stopped accepting bytes, as counted by ``Hub.tick``.
        sent_bytes: bytes written so far.
        backlog_max: number of unsent bytes above which no requests are read. Negative while a quota delays the client,
            so that the session executes and sends nothing.
        meter: charges the client's traffic to quotas; None if none apply.
        wire: name of the client's protocol; empty until it is detected.
    """

    __slots__ = (
        "_clogged",
        "_hub",
        "_produces",
        "_released",
        "_timed_since",
        "_transport",
        "backlog_max",
        "clogged_tick",
        "meter",
        "sent_bytes",
        "wire",
    )

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._transport: Any = None  # uvloop's transport is not a subclass of asyncio.Transport
        self._clogged = False  # whether the kernel has not accepted all written bytes
        self.clogged_tick = 0
        # functions to call when the kernel has accepted all written bytes
        self._released: list[Callable[[], None]] = []
        self.sent_bytes = 0
        self._timed_since = 0.0
        self._produces = False
        self.wire = ""
        """Name of the client's protocol; empty until it is detected."""
        self.backlog_max = hub.limits.backlog_bytes_max
        self.meter: Meter | None = None

    def pause_writing(self) -> None:
        self._clogged = True
        self.clogged_tick = self._hub.tick

    def _unclog(self) -> None:
        """Release the memory of sent parts, because the kernel has accepted everything or the connection is closed."""
        self._clogged = False
        released, self._released = self._released, []
        for release in released:
            release()

    @property
    def backlog(self) -> int:
        return int(self._transport.get_write_buffer_size()) if self._clogged else 0

    @property
    def peer(self) -> str:
        return format_address(self._transport.get_extra_info("peername"))

    @property
    def local(self) -> tuple[str, int]:
        return host_and_port(self._transport.get_extra_info("sockname"))

    @property
    def on_loopback(self) -> bool:
        return is_loopback(self._transport.get_extra_info("peername"))

    def write(self, data: Buffer) -> None:
        assert not self._hub.lending, "the loop asks for a buffer"
        if not self._transport.is_closing():
            self.sent_bytes += len(data)
            self._transport.write(data)
            if self.meter is not None:
                self._charge_sent(len(data))
            if self._timed_since:
                self._note_answer()
            if self._clogged:
                self._check_backlog()

    def write_many(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        """Send parts in order, and call ``released`` when the kernel has accepted them."""
        assert not self._hub.lending, "the loop asks for a buffer"
        if not self._transport.is_closing():
            size = sum(map(len, parts))
            self.sent_bytes += size
            self._transport.writelines(parts)
            if self.meter is not None:
                self._charge_sent(size)
            if self._timed_since:
                self._note_answer()
            if self._clogged:
                if released is not None:
                    self._released.append(released)
                self._check_backlog()
                return
        if released is not None:
            released()

    def _charge_sent(self, size: int) -> None:
        assert self.meter is not None, "a quota applies"
        self.meter.sent(size)
        self._delay()

    def _delay(self) -> None:
        """Delay the client if it has exceeded a quota. Overridden."""

    def _receive_timed(self, session: Session, data: memoryview, begun: float) -> int:
        """Pass bytes to the session, and measure the time until its response.

        If an earlier response is pending, nothing is measured, because that response would end the measurement.
        """
        ingest, times = self._hub.ingest, self._hub.request_times
        if not times.skip:
            times.begin()
        if not session.owes():
            self._timed_since = begun
        times.appended = ingest.appended
        try:
            return session.receive(data)
        finally:
            times.appended = -1
            if not session.owes():  # the request was answered, has no response, or is incomplete
                self._timed_since = 0.0

    def _note_answer(self) -> None:
        hub, times = self._hub, self._hub.request_times
        seconds, self._timed_since = hub.run_queue.now() - self._timed_since, 0.0
        produced = self._produces if times.appended < 0 else hub.ingest.appended != times.appended
        times.observe(self.wire, seconds, produced=produced)

    def _check_backlog(self) -> None:
        if self.backlog > self.backlog_max:
            self._hub.check_backlog()

    def close(self) -> None:
        assert not self._hub.lending, "the loop asks for a buffer"
        self._transport.close()
