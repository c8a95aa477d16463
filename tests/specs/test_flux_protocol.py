"""The FLUX protocol page in both its revisions: envelopes, commands, codes, rules and payloads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.broker_process import BrokerProcess
from tests.specs.flux_peer import MALFORMED, PORTS, Peer, field, new_topic, talk
from tests.specs.pages import FLUX, FLUX_LATER, Differs, Row

BAD = "ERR|BAD_REQUEST|"
TIMEOUT = "ERR|REPLICATION_TIMEOUT|acks=all timeout"
FENCED = "ERR|GENERATION_MISMATCH|"
KNOWN = (
    "a>> V1|0|PING|",
    "a<< V1|0|OK",
)  # what does not begin with V1 is not detected as this protocol on the port for all protocols
ACKS = BAD + "invalid ack mode; expected acks=0|1|all"
PIPES = Differs(
    "takes whatever follows the third pipe as arguments",
    "does so, too; four sections with `--no-flux-pipes`",
    "its SDK sends values with pipes, and a client of the page never sends a fifth section",
)
COMMITTED = Differs(
    "says in the later state of this page, and expects, `<group> <topic> <consumer_id> <generation> <partition> <offset>`",
    "takes the six arguments of the later state",
    "a commit without a generation cannot be refused to a member that has lost its partition",
)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    data_dir = tmp_path_factory.mktemp("protocol") / "data"
    with BrokerProcess(data_dir, "--any", "127.0.0.1:0", wires=["flux"]) as process:
        yield process


@pytest.fixture(params=PORTS)
def port(request: pytest.FixtureRequest) -> str:
    """Return the protocol's own port, and the one for all protocols."""
    return str(request.param)


@FLUX.rows(
    "lines",
    Row(3, "a request is a line, and so is its answer", (("a>> V1|1|OFFSET|g$ $ 0", "a<< V1|1|OK|offset=0"),)),
    Row(
        8,
        "a request is version, correlation id, command and arguments, with pipes between",
        (("a>> V1|any-id|OFFSET|g$ $ 0", "a<< V1|any-id|OK|offset=0"),),
    ),
    Row(
        14,
        "a record is appended without an ack mode",
        (("a> PRODUCE|$ user1:created", "a< OK|partition=2 offset=0 hw=0"),),
    ),
    Row(
        23,
        "a line with fewer than four sections is malformed: a command without arguments keeps its last pipe",
        (("a>> V1|99|PING", f"a<< {MALFORMED}", "a>> V1|99", f"a<< {MALFORMED}", "a>> V1|98|PING|", "a<< V1|98|OK"),),
    ),
    Row(26, "PING is a command without arguments", (("a>> V1|99|PING|", "a<< V1|99|OK"),)),
    Row(34, "success without a payload ends with OK", (("a>> V1|1|PING|", "a<< V1|1|OK"),)),
    Row(35, "success has its payload behind one more pipe", (("a>> V1|1|OFFSET|g$ $ 0", "a<< V1|1|OK|offset=0"),)),
    Row(
        41,
        "an error is ERR, a code and a message",
        (("a>> V1|7|NOPE|x", "a<< V1|7|ERR|UNKNOWN_COMMAND|unsupported command"),),
    ),
    Row(
        44,
        "what cannot be read as a request is answered with the id 0",
        ((*KNOWN, "a>> hello", "a<< V1|0|ERR|BAD_REQUEST|…", "a>> V2|5|PING|", "a<< V1|0|ERR|BAD_REQUEST|…"),),
    ),
    Row(47, "… and with the code BAD_REQUEST", (("a>> V1|", "a<< V1|0|ERR|BAD_REQUEST|…"),)),
)
def test_envelopes(broker: BrokerProcess, port: str, lines: tuple[str, ...]) -> None:
    talk(broker, port, *lines)


@FLUX.rows(
    "lines",
    Row(
        54,
        "PRODUCE appends one record",
        (("a> PRODUCE|$ user1:x", "a< OK|…", "a> CONSUME|$ 2 0", "a< OK|messages=0:x hw=0"),),
    ),
    Row(
        55,
        "CONSUME reads records from an offset",
        (
            (
                *("a> PRODUCE|$ user1:x", "a< OK|…", "a> PRODUCE|$ user1:y", "a< OK|…"),
                *("a> CONSUME|$ 2 0", "a< OK|messages=0:x,1:y hw=1", "a> CONSUME|$ 2 1", "a< OK|messages=1:y hw=1"),
            ),
        ),
    ),
    Row(
        56,
        "JOIN makes a member of a group and tells its partitions",
        (("a> JOIN|g$ $ c1", "a< OK|generation=2 assigned=[0 1 2]"),),
    ),
    Row(
        57,
        "COMMIT takes group, topic, partition and offset",
        (
            (
                "a> COMMIT|g$ $ 0 1",
                f"a< {BAD}COMMIT requires: <group> <topic> <consumer_id> <generation> <partition> <offset>",
            ),
        ),
        COMMITTED,
    ),
    Row(
        58,
        "OFFSET reads what was committed",
        (
            (
                *("a> JOIN|g$ $ c", "a< OK|…", "a> OFFSET|g$ $ 1", "a< OK|offset=0"),
                *("a> COMMIT|g$ $ c 2 1 42", "a< OK|committed=true", "a> OFFSET|g$ $ 1", "a< OK|offset=42"),
            ),
        ),
    ),
    Row(
        59,
        "REPLICA_FETCH reports how far a follower is",
        (
            (
                *("a> PRODUCE|$ user1:x", "a< OK|…", "a> REPLICA_FETCH|$ 2 2 0"),
                "a< OK|replica=2 acked_offset=0 hw=0 isr=[0 2] under_replicated=false",
            ),
        ),
    ),
    Row(
        65,
        "BAD_REQUEST is for malformed envelopes and arguments",
        (
            (
                *KNOWN,
                "a>> x",
                f"a<< {MALFORMED}",
                "a> CONSUME|$ 0",
                f"a< {BAD}CONSUME requires: <topic> <partition> <offset>",
            ),
        ),
    ),
    Row(66, "UNKNOWN_COMMAND is for commands that are not known", (("a> FETCH|$", "a< ERR|UNKNOWN_COMMAND|…"),)),
    Row(
        67,
        "REPLICATION_TIMEOUT is for acks=all that was not reached in time",
        (("a> PRODUCE|$ user1:x acks=all", f"a< {TIMEOUT}"),),
    ),
)
def test_commands_and_codes(broker: BrokerProcess, port: str, lines: tuple[str, ...]) -> None:
    talk(broker, port, *lines)


@FLUX.rows(
    "lines",
    Row(
        73,
        "a line has exactly four sections",
        (("a> PRODUCE|$ user1:x|y", "a< OK|…", "a> CONSUME|$ 2 0", "a< OK|messages=0:x|y hw=0"),),
        PIPES,
    ),
    Row(
        74,
        "the version is V1",
        (
            (
                *KNOWN,
                "a>> V2|1|PING|",
                f"a<< V1|0|{BAD}unsupported version",
                "a>> v1|1|PING|",
                f"a<< V1|0|{BAD}unsupported version",
            ),
        ),
    ),
    Row(75, "the correlation id is not empty", (("a>> V1||PING|", f"a<< V1|0|{BAD}correlation id required"),)),
    Row(76, "the command is not empty", (("a>> V1|1||x", f"a<< V1|0|{BAD}command required"),)),
    Row(
        78,
        "each command checks its arguments",
        (
            (
                *("a> PRODUCE|$", f"a< {BAD}PRODUCE requires: <topic> <key>:<value> [acks=0|1|all]"),
                *("a> CONSUME|$", f"a< {BAD}CONSUME requires: <topic> <partition> <offset>"),
                *("a> JOIN|g$", f"a< {BAD}JOIN requires: <group> <topic> <consumer_id> [assignor=round_robin|range]"),
                *("a> OFFSET|g$", f"a< {BAD}OFFSET requires: <group> <topic> <partition>"),
                *("a> REPLICA_FETCH|$", f"a< {BAD}REPLICA_FETCH requires: <topic> <partition> <replica_id> <offset>"),
                *("a> PING|x", f"a< {BAD}PING requires no args"),
            ),
        ),
    ),
    Row(82, "PRODUCE needs key:value", (("a> PRODUCE|$ created", f"a< {BAD}message must be key:value"),)),
    Row(
        83,
        "an ack mode is acks=0, acks=1 or acks=all, and nothing else",
        (
            (
                *("a> PRODUCE|$ user1:x acks=2", f"a< {ACKS}", "a> PRODUCE|$ user1:x acks=ALL", f"a< {ACKS}"),
                *("a> PRODUCE|$ user1:x ACKS=1", f"a< {ACKS}", "a> PRODUCE|$ user1:x 1", f"a< {ACKS}"),
                *("a> PRODUCE|$ user1:x acks=0", "a< OK|…", "a> PRODUCE|$ user1:x acks=1", "a< OK|…"),
            ),
        ),
    ),
    Row(
        84,
        "numbers are integers",
        (
            (
                *("a> CONSUME|$ one 0", f"a< {BAD}invalid partition", "a> CONSUME|$ 0 0x1", f"a< {BAD}invalid offset"),
                *("a> COMMIT|g$ $ c 1_0 0 0", f"a< {BAD}invalid generation"),
                *(
                    "a> COMMIT|g$ $ c 1 0 1.0",
                    f"a< {BAD}invalid offset",
                    "a> OFFSET|g$ $ x",
                    f"a< {BAD}invalid partition",
                ),
                *("a> REPLICA_FETCH|$ 0 b 0", f"a< {BAD}invalid replica_id"),
                *("a> REPLICA_FETCH|$ 0 1 9223372036854775808", f"a< {BAD}invalid offset"),
            ),
        ),
    ),
    Row(
        85,
        "a follower's id is from 1 to the replication factor - 1; 0 is the leader",
        (
            (
                *("a> PRODUCE|$ user1:x", "a< OK|…", "a> REPLICA_FETCH|$ 2 0 0", f"a< {BAD}invalid replica id"),
                *("a> REPLICA_FETCH|$ 2 3 0", f"a< {BAD}invalid replica id", "a> REPLICA_FETCH|$ 2 -1 0"),
                *(f"a< {BAD}invalid replica id", "a> REPLICA_FETCH|$ 2 2 0", "a< OK|replica=2 …"),
            ),
        ),
    ),
)
def test_rules(broker: BrokerProcess, port: str, lines: tuple[str, ...]) -> None:
    talk(broker, port, *lines)


REPLICATED = (
    *(
        "a> PRODUCE|$ user1:x acks=all",
        "b~ REPLICA_FETCH|$ 2 1 0 -> OK|replica=1 acked_offset=0 hw=0 isr=[0 1] under_replicated=false",
    ),
    "a< OK|partition=2 offset=0 hw=0",
)


@FLUX.rows(
    "lines",
    Row(20, "acks=all asks for a record that the followers hold", (REPLICATED,)),
    Row(
        89,
        "acks=0 is answered at once, as success",
        (("a> PRODUCE|$ user1:x acks=0", "a< OK|partition=2 offset=0 hw=0"),),
    ),
    Row(
        90,
        "acks=1 is answered once the leader has the record",
        (("a> PRODUCE|$ user1:x acks=1", "a< OK|partition=2 offset=0 hw=0"),),
    ),
    Row(
        91,
        "acks=all waits until hw is at the record and enough replicas are in sync, or answers REPLICATION_TIMEOUT",
        ((*REPLICATED, "a> PRODUCE|$ user1:y acks=all", f"a< {TIMEOUT}"),),
    ),
    Row(
        92,
        "CONSUME answers records up to hw",
        (
            (
                *("a> PRODUCE|$ user1:x", "a< OK|…", "a> PRODUCE|$ user1:y", "a< OK|…"),
                *("a> CONSUME|$ 2 0", "a< OK|messages=0:x,1:y hw=1", "a> CONSUME|$ 2 2", "a< OK|messages= hw=1"),
            ),
        ),
    ),
)
def test_replication_semantics(broker: BrokerProcess, port: str, lines: tuple[str, ...]) -> None:
    talk(broker, port, *lines)


@FLUX.rows(
    "asked, fields",
    Row(
        98,
        "PRODUCE answers partition, offset and hw",
        ("PRODUCE|$ user1:x", {"partition": "2", "offset": "1", "hw": "1"}),
    ),
    Row(99, "CONSUME answers messages and hw", ("CONSUME|$ 2 0", {"messages": "0:first", "hw": "0"})),
    Row(99, "messages are empty where nothing is committed", ("CONSUME|$ 1 0", {"messages": "", "hw": "-1"})),
    Row(100, "JOIN answers the partitions assigned", ("JOIN|g$ $ c2", {"assigned": "[1]"})),
    Row(101, "COMMIT answers committed=true", ("COMMIT|g$ $ c1 2 0 1", {"committed": "true"})),
    Row(102, "OFFSET answers the offset", ("OFFSET|g$ $ 2", {"offset": "0"})),
    Row(
        103,
        "REPLICA_FETCH answers replica, acked_offset, hw, isr and under_replicated",
        (
            "REPLICA_FETCH|$ 2 1 0",
            {"replica": "1", "acked_offset": "0", "hw": "0", "isr": "[0 1]", "under_replicated": "false"},
        ),
    ),
)
@FLUX.says(96, "payloads are fields of key=value, and may have more of them than the page lists")
def test_payloads(broker: BrokerProcess, port: str, asked: str, fields: dict[str, str]) -> None:
    topic = new_topic(port)
    with Peer(broker, port) as peer:
        assert peer.say(f"PRODUCE|{topic} user1:first").startswith("OK|")
        assert field(peer.say(f"JOIN|g{topic} {topic} c1"), "generation") == "2"
        payload = peer.say(asked.replace("$", topic))
    assert payload.startswith("OK|")
    assert {name: field(payload, name) for name in fields} == fields


@FLUX.rows(
    "lines",
    Row(107, "V1 is the version that is spoken", (("a>> V1|1|PING|", "a<< V1|1|OK"),)),
    Row(
        108,
        "commands may be added beside those of V1, and leave them as they are",
        (
            (
                "a> ADMIN_CREATE_TOPIC|$ 3 3",
                "a< OK|topic=$ partitions=3 replication_factor=3 …",
                "a> PRODUCE|$ user1:x",
                "a< OK|partition=2 offset=0 hw=0",
            ),
        ),
    ),
    Row(
        109,
        "what V1 does not mean has another version, which is refused",
        ((*KNOWN, "a>> V2|1|PING|", f"a<< V1|0|{BAD}unsupported version"),),
    ),
)
def test_compatibility(broker: BrokerProcess, port: str, lines: tuple[str, ...]) -> None:
    talk(broker, port, *lines)


JOINED = ("a> JOIN|g$ $ c1", "a< OK|generation=2 assigned=[0 1 2]")


@FLUX_LATER.rows(
    "lines",
    Row(
        24,
        "JOIN may name its assignor, round_robin or range",
        (
            (
                *("a> JOIN|g$ $ c1 assignor=range", "a< OK|generation=2 assigned=[0 1 2]"),
                *("a> JOIN|g$ $ c2", "a< OK|generation=3 assigned=[2]"),
                *("a> JOIN|g$ $ c2 assignor=round_robin", "a< OK|generation=4 assigned=[1]"),
                *("a> JOIN|g$ $ c2 assignor=sticky", f"a< {BAD}invalid assignor; expected assignor=round_robin|range"),
            ),
        ),
    ),
    Row(
        25,
        "SYNC checks the generation and tells the assignment",
        (
            (
                *JOINED,
                "a> SYNC|g$ $ c1 2",
                "a< OK|generation=2 assigned=[0 1 2]",
                "a> SYNC|g$ $ c1 1",
                f"a< {FENCED}stale generation",
            ),
        ),
    ),
    Row(
        26,
        "HEARTBEAT keeps a membership",
        (
            (
                *JOINED,
                "a> HEARTBEAT|g$ $ c1 2",
                "a< OK|heartbeat=ok",
                "a> HEARTBEAT|g$ $ c2 2",
                f"a< {FENCED}unknown member",
            ),
        ),
    ),
    Row(
        27,
        "LEAVE ends a membership, and the others share its partitions",
        (
            (
                *JOINED,
                *("b> JOIN|g$ $ c2", "b< OK|generation=3 assigned=[1]", "b> LEAVE|g$ $ c2 3", "b< OK|left=true"),
                *("a> HEARTBEAT|g$ $ c1 3", f"a< {FENCED}stale generation"),
                *("a> JOIN|g$ $ c1", "a< OK|generation=4 assigned=[0 1 2]"),
            ),
        ),
    ),
    Row(
        28,
        "COMMIT takes member and generation, and checks them",
        (
            (
                *(*JOINED, "a> COMMIT|g$ $ c1 2 0 5", "a< OK|committed=true"),
                *("a> COMMIT|g$ $ c1 1 0 6", f"a< {FENCED}stale generation", "a> OFFSET|g$ $ 0", "a< OK|offset=5"),
            ),
        ),
    ),
    Row(
        29,
        "OFFSET returns what was committed, for any client",
        ((*JOINED, "a> COMMIT|g$ $ c1 2 1 7", "a< OK|committed=true", "b> OFFSET|g$ $ 1", "b< OK|offset=7"),),
    ),
    Row(
        30,
        "REPLICA_FETCH reports how far a follower is",
        (("a> PRODUCE|$ user1:x", "a< OK|…", "a> REPLICA_FETCH|$ 2 1 0", "a< OK|replica=1 acked_offset=0 …"),),
    ),
    Row(
        31,
        "SET_PARTITION_ROLE makes a partition leader or follower",
        (
            (
                *("a> SET_PARTITION_ROLE|$ 2 follower", "a< OK|topic=$ partition=2 role=follower hw=-1"),
                *("a> SET_PARTITION_ROLE|$ 2 leader", "a< OK|topic=$ partition=2 role=leader hw=-1"),
                *("a> SET_PARTITION_ROLE|$ 2 Leader", f"a< {BAD}invalid role"),
            ),
        ),
    ),
    Row(
        38,
        "NOT_LEADER is for a record to a partition that is follower here",
        (
            (
                *("a> SET_PARTITION_ROLE|$ 2 follower", "a< OK|…"),
                *("a> PRODUCE|$ user1:x", "a< ERR|NOT_LEADER|…", "a> PRODUCE|$ a:x", "a< OK|…"),
            ),
        ),
    ),
    Row(
        39,
        "GENERATION_MISMATCH is for a stale generation, an unknown member and a partition that is another's",
        (
            (
                *(*JOINED, "b> JOIN|g$ $ c2", "b< OK|generation=3 assigned=[1]"),
                *(
                    "a> SYNC|g$ $ c1 2",
                    f"a< {FENCED}stale generation",
                    "a> SYNC|g$ $ c3 3",
                    f"a< {FENCED}unknown member",
                ),
                *("b> COMMIT|g$ $ c2 3 0 1", f"b< {FENCED}partition not assigned to member"),
            ),
        ),
    ),
)
def test_commands_and_codes_of_the_later_page(broker: BrokerProcess, port: str, lines: tuple[str, ...]) -> None:
    talk(broker, port, *lines)
