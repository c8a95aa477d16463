"""A Kafka consumer of many partitions without new records: Fetch after Fetch, in a session if the broker has them.

Every request is answered at once, and names no more than a client would.
"""

from __future__ import annotations

import socket
import time
from typing import Any, Final

from benchmarks.peers.kafka import KafkaWire, ask
from benchmarks.peers.peer import connect
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api

PARTITIONS: Final = 1_000
PARTITION_BYTES: Final = 1 << 20
_VERSION: Final = 12


def create(host: str, port: int, topic: str) -> None:
    """Create the topic."""
    KafkaWire().create((host, port), topic, PARTITIONS)


def poll_rate(host: str, port: int, topic: str, polls: int) -> float:
    """Return answered polls per second."""
    with connect((host, port)) as peer:
        session = _fetch(peer, _wanted(topic), 0, 0).session_id
        begun = time.perf_counter()
        for number in range(polls):
            if session:
                answer = _fetch(peer, [], session, number + 1)
            else:
                answer = _fetch(peer, _wanted(topic), 0, 0)
            assert not answer.error, answer
            assert len(answer.responses) == (not session), answer
        return polls / (time.perf_counter() - begun)


def _wanted(topic: str) -> list[Any]:
    topics = schema.request(Api.FETCH).Topics
    entries = [
        topics.Partitions(partition=number, fetch_offset=0, partition_max_bytes=PARTITION_BYTES)
        for number in range(PARTITIONS)
    ]
    return [topics(topic=topic, partitions=entries)]


def _fetch(peer: socket.socket, topics: list[Any], session: int, epoch: int) -> Any:
    body = schema.request(Api.FETCH)(topics=topics, session_id=session, session_epoch=epoch, max_bytes=PARTITION_BYTES)
    return ask(peer, Api.FETCH, _VERSION, body)
