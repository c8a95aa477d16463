"""Connections to the brokers of a Kafka cluster: requests, logins, errors, leaders of partitions, coordinators.

* A request is sent to the last known leader of its partition, or coordinator of its group; before that is known, to the
  first broker. If that broker no longer has this role, the client looks up the new broker and repeats the request
  there. A cluster of one broker needs only one connection and no lookups.
* Logins use PLAIN or SCRAM (spec: kafka#sasl; RFC 5802, RFC 7677). SCRAM does not send the password. The broker must
  prove that it stores a verifier of the password, or the client aborts the login. The number of iterations that a
  broker may ask for is limited.
* Error codes become exceptions of ``polywire.errors``. An unknown code becomes Invalid.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import ssl
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from ipaddress import ip_address
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Final

from polywire.client.address import Login
from polywire.client.connection import FramedConnection, open_connection
from polywire.client.failures import invalid_reply
from polywire.errors import (
    BrokerError,
    Busy,
    Conflict,
    Corrupt,
    Denied,
    ErrorCode,
    Invalid,
    Missing,
    NotOwner,
    PeerError,
    Unavailable,
)
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.messages import Api, WireError
from polywire.types import spell_address

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        FindCoordinatorResponse,
        MetadataResponse,
        SaslAuthenticateResponse,
    )

_ERRORS: Final[dict[int, tuple[type[BrokerError], ErrorCode]]] = {
    WireError.OFFSET_OUT_OF_RANGE: (Missing, ErrorCode.OFFSET_OUT_OF_RANGE),
    WireError.CORRUPT_MESSAGE: (Invalid, ErrorCode.INVALID_BATCH),
    WireError.UNKNOWN_TOPIC_OR_PARTITION: (Missing, ErrorCode.PARTITION_MISSING),
    WireError.LEADER_NOT_AVAILABLE: (Busy, ErrorCode.BUSY),
    WireError.NOT_LEADER_OR_FOLLOWER: (NotOwner, ErrorCode.NOT_OWNER),
    WireError.NOT_COORDINATOR: (NotOwner, ErrorCode.NOT_OWNER),
    WireError.REQUEST_TIMED_OUT: (Busy, ErrorCode.BUSY),
    WireError.MESSAGE_TOO_LARGE: (Invalid, ErrorCode.RECORD_TOO_LARGE),
    WireError.INVALID_TOPIC: (Invalid, ErrorCode.INVALID_TOPIC),
    WireError.TOPIC_AUTHORIZATION_FAILED: (Denied, ErrorCode.DENIED),
    WireError.ILLEGAL_SASL_STATE: (Denied, ErrorCode.LOGIN_REQUIRED),
    WireError.TOPIC_ALREADY_EXISTS: (Conflict, ErrorCode.TOPIC_EXISTS),
    WireError.INVALID_PARTITIONS: (Invalid, ErrorCode.INVALID_PARTITION_COUNT),
    WireError.KAFKA_STORAGE_ERROR: (Busy, ErrorCode.DISK_FULL),
    WireError.INVALID_RECORD: (Invalid, ErrorCode.INVALID_BATCH),
    WireError.THROTTLING_QUOTA_EXCEEDED: (Busy, ErrorCode.BUSY),
    WireError.COORDINATOR_LOAD_IN_PROGRESS: (Busy, ErrorCode.BUSY),
    WireError.COORDINATOR_NOT_AVAILABLE: (Busy, ErrorCode.BUSY),
    WireError.GROUP_MAX_SIZE_REACHED: (Busy, ErrorCode.BUSY),
    WireError.UNSTABLE_OFFSET_COMMIT: (Busy, ErrorCode.BUSY),
    WireError.INVALID_GROUP_ID: (Invalid, ErrorCode.INVALID_NAME),
    WireError.GROUP_AUTHORIZATION_FAILED: (Denied, ErrorCode.DENIED),
    WireError.GROUP_ID_NOT_FOUND: (Missing, ErrorCode.GROUP_MISSING),
    WireError.UNKNOWN_MEMBER_ID: (Missing, ErrorCode.MEMBER_MISSING),
    WireError.FENCED_MEMBER_EPOCH: (Conflict, ErrorCode.GENERATION_STALE),
    WireError.STALE_MEMBER_EPOCH: (Conflict, ErrorCode.GENERATION_STALE),
    WireError.ILLEGAL_GENERATION: (Conflict, ErrorCode.GENERATION_STALE),
    WireError.REBALANCE_IN_PROGRESS: (Conflict, ErrorCode.GENERATION_STALE),
    WireError.INCONSISTENT_GROUP_PROTOCOL: (Conflict, ErrorCode.GROUP_PROTOCOL_MISMATCH),
    WireError.INVALID_RECORD_STATE: (Conflict, ErrorCode.RECORD_NOT_ACQUIRED),
    WireError.SHARE_SESSION_NOT_FOUND: (Unavailable, ErrorCode.UNREACHABLE),
    WireError.INVALID_SHARE_SESSION_EPOCH: (Unavailable, ErrorCode.UNREACHABLE),
    WireError.SHARE_SESSION_LIMIT_REACHED: (Busy, ErrorCode.BUSY),
    WireError.SASL_AUTHENTICATION_FAILED: (Denied, ErrorCode.LOGIN_FAILED),
    WireError.UNSUPPORTED_SASL_MECHANISM: (Denied, ErrorCode.LOGIN_FAILED),
    WireError.CLUSTER_AUTHORIZATION_FAILED: (Denied, ErrorCode.DENIED),
    WireError.UNKNOWN_SERVER_ERROR: (Corrupt, ErrorCode.CORRUPT),
}
PLAIN: Final = "PLAIN"
HASHES: Final[Mapping[str, str]] = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
MECHANISMS: Final = (PLAIN, *HASHES)
NONCE_BYTES: Final = 24
# at least the minimum of RFC 7677; the maximum takes less than a second
ITERATIONS_RANGE: Final = range(4096, 1_000_001)
_HEADER: Final = "n,,"
Ask = Callable[..., Awaitable[Any]]
REPLY_BYTES_MAX: Final = 64 * 1024 * 1024  # no larger batch could be stored here
VERSIONS: Final = {
    Api.PRODUCE: 9,
    Api.FETCH: 12,
    Api.LIST_OFFSETS: 6,
    Api.METADATA: 10,
    Api.CREATE_TOPICS: 5,
    Api.DELETE_TOPICS: 4,
    Api.OFFSET_COMMIT: 9,
    Api.OFFSET_FETCH: 8,
    Api.FIND_COORDINATOR: 3,
    Api.DESCRIBE_GROUPS: 5,
    Api.INIT_PRODUCER_ID: 4,
    Api.LIST_GROUPS: 5,
    Api.API_VERSIONS: 2,
    Api.INCREMENTAL_ALTER_CONFIGS: 1,
    Api.SHARE_GROUP_HEARTBEAT: 1,
    Api.SHARE_FETCH: 2,
    Api.SHARE_ACKNOWLEDGE: 2,
    Api.SASL_HANDSHAKE: 1,
    Api.SASL_AUTHENTICATE: 2,
    Api.CONSUMER_GROUP_HEARTBEAT: 1,
    Api.CONSUMER_GROUP_DESCRIBE: 0,
    Api.DESCRIBE_CONFIGS: 4,
    Api.DESCRIBE_ACLS: 2,
    Api.DESCRIBE_USER_SCRAM_CREDENTIALS: 0,
}
# attempts per request: the leader or coordinator can change again while it is looked up
TRIES_MAX: Final = 3
ELSEWHERE: Final = frozenset(
    {WireError.NOT_LEADER_OR_FOLLOWER, WireError.LEADER_NOT_AVAILABLE, WireError.NOT_COORDINATOR}
)
NO_COORDINATOR: Final = frozenset({WireError.COORDINATOR_NOT_AVAILABLE, WireError.COORDINATOR_LOAD_IN_PROGRESS})
GROUP_KEY: Final = 0  # the type of group names in FindCoordinator
BROKERS_AGE_S: Final = 300.0  # how long a list of brokers is used; the default of Kafka's clients for metadata

LOADS_MAX: Final = 50  # requests while a coordinator loads its groups after a restart, which takes some seconds
LOAD_PAUSE_S: Final = 0.2

Address = tuple[str, int]
Name = str | tuple[str, int]
"""A group, or a topic and the number of a partition."""
Entries = Callable[[Any], Iterable[Any]]
"""Return the parts of a response that have an error code."""


def error_of(number: int, message: str | None = None) -> BrokerError:
    """Return the exception for an error code."""
    kind, code = _ERRORS.get(number, (Invalid, ErrorCode.INVALID_REQUEST))
    return kind(code, message or f"the broker rejected the request code={number}")


def alone(answer: Any) -> Iterable[Any]:
    """Return the entries of a response that is its only entry."""
    return (answer,)


def check(entry: Any, *, missing: ErrorCode = ErrorCode.PARTITION_MISSING) -> None:
    """Raise the exception for the error code in an entry of a response, unless the code is 0."""
    if entry.error == WireError.UNKNOWN_TOPIC_OR_PARTITION:
        raise Missing(missing, "no such topic or partition")
    if entry.error:
        raise error_of(entry.error, getattr(entry, "message", None))


def mechanism_for(host: str, *, is_secret: bool) -> str:
    """Return the default mechanism: PLAIN if the connection is encrypted or stays on this machine, else SCRAM-SHA-512."""
    return PLAIN if is_secret or _is_this_machine(host) else "SCRAM-SHA-512"


def _is_this_machine(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def log_in(ask: Ask, login: Login, mechanism: str) -> None:
    """Log in. Raises Denied(LOGIN_FAILED), and Invalid(INVALID_REQUEST) for an unknown mechanism."""
    if mechanism not in MECHANISMS:
        raise Invalid(
            ErrorCode.INVALID_REQUEST, f"unknown mechanism mechanism={mechanism} known={','.join(MECHANISMS)}"
        )
    check(await ask(Api.SASL_HANDSHAKE, mechanism=mechanism))
    if mechanism == PLAIN:
        await _say(ask, f"\0{login.name}\0{login.password}")
        return
    proof = ScramProof(login, HASHES[mechanism])
    challenge = await _say(ask, proof.first)
    final = await asyncio.to_thread(proof.final, challenge)
    proof.verify(await _say(ask, final))


async def _say(ask: Ask, text: str) -> str:
    answer: SaslAuthenticateResponse = await ask(Api.SASL_AUTHENTICATE, auth_bytes=text.encode())
    check(answer)
    return bytes(answer.auth_bytes).decode("utf-8", "replace")


class ScramProof:
    """The client side of one SCRAM exchange. Call ``first``, ``final`` and ``verify`` in this order."""

    __slots__ = ("_bare", "_digest", "_nonce", "_password", "_signature", "first")

    def __init__(self, login: Login, digest: str, nonce: str | None = None) -> None:
        self._digest: Final = digest
        self._password: Final = login.password
        self._nonce: Final = nonce or secrets.token_urlsafe(NONCE_BYTES)
        name = login.name.replace("=", "=3D").replace(",", "=2C")
        self._bare: Final = f"n={name},r={self._nonce}"
        self._signature = b""
        self.first: Final = _HEADER + self._bare

    def final(self, challenge: str) -> str:
        """Return the response to the broker's challenge. It takes some milliseconds to compute.

        Raises Denied(LOGIN_FAILED) for an invalid challenge.
        """
        nonce, salt, iterations = _read_challenge(challenge)
        if not nonce.startswith(self._nonce) or nonce == self._nonce or iterations not in ITERATIONS_RANGE:
            raise _untrusted()
        salted = hashlib.pbkdf2_hmac(self._digest, self._password.encode(), salt, iterations)
        client_key = hmac.digest(salted, b"Client Key", self._digest)
        without_proof = f"c={b64encode(_HEADER.encode()).decode()},r={nonce}"
        messages = f"{self._bare},{challenge},{without_proof}".encode()
        stored_key = hashlib.new(self._digest, client_key).digest()
        mask = hmac.digest(stored_key, messages, self._digest)
        proof = bytes(a ^ b for a, b in zip(client_key, mask, strict=True))
        self._signature = hmac.digest(hmac.digest(salted, b"Server Key", self._digest), messages, self._digest)
        return f"{without_proof},p={b64encode(proof).decode()}"

    def verify(self, last: str) -> None:
        """Check the broker's proof that it stores a verifier of the password. Raises Denied(LOGIN_FAILED)."""
        signature, *extensions = last.split(",")
        said = signature.removeprefix("v=").encode()
        if (
            _is_mandatory(extensions)
            or not self._signature
            or not hmac.compare_digest(said, b64encode(self._signature))
        ):
            raise _untrusted()


def _read_challenge(challenge: str) -> tuple[str, bytes, int]:
    """Return nonce, salt and number of iterations. Raises Denied(LOGIN_FAILED)."""
    try:
        nonce, salt, iterations, *extensions = challenge.split(",")
        if (nonce[:2], salt[:2], iterations[:2]) != ("r=", "s=", "i=") or _is_mandatory(extensions):
            raise ValueError
        return nonce[2:], b64decode(salt[2:], validate=True), int(iterations[2:])
    except ValueError:
        raise _untrusted() from None


def _is_mandatory(extensions: Sequence[str]) -> bool:
    """Return whether an extension is mandatory. This client supports none (RFC 5802, section 5.1)."""
    return any(extension.startswith("m=") for extension in extensions)


def _untrusted() -> Denied:
    """Return the error for a broker whose SCRAM messages are invalid."""
    return Denied(ErrorCode.LOGIN_FAILED, "the broker's SCRAM proof is wrong: it does not know the user's password")


class BrokerConnection(FramedConnection):
    """A connection to a Kafka broker. Responses arrive in the order of the requests."""

    BODY_BYTES_MIN: ClassVar[int] = 4
    BODY_BYTES_MAX: ClassVar[int] = REPLY_BYTES_MAX
    CLOSE_ADVICE: ClassVar[str] = "whether it requires a login (kafka://name:password@host:port),"

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._numbers = count(1)

    async def ask(self, api: Api, /, **fields: Any) -> Any:
        """Send one request, and return the body of its response.

        Raises Unavailable, and Invalid for text that cannot be encoded.
        """
        version, number = VERSIONS[api], next(self._numbers)
        try:
            request = encode_request(api, version, number, schema.request(api)(**fields), client_id="polywire")
        except UnicodeEncodeError:
            raise Invalid(ErrorCode.INVALID_TOPIC, "Kafka does not support this name") from None
        had_reply = self._has_reply
        (frame,) = await self.exchange(request, 1)
        try:
            return decode_response(api, version, frame)[1]
        except PeerError as error:
            raise invalid_reply(error, self._address, is_later=had_reply) from None


async def connect(
    host: str, port: int, timeout_s: float, tls: ssl.SSLContext | None, login: Login | None, mechanism: str | None
) -> BrokerConnection:
    """Connect to one broker and log in. Raises Unavailable, Denied(LOGIN_FAILED)."""
    connection = await open_connection(BrokerConnection, host, port, timeout_s=timeout_s, tls=tls)
    if login is not None:
        mechanism = mechanism or mechanism_for(host, is_secret=tls is not None)
        try:
            async with asyncio.timeout(timeout_s):
                await log_in(connection.ask, login, mechanism)
        except TimeoutError:
            connection.fail(Unavailable(ErrorCode.UNREACHABLE, "the login took too long"))
            raise Unavailable(
                ErrorCode.UNREACHABLE, f"the server does not respond to the login address={spell_address(host, port)}"
            ) from None
        except (BrokerError, asyncio.CancelledError):
            connection.fail(Unavailable(ErrorCode.STOPPING, "the login was rejected or cancelled"))
            raise
    return connection


class Role(Enum):
    """Why a request must be sent to one certain broker."""

    LEADER = auto()  # of a partition
    COORDINATOR = auto()  # of a group


class Cluster:
    """Connections to the brokers of a cluster: at most one per broker, besides the client's first connection."""

    __slots__ = ("_brokers", "_brokers_until", "_by_address", "_dial", "_dialling", "_first", "_routes")

    def __init__(self, first: BrokerConnection, dial: Callable[[str, int], Awaitable[BrokerConnection]]) -> None:
        """``first`` is the client's first connection. ``dial`` connects to another broker of the cluster."""
        self._first: Final = first
        self._dial: Final = dial
        self._dialling: Final = asyncio.Lock()
        self._by_address: Final[dict[Address, BrokerConnection]] = {}
        self._routes: Final[dict[tuple[Role, Name], BrokerConnection]] = {}
        self._brokers: Sequence[Address] = ()
        self._brokers_until = 0.0

    async def ask_leader(self, topic: str, partition: int, entries: Entries, api: Api, /, **fields: Any) -> Any:
        """Send a request about one partition to its leader. Raises BrokerError."""
        return await self._ask(Role.LEADER, (topic, partition), entries, api, fields)

    async def ask_leaders(
        self, topic: str, partitions: Iterable[int], entries: Entries, api: Api, fields: Callable[[list[int]], Any], /
    ) -> list[Any]:
        """Send requests about partitions to their leaders. Return the entries of all responses. Raises BrokerError.

        ``fields`` returns the fields of the request about these partitions. Entries have an ``index``.
        """
        found, left = [], list(partitions)
        for attempt in range(TRIES_MAX):
            by_connection: dict[BrokerConnection, list[int]] = {}
            for number in left:
                by_connection.setdefault(self._route(Role.LEADER, (topic, number)), []).append(number)
            answers = [await self.ask_over(one, api, fields(numbers)) for one, numbers in by_connection.items()]
            reported = [entry for answer in answers for entry in entries(answer)]
            is_last = attempt == TRIES_MAX - 1
            found += [entry for entry in reported if is_last or entry.error not in ELSEWHERE]
            left = [] if is_last else [entry.index for entry in reported if entry.error in ELSEWHERE]
            if not left:
                break
            await self._look_for_leaders(topic, left)
        return found

    async def leaders(self, topic: str, partitions: Iterable[int]) -> dict[int, BrokerConnection]:
        """Look up the leaders of these partitions, and return the connections to them.

        The connection of a partition without a leader is that to the first broker, which rejects requests about it.
        """
        numbers = list(partitions)
        if asyncio.get_running_loop().time() >= self._brokers_until:
            await self._metadata([])
        if len(self._brokers) > 1:
            await self._look_for_leaders(topic, numbers)
        return {number: self._route(Role.LEADER, (topic, number)) for number in numbers}

    async def ask_coordinator(self, group: str, entries: Entries, api: Api, /, **fields: Any) -> Any:
        """Send a request about one group to its coordinator. Raises BrokerError."""
        return await self._ask(Role.COORDINATOR, group, entries, api, fields)

    async def ask_all(self, api: Api, /, **fields: Any) -> list[Any]:
        """Send a request to every broker, and return all responses.

        Raises BrokerError if one of them does not respond. The list of brokers is at most ``BROKERS_AGE_S`` old.
        """
        if asyncio.get_running_loop().time() >= self._brokers_until:
            await self._metadata([])
        if len(self._brokers) <= 1:
            return [await self.ask_over(self._first, api, fields)]
        connections = [await self._connected(address) for address in self._brokers]
        return await asyncio.gather(*(self.ask_over(connection, api, fields) for connection in connections))

    async def _ask(self, role: Role, name: Name, entries: Entries, api: Api, fields: Mapping[str, Any]) -> Any:
        """Send a request to the broker that has this role for a partition or group.

        If that has changed, look up the new broker and repeat the request. A request whose connection was lost is not
        repeated, because its outcome is unknown.
        """
        tries = loads = 1
        while True:
            answer = await self.ask_over(self._route(role, name), api, fields)
            if loads < LOADS_MAX and any(entry.error in NO_COORDINATOR for entry in entries(answer)):
                loads += 1
                await asyncio.sleep(LOAD_PAUSE_S)
            elif tries < TRIES_MAX and any(entry.error in ELSEWHERE for entry in entries(answer)):
                tries += 1
                await self._look(role, name)
            else:
                return answer

    async def ask_over(self, connection: BrokerConnection, api: Api, fields: Mapping[str, Any]) -> Any:
        """Send a request to one broker."""
        try:
            return await connection.ask(api, **fields)
        except Unavailable:
            self._forget(connection)
            raise

    def _route(self, role: Role, name: Name) -> BrokerConnection:
        connection = self._routes.get((role, name), self._first)
        if connection is not self._first and connection.is_lost:
            self._forget(connection)
            return self._first
        return connection

    async def _look(self, role: Role, name: Name) -> None:
        if isinstance(name, tuple):
            await self._look_for_leaders(name[0], [name[1]])
            return
        self._routes.pop((role, name), None)
        address = await self._coordinator(name)
        if address is not None:
            self._routes[role, name] = await self._connected(address)

    async def _look_for_leaders(self, topic: str, partitions: Iterable[int]) -> None:
        """Find the leaders of these partitions, and those of others if there is a connection to them already."""
        answer = await self._metadata([schema.request(Api.METADATA).Topics(name=topic)])
        brokers = {broker.node_id: (broker.host, broker.port) for broker in answer.brokers}
        leaders = {partition.index: brokers.get(partition.leader_id) for partition in answer.topics[0].partitions}
        for number in partitions:
            self._routes.pop((Role.LEADER, (topic, number)), None)
            if (address := leaders.get(number)) is not None:
                self._routes[Role.LEADER, (topic, number)] = await self._connected(address)
        for number, address in leaders.items():
            if address is not None and (known := self._by_address.get(address)) is not None:
                self._routes[Role.LEADER, (topic, number)] = known

    async def _coordinator(self, group: str) -> Address | None:
        """Return the address of the group's coordinator, None if there is none at the moment. Raises Denied."""
        answer: FindCoordinatorResponse = await self._first.ask(Api.FIND_COORDINATOR, key=group, key_type=GROUP_KEY)
        if answer.error in NO_COORDINATOR:
            await asyncio.sleep(LOAD_PAUSE_S)
            return None
        check(answer)
        return answer.host, answer.port

    async def _metadata(self, topics: Sequence[Any]) -> MetadataResponse:
        answer: MetadataResponse = await self._first.ask(Api.METADATA, topics=topics, may_create=False)
        self._brokers = [(broker.host, broker.port) for broker in answer.brokers]
        self._brokers_until = asyncio.get_running_loop().time() + BROKERS_AGE_S
        return answer

    async def _connected(self, address: Address) -> BrokerConnection:
        async with self._dialling:
            connection = self._by_address.get(address)
            if connection is not None and connection.is_lost:
                self._forget(connection)
                connection = None
            if connection is None:
                connection = self._by_address[address] = await self._dial(*address)
            return connection

    def _forget(self, lost: BrokerConnection) -> None:
        """Drop a lost connection, and the list of brokers, which may have changed."""
        self._brokers_until = 0.0
        for route in [route for route, connection in self._routes.items() if connection is lost]:
            del self._routes[route]
        for address in [address for address, connection in self._by_address.items() if connection is lost]:
            del self._by_address[address]

    def fail(self, error: BrokerError) -> None:
        """Close all connections except the first."""
        for connection in self._by_address.values():
            connection.fail(error)
