"""PING, clients, cluster metadata and statistics.

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
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from polywire.broker.permissions import Action
from polywire.build_info import VERSION
from polywire.errors import BrokerError
from polywire.protocols.iggy import errors
from polywire.protocols.iggy.context import Client, GroupNumbers, Shared
from polywire.protocols.iggy.dialect import Dialect
from polywire.protocols.iggy.histories import REPLICA
from polywire.protocols.iggy.messages import U32, Reader, Refused, str32_bytes
from polywire.protocols.iggy.reply_slots import Answer
from polywire.protocols.iggy.session import IggySession
from polywire.protocols.iggy.topics import bytes_of, messages_of

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


def client_bytes(client: Client, dialect: Dialect, groups: int) -> bytes:
    """Encode a client as an element of a list. ``groups`` is the number of groups that it is a member of."""
    user = b""
    if dialect.has_login:
        known = client.principal is not None
        none = 0 if dialect.one_based else NO_USER
        user = U32.pack(client.principal.user_id + dialect.base if client.principal is not None and known else none)
    head = U32.pack(client.client_id) + user + bytes((TCP,)) + str32_bytes(client.peer)
    return head + U32.pack(groups)


def _describe(answer: Answer, client: Client, dialect: Dialect) -> None:
    def described(groups: list[GroupNumbers] | BrokerError) -> None:
        if isinstance(groups, BrokerError):
            answer.refuse(groups)
            return
        numbers = b"".join(U32.pack(number + dialect.base) for group in groups for number in group)
        answer.ok(client_bytes(client, dialect, len(groups)) + numbers)

    client.describe_memberships(described)


def get_me(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    _describe(answer, session, reader.dialect)


def get_client(session: IggySession, answer: Answer, reader: Reader, /) -> bytes | None:
    number = reader.u32()
    if number == 0 or reader.left:
        raise Refused(errors.BAD_CLIENT_ID if number == 0 else errors.UNKNOWN_COMMAND)
    session.authorize(Action.SERVER_DESCRIBE)
    client = session.shared.clients.get(number)
    if client is None:
        if reader.dialect.empty_when_missing:
            return b""
        raise Refused(errors.NO_SUCH_CLIENT)
    _describe(answer, client, reader.dialect)
    return None


def get_clients(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    session.authorize(Action.SERVER_DESCRIBE)
    clients = sorted(session.shared.clients.items())
    answer.make(client_bytes(client, reader.dialect, client.member_count) for _, client in clients)


# The process


def get_cluster(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    """Handle GET_CLUSTER_METADATA: list only this node, so that clients connect to no other."""
    del answer
    if reader.dialect.one_based:
        raise Refused(errors.UNKNOWN_COMMAND)
    host, port = session.local
    replica = bytes((REPLICA,)) if reader.dialect.contexts else b""
    node = replica + str32_bytes("node-0") + str32_bytes(host) + port.to_bytes(2, "little") + bytes(6) + bytes(2)
    return str32_bytes(CLUSTER_NAME) + U32.pack(1) + node


def get_stats(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    session.authorize(Action.SERVER_DESCRIBE)
    answer.make(_stats(session, reader.dialect))


def _stats(session: IggySession, dialect: Dialect) -> Iterator[bytes]:
    """Yield the encoded totals.

    Empty bytes are yielded after each topic, so that other connections are served in between.
    """
    for totals in count_all(session.shared):
        yield b"" if totals is None else stats_bytes(session.shared, dialect, totals)


class Totals(NamedTuple):
    """Totals of the broker. Streams are counted by their names in the broker, ``spaces``."""

    spaces: frozenset[str]
    topics: int
    partitions: int
    size: int
    messages: int
    clients: int
    groups: int


def count_all(shared: Shared) -> Iterator[Totals | None]:
    """Count everything, and yield the totals at the end.

    None is yielded after each topic, so that other connections are served in between.
    """
    directory = shared.directory
    streams = directory.streams()
    topics, partitions, size, messages, groups = 0, 0, 0, 0, 0
    for topic in [topic for stream in streams for topic in directory.topics(stream)]:
        topics += 1
        partitions += len(topic.partitions)
        size += bytes_of(topic)
        messages += messages_of(topic)
        groups += len(directory.groups(topic))
        yield None
    spaces = frozenset(stream.kept.space for stream in streams if stream.by_number or directory.keeps_streams)
    yield Totals(spaces, topics, partitions, size, messages, len(shared.clients), groups)


def stats_bytes(shared: Shared, dialect: Dialect, totals: Totals) -> bytes:
    run_s = time.time() - shared.started_at
    cpu = _cpu_percent(run_s)
    body = _STATS.pack(os.getpid(), cpu)
    micros = 1 if dialect.topic_settings < 3 else 1_000_000
    if dialect.topic_settings >= 2:  # both fields were added at about the same time (spec: iggy#timeline)
        body += Struct("<f").pack(cpu)
    total, available = _memory()
    body += _STATS_REST.pack(
        _own_memory(),
        total,
        available,
        int(run_s * micros),
        int(shared.started_at * micros),
        *_bytes_moved(),
        totals.size,
        len(totals.spaces),
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
    """Return the number of files and sockets that this process has open; 0 if the system does not report it."""
    return len(os.listdir(_DESCRIPTORS)) if _DESCRIPTORS.exists() else 0


def _own_memory() -> int:
    """Return the resident bytes of this process; if the system does not report them, the highest so far."""
    page = os.sysconf("SC_PAGE_SIZE")
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * page
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory() -> tuple[int, int]:
    """Return the total and the available bytes of the machine's memory; 0 available if the system does not report them."""
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
