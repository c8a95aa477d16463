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
from polywire.protocols.polywire.messages import Verb
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
    """Acknowledges each record with an entry of its own.

    The entries are part of the next ACQUIRE, unless it may have to wait because the last one got few records. Single
    acknowledgements are sent alone.
    """

    def __init__(self, topic: str, member: str, prefetch: int, *, single: bool) -> None:
        self._key: Final = group_of(topic), topic, member
        self._prefetch: Final = prefetch
        self._single: Final = single
        self._frames: Final = PolywireFrames()
        self._runs: list[messages.AcknowledgedRun] = []  # to be acknowledged
        self._sent: dict[int, int] = {}  # acknowledgements in the request without a response, by its verb

    def begin(self) -> bytes:
        """See Worker."""
        return self._acquire([])

    def take(self, received: memoryview) -> Step:
        """See Worker."""
        done = 0
        answer = b""
        for verb, head, _ in self._frames.cut(received):
            done += self._sent.pop(verb)
            found: messages.Acquired | messages.Acknowledged
            if verb == Verb.ACQUIRE:
                found = decode_answer(head, messages.Acquired)
                self._runs += [
                    messages.AcknowledgedRun(part.partition, offset, offset, Outcome.ACCEPT)
                    for part in found.partitions
                    for first, last, _ in part.runs
                    for offset in range(first, last + 1)
                ]
                answer += self._next() if self._single else self._next_of_all()
            else:
                found = decode_answer(head, messages.Acknowledged)
                if self._single:
                    answer += self._next()
            if found.refused:
                raise AssertionError(f"an acknowledgement was refused refused={found.refused[0]}")
        return Step(done, answer)

    def _next(self) -> bytes:
        return self._acknowledge([self._runs.pop()]) if self._runs else self._acquire([])

    def _next_of_all(self) -> bytes:
        runs, self._runs = self._runs, []
        if not runs or len(runs) == self._prefetch:
            return self._acquire(runs)
        return self._acknowledge(runs) + self._acquire([])

    def _acknowledge(self, runs: list[messages.AcknowledgedRun]) -> bytes:
        self._sent[Verb.ACKNOWLEDGE] = len(runs)
        return encode_head(Verb.ACKNOWLEDGE, 1, messages.Acknowledge(*self._key, runs))

    def _acquire(self, runs: list[messages.AcknowledgedRun]) -> bytes:
        self._sent[Verb.ACQUIRE] = len(runs)
        head = messages.Acquire(*self._key, self._prefetch, wait_ms=WAIT_MS, runs=runs)
        return encode_head(Verb.ACQUIRE, 1, head)


def _is_whole(found: bytes) -> bool:
    return len(found) >= PREFIX.size and len(found) == PREFIX.size + PREFIX.unpack_from(found)[0]
