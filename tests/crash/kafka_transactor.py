"""A transactional Kafka client of several brokers that looks up leaders and coordinators, over blocking sockets.

A lost connection raises OSError, and an error response raises ``Failed``.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any, Final

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import encode_batch
from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.messages import Api, WireError
from polywire.records.columns import Record

TIMEOUT_S: Final = 20.0
TRANSACTIONAL: Final = 16
GROUP, TRANSACTION = 0, 1  # key types in coordinator lookups
COUNTING: Final = "counting"  # the group whose offset counts
STEPS: Final = ("begun", "written", "moved", "asked", "ended")
WAIT_S: Final = 60.0
PAUSE_S = 0.05  # before it starts again


class Failed(Exception):
    """A broker responded with an error."""

    def __init__(self, api: Api, error: int) -> None:
        super().__init__(f"{api.name} {WireError(error).name}")
        self.error: Final = error


class Transactor:
    """One producer. dialect: 1 with AddPartitionsToTxn, 2 with an epoch for each transaction."""

    def __init__(self, address: tuple[str, int], id_: str, dialect: int) -> None:
        self._address: Final = address
        self._id: Final = id_
        self._dialect: Final = dialect
        self._sockets: dict[tuple[str, int], socket.socket] = {}
        self._places: dict[tuple[int, str], tuple[str, int]] = {}
        self._leaders: dict[str, tuple[str, int]] = {}
        self._sequences: dict[str, int] = {}
        self._added: set[str] = set()
        self.number, self.epoch = -1, -1

    def close(self) -> None:
        """Close all connections, and forget leaders and coordinators."""
        for one in self._sockets.values():
            one.close()
        self._sockets.clear()
        self._places.clear()
        self._leaders.clear()

    def _ask(self, at: tuple[str, int], api: Api, version: int, /, **fields: Any) -> Any:
        self.tell(at, api, version, **fields)
        return self.hear(at, api, version)

    def tell(self, at: tuple[str, int], api: Api, version: int, /, **fields: Any) -> None:
        """Send a request without waiting."""
        if at not in self._sockets:
            self._sockets[at] = socket.create_connection(at, TIMEOUT_S)
        self._sockets[at].sendall(encode_request(api, version, 1, schema.request(api)(**fields), client_id="test"))

    def hear(self, at: tuple[str, int], api: Api, version: int) -> Any:
        """Return the response."""
        size = int.from_bytes(self._take(at, 4), "big")
        body = decode_response(api, version, self._take(at, size))[1]
        if getattr(body, "error", 0):
            raise Failed(api, body.error)
        return body

    def _take(self, at: tuple[str, int], count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            some = self._sockets[at].recv(count - len(found))
            if not some:
                raise ConnectionResetError("the broker has closed")
            found += some
        return bytes(found)

    def coordinator(self, key: str, kind: int) -> tuple[str, int]:
        """Return the coordinator of a group or transactional id."""
        if (kind, key) not in self._places:
            reported = self._ask(self._address, Api.FIND_COORDINATOR, 3, key=key, key_type=kind)
            self._places[kind, key] = reported.host, reported.port
        return self._places[kind, key]

    def leader(self, topic: str) -> tuple[str, int]:
        """Return the leader of a topic."""
        if topic not in self._leaders:
            asked = schema.request(Api.METADATA).Topics(name=topic)
            reported = self._ask(self._address, Api.METADATA, 9, topics=[asked], may_create=True)
            if reported.topics[0].error:
                raise Failed(Api.METADATA, reported.topics[0].error)
            brokers = {one.node_id: (one.host, one.port) for one in reported.brokers}
            self._leaders[topic] = brokers[reported.topics[0].partitions[0].leader_id]
        return self._leaders[topic]

    @property
    def home(self) -> tuple[str, int]:
        """Return the coordinator of its transactional id."""
        return self.coordinator(self._id, TRANSACTION)

    def who(self) -> dict[str, Any]:
        """Return the fields that identify it in requests."""
        return {"transactional_id": self._id, "producer_id": self.number, "producer_epoch": self.epoch}

    def init(self) -> None:
        """Initialize the producer again."""
        reported = self._ask(
            self.home, Api.INIT_PRODUCER_ID, 4, transactional_id=self._id, transaction_timeout_ms=60_000
        )
        self.number, self.epoch = reported.producer_id, reported.producer_epoch
        self._begin(restart=True)

    def _begin(self, *, restart: bool) -> None:
        self._added.clear()
        if restart:
            self._sequences.clear()

    def write(self, topic: str, value: bytes) -> None:
        """Write a record to the first partition of a topic."""
        if self._dialect == 1 and topic not in self._added:
            added = schema.request(Api.ADD_PARTITIONS_TO_TXN).Topics(name=topic, partitions=[0])
            reported = self._ask(self.home, Api.ADD_PARTITIONS_TO_TXN, 3, **self.who(), topics=[added])
            self._check(Api.ADD_PARTITIONS_TO_TXN, reported.topics[0].partitions[0].error)
            self._added.add(topic)
        at = self._sequences.get(topic, 0)
        batch = encode_batch(
            [Record(value)],
            producer_id=self.number,
            producer_epoch=self.epoch,
            base_sequence=at,
            attributes=TRANSACTIONAL,
        )
        made = schema.request(Api.PRODUCE).Topics
        one = made(name=topic, partitions=[made.Partitions(index=0, records=batch)])
        version = 9 if self._dialect == 1 else 12
        reported = self._ask(self.leader(topic), Api.PRODUCE, version, transactional_id=self._id, acks=-1, topics=[one])
        self._check(Api.PRODUCE, reported.responses[0].partitions[0].error)
        self._sequences[topic] = at + 1

    def move(self, group: str, topic: str, offset: int) -> None:
        """Add an offset of a group to the transaction."""
        if self._dialect == 1:
            self._ask(self.home, Api.ADD_OFFSETS_TO_TXN, 3, **self.who(), group_id=group)
        made = schema.request(Api.TXN_OFFSET_COMMIT).Topics
        one = made(name=topic, partitions=[made.Partitions(offset=offset)])
        version = 3 if self._dialect == 1 else 5
        reported = self._ask(
            self.coordinator(group, GROUP), Api.TXN_OFFSET_COMMIT, version, **self.who(), group_id=group, topics=[one]
        )
        self._check(Api.TXN_OFFSET_COMMIT, reported.topics[0].partitions[0].error)

    @staticmethod
    def _check(api: Api, error: int) -> None:
        if error:
            raise Failed(api, error)

    def tell_end(self, *, commits: bool) -> None:
        """Request the end without waiting."""
        self.tell(self.home, Api.END_TXN, 3 if self._dialect == 1 else 5, **self.who(), committed=commits)

    def hear_end(self) -> None:
        """Return the response to the end request."""
        reported = self.hear(self.home, Api.END_TXN, 3 if self._dialect == 1 else 5)
        if self._dialect == 2:
            self.number, self.epoch = reported.producer_id, reported.producer_epoch
        self._begin(restart=self._dialect == 2)

    def position(self, group: str, topic: str) -> int:
        """Return a group's offset once it is stable; 0 if it has none."""
        asked = schema.request(Api.OFFSET_FETCH).Topics(name=topic, indexes=[0])
        reported = self._ask(
            self.coordinator(group, GROUP), Api.OFFSET_FETCH, 7, group_id=group, topics=[asked], require_stable=True
        )
        entry = reported.topics[0].partitions[0]
        self._check(Api.OFFSET_FETCH, entry.error)
        return max(int(entry.offset), 0)


class Counting:
    """Counts through kills. ``done``: the last transaction whose commit was acknowledged."""

    def __init__(self, transactor: Transactor, topics: list[str]) -> None:
        self._transactor = transactor
        self._topics = topics
        self._number = 0
        self._is_held = False
        self.done = 0

    def one(self, at: Callable[[str], None]) -> None:
        """Commit one more transaction. at: called at each step of the first attempt."""
        end, count = time.monotonic() + WAIT_S, self.done + 1
        while self.done < count:
            assert time.monotonic() < end, "it makes no progress"
            try:
                self._hold()
                if self._number > self.done:
                    self._attempt(at)
            except (OSError, Failed):
                self._transactor.close()
                self._is_held = False
                time.sleep(PAUSE_S)
            at = nothing

    def _hold(self) -> None:
        if self._is_held:
            return
        self._transactor.init()
        committed = self._transactor.position(COUNTING, self._topics[0])
        assert committed >= self.done, "an acknowledged commit was lost"
        self.done, self._number, self._is_held = committed, committed + 1, True

    def _attempt(self, at: Callable[[str], None]) -> None:
        made, number = self._transactor, self._number
        made.write(self._topics[0], b"%d" % number)
        at("begun")
        for topic in self._topics[1:]:
            made.write(topic, b"%d" % number)
        at("written")
        made.move(COUNTING, self._topics[0], number)
        at("moved")
        made.tell_end(commits=True)
        at("asked")
        made.hear_end()
        self.done, self._number = number, number + 1
        at("ended")


def nothing(step: str) -> None:
    """Kill no process."""
    del step
