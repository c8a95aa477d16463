"""One Kafka 0.7 connection: requests strictly one after the other, produce frames in bulk.

Promises: answers leave in request order; a FETCH or OFFSETS sees every set produced before it on this connection, which is the only
acknowledgement there is; a producer is never sent anything. No task and no future per request. Must not know: sockets, other wires.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from polywire.broker.broker import Broker
from polywire.broker.topics import Partition
from polywire.errors import BrokerError, PeerError
from polywire.log.base import Done
from polywire.protocols.base import Output
from polywire.protocols.entrance import Entrance
from polywire.protocols.kafka07 import codec
from polywire.protocols.kafka07.codec import FRAME_BYTES_MAX
from polywire.protocols.kafka07.fetching import Answering, Blocks, Parts, Release, Trail
from polywire.protocols.kafka07.messages import (
    Fetch,
    Offsets,
    Produce,
    encode_offsets_answer,
    frame_length,
    parse,
)
from polywire.protocols.kafka07.offsets import Listing
from polywire.protocols.kafka07.producing import Producer
from polywire.types import Level

LENGTH_BYTES: Final = 4
PASS_S: Final = 0.002  # requests of one connection are handled before other connections get a turn
BUSY_WAIT_S: Final = (
    30.0  # how long sets wait for room in the log before the connection is closed; there is no other way to refuse them
)
SMALL_ANSWER_BYTES: Final = 16 * 1024  # below, a copy costs less than keeping the buffer


class KafkaSession:
    """One peer.

    Invariant: at most one answer is in the making (``_pending``); while there is one, or sets wait for room, nothing further is handled.
    """

    __slots__ = (
        "_blocks",
        "_broker",
        "_closed",
        "_dirty",
        "_ending",
        "_entrance",
        "_held",
        "_output",
        "_pending",
        "_producer",
        "_receiving",
        "_rest",
        "_resume",
        "_trails",
        "_wanted",
        "_yielding",
    )

    def __init__(
        self, broker: Broker, producer: Producer, blocks: Blocks, output: Output, resume: Callable[[], None]
    ) -> None:
        self._broker = broker
        self._producer = producer
        self._blocks = blocks
        self._output = output
        self._resume = resume
        self._trails: dict[int, Trail] = {}
        self._entrance: Final = Entrance(broker, BUSY_WAIT_S, self._go_on, self._refused)
        self._pending: Answering | Listing | None = None
        self._dirty = False
        self._held = False
        self._receiving = False
        self._yielding = False
        self._ending = False
        self._rest = b""
        self._closed = False
        self._wanted = 0

    @property
    def frame_bytes_max(self) -> int:
        """Longest frame with its length."""
        return LENGTH_BYTES + FRAME_BYTES_MAX

    def wanted(self) -> int:
        """The length of a frame that has begun."""
        return self._wanted

    def paused(self) -> bool:
        """Whether an answer must come, or go, before the next request is handled; whoever was told so is resumed later."""
        self._held = self._waits()
        return self._held

    def _waits(self) -> bool:
        return bool(
            self._yielding
            or self._pending is not None
            or self._entrance.waiting
            or self._output.backlog > self._output.backlog_max
        )

    def receive(self, data: memoryview) -> int:
        """Handle complete frames. Raises PeerError."""
        if self._ending:
            return len(data)
        self._receiving = True
        try:
            return self._receive(data)
        finally:
            self._receiving = False

    def _receive(self, data: memoryview) -> int:
        at = self._wanted = 0
        now = self._broker.clock.monotonic
        pass_end = now() + PASS_S
        while len(data) - at >= LENGTH_BYTES:
            reason, at, end = self._producer.take_run(data, at, self._append)
            if reason == codec.MORE or self._waits():
                if reason == codec.MORE and len(data) - at >= LENGTH_BYTES:
                    self._wanted = LENGTH_BYTES + frame_length(data, at)
                break
            if reason == codec.FRAME:
                frame_length(data, at)
                self._handle(data, at + LENGTH_BYTES, end)
                at = end
                if self._waits():
                    break
            if now() >= pass_end:
                self._yielding = True
                self._broker.loop.call_soon(self._turn_again)
                break
        return at

    def _turn_again(self) -> None:
        """The others had their turn."""
        self._yielding = False
        self._go_on()

    def _handle(self, data: memoryview, at: int, end: int) -> None:
        """Carry out one request by the precise rules. Raises PeerError."""
        request = parse(data, at, end)
        if isinstance(request, Produce):
            self._producer.take_entries(data, request.entries, self._append)
            return
        if self._dirty:
            self._broker.commit()
            self._dirty = False
        if isinstance(request, Fetch):
            if any(entry.bytes_max < 0 for entry in request.entries):
                raise PeerError("a negative fetch size", fatal=True)
            answering = Answering(self._broker, self._blocks, self._trails, request, self._answered)
            self._pending = answering
            answering.run()
        else:
            self._list(request)

    def _list(self, request: Offsets) -> None:
        listing = Listing(self._broker, request, self._listed)
        self._pending = listing
        listing.run()

    def _listed(self, addresses: list[int] | None) -> None:
        """OFFSETS is answered; with None it failed, and the wire has no word for that."""
        if addresses is None:
            self._pending = None
            self._end()
        else:
            self._answered([memoryview(encode_offsets_answer(addresses))], _nothing)

    def _answered(self, parts: Parts, release: Release) -> None:
        """The answer is there."""
        self._pending = None
        if len(parts) == 1 and len(parts[0]) <= SMALL_ANSWER_BYTES:
            answer = bytes(parts[0])
            release()
            self._output.write(answer)
        else:
            self._output.write_many(parts, release)
        self._go_on()

    # What was produced

    def _append(self, partition: Partition, batch: bytearray) -> None:
        """Hand a batch to the broker; when the log has no room it waits, and so does this connection. Raises PeerError."""
        self._dirty = True
        self._entrance.produce(partition, batch, Level.WRITTEN, None)

    def _refused(self, done: Done | None, error: BrokerError) -> None:
        """A set is not stored, so nothing behind it may be, and the wire has no word for that. Raises PeerError for the request in hand."""
        del done  # a producer waits for no answer
        if self._receiving:
            raise PeerError(f"a set cannot be stored: {error.message}", fatal=True)
        self._end()

    # The connection

    def _go_on(self) -> None:
        """Take up what had to wait, unless it still must; never from inside ``receive``."""
        if self._receiving or self._closed or self._waits():
            return
        if self._rest:
            self._take_rest()
        if self._held and not self._rest:
            self._held = False
            self._resume()
        self._end_when_done()

    def _take_rest(self) -> None:
        """Handle what was left when the peer finished, as far as it goes now."""
        rest = self._rest
        self._rest = b""
        try:
            consumed = self.receive(memoryview(rest))
        except PeerError:
            self._end()
            return
        # Without a reason to wait, what is left is half a frame, which nobody will complete.
        self._rest = rest[consumed:] if self._waits() else b""
        self._ending = not self._rest

    def _end(self) -> None:
        """Close, dropping what was not handled."""
        self._entrance.drop()
        self._rest = b""
        self._ending = True
        if not self._closed:
            self._output.close()

    def _end_when_done(self) -> None:
        if self._ending and self._pending is None and not self._entrance.waiting and not self._closed:
            self._output.close()

    def drained(self) -> None:
        """The peer reads again."""
        self._go_on()

    def finish(self, data: memoryview) -> None:
        """The peer will send no more; complete frames are still carried out (dossier §1)."""
        self._rest = bytes(data)
        if self._ending:
            return
        if not self._rest:
            self._ending = True
        elif not self._waits():
            self._take_rest()
        self._end_when_done()

    def close(self) -> None:
        """The connection is gone."""
        self._closed = True
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        self._entrance.drop()


def _nothing() -> None:
    """Nothing to give back."""
