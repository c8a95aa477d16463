"""The sending half of a connection: what is written to the peer, and how much of that it has not taken.

Promises: parts go out in order; whoever lent memory has it back once the kernel has the bytes, or the peer is gone; what the kernel does not
take is known at once, and of all connections together it has a limit. Must not know: sessions, wires, what is received.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from polywire.server.hub import Hub
from polywire.server.recognition import format_address, host_and_port, is_loopback
from polywire.types import Buffer


class SendingHalf(asyncio.BufferedProtocol):
    """Implements what ``Output`` says of writing. Invariant: ``_clogged`` is true while the kernel does not take all that was written, since
    ``clogged_tick``; ``_released`` are called when that is over."""

    __slots__ = ("_clogged", "_hub", "_released", "_transport", "backlog_max", "clogged_tick", "sent_bytes")

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._transport: Any = None  # uvloop's is no asyncio.Transport subclass
        self._clogged = False
        self.clogged_tick = 0
        self._released: list[Callable[[], None]] = []
        self.sent_bytes = 0
        self.backlog_max = hub.limits.backlog_bytes_max

    def pause_writing(self) -> None:
        self._clogged = True
        self.clogged_tick = self._hub.tick

    def _unclog(self) -> None:
        """The kernel has everything, or the peer is gone."""
        self._clogged = False
        released, self._released = self._released, []
        for release in released:
            release()

    @property
    def backlog(self) -> int:
        """Bytes the kernel has not taken."""
        return int(self._transport.get_write_buffer_size()) if self._clogged else 0

    @property
    def peer(self) -> str:
        """Address of the peer."""
        return format_address(self._transport.get_extra_info("peername"))

    @property
    def local(self) -> tuple[str, int]:
        """Host and port that the peer connected to."""
        return host_and_port(self._transport.get_extra_info("sockname"))

    @property
    def on_loopback(self) -> bool:
        """Whether the peer is on this machine."""
        return is_loopback(self._transport.get_extra_info("peername"))

    def write(self, data: Buffer) -> None:
        """Send bytes."""
        assert not self._hub.lending, "the loop asks for a buffer"
        if not self._transport.is_closing():
            self.sent_bytes += len(data)
            self._transport.write(data)
            if self._clogged:
                self._check_backlog()

    def write_many(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        """Send parts in order; ``released`` once the kernel has them."""
        assert not self._hub.lending, "the loop asks for a buffer"
        if not self._transport.is_closing():
            self.sent_bytes += sum(map(len, parts))
            self._transport.writelines(parts)
            if self._clogged:
                if released is not None:
                    self._released.append(released)
                self._check_backlog()
                return
        if released is not None:
            released()

    def _check_backlog(self) -> None:
        if self.backlog > self.backlog_max:
            self._hub.check_backlog()

    def close(self) -> None:
        """Close once everything written was sent."""
        assert not self._hub.lending, "the loop asks for a buffer"
        self._transport.close()
