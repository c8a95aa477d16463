"""Requests about topics of several shards over Cursus: responses match a single process, in request order."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polywire.broker.access import ConfiguredUser
from polywire.broker.broker import Broker
from polywire.broker.owners import ITSELF
from polywire.broker.passwords import hash_password
from polywire.broker.permissions import EVERYTHING
from polywire.broker.topics import Partition
from polywire.errors import Busy, ErrorCode, PeerError
from polywire.protocols.cursus.context import CursusSettings
from polywire.protocols.cursus.idempotence import BUSY_RETRY_S, BUSY_WAIT_S
from polywire.protocols.cursus.messages import enveloped, frame
from polywire.protocols.cursus.transactions import producer_of
from polywire.protocols.runtime.off_loop import LONG_BYTES
from polywire.routing import link
from polywire.types import TopicName
from tests.unit.protocols.cursus.sharded import WAIT_S, Conversation, MemoryShards, three
from tests.unit.protocols.cursus.test_produce import batch, messages

TOPICS = ("a", "bb", "ccc", "dddd")
TRANSACTION = f"transactional_id=T producerId={producer_of('T')}"
HASH = hash_password("wonderland")
LINES = (
    *(f"CREATE topic={topic} partitions=2" for topic in TOPICS),
    *(f"PUBLISH topic={topic} producerId=p message=m{number}" for topic in TOPICS for number in range(2)),
    *(f"CONSUME topic={topic} partition=0 offset=0 member=m" for topic in TOPICS),
    *(f"CONSUME {topic} 0 0" for topic in TOPICS),
    *(f"METADATA topic={topic}" for topic in TOPICS),
    *(f"DESCRIBE topic={topic}" for topic in TOPICS[:2]),
    *(f"LIST_OFFSETS topic={topic}" for topic in TOPICS[:2]),
    *(f"DELETE topic={topic}" for topic in TOPICS[:2]),
    *(f"REGISTER_GROUP topic={topic} group=g-{topic}" for topic in TOPICS),
    *(f"FETCH_OFFSET topic={topic} partition=0 group=g-{topic}" for topic in TOPICS),
    *(f"COMMIT {topic} g-{topic} 0 1" for topic in TOPICS[:3]),
    *(f"GROUP_STATUS group=g-{topic}" for topic in TOPICS),
    "SETGROUP g-bb",
    "NEGOTIATE version=1 features=structured_errors_v1",
    "LIST",
    "LIST_GROUPS",
    "TXN_STATUS transactional_id=T",
    "INIT_PRODUCER_ID transactional_id=T",
    f"BEGIN_TXN {TRANSACTION} epoch=0",
    f"TXN_PUBLISH {TRANSACTION} epoch=0 topic=bb seqNum=1 message=t",
    f"END_TXN {TRANSACTION} epoch=0",
    f"END_TXN {TRANSACTION} epoch=0 result=abort",
    "CONSUME topic=c* partition=0 offset=0 member=m",
    "CONSUME topic=nothing* partition=0 offset=0 member=m",
    "HELP",
    "NONSENSE x",
    "JOIN_GROUP",
    "CREATE topic=! partitions=1",
    "PUBLISH topic=nowhere",
)


def shard_with(conversation: Conversation, topic: str) -> int:
    found = conversation.shards.shard_of(topic)
    assert found is not None
    return found


BATCHES = (
    *(batch("bb", 0, messages(*numbers), idempotent=1) for numbers in ((1, 2, 3), (2, 3, 4), (4, 5), (1, 2), (7,))),
    *(batch("a", 0, messages(*numbers, epoch=2), idempotent=1) for numbers in ((1, 2), (3, 4))),
    batch("a", 0, messages(1, epoch=1), idempotent=1),
    batch("a", 0, [*messages(1, 2, pid="x"), *messages(1, pid="y"), *messages(3, pid="x")], idempotent=1),
    batch("dddd", 0, [*messages(1, pid="x"), *messages(5, pid="y")], idempotent=1),
    batch("ccc", 0, messages(1, 3, 9)),
    batch("ccc", 0, messages(1, 3, 9), idempotent=1),
    *(
        f"PUBLISH topic={topic} producerId=i isIdempotent=true seqNum={number} acks={acks} message=m".encode()
        for topic in ("a", "bb")
        for number, acks in ((1, "1"), (2, "0"), (2, "all"), (4, "1"))
    ),
)
BODIES = (*(line.encode() for line in LINES), *(line.encode() for line in LINES[:4]), *BATCHES)


@settings(max_examples=60, deadline=None)
@given(chosen=st.lists(st.sampled_from(BODIES), min_size=1, max_size=30), size=st.integers(20, 400))
def test_responses_match_a_single_process(chosen: list[bytes], size: int) -> None:
    data = b"".join(map(frame, chosen))
    heard = []
    for count in (1, 3):
        conversation = Conversation(MemoryShards(count))
        for at in range(0, len(data), size):
            conversation.feed(data[at : at + size])
            conversation.pass_by()
            for _ in range(len(chosen)):
                conversation.pass_by(0.6 if conversation._unread else 0)
        heard.append(conversation.heard())
    assert heard[0] == heard[1]


def test_topics_of_several_shards_are_listed_together() -> None:
    conversation = three(*TOPICS)
    assert sorted(len(broker.topics()) for broker in conversation.shards.brokers) == [1, 1, 2]
    assert conversation.ask("LIST") == "OK count=4 topics=a,bb,ccc,dddd"
    other = Conversation(conversation.shards)
    other.say(enveloped("x", b"HELP"))
    other.heard()
    assert other.ask("LIST") == "a, bb, ccc, dddd"


@pytest.mark.parametrize("text", ["LIST", "CONSUME topic=* partition=0 offset=0 member=m"])
def test_topics_are_listed_once_all_processes_have_reported_theirs(text: str) -> None:
    shards = MemoryShards(3, settled=False)
    broker = shards.brokers[1]
    broker.make_topic(TopicName.parse("b"), 1, then=lambda _: None, done=lambda _: None)
    conversation = Conversation(shards)
    conversation.feed(frame(text.encode()))
    assert conversation.heard() == []
    conversation.pass_by()
    assert len(conversation.heard()) == 1
    assert conversation.ask("LIST").endswith("b")


def test_clients_are_directed_to_the_address_they_used() -> None:
    conversation = three("a", "b", "c")
    for topic in ("a", "b", "c"):
        assert "leaders=10.0.0.7:9000 " in conversation.ask(f"METADATA topic={topic}")
        assert '"leader":"10.0.0.7:9000"' in conversation.ask(f"PUBLISH topic={topic} producerId=p message=m")
    assert "host=10.0.0.7 port=9000" in conversation.ask("FIND_COORDINATOR group=g")


class _Places:
    """Implements ``Places`` for a process: its own port may be advertised, or is not stable."""

    def __init__(self, own: int, *, is_reported: bool) -> None:
        self._own = own
        self._is_reported = is_reported

    def lasting(self, at: tuple[str, int], /) -> tuple[str, int]:
        return at if at[1] == 9000 else ("shared.example", 9000)

    def alone(self, at: tuple[str, int], /) -> tuple[str, int]:
        return (at[0], self._own) if self._is_reported else at


@pytest.mark.parametrize("is_reported", [False, True])
@pytest.mark.parametrize("came_to", [("10.0.0.7", 9000), ("10.0.0.7", 4711)])
def test_clients_are_directed_to_stable_addresses(is_reported: bool, came_to: tuple[str, int]) -> None:
    """If leaders have their own address it is named for each topic; everything else uses the shared address."""

    def places(shard: int) -> _Places:
        return _Places(9100 + 100 * shard, is_reported=is_reported)

    conversation = Conversation(MemoryShards(3, places=places))
    conversation.output.local = came_to
    host = "10.0.0.7" if came_to[1] == 9000 else "shared.example"
    for topic in TOPICS:
        assert conversation.ask(f"CREATE topic={topic} partitions=2").startswith("OK")
        port = 9100 + 100 * shard_with(conversation, topic) if is_reported else 9000
        leaders = f" leaders={host}:{port},{host}:{port} "
        assert leaders in conversation.ask(f"METADATA topic={topic}")
        assert f'"leader":"{host}:9000"' in conversation.ask(f"PUBLISH topic={topic} producerId=p message=m")
    assert f"host={host} port=9000" in conversation.ask("FIND_COORDINATOR group=g")


def test_batches_are_forwarded_and_acknowledged_in_order() -> None:
    conversation = three("a", "b", "c")
    bodies = [batch(topic, 0, messages(2, 3)) for _ in range(3) for topic in ("c", "a", "b", "c")]
    conversation.say(*bodies)
    offsets = [offset_in(answer) for answer in conversation.heard()]
    assert offsets == [1, 1, 1, 3, 5, 3, 3, 7, 9, 5, 5, 11]


def test_a_long_batch_is_forwarded() -> None:
    conversation = three("a", "b")
    long = messages(1)
    long[0]["payload"] = b"x" * (LONG_BYTES + 1)
    conversation.say(batch("b", 0, long))
    end = time.monotonic() + WAIT_S
    while not (heard := conversation.heard()):
        assert time.monotonic() < end
        conversation.pass_by()
    assert heard[0].startswith(b'{"status":"OK","last_offset":0')
    conversation.say(b"CONSUME topic=b partition=0 offset=0 member=m")
    assert b"x" * LONG_BYTES in conversation.heard()[0]


@pytest.mark.parametrize("packing", ["gzip", "lz4", "zstd", "snappy"])
def test_compressed_requests_get_compressed_responses(packing: str) -> None:
    from polywire.protocols.cursus.compression import algorithm

    pack = algorithm(packing)
    shards = MemoryShards(3, CursusSettings(compression=packing))
    conversation = Conversation(shards)
    for topic in ("a", "b"):
        conversation.say(pack.compress(f"CREATE {topic}".encode()))
    conversation.say(pack.compress(b"PUBLISH b hello"), pack.compress(b"CONSUME b 0 0"), pack.compress(b"LIST"))
    heard = [bytes(pack.expand(memoryview(body), 1000)) for body in conversation.heard()]
    assert heard[2:] == ["\U0001f4e4 Published to 'b'".encode(), b"hello", b"a, b"]


def test_groups_belong_to_the_shard_of_their_topic() -> None:
    conversation = three("a", "b", "c")
    joined = conversation.ask("JOIN_GROUP topic=b group=g member=m")
    member = joined.split("member=")[1].split()[0]
    who = f"topic=b group=g member={member} generation={joined.split('generation=')[1].split()[0]}"
    assert conversation.ask(f"SYNC_GROUP {who}") == joined
    assert conversation.ask(f"HEARTBEAT {who}").startswith("OK")
    assert conversation.ask(f"COMMIT_OFFSET {who} partition=0 offset=7") == "OK"
    assert conversation.ask("FETCH_OFFSET topic=b group=g partition=0") == "OK offset=7"
    assert '"topic_name":"b"' in conversation.ask("GROUP_STATUS group=g")
    assert "not found" in conversation.ask("GROUP_STATUS group=h")
    assert conversation.ask("JOIN_GROUP topic=c group=h member=m").startswith("OK")
    assert conversation.ask("LIST_GROUPS") == "OK count=2 groups=g,h"
    assert conversation.ask(f"LEAVE_GROUP {who}").startswith("OK")


def test_the_group_of_a_connection_applies_in_every_shard() -> None:
    conversation = three("a", "b")
    conversation.say(*(b"PUBLISH topic=b producerId=p message=%d" % number for number in range(3)))
    conversation.heard()
    joined = conversation.ask("JOIN_GROUP topic=b group=mine member=m")
    who = joined.replace("OK ", "").rpartition(" assignments=")[0]
    assert conversation.ask(f"COMMIT_OFFSET topic=b group=mine partition=0 offset=2 {who}") == "OK"
    conversation.ask("SETGROUP mine")
    conversation.say(b"CONSUME topic=b partition=0 member=m autoOffsetReset=earliest")
    (body,) = conversation.heard()
    assert body.count(b"\0\0\0\x01") >= 1
    assert b"2" in body
    assert b"\x011\0" in body


def test_errors_have_their_class_if_negotiated() -> None:
    conversation = three("a", "b")
    assert "class=" not in conversation.ask("LIST_OFFSETS topic=b partition=9")
    conversation.ask("NEGOTIATE version=1 features=structured_errors_v1")
    assert "class=not_found" in conversation.ask("LIST_OFFSETS topic=b partition=9")


# Streams


def test_a_stream_comes_from_the_shard_of_its_topic() -> None:
    conversation = three("a", "b")
    conversation.ask("PUBLISH topic=b producerId=p message=one")
    conversation.say(b"STREAM topic=b partition=0 group=g offset=0")
    assert b"one" in conversation.heard()[0]
    writer = Conversation(conversation.shards)
    writer.ask("PUBLISH topic=b producerId=p message=two")
    conversation.pass_by()
    assert b"two" in conversation.heard()[0]
    conversation.pass_by(5.1)
    assert conversation.heard() == [b""], "a keepalive"
    writer.ask("DELETE topic=b")
    conversation.pass_by()
    assert conversation.heard() == [b"STREAM_CONTROL type=CLOSE reason=removed offset=2"]
    assert conversation.ask("LIST") == "OK count=1 topics=a", "the connection accepts requests again"


@pytest.mark.parametrize("own", [0, 1, 2])
def test_a_stream_is_replaced_by_one_on_another_connection(own: int) -> None:
    conversation = three("a", "b")
    conversation.say(b"STREAM topic=b partition=0 group=g offset=0")
    conversation.pass_by(0.001)
    other = Conversation(conversation.shards, own)
    other.say(b"STREAM topic=b partition=0 group=g offset=0")
    conversation.pass_by()
    assert conversation.heard() == [b"STREAM_CONTROL type=CLOSE reason=replaced offset=0"]
    conversation.ask("PUBLISH topic=b producerId=p message=m")
    other.pass_by()
    assert len(other.heard()) == 1, "the newer stream continues"
    other.session.close()
    conversation.pass_by()
    assert [factory.state.stream_count for factory in conversation.shards.cursus] == [0, 0, 0]


def test_the_newer_of_two_streams_remains() -> None:
    """Each process has opened its stream before it knows the other one."""
    conversation = three("a", "b")
    other = Conversation(conversation.shards, 1)
    request = frame(b"STREAM topic=a partition=0 group=g offset=0")
    other.feed(request)
    conversation.feed(request)
    for one in (conversation, other):
        one.pass_by()
    closed = b"STREAM_CONTROL type=CLOSE reason=replaced offset=0"
    assert (conversation.heard(), other.heard()) == ([closed], [])


def test_a_refused_stream_leaves_the_connection_usable() -> None:
    conversation = three("a", "b")
    assert conversation.ask("STREAM topic=b partition=9 group=g").startswith("ERROR: command_failed")
    assert conversation.ask("LIST") == "OK count=2 topics=a,b"


def test_no_records_are_read_for_a_client_that_does_not_read_its_stream() -> None:
    conversation = three("a", "b")
    conversation.say(b"STREAM topic=b partition=0 group=g offset=0")
    conversation.output.backlog = conversation.output.backlog_max + 1
    Conversation(conversation.shards).ask("PUBLISH topic=b producerId=p message=m")
    conversation.pass_by()
    assert conversation.heard() == []
    conversation.output.backlog = 0
    conversation.session.drained()
    conversation.pass_by()
    assert len(conversation.heard()) == 1


def test_a_stream_behind_the_retention_of_another_process_reports_its_bounds() -> None:
    conversation = three("a", "b")
    for number in range(3):
        conversation.ask(f"PUBLISH topic=b producerId=p message={number}")
    conversation.say(b"STREAM topic=b partition=0 group=g offset=3")
    conversation.output.backlog = conversation.output.backlog_max  # nothing is read for the client
    broker = conversation.shards.brokers[1]
    for number in range(3, 6):
        Conversation(conversation.shards, 1).ask(f"PUBLISH topic=b producerId=p message={number}")
    conversation.pass_by()
    broker.trim_partition(broker.topic("b").partitions[0], 5, done=lambda _: None)
    conversation.shards.loop.run_due()
    conversation.output.backlog = 0
    conversation.session.drained()
    conversation.pass_by()
    bounds = b"requested=3 earliest=5 latest=6"
    assert conversation.heard() == [b"STREAM_CONTROL type=CLOSE reason=offset_out_of_range offset=3 " + bounds]


def test_a_stream_continues_after_a_lost_link() -> None:
    conversation = three("a", "b")
    conversation.say(b"STREAM topic=b partition=0 group=g offset=0")
    conversation.shards.link(0, 1).break_off()
    conversation.pass_by()
    Conversation(conversation.shards, 2).ask("PUBLISH topic=b producerId=p message=m")
    conversation.pass_by()
    assert len(conversation.heard()) == 1


def test_a_stream_of_a_lost_process_closes_the_connection() -> None:
    conversation = three("a", "b")
    conversation.say(b"STREAM topic=b partition=0 group=g offset=0")
    conversation.shards.link(0, 1).break_off()  # the stream asks the process again, over a new link
    with pytest.raises(PeerError):
        conversation.shards.links[-1].break_off()


# Transactions


def begun(conversation: Conversation, epoch: int) -> str:
    """Begin a transaction of the id T, and return the words that identify its producer."""
    assert conversation.ask("INIT_PRODUCER_ID transactional_id=T").endswith(f"epoch={epoch}")
    who = f"{TRANSACTION} epoch={epoch}"
    assert "state=open" in conversation.ask(f"BEGIN_TXN {who}")
    return who


def records(conversation: Conversation, topic: str) -> bytes:
    conversation.say(f"CONSUME topic={topic} partition=0 offset=0 member=m".encode())
    return conversation.heard()[0]


@pytest.mark.parametrize("own", range(3))
def test_a_transaction_is_atomic_over_the_topics_of_all_processes(own: int) -> None:
    shards = three("a", "b", "c").shards
    conversation, other = Conversation(shards, own), Conversation(shards, (own + 1) % 3)
    for epoch in range(3):
        who = begun(conversation, epoch)
        for number, topic in enumerate("abc", 1):
            asked = f"TXN_PUBLISH {who} topic={topic} seqNum={number} message={epoch}"
            assert other.ask(asked).startswith("OK")
            assert conversation.ask(asked).startswith("OK"), "a repeat"
            assert f"state=open messages={number} " in conversation.ask("TXN_STATUS transactional_id=T")
        commits = epoch != 1
        assert [records(conversation, topic).count(bytes([48 + epoch]) + bytes(16)) for topic in "abc"] == [0, 0, 0]
        done = f"OK transactional_id=T state={'committed messages=3 offsets=0' if commits else 'aborted'}"
        for asker in (conversation, other):
            assert asker.ask(f"END_TXN {who} result={'commit' if commits else 'abort'}") == done
        assert [records(other, topic).count(bytes([48 + epoch]) + bytes(16)) for topic in "abc"] == [commits] * 3
        assert conversation.ask("TXN_STATUS transactional_id=T").startswith(done)
    assert conversation.ask(f"BEGIN_TXN {TRANSACTION} epoch=1").startswith("ERROR: transaction_begin_failed")


def test_several_transactions_of_one_epoch_do_not_mix() -> None:
    conversation = three("a", "b", "c")
    who = begun(conversation, 0)
    for number in range(1, 4):
        for topic in "abc":
            assert conversation.ask(f"TXN_PUBLISH {who} topic={topic} seqNum=1 message={number}").startswith("OK")
        result = "abort" if number == 2 else "commit"
        assert conversation.ask(f"END_TXN {who} result={result}").startswith("OK")
        assert conversation.ask(f"BEGIN_TXN {who}").startswith("OK")
    for topic in "abc":
        found = records(conversation, topic)
        assert [found.count(b"%d" % number + bytes(16)) for number in (1, 2, 3)] == [1, 0, 1]


def test_a_fenced_producer_stages_nothing_in_any_process() -> None:
    conversation = three("a", "b", "c")
    old = begun(conversation, 0)
    assert conversation.ask(f"TXN_PUBLISH {old} topic=b seqNum=1 message=old").startswith("OK")
    new = begun(conversation, 1)
    for topic in "abc":
        refused = conversation.ask(f"TXN_PUBLISH {old} topic={topic} seqNum=2 message=old")
        assert refused.startswith("ERROR: transaction_publish_failed")
        assert "producer_fenced" in refused
        assert conversation.ask(f"TXN_PUBLISH {new} topic={topic} seqNum=1 message=new").startswith("OK")
    assert conversation.ask(f"END_TXN {old}").startswith("ERROR: producer_fenced")
    assert "messages=3" in conversation.ask(f"END_TXN {new}")
    for topic in "abc":
        assert (b"new" in records(conversation, topic), b"old" in records(conversation, topic)) == (True, False)


def test_without_a_begun_transaction_no_process_stages_anything() -> None:
    conversation = three("a", "b", "c")
    who = f"{TRANSACTION} epoch=0"
    for topic in "abc":
        refused = conversation.ask(f"TXN_PUBLISH {who} topic={topic} seqNum=1 message=m")
        assert refused.startswith("ERROR: transaction_not_found")
    conversation.ask("INIT_PRODUCER_ID transactional_id=T")
    for topic in "abc":
        refused = conversation.ask(f"TXN_PUBLISH {who} topic={topic} seqNum=1 message=m")
        assert refused == 'ERROR: transaction_publish_failed reason="transaction T is aborted"'


@pytest.mark.parametrize("topic", ["a", "b", "c"])
def test_the_generation_of_a_member_is_checked_again_at_the_commit(topic: str) -> None:
    conversation = three("a", "b", "c")
    conversation.ask(f"JOIN_GROUP topic={topic} group=g member=m")
    [view] = [view for broker in conversation.shards.brokers for view in broker.groups.views(topic)]
    [member] = view.members
    who = begun(conversation, 0)
    for other in "abc":
        assert conversation.ask(f"TXN_PUBLISH {who} topic={other} seqNum=1 message=m").startswith("OK")
    fields = f"topic={topic} group=g member={member.id} generation={view.generation}"
    staged = conversation.ask(f"SEND_OFFSETS_TO_TXN {who} {fields} P0:7")
    assert staged == "OK transactional_id=T staged_offsets=1"
    conversation.ask(f"JOIN_GROUP topic={topic} group=g member=n")
    refused = conversation.ask(f"END_TXN {who}")
    assert refused.startswith("ERROR: GEN_MISMATCH"), refused
    assert "state=open messages=3 offsets=1" in conversation.ask("TXN_STATUS transactional_id=T")
    assert conversation.ask(f"END_TXN {who} result=abort").startswith("OK")
    assert [b"m" + bytes(16) in records(conversation, other) for other in "abc"] == [False] * 3


@pytest.mark.parametrize("topic", ["a", "b", "c"])
def test_offsets_are_committed_with_the_records_of_all_processes(topic: str) -> None:
    conversation = three("a", "b", "c")
    conversation.ask(f"JOIN_GROUP topic={topic} group=g member=m")
    [view] = [view for broker in conversation.shards.brokers for view in broker.groups.views(topic)]
    [member] = view.members
    who = begun(conversation, 0)
    for other in "abc":
        conversation.ask(f"TXN_PUBLISH {who} topic={other} seqNum=1 message=m")
    conversation.ask(
        f"SEND_OFFSETS_TO_TXN {who} topic={topic} group=g member={member.id} generation={view.generation} P0:7"
    )
    offset = f"FETCH_OFFSET topic={topic} group=g partition=0"
    before = conversation.ask(offset)
    assert conversation.ask(f"END_TXN {who}") == "OK transactional_id=T state=committed messages=3 offsets=1"
    assert "7" not in before
    assert "7" in conversation.ask(offset)


def test_a_new_epoch_is_above_those_of_every_shard() -> None:
    """Another shard may have coordinated the id when there were fewer processes."""
    conversation = three("a", "b")
    brokers = conversation.shards.brokers
    other = (conversation.shards.shard_by_hash("T") + 1) % 3
    for _ in range(3):
        brokers[other].transactions.begin_epoch("T", done=None)
    assert conversation.ask("INIT_PRODUCER_ID transactional_id=T").endswith("epoch=3")
    assert conversation.ask("INIT_PRODUCER_ID transactional_id=T").endswith("epoch=4")


def test_a_pattern_reads_topics_of_all_shards() -> None:
    conversation = three("a1", "b1", "b2", "x", "a2")
    for topic in ("a1", "b1", "a2"):
        conversation.ask(f"PUBLISH topic={topic} producerId=p message=in-{topic}")
    conversation.say(b"CONSUME topic=?1 partition=0 offset=0 member=m")
    (body,) = conversation.heard()
    assert -1 < body.find(b"in-a1") < body.find(b"in-b1")
    assert b"in-a2" not in body
    conversation.feed(frame(b"CONSUME topic=x* partition=0 offset=0 member=m wait_ms=9000"))
    conversation.pass_by()
    assert conversation.heard() == [], "it waits"
    Conversation(conversation.shards).ask("PUBLISH topic=x producerId=p message=came")
    conversation.pass_by()
    assert b"came" in conversation.heard()[0]
    assert conversation.ask("CONSUME topic=a* partition=7 offset=0 member=m").startswith("ERROR: command_failed")


def test_a_pattern_begins_at_the_committed_offsets_of_each_shard() -> None:
    conversation = three("a1", "b1", "c1")
    for topic in ("a1", "b1", "c1"):
        for number in range(2):
            conversation.ask(f"PUBLISH topic={topic} producerId=p message={topic}-{number}")
        assert conversation.ask(f"COMMIT {topic} default-group 0 1") == "OK"
    conversation.say(b"CONSUME topic=*1 partition=0 member=m autoOffsetReset=earliest")
    (body,) = conversation.heard()
    assert [body.count(f"{topic}-{n}".encode()) for topic in ("a1", "b1", "c1") for n in (0, 1)] == [0, 1] * 3


# Lost processes and permissions


def test_a_lost_process_closes_connections_with_pending_writes() -> None:
    conversation = three("a", "b")
    conversation.feed(frame(batch("b", 0, messages(1))))
    with pytest.raises(PeerError):
        conversation.shards.link(0, 1).break_off()


@pytest.mark.parametrize("text", ["DESCRIBE topic=b", "STREAM topic=b partition=0 group=g", "CONSUME b 0 0"])
def test_pending_reads_of_a_lost_process_fail_and_can_be_retried(text: str) -> None:
    conversation = three("a", "b")
    conversation.ask("LIST")
    conversation.feed(frame(text.encode()))
    conversation.shards.link(0, 1).break_off()
    conversation.pass_by()
    assert conversation.heard()[0].startswith(b"ERROR: request_cancelled")
    assert conversation.ask("DESCRIBE topic=b").startswith("{")


def test_a_lost_process_without_pending_requests_closes_no_connection() -> None:
    conversation = three("a", "b")
    conversation.shards.link(0, 1).break_off()
    assert conversation.ask("DESCRIBE topic=b").startswith("{")


def test_batches_wait_while_too_many_are_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "UNANSWERED_BYTES_MAX", 1)
    conversation = three("a", "b")
    for number in range(3):
        conversation.feed(frame(batch("b", 0, messages(number + 1), idempotent=1)))
    conversation.feed(frame(b"PUBLISH topic=b producerId=q message=last"))
    for _ in range(20):
        conversation.pass_by(BUSY_RETRY_S)
    offsets = [offset_in(answer) for answer in conversation.heard()]
    assert offsets == [0, 1, 2, 3]


def test_links_end_with_the_connection() -> None:
    conversation = three("a", "b")
    conversation.feed(frame(b"CONSUME topic=b partition=0 offset=0 member=m wait_ms=9000"))
    conversation.shards.loop.run_due()
    conversation.session.close()
    conversation.shards.loop.run_due()
    assert conversation.heard() == []


def test_requests_before_the_end_of_the_stream_are_answered() -> None:
    conversation = three("a", "b")
    conversation.feed(frame(b"DESCRIBE topic=b"))
    conversation.session.finish(memoryview(frame(b"DESCRIBE topic=b") + b"\0"))
    conversation.shards.loop.run_due()
    assert len(conversation.heard()) == 2
    assert conversation.output.closed


def test_unauthenticated_requests_are_not_forwarded() -> None:
    conversation = three("a", "b")
    close_doors(conversation.shards)
    other = Conversation(conversation.shards)
    links = len(conversation.shards.links)
    for text in ("DESCRIBE topic=b", "LIST", "STREAM topic=b partition=0 group=g"):
        assert other.ask(text).startswith("ERROR: authentication_required")
    other.say(batch("b", 0, messages(1)))
    assert other.heard()[0].startswith(b"ERROR: authentication_required")
    assert other.finally_asked("DESCRIBE topic=b principal=alice auth_token=x").startswith("ERROR: authentication_fail")
    assert len(conversation.shards.links) == links


def test_a_login_applies_in_every_shard() -> None:
    conversation = three("a", "b", "c")
    close_doors(conversation.shards)
    other = Conversation(conversation.shards)
    assert other.finally_asked("AUTH principal=alice token=wonderland").startswith("OK")
    assert other.finally_asked("DESCRIBE topic=b").startswith("{")
    assert other.finally_asked("LIST") == "OK count=3 topics=a,b,c"
    assert other.finally_asked("PUBLISH topic=c producerId=p message=m").startswith('{"status":"OK"')
    assert other.finally_asked("AUTH principal=alice token=wrong").startswith("ERROR: authentication_failed")
    assert other.ask("DESCRIBE topic=b").startswith("ERROR: authentication_required")


def test_inline_credentials_are_verified_and_forwarded() -> None:
    conversation = three("a", "b")
    close_doors(conversation.shards)
    other = Conversation(conversation.shards)
    words = "principal=alice auth_token=wonderland"
    assert other.finally_asked(f"DESCRIBE topic=b {words}").startswith("{")
    assert other.ask("DESCRIBE topic=b").startswith("ERROR: authentication_required")
    who = f"{TRANSACTION} epoch=0"
    assert other.finally_asked(f"INIT_PRODUCER_ID transactional_id=T {words}").endswith("epoch=0")
    assert other.finally_asked(f"BEGIN_TXN {who} {words}").startswith("OK")
    assert other.finally_asked(f"TXN_PUBLISH {who} topic=b seqNum=1 message=m {words}").startswith("OK")
    assert "state=committed messages=1" in other.finally_asked(f"END_TXN {who} {words}")


def test_all_processes_execute_a_request_as_its_client() -> None:
    """The second process is asked after another client's request was admitted."""
    conversation = three("a", "b", "c")
    for broker in conversation.shards.brokers:
        broker.access.configure([ConfiguredUser(name, HASH, EVERYTHING) for name in ("alice", "bob")])
    alice, bob = Conversation(conversation.shards), Conversation(conversation.shards)
    for name, one in (("alice", alice), ("bob", bob)):
        assert one.finally_asked(f"AUTH principal={name} token=wonderland").startswith("OK")
    bob.feed(frame(b"INIT_PRODUCER_ID transactional_id=T"))
    alice.feed(frame(b"LIST_GROUPS"))
    for one in (bob, alice):
        one.pass_by()
    assert bob.heard()[0].endswith(b"epoch=0")
    broker = conversation.shards.brokers[conversation.shards.shard_by_hash("T")]
    found = broker.transactions.find("T", by=ITSELF)
    assert found is not None
    assert found.owner == broker.access.vouched("bob").user_id


def close_doors(shards: MemoryShards) -> None:
    for broker in shards.brokers:
        broker.access.configure([ConfiguredUser("alice", HASH, EVERYTHING)])


def test_a_batch_waits_for_space_in_the_log_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = three("a", "b")
    full = full_logs(monkeypatch)
    bodies = [batch("b", 0, messages(number), idempotent=1) for number in (1, 2, 3)]
    conversation.say(*bodies, b"PUBLISH topic=b producerId=p isIdempotent=true seqNum=4 message=last")
    conversation.pass_by(BUSY_RETRY_S)
    assert conversation.heard() == []
    full.clear()
    conversation.pass_by(BUSY_RETRY_S)
    assert [offset_in(answer) for answer in conversation.heard()] == [0, 1, 2, 3]


def test_batches_that_found_no_space_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = three("a", "b")
    full_logs(monkeypatch)
    conversation.say(batch("b", 0, messages(1), idempotent=1), batch("b", 0, messages(2), idempotent=1))
    conversation.pass_by(BUSY_WAIT_S)
    for _ in range(3):
        conversation.pass_by(BUSY_RETRY_S)
    assert [b'"status":"ERROR"' in answer for answer in conversation.heard()] == [True, True]


def test_a_repeated_payload_is_dropped_in_the_process_of_its_topic() -> None:
    shards = MemoryShards(3, CursusSettings(repeats_s=60.0))
    first, second = Conversation(shards), Conversation(shards, 2)
    for topic in ("a", "b"):
        first.ask(f"CREATE topic={topic} partitions=1")
    for conversation in (first, second, first):
        assert conversation.ask("PUBLISH b same") == "\U0001f4e4 Published to 'b'"
    first.say(b"CONSUME b 0 0")
    assert first.heard() == [b"same"]


@pytest.mark.parametrize("own", [0, 1, 2])
def test_a_member_may_use_the_connections_of_all_processes(own: int) -> None:
    conversation = three("a", "b")
    other = Conversation(conversation.shards, own)
    joined = conversation.ask("JOIN_GROUP topic=b group=g member=m")
    who = joined.replace("OK ", "topic=b group=g ").rpartition(" assignments=")[0]
    assert other.ask(f"HEARTBEAT {who}").startswith("OK")
    assert other.ask("JOIN_GROUP topic=b group=g member=m") != joined, "the member has used its generation"
    assert '"member_count":2' in other.ask("GROUP_STATUS group=g")


@pytest.mark.parametrize("own", [0, 1, 2])
def test_events_have_one_version_in_all_processes(own: int) -> None:
    conversation = Conversation(MemoryShards(3))
    for topic in ("a", "b"):
        conversation.ask(f"CREATE topic={topic} partitions=2 event_sourcing=true")
    other = Conversation(conversation.shards, own)
    assert conversation.ask("APPEND_STREAM topic=b key=k version=1 message=one").startswith("OK version=1 offset=0")
    assert other.ask("APPEND_STREAM topic=b key=k version=1 message=two").startswith(
        "ERROR: version_conflict current=1"
    )
    assert other.ask("SAVE_SNAPSHOT topic=b key=k version=1 message=s").startswith("OK version=1")
    assert other.ask("APPEND_STREAM topic=b key=k version=2 message=two").startswith("OK version=2 offset=1")
    assert conversation.ask("STREAM_VERSION topic=b key=k") == "OK version=2"
    conversation.say(b"READ_STREAM topic=b key=k")
    head, events = conversation.heard()
    assert b'"count":1' in head
    assert b"two" in events


def test_a_topic_that_was_created_again_in_another_process_is_found() -> None:
    conversation = three("a", "b", "c")
    other = Conversation(conversation.shards, 2)
    conversation.ask("DELETE topic=b")
    conversation.shards.brokers[0].make_topic(TopicName.parse("b"), 1, then=lambda _: None, done=lambda _: None)
    other.say(b"PUBLISH topic=b producerId=p message=new", b"CONSUME topic=b partition=0 offset=0 member=m")
    assert b"new" in other.heard()[1]
    assert other.ask("DESCRIBE topic=b").startswith("{")


def test_names_that_are_not_utf8_are_refused_or_found_everywhere() -> None:
    conversation = three("a", "b")
    conversation.say(
        b"CONSUME topic=b partition=0 member=m group=\xff\xfe",
        b"PUBLISH topic=b producerId=\xff isIdempotent=true seqNum=1 message=m",
        b"PUBLISH topic=b\xff producerId=p message=m",
        b"APPEND_STREAM topic=b key=\xff version=1 message=m",
    )
    heard = conversation.heard()
    assert len(heard) == 4
    assert heard[0].startswith(b"ERROR")
    assert heard[2].startswith(b"ERROR")
    assert conversation.ask("LIST") == "OK count=2 topics=a,b"


def full_logs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let the logs of all processes accept no records. Return a list that can be cleared to end this."""
    full, produce = [True], Broker.produce

    def fill(broker: Broker, partition: Partition, batch: Any, **named: Any) -> None:
        if full:
            raise Busy(ErrorCode.BUSY, "full")
        produce(broker, partition, batch, **named)

    monkeypatch.setattr(Broker, "produce", fill)
    return full


def offset_in(answer: bytes) -> int:
    return int(answer.split(b'"last_offset":')[1].split(b",")[0])


def test_a_group_name_has_one_topic_in_all_processes() -> None:
    heard = []
    for count in (1, 3):
        shards = MemoryShards(count)
        peers = [Conversation(shards, own % count) for own in range(3)]
        steps = (
            *((0, f"CREATE topic={topic} partitions=2") for topic in TOPICS),
            (0, "REGISTER_GROUP topic=a group=g"),
            (1, "REGISTER_GROUP topic=bb group=g"),
            (2, "JOIN_GROUP topic=ccc group=g member=m"),
            (0, "FETCH_OFFSET topic=bb partition=0 group=g"),
            (1, "HEARTBEAT topic=bb group=g member=m generation=1"),
            (2, "SUBSCRIBE topic=bb group=g"),
            (1, "GROUP_STATUS group=g"),
            (0, "DELETE topic=a"),
            (2, "REGISTER_GROUP topic=bb group=g"),
            (1, "REGISTER_GROUP topic=ccc group=g"),
            (0, "LIST_GROUPS"),
        )
        heard.append([peers[own].ask(line) for own, line in steps])
    assert heard[0] == heard[1]
    assert sum("topic_not_assigned_to_group" in answer for answer in heard[1]) == 3, heard[1]
