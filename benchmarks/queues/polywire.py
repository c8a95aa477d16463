"""Queues over the `polywire` protocol."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import Final

from benchmarks.peers.ours import Polywire, PolywireFrames
from benchmarks.peers.peer import Address, connect, receive_until
from benchmarks.polywire_load import MAGIC
from benchmarks.queues.peer import WAIT_MS, Step, group_of
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import PREFIX, decode_answer, encode_head
from polywire.protocols.polywire.messages import Head, Verb
from polywire.share_settings import AUTO_OFFSET_RESET
from polywire.types import Outcome


class PolywireQueue(Polywire):
    """The `polywire` protocol. An acknowledgement that was answered survives a crash of the broker."""

    confirms = True

    def create(self, address: Address, topic: str) -> None:
        """See QueuePeer."""
        super().create(address, topic)
        with closing(self.producer(address, topic)) as peer:
            head = messages.ConfigureQueue(group_of(topic), topic, {AUTO_OFFSET_RESET: "earliest"})
            peer.sendall(encode_head(Verb.CONFIGURE_QUEUE, 1, head))
            frames = PolywireFrames()  # raises AssertionError for a refusal
            assert list(frames.cut(memoryview(receive_until(peer, _is_whole))))

    def worker(
        self, address: Address, topic: str, number: int, *, prefetch: int, single: bool
    ) -> tuple[socket.socket, PolywireWorker]:
        """See QueuePeer."""
        peer = connect(address)
        peer.sendall(MAGIC)
        receive_until(peer, lambda found: len(found) > len(MAGIC) and _is_whole(found[len(MAGIC) :]))
        return peer, PolywireWorker(topic, f"worker-{number}", prefetch, single=single)


class PolywireWorker:
    """Sends ACQUIRE, and ACKNOWLEDGE with one entry for each record."""

    def __init__(self, topic: str, member: str, prefetch: int, *, single: bool) -> None:
        self._key: Final = group_of(topic), topic, member
        self._acquire: Final = encode_head(Verb.ACQUIRE, 1, messages.Acquire(*self._key, prefetch, wait_ms=WAIT_MS))
        self._single: Final = single
        self._frames: Final = PolywireFrames()
        self._runs: list[messages.AcknowledgedRun] = []  # to be acknowledged
        self._sent: list[int] = []  # number of records of each request without a response

    def begin(self) -> bytes:
        """See Worker."""
        return self._acquire

    def take(self, received: memoryview) -> Step:
        """See Worker."""
        done = 0
        answer = b""
        for verb, head, _ in self._frames.cut(received):
            if verb == Verb.ACQUIRE:
                self._runs += [
                    messages.AcknowledgedRun(part.partition, offset, offset, Outcome.ACCEPT)
                    for part in decode_answer(head, messages.Acquired).partitions
                    for first, last, _ in part.runs
                    for offset in range(first, last + 1)
                ]
                if self._single:
                    answer += self._next()
                else:
                    answer += (self._request(self._runs) if self._runs else b"") + self._acquire
                    self._runs = []
            elif verb == Verb.ACKNOWLEDGE:
                if refused := decode_answer(head, messages.Acknowledged).refused:
                    raise AssertionError(f"an acknowledgement was refused refused={refused[0]}")
                done += self._sent.pop(0)
                if self._single:
                    answer += self._next()
        return Step(done, answer)

    def _next(self) -> bytes:
        return self._request([self._runs.pop()]) if self._runs else self._acquire

    def _request(self, runs: list[messages.AcknowledgedRun]) -> bytes:
        self._sent.append(len(runs))
        head: Head = messages.Acknowledge(*self._key, runs)
        return encode_head(Verb.ACKNOWLEDGE, 1, head)


def _is_whole(found: bytes) -> bool:
    return len(found) >= PREFIX.size and len(found) == PREFIX.size + PREFIX.unpack_from(found)[0]
