"""One Kafka 0.7 connection: requests strictly one after the other, produce frames in bulk.

Promises: answers leave in request order; a FETCH or OFFSETS sees every set produced before it on this connection, which is the only
acknowledgement there is; a producer is never sent anything. No task and no future per request. Must not know: sockets, other wires.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from polywire.broker.broker import Broker
from polywire.broker.topics import Partition
from polywire.errors import BrokerError, Busy, ErrorCode, PeerError
from polywire.protocols.base import Output
from polywire.protocols.kafka07 import codec
from polywire.protocols.kafka07.codec import FRAME_BYTES_MAX
from polywire.protocols.kafka07.expansion import EXPANDED_BYTES_MAX, ExpandsTooFar, OpenedSet, open_sets
from polywire.protocols.kafka07.fetching import Answering, Blocks, Parts, Release, Trail
from polywire.protocols.kafka07.messages import (
    Fetch,
    Offsets,
    Produce,
    ProduceEntry,
    encode_offsets_answer,
    frame_length,
    parse,
)
from polywire.protocols.kafka07.offsets import Listing
from polywire.protocols.kafka07.producing import Producer
from polywire.protocols.workbench import LARGE_BYTES, LONG_BYTES, Work, Workbench
from polywire.types import Level

LENGTH_BYTES: Final = 4
PASS_S: Final = 0.002  # requests of one connection are handled before other connections get a turn
BUSY_WAIT_S: Final = (
    30.0  # how long sets wait for room in the log before the connection is closed; there is no other way to refuse them
)
BUSY_PAUSE_S: Final = 0.005  # between two tries
SMALL_ANSWER_BYTES: Final = 16 * 1024  # below, a copy costs less than keeping the buffer


class KafkaSession:
    """One peer.

    Invariant: at most one answer is in the making (``_pending``); while there is one, sets wait for room, or a request is so large that it is
    prepared beside the loop (``_large``) and stored a little at a time (``_storing``), nothing further is handled.
    """

    __slots__ = (
        "_bench",
        "_blocks",
        "_broker",
        "_busy",
        "_busy_since",
        "_closed",
        "_dirty",
        "_ending",
        "_held",
        "_large",
        "_output",
        "_pending",
        "_producer",
        "_receiving",
        "_rest",
        "_resume",
        "_storing",
        "_timer",
        "_trails",
        "_wanted",
        "_yielding",
    )

    def __init__(
        self,
        broker: Broker,
        producer: Producer,
        blocks: Blocks,
        bench: Workbench,
        output: Output,
        resume: Callable[[], None],
    ) -> None:
        self._broker = broker
        self._producer = producer
        self._blocks = blocks
        self._bench = bench
        self._large: Work | None = None
        self._storing: Iterator[None] = iter(())
        self._output = output
        self._resume = resume
        self._trails: dict[int, Trail] = {}
        self._busy: deque[tuple[Partition, bytearray]] = deque()
        self._busy_since = 0.0
        self._timer: Any = None
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
            or self._busy
            or self._large is not None
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
            self._produce(data, request.entries)
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

    def _produce(self, data: memoryview, entries: Sequence[ProduceEntry]) -> None:
        """Store the sets of one request, now or, when they expand to much, a little at a time. Raises PeerError."""
        sets: list[OpenedSet] | None = None
        if not entries or entries[-1].stop - entries[0].start <= LONG_BYTES:
            with suppress(ExpandsTooFar):
                sets = open_sets(data, entries, LARGE_BYTES)
        if sets is None:
            prepare = partial(open_sets, data, entries, EXPANDED_BYTES_MAX)
            self._large = self._bench.put(prepare, self._prepared, self._output.pin())
            return
        for _ in self._producer.take_sets(sets, self._append):
            pass

    def _prepared(self, sets: Any) -> None:
        """A large request was expanded."""
        if isinstance(sets, PeerError):
            self._fail(sets)
            return
        self._storing = self._producer.take_sets(sets, self._append)
        self._store()

    def _store(self) -> None:
        """Go on with a large request until others must have their turn."""
        if self._large is None or self._busy:
            return
        now = self._broker.clock.monotonic
        pass_end = now() + PASS_S
        try:
            for _ in self._storing:
                if self._busy:
                    return
                if now() >= pass_end:
                    self._broker.loop.call_soon(self._store)
                    return
        except PeerError as error:
            self._fail(error)
            return
        self._leave_bench()
        self._go_on()

    def _fail(self, error: PeerError) -> None:
        """A large request turned out to make no sense."""
        self._leave_bench()
        self._ending = True
        self._output.fail(error)

    def _leave_bench(self) -> None:
        large, self._large = self._large, None
        self._storing = iter(())
        if large is not None:
            large.leave()

    def _append(self, partition: Partition, batch: bytearray) -> None:
        """Hand a batch to the broker; when the log has no room it waits here, and so does this connection. Raises PeerError."""
        if self._busy:
            self._busy.append((partition, batch))
            return
        self._dirty = True
        try:
            self._broker.produce(partition, batch, level=Level.WRITTEN, done=None)
        except BrokerError as error:
            if not isinstance(error, Busy) or error.code is not ErrorCode.BUSY:
                raise PeerError(f"a set cannot be stored: {error.message}", fatal=True) from None
            self._busy.append((partition, batch))
            self._busy_since = self._broker.clock.monotonic()
            self._timer = self._broker.loop.call_later(BUSY_PAUSE_S, self._retry)

    def _retry(self) -> None:
        """Try the waiting batches again, oldest first; give up when they waited too long."""
        waiting, self._busy = self._busy, deque()
        self._timer = None
        since = self._busy_since
        try:
            while waiting and not self._busy:
                self._append(*waiting.popleft())
        except PeerError:
            self._end()
            return
        self._busy.extend(waiting)
        if self._busy:
            self._busy_since = since
            if self._broker.clock.monotonic() - since >= BUSY_WAIT_S:
                self._end()
        else:
            self._store()
            self._go_on()

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
        self._busy.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._rest = b""
        self._ending = True
        self._leave_bench()
        if not self._closed:
            self._output.close()

    def _end_when_done(self) -> None:
        if self._ending and self._pending is None and self._large is None and not self._busy and not self._closed:
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
        with suppress(PeerError):  # a set of which something was stored is stored whole
            for _ in () if self._busy else self._storing:
                pass
        self._leave_bench()
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._busy.clear()


def _nothing() -> None:
    """Nothing to give back."""
