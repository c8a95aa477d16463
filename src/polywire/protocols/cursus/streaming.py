"""STREAM: send records to the client when they become readable (spec: cursus#stream).

If the client stops reading, the broker stops reading the log for it. When a stream ends, the response contains the
reason and the offset at which to continue. No offsets are committed.
"""

from __future__ import annotations

from typing import Any, Final

from polywire.broker.permissions import Action
from polywire.broker.topics import Partition
from polywire.errors import BrokerError, ErrorCode, Missing
from polywire.log.base import Handle, Read
from polywire.protocols.cursus.batches import opening
from polywire.protocols.cursus.errors import encode_error, refused
from polywire.protocols.cursus.messages import KEEPALIVE, Dialect, Refused, Request, encoded, frame, topic_word
from polywire.protocols.cursus.produce import close_if_lost
from polywire.protocols.cursus.read_arguments import (
    batch_size,
    check_isolation,
    failed,
    given_offset,
    out_of_range,
    partition_number,
    readable_partition,
    readable_topic,
    start_offset,
)
from polywire.protocols.cursus.reply_batch import ReplyBatch
from polywire.protocols.cursus.session import Command, CursusSession, Reply

STREAMS_MAX: Final = 1_000  # streams of one broker (spec: cursus#limits)
READ_BYTES_MAX: Final = 2 * 1024 * 1024  # bytes read from the log at a time
FRAMES_PER_PASS: Final = 2  # frames pushed before other connections are served


class Stream:
    """Pushes the batches of one partition to a connection.

    For older clients, a stream has only batches and errors. It has no keepalive frames, because TCP keepalive detects
    dead clients, and it ends with an error. A new stream of a group ends the group's older stream of the same
    partition.
    """

    __slots__ = (
        "_begin",
        "_dialect",
        "_dropped",
        "_keepalive",
        "_key",
        "_offset",
        "_partition",
        "_pumping",
        "_reader",
        "_records_max",
        "_session",
        "_topic",
        "_waits_for",
    )

    def __init__(self, session: CursusSession, request: Request, partition: Partition, offset: int) -> None:
        self._session = session
        self._partition = partition
        self._offset = offset
        self._waits_for: Handle | None = None
        self._dropped = False
        self._pumping = False
        self._topic = topic = partition.topic.name.full
        self._dialect = request.dialect
        self._begin = opening(topic_word(topic), partition.number, positional=request.dialect is Dialect.POSITIONAL)
        self._records_max = batch_size(request)
        group = request.options.get("group", "")
        self._key = (topic, partition.number, group) if group else None
        self._keepalive: Any = None
        self._reader = session.state.guard.acting

    def begin(self) -> None:
        state = self._session.state
        if self._key is not None:
            state.streams.open(self._key, self)
        state.stream_count += 1
        self._session.push(self)
        if self._dialect is not Dialect.POSITIONAL:
            self._keepalive = state.broker.loop.call_later(state.settings.keepalive_s, self._keep_alive)
        self._pump()

    def _keep_alive(self) -> None:
        """Send an empty frame, unless the client has stopped reading. Called at intervals, even if data was sent."""
        state = self._session.state
        self._keepalive = state.broker.loop.call_later(state.settings.keepalive_s, self._keep_alive)
        output = self._session.output
        if output.backlog < output.backlog_max:
            output.write(KEEPALIVE)

    def drained(self) -> None:
        self._schedule()

    def drop(self) -> None:
        """End the stream without a message."""
        if self._dropped:
            return
        self._dropped = True
        if self._waits_for is not None:
            self._waits_for.cancel()
            self._waits_for = None
        state = self._session.state
        state.stream_count -= 1
        if self._keepalive is not None:
            self._keepalive.cancel()
        if self._key is not None:
            state.streams.close(self._key, self)

    def replace(self) -> None:
        self._leave("replaced", Refused("command_failed", 'reason="replaced"'))

    def _schedule(self) -> None:
        """Push the next frames in a later callback of the event loop, so that other connections are served first."""
        if not self._pumping and not self._dropped:
            self._pumping = True
            self._session.state.broker.loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        output = self._session.output
        for _ in range(FRAMES_PER_PASS):
            if self._dropped or self._waits_for is not None or output.backlog >= output.backlog_max:
                return
            try:
                if not self._step():
                    return
            except BrokerError as error:
                self._failed(error)
                return
        self._schedule()

    def _step(self) -> bool:
        """Push one frame.

        Return False if there is nothing to push now. Raises BrokerError if the records cannot be read.
        """
        broker, topic = self._session.state.broker, self._partition.topic
        if not broker.access.permits(self._reader, Action.FETCH, topic):
            refusal = Refused("NOT_AUTHORIZED_FOR_TOPIC", f"operation=read topic={topic_word(self._topic)}")
            self._leave("not_authorized", refusal)
            return False
        log = self._partition.log
        if self._partition.ended:
            raise Missing(ErrorCode.PARTITION_MISSING, "the partition was deleted")
        end = log.readable_offset
        if self._offset >= end:  # all readable records were pushed
            self._waits_for = broker.wait(self._partition, self._offset, self._woken)
            return False
        if self._offset < log.first_offset:
            raise Missing(ErrorCode.OFFSET_OUT_OF_RANGE, "the next records were removed by retention")
        read = broker.fetch(
            self._partition, self._offset, bytes_max=READ_BYTES_MAX, then=self._read_later, offset_end=end
        )
        if not isinstance(read, Read):
            self._waits_for = read
            return False
        self._send(read)
        return True

    def _read_later(self, read: Read | BrokerError) -> None:
        self._waits_for = None
        if isinstance(read, BrokerError):
            self._failed(read)
            return
        try:
            self._send(read)
        except BrokerError as error:
            self._failed(error)
        self._schedule()

    def _send(self, read: Read) -> None:
        reply_batch = ReplyBatch(self._session.state.reply_buffers, self._begin, self._records_max)
        try:
            reply_batch.take(read, self._offset, self._partition.log.readable_offset)
        except BrokerError:
            reply_batch.drop()
            raise
        finally:
            read.pin.release()
        after = reply_batch.next_offset if reply_batch.written else read.next_offset
        parts, released = reply_batch.finish()
        self._offset = max(after, self._offset)
        if parts:
            self._session.output.write_many(parts, released)

    def _woken(self) -> None:
        self._waits_for = self._session.state.broker.when_current(self._partition, self._refreshed)
        if self._waits_for is None and not self._pumping and not self._dropped:
            self._pump()  # at once: another pass of the event loop costs more than pushing a few records

    def _refreshed(self, error: BrokerError | None) -> None:
        self._waits_for = None
        if error is None:
            self._schedule()
        else:
            self._failed(error)

    def _failed(self, error: BrokerError) -> None:
        close_if_lost(self._session, self._partition, error)
        if self._dropped:
            return
        if self._partition.ended or error.code is ErrorCode.PARTITION_MISSING:
            self._leave("removed", Refused("topic_not_found", f"topic={topic_word(self._topic)}"))
        elif error.code is ErrorCode.OFFSET_OUT_OF_RANGE:
            self._waits_for = self._session.broker.when_current(self._partition, self._out_of_range)
            if self._waits_for is None:
                self._out_of_range()
        else:
            self._leave("error", refused(error))

    def _out_of_range(self, _: BrokerError | None = None) -> None:
        self._waits_for = None
        bounds = out_of_range(self._partition, self._offset)
        self._leave("offset_out_of_range", Refused("OFFSET_OUT_OF_RANGE", bounds), " " + bounds)

    def _leave(self, reason: str, error: Refused, facts: str = "") -> None:
        """End the stream and send the reason. The client may open another one (spec: cursus#stream).

        Args:
            reason, facts: for the control frame, which also has the offset at which to continue.
            error: for older clients.
        """
        self.drop()
        if self._dialect is Dialect.POSITIONAL:
            text = encode_error(error, self._dialect, structured=self._session.structured)
        else:
            text = encoded(f"STREAM_CONTROL type=CLOSE reason={reason} offset={self._offset}{facts}")
        self._session.output.write(frame(text))
        self._session.pull()


def _nothing() -> None:
    pass


def stream(session: CursusSession, request: Request, /) -> Reply | None:
    """STREAM: begin a stream. There is no response."""
    options = request.options
    modern = request.dialect is Dialect.MODERN
    if not all(
        options.get(key) for key in (("topic", "partition", "group") if modern else ("topic", "partition", "offset"))
    ):
        raise Refused("invalid_stream_syntax")
    check_isolation(request)
    topic = readable_topic(session, options["topic"])
    number = partition_number(options["partition"])
    partition = readable_partition(topic, number)
    session.broker.require_current([partition])
    offset = start_offset(session, request, partition, given_offset(request))
    if session.state.stream_count >= STREAMS_MAX:
        raise failed(f"maximum connections ({STREAMS_MAX}) reached")
    Stream(session, request, partition, offset).begin()
    return None


COMMANDS: Final = (Command("STREAM", stream, (Action.FETCH, Action.OFFSET_FETCH)),)
