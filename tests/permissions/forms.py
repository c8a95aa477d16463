"""More requests that name resources of the tenant: other arguments, numbers and ids, and state besides topics.

Only their responses are compared: see ``test_existence``. No case uses a group or transactional id by name: that
another user has it is visible, as with any shared name.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import pack
from typing import Any, Final

from polywire.broker.permissions import Action
from polywire.protocols.iggy.messages import Code
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.messages import Api
from polywire.protocols.kafka07.messages import FetchEntry, RequestType, encode_fetch, encode_multifetch, encode_offsets
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.messages import Head, Verb
from tests.permissions.cases import EVENTS, TOPIC, Case
from tests.unit.http.site import request
from tests.unit.protocols.kafka.requests import GROUP, NEWER_GROUP, TOPIC_ID, frame_of, partition_frame

OWN: Final = "foreign.own"
BEYOND: Final = 7  # a partition that no topic has
TENANT_STREAM: Final = b"\x01\x04" + pack("<I", 2)  # by its number on Iggy
TENANT_TOPIC: Final = b"\x01\x04" + pack("<I", 1)
TENANT_USER: Final = b"\x01\x04" + pack("<I", 4)


def forms() -> Iterator[Case]:
    """Return all forms."""
    yield from _polywire()
    yield from _cursus()
    yield from _flux()
    yield from _http()
    yield from _iggy()
    yield from _kafka()
    yield from _kafka07()


def _polywire() -> Iterator[Case]:
    m = messages
    requests: list[tuple[Verb, Head]] = [
        (Verb.TOPICS, m.ListTopics(internal=True)),
        (Verb.BOUNDS, m.AskBounds([OWN, TOPIC])),
        (Verb.FETCH, m.Fetch(TOPIC, BEYOND, 0)),
        (Verb.FETCH, m.Fetch(TOPIC, 0, BEYOND)),
        (Verb.LOCATE, m.Locate(TOPIC, BEYOND, 0)),
        (Verb.POSITION, m.AskPosition(TOPIC, BEYOND, 1, "g")),
        (Verb.JOIN, m.Join("g", OWN, "m")),
        (Verb.GROUPS, m.AskGroups("g")),
        (Verb.GROUPS, m.AskGroups(after=[TOPIC, "g"])),
        (Verb.DELETE_GROUP, m.DeleteGroup("g", OWN)),
        (Verb.QUEUES, m.AskQueues("q")),
        (Verb.ACQUIRE, m.Acquire("g", OWN, "m")),
        (Verb.ACKNOWLEDGE, m.Acknowledge("q", TOPIC, "m", [m.AcknowledgedRun(BEYOND, 0, 0, 1)])),
        (Verb.RESET_QUEUE, m.ResetQueue("q", TOPIC, {BEYOND: 0})),
        (Verb.TRANSACTIONS, m.ListEntries(after="A")),
        (Verb.DELETE_TRANSACTION, m.DeleteEntry("held")),
        (Verb.DELETE_WRITER, m.DeleteEntry("held")),
        (Verb.WRITERS, m.ListEntries(after="a")),
        (Verb.LOGIN, m.LogIn("tenant", "wrong")),
    ]
    for verb, head in requests:
        yield Case("polywire", verb.name, Action.CONNECT, (verb, head, b""))


def _cursus() -> Iterator[Case]:
    read, who = f"topic={TOPIC} partition={BEYOND} offset=0", "transactional_id=held producerId=p epoch=0"
    for text in (
        "AUTH principal=tenant token=wrong",
        f"LIST topic={TOPIC}",
        "CONSUME topic=* partition=0 offset=0 member=m",
        f"CONSUME topic={TOPIC}* partition=0 offset=0 member=m",
        f"CONSUME {read} member=m",
        f"STREAM {read} group=g",
        f"LIST_OFFSETS topic={TOPIC} partition={BEYOND}",
        f"CREATE topic={TOPIC} partitions=1",
        f"CREATE topic={EVENTS} event_sourcing=true",
        f"FETCH_OFFSET topic={TOPIC} group=g partition={BEYOND}",
        f"FETCH_OFFSET topic={OWN} group=g partition=0",
        f"JOIN_GROUP topic={OWN} group=g member=m",
        f"REGISTER_GROUP topic={OWN} group=g",
        f"GROUP_STATUS group=g topic={TOPIC}",
        f"FIND_COORDINATOR group=g topic={TOPIC}",
        "TXN_STATUS transactional_id=held",
        f"BEGIN_TXN {who}",
        f"END_TXN {who} result=abort",
        f"TXN_PUBLISH {who} topic={OWN} partition=0 seqNum=1 message=x",
        f"SEND_OFFSETS_TO_TXN {who} topic={OWN} group=g member=m generation=1 P0:0",
        f"DELETE {TOPIC}",
        f"CREATE {TOPIC} 2",
        f"PUBLISH {TOPIC} x",
        f"SUBSCRIBE {TOPIC}",
        f"SUBSCRIBE {TOPIC} g",
        f"CONSUME {TOPIC} 0 0",
        f"STREAM {TOPIC} 0 0",
        f"JOIN_GROUP {TOPIC} g m",
        f"SYNC_GROUP {TOPIC} g m 1",
        f"LEAVE_GROUP {TOPIC} g m",
        f"COMMIT {TOPIC} g 0 0",
        f"BATCH_COMMIT {TOPIC} g m 1 0:0",
        "SETGROUP g",
    ):
        yield Case("cursus", text.split()[0], Action.CONNECT, text.encode())


def _flux() -> Iterator[Case]:
    for command, words in (
        ("PRODUCE", f"{TOPIC} k:v acks=0"),
        ("PRODUCE", f"{TOPIC} k:v acks=all"),
        ("CONSUME", f"{TOPIC} {BEYOND} 0"),
        ("CONSUME", f"{TOPIC} 0 9"),
        ("JOIN", f"g {TOPIC} m range"),
        ("JOIN", f"g {OWN} m"),
        ("COMMIT", f"g {TOPIC} 0 0"),
        ("COMMIT", f"g {TOPIC} m 1 {BEYOND} 0"),
        ("OFFSET", f"g {TOPIC} {BEYOND}"),
        ("OFFSET", f"g {OWN} 0"),
        ("BROKER_FETCH", f"{TOPIC} {BEYOND} 1 0"),
        ("REPLICA_FETCH", f"{TOPIC} {BEYOND} 1 0"),
        ("ADMIN_CREATE_TOPIC", f"{TOPIC} 1 1"),
    ):
        yield Case("flux", command, Action.CONNECT, f"V1|1|{command}|{words}\n".encode())


def _http() -> Iterator[Case]:
    change = {"X-Polywire": "1", "Content-Type": "application/json"}
    api, topic = "/api/v1", f"/api/v1/topics/{TOPIC}"
    for method, path, body in (
        ("GET", f"{topic}/partitions/{BEYOND}/records", b""),
        ("GET", f"{topic}/partitions/0/records?tail=1", b""),
        ("GET", f"{topic}/groups/none", b""),
        ("GET", f"{api}/topics/{OWN}/groups/g", b""),
        ("POST", f"{topic}/groups/none/reset", b'{"to": "latest"}'),
        ("GET", f"{topic}/queues/none", b""),
        ("GET", f"{api}/topics/{OWN}/queues/q", b""),
        ("POST", f"{topic}/queues/none/purge", b""),
        ("POST", f"{topic}/queues/none/settings", b'{"share.delivery.count.limit": 0}'),
        ("POST", f"{topic}/records", b'{"value": "v", "partition": 7}'),
        ("POST", f"{topic}/resend", b'{"partition": 7, "offset": 0}'),
        ("GET", f"{topic}/nothing", b""),
        ("GET", f"{api}/users/tenant", b""),
        ("DELETE", f"{api}/users/tenant", b""),
        ("POST", f"{api}/users/tenant", b'{"password": "pass-word"}'),
        ("POST", f"{api}/users/tenant/password", b'{"password": "pass-word"}'),
        ("POST", f"{api}/users/tenant/permissions", b'{"permissions": []}'),
        ("DELETE", f"{api}/tokens/none", b""),
    ):
        sent = request(method, path, {} if method == "GET" else change, body)
        yield Case("http", f"{method} {path}", Action.CONNECT, sent)


def _iggy() -> Iterator[Case]:
    def name(text: str) -> bytes:
        return bytes((len(text),)) + text.encode()

    named = b"\x02" + name("shop") + b"\x02" + name("orders")
    group, single = b"\x02\x02" + name("g"), b"\x01\x02" + name("c")
    far, poll = b"\x01" + pack("<I", BEYOND), b"\x01" + pack("<QI", 0, 10)
    fields = b"\x01" + pack("<QQB", 0, 0, 1) + name("made")
    requests: list[tuple[Code, bytes]] = [
        (Code.LOGIN, name("tenant") + name("wrong-word") + pack("<II", 0, 0)),
        (Code.GET_CLIENT, pack("<I", 9)),
        (Code.GET_USER, b"\x02" + name("tenant")),
        (Code.GET_USER, TENANT_USER),
        (Code.DELETE_USER, TENANT_USER),
        (Code.UPDATE_USER, TENANT_USER + b"\0\0"),
        (Code.UPDATE_PERMISSIONS, TENANT_USER + b"\0"),
        (Code.CHANGE_PASSWORD, TENANT_USER + name("password") + name("pass-word")),
        (Code.CREATE_USER, name("tenant") + name("pass-word") + b"\1\0"),
        (Code.POLL, single + named + far + poll + b"\0"),
        (Code.POLL, group + named + far + poll + b"\0"),
        (Code.GET_OFFSET, group + named + far),
        (Code.STORE_OFFSET, group + named + far + pack("<Q", 0)),
        (Code.DELETE_OFFSET, single + named + far),
        (Code.FLUSH, named + pack("<I", BEYOND) + b"\0"),
        (Code.DELETE_SEGMENTS, named + pack("<II", BEYOND, 1)),
    ]
    for stream, topic in (
        (TENANT_STREAM, TENANT_TOPIC),
        (b"\x02" + name("shop"), TENANT_TOPIC),
        (TENANT_STREAM, b"\x02" + name("orders")),
    ):
        both = stream + topic
        requests += [(code, stream) for code in (Code.GET_STREAM, Code.PURGE_STREAM, Code.DELETE_STREAM)]
        requests += [(code, both) for code in (Code.GET_TOPIC, Code.PURGE_TOPIC, Code.DELETE_TOPIC, Code.GET_GROUPS)]
        requests += [
            (Code.GET_TOPICS, stream),
            (Code.UPDATE_STREAM, stream + name("own")),
            (Code.CREATE_TOPIC, stream + pack("<I", 1) + fields),
            (Code.UPDATE_TOPIC, both + fields),
            (Code.CREATE_PARTITIONS, both + pack("<I", 1)),
            (Code.DELETE_PARTITIONS, both + pack("<I", 1)),
            (Code.GET_GROUP, both + b"\x01\x04" + pack("<I", 1)),
            (Code.CREATE_GROUP, both + name("h")),
            (Code.DELETE_GROUP, both + b"\x02" + name("g")),
            (Code.JOIN_GROUP, both + b"\x02" + name("g")),
            (Code.LEAVE_GROUP, both + b"\x02" + name("g")),
            (Code.POLL, single + both + b"\x01" + bytes(4) + poll + b"\0"),
            (Code.GET_OFFSET, single + both + b"\x01" + bytes(4)),
        ]
    for code, payload in requests:
        yield Case("iggy", code.name, Action.CONNECT, pack("<II", 4 + len(payload), code) + payload)


def _kafka() -> Iterator[Case]:
    asked = _kafka_case
    fetched: dict[str, Any] = {"fetch_offset": 0, "partition_max_bytes": 1 << 20}
    yield asked(Api.FETCH, partition_frame(Api.FETCH, TOPIC, 12, word="topic", partition=BEYOND, **fetched))
    topics = schema.request(Api.FETCH).Topics
    one = topics(topic_id=TOPIC_ID, partitions=[topics.Partitions(**fetched)])
    yield asked(Api.FETCH, frame_of(Api.FETCH, topics=[one]))
    yield asked(Api.LIST_OFFSETS, partition_frame(Api.LIST_OFFSETS, TOPIC, index=BEYOND, timestamp=-1))
    metadata = schema.request(Api.METADATA).Topics
    yield asked(Api.METADATA, frame_of(Api.METADATA, topics=None))
    for create in (False, True):
        fields = {"topics": [metadata(name=TOPIC)], "may_create": create}
        yield asked(Api.METADATA, frame_of(Api.METADATA, **fields))
    yield asked(Api.METADATA, frame_of(Api.METADATA, 12, topics=[metadata(topic_id=TOPIC_ID, name=None)]))
    deleted = schema.request(Api.DELETE_TOPICS).Topics(name=None, topic_id=TOPIC_ID)
    yield asked(Api.DELETE_TOPICS, frame_of(Api.DELETE_TOPICS, topics=[deleted]))
    created = schema.request(Api.CREATE_TOPICS).Topics(name=TOPIC, num_partitions=1, replication_factor=1)
    yield asked(Api.CREATE_TOPICS, frame_of(Api.CREATE_TOPICS, topics=[created]))
    yield asked(Api.CREATE_TOPICS, frame_of(Api.CREATE_TOPICS, topics=[created], validate_only=True))
    listed = schema.request(Api.DESCRIBE_TOPIC_PARTITIONS)
    yield asked(Api.DESCRIBE_TOPIC_PARTITIONS, frame_of(Api.DESCRIBE_TOPIC_PARTITIONS, topics=[]))
    cursor = listed.Cursor(topic_name=TOPIC, index=1)
    named = [listed.Topics(name=TOPIC)]
    yield asked(Api.DESCRIBE_TOPIC_PARTITIONS, frame_of(Api.DESCRIBE_TOPIC_PARTITIONS, topics=named, cursor=cursor))
    yield from _kafka_groups()


def _kafka_case(api: Api, frame: bytes) -> Case:
    return Case("kafka", api.name, Action.CONNECT, frame)


def _kafka_groups() -> Iterator[Case]:
    case = _kafka_case

    want = {"want_operations": True}
    yield case(Api.DESCRIBE_GROUPS, frame_of(Api.DESCRIBE_GROUPS, groups=[GROUP, "none"], **want))
    yield case(Api.DESCRIBE_GROUPS, frame_of(Api.DESCRIBE_GROUPS, 5, groups=[GROUP, NEWER_GROUP], **want))
    described = frame_of(Api.CONSUMER_GROUP_DESCRIBE, group_ids=[GROUP, NEWER_GROUP], **want)
    yield case(Api.CONSUMER_GROUP_DESCRIBE, described)
    yield case(Api.DELETE_GROUPS, frame_of(Api.DELETE_GROUPS, groups_names=[NEWER_GROUP]))
    yield case(Api.LIST_GROUPS, frame_of(Api.LIST_GROUPS, types_filter=["consumer"]))
    for group in (GROUP, NEWER_GROUP):
        yield case(Api.OFFSET_FETCH, frame_of(Api.OFFSET_FETCH, 7, group_id=group, topics=None))
        topics = schema.request(Api.OFFSET_DELETE).Topics
        one = topics(name=OWN, partitions=[topics.Partitions()])
        yield case(Api.OFFSET_DELETE, frame_of(Api.OFFSET_DELETE, group_id=group, topics=[one]))
        leave = schema.request(Api.LEAVE_GROUP).Members(member_id="m")
        yield case(Api.LEAVE_GROUP, frame_of(Api.LEAVE_GROUP, group_id=group, members=[leave]))
    yield case(Api.HEARTBEAT, frame_of(Api.HEARTBEAT, group_id=NEWER_GROUP, generation_id=1, member_id="m"))
    beat = {"group_id": NEWER_GROUP, "member_id": "x", "member_epoch": 1}
    yield case(Api.CONSUMER_GROUP_HEARTBEAT, frame_of(Api.CONSUMER_GROUP_HEARTBEAT, **beat))
    yield case(Api.DESCRIBE_TRANSACTIONS, frame_of(Api.DESCRIBE_TRANSACTIONS, transactional_ids=["held"]))
    yield case(Api.END_TXN, frame_of(Api.END_TXN, transactional_id="held"))
    added = schema.request(Api.ADD_PARTITIONS_TO_TXN).Topics(name=OWN, partitions=[0])
    yield case(Api.ADD_PARTITIONS_TO_TXN, frame_of(Api.ADD_PARTITIONS_TO_TXN, transactional_id="held", topics=[added]))


def _kafka07() -> Iterator[Case]:
    topic = TOPIC.encode()
    for kind, frame in (
        (RequestType.FETCH, encode_fetch(topic, BEYOND, 0, 1000)),
        (RequestType.FETCH, encode_fetch(topic, 0, 1 << 40, 1000)),
        (RequestType.MULTIFETCH, encode_multifetch([FetchEntry(topic, BEYOND, 0, 1000)])),
        (RequestType.OFFSETS, encode_offsets(topic, BEYOND, -1, 1)),
        (RequestType.OFFSETS, encode_offsets(topic, 0, -2, 1)),
    ):
        yield Case("kafka07", kind.name, Action.CONNECT, frame)
