"""Transactions over Cursus: responses (spec: cursus#transactions), fencing, restarts, and what readers see."""

from __future__ import annotations

from hashlib import sha256

import pytest

from polywire.broker.settings import BrokerSettings
from tests.unit.protocols.cursus.dialogue import Dialogue, World
from tests.unit.protocols.cursus.test_events import unpacked

T1 = "transactional_id=T1"
PRODUCER = "txn-" + sha256(b"T1").hexdigest()[:16]


def who(epoch: int = 0) -> str:
    return f"{T1} producerId={PRODUCER} epoch={epoch}"


@pytest.fixture
def peer() -> Dialogue:
    peer = World().connect()
    peer.ask("CREATE topic=tx partitions=2")
    return peer


def init(peer: Dialogue, epoch: int = 0) -> None:
    assert peer.ask(f"INIT_PRODUCER_ID {T1}") == f"OK {T1} producerId={PRODUCER} epoch={epoch}"


def begin(peer: Dialogue, epoch: int = 0) -> None:
    assert peer.ask(f"BEGIN_TXN {who(epoch)}") == f"OK {T1} state=open producerId={PRODUCER} epoch={epoch}"


def publish(peer: Dialogue, sequence: int, message: str, *, partition: int = 0, epoch: int = 0) -> str:
    return peer.ask(f"TXN_PUBLISH {who(epoch)} topic=tx partition={partition} seqNum={sequence} message={message}")


def stored(peer: Dialogue, partition: int = 0) -> list[bytes]:
    (body,) = peer.say(f"CONSUME topic=tx partition={partition} offset=0 member=m".encode())
    return [message["payload"] for message in unpacked(body)]


def test_records_are_visible_after_the_commit_only(peer: Dialogue) -> None:
    init(peer)
    assert peer.ask(f"TXN_STATUS {T1}") == f"OK {T1} state=aborted messages=0 offsets=0"
    begin(peer)
    assert publish(peer, 1, "one") == f"OK {T1} staged_messages=1 topic=tx partition=0"
    assert publish(peer, 2, "two", partition=1) == f"OK {T1} staged_messages=1 topic=tx partition=1"
    assert publish(peer, 3, "three") == f"OK {T1} staged_messages=1 topic=tx partition=0"
    assert peer.ask("TXN_STATUS txn=T1") == f"OK {T1} state=open messages=3 offsets=0"
    assert stored(peer) == stored(peer, 1) == []
    done = f"OK {T1} state=committed messages=3 offsets=0"
    assert peer.ask(f"END_TXN {who()} result=commit") == done
    assert (stored(peer), stored(peer, 1)) == ([b"one", b"three"], [b"two"])
    assert peer.ask(f"END_TXN {who()}") == done  # repeated, and nothing is stored twice
    assert peer.ask(f"TXN_STATUS {T1}") == f"OK {T1} state=committed messages=3 offsets=0"
    assert (stored(peer), stored(peer, 1)) == ([b"one", b"three"], [b"two"])
    assert peer.ask(f"END_TXN {who()} result=abort") == f"ERROR: transaction_already_committed {T1}"
    (body,) = peer.say(b"CONSUME topic=tx partition=0 offset=1 member=m isolation_level=read_uncommitted")
    (last,) = unpacked(body)
    assert (last["offset"], last["producer"], last["payload"]) == (1, PRODUCER.encode(), b"three")


def test_an_aborted_transaction_leaves_nothing(peer: Dialogue) -> None:
    init(peer)
    begin(peer)
    publish(peer, 1, "one")
    for _ in range(2):
        assert peer.ask(f"END_TXN {who()} result=abort") == f"OK {T1} state=aborted"
    assert peer.ask(f"END_TXN {who()} result=commit") == f"ERROR: transaction_aborted {T1}"
    assert publish(peer, 2, "two") == 'ERROR: transaction_publish_failed reason="transaction T1 is aborted"'
    assert stored(peer) == []


def test_an_epoch_can_have_consecutive_transactions(peer: Dialogue) -> None:
    init(peer)
    for number in range(3):
        begin(peer)
        begin(peer)  # lost responses are requested again
        publish(peer, 1, f"m{number}")
        refused = f"ERROR: producer_reinitialization_required {T1} epoch=0"
        assert peer.ask(f"BEGIN_TXN {who()}") == refused
        assert peer.ask(f"END_TXN {who()}").startswith("OK")
    assert stored(peer) == [b"m0", b"m1", b"m2"]


def test_a_duplicate_record_is_staged_once_and_counted_per_partition(peer: Dialogue) -> None:
    init(peer)
    begin(peer)
    for _ in range(2):
        assert publish(peer, 1, "p0").startswith("OK")
        assert publish(peer, 1, "p1", partition=1).startswith("OK")  # the reference counts per partition
    for sequence in (2, 2):
        text = f"TXN_PUBLISH {who()} topic=tx seqNum={sequence} message=any"
        assert peer.ask(text) == f"OK {T1} staged_messages=1 topic=tx partition=1"  # without a partition: by sequence
    assert peer.ask(f"END_TXN {who()}") == f"OK {T1} state=committed messages=3 offsets=0"
    assert (stored(peer), stored(peer, 1)) == ([b"p0"], [b"p1", b"any"])


def test_a_new_epoch_fences_the_old_one_and_aborts_its_transaction(peer: Dialogue) -> None:
    init(peer)
    begin(peer)
    publish(peer, 1, "lost")
    init(peer, epoch=1)
    epochs = f"{T1} current_epoch=1 requested_epoch=0"
    fenced = f'reason="producer fenced {epochs}" hint=producer_fenced'
    assert publish(peer, 2, "late") == f"ERROR: transaction_publish_failed {fenced}"
    assert peer.ask(f"BEGIN_TXN {who()}") == f"ERROR: transaction_begin_failed {fenced}"
    assert peer.ask(f"END_TXN {who()}") == f"ERROR: producer_fenced {epochs}"
    assert peer.ask(f"END_TXN {who()} result=abort") == f"ERROR: producer_fenced {epochs}"
    begin(peer, epoch=1)
    publish(peer, 1, "new", epoch=1)
    assert peer.ask(f"END_TXN {who(1)}").startswith("OK")
    assert stored(peer) == [b"new"]


def test_errors_of_transaction_commands(peer: Dialogue) -> None:
    init(peer)
    for text, answer in (
        ("INIT_PRODUCER_ID topic=tx", "missing_transactional_id command=INIT_PRODUCER_ID"),
        (f"BEGIN_TXN {T1}", "missing_producer_id command=BEGIN_TXN"),
        (f"BEGIN_TXN {T1} producerId=p", "missing_epoch command=BEGIN_TXN"),
        (f"BEGIN_TXN {T1} producerId=p epoch=x", "invalid_epoch command=BEGIN_TXN"),
        (
            f"BEGIN_TXN {T1} producerId=p epoch=0",
            f'transaction_begin_failed reason="producer mismatch {T1} expected={PRODUCER} got=p"',
        ),
        ("BEGIN_TXN txn=none producerId=p epoch=0", 'transaction_not_found reason="transaction none not found"'),
        ("TXN_STATUS transaction=none", 'transaction_not_found reason="transaction none not found"'),
        (f"TXN_PUBLISH {who()} seqNum=1 message=x", "missing_topic command=TXN_PUBLISH"),
        (
            f"TXN_PUBLISH {who()} topic=tx seqNum=0 message=x",
            'invalid_seq_num command=TXN_PUBLISH reason="seqNum must be greater than zero"',
        ),
        (f"TXN_PUBLISH {who()} topic=tx seqNum=1", "missing_message command=TXN_PUBLISH"),
        (f"TXN_PUBLISH {who()} topic=none seqNum=1 message=x", "topic_not_found topic=none"),
        (f"TXN_PUBLISH {who()} topic=__x seqNum=1 message=x", "internal_topic_write_forbidden topic=__x"),
        (f"TXN_PUBLISH {who()} topic=tx partition=9 seqNum=1 message=x", "partition_not_found partition=9"),
        (
            f"TXN_PUBLISH {who()} topic=tx seqNum=1 message=x",
            'transaction_publish_failed reason="transaction T1 is aborted"',
        ),
        (f"END_TXN {who()} result=maybe", "invalid_transaction_result value=maybe"),
        (f"END_TXN {who()} result=commit", f"transaction_aborted {T1}"),
    ):
        assert peer.ask(text) == f"ERROR: {answer}", text


def member(peer: Dialogue, name: str = "A") -> tuple[str, int]:
    words = peer.ask(f"JOIN_GROUP topic=tx group=G member={name}").split()
    return words[2].removeprefix("member="), int(words[1].removeprefix("generation="))


def test_offsets_are_committed_with_the_records(peer: Dialogue) -> None:
    a, generation = member(peer)
    scope = f"topic=tx group=G member={a} generation={generation}"
    init(peer)
    begin(peer)
    publish(peer, 1, "out")
    send = f"SEND_OFFSETS_TO_TXN {who()}"
    assert peer.ask(f"{send} {scope} P0:5,P1:2") == f"OK {T1} staged_offsets=2"
    assert peer.ask(f"{send} {scope} P0:7") == f"OK {T1} staged_offsets=1"
    assert peer.ask("FETCH_OFFSET topic=tx partition=0 group=G") == "OK offset=0"
    regression = "transaction offset regression group=G topic=tx partition=0 current=7 got=6"
    for rest, answer in (
        (scope, 'invalid_txn_offsets reason="missing offset pairs"'),
        (f"{scope} P0", 'invalid_txn_offsets reason="invalid_batch_commit_entry entry=\\"P0\\""'),
        (f"{scope} P9:1", f"NOT_OWNER partition=9 member={a} group=G generation=1"),
        (f"{scope} P0:6", f'transaction_offsets_failed reason="{regression}"'),
        (f"topic=tx group=G member=zz generation={generation} P0:9", "member_not_found member=zz group=G"),
    ):
        assert peer.ask(f"{send} {rest}") == f"ERROR: {answer}", rest
    words = peer.ask("JOIN_GROUP topic=tx group=H member=A").split()
    other = f"topic=tx group=H {words[2]} {words[1]} P0:9"
    holds = 'reason="transaction T1 holds offsets of group=G topic=tx"'
    assert peer.ask(f"{send} {other}") == f"ERROR: transaction_offsets_failed {holds}"
    assert peer.ask(f"END_TXN {who()}") == f"OK {T1} state=committed messages=1 offsets=2"
    assert peer.ask("FETCH_OFFSET topic=tx partition=0 group=G") == "OK offset=7"
    assert peer.ask("FETCH_OFFSET topic=tx partition=1 group=G") == "OK offset=2"
    assert stored(peer) == [b"out"]


def test_a_fenced_member_cannot_commit_but_can_abort(peer: Dialogue) -> None:
    a, generation = member(peer)
    init(peer)
    begin(peer)
    publish(peer, 1, "out")
    scope = f"topic=tx group=G member={a} generation={generation}"
    assert peer.ask(f"SEND_OFFSETS_TO_TXN {who()} {scope} P0:5").startswith("OK")
    member(peer, "B")
    stale = f"ERROR: GEN_MISMATCH current=2 requested=1 group=G member={a} hint=REBALANCE_REQUIRED"
    assert peer.ask(f"END_TXN {who()}") == stale
    assert (stored(peer), peer.ask("FETCH_OFFSET topic=tx partition=0 group=G")) == ([], "OK offset=0")
    assert peer.ask(f"END_TXN {who()} result=abort") == f"OK {T1} state=aborted"


def test_an_open_transaction_survives_a_restart(peer: Dialogue) -> None:
    a, generation = member(peer)
    init(peer)
    begin(peer)
    publish(peer, 1, "one")
    scope = f"topic=tx group=G member={a} generation={generation}"
    peer.ask(f"SEND_OFFSETS_TO_TXN {who()} {scope} P0:5")
    for _ in range(2):
        peer.world.restart()
    peer = peer.beside()
    assert peer.ask(f"TXN_STATUS {T1}") == f"OK {T1} state=open messages=1 offsets=1"
    assert publish(peer, 1, "one").startswith("OK")  # the response may have been lost
    assert publish(peer, 2, "two").startswith("OK")
    assert peer.ask(f"END_TXN {who()}") == f"OK {T1} state=committed messages=2 offsets=1"
    peer.world.restart()
    peer = peer.beside()
    assert stored(peer) == [b"one", b"two"]
    assert peer.ask("FETCH_OFFSET topic=tx partition=0 group=G") == "OK offset=5"
    assert peer.ask(f"END_TXN {who()}") == f"OK {T1} state=committed messages=2 offsets=1"
    assert stored(peer) == [b"one", b"two"]
    init(peer, epoch=1)


def test_a_transaction_that_waits_too_long_is_aborted(peer: Dialogue) -> None:
    init(peer)
    begin(peer)
    publish(peer, 1, "one")
    peer.world.memory.advance(3700.0)
    peer = peer.beside()
    assert peer.ask(f"TXN_STATUS {T1}") == f"OK {T1} state=aborted messages=0 offsets=0"
    assert peer.ask(f"END_TXN {who()}") == f"ERROR: transaction_aborted {T1}"


def test_a_topic_deleted_meanwhile_refuses_the_whole_commit(peer: Dialogue) -> None:
    peer.ask("CREATE topic=other partitions=1")
    init(peer)
    begin(peer)
    publish(peer, 1, "kept back")
    assert peer.ask(f"TXN_PUBLISH {who()} topic=other seqNum=2 message=x").startswith("OK")
    peer.ask("DELETE topic=other")
    assert peer.ask(f"END_TXN {who()}").startswith("ERROR: transaction_commit_failed state=open reason=")
    assert stored(peer) == []
    assert peer.ask(f"END_TXN {who()} result=abort") == f"OK {T1} state=aborted"


def test_limits() -> None:
    peer = World(broker=BrokerSettings(transactional_ids_max=1, transaction_batches_max=1)).connect()
    peer.ask("CREATE topic=tx partitions=1")
    init(peer)
    assert peer.ask("INIT_PRODUCER_ID transactional_id=T2").startswith("ERROR: init_producer_failed")
    begin(peer)
    assert publish(peer, 1, "one").startswith("OK")
    assert publish(peer, 2, "two").startswith("ERROR: transaction_publish_failed")
    peer.world.memory.advance(8 * 24 * 3600.0)
    peer = peer.beside()
    assert peer.ask("INIT_PRODUCER_ID transactional_id=T2").startswith("OK")
