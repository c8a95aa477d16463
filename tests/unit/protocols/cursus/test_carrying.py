"""Requests about topics of several shards over Cursus: responses match a single process, in request order."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polywire.broker.access import ConfiguredUser
from polywire.broker.broker import Broker
from polywire.broker.passwords import hash_password
from polywire.broker.permissions import EVERYTHING
from polywire.errors import PeerError
from polywire.protocols.cursus.context import CursusSettings
from polywire.protocols.cursus.factory import CarryingCursusFactory, CursusFactory, CursusLinkFactory
from polywire.protocols.cursus.messages import enveloped, frame
from polywire.protocols.cursus.transactions import producer_of
from polywire.protocols.runtime.off_loop import LONG_BYTES
from polywire.protocols.runtime.shards import KEY_BYTES
from tests.unit.protocols.cursus.test_produce import batch, messages
from tests.unit.protocols.polywire.peer import CapturedOutput
from tests.unit.protocols.shards_in_memory import MemoryShards, ShardedConversation

KEY = bytes(range(KEY_BYTES))
TOPICS = ("a", "bb", "ccc", "dddd")
TRANSACTION = f"transactional_id=T producerId={producer_of('T')}"
WAIT_S = 60.0
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


class Conversation(ShardedConversation):
    """One connection in front of ``count`` shards."""

    def __init__(self, count: int, shards: MemoryShards | None = None) -> None:
        shards = shards or make_shards(count)
        link = shards.factories[0]
        assert isinstance(link, CursusLinkFactory)
        own = link._inside
        output = CapturedOutput()
        output.local = ("10.0.0.7", 9000)
        super().__init__(shards, own if count == 1 else CarryingCursusFactory(own, shards), output)

    def say(self, *bodies: bytes) -> None:
        self.feed(b"".join(map(frame, bodies)))
        self.pass_by()
        if self._unread:
            self.pass_by(1.0)  # a write waits for its topic

    def heard(self) -> list[bytes]:
        """Return the bodies of the frames that arrived."""
        data, found = self.take(), []
        while data:
            size = int.from_bytes(data[:4], "big")
            found.append(data[4 : 4 + size])
            data = data[4 + size :]
        return found

    def ask(self, text: str) -> str:
        self.say(text.encode())
        (answer,) = self.heard()
        return answer.decode()

    def finally_asked(self, text: str) -> str:
        """The same for requests whose password is verified by a thread."""
        self.say(text.encode())
        end = time.monotonic() + WAIT_S
        while not (found := self.heard()):
            assert time.monotonic() < end
            self.pass_by()
            time.sleep(0.001)
        return found[0].decode()


def make_shards(count: int, cursus: CursusSettings | None = None) -> MemoryShards:
    return MemoryShards(lambda broker: CursusLinkFactory(CursusFactory(broker, cursus), KEY), count)


def three(*topics: str) -> Conversation:
    """Return three shards that own consecutive topics."""
    conversation = Conversation(3)
    for topic in topics:
        assert conversation.ask(f"CREATE topic={topic} partitions=1").startswith("OK")
    return conversation


def shard_with(conversation: Conversation, topic: str) -> int:
    found = conversation.shards.shard_of(topic)
    assert found is not None
    return found


@settings(max_examples=60, deadline=None)
@given(chosen=st.lists(st.sampled_from(LINES), min_size=1, max_size=30), size=st.integers(20, 400))
def test_responses_match_a_single_process(chosen: list[str], size: int) -> None:
    data = b"".join(frame(line.encode()) for line in chosen)
    heard = []
    for count in (1, 3):
        conversation = Conversation(count)
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
    other = Conversation(3, conversation.shards)
    other.say(enveloped("x", b"HELP"))
    other.heard()
    assert other.ask("LIST") == "a, bb, ccc, dddd"


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
    ports = iter((9100, 9200, 9300))

    def factory(broker: Broker) -> CursusLinkFactory:
        return CursusLinkFactory(CursusFactory(broker, places=_Places(next(ports), is_reported=is_reported)), KEY)

    conversation = Conversation(3, MemoryShards(factory, 3))
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
    offsets = [int(answer.split(b'"last_offset":')[1].split(b",")[0]) for answer in conversation.heard()]
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
    shards = make_shards(3, CursusSettings(compression=packing))
    conversation = Conversation(3, shards)
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
    writer = Conversation(3, conversation.shards)
    writer.ask("PUBLISH topic=b producerId=p message=two")
    conversation.pass_by()
    assert b"two" in conversation.heard()[0]
    conversation.pass_by(5.1)
    assert conversation.heard() == [b""], "a keepalive"
    writer.ask("DELETE topic=b")
    conversation.pass_by()
    assert conversation.heard() == [b"STREAM_CONTROL type=CLOSE reason=removed offset=2"]
    assert conversation.ask("LIST") == "OK count=1 topics=a", "the connection accepts requests again"


def test_a_stream_is_replaced_by_one_on_another_connection() -> None:
    conversation = three("a", "b")
    conversation.say(b"STREAM topic=b partition=0 group=g offset=0")
    other = Conversation(3, conversation.shards)
    other.say(b"STREAM topic=b partition=0 group=g offset=0")
    conversation.pass_by()
    assert conversation.heard() == [b"STREAM_CONTROL type=CLOSE reason=replaced offset=0"]
    other.session.close()
    conversation.pass_by()
    assert conversation.shards.factories[1]._inside.state.stream_count == 0  # type: ignore[attr-defined]


def test_a_refused_stream_leaves_the_connection_usable() -> None:
    conversation = three("a", "b")
    assert conversation.ask("STREAM topic=b partition=9 group=g").startswith("ERROR: command_failed")
    assert conversation.ask("LIST") == "OK count=2 topics=a,b"


def test_a_client_that_does_not_read_its_stream_is_not_read_from() -> None:
    conversation = three("a", "b")
    conversation.say(b"STREAM topic=b partition=0 group=g offset=0")
    conversation.output.backlog = conversation.output.backlog_max + 1
    writer = Conversation(3, conversation.shards)
    writer.ask("PUBLISH topic=b producerId=p message=m")
    conversation.pass_by()
    link = conversation.shards.links[-2]
    assert link.is_paused
    conversation.output.backlog = 0
    conversation.session.drained()
    assert not link.is_paused


def test_a_stream_of_a_lost_process_closes_the_connection() -> None:
    conversation = three("a", "b")
    conversation.say(b"STREAM topic=b partition=0 group=g offset=0")
    with pytest.raises(PeerError):
        conversation.shards.links[-1].break_off()


# Transactions


def test_a_transaction_is_committed_in_the_shard_of_its_topics() -> None:
    conversation = three("a", "b", "c")
    for topic, epoch in (("b", 0), ("c", 1), ("a", 2)):
        assert conversation.ask("INIT_PRODUCER_ID transactional_id=T").endswith(f"epoch={epoch}")
        who = f"{TRANSACTION} epoch={epoch}"
        assert "state=open" in conversation.ask(f"BEGIN_TXN {who}")
        assert conversation.ask(f"TXN_PUBLISH {who} topic={topic} seqNum=1 message=m").startswith("OK")
        assert "state=open messages=1" in conversation.ask("TXN_STATUS transactional_id=T")
        done = "OK transactional_id=T state=committed messages=1 offsets=0"
        assert conversation.ask(f"END_TXN {who}") == done
        assert conversation.ask(f"END_TXN {who}") == done
        assert conversation.ask("TXN_STATUS transactional_id=T") == done
        conversation.say(f"CONSUME topic={topic} partition=0 offset=0 member=m".encode())
        assert conversation.heard()[0].endswith(b"m" + bytes(16))
    assert conversation.ask(f"BEGIN_TXN {TRANSACTION} epoch=1").startswith("ERROR: transaction_begin_failed")


def test_a_transaction_over_several_shards_is_refused() -> None:
    conversation = three("a", "b", "c")
    conversation.ask("INIT_PRODUCER_ID transactional_id=T")
    who = f"{TRANSACTION} epoch=0"
    conversation.ask(f"BEGIN_TXN {who}")
    assert conversation.ask(f"TXN_PUBLISH {who} topic=b seqNum=1 message=m").startswith("OK")
    refused = conversation.ask(f"TXN_PUBLISH {who} topic=c seqNum=2 message=m")
    assert refused.startswith('ERROR: transaction_publish_failed reason="all topics of a transaction must belong to')
    other = Conversation(3, conversation.shards)
    assert other.ask(f"TXN_PUBLISH {who} topic=c seqNum=2 message=m").startswith("OK")
    refused = other.ask(f"END_TXN {who}")
    assert refused.startswith('ERROR: transaction_commit_failed state=open reason="the transaction has staged data')
    assert "state=aborted" in other.ask(f"END_TXN {who} result=abort")
    for topic in "bc":
        conversation.say(f"CONSUME topic={topic} partition=0 offset=0 member=m".encode())
        assert conversation.heard()[0].endswith(bytes(20)), "nothing is stored"


def test_a_new_epoch_is_above_those_of_every_shard() -> None:
    conversation = three("a", "b")
    broker = conversation.shards.brokers[1]
    for _ in range(3):
        broker.transactions.begin_epoch("T", done=None)
    assert conversation.ask("INIT_PRODUCER_ID transactional_id=T").endswith("epoch=3")
    found = [one.transactions.find("T") for one in conversation.shards.brokers]
    assert [one.epoch for one in found if one is not None] == [3, 3, 3]


def test_a_pattern_that_matches_several_shards_is_refused() -> None:
    conversation = three("a1", "b1", "b2", "x", "a2")
    assert conversation.ask("CONSUME topic=?1 partition=0 offset=0 member=m").startswith("ERROR: command_failed")
    conversation.say(b"PUBLISH topic=b1 producerId=p message=m", b"CONSUME topic=b1* partition=0 offset=0 member=m")
    assert b"b1*" in conversation.heard()[1]
    conversation.feed(frame(b"CONSUME topic=x* partition=0 offset=0 member=m wait_ms=9000"))
    conversation.pass_by()
    assert conversation.heard() == [], "it waits"
    Conversation(3, conversation.shards).ask("PUBLISH topic=x producerId=p message=came")
    conversation.pass_by()
    assert b"came" in conversation.heard()[0]


# Lost processes and permissions


def test_a_lost_process_closes_connections_with_pending_writes() -> None:
    conversation = three("a", "b")
    conversation.feed(frame(batch("b", 0, messages(1))))
    with pytest.raises(PeerError):
        conversation.shards.links[0].break_off()


@pytest.mark.parametrize(
    ("text", "link"), [("DESCRIBE topic=b", 0), ("LIST", 1), ("STREAM topic=b partition=0 group=g", -1)]
)
def test_pending_reads_of_a_lost_process_fail_and_can_be_retried(text: str, link: int) -> None:
    conversation = three("a", "b")
    conversation.ask("LIST")
    conversation.feed(frame(text.encode()))
    conversation.shards.links[link].break_off()
    conversation.pass_by()
    assert conversation.heard()[0].startswith(b"ERROR: request_cancelled")
    assert conversation.ask("DESCRIBE topic=b").startswith("{")


def test_a_lost_process_without_pending_requests_closes_no_connection() -> None:
    conversation = three("a", "b")
    conversation.shards.links[0].break_off()
    assert conversation.ask("DESCRIBE topic=b").startswith("{")


def test_requests_stop_when_a_shard_stops_reading() -> None:
    conversation = three("a", "b")
    conversation.shards.links[0].backlog = 1001
    assert conversation.session.paused()
    resumes = conversation.resumes
    conversation.shards.links[0].relieve()
    assert conversation.resumes == resumes + 1


def test_a_client_that_does_not_read_is_not_read_from() -> None:
    conversation = three("a", "b")
    conversation.output.backlog = conversation.output.backlog_max + 1
    conversation.session.paused()
    link = conversation.shards.links[0]
    conversation.output.backlog = 0
    conversation.feed(frame(b"DESCRIBE topic=b"))
    conversation.output.backlog = conversation.output.backlog_max + 1
    conversation.shards.loop.run_due()
    assert link.is_paused
    conversation.output.backlog = 0
    conversation.session.drained()
    assert not link.is_paused


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
    other = Conversation(3, conversation.shards)
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
    other = Conversation(3, conversation.shards)
    assert other.finally_asked("AUTH principal=alice token=wonderland").startswith("OK")
    assert other.finally_asked("DESCRIBE topic=b").startswith("{")
    assert other.finally_asked("LIST") == "OK count=3 topics=a,b,c"
    assert other.finally_asked("PUBLISH topic=c producerId=p message=m").startswith('{"status":"OK"')
    assert other.finally_asked("AUTH principal=alice token=wrong").startswith("ERROR: authentication_failed")
    assert other.ask("DESCRIBE topic=b").startswith("ERROR: authentication_required")


def test_inline_credentials_are_verified_and_forwarded() -> None:
    conversation = three("a", "b")
    close_doors(conversation.shards)
    other = Conversation(3, conversation.shards)
    words = "principal=alice auth_token=wonderland"
    assert other.finally_asked(f"DESCRIBE topic=b {words}").startswith("{")
    assert other.ask("DESCRIBE topic=b").startswith("ERROR: authentication_required")
    who = f"{TRANSACTION} epoch=0"
    assert other.finally_asked(f"INIT_PRODUCER_ID transactional_id=T {words}").endswith("epoch=0")
    assert other.finally_asked(f"BEGIN_TXN {who} {words}").startswith("OK")
    assert other.finally_asked(f"TXN_PUBLISH {who} topic=b seqNum=1 message=m {words}").startswith("OK")
    assert "state=committed messages=1" in other.finally_asked(f"END_TXN {who} {words}")


def close_doors(shards: MemoryShards) -> None:
    for broker in shards.brokers:
        broker.access.configure([ConfiguredUser("alice", HASH, EVERYTHING)])


def test_a_link_without_the_key_is_rejected() -> None:
    shards = make_shards(1)
    output = CapturedOutput()
    factory = CursusLinkFactory(shards.factories[0]._inside, bytes(KEY_BYTES))  # type: ignore[attr-defined]
    opening = b"\xf3CURSUS\1" + KEY
    assert factory.recognise(opening[:3]) is None
    assert factory.recognise(opening)
    assert not factory.recognise(b"V1|1|")
    with pytest.raises(PeerError):
        factory.open(output, lambda: None).receive(memoryview(opening))
