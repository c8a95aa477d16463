"""Send the responses of a FLUX connection in the order of its requests, whenever each is ready.

Each request has a reply slot. Consecutive PRODUCE lines share one, and their responses are encoded with one call.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Protocol

import cython

from polywire.broker.topics import Partition
from polywire.errors import BrokerError
from polywire.protocols.flux import decoder, encoder
from polywire.protocols.flux.context import FluxBroker
from polywire.protocols.flux.errors import refused
from polywire.protocols.flux.messages import Refused, err, ok
from polywire.protocols.flux.metadata import FluxState
from polywire.protocols.runtime.slices import Slices
from polywire.types import PARTITION_COUNT_MAX

if cython.compiled:
    from cython.cimports.polywire.protocols.runtime.pipelined import BareSlot
else:
    from polywire.protocols.runtime.pipelined import BareSlot

Parts = list[bytes | memoryview]


class ScratchArrays:
    """Arrays that all sessions of a factory share. Their content is not used after a call of ``receive``.

    Attributes:
        slots: zeros between calls.
    """

    __slots__ = ("bounds", "groups", "ids", "out", "records", "rows", "slots", "spans", "work")

    def __init__(self) -> None:
        most = decoder.RUN_RECORDS_MAX
        self.work = memoryview(array("q", bytes(8 * decoder.WORK_WORDS)))
        self.spans = memoryview(array("q", bytes(8 * 4 * most)))
        self.records = memoryview(array("i", bytes(4 * most)))
        self.groups = memoryview(array("i", bytes(4 * most)))
        self.rows = memoryview(array("i", bytes(4 * most)))
        self.bounds = memoryview(array("i", bytes(4 * 2 * most)))
        self.slots = memoryview(array("i", bytes(4 * PARTITION_COUNT_MAX)))
        self.ids = bytearray(decoder.LINE_BYTES_MAX)
        self.out = bytearray(decoder.LINE_BYTES_MAX)

    def reserve_out(self, size: int) -> None:
        if len(self.out) < size:
            self.out = bytearray(size)


class ReplyOwner(Protocol):
    """The methods of a session that its responses use."""

    @property
    def broker(self) -> FluxBroker:
        """The broker. Its event loop and clock are used for long responses."""

    @property
    def state(self) -> FluxState: ...

    @property
    def scratch(self) -> ScratchArrays: ...

    @property
    def closed(self) -> bool: ...

    def slot_filled(self) -> None:
        """Send the responses that are next in order."""


@cython.cclass
class Answer(BareSlot):
    """One response, which is sent after the responses to all earlier requests.

    Attributes:
        payload: the payload that ``done`` sends.
    """

    if not cython.compiled:  # in the compiled module, reply_slots.pxd declares the fields
        __slots__ = ("payload", "request_id")

        session: ReplyOwner

    def __init__(self, session: ReplyOwner, request_id: bytes, *, blocking: bool = False) -> None:
        self.session = session
        self.request_id = request_id
        self.blocking = blocking
        self.payload = b""
        self.parts = None
        self.released = None
        self.cancel = None

    def ok(self, payload: bytes) -> None:
        self.fill([ok(self.request_id, payload)])

    def make(self, parts: Iterator[bytes]) -> None:
        """Respond with success, and a long payload that the iterator yields in pieces."""
        self.cancel = Slices(self.session.broker, parts, self._made).cancel

    def _made(self, parts: list[bytes] | BrokerError) -> None:
        if isinstance(parts, BrokerError):
            self.refuse(refused(parts))
        else:
            self.ok(b"".join(parts))

    def refuse(self, error: Refused) -> None:
        self.fill([err(self.request_id, error)])

    def done(self, result: int | BrokerError) -> None:
        """Completion that responds with ``payload``, or with the error."""
        if isinstance(result, BrokerError):
            self.refuse(refused(result))
        else:
            self.ok(self.payload)


@cython.cclass
class Produced(Answer):
    """The response to one PRODUCE line with acks 0 or 1."""

    if not cython.compiled:
        __slots__ = ("partition",)

        partition: Partition

    def done(self, result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):
            self.refuse(refused(result))
            return
        state, number = self.session.state, self.partition.number
        hw = state.hw_after(self.partition, result) if state.views else result  # no call without views
        self.parts = [b"V1|%b|OK|partition=%d offset=%d hw=%d\n" % (self.request_id, number, result, hw)]
        self.session.slot_filled()


class ProducedLines(Answer):
    """The responses to consecutive PRODUCE lines that are executed together.

    A group is a batch of them for one partition.

    Attributes:
        ids: the correlation ids, each with an LF.
        groups: the group of each record.
        numbers: for each group, the partition number, the offset of its first record, and the lowest high watermark to
            report.
    """

    __slots__ = ("errors", "groups", "ids", "numbers", "outstanding", "partitions")

    def __init__(self, session: ReplyOwner, ids: bytes, count: int) -> None:
        super().__init__(session, b"")
        self.ids = ids
        self.groups = array("i", bytes(4 * count))
        self.numbers = array("q")
        self.partitions: list[Partition | None] = []
        self.errors: dict[int, Refused] = {}
        self.outstanding = 1  # 1 for this object itself, until all of its batches were passed on

    def add_group(self, partition: Partition | None) -> int:
        """Add a batch for a partition, and return its number. ``partition`` is None if the topic cannot be written."""
        self.partitions.append(partition)
        self.numbers.extend((0 if partition is None else partition.number, -1, -1))
        self.outstanding += 1
        return len(self.partitions) - 1

    def fill_groups(self, group: int, count: int, records: memoryview | None) -> None:
        """Assign records to a batch. ``records`` are their numbers among all lines; None for all."""
        for index in range(count):
            self.groups[index if records is None else records[index]] = group

    def stored(self, group: int, offset: int | BrokerError) -> None:
        if isinstance(offset, BrokerError):
            self.errors[group] = refused(offset)
        else:
            self.numbers[3 * group + 1] = offset
        self.batch_done()

    def fail(self, group: int, error: Refused) -> None:
        """Record the error of a batch that was not appended."""
        self.errors[group] = error
        self.batch_done()

    def batch_done(self) -> None:
        """Count a batch as completed, or all batches as passed to the broker. Respond after the last of these calls."""
        self.outstanding -= 1
        if self.outstanding == 0:
            self.fill([self._replies()])

    def _replies(self) -> bytes:
        state = self.session.state
        plain = all(partition is not None and state.is_plain(partition) for partition in self.partitions)
        if self.errors or not plain:
            return b"".join(self._reply(number, name) for number, name in enumerate(self.ids.split(b"\n")[:-1]))
        scratch = self.session.scratch
        scratch.reserve_out(len(self.ids) + encoder.REPLY_BYTES * len(self.groups))
        size = encoder.put_produced(self.ids, self.groups, self.numbers, scratch.out)
        return bytes(memoryview(scratch.out)[:size])

    def _reply(self, number: int, name: bytes) -> bytes:
        group = self.groups[number]
        partition = self.partitions[group]
        if group in self.errors or partition is None:
            return err(name, self.errors[group])
        offset = self.numbers[3 * group + 1]
        self.numbers[3 * group + 1] = offset + 1
        hw = self.session.state.hw_after(partition, offset)
        return b"V1|%b|OK|partition=%d offset=%d hw=%d\n" % (name, partition.number, offset, hw)
