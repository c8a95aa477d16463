"""Consumer groups over Cursus: the worked exchange (spec: cursus#group-exchange), refusals and our own rules."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from polywire.broker.settings import BrokerSettings
from polywire.types import PositionKind
from tests.unit.protocols.cursus.dialogue import Dialogue, World


def joined(peer: Dialogue, name: str, *, topic: str = "g1", group: str = "G") -> tuple[str, int, str]:
    """Join; return the member id, the generation and the printed assignment."""
    answer = peer.ask(f"JOIN_GROUP topic={topic} group={group} member={name}")
    match = re.fullmatch(r"OK generation=(\d+) member=(\S+) assignments=(\[[\d ]*\])", answer)
    assert match is not None, answer
    return match[2], int(match[1]), match[3]


@pytest.fixture
def peer() -> Dialogue:
    peer = World().connect()
    peer.ask("CREATE topic=g1 partitions=3")
    return peer


def test_the_worked_exchange(peer: Dialogue) -> None:
    host = "host=127.0.0.1 port=9000"
    assert peer.ask("FIND_COORDINATOR group=G", "") == f"OK coordinator_id=standalone coordinator_type=group {host}"
    a, generation, assigned = joined(peer, "A")
    assert re.fullmatch(r"A-\d{4}", a)
    assert (generation, assigned) == (1, "[0 1 2]")
    assert (
        peer.ask(f"SYNC_GROUP topic=g1 group=G member={a} generation=1")
        == f"OK generation=1 member={a} assignments=[0 1 2]"
    )
    assert peer.ask("FETCH_OFFSET topic=g1 partition=0 group=G") == "OK offset=0"
    assert peer.ask(f"HEARTBEAT topic=g1 group=G member={a} generation=1") == f"OK member={a} generation=1"
    b, generation, assigned = joined(peer, "B")
    assert (generation, assigned) == (2, "[2]")
    fenced = f"ERROR: GEN_MISMATCH current=2 requested=1 group=G member={a} hint=REBALANCE_REQUIRED"
    assert peer.ask(f"HEARTBEAT topic=g1 group=G member={a} generation=1") == fenced
    resumed = peer.ask(f"JOIN_GROUP topic=g1 group=G member={a} generation=2")
    assert resumed == f"OK generation=2 member={a} assignments=[0 1] resumed=true"
    of_a = f"group=G generation=2 member={a}"
    assert peer.ask(f"COMMIT_OFFSET topic=g1 partition=0 offset=5 {of_a}") == "OK"
    not_owner = f"ERROR: NOT_OWNER partition=2 member={a} group=G generation=2"
    assert peer.ask(f"COMMIT_OFFSET topic=g1 partition=2 offset=5 {of_a}") == not_owner
    assert peer.ask(f"BATCH_COMMIT topic=g1 {of_a} P0:6,P1:7") == "OK batched=2"
    assert peer.ask("FETCH_OFFSET topic=g1 partition=1 group=G") == "OK offset=7"
    assert peer.ask(f"LEAVE_GROUP topic=g1 group=G member={b} generation=2") == f"OK group=G member={b} left=true"
    assert (
        peer.ask(f"SYNC_GROUP topic=g1 group=G member={a} generation=3")
        == f"OK generation=3 member={a} assignments=[0 1 2]"
    )


def test_the_worked_positional_exchange() -> None:
    peer = World().connect()
    assert peer.ask("CREATE orders 2") == "\u2705 Topic 'orders' now has 2 partitions"
    assert peer.ask("SUBSCRIBE orders workers") == "OK group=workers topic=orders registered=true"
    answer = peer.ask("JOIN_GROUP orders workers c1")
    member = answer.split()[2].removeprefix("member=")
    assert answer == f"OK generation=1 member={member} assignments=[0 1]"
    assert peer.ask(f"SYNC_GROUP orders workers {member} 1") == answer
    assert peer.ask(f"HEARTBEAT orders workers c1 {member} 1") == f"OK member={member} generation=1"
    assert peer.ask(f"HEARTBEAT orders workers {member} c9 1") == f"OK member={member} generation=1"
    assert peer.ask("COMMIT orders workers 0 5") == "OK"
    back = "offset regression group=workers topic=orders partition=0 current=5 got=4"
    assert peer.ask("COMMIT orders workers 0 4") == f'ERROR: offset_regression reason="{back}"'
    assert peer.ask(f"BATCH_COMMIT orders workers {member} 1 P0:6,P1:3") == "OK batched=2"
    assert peer.ask("LEAVE_GROUP orders workers c1") == f"OK group=workers member={member} left=true"


def test_errors_of_group_commands_in_order(peer: Dialogue) -> None:
    peer.ask("CREATE topic=t1 partitions=1")
    a, _, _ = joined(peer, "A")
    for text, answer in (
        ("JOIN_GROUP group=G", "missing_topic command=JOIN_GROUP"),
        ("JOIN_GROUP topic=g1", "missing_group command=JOIN_GROUP"),
        ("JOIN_GROUP topic=g1 group=G", "missing_member command=JOIN_GROUP"),
        ("JOIN_GROUP topic=g1 group=G member=A generation=x", "invalid_generation command=JOIN_GROUP"),
        ("JOIN_GROUP topic=none group=G member=A", "topic_not_found topic=none"),
        ("JOIN_GROUP topic=t1 group=G member=A", "topic_not_assigned_to_group expected=g1 actual=t1"),
        ("JOIN_GROUP topic=g1 group=G member=zzz generation=1", "member_not_found member=zzz group=G"),
        (
            f"JOIN_GROUP topic=g1 group=G member={a} generation=7",
            f"GEN_MISMATCH current=1 requested=7 group=G member={a} hint=REBALANCE_REQUIRED",
        ),
        ("SYNC_GROUP topic=g1 group=G member=A", "missing_generation command=SYNC_GROUP"),
        ("SYNC_GROUP topic=g1 group=G member=A generation=-1", "invalid_generation command=SYNC_GROUP"),
        ("SYNC_GROUP topic=g1 group=NO member=A generation=1", "group_not_found group=NO"),
        ("SYNC_GROUP topic=t1 group=G member=A generation=1", "topic_not_assigned_to_group expected=g1 actual=t1"),
        ("HEARTBEAT topic=g1 group=G member=zz generation=1", "member_not_found member=zz group=G"),
        ("HEARTBEAT topic=g1 group=G member=zz generation=9", "member_not_found member=zz group=G"),
        ("HEARTBEAT topic=g1 group=G member=zz", "missing_generation command=HEARTBEAT"),
        ("LEAVE_GROUP topic=g1 group=G member=zz", "member_not_found member=zz group=G"),
        (
            f"LEAVE_GROUP topic=g1 group=G member={a} generation=9",
            f"GEN_MISMATCH current=1 requested=9 group=G member={a} hint=REBALANCE_REQUIRED",
        ),
        ("FETCH_OFFSET topic=g1 group=G", "missing_partition command=FETCH_OFFSET"),
        ("FETCH_OFFSET topic=g1 partition=x group=G", "invalid_partition"),
        ("FETCH_OFFSET topic=g1 partition=0 group=none", "group_not_found group=none"),
        ("FETCH_OFFSET topic=t1 partition=0 group=G", "topic_not_assigned_to_group expected=g1 actual=t1"),
        ("FIND_COORDINATOR topic=g1", "missing_coordinator_key command=FIND_COORDINATOR"),
        ("GROUP_STATUS group=none", "group_status_failed reason=\"group 'none' not found\""),
        (
            "REGISTER_GROUP topic=t1 group=G",
            'register_group_failed reason="topic mismatch (existing: g1, requested: t1)"',
        ),
    ):
        assert peer.ask(text) == f"ERROR: {answer}", text


def test_errors_of_commits(peer: Dialogue) -> None:
    peer.ask("CREATE topic=t1 partitions=1")
    a, _, _ = joined(peer, "A")
    of_a = f"member={a} generation=1"
    stale = f"GEN_MISMATCH current=1 requested=4 group=G member={a} hint=REBALANCE_REQUIRED"
    for rest, answer in (
        ("partition=0", "missing_topic command=COMMIT_OFFSET"),
        ("topic=g1", "missing_partition command=COMMIT_OFFSET"),
        ("topic=g1 partition=x", "invalid_partition"),
        ("topic=g1 partition=0", "missing_group command=COMMIT_OFFSET"),
        ("topic=g1 partition=0 group=G", "missing_offset command=COMMIT_OFFSET"),
        ("topic=g1 partition=0 group=G offset=-3", "invalid_offset"),
        ("topic=t1 partition=0 group=G offset=3", "topic_not_assigned_to_group expected=g1 actual=t1"),
        ("topic=g1 partition=0 group=G offset=3", "missing_member command=COMMIT_OFFSET"),
        ("topic=g1 partition=0 group=G offset=3 member=zz", "missing_generation command=COMMIT_OFFSET"),
        ("topic=g1 partition=0 group=NOGRP offset=3 member=zz generation=1", "group_not_found group=NOGRP"),
        ("topic=g1 partition=0 group=G offset=3 member=zz generation=1", "member_not_found member=zz group=G"),
        (f"topic=g1 partition=0 group=G offset=3 member={a} generation=4", stale),
        (f"topic=g1 partition=9 group=G offset=3 {of_a}", f"NOT_OWNER partition=9 member={a} group=G generation=1"),
    ):
        assert peer.ask(f"COMMIT_OFFSET {rest}") == f"ERROR: {answer}", rest
    commit = f"COMMIT_OFFSET topic=g1 partition=0 group=G {of_a}"
    assert peer.ask(f"{commit} offset=5 validate_only=true") == "OK validated=true"
    assert peer.ask("FETCH_OFFSET topic=g1 partition=0 group=G") == "OK offset=0"
    assert [peer.ask(f"{commit} offset={offset}") for offset in (5, 5)] == ["OK", "OK"]
    reason = "offset regression group=G topic=g1 partition=0 current=5 got=4"
    assert peer.ask(f"{commit} offset=4") == f'ERROR: offset_regression reason="{reason}"'


def test_errors_of_batch_commits(peer: Dialogue) -> None:
    a, _, _ = joined(peer, "A")
    batch = f"BATCH_COMMIT topic=g1 group=G member={a}"
    for pairs, answer in (
        ("generation=1", 'invalid_batch_commit_entry entry="generation=1"'),
        ("generation=1 P0", 'invalid_batch_commit_entry entry="P0"'),
        ("generation=1 P0:x", 'invalid_offset entry="P0:x"'),
        ("generation=1 Px:6", 'invalid_partition entry="Px:6"'),
        ("generation=1 P0:1,P0:2", "duplicate_partition partition=0 group=G topic=g1"),
        ("generation=1 P0:1,P7:2", f"NOT_OWNER partition=7 member={a} group=G generation=1"),
    ):
        assert peer.ask(f"{batch} {pairs}") == f"ERROR: {answer}", pairs
    assert peer.ask(f"{batch} generation=1 P0:6,P1:7") == "OK batched=2"
    assert peer.ask(f"BATCH_COMMIT topic=g1 0:7 generation=1 group=G member={a}") == "OK batched=1"
    reason = "offset regression for group=G topic=g1 partition=1: current=7 attempted=1"
    assert peer.ask(f"{batch} generation=1 P0:9,P1:1") == f'ERROR: offset_regression reason="{reason}"'
    assert peer.ask("FETCH_OFFSET topic=g1 partition=0 group=G") == "OK offset=7"  # all or nothing


def test_a_fenced_member_that_rejoins_keeps_its_id(peer: Dialogue) -> None:
    a, _, _ = joined(peer, "A")
    b, generation, _ = joined(peer, "B")
    assert joined(peer, a) == (a, generation, "[0 1]")  # with its full id, as Python's client does
    c, generation, _ = joined(peer, "C")
    for _ in range(
        2
    ):  # with its original name, as Java's does, sometimes twice: an old heartbeat fails after the new join
        assert joined(peer, "A") == (a, generation, "[0]")
    assert peer.ask(f"HEARTBEAT topic=g1 group=G member={a} generation={generation}").startswith("OK")
    assert joined(peer, "A")[0] != a  # in use by now: this is another client of the same name
    assert {b, c} == {member["member_id"] for member in status(peer)["members"]} - {a} - namesakes(peer, a)


def test_a_member_without_partitions_can_rejoin_by_name_repeatedly(peer: Dialogue) -> None:
    for name in ("A", "B", "C"):
        joined(peer, name)
    idle, generation, assigned = joined(peer, "D")
    assert assigned == "[]"
    for _ in range(3):
        assert joined(peer, "D") == (idle, generation, "[]")


def namesakes(peer: Dialogue, member: str) -> set[str]:
    base = member.rpartition("-")[0]
    return {known["member_id"] for known in status(peer)["members"] if known["member_id"].startswith(base + "-")}


def status(peer: Dialogue, group: str = "G") -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(peer.ask(f"GROUP_STATUS group={group}"))
    return shown


def test_a_member_can_leave_without_a_generation(peer: Dialogue) -> None:
    a, _, _ = joined(peer, "A")
    assert peer.ask(f"LEAVE_GROUP topic=g1 group=G member={a}") == f"OK group=G member={a} left=true"
    shown = status(peer)
    assert (shown["state"], shown["generation"], shown["member_count"]) == ("Dead", 2, 0)


def test_group_status_and_lists(peer: Dialogue) -> None:
    assert peer.ask("REGISTER_GROUP topic=g1 group=RG") == "OK group=RG topic=g1 registered=true"
    assert peer.ask("REGISTER_GROUP topic=g1 group=RG") == "OK group=RG topic=g1 registered=true"
    assert status(peer, "RG") == {
        "status": "OK",
        "group_name": "RG",
        "topic_name": "g1",
        "state": "Dead",
        "generation": 0,
        "member_count": 0,
        "partition_count": 3,
        "members": [],
        "last_rebalance": "0001-01-01T00:00:00Z",
    }
    joined(peer, "A")
    shown = status(peer)
    assert list(shown) == [
        "status", "group_name", "topic_name", "state", "generation", "member_count", "partition_count", "members",
        "last_rebalance",
    ]  # fmt: skip
    assert [list(member) for member in shown["members"]] == [["member_id", "last_heartbeat", "assignments"]]
    assert shown["members"][0]["assignments"] == [0, 1, 2]
    assert shown["last_rebalance"].endswith("Z")
    assert not shown["last_rebalance"].startswith("0001")
    assert peer.ask("LIST_GROUPS") == "OK count=2 groups=G,RG"
    assert peer.ask("FETCH_OFFSET topic=g1 partition=0 group=RG") == "OK offset=0"


def test_the_default_group_has_any_topic(peer: Dialogue) -> None:
    peer.ask("CREATE topic=t1 partitions=1")
    assert joined(peer, "A", group="default-group")[2] == "[0 1 2]"
    assert joined(peer, "A", group="default-group", topic="t1")[2] == "[0]"
    assert peer.ask("FETCH_OFFSET topic=t1 partition=0 group=default-group") == "OK offset=0"


def test_added_partitions_are_assigned(peer: Dialogue) -> None:
    a, _, _ = joined(peer, "A")
    peer.ask("CREATE topic=g1 partitions=5")
    assert "GEN_MISMATCH" in peer.ask(f"HEARTBEAT topic=g1 group=G member={a} generation=1")
    assert joined(peer, a) == (a, 2, "[0 1 2 3 4]")


def test_commits_keep_a_member_alive(peer: Dialogue) -> None:
    a, _, _ = joined(peer, "A")
    for offset in range(3):
        peer.world.memory.advance(8.0)
        assert peer.ask(f"COMMIT_OFFSET topic=g1 partition=0 group=G offset={offset} member={a} generation=1") == "OK"
    peer.world.memory.advance(11.0)
    assert (
        peer.ask(f"HEARTBEAT topic=g1 group=G member={a} generation=1") == f"ERROR: member_not_found member={a} group=G"
    )


def test_names_that_are_not_text_are_refused_and_keys_are_not() -> None:
    peer = World().connect()
    peer.ask("CREATE topic=ev partitions=1 event_sourcing=true")
    refused = 'ERROR: decode_failed reason="an argument is not valid UTF-8"'
    for text in (b"COMMIT \xff g 0 5", b"CREATE topic=x read_acl=\xff", b"AUTH principal=\xff token=t"):
        assert peer.ask(text) == refused
    assert peer.ask(b"APPEND_STREAM topic=ev key=k version=1 event_type=\xff message=x") == refused
    assert peer.ask(b"APPEND_STREAM topic=ev key=\xff version=1 message=\xfe").startswith("OK version=1")
    assert peer.ask(b"STREAM_VERSION topic=ev key=\xff") == "OK version=1"


def test_groups_survive_a_restart(peer: Dialogue) -> None:
    a, _, _ = joined(peer, "A")
    peer.ask("REGISTER_GROUP topic=g1 group=RG")
    peer.ask(f"BATCH_COMMIT topic=g1 group=G member={a} generation=1 P0:6,P1:7")
    peer.world.restart()
    peer = peer.beside()
    assert peer.ask(f"HEARTBEAT topic=g1 group=G member={a} generation=1") == f"OK member={a} generation=1"
    assert peer.ask("FETCH_OFFSET topic=g1 partition=1 group=G") == "OK offset=7"
    assert peer.ask("LIST_GROUPS") == "OK count=2 groups=G,RG"


def test_members_of_two_protocols_share_a_group(peer: Dialogue) -> None:
    a, _, _ = joined(peer, "A")
    broker = peer.world.memory.broker
    other = broker.groups.join("G", "g1", "Z", wire="flux", named_alone=True)
    assert (other.generation, other.partitions) == (2, (2,))
    assert joined(peer, a) == (a, 2, "[0 1]")
    broker.groups.commit("G", "g1", "Z", 2, 2, 9, wire="flux")
    assert peer.ask("FETCH_OFFSET topic=g1 partition=2 group=G") == "OK offset=9"
    assert broker.position("g1", 2, PositionKind.GROUP, "G") == 9


def test_subscribe_in_every_dialect(peer: Dialogue) -> None:
    assert peer.ask("SUBSCRIBE topic=g1 group=S") == "OK group=S topic=g1 registered=true"
    assert peer.ask("SUBSCRIBE g1", "admin") == "\u2705 Subscribed to 'g1'"
    assert peer.ask("SUBSCRIBE g1 S", "admin") == "\u2705 Subscribed to 'g1' with group 'S'"
    assert peer.ask("SUBSCRIBE none", "admin") == "ERROR: topic 'none' does not exist"
    assert peer.ask("SUBSCRIBE", "admin").startswith("ERROR: ")
    assert peer.ask("SUBSCRIBE topic=none group=S") == "ERROR: topic_not_found topic=none"
    assert peer.ask("SUBSCRIBE topic=g1") == "ERROR: missing_group command=SUBSCRIBE"


def test_names_of_groups_have_a_limit() -> None:
    peer = World(broker=BrokerSettings(groups_max=4)).connect()
    peer.ask("CREATE topic=g1 partitions=1")
    answers = [peer.ask(f"REGISTER_GROUP topic=g1 group=g{n}") for n in range(3)]
    assert [answer.split()[0] for answer in answers] == ["OK", "OK", "ERROR:"]
    assert peer.ask(f"JOIN_GROUP topic=g1 group={'x' * 300} member=m").startswith("ERROR: invalid_member")


def test_the_status_of_a_group_omits_expired_members(peer: Dialogue) -> None:
    joined(peer, "A")
    peer.world.memory.advance(6)
    b, _, _ = joined(peer, "B")
    peer.world.memory.advance(6)
    status = json.loads(peer.ask("GROUP_STATUS group=G"))
    assert [(member["member_id"], member["assignments"]) for member in status["members"]] == [(b, [0, 1, 2])]
    assert (status["state"], status["member_count"]) == ("Stable", 1)
    peer.world.memory.advance(6)
    status = json.loads(peer.ask("GROUP_STATUS group=G"))
    assert (status["state"], status["member_count"], status["members"]) == ("Dead", 0, [])
