"""Write ``groups.json`` and ``offsets.json`` into the data directory, for other programs (spec: flux#files).

The files have the groups that were joined over FLUX: topic, offsets and all members, whichever protocol these use.

* A reader always sees a complete file, which is at most a second old.
* A file is rewritten only if its content has changed.
* A failed write does not affect the broker, and the broker never reads the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, Final, Protocol

import msgspec
import structlog

from polywire.broker.groups.group import GroupView
from polywire.errors import BrokerError
from polywire.log.base import Completion, Handle
from polywire.protocols.flux.context import WIRE, FluxBroker
from polywire.store.base import Store
from polywire.types import PositionKind

GROUPS: Final = "groups.json"
OFFSETS: Final = "offsets.json"
FILES: Final = (GROUPS, OFFSETS)
INTERVAL_S: Final = 0.5  # between two checks; with encoding and writing, a change is in the files in less than a second
# size of both files, and of the memory for them; enough for some 25,000 groups of three members
BYTES_MAX: Final = 8 * 1024 * 1024
CHUNK_BYTES: Final = 256 * 1024  # bytes written at a time
RETRY_S: Final = 10.0  # seconds until the next attempt after a failed write
AGAIN_S: Final = 60.0  # seconds until the next attempt after the size limit was exceeded
NAMES_MAX: Final = 100_000  # changed names that wait to be encoded; if there are more, all groups are encoded

_ENTITIES: Final = {
    char.encode(): b"\\u%04x" % ord(char) for char in "<>&\u2028\u2029"
}  # escaped as in the original broker, for pages that embed the text

log = structlog.get_logger("polywire.flux")

Job = Callable[[], Any]


class Worker(Protocol):
    """A thread for work that may wait for the disk."""

    def run(self, job: Job, on_completed: Completion[Any]) -> None:
        """Run ``job`` in the thread, then call ``on_completed`` on the loop with its result or error."""

    def stop(self) -> None: ...


class Phase(Enum):
    RESTING = "resting"
    ENCODING = "encoding"
    WRITING = "writing"


class Exports:
    """Keeps the two files up to date."""

    def __init__(self, broker: FluxBroker, store: Store, worker: Worker, *, bytes_max: int = BYTES_MAX) -> None:
        self._broker: Final = broker
        self._store: Final = store
        self._worker: Final = worker
        self._bytes_max: Final = bytes_max
        self._pieces: Final[dict[str, dict[str, bytes]]] = {name: {} for name in FILES}  # content, by file and group
        self._size = 0  # bytes of all pieces, at most ``bytes_max``
        self._names: set[str] = set()  # groups whose pieces must be encoded again
        self._changed: set[str] = set()  # files whose pieces have changed since they were written
        self._phase = Phase.RESTING
        self._paused_until = 0.0
        self._rebuilds = True  # whether all groups must be encoded
        self._has_failed = False
        self._timer: Handle | None = None

    def start(self) -> None:
        """Export all groups, and remove files of an earlier start that have no content now."""
        self._broker.groups.watch()
        self._changed.update(FILES)
        self._check()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._worker.stop()
        self._note_changes()
        self._begin()
        self._encode(until=float("inf"))
        with suppress(BrokerError):
            self._job()()

    def _check(self) -> None:
        self._timer = self._broker.loop.call_later(INTERVAL_S, self._check)
        self._note_changes()
        if self._phase is not Phase.RESTING or self._broker.clock.monotonic() < self._paused_until:
            return
        self._begin()
        if self._names or self._changed:
            self._phase = Phase.ENCODING
            self._broker.sliced.put(self._step)

    def _note_changes(self) -> None:
        changed_groups = self._broker.groups.take_touched()
        if not self._rebuilds:
            self._names |= changed_groups
            if len(self._names) > NAMES_MAX:
                self._drop_pieces()

    def _begin(self) -> None:
        if self._rebuilds:
            self._rebuilds = False
            self._names.update(self._broker.groups.bound(WIRE))

    def _drop_pieces(self) -> None:
        for pieces in self._pieces.values():
            pieces.clear()
        self._size = 0
        self._names.clear()
        self._changed.update(FILES)
        self._rebuilds = True

    def _step(self, end: float) -> bool:
        if self._phase is not Phase.ENCODING or self._encode(until=end):
            return self._phase is Phase.ENCODING
        self._phase = Phase.WRITING
        self._worker.run(self._job(), self._written)
        return False

    def _encode(self, *, until: float) -> bool:
        now = self._broker.clock.monotonic
        while self._names:
            self._encode_group(self._names.pop())
            if self._size > self._bytes_max:
                self._remove_files()
            elif now() >= until:
                break
        return bool(self._names)

    def _encode_group(self, name: str) -> None:
        groups = self._broker.groups
        topic = groups.topic_of(WIRE, name)
        view = None if topic is None else groups.kept(name, topic)
        offsets = {} if topic is None else self._broker.positions_in(topic, PositionKind.GROUP, name)
        self._store_piece(GROUPS, name, b"" if view is None else group_json(view, now_us=self._broker.clock.now_us()))
        self._store_piece(OFFSETS, name, b"" if topic is None or not offsets else offsets_json(topic, offsets))

    def _store_piece(self, file: str, name: str, piece: bytes) -> None:
        pieces = self._pieces[file]
        before = pieces.get(name, b"")
        if piece == before:
            return
        self._changed.add(file)
        self._size += self._stored_bytes(name, piece) - self._stored_bytes(name, before)
        if piece:
            pieces[name] = piece
        else:
            del pieces[name]

    @staticmethod
    def _stored_bytes(name: str, piece: bytes) -> int:
        return len(name.encode()) + len(piece) if piece else 0

    def _remove_files(self) -> None:
        """Remove the files: the size limit is exceeded, and incomplete files would mislead.

        They are written again later.
        """
        log.warning("too many groups to export, removed the export files", files=FILES, limit=self._bytes_max)
        self._drop_pieces()
        self._paused_until = self._broker.clock.monotonic() + AGAIN_S

    def _job(self) -> Job:
        wanted = {file: dict(self._pieces[file]) for file in self._changed}
        self._changed = set()
        return partial(_write, self._store, wanted)

    def _written(self, written: BrokerError | None) -> None:
        self._phase = Phase.RESTING
        if written is None:
            if self._has_failed:
                log.info("group export resumed", files=FILES)
            self._has_failed = False
            return
        if not self._has_failed:
            log.warning("group export failed, the export files are out of date", files=FILES, reason=written.message)
        self._has_failed = True
        self._changed.update(FILES)
        self._paused_until = max(self._paused_until, self._broker.clock.monotonic() + RETRY_S)


def remove(store: Store) -> None:
    """Remove files of an earlier start, if exports are disabled."""
    for name in FILES:
        with suppress(BrokerError):
            store.delete(name)


def _write(store: Store, wanted: Mapping[str, Mapping[str, bytes]]) -> None:
    for file, pieces in wanted.items():
        if pieces:
            store.put(file, _object(pieces))
        else:
            store.delete(file)


def group_json(view: GroupView, *, now_us: int) -> bytes:
    ids = [member.id for member in view.members]
    shares = {member.id: list(member.partitions) or None for member in view.members}
    fields = {
        "topic": view.topic,
        "generation": view.generation,
        "assignor": view.assignor.value,
        "member_order": ids or None,
        "assignments": {name: shares[name] for name in sorted(ids, key=str.encode)},
        "members": [
            {"consumer_id": member.id, "last_heartbeat_unix_ms": now_us // 1000 - int(member.idle_s * 1000)}
            for member in view.members
        ],
    }
    return _encoded(fields)


def offsets_json(topic: str, offsets: Mapping[int, int]) -> bytes:
    return _encoded({topic: dict(sorted((str(number), offset) for number, offset in offsets.items()))})


def _object(pieces: Mapping[str, bytes]) -> Iterator[bytes]:
    """Yield the lines of a JSON object with these encoded values by key. There must be at least one."""
    chunk, before = bytearray(), b"{"
    for name in sorted(pieces, key=str.encode):
        chunk += before + _encoded(name) + b":" + pieces[name]
        before = b","
        if len(chunk) >= CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    yield bytes(chunk) + b"}\n"


def _encoded(value: object) -> bytes:
    encoded = msgspec.json.encode(value)
    for char, entity in _ENTITIES.items():
        encoded = encoded.replace(char, entity)
    return encoded
