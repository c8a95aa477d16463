"""Work-queue streams of NATS JetStream: a pull consumer with explicit acknowledgements."""

from __future__ import annotations

import json
import socket
from typing import Final

from benchmarks.peers.nats import Nats, ask, greeted
from benchmarks.peers.peer import Address
from benchmarks.queues.peer import LOCKS_MAX, WAIT_MS, Step

_CONSUMER: Final = "workers"
_INBOX: Final = b"_INBOX.worker"


class NatsQueue(Nats):
    """One server. An acknowledgement that was answered is in the memory of the server and soon in its files."""

    name = "NATS work queue"
    confirms = True

    def create(self, address: Address, topic: str) -> None:
        """See QueuePeer."""
        stream = {"name": topic, "subjects": [topic], "storage": "file", "retention": "workqueue"}
        ask(address, f"$JS.API.STREAM.CREATE.{topic}", stream)
        config = {
            "durable_name": _CONSUMER,
            "ack_policy": "explicit",
            "max_ack_pending": LOCKS_MAX,
            "max_waiting": 10_000,
        }
        ask(address, f"$JS.API.CONSUMER.DURABLE.CREATE.{topic}.{_CONSUMER}", {"stream_name": topic, "config": config})

    def worker(
        self, address: Address, topic: str, number: int, *, prefetch: int, single: bool
    ) -> tuple[socket.socket, NatsWorker]:
        """See QueuePeer."""
        peer = greeted(address)
        inbox = b"%s.%d" % (_INBOX, number)
        peer.sendall(b"SUB %s 1\r\nSUB %s.done 2\r\n" % (inbox, inbox))
        return peer, NatsWorker(topic, inbox, prefetch, single=single)


class NatsWorker:
    """Pulls as many records as it may hold, and acknowledges each; single acknowledgements ask for a confirmation."""

    def __init__(self, topic: str, inbox: bytes, prefetch: int, *, single: bool) -> None:
        self._done: Final = inbox + b".done " if single else b""
        pull = json.dumps({"batch": prefetch, "expires": WAIT_MS * 1_000_000}).encode()
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{topic}.{_CONSUMER}".encode()
        self._pull: Final = b"PUB %s %s %d\r\n%s\r\n" % (subject, inbox, len(pull), pull)
        self._prefetch: Final = prefetch
        self._single: Final = single
        self._pending = b""
        self._subjects: list[bytes] = []  # to be acknowledged
        self._pulled = 0  # records of the last pull that have arrived
        self._waits = False  # whether a confirmation is to come

    def begin(self) -> bytes:
        """See Worker."""
        return self._pull

    def take(self, received: memoryview) -> Step:
        """See Worker."""
        data = self._pending + bytes(received)
        at = done = 0
        while (line_end := data.find(b"\r\n", at)) >= 0:
            words = data[at:line_end].split()
            if words[0] != b"MSG":
                if words[0] == b"-ERR":
                    raise AssertionError(f"refused answer={data[at:line_end]!r}")
                at = line_end + 2
                continue
            end = line_end + 2 + int(words[-1]) + 2
            if end > len(data):
                break
            if words[2] == b"2":
                done, self._waits = done + 1, False
            elif len(words) == 5:
                self._subjects.append(words[3])
                self._pulled += 1
            at = end
        self._pending = data[at:]
        if self._single:
            return Step(done, self._next())
        answer = b"".join([b"PUB %s 4\r\n+ACK\r\n" % subject for subject in self._subjects])
        done, self._subjects = len(self._subjects), []
        if self._pulled == self._prefetch:
            self._pulled = 0
            answer += self._pull
        return Step(done, answer)

    def _next(self) -> bytes:
        if self._waits:
            return b""
        if self._subjects:
            self._waits = True
            return b"PUB %s %s4\r\n+ACK\r\n" % (self._subjects.pop(), self._done)
        if self._pulled == self._prefetch:
            self._pulled = 0
            return self._pull
        return b""
