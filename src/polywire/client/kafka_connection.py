"""Connections to the brokers of a Kafka cluster: requests, logins, errors, and the leaders of topics.

* A request is sent to the last known leader of its topic. If that broker is no longer the leader, the client gets new
  metadata and sends the request to the new leader. A cluster of one broker needs only one connection.
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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
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
    from polywire.protocols.kafka.message_types import MetadataResponse, SaslAuthenticateResponse

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
REPLY_BYTES_MAX: Final = 256 * 1024 * 1024
_VERSIONS: Final = {
    Api.PRODUCE: 9,
    Api.FETCH: 12,
    Api.LIST_OFFSETS: 6,
    Api.METADATA: 10,
    Api.CREATE_TOPICS: 5,
    Api.DELETE_TOPICS: 4,
    Api.OFFSET_COMMIT: 9,
    Api.OFFSET_FETCH: 8,
    Api.DESCRIBE_GROUPS: 5,
    Api.LIST_GROUPS: 5,
    Api.SASL_HANDSHAKE: 1,
    Api.SASL_AUTHENTICATE: 2,
    Api.CONSUMER_GROUP_HEARTBEAT: 1,
    Api.CONSUMER_GROUP_DESCRIBE: 0,
}
TRIES_MAX: Final = 3  # attempts per request: the leader can change again while it is looked up
ELSEWHERE: Final = frozenset({WireError.NOT_LEADER_OR_FOLLOWER, WireError.LEADER_NOT_AVAILABLE})


def error_of(number: int, message: str | None = None) -> BrokerError:
    """Return the exception for an error code."""
    kind, code = _ERRORS.get(number, (Invalid, ErrorCode.INVALID_REQUEST))
    return kind(code, message or f"the broker rejected the request code={number}")


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
        version, number = _VERSIONS[api], next(self._numbers)
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


class Leaders:
    """Connections to the brokers that lead partitions: at most one per broker, besides the client's first connection."""

    __slots__ = ("_by_address", "_by_topic", "_dial", "_dialling", "_first")

    def __init__(self, first: BrokerConnection, dial: Callable[[str, int], Awaitable[BrokerConnection]]) -> None:
        """``first`` is the client's first connection. ``dial`` connects to another broker of the cluster."""
        self._first: Final = first
        self._dial: Final = dial
        self._dialling: Final = asyncio.Lock()
        self._by_address: Final[dict[tuple[str, int], BrokerConnection]] = {}
        self._by_topic: Final[dict[str, BrokerConnection]] = {}

    async def ask(self, topic: str, entries: Callable[[Any], Iterator[Any]], api: Api, /, **fields: Any) -> Any:
        """Send a request about one topic to its leader.

        If that has changed, look up the new leader and repeat the request.

        ``entries`` returns the parts of a response that have an error code. Raises BrokerError.
        """
        for _ in range(TRIES_MAX - 1):
            leader = self._by_topic.get(topic, self._first)
            try:
                answer = await leader.ask(api, **fields)
            except Unavailable:
                self._forget(leader)
                raise
            if not any(entry.error in ELSEWHERE for entry in entries(answer)):
                return answer
            await self._look(topic)
        return await self._by_topic.get(topic, self._first).ask(api, **fields)

    async def _look(self, topic: str) -> None:
        self._by_topic.pop(topic, None)
        topics = [schema.request(Api.METADATA).Topics(name=topic)]
        answer: MetadataResponse = await self._first.ask(Api.METADATA, topics=topics, may_create=False)
        partitions = answer.topics[0].partitions
        leader = partitions[0].leader_id if partitions else None
        for broker in answer.brokers:
            if broker.node_id == leader:
                self._by_topic[topic] = await self._connected(broker.host, broker.port)

    async def _connected(self, host: str, port: int) -> BrokerConnection:
        async with self._dialling:
            if (host, port) not in self._by_address:
                self._by_address[host, port] = await self._dial(host, port)
            return self._by_address[host, port]

    def _forget(self, lost: BrokerConnection) -> None:
        for topic in [topic for topic, connection in self._by_topic.items() if connection is lost]:
            del self._by_topic[topic]
        for address in [address for address, connection in self._by_address.items() if connection is lost]:
            del self._by_address[address]

    def fail(self, error: BrokerError) -> None:
        """Close all connections except the first."""
        for connection in self._by_address.values():
            connection.fail(error)
