"""Write ``groups.json`` and ``offsets.json`` into the data directory, for other programs (spec: flux#files).

The files have the groups that were joined over FLUX: topic, offsets and all members, whichever protocol these use.

* A reader always sees a complete file, which is at most a second old. With several processes, the first one writes the
  groups of all; those of the others are at most two seconds old. The groups of a process that does not respond remain
  in the files.
* A file is rewritten only if its content has changed.
* A failed write does not affect the broker, and the broker never reads the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
from polywire.protocols.runtime.shards import Parts
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
NAMES_MAX: Final = 100_000  # changed names that wait; if there are more, all groups are encoded, or reported
REPORTS_S: Final = 10.0  # how long a start waits for the groups of other processes before it replaces the files

_ENTITIES: Final = {
    char.encode(): b"\\u%04x" % ord(char) for char in "<>&\u2028\u2029"
}  # escaped as in the original broker, for pages that embed the text

PART: Final = "flux_exports"  # name of ``Exports`` for other processes

log = structlog.get_logger("polywire.flux")

Job = Callable[[], Any]


class Worker(Protocol):
    """A thread for work that may wait for the disk."""

    def run(self, job: Job, on_completed: Completion[Any]) -> None:
        """Run ``job`` in the thread, then call ``on_completed`` on the loop with its result or error."""

    def stop(self) -> None: ...


class Report(msgspec.Struct, frozen=True, array_like=True):
    """A report of a process to the one that writes the files.

    Attributes:
        version: number of the report; 0 if the process is still encoding its groups.
        is_whole: whether it has all groups. Otherwise it has the changes since the report before.
        content: encoded content by file and group; empty for a removed group. None if the size limit is exceeded.
    """

    version: int
    is_whole: bool
    content: dict[str, dict[str, bytes]] | None


class Pieces:
    """Encoded content of the files, by file and group.

    Attributes:
        size: bytes of all content and the names of its groups.
    """

    __slots__ = ("by_file", "size")

    def __init__(self) -> None:
        self.by_file: Final[dict[str, dict[str, bytes]]] = {name: {} for name in FILES}
        self.size = 0

    def put(self, file: str, name: str, piece: bytes) -> bool:
        """Store the content of a group; empty content removes the group. Return whether it has changed."""
        pieces = self.by_file[file]
        before = pieces.get(name, b"")
        if piece == before:
            return False
        self.size += _stored_bytes(name, piece) - _stored_bytes(name, before)
        if piece:
            pieces[name] = piece
        else:
            del pieces[name]
        return True

    def put_all(self, file: str, content: Mapping[str, bytes]) -> bool:
        """Store the content of groups as ``put`` does. Return whether any has changed."""
        changed = [self.put(file, name, piece) for name, piece in content.items()]
        return any(changed)

    def clear(self) -> None:
        for pieces in self.by_file.values():
            pieces.clear()
        self.size = 0


class RemoteGroups:
    """The groups of other processes, as these have reported them last.

    Attributes:
        is_too_large: whether another process has exceeded the size limit.
    """

    def __init__(self, broker: FluxBroker, parts: Parts | None, changed: Callable[[Iterable[str]], None]) -> None:
        """Create the object, which has no groups yet.

        Args:
            broker: the broker of this process.
            parts: all processes; None if there is only one.
            changed: called with the files whose content has changed.
        """
        shards = None if parts is None else parts.shards
        self._broker: Final = broker
        self._parts: Final = parts
        self._shards: Final = frozenset() if shards is None else frozenset(range(shards.count)) - {shards.own}
        self._changed: Final = changed
        self._versions: Final[dict[int, int]] = {}  # of the last reports, by shard
        self._reported: Final[dict[int, Pieces]] = {}  # by shard
        self._requested: Final[set[int]] = set()  # shards whose response is outstanding
        self._awaited_until = 0.0
        self.is_too_large = False

    @property
    def size(self) -> int:
        """Bytes of all content."""
        return sum(pieces.size for pieces in self._reported.values())

    def clear(self, start: float) -> None:
        """Remove all groups, because all processes report theirs again. Their reports are awaited from ``start`` on."""
        self._versions.clear()
        self._reported.clear()
        self.is_too_large = False
        self._awaited_until = start + REPORTS_S

    def are_awaited(self) -> bool:
        """Return whether reports of other processes are missing. After ``REPORTS_S``, they are not awaited any more."""
        missing = self._versions.keys() < self._shards and not self.is_too_large
        return missing and self._broker.clock.monotonic() < self._awaited_until

    def request(self) -> None:
        """Request the changes of all processes that have responded to the last request."""
        for shard in self._shards - self._requested:
            assert self._parts is not None, "there are other processes"
            self._requested.add(shard)
            then, version = partial(self._apply, shard), self._versions.get(shard, 0)
            try:
                self._parts.call_part(shard, PART, Exports.report, version, then=then)
            except BrokerError as error:  # too many bytes are on the way to that process
                then(error)

    def _apply(self, shard: int, report: Report | BrokerError) -> None:
        self._requested.discard(shard)
        if isinstance(report, BrokerError):
            return
        if report.content is None:
            self.is_too_large = True
            self._changed(FILES)
        elif report.version and (report.is_whole or shard in self._reported):
            pieces = Pieces() if report.is_whole else self._reported[shard]
            changed = {file for file, content in report.content.items() if pieces.put_all(file, content)}
            self._versions[shard], self._reported[shard] = report.version, pieces
            self._changed(FILES if report.is_whole else changed)

    def merge(self, file: str, own: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the content of a file: the groups of this process, ``own``, and those of the other processes.

        If two processes have a group with the same name, the group was moved between their topics, and one of them has
        not reported that yet.
        """
        merged = dict(own)
        for shard, reported in self._reported.items():
            pieces = reported.by_file[file]
            current = {name: merged[name] for name in merged.keys() & pieces.keys() if self._shard_of(name) != shard}
            merged.update(pieces)
            merged.update(current)
        return merged

    def _shard_of(self, name: str) -> int | None:
        """Return the shard of a group."""
        topic = self._broker.groups.bound_to(WIRE, name)
        return None if topic is None or self._parts is None else self._parts.shards.shard_of(topic)


class Phase(Enum):
    RESTING = "resting"
    ENCODING = "encoding"
    WRITING = "writing"


class Exports:
    """Keeps the two files up to date.

    With several processes, each encodes its groups. The first one writes the files and requests the content of the
    others (``report``).
    """

    def __init__(
        self,
        broker: FluxBroker,
        store: Store | None,
        worker: Worker | None,
        *,
        bytes_max: int = BYTES_MAX,
        parts: Parts | None = None,
    ) -> None:
        """Create the exports.

        Args:
            broker: the broker of this process.
            store: where the files are written. None if another process writes them.
            worker: writes the files. None without a store.
            bytes_max: limit for the size of both files.
            parts: all processes, in the one that writes the files.
        """
        self._broker: Final = broker
        self._store: Final = store
        self._worker: Final = worker
        self._bytes_max: Final = bytes_max
        self._pieces: Final = Pieces()  # of this process, at most ``bytes_max``
        self._names: set[str] = set()  # groups whose pieces must be encoded again
        self._changed: set[str] = set()  # files whose pieces have changed since they were written
        self._phase = Phase.RESTING
        self._paused_until = 0.0
        self._rebuilds = True  # whether all groups must be encoded
        self._has_failed = False
        self._timer: Handle | None = None
        # Reports to the process that writes the files: the last version, and what has changed since. Versions are
        # higher than those before a restart.
        self._version = broker.clock.now_us()
        self._unreported: Final[dict[str, set[str]]] = {name: set() for name in FILES}
        self._remote: Final = RemoteGroups(broker, parts, self._changed_files)

    def start(self) -> None:
        """Export all groups. Remove the files of an earlier start if there is nothing to export."""
        self._broker.groups.watch()
        self._changed.update(FILES)
        self._remote.clear(self._broker.clock.monotonic())
        self._check()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._worker is None:
            return
        self._worker.stop()
        if self._remote.are_awaited():  # the files have more groups than this process knows
            return
        self._note_changes()
        self._begin()
        self._encode(until=float("inf"))
        self._limit_size()
        with suppress(BrokerError):
            self._job()()

    def _check(self) -> None:
        now = self._broker.clock.monotonic()
        self._timer = self._broker.loop.call_later(INTERVAL_S, self._check)
        self._note_changes()
        if now < self._paused_until:
            return
        self._remote.request()
        if self._phase is not Phase.RESTING or self._remote.are_awaited():
            return
        self._begin()
        if self._names or self._changed:
            self._phase = Phase.ENCODING
            self._broker.sliced.put(self._step)

    # Groups of this process

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
        self._pieces.clear()
        self._names.clear()
        self._changed.update(FILES)
        self._rebuilds = True
        self._forget_unreported()
        self._remote.clear(max(self._broker.clock.monotonic(), self._paused_until))

    def _step(self, end: float) -> bool:
        if self._phase is not Phase.ENCODING or self._encode(until=end):
            return self._phase is Phase.ENCODING
        if self._worker is None:
            self._phase = Phase.RESTING
            self._changed.clear()
            return False
        self._limit_size()
        self._phase = Phase.WRITING
        self._worker.run(self._job(), self._written)
        return False

    def _encode(self, *, until: float) -> bool:
        now = self._broker.clock.monotonic
        while self._names:
            self._encode_group(self._names.pop())
            if self._pieces.size > self._bytes_max:
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
        if not self._pieces.put(file, name, piece):
            return
        self._changed.add(file)
        if self._store is None:
            self._unreported[file].add(name)
            if len(self._unreported[file]) > NAMES_MAX:
                self._forget_unreported()

    def _forget_unreported(self) -> None:
        """Let the next report have all groups instead of changes."""
        self._version += 1
        for names in self._unreported.values():
            names.clear()

    def _remove_files(self) -> None:
        """Remove the files: the size limit is exceeded, and incomplete files would mislead.

        They are written again later.
        """
        log.warning("too many groups to export, removed the export files", files=FILES, limit=self._bytes_max)
        self._paused_until = self._broker.clock.monotonic() + AGAIN_S
        self._drop_pieces()

    def _limit_size(self) -> None:
        """Remove the files if the groups of all processes exceed the size limit."""
        if self._remote.is_too_large or self._pieces.size + self._remote.size > self._bytes_max:
            self._remove_files()

    def _changed_files(self, files: Iterable[str]) -> None:
        self._changed.update(files)

    # Other processes

    def report(self, version: int, then: Completion[Report]) -> None:
        """Report the changes of this process since its report with this version.

        If that was not the last report, report all groups.
        """
        if self._rebuilds or self._names:
            is_too_large = self._broker.clock.monotonic() < self._paused_until
            then(Report(0, False, None if is_too_large else {}))
            return
        is_whole = version != self._version
        pieces = self._pieces.by_file
        changes = {file: {name: pieces[file].get(name, b"") for name in self._unreported[file]} for file in FILES}
        if is_whole or any(changes.values()):
            self._forget_unreported()
        then(Report(self._version, is_whole, pieces if is_whole else changes))

    # Files

    def _job(self) -> Job:
        contents = {file: self._remote.merge(file, self._pieces.by_file[file]) for file in self._changed}
        self._changed = set()
        assert self._store is not None, "this process writes the files"
        return partial(_write, self._store, contents)

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


def _stored_bytes(name: str, piece: bytes) -> int:
    return len(name.encode()) + len(piece) if piece else 0


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
