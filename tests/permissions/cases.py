"""The cases: for every command of every protocol at least one valid request about the tenant's resources.

A command without a case fails the suite. The expected outcome of a case follows from its action alone.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from struct import pack
from typing import Final

from polywire.broker.permissions import Action, Resource
from polywire.http.api import Api
from polywire.http.endpoints import PREFIX, Endpoint
from polywire.http.errors import CATALOG
from polywire.protocols.cursus.factory import COMMANDS as CURSUS
from polywire.protocols.flux.factory import ADMIN_COMMANDS, DATA_COMMANDS
from polywire.protocols.iggy.factory import COMMANDS as IGGY
from polywire.protocols.iggy.messages import Code
from polywire.protocols.kafka.factory import COMMANDS as KAFKA_COMMANDS
from polywire.protocols.kafka07.factory import COMMANDS as KAFKA07
from polywire.protocols.kafka07.messages import (
    FetchEntry,
    RequestType,
    encode_fetch,
    encode_multifetch,
    encode_multiproduce,
    encode_offsets,
    encode_produce,
    encode_set,
)
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.factory import COMMANDS as POLYWIRE
from polywire.protocols.polywire.messages import Head, Verb
from polywire.records.batch import from_spans
from tests.unit.http.site import request
from tests.unit.protocols.iggy.dialogue import headered
from tests.unit.protocols.kafka.requests import requests as kafka_requests

STREAM: Final = "shop"
TOPIC: Final = "shop.orders"
EVENTS: Final = "shop.events"
SECRET: Final = b"orders"
"""Only the tenant and administrators may ever read this."""


ENDPOINTS: Final = Api(None, None, None, None).table()  # type: ignore[arg-type]  # only its table is looked at
HTTP_PAGES: Final = {
    "/livez": Action.CONNECT,
    "/readyz": Action.CONNECT,
    "/metrics": Action.SERVER_DESCRIBE,
    "/": Action.SELF_DESCRIBE,
    "/static/{name}": Action.SELF_DESCRIBE,
    f"{PREFIX}/openapi.json": Action.SELF_DESCRIBE,
    f"{CATALOG}/v1/config": Action.SELF_DESCRIBE,
    f"{CATALOG}/v1/namespaces": Action.TOPIC_LIST,
    f"{CATALOG}/v1/namespaces/{{namespace}}": Action.TOPIC_LIST,
    f"{CATALOG}/v1/namespaces/{{namespace}}/tables": Action.TOPIC_LIST,
    f"{CATALOG}/v1/namespaces/{{namespace}}/tables/{{table}}": Action.FETCH,
}
"""HTTP responses besides the endpoints; the console and the description of the API need any login."""


class Player(Enum):
    """The role that runs a case."""

    NO_CALLER = "not logged in"
    OTHER = "another tenant"
    TENANT = "the tenant"
    ADMIN = "administrator"


class Outcome(Enum):
    """The result of a case. OWN: it was limited to the player's own resources, and revealed nothing of others."""

    YES = "yes"
    NO = "–"
    OWN = "own"


@dataclass(frozen=True, slots=True)
class Case:
    """One request: its command, action and resource, and its bytes."""

    wire: str
    command: str
    action: Action
    request: bytes | tuple[Verb, Head, bytes]


def expected(case: Case, player: Player) -> Outcome:
    """Return the outcome according to the table of permissions."""
    if case.action is Action.CONNECT or player is Player.ADMIN:
        return Outcome.YES
    if player is Player.NO_CALLER:
        return Outcome.NO
    match case.action.resource:
        case Resource.NOTHING:
            return Outcome.YES
        case Resource.ANY_STREAM | Resource.ANY_TOPIC:
            return Outcome.OWN
        case Resource.STREAM | Resource.TOPIC:
            return Outcome.YES if player is Player.TENANT else Outcome.NO
        case _:
            return Outcome.NO


def commands() -> Mapping[str, Mapping[str, tuple[Action, ...]]]:
    """Return every protocol's table of commands, by the names used in cases."""
    cursus = {name or "an envelope without a command": command.actions for name, command in CURSUS.items()}
    flux = {name: command.actions for name, command in ({**DATA_COMMANDS, **ADMIN_COMMANDS}).items()}
    http = {f"{one.method} {PREFIX}{one.path}": tuple(one.actions) for one in ENDPOINTS}
    return {
        "cursus": cursus | {"a batch": (Action.PRODUCE,)},
        "flux": flux,
        "http": http | {f"GET {path}": (action,) for path, action in HTTP_PAGES.items()},
        "iggy": {command.name.name: command.actions for command in IGGY.values()},
        "kafka": {api.name: command.actions for api, command in KAFKA_COMMANDS.items()},
        "kafka07": {kind.name: command.actions for kind, command in KAFKA07.items()},
        "polywire": {command.name.name: command.actions for command in POLYWIRE.values()},
    }


def cases() -> Iterator[Case]:
    """Return all cases."""
    yield from _polywire()
    yield from _cursus()
    yield from _flux()
    yield from _http()
    yield from _iggy()
    for api, action, frame in kafka_requests(TOPIC, "shop.made"):
        yield Case("kafka", api.name, action, frame)
    yield from _kafka07()


# HTTP


def _known(endpoint: Endpoint, body: bytes) -> bytes:
    """Return a body without the fields that the endpoint does not have, because it refuses them."""
    if not body or endpoint.method == "GET":
        return body
    return json.dumps({name: value for name, value in json.loads(body).items() if name in endpoint.fields}).encode()


def _http() -> Iterator[Case]:
    change = {"X-Polywire": "1", "Content-Type": "application/json"}
    bodies: Mapping[Action, bytes] = {
        Action.TOPIC_CREATE: b'{"partitions": 1}',
        Action.TOPIC_ALTER: b'{"table": "delta"}',
        Action.PRODUCE: b'{"value": "v", "partition": 0}',
        Action.QUERY: b'{"statement": "select 1"}',
        Action.OFFSET_COMMIT: b'{"to": "earliest"}',
        Action.USER_CREATE: b'{"password": "pass-word"}',
        Action.USER_ALTER: b'{"password": "pass-word", "active": true}',
    }
    words = {"redrive": b"{}", "resend": b'{"partition": 0, "offset": 0}'}
    paths = {
        f"{PREFIX}/quotas": b'{"user": "*", "requests": 1000000}',
        f"{PREFIX}/links/{{link}}": b'{"source": "kafka://old:9092", "topics": ["a"]}',
        f"{PREFIX}/links/{{link}}/paused": b'{"paused": true}',
        f"{PREFIX}/links/{{link}}/cut-over": b"{}",
        f"{PREFIX}/links/{{link}}/cut-over/cancel": b"{}",
        f"{PREFIX}/links/{{link}}/fall-back": b"{}",
        f"{PREFIX}/topics/{{topic}}/partitions": b'{"partitions": 9}',
        f"{PREFIX}/topics/{{topic}}/queues/{{group}}/settings": b'{"share.delivery.count.limit": 3}',
        f"{PREFIX}/topics/{{topic}}/queues/{{group}}/purge": b"{}",
    }
    names = {"{partition}": "0", "{group}": "g", "{link}": "old"}
    for one in ENDPOINTS:
        action = one.action
        made = {
            "{topic}": "shop.made" if action is Action.TOPIC_CREATE else TOPIC,
            "{user}": "anonymous"
            if action is Action.USER_DESCRIBE
            else "carol"
            if action is Action.USER_CREATE
            else "made",
            "{token}": "matrix" if action is Action.TOKEN_DELETE else "new",
        }
        path = one.path
        if "/queues/" in path:
            made["{group}"] = "workers"
        for name, value in (names | made).items():
            path = path.replace(name, value)
        headers = {} if one.method == "GET" else change
        body = (
            (
                paths.get(PREFIX + one.path, b"")
                if one.method == "POST" or (one.method, one.path) == ("DELETE", "/quotas")
                else b""
            )
            or words.get(one.path.rpartition("/")[2])
            or (b"" if one.path == "/sql/{query}" else bodies.get(action, b""))
        )
        sent = request(one.method, PREFIX + path, headers, _known(one, body))
        for needed in one.actions:
            yield Case("http", f"{one.method} {PREFIX}{one.path}", needed, sent)
    for path, action in HTTP_PAGES.items():
        yield Case(
            "http",
            f"GET {path}",
            action,
            request("GET", path.format(name="console.js", namespace="shop", table="orders")),
        )


# polywire


def _polywire() -> Iterator[Case]:
    token, batch = bytes(range(16)), bytes(from_spans(b"v", array("q", (0, -1, 0, 1))))
    m, a = messages, Action
    requests: list[tuple[Verb, Action, Head, bytes]] = [
        (Verb.PING, a.CONNECT, Head(), b""),
        (Verb.CANCEL, a.CONNECT, m.Cancel(99), b""),
        (Verb.LOGIN, a.CONNECT, m.LogIn("admin", "admin-token"), b""),
        (Verb.TOPICS, a.TOPIC_LIST, m.ListTopics(), b""),
        (Verb.CREATE_TOPIC, a.TOPIC_CREATE, m.CreateTopic("shop.made", 1), b""),
        (Verb.DESCRIBE, a.TOPIC_DESCRIBE, m.Describe(TOPIC), b""),
        (Verb.GROW_TOPIC, a.TOPIC_ALTER, m.GrowTopic(TOPIC, 3), b""),
        (Verb.CONFIGURE_TOPIC, a.TOPIC_ALTER, m.ConfigureTopic(TOPIC, {"compression": "lz4"}), b""),
        (Verb.LINK_TOPIC, a.TOPIC_LINK, m.LinkTopic(TOPIC, ""), b""),
        (Verb.PURGE_TOPIC, a.TOPIC_PURGE, m.PurgeTopic(TOPIC), b""),
        (Verb.DELETE_TOPIC, a.TOPIC_DELETE, m.DeleteTopic(TOPIC), b""),
        (Verb.BEGIN_PARTITION, a.TOPIC_CREATE, m.BeginPartition(TOPIC, 0, 0), b""),
        (Verb.BOUNDS, a.TOPIC_DESCRIBE, m.AskBounds([TOPIC]), b""),
        (Verb.FETCH, a.FETCH, m.Fetch(TOPIC, 0, 0), b""),
        (Verb.PRODUCE, a.PRODUCE, m.Produce(TOPIC, 0), batch),
        (Verb.PRODUCE, a.TOPIC_CREATE, m.Produce("shop.made", 0, create=True), batch),
        (Verb.STAGE, a.PRODUCE, m.Stage(token, TOPIC, 0), batch),
        (Verb.PUBLISH, a.STAGED_PUBLISH, m.Publish("w", 1, []), b""),
        (Verb.PUBLISH, a.PRODUCE, m.Publish("w", 1, [b"staged by tenant"]), b""),
        (Verb.PUBLISH, a.OFFSET_COMMIT, m.Publish("w", 1, [], [m.GroupOffsets(TOPIC, "g", "", -1, {0: 0})]), b""),
        (Verb.BEGIN_EPOCH, a.STAGED_PUBLISH, m.BeginEpoch("w"), b""),
        (Verb.ABANDON, a.STAGED_PUBLISH, m.Abandon([token]), b""),
        (Verb.ABANDON, a.PRODUCE, m.Abandon([b"staged by tenant"]), b""),
        (Verb.LOCATE, a.FETCH, m.Locate(TOPIC, 0, 0), b""),
        (Verb.COMMIT, a.OFFSET_COMMIT, m.Commit(TOPIC, 0, 1, "g", 0), b""),
        (Verb.COMMIT, a.POSITION_COMMIT, m.Commit(TOPIC, 0, 0, "c", 0), b""),
        (Verb.POSITION, a.OFFSET_FETCH, m.AskPosition(TOPIC, 0, 1, "g"), b""),
        (Verb.POSITION, a.POSITION_FETCH, m.AskPosition(TOPIC, 0, 0, "c"), b""),
        (Verb.JOIN, a.GROUP_JOIN, m.Join("g", TOPIC, "m"), b""),
        (Verb.SYNC, a.GROUP_JOIN, m.Member("g", TOPIC, "m", 1), b""),
        (Verb.HEARTBEAT, a.GROUP_JOIN, m.Member("g", TOPIC, "m", 1), b""),
        (Verb.LEAVE, a.GROUP_JOIN, m.Member("g", TOPIC, "m", 1), b""),
        (Verb.GROUPS, a.GROUP_LIST, m.AskGroups(), b""),
        (Verb.DELETE_GROUP, a.GROUP_DELETE, m.DeleteGroup("g", TOPIC), b""),
        (Verb.ACQUIRE, a.FETCH, m.Acquire("q", TOPIC, "m"), b""),
        (Verb.ACQUIRE, a.GROUP_JOIN, m.Acquire("q", TOPIC, "m"), b""),
        (Verb.ACKNOWLEDGE, a.FETCH, m.Acknowledge("q", TOPIC, "m", []), b""),
        (Verb.ACKNOWLEDGE, a.GROUP_JOIN, m.Acknowledge("q", TOPIC, "m", []), b""),
        (Verb.QUEUES, a.GROUP_LIST, m.AskQueues(), b""),
        (Verb.CONFIGURE_QUEUE, a.GROUP_CREATE, m.ConfigureQueue("q", TOPIC), b""),
        (Verb.RESET_QUEUE, a.OFFSET_COMMIT, m.ResetQueue("q", TOPIC), b""),
        (Verb.DELETE_QUEUE, a.GROUP_DELETE, m.DeleteQueue("q", TOPIC), b""),
        (Verb.TRANSACTIONS, a.TRANSACTION, m.ListEntries(), b""),
        (Verb.DELETE_TRANSACTION, a.TRANSACTION, m.DeleteEntry("T"), b""),
        (Verb.WRITERS, a.STAGED_PUBLISH, m.ListEntries(), b""),
        (Verb.DELETE_WRITER, a.STAGED_PUBLISH, m.DeleteEntry("w"), b""),
    ]
    for verb, action, head, payload in requests:
        yield Case("polywire", verb.name, action, (verb, head, payload))


# Cursus


def _cursus() -> Iterator[Case]:
    member = f"topic={TOPIC} group=g member=m generation=1"
    read = f"topic={TOPIC} partition=0 offset=0"
    event = f"topic={EVENTS} key=k"
    who = "transactional_id=T producerId=p epoch=0"
    a = Action
    texts: list[tuple[str, Action]] = [
        ("HELP", a.CONNECT),
        ("PROTOCOL_INFO", a.CONNECT),
        ("NEGOTIATE version=1", a.CONNECT),
        ("EXIT", a.CONNECT),
        ("AUTH principal=admin token=admin-token", a.CONNECT),
        ("LIST", a.TOPIC_LIST),
        (f"LIST topic={TOPIC}", a.TOPIC_DESCRIBE),
        ("CREATE topic=shop.made partitions=1", a.TOPIC_CREATE),
        (f"CREATE topic={TOPIC} partitions=3", a.TOPIC_ALTER),
        (f"DELETE topic={TOPIC}", a.TOPIC_DELETE),
        (f"DESCRIBE topic={TOPIC}", a.TOPIC_DESCRIBE),
        (f"METADATA topic={TOPIC}", a.TOPIC_DESCRIBE),
        (f"LIST_OFFSETS topic={TOPIC}", a.TOPIC_DESCRIBE),
        (f"PUBLISH topic={TOPIC} producerId=p message=x", a.PRODUCE),
        (f"CONSUME {read} member=m", a.FETCH),
        ("CONSUME topic=shop* partition=0 offset=0 member=m", a.TOPIC_LIST),
        (f"STREAM {read} group=g", a.FETCH),
        (f"APPEND_STREAM {event} version=1 message=x", a.PRODUCE),
        (f"SAVE_SNAPSHOT {event} version=1 message=x", a.PRODUCE),
        (f"STREAM_VERSION {event}", a.FETCH),
        (f"READ_STREAM {event}", a.FETCH),
        (f"READ_SNAPSHOT {event}", a.FETCH),
        (f"JOIN_GROUP topic={TOPIC} group=g member=m", a.GROUP_JOIN),
        (f"SYNC_GROUP {member}", a.GROUP_JOIN),
        (f"HEARTBEAT {member}", a.GROUP_JOIN),
        (f"LEAVE_GROUP {member}", a.GROUP_JOIN),
        (f"COMMIT topic={TOPIC} group=g partition=0 offset=0", a.OFFSET_COMMIT),
        (f"COMMIT_OFFSET {member} partition=0 offset=0", a.OFFSET_COMMIT),
        (f"BATCH_COMMIT {member} P0:0", a.OFFSET_COMMIT),
        (f"FETCH_OFFSET topic={TOPIC} group=g partition=0", a.OFFSET_FETCH),
        ("FIND_COORDINATOR group=g", a.GROUP_LIST),
        ("SETGROUP group=g", a.GROUP_LIST),
        ("GROUP_STATUS group=g", a.GROUP_LIST),
        ("LIST_GROUPS", a.GROUP_LIST),
        (f"REGISTER_GROUP topic={TOPIC} group=g", a.GROUP_CREATE),
        (f"SUBSCRIBE topic={TOPIC} group=g", a.GROUP_CREATE),
        ("INIT_PRODUCER_ID transactional_id=T", a.TRANSACTION),
        (f"BEGIN_TXN {who}", a.TRANSACTION),
        (f"TXN_PUBLISH {who} topic={TOPIC} partition=0 seqNum=1 message=x", a.PRODUCE),
        (f"SEND_OFFSETS_TO_TXN {who} {member} P0:0", a.OFFSET_COMMIT),
        (f"END_TXN {who} result=abort", a.TRANSACTION),
        ("TXN_STATUS transactional_id=T", a.TRANSACTION),
        ("LIST_CLUSTER", a.SERVER_DESCRIBE),
        ("CLUSTER_STATUS", a.SERVER_DESCRIBE),
        (f"ELECT_LEADER topic={TOPIC} partition=0", a.CLUSTER_ALTER),
    ]
    for text, action in texts:
        yield Case("cursus", text.split()[0], action, text.encode())
    yield Case("cursus", "an envelope without a command", a.PRODUCE, pack(">H", len(TOPIC)) + TOPIC.encode() + b"value")
    yield Case("cursus", "a batch", a.PRODUCE, b"")


# FLUX


def _flux() -> Iterator[Case]:
    member, a = f"g {TOPIC} m 1", Action
    lines: list[tuple[str, str, Action]] = [
        ("PRODUCE", f"{TOPIC} k:v", a.PRODUCE),
        ("PRODUCE", "shop.made k:v", a.TOPIC_CREATE),
        ("CONSUME", f"{TOPIC} 0 0", a.FETCH),
        ("CONSUME", "shop.made 0 0", a.TOPIC_CREATE),
        ("JOIN", f"g {TOPIC} m", a.GROUP_JOIN),
        ("SYNC", member, a.GROUP_JOIN),
        ("HEARTBEAT", member, a.GROUP_JOIN),
        ("LEAVE", member, a.GROUP_JOIN),
        ("COMMIT", f"{member} 0 0", a.OFFSET_COMMIT),
        ("OFFSET", f"g {TOPIC} 0", a.OFFSET_FETCH),
        ("BROKER_FETCH", f"{TOPIC} 0 1 0", a.FETCH),
        ("REPLICA_FETCH", f"{TOPIC} 0 1 0", a.CLUSTER_ALTER),
        ("BROKER_REPLICA_ACK", f"{TOPIC} 0 1 0", a.CLUSTER_ALTER),
        ("SET_PARTITION_ROLE", f"{TOPIC} 0 leader", a.CLUSTER_ALTER),
        ("ADMIN_CREATE_TOPIC", "shop.made 1 1", a.TOPIC_CREATE),
        ("ADMIN_CREATE_TOPIC", f"{TOPIC} 3 1", a.TOPIC_ALTER),
        ("ADMIN_REGISTER_BROKER", "1 host 9092", a.CLUSTER_ALTER),
        ("ADMIN_BROKER_HEARTBEAT", "0", a.CLUSTER_ALTER),
        ("ADMIN_SET_PARTITION_LEADER", f"{TOPIC} 0 0 0", a.CLUSTER_ALTER),
        ("ADMIN_GET_METADATA", "", a.TOPIC_LIST),
        ("PING", "", a.CONNECT),
        ("ADMIN_FENCE_BROKER", "0", a.CLUSTER_ALTER),
        ("ADMIN_UNFENCE_BROKER", "0", a.CLUSTER_ALTER),
        ("ADMIN_RECONCILE_BROKER_HEALTH", "1000", a.CLUSTER_ALTER),
        ("ADMIN_ELECT_TOPIC_LEADERS", TOPIC, a.CLUSTER_ALTER),
    ]
    for command, words, action in lines:
        yield Case("flux", command, action, f"V1|1|{command}|{words}\n".encode())


# Iggy, in the dialect of 0.8


def _name(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()


def _ident(text: str) -> bytes:
    return b"\x02" + _name(text)


def _iggy() -> Iterator[Case]:
    for code, action, payload in (*_of_users(), *_of_topics(), *_of_records()):
        yield Case("iggy", code.name, action, pack("<II", 4 + len(payload), code) + payload)
    for code, action, payload in _of_today():
        yield Case("iggy", code.name, action, headered(2, payload, code=code, number=9))


Requests = list[tuple[Code, Action, bytes]]


def _of_today() -> Requests:
    """Return the commands added with protocol 0.12, without a wait."""
    c, a = Code, Action
    topic = _ident("shop") + _ident("orders")
    single, group = b"\x01" + _ident("app"), b"\x02" + _ident("g")
    timers, place = pack("<QQ", 0, 1_000_000), pack("<BIBQI", 1, 0, 1, 0, 1)
    limits = pack("<QIIQ", 0, 1, 65_536, 1_000_000)
    fetch = pack("<IIIB", 1, 1, 65_536, 0) + pack("<IIBQIQQ", 1, 0, 1, 0, 65_536, 0, 0)
    return [
        (c.GET_ROUTE, a.TOPIC_DESCRIBE, topic + pack("<I", 0)),
        (c.POLL_HELD, a.FETCH, single + topic + place + b"\0" + limits),
        (c.POLL_HELD, a.GROUP_JOIN, group + topic + place + b"\0" + limits),
        (c.POLL_HELD, a.POSITION_COMMIT, single + topic + place + b"\1" + limits),
        (c.POLL_HELD, a.OFFSET_COMMIT, group + topic + place + b"\1" + limits),
        (c.AWAIT, a.FETCH, single + topic + timers + pack("<IIBQ", 1, 0, 1, 0)),
        (c.AWAIT, a.GROUP_JOIN, group + topic + timers + pack("<IIBQ", 1, 0, 1, 0)),
        (c.FETCH, a.FETCH, single + topic + timers + fetch),
        (c.FETCH, a.GROUP_JOIN, group + topic + timers + fetch),
        (c.FETCH, a.POSITION_COMMIT, single + topic + timers + fetch[:12] + b"\1" + fetch[13:]),
        (c.FETCH, a.OFFSET_COMMIT, group + topic + timers + fetch[:12] + b"\1" + fetch[13:]),
    ]


def _of_users() -> Requests:
    user, made = _ident("other"), _ident("made")
    password = _name("password") + _name("pass-word")
    c, a = Code, Action
    return [
        (c.PING, a.CONNECT, b""),
        (c.LOGIN, a.CONNECT, _name("admin") + _name("password") + pack("<II", 0, 0)),
        (c.LOGIN_TOKEN, a.CONNECT, _name("admin-token")),
        (c.LOGOUT, a.SELF_DESCRIBE, b""),
        (c.GET_ME, a.SELF_DESCRIBE, b""),
        (c.GET_TOKENS, a.SELF_DESCRIBE, b""),
        (c.CREATE_TOKEN, a.TOKEN_CREATE, _name("new") + pack("<Q", 0)),
        (c.DELETE_TOKEN, a.TOKEN_DELETE, _name("matrix")),
        (c.GET_CLUSTER, a.CLUSTER_DESCRIBE, b""),
        (c.DESCRIBE_OPTIONS, a.CLUSTER_DESCRIBE, b"\x01"),
        (c.GET_STATS, a.SERVER_DESCRIBE, b""),
        (c.GET_SNAPSHOT, a.SERVER_DESCRIBE, b""),
        (c.GET_CLIENT, a.SERVER_DESCRIBE, pack("<I", 1)),
        (c.GET_CLIENTS, a.SERVER_DESCRIBE, b""),
        (c.GET_USER, a.USER_DESCRIBE, _ident("anonymous")),
        (c.GET_USERS, a.USER_DESCRIBE, b""),
        (c.CREATE_USER, a.USER_CREATE, _name("carol") + _name("pass-word") + b"\x01\x00"),
        (c.DELETE_USER, a.USER_DELETE, user),
        (c.UPDATE_USER, a.USER_ALTER, made + b"\x00\x00"),
        (c.UPDATE_PERMISSIONS, a.USER_ALTER, made + b"\x00"),
        (c.CHANGE_PASSWORD, a.USER_ALTER, made + password),
    ]


def _of_topics() -> Requests:
    stream, topic = _ident("shop"), _ident("shop") + _ident("orders")
    fields = b"\x01" + pack("<QQB", 0, 0, 1) + _name("made")
    c, a = Code, Action
    return [
        (c.GET_STREAMS, a.STREAM_LIST, b""),
        (c.GET_STREAM, a.STREAM_DESCRIBE, stream),
        (c.CREATE_STREAM, a.STREAM_CREATE, _name("shop")),
        (c.UPDATE_STREAM, a.STREAM_ALTER, stream + _name("shop")),
        (c.PURGE_STREAM, a.STREAM_ALTER, stream),
        (c.DELETE_STREAM, a.STREAM_DELETE, stream),
        (c.GET_TOPICS, a.TOPIC_DESCRIBE, stream),
        (c.GET_TOPIC, a.TOPIC_DESCRIBE, topic),
        (c.CREATE_TOPIC, a.TOPIC_CREATE, stream + pack("<I", 1) + fields),
        (c.UPDATE_TOPIC, a.TOPIC_ALTER, topic + fields),
        (c.CREATE_PARTITIONS, a.TOPIC_ALTER, topic + pack("<I", 1)),
        (c.DELETE_PARTITIONS, a.TOPIC_ALTER, topic + pack("<I", 1)),
        (c.PURGE_TOPIC, a.TOPIC_PURGE, topic),
        (c.DELETE_SEGMENTS, a.TOPIC_PURGE, topic + pack("<II", 0, 1)),
        (c.DELETE_TOPIC, a.TOPIC_DELETE, topic),
        (c.GET_GROUP, a.GROUP_DESCRIBE, topic + _ident("g")),
        (c.GET_GROUPS, a.GROUP_DESCRIBE, topic),
        (c.CREATE_GROUP, a.GROUP_CREATE, topic + _name("h")),
        (c.DELETE_GROUP, a.GROUP_DELETE, topic + _ident("g")),
        (c.JOIN_GROUP, a.GROUP_JOIN, topic + _ident("g")),
        (c.LEAVE_GROUP, a.GROUP_JOIN, topic + _ident("g")),
        (c.SYNC_GROUP, a.GROUP_JOIN, topic + _ident("g")),
    ]


def _of_records() -> Requests:
    topic = _ident("shop") + _ident("orders")
    group, single = b"\x02" + _ident("g"), b"\x01" + _ident("c")
    first = b"\x01" + pack("<I", 0)
    poll = b"\x01" + pack("<QI", 0, 10)
    message = pack("<QQQQQQII", 0, 0, 0, 0, 0, 0, 0, 1) + b"v"
    sent = topic + b"\x01\x00" + pack("<I", 1)
    send = pack("<I", len(sent)) + sent + pack("<IIQ", 0, len(message), 0) + message
    c, a = Code, Action
    return [
        (c.SEND, a.PRODUCE, send),
        (c.FLUSH, a.PRODUCE, topic + pack("<I", 0) + b"\x00"),
        (c.POLL, a.FETCH, single + topic + first + poll + b"\x00"),
        (c.POLL, a.POSITION_COMMIT, single + topic + first + poll + b"\x01"),
        (c.POLL, a.GROUP_JOIN, group + topic + b"\x00" + bytes(4) + poll + b"\x00"),
        (c.POLL, a.OFFSET_COMMIT, group + topic + b"\x00" + bytes(4) + poll + b"\x01"),
        (c.GET_OFFSET, a.OFFSET_FETCH, group + topic + first),
        (c.GET_OFFSET, a.POSITION_FETCH, single + topic + first),
        (c.STORE_OFFSET, a.OFFSET_COMMIT, group + topic + first + pack("<Q", 0)),
        (c.STORE_OFFSET, a.POSITION_COMMIT, single + topic + first + pack("<Q", 0)),
        (c.DELETE_OFFSET, a.OFFSET_COMMIT, group + topic + first),
        (c.DELETE_OFFSET, a.POSITION_COMMIT, single + topic + first),
    ]


# Kafka 0.7


def _kafka07() -> Iterator[Case]:
    a, topic, records = Action, TOPIC.encode(), encode_set([b"v"])
    requests: list[tuple[RequestType, Action, bytes]] = [
        (RequestType.PRODUCE, a.PRODUCE, encode_produce(topic, 0, records)),
        (RequestType.PRODUCE, a.TOPIC_CREATE, encode_produce(b"shop.made", 0, records)),
        (RequestType.MULTIPRODUCE, a.PRODUCE, encode_multiproduce([(topic, 0, records)])),
        (RequestType.MULTIPRODUCE, a.TOPIC_CREATE, encode_multiproduce([(b"shop.made", 0, records)])),
        (RequestType.FETCH, a.FETCH, encode_fetch(topic, 0, 0, 1000)),
        (RequestType.MULTIFETCH, a.FETCH, encode_multifetch([FetchEntry(topic, 0, 0, 1000)])),
        (RequestType.OFFSETS, a.TOPIC_DESCRIBE, encode_offsets(topic, 0, -1, 1)),
    ]
    for kind, action, frame in requests:
        yield Case("kafka07", kind.name, action, frame)
