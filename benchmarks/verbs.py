"""Every verb of every protocol with its worst legal request, over a broker whose state is at its limits.

A test compares the table with the protocols' commands, so that no new verb is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from struct import pack

from benchmarks.kafka_verbs import classic_join, kafka_requests, wide_join, wide_leave, wide_produce
from polywire.broker.groups.classic import SEATS_MAX
from polywire.protocols.cursus.messages import frame
from polywire.protocols.iggy import client_codec
from polywire.protocols.iggy.client_codec import ident, request
from polywire.protocols.iggy.held_polls import TARGETS_MAX
from polywire.protocols.iggy.messages import U32, U64, Code, Consumer
from polywire.protocols.kafka07.messages import (
    FetchEntry,
    encode_fetch,
    encode_message,
    encode_multifetch,
    encode_multiproduce,
    encode_offsets,
    encode_produce,
    encode_set,
)
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.codec import MAGIC, encode_head
from polywire.protocols.polywire.messages import Head, Verb
from polywire.records.columns import Record
from polywire.records.rows import from_records
from tests.unit.protocols.iggy.dialogue import headered
from tests.vectors.iggy import test_protocol_012 as protocol_012

TOPICS = 8_500  # what one address may create, less those of other names
NAME_ROOM = "x" * 200  # long names make long lists
WIDE_PARTITIONS = 10_000
MEMBERS = 300  # of one group over all those partitions
GROUPS = 2_000
EVENTS = 20_000
TOKENS = 10_000
RECORDS = 200_000
WIDE, FULL, EVENTED, SHORT = "wide", "full", "evented", "short"
LINE = 65_000


@dataclass(frozen=True, slots=True)
class Asked:
    """One request.

    make: returns its bytes. opening: sent before the measurement, on the same connection. once: it cannot be repeated
    by other connections. answering: returns its bytes instead, from the response to the opening.
    """

    wire: str
    verb: str
    make: Callable[[], bytes]
    opening: bytes = b""
    once: bool = False
    answering: Callable[[bytes], bytes] | None = None


def topic_name(number: int) -> str:
    """Return one of many names."""
    return f"t{number:05}{NAME_ROOM}"


# FLUX


def flux(command: str, args: str) -> Asked:
    """Return one line."""
    return Asked("flux", command, f"V1|1|{command}|{args}\n".encode)


def flux_verbs() -> Iterator[Asked]:
    """Yield all commands of FLUX."""
    run = b"".join(b"V1|1|PRODUCE|u%d k:v\n" % (n % 40) for n in range(400))
    yield Asked("flux", "PRODUCE", lambda: 100 * run)
    yield flux("CONSUME", f"{FULL} 0 0")
    yield flux("JOIN", f"crowd {WIDE} newcomer")
    yield flux("SYNC", f"crowd {WIDE} m0 1")
    yield flux("HEARTBEAT", f"crowd {WIDE} m0 1")
    yield flux("LEAVE", f"crowd {WIDE} newcomer 1")
    yield flux("COMMIT", f"crowd {WIDE} m0 1 0 0")
    yield flux("OFFSET", f"crowd {WIDE} {'0' * LINE}")
    yield flux("REPLICA_FETCH", f"{WIDE} 0 1 0")
    yield flux("BROKER_FETCH", f"{FULL} 0 1 0 1000000")
    yield flux("BROKER_REPLICA_ACK", f"{WIDE} 0 1 0")
    yield flux("SET_PARTITION_ROLE", f"{WIDE} 1 leader")
    yield flux("ADMIN_CREATE_TOPIC", f"{WIDE} {WIDE_PARTITIONS} 1000")
    yield flux("ADMIN_REGISTER_BROKER", "7 host 1")
    yield flux("ADMIN_BROKER_HEARTBEAT", "1")
    yield flux("ADMIN_SET_PARTITION_LEADER", f"{WIDE} 2 0 {'1,' * 1000}")
    yield flux("ADMIN_GET_METADATA", "")
    yield flux("PING", "")
    yield flux("ADMIN_FENCE_BROKER", "2")
    yield flux("ADMIN_UNFENCE_BROKER", "2")
    yield flux("ADMIN_RECONCILE_BROKER_HEALTH", "1")
    yield flux("ADMIN_ELECT_TOPIC_LEADERS", WIDE)


# Cursus


def cursus(text: str, *, once: bool = False) -> Asked:
    """Return one command."""
    return Asked("cursus", text.partition(" ")[0], lambda: frame(text.encode()), once=once)


def cursus_verbs() -> Iterator[Asked]:
    """Yield all commands of Cursus."""
    pairs = ",".join(f"P{n}:{n}" for n in range(WIDE_PARTITIONS))
    member = "member=m0 generation=1"
    transaction = "transactional_id=x producerId=p epoch=0"
    for name in ("HELP", "PROTOCOL_INFO", "LIST_CLUSTER", "CLUSTER_STATUS", "ELECT_LEADER a=b", "EXIT", "SETGROUP g"):
        yield cursus(name)
    yield cursus("LIST")
    yield cursus("LIST_GROUPS")
    yield cursus("NEGOTIATE version=1 features=" + ",".join(["a" * 63] * 63))
    yield cursus("AUTH principal=a token=" + "b" * 200_000)
    yield cursus(f"CREATE topic={WIDE} partitions={WIDE_PARTITIONS}")
    yield cursus(f"DELETE topic={topic_name(TOPICS - 1)}", once=True)
    for name in ("DESCRIBE", "METADATA", "LIST_OFFSETS"):
        yield cursus(f"{name} topic={WIDE}")
    yield cursus(f"PUBLISH topic={SHORT} producerId=p message=" + "m" * 9_000_000)
    yield cursus(f"CONSUME topic={FULL} partition=0 offset=0 member=m batch=100000")
    for name, pattern in (("CONSUME*", "*" + "?x*" * 20 + "y"), ("CONSUME many", "t00*")):
        text = f"CONSUME topic={pattern} partition=0 offset=0 member=m"
        yield Asked("cursus", name, partial(frame, text.encode()))
    yield cursus(f"STREAM topic={FULL} partition=0 offset=0 member=m group=g")
    yield cursus(f"JOIN_GROUP topic={WIDE} group=crowd member=newcomer")
    for name in ("SYNC_GROUP", "HEARTBEAT", "LEAVE_GROUP"):
        yield cursus(f"{name} topic={WIDE} group=crowd {member}")
    yield Asked("cursus", "COMMIT", partial(frame, f"COMMIT {WIDE} committed 0 5".encode()))
    yield cursus(f"COMMIT_OFFSET topic={WIDE} partition=0 group=crowd offset=1 {member}")
    joined = frame(f"JOIN_GROUP topic={WIDE} group=alone member=m".encode())
    batched = partial(_batched, pairs)
    yield Asked("cursus", "BATCH_COMMIT", lambda: batched(b""), joined, once=True, answering=batched)
    yield cursus(f"FETCH_OFFSET topic={WIDE} partition=0 group=crowd")
    yield cursus("FIND_COORDINATOR group=crowd")
    yield cursus(f"REGISTER_GROUP topic={WIDE} group=crowd")
    yield cursus(f"SUBSCRIBE topic={WIDE} group=crowd")
    yield cursus("GROUP_STATUS group=crowd")
    yield cursus("INIT_PRODUCER_ID transactional_id=x")
    for name in ("BEGIN_TXN", "END_TXN"):
        yield cursus(f"{name} {transaction}")
    yield cursus(f"TXN_PUBLISH {transaction} topic={WIDE} seqNum=1 message=" + "m" * 9_000_000)
    yield cursus(f"SEND_OFFSETS_TO_TXN {transaction} topic={WIDE} group=crowd {member} {pairs}")
    yield cursus("TXN_STATUS transactional_id=x")
    yield cursus(f"APPEND_STREAM topic={EVENTED} key=k version=1 message=" + "m" * 9_000_000)
    yield cursus(f"READ_STREAM topic={EVENTED} key=k")
    yield cursus(f"SAVE_SNAPSHOT topic={EVENTED} key=k version=1 message=" + "m" * 1_000_000)
    yield cursus(f"READ_SNAPSHOT topic={EVENTED} key=k")
    yield cursus(f"STREAM_VERSION topic={EVENTED} key=k")


def _batched(pairs: str, joined: bytes) -> bytes:
    """Return a commit of all partitions by the member of this join response."""
    reported = dict(word.split("=", 1) for word in joined.decode(errors="replace").split() if "=" in word)
    member, generation = reported.get("member", "m"), reported.get("generation", "1")
    return frame(f"BATCH_COMMIT topic={WIDE} group=alone member={member} generation={generation} {pairs}".encode())


# Iggy


def iggy(code: Code, body: bytes = b"", *, once: bool = False) -> Asked:
    """Return one request of the documented dialect."""
    return Asked("iggy", code.name, partial(request, code, body), once=once)


def iggy_today(code: Code, body: bytes) -> Asked:
    """Return one request of protocol 0.12, after a login."""
    login = headered(1, protocol_012.REGISTER, code=Code.LOGIN)
    return Asked("iggy", code.name, partial(headered, 2, body, code=code, number=1), opening=login)


def iggy_held_verbs() -> Iterator[Asked]:
    """Yield requests that may wait for messages, for as many partitions as permitted."""
    full, wide = ident("default") + ident(FULL), ident("default") + ident(WIDE)
    reader, now = b"\x01" + ident("app"), pack("<QQ", 0, 1_000_000)
    polled = reader + full + pack("<BIBQIB", 1, 0, 1, 0, 1_000_000, 0)
    yield iggy_today(Code.POLL_HELD, polled + pack("<QIIQ", 0, 1, 2**31, 1_000_000))
    awaited = b"".join(pack("<IBQ", number, 1, 0) for number in range(TARGETS_MAX))
    yield iggy_today(Code.AWAIT, reader + wide + now + U32.pack(TARGETS_MAX) + awaited)
    fetched = b"".join(pack("<IBQIQQ", number, 1, 0, 2**20, 0, 0) for number in range(TARGETS_MAX))
    limits = pack("<IIIBI", 1, 1_000_000, 2**31, 0, TARGETS_MAX)
    yield iggy_today(Code.FETCH, reader + wide + now + limits + fetched)
    yield iggy_today(Code.GET_ROUTE, wide + U32.pack(0))


def iggy_verbs() -> Iterator[Asked]:
    """Yield all commands of Iggy; those on users need a broker with users, and are refused here."""
    stream, wide, full = ident("default"), ident("default") + ident(WIDE), ident("default") + ident(FULL)
    missing = stream + ident("none")
    for code in (Code.PING, Code.GET_STATS, Code.GET_CLUSTER, Code.DESCRIBE_OPTIONS, Code.GET_ME, Code.GET_CLIENTS):
        yield iggy(code)
    yield iggy(Code.GET_SNAPSHOT)
    yield iggy(Code.GET_CLIENT, U32.pack(1))
    for code in (Code.GET_USERS, Code.GET_TOKENS, Code.LOGOUT, Code.GET_STREAMS):
        yield iggy(code)
    for code in (Code.GET_USER, Code.DELETE_USER, Code.UPDATE_USER, Code.UPDATE_PERMISSIONS, Code.CHANGE_PASSWORD):
        yield iggy(code, ident("unknown") + bytes(4))
    yield iggy(Code.CREATE_USER, client_codec.name("u" * 50) + client_codec.name("p" * 100) + b"\x01\x00")
    yield iggy(Code.LOGIN, client_codec.name("u" * 50) + client_codec.name("p" * 100))
    yield iggy(Code.CREATE_TOKEN, client_codec.name("t") + U64.pack(1))
    yield iggy(Code.DELETE_TOKEN, client_codec.name("t"))
    yield iggy(Code.LOGIN_TOKEN, client_codec.name("t" * 255))
    reader = Consumer(group=False, identifier=1)
    yield iggy(Code.POLL, client_codec.poll(client_codec.place(reader, full, 1), 1, 0, 1_000_000))
    sent = full + client_codec.to_partition(1)
    one = client_codec.messages([Record(bytes(10))])
    yield Asked("iggy", "SEND", lambda: request(Code.SEND, sent + one * 300_000))
    yield iggy(Code.FLUSH, full + U32.pack(1) + b"\x01")
    for code in (Code.GET_OFFSET, Code.DELETE_OFFSET):
        yield iggy(code, client_codec.place(reader, wide, 1))
    yield iggy(Code.STORE_OFFSET, client_codec.place(reader, wide, 1) + U64.pack(0))
    yield iggy(Code.GET_STREAM, stream)
    yield iggy(Code.CREATE_STREAM, U32.pack(5) + client_codec.name("new"), once=True)
    yield iggy(Code.UPDATE_STREAM, ident("new") + client_codec.name("newer"), once=True)
    yield iggy(Code.PURGE_STREAM, ident("newer"))
    yield iggy(Code.DELETE_STREAM, ident("newer"), once=True)
    yield iggy(Code.GET_TOPIC, wide)
    yield Asked("iggy", "GET_TOPIC none", partial(request, Code.GET_TOPIC, missing))
    yield iggy(Code.GET_TOPICS, stream)
    fields = U32.pack(0) + client_codec.name("iggy-made")
    yield iggy(Code.CREATE_TOPIC, stream + U32.pack(0x7FFF) + U32.pack(1000) + fields, once=True)
    yield iggy(Code.UPDATE_TOPIC, wide + U32.pack(0) + client_codec.name(WIDE))
    yield iggy(Code.PURGE_TOPIC, stream + ident("iggy-made"))
    yield iggy(Code.CREATE_PARTITIONS, stream + ident("iggy-made") + U32.pack(5_000), once=True)
    yield iggy(Code.DELETE_PARTITIONS, stream + ident("iggy-made") + U32.pack(5_000), once=True)
    yield iggy(Code.DELETE_SEGMENTS, wide + U32.pack(1) + U32.pack(1))
    yield iggy(Code.DELETE_TOPIC, stream + ident("iggy-made"), once=True)
    for code in (Code.GET_GROUPS,):
        yield iggy(code, wide)
    yield iggy(Code.CREATE_GROUP, wide + U32.pack(99))
    for code in (Code.GET_GROUP, Code.JOIN_GROUP, Code.SYNC_GROUP, Code.LEAVE_GROUP, Code.DELETE_GROUP):
        yield iggy(code, wide + U32.pack(99))


# Kafka 0.7


def kafka07_verbs() -> Iterator[Asked]:
    """Yield all requests of Kafka 0.7."""
    full, wide = FULL.encode(), WIDE.encode()
    one = encode_set([bytes(10)])
    yield Asked("kafka07", "PRODUCE", lambda: encode_produce(full, 0, one * 700_000))
    yield Asked("kafka07", "FETCH", partial(encode_fetch, full, 0, 0, 16_000_000))
    yield Asked("kafka07", "MULTIFETCH", lambda: encode_multifetch([FetchEntry(full, 0, 0, 16_000_000)] * 30_000))
    sets = ((wide, n % WIDE_PARTITIONS, encode_message(b"v")) for n in range(30_000))
    yield Asked("kafka07", "MULTIPRODUCE", lambda: encode_multiproduce(list(sets)))
    yield Asked("kafka07", "OFFSETS", partial(encode_offsets, full, 0, -1, 2**31 - 1))


# Kafka


def kafka_verbs() -> Iterator[Asked]:
    """Yield all APIs of Kafka."""
    for api, make in kafka_requests(WIDE, WIDE_PARTITIONS, FULL, TOPICS, topic_name):
        yield Asked("kafka", api.name, make)
    yield Asked("kafka", "PRODUCE wide", partial(wide_produce, WIDE, WIDE_PARTITIONS))
    topics = [topic_name(number) for number in range(TOPICS)]
    yield Asked("kafka", "CONSUMER_GROUP_HEARTBEAT wide", partial(wide_join, topics))
    yield Asked("kafka", "CONSUMER_GROUP_HEARTBEAT leaving", wide_leave, wide_join(topics), once=True)
    yield Asked("kafka", "JOIN_GROUP wide", partial(classic_join, "classic", topics))
    shared = partial(classic_join, "wide", topics[:SEATS_MAX])
    yield Asked("kafka", "JOIN_GROUP shared", shared, wide_join(topics), once=True)


# polywire


def polywire(
    verb: Verb, head: Head, payload: Callable[[], bytes] = bytes, *, name: str = "", once: bool = False
) -> Asked:
    """Return one frame."""

    def make() -> bytes:
        sent = payload()
        return encode_head(verb, 1, head, payload_bytes=len(sent)) + sent

    return Asked("polywire", name or verb.name, make, MAGIC, once)


def polywire_verbs() -> Iterator[Asked]:
    """Yield all verbs of the `polywire` protocol."""
    tokens = [b"%016d" % n for n in range(TOKENS)]
    many = [topic_name(n) for n in range(1000)]
    times = list(range(9))
    yield Asked("polywire", "HELLO", lambda: MAGIC)
    yield polywire(Verb.PING, Head())
    yield polywire(Verb.CANCEL, messages.Cancel(7))
    yield polywire(Verb.LOGIN, messages.LogIn("a" * 250, "b" * 1000))
    yield polywire(Verb.TOPICS, messages.ListTopics())
    yield polywire(Verb.CREATE_TOPIC, messages.CreateTopic("made", 5_000), once=True)
    yield polywire(Verb.DESCRIBE, messages.Describe(WIDE))
    yield polywire(Verb.GROW_TOPIC, messages.GrowTopic("made", WIDE_PARTITIONS), once=True)
    yield polywire(Verb.CONFIGURE_TOPIC, messages.ConfigureTopic("made", {"compression": "lz4"}))
    yield polywire(Verb.BEGIN_PARTITION, messages.BeginPartition("made", 0, 0))
    yield polywire(Verb.LINK_TOPIC, messages.LinkTopic("made", ""))
    yield polywire(Verb.PURGE_TOPIC, messages.PurgeTopic("made"))
    yield polywire(Verb.DELETE_TOPIC, messages.DeleteTopic("made"), once=True)
    yield polywire(Verb.BOUNDS, messages.AskBounds([WIDE], times))
    yield polywire(Verb.BOUNDS, messages.AskBounds(many, times), name="BOUNDS many")
    yield polywire(Verb.FETCH, messages.Fetch(FULL, 0, 0))
    yield polywire(Verb.PRODUCE, messages.Produce(SHORT, 0), _short)
    yield polywire(Verb.PRODUCE, messages.Produce(WIDE, messages.BY_KEY), _keyed, name="PRODUCE by key")
    yield polywire(Verb.PURGE_TOPIC, messages.PurgeTopic(WIDE), name="PURGE_TOPIC full")
    yield polywire(Verb.STAGE, messages.Stage(b"token", SHORT, 0), _short)
    yield polywire(Verb.PUBLISH, messages.Publish("w", 1, tokens), once=True)
    yield polywire(Verb.ABANDON, messages.Abandon(tokens))
    yield polywire(Verb.BEGIN_EPOCH, messages.BeginEpoch("w"))
    yield polywire(Verb.LOCATE, messages.Locate(FULL, 0, 0))
    yield polywire(Verb.COMMIT, messages.Commit(WIDE, 0, 1, "committed", 0))
    yield polywire(Verb.POSITION, messages.AskPosition(WIDE, 0, 1, "crowd"))
    yield polywire(Verb.JOIN, messages.Join("crowd", WIDE, "newcomer"))
    for verb in (Verb.SYNC, Verb.HEARTBEAT, Verb.LEAVE):
        yield polywire(verb, messages.Member("crowd", WIDE, "newcomer", 1))
    yield polywire(Verb.GROUPS, messages.AskGroups())
    yield polywire(Verb.DELETE_GROUP, messages.DeleteGroup("g7" + NAME_ROOM, topic_name(7)), once=True)
    yield polywire(Verb.ACQUIRE, messages.Acquire("queued", FULL, "m", 10_000))
    runs = [messages.AcknowledgedRun(0, offset, offset, 1) for offset in range(10_000)]
    yield polywire(Verb.ACKNOWLEDGE, messages.Acknowledge("queued", FULL, "m", runs))
    yield polywire(Verb.QUEUES, messages.AskQueues())
    yield polywire(Verb.CONFIGURE_QUEUE, messages.ConfigureQueue("queued", FULL, {}))
    yield polywire(Verb.RESET_QUEUE, messages.ResetQueue("reset", WIDE), once=True)
    yield polywire(Verb.DELETE_QUEUE, messages.DeleteQueue("reset", WIDE), once=True)
    for verb in (Verb.TRANSACTIONS, Verb.WRITERS):
        yield polywire(verb, messages.ListEntries())
    for verb in (Verb.DELETE_TRANSACTION, Verb.DELETE_WRITER):
        yield polywire(verb, messages.DeleteEntry("x"))


def _short() -> bytes:
    return bytes(from_records([Record(b"")] * 1_000_000))


def _keyed() -> bytes:
    return bytes(from_records([Record(b"v", key=b"%d" % n) for n in range(200_000)]))


def all_verbs() -> Iterator[Asked]:
    """Yield every request."""
    yield from flux_verbs()
    yield from cursus_verbs()
    yield from iggy_verbs()
    yield from iggy_held_verbs()
    yield from kafka07_verbs()
    yield from kafka_verbs()
    yield from polywire_verbs()
    yield Asked("iggy", "PURGE_STREAM full", partial(request, Code.PURGE_STREAM, ident("default")))
    yield Asked("iggy", "DELETE_STREAM full", partial(request, Code.DELETE_STREAM, ident("default")), once=True)


# The state of the broker


def filling() -> Iterator[Sequence[bytes]]:
    """Yield `polywire` frames that bring a broker to its limits, in pipelines of the permitted length."""

    def framed(verb: Verb, head: Head, payload: bytes = b"") -> bytes:
        return encode_head(verb, 1, head, payload_bytes=len(payload)) + payload

    for start in range(0, TOPICS, 500):
        yield [
            framed(Verb.CREATE_TOPIC, messages.CreateTopic(topic_name(n), 1, level=1))
            for n in range(start, min(start + 500, TOPICS))
        ]
    made = [(WIDE, WIDE_PARTITIONS), (FULL, 1), (SHORT, 1)]
    yield [framed(Verb.CREATE_TOPIC, messages.CreateTopic(name, count, level=1)) for name, count in made]
    records = bytes(from_records([Record(b"v" * 40)] * 1000))
    yield [framed(Verb.PRODUCE, messages.Produce(FULL, 0), records)] * (RECORDS // 1000)
    one = bytes(from_records([Record(b"v")]))
    for start in range(0, TOPICS, 500):
        yield [framed(Verb.PRODUCE, messages.Produce(topic_name(n), 0), one) for n in range(start, start + 500)]
    for start in range(0, GROUPS, 500):
        names = [(f"g{n}" + NAME_ROOM, topic_name(n)) for n in range(start, start + 500)]
        yield [framed(Verb.JOIN, messages.Join(group, topic, "m")) for group, topic in names]
    for start in range(0, MEMBERS, 50):
        yield [framed(Verb.JOIN, messages.Join("crowd", WIDE, f"m{n}")) for n in range(start, start + 50)]
    for start in range(0, WIDE_PARTITIONS, 500):
        yield [framed(Verb.COMMIT, messages.Commit(WIDE, n, 1, "committed", 1)) for n in range(start, start + 500)]
    for start in range(0, TOKENS, 500):
        yield [
            framed(Verb.STAGE, messages.Stage(b"%016d" % n, FULL, 0, writer="w", number=1), one)
            for n in range(start, start + 500)
        ]


def filling_cursus() -> Iterator[bytes]:
    """Yield Cursus frames for what only Cursus can create: events."""
    yield frame(f"CREATE topic={EVENTED} partitions=1 event_sourcing=true".encode())
    for n in range(1, EVENTS + 1):
        yield frame(f"APPEND_STREAM topic={EVENTED} key=k version={n} message=event".encode())
    yield frame(b"INIT_PRODUCER_ID transactional_id=x")
