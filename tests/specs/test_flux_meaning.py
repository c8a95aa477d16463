"""The FLUX pages on acknowledgements, replicas, groups and storage, as dialogues with a broker process.

Tests of ten-second timeouts use a broker whose clock is set forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polywire.server.config import ServeConfig
from polywire.types import Level
from tests.broker_process import BrokerProcess
from tests.specs.flux_peer import PORTS, Peer, field, new_topic, talk
from tests.specs.pages import (
    FLUX_DELIVERY,
    FLUX_DEPLOYED,
    FLUX_GROUPS,
    FLUX_REPLICATION,
    FLUX_START,
    FLUX_STORAGE,
    Differs,
    Row,
)
from tests.unit.protocols.flux.dialogue import World

TIMEOUT = "ERR|REPLICATION_TIMEOUT|acks=all timeout"
FENCED = "ERR|GENERATION_MISMATCH|"
STALE = f"{FENCED}stale generation"
TWO = (
    "a> PRODUCE|$ user1:created",
    "a< OK|partition=2 offset=0 hw=0",
    "a> PRODUCE|$ user1:paid",
    "a< OK|partition=2 offset=1 hw=1",
)
HELD = "b~ REPLICA_FETCH|$ 2 1 2 -> OK|replica=1 acked_offset=2 hw=2 isr=[0 1] under_replicated=false"
JOINED = ("a> JOIN|g$ $ c1", "a< OK|generation=2 assigned=[0 1 2]")
SHARED = (*JOINED, "b> JOIN|g$ $ c2", "b< OK|generation=3 assigned=[1]")

ALONE = Differs(
    "counts the leader as in sync with itself: with no follower in sync, hw is at the last record",
    "does so, too",
    "clients of one broker rely on it, and would read nothing otherwise",
)
BEHIND = Differs(
    "has no follower in sync that lacks one record, as long as the largest lag is 0: its own broker answers `isr=[0]` here",
    "does so, too: a follower is in sync once it has every record",
    "the page's own setting for the largest lag is 0",
)
SIX = Differs(
    "takes `<group> <topic> <consumer_id> <generation> <partition> <offset>`",
    "the same",
    "the later state of the protocol page says so",
)
OWN_FILES = Differs(
    "keeps a file of lines per partition, two indexes of it and two copies beside it, none of which the wire shows",
    "has segments of its own, described with the log",
    "all wires share one log, whose records are columns with checksums",
)
KEPT = Differs(
    "removes segments older than 24 hours or beyond 50 MiB of a partition",
    "keeps everything until `--retention-hours`, `--retention-mib` or the topic's own settings say otherwise",
    "nothing is removed without a request",
)
SYNCED = Differs(
    "syncs each record by default, or in intervals, or never",
    "`--durability`: acks=0 and acks=1 are written at once and synced within 100 ms, acks=all is synced; or synced, all of them",
    "one journal syncs for all wires together",
)
RESTARTED = Differs(
    "keeps the times of the heartbeats, so members expire that could not reach the broker while it was down",
    "gives each member its full ten seconds again",
    "a member cannot help that the broker was away",
)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    data_dir = tmp_path_factory.mktemp("meaning") / "data"
    with BrokerProcess(data_dir, "--any", "127.0.0.1:0", wires=["flux"]) as process:
        yield process


@pytest.fixture(params=PORTS)
def port(request: pytest.FixtureRequest) -> str:
    """Return the protocol's own port, and the one for all protocols."""
    return str(request.param)


@FLUX_START.rows(
    "lines",
    Row(
        27,
        "a record is produced with acks=1",
        (("a> PRODUCE|$ user1:created acks=1", "a< OK|partition=2 offset=0 hw=0"),),
    ),
    Row(28, "… and with acks=0", (("a> PRODUCE|$ user1:paid acks=0", "a< OK|partition=2 offset=0 hw=0"),)),
    Row(
        34,
        "the answer to it has an hw of -1",
        (("a> PRODUCE|$ user1:created acks=1", "a< OK|partition=2 offset=0 hw=0"),),
        ALONE,
    ),
    Row(43, "CONSUME answers records up to hw", ((*TWO, "a> CONSUME|$ 2 0", "a< OK|messages=0:created,1:paid hw=1"),)),
    Row(
        45,
        "before a follower has reported, hw can stay at -1 and nothing be read",
        ((*TWO, "a> CONSUME|$ 2 0", "a< OK|messages=0:created,1:paid hw=1"),),
        ALONE,
    ),
    Row(
        50,
        "a follower's progress is reported by hand",
        ((*TWO, "a> REPLICA_FETCH|$ 2 1 1", "a< OK|replica=1 acked_offset=1 hw=1 isr=[0 1] under_replicated=false"),),
    ),
    Row(
        56,
        "a follower that lacks the last of two records is in sync",
        ((*TWO, "a> REPLICA_FETCH|$ 2 1 0", "a< OK|replica=1 acked_offset=0 hw=1 isr=[0] under_replicated=true"),),
        BEHIND,
    ),
    Row(
        62,
        "acks=all succeeds where a follower reports",
        ((*TWO, "a> PRODUCE|$ user2:shipped acks=all", HELD, "a< OK|partition=2 offset=2 hw=2"),),
    ),
    Row(
        68,
        "acks=all times out where too few replicas are in sync",
        (("a> PRODUCE|$ user2:shipped acks=all", f"a< {TIMEOUT}"),),
    ),
    Row(74, "a consumer joins", (JOINED,)),
    Row(
        75,
        "it commits group, topic, partition and offset",
        ((*JOINED, "a> COMMIT|g$ $ c1 2 2 1", "a< OK|committed=true"),),
        SIX,
    ),
    Row(
        76,
        "… and reads what it has committed",
        ((*JOINED, "a> COMMIT|g$ $ c1 2 2 1", "a< OK|…", "a> OFFSET|g$ $ 2", "a< OK|offset=1"),),
    ),
    Row(82, "an unknown command is an error", (("a> NOPE|x", "a< ERR|UNKNOWN_COMMAND|unsupported command"),)),
    Row(
        83,
        "a partition that is no number is a bad request",
        (("a> CONSUME|$ bad 0", "a< ERR|BAD_REQUEST|invalid partition"),),
    ),
    Row(
        88,
        "errors of a line that is no request have the id 0",
        (
            (
                "a>> V1|1|PING|",
                "a<< V1|1|OK",
                "a>> V1|8|NOPE",
                "a<< V1|0|ERR|BAD_REQUEST|…",
                "a>> V0|8|PING|",
                "a<< V1|0|ERR|BAD_REQUEST|…",
            ),
        ),
    ),
)
def test_getting_started(broker: BrokerProcess, port: str, lines: tuple[str, ...]) -> None:
    talk(broker, port, *lines)


@FLUX_DEPLOYED.rows(
    "lines",
    Row(
        23,
        "a topic has 3 partitions",
        (
            (
                "a> PRODUCE|$ k:v",
                "a< OK|…",
                "a> CONSUME|$ 2 0",
                "a< OK|messages= hw=-1",
                "a> CONSUME|$ 3 0",
                "a< ERR|BAD_REQUEST|invalid partition",
            ),
        ),
    ),
    Row(
        24,
        "a topic has 3 replicas, the leader among them, unless it is created with another number",
        (
            (
                *("a> PRODUCE|$ user1:x", "a< OK|…", "a> REPLICA_FETCH|$ 2 2 0", "a< OK|replica=2 …"),
                *("a> REPLICA_FETCH|$ 2 3 0", "a< ERR|BAD_REQUEST|invalid replica id"),
                *("a> ADMIN_CREATE_TOPIC|own-$ 3 2", "a< OK|topic=own-$ partitions=3 replication_factor=2 …"),
                *("a> REPLICA_FETCH|own-$ 2 1 0", "a< OK|replica=1 …"),
                *("a> REPLICA_FETCH|own-$ 2 2 0", "a< ERR|BAD_REQUEST|invalid replica id"),
            ),
        ),
    ),
    Row(
        25,
        "2 replicas in sync, the leader among them, are enough for acks=all",
        (
            (
                "a> PRODUCE|$ user1:x acks=all",
                "b~ REPLICA_FETCH|$ 2 2 0 -> OK|replica=2 acked_offset=0 hw=0 isr=[0 2] under_replicated=false",
                "a< OK|partition=2 offset=0 hw=0",
            ),
        ),
    ),
    Row(
        26,
        "a follower that lacks one record is not in sync",
        ((*TWO, "a> REPLICA_FETCH|$ 2 1 0", "a< OK|replica=1 acked_offset=0 hw=1 isr=[0] …"),),
    ),
)
def test_defaults(broker: BrokerProcess, port: str, lines: tuple[str, ...]) -> None:
    talk(broker, port, *lines)


@FLUX_DEPLOYED.says(27, "a follower not heard of for 10,000 ms is not in sync")
@FLUX_REPLICATION.says(25, "a follower in sync has reported within the lag timeout")
def test_a_follower_is_in_sync_for_ten_seconds() -> None:
    world = World()
    peer = world.connect()
    peer.ask("V1|1|PRODUCE|t a:0")
    peer.ask("V1|2|REPLICA_FETCH|t 1 1 0")
    world.memory.advance(9.5)
    assert peer.ask("V1|3|REPLICA_FETCH|t 1 2 0").endswith("isr=[0 1 2] under_replicated=false")
    world.memory.advance(1.0)
    assert peer.ask("V1|4|REPLICA_FETCH|t 1 2 0").endswith("isr=[0 2] under_replicated=false")


@FLUX_DEPLOYED.says(28, "acks=all is given up after 2,000 ms")
def test_acks_all_times_out_after_two_seconds() -> None:
    world = World()
    peer = world.connect()
    peer.feed(b"V1|1|PRODUCE|t a:0 acks=all\n")
    world.memory.advance(1.9)
    assert peer.take() == b""
    world.memory.advance(0.2)
    assert peer.take().decode() == f"V1|1|{TIMEOUT}\n"


@FLUX_REPLICATION.rows(
    "lines",
    Row(7, "brokers do not replicate to each other", (("a> PRODUCE|$ user1:x acks=all", f"a< {TIMEOUT}"),)),
    Row(
        9,
        "the leader's end is known per partition",
        (
            (
                "a> PRODUCE|$ user1:x",
                "a< OK|partition=2 offset=0 hw=0",
                "a> PRODUCE|$ a:x",
                "a< OK|partition=1 offset=0 hw=0",
            ),
        ),
    ),
    Row(
        10,
        "REPLICA_FETCH tells how far a follower is",
        ((*TWO, "a> REPLICA_FETCH|$ 2 1 1", "a< OK|replica=1 acked_offset=1 hw=1 isr=[0 1] …"),),
    ),
    Row(
        11,
        "who is in sync follows from lag and time",
        ((*TWO, "a> REPLICA_FETCH|$ 2 1 0", "a< OK|replica=1 acked_offset=0 hw=1 isr=[0] …"),),
    ),
    Row(
        12,
        "hw follows from the replicas in sync",
        ((*TWO, "a> PRODUCE|$ user2:shipped acks=all", HELD, "a< OK|partition=2 offset=2 hw=2"),),
    ),
    Row(
        13,
        "acks=1 is answered at once, acks=all once the followers have it",
        (
            (
                "a> PRODUCE|$ user1:x acks=1",
                "a< OK|partition=2 offset=0 hw=0",
                "a> PRODUCE|$ user1:y acks=all",
                f"a< {TIMEOUT}",
            ),
        ),
    ),
    Row(14, "CONSUME answers records up to hw", ((*TWO, "a> CONSUME|$ 2 1", "a< OK|messages=1:paid hw=1"),)),
    Row(
        15,
        "a partition with too few in-sync replicas is reported as under-replicated",
        ((*TWO, "a> REPLICA_FETCH|$ 2 1 0", "a< OK|replica=1 acked_offset=0 hw=1 isr=[0] under_replicated=true"),),
    ),
    Row(
        16,
        "a partition becomes follower and leader again",
        (
            (
                "a> SET_PARTITION_ROLE|$ 2 follower",
                "a< OK|…",
                "a> SET_PARTITION_ROLE|$ 2 leader",
                "a< OK|…",
                "a> PRODUCE|$ user1:x",
                "a< OK|…",
            ),
        ),
    ),
    Row(
        17,
        "a follower's partition takes no records: NOT_LEADER",
        (("a> SET_PARTITION_ROLE|$ 2 follower", "a< OK|…", "a> PRODUCE|$ user1:x", "a< ERR|NOT_LEADER|…"),),
    ),
    Row(19, "the leader is replica 0", ((*TWO, "a> REPLICA_FETCH|$ 2 0 1", "a< ERR|BAD_REQUEST|invalid replica id"),)),
    Row(
        20,
        "followers are 1 to the replication factor - 1",
        (
            (
                *TWO,
                "a> REPLICA_FETCH|$ 2 2 1",
                "a< OK|replica=2 …",
                "a> REPLICA_FETCH|$ 2 3 1",
                "a< ERR|BAD_REQUEST|invalid replica id",
            ),
        ),
    ),
    Row(
        22,
        "acks=all needs hw to be at the record",
        ((*TWO, "a> REPLICA_FETCH|$ 2 1 1", "a< OK|…", "a> PRODUCE|$ user1:x acks=all", f"a< {TIMEOUT}"),),
    ),
    Row(
        23,
        "acks=all needs as many replicas in sync as is set",
        ((*TWO, "a> PRODUCE|$ user2:shipped acks=all", HELD, "a< OK|partition=2 offset=2 hw=2"),),
    ),
    Row(
        26,
        "a follower in sync lacks no more records than is set",
        ((*TWO, "a> REPLICA_FETCH|$ 2 1 0", "a< OK|replica=1 acked_offset=0 hw=1 isr=[0] …"),),
    ),
    Row(
        34,
        "acks=all that cannot be reached is REPLICATION_TIMEOUT",
        (("a> PRODUCE|$ user1:created acks=all", f"a< {TIMEOUT}"),),
    ),
)
def test_replication(broker: BrokerProcess, port: str, lines: tuple[str, ...]) -> None:
    talk(broker, port, *lines)


@FLUX_DELIVERY.rows(
    "lines",
    Row(
        4,
        "the records of a partition keep their order",
        ((*TWO, "a> CONSUME|$ 2 0", "a< OK|messages=0:created,1:paid hw=1"),),
    ),
    Row(
        6,
        "the records of a key are in one partition",
        ((*TWO, "a> PRODUCE|$ a:x", "a< OK|partition=1 …", "a> PRODUCE|$ user1:y", "a< OK|partition=2 …"),),
    ),
    Row(9, "acks=0 is accepted without waiting", (("a> PRODUCE|$ user1:x acks=0", "a< OK|partition=2 offset=0 hw=0"),)),
    Row(
        10,
        "acks=1 is answered once the leader has the record",
        (("a> PRODUCE|$ user1:x acks=1", "a< OK|partition=2 offset=0 hw=0"),),
    ),
    Row(
        11,
        "acks=all waits for the replicas in sync",
        ((*TWO, "a> PRODUCE|$ user2:shipped acks=all", HELD, "a< OK|partition=2 offset=2 hw=2"),),
    ),
    Row(13, "consumers read up to hw", ((*TWO, "a> CONSUME|$ 2 2", "a< OK|messages= hw=1"),)),
    Row(
        15,
        "records that only the leader has cannot be read",
        (("a> PRODUCE|$ user1:x", "a< OK|…", "a> CONSUME|$ 2 0", "a< OK|messages=0:x hw=0"),),
        ALONE,
    ),
    Row(
        16,
        "what can be read follows the replicas",
        (
            (
                *TWO,
                "a> PRODUCE|$ user2:shipped acks=all",
                HELD,
                "a< OK|…",
                "b> CONSUME|$ 2 2",
                "b< OK|messages=2:shipped hw=2",
            ),
        ),
    ),
    Row(19, "a commit needs a member", ((*JOINED, "a> COMMIT|g$ $ c2 2 0 1", f"a< {FENCED}unknown member"),)),
    Row(20, "a commit needs the group's generation", ((*JOINED, "a> COMMIT|g$ $ c1 1 0 1", f"a< {STALE}"),)),
    Row(
        21,
        "a commit needs a partition of the member's",
        ((*SHARED, "b> COMMIT|g$ $ c2 3 0 1", f"b< {FENCED}partition not assigned to member"),),
    ),
    Row(
        22,
        "members that lost their partitions commit nothing",
        ((*SHARED, "a> COMMIT|g$ $ c1 2 1 9", f"a< {STALE}", "a> OFFSET|g$ $ 1", "a< OK|offset=0"),),
    ),
    Row(
        24,
        "a record that is produced again is there again: at least once",
        ((*TWO, "a> PRODUCE|$ user1:paid", "a< OK|partition=2 offset=2 hw=2"),),
    ),
)
def test_delivery(broker: BrokerProcess, port: str, lines: tuple[str, ...]) -> None:
    talk(broker, port, *lines)


@FLUX_GROUPS.rows(
    "lines",
    Row(
        11,
        "JOIN makes a member, or finds it there",
        ((*JOINED, *JOINED, "b> JOIN|g$ $ c2", "b< OK|generation=3 assigned=[1]"),),
    ),
    Row(
        12,
        "SYNC checks the generation and tells the assignment",
        ((*SHARED, "a> SYNC|g$ $ c1 3", "a< OK|generation=3 assigned=[0 2]", "a> SYNC|g$ $ c1 2", f"a< {STALE}"),),
    ),
    Row(
        13,
        "HEARTBEAT is of the current generation",
        ((*SHARED, "b> HEARTBEAT|g$ $ c2 3", "b< OK|heartbeat=ok", "a> HEARTBEAT|g$ $ c1 2", f"a< {STALE}"),),
    ),
    Row(
        14,
        "LEAVE takes a member out and shares its partitions",
        (
            (
                *SHARED,
                "b> LEAVE|g$ $ c2 3",
                "b< OK|left=true",
                *("a> JOIN|g$ $ c1", "a< OK|generation=4 assigned=[0 1 2]"),
            ),
        ),
    ),
    Row(
        15,
        "COMMIT is checked",
        ((*SHARED, "b> COMMIT|g$ $ c2 3 1 4", "b< OK|committed=true", "b> OFFSET|g$ $ 1", "b< OK|offset=4"),),
    ),
    Row(18, "a new member is a new generation", (SHARED,)),
    Row(
        20,
        "a member that leaves is a new generation",
        (
            (
                *SHARED,
                "b> LEAVE|g$ $ c2 3",
                "b< OK|left=true",
                "a> SYNC|g$ $ c1 4",
                "a< OK|generation=4 assigned=[0 1 2]",
            ),
        ),
    ),
    Row(
        21,
        "another assignor is a new generation",
        ((*JOINED, "a> JOIN|g$ $ c1 assignor=range", "a< OK|generation=3 assigned=[0 1 2]"),),
    ),
    Row(
        22,
        "another topic is a new generation",
        ((*JOINED, "a> JOIN|g$ other-$ c1", "a< OK|generation=4 assigned=[0 1 2]"),),
    ),
    Row(
        31,
        "a commit for another group or topic is refused",
        (
            (
                *JOINED,
                "a> COMMIT|h$ $ c1 2 0 1",
                f"a< {FENCED}group not found",
                "a> COMMIT|g$ other-$ c1 2 0 1",
                f"a< {FENCED}group not found",
            ),
        ),
    ),
    Row(32, "a commit of another generation is refused", ((*JOINED, "a> COMMIT|g$ $ c1 3 0 1", f"a< {STALE}"),)),
    Row(
        33,
        "a commit of an unknown member is refused",
        ((*JOINED, "a> COMMIT|g$ $ c9 2 0 1", f"a< {FENCED}unknown member"),),
    ),
    Row(
        34,
        "a commit for another's partition is refused",
        ((*SHARED, "b> COMMIT|g$ $ c2 3 2 1", f"b< {FENCED}partition not assigned to member"),),
    ),
)
def test_groups(broker: BrokerProcess, port: str, lines: tuple[str, ...]) -> None:
    talk(broker, port, *lines)


@FLUX_GROUPS.says(19, "a member that expires is a new generation")
@FLUX_GROUPS.says(24, "members are removed at the group's next request")
@FLUX_GROUPS.says(26, "… the generation goes up")
@FLUX_GROUPS.says(27, "… the others have its partitions")
@FLUX_GROUPS.says(28, "… and it can neither commit nor beat nor ask")
def test_a_member_silent_for_ten_seconds_is_removed() -> None:
    world = World()
    one, two = world.connect(), world.connect()
    one.ask("V1|1|JOIN|g t c1")
    assert two.ask("V1|1|JOIN|g t c2") == "V1|1|OK|generation=3 assigned=[1]"
    world.memory.advance(6.0)
    assert one.ask("V1|2|HEARTBEAT|g t c1 3") == "V1|2|OK|heartbeat=ok"
    world.memory.advance(6.0)
    assert one.ask("V1|3|JOIN|g t c1") == "V1|3|OK|generation=4 assigned=[0 1 2]"
    for command, answer in (
        ("COMMIT|g t c2 3 1 5", STALE),
        ("HEARTBEAT|g t c2 3", STALE),
        ("SYNC|g t c2 4", f"{FENCED}unknown member"),
    ):
        assert two.ask(f"V1|4|{command}") == f"V1|4|{answer}"


@FLUX_STORAGE.rows(
    "lines",
    Row(
        16,
        "a key's partition is its FNV-1a hash modulo the number of partitions",
        (("a> PRODUCE|$ user1:x", "a< OK|partition=2 …", "a> PRODUCE|$ host-a:x", "a< OK|partition=0 …"),),
    ),
    Row(
        17, "the same key has the same partition", ((*TWO, "a> PRODUCE|$ user1:z", "a< OK|partition=2 offset=2 hw=2"),)
    ),
    Row(
        18,
        "the records of a partition keep their order",
        ((*TWO, "a> CONSUME|$ 2 0", "a< OK|messages=0:created,1:paid hw=1"),),
    ),
)
def test_storage(broker: BrokerProcess, port: str, lines: tuple[str, ...]) -> None:
    talk(broker, port, *lines)


@FLUX_START.says(101, "two files of a partition are copies of its records", OWN_FILES)
@FLUX_STORAGE.says(5, "a partition's records are in files named after it", OWN_FILES)
@FLUX_STORAGE.says(7, "a record is a line of offset, time, checksum and value", OWN_FILES)
@FLUX_STORAGE.says(11, "a partition has an index of offsets and one of times", OWN_FILES)
@FLUX_STORAGE.says(39, "a partition's records are mirrored in files beside it", OWN_FILES)
def test_the_log_has_its_own_files(broker: BrokerProcess, port: str) -> None:
    topic = new_topic(port)
    with Peer(broker, port) as peer:
        assert peer.say(f"PRODUCE|{topic} user1:x").startswith("OK|")
    assert [path.name for path in broker.data_dir.rglob("*") if topic in path.name] == []


@FLUX_STORAGE.says(28, "records older than a day are removed", KEPT)
@FLUX_STORAGE.says(29, "records beyond a size are removed", KEPT)
@FLUX_STORAGE.says(31, "when records are synced is set by an interval, a number of bytes and a mode", SYNCED)
def test_retention_and_durability_are_the_brokers() -> None:
    config = ServeConfig(data_dir=Path())
    assert (config.retention_hours, config.retention_mib, config.durability) == (0, 0, Level.WRITTEN)


@FLUX_START.says(92, "what was produced can be read from an earlier offset after a restart")
@FLUX_STORAGE.says(22, "records are there again after a start, in their order")
@FLUX_STORAGE.says(25, "… and so is what was known of them")
@FLUX_GROUPS.says(39, "generation and assignment are there again after a start")
@FLUX_GROUPS.says(40, "members come back with the times of their last heartbeats", RESTARTED)
@FLUX_GROUPS.says(41, "… and go on as before")
@pytest.mark.parametrize("name", PORTS)
def test_a_restart_keeps_records_offsets_and_groups(tmp_path: Path, name: str) -> None:
    with BrokerProcess(tmp_path / "data", "--any", "127.0.0.1:0", wires=["flux"]) as process:
        with Peer(process, name) as peer:
            for number in range(5):
                assert peer.say(f"PRODUCE|orders user1:v{number}") == f"OK|partition=2 offset={number} hw={number}"
            peer.say("JOIN|g orders c1")
            assert field(peer.say("JOIN|g orders c2"), "assigned") == "[1]"
            assert peer.say("COMMIT|g orders c1 3 2 4") == "OK|committed=true"
        process.kill()
        process.start()
        with Peer(process, name) as peer:
            assert peer.say("CONSUME|orders 2 3") == "OK|messages=3:v3,4:v4 hw=4"
            assert peer.say("OFFSET|g orders 2") == "OK|offset=4"
            assert peer.say("SYNC|g orders c1 3") == "OK|generation=3 assigned=[0 2]"
            assert peer.say("HEARTBEAT|g orders c2 3") == "OK|heartbeat=ok"
            assert peer.say("PRODUCE|orders user1:v5") == "OK|partition=2 offset=5 hw=5"


def test_replicas_and_min_isr_are_options(tmp_path: Path) -> None:
    options = ("--flux-replication-factor", "2", "--flux-min-isr", "1")
    with BrokerProcess(tmp_path / "data", *options, wires=["flux"]) as process, Peer(process, "flux") as peer:
        assert peer.say("PRODUCE|t user1:x acks=all") == "OK|partition=2 offset=0 hw=0"
        assert peer.say("REPLICA_FETCH|t 2 1 0") == "OK|replica=1 acked_offset=0 hw=0 isr=[0 1] under_replicated=false"
        assert peer.say("REPLICA_FETCH|t 2 2 0") == "ERR|BAD_REQUEST|invalid replica id"
