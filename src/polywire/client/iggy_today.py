"""The asynchronous client of the Iggy protocol that servers and SDKs use since August 2026. It requires a login.

* Each connection has one request in flight, because these servers require it.
* An idle connection sends pings.
* Records that the protocol does not support are rejected before anything is sent.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
import string
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, ParamSpec, TypeVar

from polywire.build_info import VERSION
from polywire.client.address import Login
from polywire.client.base import Ability, Membership, Produced, TopicInfo
from polywire.client.connection import PipelinedConnection, open_connection
from polywire.client.failures import cannot
from polywire.client.iggy import (
    ABILITIES,
    OPEN_TIMEOUT_S,
    REPLY_BYTES_MAX,
    BrokerConnection,
    IggyClient,
    checked_as,
    parts_of,
    split_name,
    topic_ident,
)
from polywire.client.iggy import failure_of as documented_failure_of
from polywire.errors import (
    BrokerError,
    Busy,
    Conflict,
    Denied,
    ErrorCode,
    Invalid,
    Missing,
    PeerError,
    Unavailable,
)
from polywire.protocols.iggy import client_codec, today_codec, vsr
from polywire.protocols.iggy.client_codec import Polled, TopicLimits, ident
from polywire.protocols.iggy.dialect import D3
from polywire.protocols.iggy.messages import U32, U64, Code
from polywire.protocols.iggy.today_codec import Reply
from polywire.records.columns import Record
from polywire.types import DEFAULT_PARTITION_COUNT, DEFAULT_STREAM, Assignor, Level, spell_address

_P = ParamSpec("_P")
_T = TypeVar("_T")

WIRE: Final = "Iggy"  # the protocol's name in error messages
PING_S: Final = 5.0  # servers remove a client after half a minute of silence
CLIENT_BYTES: Final = 16
TOKEN_LENGTH_MIN: Final = 40  # Polywire's tokens are 64 hexadecimal digits, Iggy's are base64 of at least 32 bytes
TOKEN_CHARACTERS: Final = frozenset(string.ascii_letters + string.digits + "+/-_=")
SECRET_BYTES: Final = 32  # random bytes in a login request since protocol 0.12
IDENTIFIER_BYTES: Final = 16  # random bytes in a request that changes something, since protocol 0.12
QUORUM: Final = b"\x01"  # the broker responds after the offset is stored

TODAYS_ABILITIES: Final = ABILITIES | {Ability.GENERATIONS}

HISTORY_GONE: Final = 87
# Status numbers whose meaning differs from the documented dialect.
_FAILURES: Final = {
    HISTORY_GONE: Missing(ErrorCode.PARTITION_MISSING, ""),
    57: Busy(ErrorCode.BUSY, ""),
    58: Busy(ErrorCode.BUSY, ""),
    3007: Missing(ErrorCode.PARTITION_MISSING, ""),
    5003: Missing(ErrorCode.GROUP_MISSING, ""),
    5004: Conflict(ErrorCode.GROUP_EXISTS, ""),
    5006: Missing(ErrorCode.MEMBER_MISSING, ""),
    5009: Conflict(ErrorCode.PARTITION_NOT_ASSIGNED, ""),
}
_EVICTIONS: Final = {
    vsr.EVICT_NO_LOGIN: Denied(ErrorCode.LOGIN_REQUIRED, "the broker requires a login"),
    vsr.EVICT_CREDENTIALS: Denied(ErrorCode.LOGIN_FAILED, "wrong name or password"),
    vsr.EVICT_TOKEN: Denied(ErrorCode.LOGIN_FAILED, "wrong name, password or token"),
    11: Denied(ErrorCode.LOGIN_FAILED, "the user is inactive"),
    vsr.EVICT_BUSY: Busy(ErrorCode.BUSY, "the broker is checking too many logins (retry)"),
    vsr.EVICT_VERSION: Invalid(ErrorCode.INVALID_REQUEST, "the broker speaks another version of Iggy's protocol"),
}


def may_be_token(secret: str) -> bool:
    """Return whether a secret has the form of an access token of Polywire or Iggy.

    Only such secrets are tried as a token, because servers count failed attempts.
    """
    return len(secret) >= TOKEN_LENGTH_MIN and TOKEN_CHARACTERS.issuperset(secret)


def failure_of(status: int) -> BrokerError:
    """Return the error for a status."""
    known = _FAILURES.get(status)
    return (
        documented_failure_of(status)
        if known is None
        else type(known)(known.code, f"the broker rejected the request {status=}")
    )


def eviction_of(reason: int) -> BrokerError:
    """Return the error for a connection that the broker has closed for this reason."""
    return _EVICTIONS.get(reason) or Unavailable(ErrorCode.STOPPING, f"the broker rejected the login {reason=}")


def _checked(make: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    return checked_as(failure_of, make, *args, **kwargs)


class _Dialect:
    """The version of the protocol that all connections of a client use.

    Attributes:
        window: lowest and highest version that the server supports; known once it has rejected a version.
    """

    __slots__ = ("dialect", "version", "window")

    def __init__(self) -> None:
        self.dialect = D3
        self.version = D3.protocols[0]
        self.window = (0, 0)


class _Connection(PipelinedConnection[Reply]):
    """A connection whose requests and replies have a header. Requests that change something are numbered."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.spoken = _Dialect()
        self._client: Final = secrets.token_bytes(CLIENT_BYTES)
        self._turn: Final = asyncio.Lock()
        self._epoch = 0
        self._number = 0
        self._request_count = 0  # requests so far, to notice an idle connection
        self._beat: asyncio.Task[None] | None = None

    def _end_of(self, data: bytearray, at: int) -> int:
        if len(data) - at < vsr.HEADER_BYTES:
            return 0
        size = int(U32.unpack_from(data, at + 48)[0])
        if not vsr.HEADER_BYTES <= size <= REPLY_BYTES_MAX:
            raise PeerError(f"invalid response bytes={size}", fatal=True)
        return at + size

    def _reply(self, data: bytearray, at: int, end: int) -> Reply:
        reply = _checked(today_codec.read_reply, memoryview(bytes(memoryview(data)[at:end])))
        if reply.is_eviction:
            self.spoken.window = reply.protocols
            raise eviction_of(reply.status)
        return reply

    def fail(self, error: BrokerError) -> None:
        """Close the connection. See ``Connection``."""
        super().fail(error)
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None

    async def log_in(self, spoken: _Dialect, *words: str) -> None:
        """Log in with a name and a password, or with a token.

        Raises Denied(LOGIN_FAILED), Busy, Invalid, Unavailable.
        """
        self.spoken = spoken
        secret = secrets.token_bytes(SECRET_BYTES) if spoken.dialect.contexts else b""
        body = _checked(today_codec.register, VERSION, *words, protocol=spoken.version, secret=secret)
        self._epoch = _checked(today_codec.read_epoch, await self._exchange(vsr.REGISTER, body))
        self._beat = asyncio.ensure_future(self._live())

    async def ask(self, code: Code, body: bytes = b"", *, incarnation: int = 0) -> bytes:
        """Send one request, and return the payload of its reply. Raises BrokerError.

        ``incarnation`` is the incarnation number of the partition that the request is about; 0 if there is none.
        """
        return await self._exchange(today_codec.operation_of(code), body, code=code, incarnation=incarnation)

    async def _exchange(self, operation: int, body: bytes, *, code: int = 0, incarnation: int = 0) -> bytes:
        is_today = self.spoken.dialect.contexts
        is_change = operation != vsr.PLAIN and operation < vsr.SEND
        async with self._turn:
            self._request_count += 1
            self._number += operation != vsr.REGISTER and (is_today or operation != vsr.PLAIN)
            frame = today_codec.request(
                operation,
                body,
                client=self._client,
                epoch=self._epoch,
                number=max(self._number, operation != vsr.REGISTER),
                code=code if operation == vsr.PLAIN else 0,
                identifier=secrets.token_bytes(IDENTIFIER_BYTES) if is_today and is_change else b"",
                incarnation=incarnation,
            )
            [reply] = await self.exchange(frame, 1)
        return _checked(today_codec.result_of, reply)

    async def _live(self) -> None:
        """Send pings while the connection is idle, until it is closed."""
        with suppress(BrokerError):
            while True:
                count = self._request_count
                await asyncio.sleep(PING_S)
                if count == self._request_count:
                    await self.ask(Code.PING)


class _Dialer:
    """Opens connections and logs in. All connections use the same version of the protocol."""

    __slots__ = ("_host", "_port", "_spoken", "_timeout_s", "_tls")

    def __init__(self, host: str, port: int, timeout_s: float, tls: ssl.SSLContext | None) -> None:
        self._host: Final = host
        self._port: Final = port
        self._timeout_s: Final = timeout_s
        self._tls: Final = tls
        self._spoken: Final = _Dialect()

    async def log_in(self, *words: str) -> _Connection:
        """Open a connection and log in, with another protocol version if the server requires one. Raises BrokerError."""
        try:
            return await self._log_in(*words)
        except Invalid:
            lowest, highest = self._spoken.window
            other = today_codec.protocol_within(lowest, highest)
            if other is None or lowest <= self._spoken.version <= highest:
                raise
            self._spoken.dialect, self._spoken.version = other
        return await self._log_in(*words)

    async def _log_in(self, *words: str) -> _Connection:
        host, port, timeout_s = self._host, self._port, self._timeout_s
        connection = await open_connection(_Connection, host, port, timeout_s=timeout_s, tls=self._tls)
        try:
            async with asyncio.timeout(timeout_s):
                await connection.log_in(self._spoken, *words)
        except TimeoutError:
            address = spell_address(host, port)
            error = Unavailable(ErrorCode.UNREACHABLE, f"the server does not respond to the login address={address}")
            connection.fail(error)
            raise error from None
        except BrokerError as error:
            connection.fail(error)
            raise
        except asyncio.CancelledError:
            connection.fail(Unavailable(ErrorCode.STOPPING, "the login was cancelled"))
            raise
        return connection


class IggyTodayClient(IggyClient):
    """A client of today's version of the protocol. It implements ``WireClient`` as far as that supports it.

    Create one with ``open``.

    The part of a topic's full name before the first dot is the stream. Without a dot, the stream is ``default``. A
    record's key chooses the partition and is not stored. Records without a key are distributed round-robin. Each member
    of a group uses its own connection.
    """

    __slots__ = ("_histories", "_spoken")

    def __init__(self, connection: BrokerConnection, another: Callable[[], Awaitable[BrokerConnection]]) -> None:
        """``connection`` is used for requests. ``another`` opens further connections to the same broker."""
        super().__init__(connection, another)
        self._spoken: Final = connection.spoken if isinstance(connection, _Connection) else _Dialect()
        self._histories: Final[dict[tuple[str, int], int]] = {}

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        *,
        timeout_s: float = OPEN_TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
        login: Login | None = None,
    ) -> IggyTodayClient:
        """Connect and log in.

        Args:
            host: name or address of the broker.
            port: port of its Iggy listener.
            timeout_s: time limit for this and each further connection, in seconds.
            tls: how to verify the broker (``client.address.client_context``); None connects without TLS.
            login: the user, with a password or an access token; None uses ``iggy`` with the password ``iggy``.

        Raises:
            Unavailable: the broker is not reachable.
            Denied: LOGIN_FAILED.
            Busy: the broker is checking too many logins; retry later.
            Invalid: INVALID_REQUEST: the broker speaks another version.
        """
        login = login or Login("iggy", "iggy")
        door = _Dialer(host, port, timeout_s, tls)

        ways: list[tuple[str, ...]] = [(login.name, login.password)]
        if may_be_token(login.password):
            ways.insert(0, (login.password,))

        async def another() -> _Connection:
            for way in tuple(ways[:-1]):
                try:
                    return await door.log_in(*way)
                except Denied as error:
                    if error.code is not ErrorCode.LOGIN_FAILED:
                        raise
                    if way in ways:
                        ways.remove(way)
            return await door.log_in(*ways[-1])

        return cls(await another(), another)

    @property
    def abilities(self) -> frozenset[Ability]:
        """The features of today's Iggy protocol."""
        return TODAYS_ABILITIES

    # Topics

    async def create_topic(self, topic: str, partition_count: int) -> None:
        """Create a topic, and its stream if it is missing."""
        stream, short = split_name(topic)
        body = _checked(ident, stream) + U32.pack(partition_count) + _checked(client_codec.name, short)
        try:
            await self._connection.ask(Code.CREATE_TOPIC, body)
        except Missing:
            with suppress(Conflict):  # another client created it
                await self._connection.ask(Code.CREATE_STREAM, client_codec.name(stream))
            await self._connection.ask(Code.CREATE_TOPIC, body)
        self._partitions.pop(topic, None)

    async def topics(self) -> list[TopicInfo]:
        """Return the topics of all streams, in order of their full names. ``id`` is empty."""
        found: list[TopicInfo] = []
        for number, stream in _checked(
            today_codec.read_streams, await self._connection.ask(Code.GET_STREAMS), self._spoken.dialect
        ):
            payload = await self._connection.ask(Code.GET_TOPICS, ident(number))
            prefix = "" if stream == DEFAULT_STREAM else f"{stream}."
            found += [
                TopicInfo(prefix + name, b"", count)
                for name, count in _checked(today_codec.read_topics, payload, self._spoken.dialect)
            ]
        return sorted(found, key=lambda info: info.name)

    async def topic_options(self, topic: str) -> TopicLimits:
        """Return the limits of a topic, and its other options. Raises Missing(TOPIC_MISSING)."""
        payload = await self._connection.ask(Code.GET_TOPIC, topic_ident(topic))
        if not payload:
            raise Missing(ErrorCode.TOPIC_MISSING, f"no such topic topic={topic!r}")
        return _checked(today_codec.read_limits, payload, self._spoken.dialect)

    async def _partition_count(self, topic: str) -> int:
        known = self._partitions.get(topic)
        if not known:
            known = await self._fetch_partition_count(topic)
        if not known:
            with suppress(Conflict):  # another client created it
                await self.create_topic(topic, DEFAULT_PARTITION_COUNT)
            known = await self._fetch_partition_count(topic)
        if not known:
            raise Missing(ErrorCode.PARTITION_MISSING, f"topic has no partitions name={topic!r}")
        self._partitions[topic] = known
        return known

    async def _fetch_partition_count(self, topic: str) -> int:
        try:
            payload = await self._connection.ask(Code.GET_TOPIC, topic_ident(topic))
            return _checked(today_codec.read_topic, payload, self._spoken.dialect)
        except Missing:  # the stream is missing
            return 0

    # Records

    async def produce(
        self, topic: str, records: Sequence[Record], *, partition: int | None = None, level: Level = Level.WRITTEN
    ) -> list[Produced]:
        """Append records, and return their offsets. See ``WireClient``.

        A missing topic is created with the default number of partitions.

        The offset is -1 if the server does not report it. Raises Invalid(INVALID_REQUEST) for ``Level.SYNCED``, null
        and empty values, times of origin and events, which the protocol does not support.
        """
        if level is Level.SYNCED:
            raise cannot(WIRE, "ask for synced records")
        if any(record.origin_time_us is not None or record.event is not None for record in records):
            raise cannot(WIRE, "send times of origin or events")
        count = await self._partition_count(topic)
        bodies: list[tuple[int, int, bytes]] = []
        for part in parts_of(records):
            chosen = self._choose_partition(part[0], count) if partition is None else partition
            names_partition = partition is not None or self._spoken.dialect.contexts
            key = None if names_partition else part[0].key
            where = _checked(client_codec.by_key, key) if key else client_codec.to_partition(chosen)
            now_us = time.time_ns() // 1000
            bodies.append((chosen, len(part), _checked(today_codec.send, topic_ident(topic), where, part, now_us)))
        produced: list[Produced] = []
        for chosen, size, body in bodies:
            payload = await self._ask_partition(self._connection, Code.SEND, body, topic, chosen)
            sent = _checked(today_codec.read_sent, payload)
            at, offset = sent or (chosen, -1)
            produced += [Produced(at, offset + number if sent else -1) for number in range(size)]
        return produced

    async def _poll(self, topic: str, partition: int, kind: int, value: int, count: int) -> Polled:
        at = today_codec.place(group=False, who=ident(1), topic=topic_ident(topic), partition=partition)
        body = today_codec.poll(at, kind, value, count)
        payload = await self._ask_partition(self._connection, Code.POLL, body, topic, partition)
        return _checked(today_codec.read_polled, payload, self._spoken.dialect)

    async def _ask_partition(
        self, connection: BrokerConnection, code: Code, body: bytes, topic: str, partition: int
    ) -> bytes:
        """Send a request about a partition.

        Since protocol 0.12, it contains the partition's incarnation number, which is cached. If that has changed, the
        request is repeated with the new one. Raises BrokerError.
        """
        if not self._spoken.dialect.contexts or not isinstance(connection, _Connection):
            return await connection.ask(code, body)
        key = topic, partition
        known = self._histories.get(key)
        if known is not None:
            try:
                return await connection.ask(code, body, incarnation=known)
            except Missing as error:
                if error.code is not ErrorCode.PARTITION_MISSING:
                    raise
                del self._histories[key]
        route = await connection.ask(Code.GET_ROUTE, topic_ident(topic) + U32.pack(partition))
        self._histories[key] = _checked(today_codec.read_route, route)
        return await connection.ask(code, body, incarnation=self._histories[key])

    # Groups

    async def join(self, group: str, topic: str, member: str, *, assignor: Assignor | None = None) -> Membership:
        """Join a group over its own connection. See ``WireClient``. A missing group or topic is created."""
        if assignor is Assignor.RANGE:
            raise cannot(WIRE, "choose an assignor")
        await self._partition_count(topic)
        body = topic_ident(topic) + _checked(ident, group)
        key = (group, topic, member)
        connection = self._members.get(key)
        if connection is None:
            connection = self._members[key] = await self._another()
        if not await connection.ask(Code.GET_GROUP, body):
            with suppress(Conflict):  # another client created it
                await connection.ask(Code.CREATE_GROUP, topic_ident(topic) + client_codec.name(group))
        await connection.ask(Code.JOIN_GROUP, body)
        return await self._assignment(connection, body)

    async def heartbeat(self, group: str, topic: str, member: str, generation: int) -> Membership:
        """Return the member's assignment. A member stays in the group until its connection is closed."""
        return await self._assignment(self._member(group, topic, member), topic_ident(topic) + _checked(ident, group))

    async def leave(self, group: str, topic: str, member: str, generation: int) -> None:
        """Leave a group, and close the member's connection. Raises Missing(MEMBER_MISSING)."""
        connection = self._member(group, topic, member)
        await connection.ask(Code.LEAVE_GROUP, topic_ident(topic) + _checked(ident, group))
        del self._members[group, topic, member]
        connection.fail(Unavailable(ErrorCode.STOPPING, "the member has left"))

    async def _assignment(self, connection: BrokerConnection, body: bytes) -> Membership:
        found = _checked(today_codec.read_assignment, await connection.ask(Code.SYNC_GROUP, body))
        if found is None:
            raise Missing(ErrorCode.MEMBER_MISSING, "this connection is not a member of the group")
        return Membership(*found)

    async def group_members(self, topic: str) -> dict[str, int]:
        """Return how many members each group of a topic has."""
        return _checked(today_codec.read_groups, await self._connection.ask(Code.GET_GROUPS, topic_ident(topic)))

    async def commit(
        self, group: str, topic: str, partition: int, offset: int, *, member: str = "", generation: int = -1
    ) -> None:
        """Commit the next offset to read.

        The protocol stores the last consumed offset, so offset 0 cannot be committed. An offset above the next one is
        rejected, too.
        """
        if offset < 1:
            raise cannot(WIRE, "store offset 0")
        at = self._position_key(group, topic, partition)
        connection = self._members.get((group, topic, member), self._connection)
        await self._ask_partition(connection, Code.STORE_OFFSET, at + U64.pack(offset - 1) + QUORUM, topic, partition)

    async def position(self, group: str, topic: str, partition: int) -> int | None:
        """Return a group's next offset to read, or None if it never committed one."""
        try:
            payload = await self._connection.ask(Code.GET_OFFSET, self._position_key(group, topic, partition))
        except Missing as error:
            if error.code is ErrorCode.GROUP_MISSING:
                return None
            raise
        return _checked(client_codec.read_offset, payload)[2] + 1 if payload else None

    @staticmethod
    def _position_key(group: str, topic: str, partition: int) -> bytes:
        return today_codec.place(group=True, who=_checked(ident, group), topic=topic_ident(topic), partition=partition)
