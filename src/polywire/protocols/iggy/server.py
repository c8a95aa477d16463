"""Iggy's commands about the server: PING, clients, cluster metadata and statistics.

A statistic that the operating system does not report is 0.

(spec: iggy#d0-clients, iggy#cluster-metadata, iggy#d0-statistics, iggy#d2-statistics)
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from polywire.broker.permissions import Action
from polywire.build_info import VERSION
from polywire.errors import BrokerError
from polywire.protocols.iggy import errors
from polywire.protocols.iggy.context import ClientState, Shared
from polywire.protocols.iggy.dialect import Dialect
from polywire.protocols.iggy.directory import Stream
from polywire.protocols.iggy.histories import REPLICA
from polywire.protocols.iggy.messages import U32, Refused, str32_bytes
from polywire.protocols.iggy.reader import Reader
from polywire.protocols.iggy.reply_slots import Answer
from polywire.protocols.iggy.session import IggySession
from polywire.protocols.iggy.topics import bytes_of, messages_of, require_current

NO_USER: Final = 2**32 - 1
TCP: Final = 1
CLUSTER_NAME: Final = "polywire"
_STATS: Final = Struct("<If")
_STATS_REST: Final = Struct("<QQQQQQQQIIIIQII")
_MEMORY: Final = Path("/proc/meminfo")
_STATM: Final = Path("/proc/self/statm")
_IO: Final = Path("/proc/self/io")
_DESCRIPTORS: Final = Path("/proc/self/fd")
_FILES: Final = Struct("<QQ")


def ping(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    del session, answer
    if reader.left:
        raise Refused(errors.UNKNOWN_COMMAND)
    return b""


# Clients


def client_bytes(client: ClientState, dialect: Dialect) -> bytes:
    """Encode a client as an element of a list."""
    user = b""
    if dialect.has_login:
        none = 0 if dialect.one_based else NO_USER
        user = U32.pack(none if client.user_id is None else client.user_id + dialect.base)
    head = U32.pack(client.number) + user + bytes((TCP,)) + str32_bytes(client.peer)
    return head + U32.pack(len(client.groups))


def _details(session: IggySession, client: ClientState, dialect: Dialect) -> bytes:
    numbers = b"".join(U32.pack(number + dialect.base) for group in client.groups for number in group)
    return client_bytes(client, dialect) + numbers


def get_me(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    del answer
    return _details(session, session.describe(), reader.dialect)


def get_client(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    number = reader.u32()
    if number == 0 or reader.left:
        raise Refused(errors.BAD_CLIENT_ID if number == 0 else errors.UNKNOWN_COMMAND)
    session.authorize(Action.SERVER_DESCRIBE)
    dialect = reader.dialect

    def found(lists: list[list[ClientState]] | BrokerError) -> None:
        if isinstance(lists, BrokerError):
            answer.refuse(lists)
            return
        client = next((client for clients in lists for client in clients if client.number == number), None)
        if client is not None:
            answer.ok(_details(session, client, dialect))
        elif dialect.empty_when_missing:
            answer.ok()
        else:
            answer.status(errors.NO_SUCH_CLIENT)

    session.shared.call_all(Shared.list_clients, found)


def get_clients(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    session.authorize(Action.SERVER_DESCRIBE)
    dialect = reader.dialect

    def listed(lists: list[list[ClientState]] | BrokerError) -> None:
        if isinstance(lists, BrokerError):
            answer.refuse(lists)
        else:
            clients = chain.from_iterable(lists)
            answer.make(client_bytes(client, dialect) for client in clients)

    session.shared.call_all(Shared.list_clients, listed)


# The process


def get_cluster(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    """GET_CLUSTER_METADATA: return only this node, so that clients connect to no other."""
    del answer
    if reader.dialect.one_based:
        raise Refused(errors.UNKNOWN_COMMAND)
    host, port = session.local
    replica = bytes((REPLICA,)) if reader.dialect.contexts else b""
    node = replica + str32_bytes("node-0") + str32_bytes(host) + port.to_bytes(2, "little") + bytes(6) + bytes(2)
    return str32_bytes(CLUSTER_NAME) + U32.pack(1) + node


def get_stats(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    session.authorize(Action.SERVER_DESCRIBE)
    shared, dialect = session.shared, reader.dialect
    streams = shared.directory.streams()
    require_current(session, streams)

    def counted(counts: list[tuple[int, int]] | BrokerError) -> None:
        if isinstance(counts, BrokerError):
            answer.refuse(counts)
        else:
            clients, groups = map(sum, zip(*counts, strict=True))
            answer.make(_stats(shared, streams, dialect, clients, groups))

    shared.call_all(Shared.count, counted)


class Totals(NamedTuple):
    """Totals of the broker, for GET_STATS."""

    streams: int
    topics: int
    partitions: int
    size: int
    messages: int
    clients: int
    groups: int


def _stats(shared: Shared, streams: list[Stream], dialect: Dialect, clients: int, groups: int) -> Iterator[bytes]:
    """Yield the encoded totals.

    Empty bytes are yielded after each topic, so that other connections are served in between.
    """
    topics, partitions, size, messages = 0, 0, 0, 0
    for topic in [topic for stream in streams for topic in shared.directory.topics(stream)]:
        topics += 1
        partitions += len(topic.partitions)
        size += bytes_of(topic)
        messages += messages_of(topic)
        yield b""
    yield stats_bytes(shared, dialect, Totals(len(streams), topics, partitions, size, messages, clients, groups))


def stats_bytes(shared: Shared, dialect: Dialect, totals: Totals) -> bytes:
    run_s = time.time() - shared.started_at
    cpu = _cpu_percent(run_s)
    body = _STATS.pack(os.getpid(), cpu)
    micros = 1 if dialect.topic_settings < 3 else 1_000_000
    if dialect.topic_settings >= 2:  # both fields were added at about the same time (spec: iggy#timeline)
        body += Struct("<f").pack(cpu)
    total, available = _memory()
    body += _STATS_REST.pack(
        _process_memory(),
        total,
        available,
        int(run_s * micros),
        int(shared.started_at * micros),
        *_bytes_moved(),
        totals.size,
        totals.streams,
        totals.topics,
        totals.partitions,
        totals.partitions,  # reported as the number of segments, because partitions share segments in this broker
        totals.messages,
        totals.clients,
        totals.groups,
    )
    body += b"".join(map(str32_bytes, (platform.node(), platform.system(), platform.release(), platform.version())))
    if dialect.topic_settings >= 3:
        body += str32_bytes(VERSION) + bytes(4) + bytes(4)
        disk = shutil.disk_usage(shared.settings.data_dir or Path("/"))
        body += U32.pack(threading.active_count()) + disk.free.to_bytes(8, "little") + disk.total.to_bytes(8, "little")
    if dialect.contexts:
        body += _FILES.pack(_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[0] & (2**64 - 1))
    return body


def _cpu_percent(run_s: float) -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return 100.0 * (used.ru_utime + used.ru_stime) / max(run_s, 0.001) / (os.cpu_count() or 1)


def _open_files() -> int:
    """Return the number of this process's open files and sockets; 0 if the system does not report it."""
    return len(os.listdir(_DESCRIPTORS)) if _DESCRIPTORS.exists() else 0


def _process_memory() -> int:
    """Return the memory of this process in bytes; its maximum so far if the system reports only that."""
    page = os.sysconf("SC_PAGE_SIZE")
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * page
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory() -> tuple[int, int]:
    """Return the machine's total and available memory in bytes; 0 available if the system does not report it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not _MEMORY.exists():
        return total, 0
    lines = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines() if ":" in line)
    return total, int(lines.get("MemAvailable", "0 kB").split()[0]) * 1024


def _bytes_moved() -> tuple[int, int]:
    """Return the bytes that this process has read and written; 0 if the system does not report them."""
    try:
        counts = dict(line.split(": ") for line in _IO.read_text().splitlines())
    except OSError:
        return 0, 0
    return int(counts["rchar"]), int(counts["wchar"])


def refuse(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    del answer, reader
    session.authorize(Action.SERVER_DESCRIBE)
    raise Refused(errors.UNAVAILABLE)
