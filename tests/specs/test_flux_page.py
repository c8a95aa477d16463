"""The FLUX pages on responses of any length, damaged records, and lines that are too long.

The sections named are those of the protocol's specification. Tests about bytes on a socket use a broker process, on the protocol's own port
and on the one for all protocols. The others are dialogues.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from polywire.broker.topics import Partition
from polywire.client.sync import connect
from polywire.errors import BrokerError, Corrupt, ErrorCode
from polywire.log.base import Read
from polywire.protocols.flux.context import FluxSettings
from polywire.protocols.flux.errors import WIRE_ERRORS
from polywire.protocols.flux.fetch import PIECE_BYTES_MAX
from polywire.protocols.flux.messages import WireCode
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.types import Level
from tests.broker_process import BrokerProcess
from tests.specs.flux_peer import MALFORMED, PORTS, Peer, consumed
from tests.specs.pages import FLUX, FLUX_START, FLUX_STORAGE, Differs
from tests.unit.protocols.flux.dialogue import Dialogue, World

VALUE = "x" * 60_000
LONG_COUNT = 500  # 30 MB: above any limit of a reply so far
STUCK_PEERS = 8
# buffered for a client that does not read: its backlog, a piece, and allocator overhead
STUCK_BYTES_MAX = 6 * 1024 * 1024

DAMAGED = Differs(
    "skips records that do not verify, and goes on numbering as if they had never been",
    "ends the answer before them with the offset reached as `hw`, and answers the next request there with the error; what is behind is read "
    "by its offset",
    "nothing is passed over in silence",
)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    data_dir = tmp_path_factory.mktemp("page") / "data"
    with BrokerProcess(data_dir, "--any", "127.0.0.1:0", wires=["flux", "polywire"]) as process:
        yield process


@pytest.fixture(scope="module")
def long_topic(broker: BrokerProcess) -> str:
    """Return a topic whose partition 1 holds LONG_COUNT values."""
    with Peer(broker, "flux") as peer:
        for number in range(LONG_COUNT):
            assert peer.ask(f"V1|{number}|PRODUCE|long a:{number}-{VALUE}").startswith(f"V1|{number}|OK|partition=1 ")
    return "long"


@pytest.fixture(params=PORTS)
def port(request: pytest.FixtureRequest) -> str:
    """Return the protocol's own port, and the one for all protocols."""
    return str(request.param)


# spec: flux#consume, step 4: every record from the requested offset up to hw, however many there are


@FLUX.says(92, "CONSUME answers every record up to hw, however many there are")
@FLUX_START.says(43, "… so who goes on behind hw has missed nothing")
def test_consume_returns_every_record_up_to_its_hw(broker: BrokerProcess, port: str, long_topic: str) -> None:
    with Peer(broker, port) as peer:
        peer.send(f"V1|1|CONSUME|{long_topic} 1 0\nV1|2|OFFSET|g {long_topic} 0\n")
        records, hw = consumed(peer.line())
        assert peer.line() == "V1|2|OK|offset=0\n", "the next response follows the line's end"
    assert hw == LONG_COUNT - 1
    assert [offset for offset, _ in records] == list(range(LONG_COUNT))
    assert all(value == f"{offset}-{VALUE}" for offset, value in records)


def test_a_reader_that_resumes_after_hw_misses_nothing(broker: BrokerProcess, port: str) -> None:
    topic = f"on-{port}"
    got: list[str] = []
    with Peer(broker, port) as writer, Peer(broker, port) as reader:
        for batch in range(3):
            for number in range(150):
                writer.ask(f"V1|1|PRODUCE|{topic} a:{batch}-{number}-{VALUE}")
            records, hw = consumed(reader.ask(f"V1|2|CONSUME|{topic} 1 {len(got)}"))
            got += [value for _, value in records]
            assert len(got) == hw + 1
    assert got == [f"{batch}-{number}-{VALUE}" for batch in range(3) for number in range(150)]


def test_a_half_closed_client_gets_the_whole_line(broker: BrokerProcess, port: str, long_topic: str) -> None:
    """A partial line at the end of the stream is a last request, as of ``printf … | nc`` (spec: flux#framing)."""
    with Peer(broker, port) as peer:
        peer.send(f"V1|1|CONSUME|{long_topic} 1 0")
        peer.socket.shutdown(socket.SHUT_WR)
        line = peer.line()
        assert line.endswith(f" hw={LONG_COUNT - 1}\n")
        assert len(consumed(line)[0]) == LONG_COUNT
        assert peer.line() == ""


def test_clients_that_do_not_read_block_no_other_and_use_bounded_memory(
    broker: BrokerProcess, port: str, long_topic: str
) -> None:
    with ExitStack() as stack:
        peer = stack.enter_context(Peer(broker, port))
        peer.ask(f"V1|0|CONSUME|{long_topic} 1 0")  # its memory is used again
        before = broker.memory_bytes
        for _ in range(STUCK_PEERS):
            stuck = stack.enter_context(Peer(broker, port))
            stuck.send(f"V1|1|CONSUME|{long_topic} 1 0\n")
        records, _ = consumed(peer.ask(f"V1|1|CONSUME|{long_topic} 1 {LONG_COUNT - 1}"))
        assert len(records) == 1
        whole, _ = consumed(peer.ask(f"V1|2|CONSUME|{long_topic} 1 0"))
        assert len(whole) == LONG_COUNT
        if before:
            assert broker.memory_bytes - before < STUCK_PEERS * STUCK_BYTES_MAX
    with Peer(broker, port) as after:
        assert len(consumed(after.ask(f"V1|3|CONSUME|{long_topic} 1 0"))[0]) == LONG_COUNT


@FLUX_STORAGE.says(23, "the checksum of each record is looked at")
@FLUX_STORAGE.says(24, "damaged records are skipped", DAMAGED)
def test_a_line_ends_before_damage_with_the_reached_offset_as_hw(tmp_path: Path) -> None:
    """hw is the last readable record; after it the damage is reported, and after that reading continues."""
    count, damaged = 12, 5
    with BrokerProcess(tmp_path / "data", "--any", "127.0.0.1:0", wires=["flux", "polywire"]) as broker:
        with connect(broker.url("polywire")) as client:
            for number in range(count):
                client.produce("t", [Record(b"value-%02d" % number)], partition=0)
        for _ in range(2):  # the first restart seals the records, the second one empties the caches
            assert broker.stop() == 0
            broker.start()
        wanted = b"value-%02d" % damaged
        (path,) = (found for found in (broker.data_dir / "segments").iterdir() if wanted in found.read_bytes())
        content = bytearray(path.read_bytes())
        content[content.index(wanted)] ^= 1
        path.write_bytes(content)
        for name in ("flux", "any"):
            with Peer(broker, name) as peer:
                sound = [(offset, f"value-{offset:02d}") for offset in range(count)]
                assert consumed(peer.ask("V1|1|CONSUME|t 0 0")) == (sound[:damaged], damaged - 1)
                assert peer.ask(f"V1|2|CONSUME|t 0 {damaged}").startswith("V1|2|ERR|BAD_REQUEST|stored records are")
                assert consumed(peer.ask(f"V1|3|CONSUME|t 0 {damaged + 1}")) == (sound[damaged + 1 :], count - 1)


class Pins:
    """Counts reads and releases of a partition; ``fail_at``: the offset from which reads fail."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch, *, fail_at: int | None = None) -> None:
        self.taken = self.released = 0
        self.fail_at = fail_at
        fetch = world.memory.broker.fetch

        def counted(
            partition: Partition,
            offset: int,
            *,
            bytes_max: int,
            then: Callable[[Read | BrokerError], None],
            offset_end: int | None = None,
        ) -> Read | None:
            if self.fail_at is not None:
                if offset >= self.fail_at:
                    raise Corrupt(ErrorCode.CORRUPT, "stored records are damaged")
                offset_end = min(self.fail_at, offset_end or self.fail_at)
            read = fetch(partition, offset, bytes_max=bytes_max, then=then, offset_end=offset_end)
            assert isinstance(read, Read)
            self.taken += 1
            return Read(read.chunks, read.next_offset, read.readable_offset, self)

        monkeypatch.setattr(type(world.memory.broker), "fetch", staticmethod(counted))

    def release(self) -> None:
        self.released += 1


def filled(count: int) -> World:
    """Return a broker with that many values in partition 1 of ``t``."""
    world = World()
    peer = world.connect()
    for number in range(count):
        assert "|OK|" in peer.ask(f"V1|1|PRODUCE|t a:{number}-{VALUE}")
    return world


def stuck(world: World) -> Dialogue:
    """Return a client that has requested everything and reads nothing."""
    peer = world.connect()
    peer.backlog = peer.backlog_max
    peer.feed(b"V1|1|CONSUME|t 1 0\n")
    peer.pass_by()
    return peer


def test_nothing_is_read_from_the_log_for_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    world = filled(200)
    pins = Pins(world, monkeypatch)
    peer = stuck(world)
    assert 0 < len(peer.sent) <= PIECE_BYTES_MAX
    taken = pins.taken
    peer.pass_by()
    assert (pins.taken, pins.released) == (taken, taken), "nothing of the log is pinned meanwhile"
    peer.backlog = 0
    peer.session.drained()
    peer.pass_by()
    records, hw = consumed(peer.take().decode())
    assert (len(records), hw) == (200, 199)


def test_a_reset_connection_leaves_nothing_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    world = filled(200)
    pins = Pins(world, monkeypatch)
    peer = stuck(world)
    sent = len(peer.sent)
    peer.session.close()
    peer.session.drained()
    peer.pass_by()
    assert len(peer.sent) == sent
    assert pins.taken == pins.released


@pytest.mark.parametrize("damaged", [1, 60, 199])
def test_a_started_line_is_completed_if_reading_fails(monkeypatch: pytest.MonkeyPatch, damaged: int) -> None:
    world = filled(200)
    Pins(world, monkeypatch, fail_at=damaged)
    peer = world.connect()
    records, hw = consumed(peer.ask("V1|1|CONSUME|t 1 0"))
    assert (len(records), hw) == (damaged, damaged - 1)
    assert peer.ask(f"V1|2|CONSUME|t 1 {hw + 1}") == "V1|2|ERR|BAD_REQUEST|stored records are damaged"


def test_values_that_grow_by_escaping_are_written_in_pieces() -> None:
    """An escaped character becomes three; the pieces stay bounded and complete (spec: flux#values-in-replies)."""
    world = World()
    topic = world.memory.broker.ensure_topic("t")
    value = b"\xff" * 100_000
    for _ in range(40):
        world.memory.broker.produce(topic.partitions[0], from_records([Record(value)]), level=Level.WRITTEN, done=None)
        world.memory.run()
    records, hw = consumed(world.connect().ask("V1|1|CONSUME|t 0 0"))
    assert (len(records), hw) == (40, 39)
    assert all(shown == "%FF" * 100_000 for _, shown in records)


# spec: flux#framing, flux#requests, flux#errors, flux#disagreements: the words of the page, and its four sections


@pytest.mark.parametrize(
    ("request_line", "reason"),
    [
        ("PRODUCE|t a:x acks=ALL", "invalid ack mode; expected acks=0|1|all"),
        ("PRODUCE|t a:x ACKS=1", "invalid ack mode; expected acks=0|1|all"),
        ("JOIN|g t c assignor=RANGE", "invalid assignor; expected assignor=round_robin|range"),
        ("JOIN|g t c Assignor=range", "invalid assignor; expected assignor=round_robin|range"),
        ("SET_PARTITION_ROLE|t 0 Leader", "invalid role"),
        ("SET_PARTITION_ROLE|t 0 FOLLOWER", "invalid role"),
        ("CONSUME|t 0 0 MAX=1", "CONSUME requires: <topic> <partition> <offset>"),
    ],
)
def test_words_are_exactly_those_of_the_page(request_line: str, reason: str) -> None:
    assert World().connect().ask(f"V1|7|{request_line}") == f"V1|7|ERR|BAD_REQUEST|{reason}"


@pytest.mark.parametrize(
    "request_line", ["PRODUCE|t a:x|y", "PRODUCE|t a|b:x", "PRODUCE|t a:x|", "OFFSET|g t 0|x", "PING||", "NONE|||"]
)
def test_a_fifth_section_is_malformed_if_configured(request_line: str) -> None:
    """Step 2 of reading a line (spec: flux#requests): the response has id 0."""
    peer = World(flux=FluxSettings(pipes_in_arguments=False)).connect()
    assert peer.ask(f"V1|7|{request_line}") == MALFORMED
    peer.feed(f"V1|1|PRODUCE|t a:1\nV1|2|{request_line}\nV1|3|PRODUCE|t a:2\n".encode())
    peer.pass_by()
    assert peer.take().decode().splitlines() == [
        "V1|1|OK|partition=1 offset=0 hw=0",
        MALFORMED,
        "V1|3|OK|partition=1 offset=1 hw=1",
    ]


def test_pipes_belong_to_the_arguments_by_default() -> None:
    """Step 2 (spec: flux#requests): the reference broker does so, and its SDK relies on it."""
    peer = World().connect()
    assert peer.ask("V1|1|PRODUCE|t a:x|y") == "V1|1|OK|partition=1 offset=0 hw=0"
    assert peer.ask("V1|2|CONSUME|t 1 0") == "V1|2|OK|messages=0:x|y hw=0"


def test_the_ping_of_the_page_is_answered(broker: BrokerProcess, port: str) -> None:
    """A command without arguments keeps its last pipe (spec: flux#requests, flux#replies)."""
    with Peer(broker, port) as peer:
        assert peer.ask("V1|99|PING|") == "V1|99|OK"
        assert peer.ask("V1|98|PING") == MALFORMED
        assert peer.ask("V1|97|PING|x") == "V1|97|ERR|BAD_REQUEST|PING requires no args"


LEADERLESS: Final = {ErrorCode.NOT_OWNER, ErrorCode.STOPPING, ErrorCode.UNREACHABLE}


@pytest.mark.parametrize("code", [code for code in ErrorCode if code not in LEADERLESS])
def test_a_full_or_busy_broker_does_not_respond_with_not_leader(code: ErrorCode) -> None:
    assert WIRE_ERRORS[code][0] is not WireCode.NOT_LEADER


@FLUX.says(
    54,
    "PRODUCE appends a record, however long its line is",
    Differs(
        "closes the connection at a line above 64 KiB, without an answer",
        "answers that the line is too long, then closes; `--flux-line-bytes-max` allows longer lines",
        "memory for a line that has not ended must have a limit, and real clients never send longer lines",
    ),
)
@pytest.mark.parametrize("size", [65_537, 70_000, 5_000_000])
def test_a_line_above_the_limit_gets_an_error_before_the_connection_closes(
    broker: BrokerProcess, port: str, size: int
) -> None:
    """At most 65,536 bytes, the ending included (spec: flux#framing)."""
    topic = f"lines-{port}-{size}"
    with Peer(broker, port) as peer:
        peer.send(f"V1|1|PRODUCE|{topic} a:x\n" + "V1|2|PRODUCE|t a:".ljust(size - 1, "x") + "\nV1|3|PING|\n")
        assert peer.line() == "V1|1|OK|partition=1 offset=0 hw=0\n"
        assert peer.line() == "V1|0|ERR|BAD_REQUEST|a line has more than 65536 bytes\n"
        assert peer.line() == ""


@pytest.mark.parametrize(("size", "fits"), [(100, True), (101, False)])
def test_the_limit_of_a_line_is_a_setting(size: int, fits: bool) -> None:
    peer = World(flux=FluxSettings(line_bytes_max=100)).connect()
    for line in (b"V1|1|PRODUCE|t a:", b"V1|1|produce|t a:"):
        answer = peer.beside().exchange(line.ljust(size - 1, b"x") + b"\n")
        assert (b"|OK|" in answer) is fits
        assert (answer == b"V1|0|ERR|BAD_REQUEST|a line has more than 100 bytes\n") is not fits


def test_the_limit_of_a_line_is_an_option(tmp_path: Path) -> None:
    with (
        BrokerProcess(tmp_path / "data", "--flux-line-bytes-max", "200000", wires=["flux"]) as broker,
        Peer(broker, "flux") as peer,
    ):
        assert peer.ask("V1|1|PRODUCE|t a:" + "x" * 190_000) == "V1|1|OK|partition=1 offset=0 hw=0"
        assert "more than 200000 bytes" in peer.ask("V1|2|PRODUCE|t a:" + "x" * 200_000)
