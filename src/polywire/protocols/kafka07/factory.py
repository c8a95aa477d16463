"""The entry point of the Kafka 0.7 protocol: detect Kafka 0.7 connections and create their sessions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from polywire.broker.permissions import Action
from polywire.protocols.kafka07.context import Kafka07Broker
from polywire.protocols.kafka07.decoder import FRAME_BYTES_MAX
from polywire.protocols.kafka07.messages import NAME_BYTES_MAX, RequestType
from polywire.protocols.kafka07.produce import Producer
from polywire.protocols.kafka07.session import Command, KafkaSession
from polywire.protocols.runtime.commands import table
from polywire.protocols.runtime.off_loop import OffLoopQueue
from polywire.protocols.runtime.reply_buffers import ReplyBuffers
from polywire.protocols.runtime.session import Output

WIRE: Final = "kafka07"
_FIRST_BYTE_MAX: Final = (FRAME_BYTES_MAX >> 24).to_bytes()

COMMANDS: Final[Mapping[RequestType, Command]] = table(
    Command(RequestType.PRODUCE, KafkaSession.produce, (Action.PRODUCE, Action.TOPIC_CREATE), pipelined=True),
    Command(RequestType.MULTIPRODUCE, KafkaSession.produce, (Action.PRODUCE, Action.TOPIC_CREATE), pipelined=True),
    Command(RequestType.FETCH, KafkaSession.fetch, (Action.FETCH,)),
    Command(RequestType.MULTIFETCH, KafkaSession.fetch, (Action.FETCH,)),
    Command(RequestType.OFFSETS, KafkaSession.list_offsets, (Action.TOPIC_DESCRIBE,)),
)
MULTIPLE: Final = (RequestType.MULTIFETCH, RequestType.MULTIPRODUCE)


class Kafka07Factory:
    """Opens sessions of the Kafka 0.7 protocol. Implements ``protocols.runtime.session.SessionFactory``."""

    __slots__ = ("_broker", "_off_loop", "_producer", "_reply_buffers")

    def __init__(self, broker: Kafka07Broker, *, off_loop: OffLoopQueue | None = None) -> None:
        """``off_loop`` is the process's queue for decompression in a thread, if it has one."""
        self._broker = broker
        self._producer = Producer(broker)
        self._reply_buffers = ReplyBuffers(broker.loop)
        self._off_loop = off_loop or OffLoopQueue(broker.loop)

    @property
    def wire(self) -> str:
        return WIRE

    def recognise(self, prefix: bytes) -> bool | None:
        """Return whether the bytes begin a request: a valid length, a request type and the start of a topic name.

        Returns None if more bytes are needed.
        """
        length = int.from_bytes(prefix[:4], "big")
        if len(prefix) < 4:
            return None if prefix[:1] <= _FIRST_BYTE_MAX else False
        if not 4 <= length <= FRAME_BYTES_MAX:
            return False
        if len(prefix) < 6:
            return None if prefix[4:5] in (b"", b"\0") else False
        kind = int.from_bytes(prefix[4:6], "big")
        if kind > RequestType.OFFSETS:
            return False
        named_at = 8 if kind in MULTIPLE else 6
        if named_at == 8 and length == 4:
            return True if prefix[6:8] == b"\0\0" else None if len(prefix) < 8 else False
        if len(prefix) <= named_at + 2:
            return None if prefix[named_at : named_at + 1] in (b"", b"\0") else False
        size = int.from_bytes(prefix[named_at : named_at + 2], "big")
        return 0 < size <= NAME_BYTES_MAX and prefix[named_at + 2] >= 0x20

    def open(self, output: Output, resume: Callable[[], None]) -> KafkaSession:
        return KafkaSession(self._broker, self._producer, self._reply_buffers, self._off_loop, COMMANDS, output, resume)
