"""The connection driver: order of bytes, buffers, pauses, backlogs, and clients that misbehave."""

from __future__ import annotations

import ctypes
import socket

import pytest

from polywire.errors import PeerError
from polywire.server.connection import CHECK_TICKS
from polywire.server.connection_slots import QUIET_TICKS
from polywire.server.hub import ConnectionLimits
from polywire.server.memory import CHUNK_BYTES, LAST_READ_AT
from polywire.server.phases import TRANSITIONS, Phase
from tests.hostile.peers import End, hang_up
from tests.unit.server.peers import FramesWire, LongWire, Place, Wire, send, stalled, taken


def memory(transport: Wire) -> int:
    """Return the address of the buffer for the next bytes."""
    return ctypes.addressof(ctypes.c_char.from_buffer(transport.connection.get_buffer(-1)))


def test_frames_arrive_whole_and_in_order_wherever_reads_cut_them() -> None:
    place = Place()
    transport = place.connect()
    place.session.size = 1000
    data = bytes(index % 251 for index in range(300_000))
    for start in range(0, len(data), 777):
        send(transport, data[start : start + 777])
    assert b"".join(place.session.frames) == data
    assert all(len(frame) == 1000 for frame in place.session.frames)


def test_bytes_of_a_write_batch_are_not_overwritten() -> None:
    place = Place()
    transport = place.connect()
    connection = transport.connection
    place.session.size = 1000
    seen: list[memoryview] = []
    for number in range(100, 200):
        view = connection.get_buffer(-1)
        view[:1000] = bytes([number]) * 1000
        connection.buffer_updated(1000)
        place.viewed = True
        seen.append(view[:1000])
    assert [bytes(view) for view in seen] == [bytes([number]) * 1000 for number in range(100, 200)]


@pytest.mark.parametrize("viewed", [False, True])
def test_memory_is_reused_once_no_write_batch_refers_to_it(viewed: bool) -> None:
    place = Place()
    transport = place.connect()
    place.session.size = 1000
    first = memory(transport)
    for _ in range(LAST_READ_AT // 1000):
        send(transport, bytes(1000))
    assert memory(transport) == first + LAST_READ_AT // 1000 * 1000
    send(transport, bytes(1000))
    place.viewed = viewed
    assert (memory(transport) == first) is not viewed


def test_freed_memory_is_reused_at_once() -> None:
    place = Place()
    transport = place.connect()
    place.session.size = 1000
    send(transport, bytes(500))
    send(transport, bytes(500))
    assert place.hub.memory.arena.viewed
    memory(transport)
    assert not place.hub.memory.arena.viewed


def test_a_full_buffer_is_reused_after_a_commit() -> None:
    place = Place()
    transport = place.connect()
    place.session.size = 1024
    send(transport, bytes(1_500 * 1024))
    first = memory(transport)
    place.viewed = True
    commits = place.commits
    send(transport, bytes(place.hub.limits.receive_bytes_max))
    assert place.commits == commits + 1
    assert memory(transport) == first


def test_unconsumed_bytes_move_to_the_front_of_a_full_buffer() -> None:
    place = Place(limits=ConnectionLimits(quantum_bytes_max=8_000_000))
    transport = place.connect()
    place.session.size = 1000
    data = bytes(index % 251 for index in range(3_000_000))
    for start in range(0, len(data), 600_000):
        place.viewed = True
        send(transport, data[start : start + 600_000])
    assert b"".join(place.session.frames) == data
    assert taken(place) == place.hub.limits.receive_bytes_max


@pytest.mark.parametrize("doing", ["commit", "pause", "close", "abort", "fail", "write", "write_many", "release"])
def test_no_callback_runs_while_the_loop_asks_for_a_buffer(doing: str) -> None:
    place = Place()
    transport, other = place.connect(), place.connect()
    connection = other.connection
    actions = {
        "commit": place.hub.commit,
        "pause": connection.stop_reading,
        "close": connection.close,
        "abort": lambda: connection.abort("for a test"),
        "fail": lambda: connection.fail(PeerError("for a test", fatal=True)),
        "write": lambda: connection.write(b"x"),
        "write_many": lambda: connection.write_many([b"x"]),
        "release": connection.release,
    }
    place.hub.memory.shared_chunk.position = CHUNK_BYTES  # so it must ask whether it can be reused
    place.when_asked = actions[doing]
    with pytest.raises(AssertionError, match="asks for a buffer"):
        transport.connection.get_buffer(-1)
    place.when_asked = None
    actions[doing]()


def test_a_producing_connection_waits_while_the_log_is_behind() -> None:
    place = Place()
    producing, asking = place.connect(), place.connect()
    first, second = place.wires[0].opened
    second.size = 1000
    place.congested = True
    send(producing, b"a")
    assert not producing.reading
    send(asking, b"half a frame that appends nothing")
    assert asking.reading
    place.congested = False
    (relieved,) = place.relief
    relieved()
    assert producing.reading
    send(producing, b"b")
    assert first.frames == [b"a", b"b"]


def test_a_flooding_connection_yields_to_others() -> None:
    place = Place(limits=ConnectionLimits(quantum_bytes_max=100_000))
    flooding, other = place.connect(), place.connect()
    send(flooding, b"x" * 99_000)
    assert flooding.reading
    assert place.soon == []
    send(flooding, b"x" * 2_000)
    assert not flooding.reading
    send(other, b"y")
    assert other.reading
    (go_on,) = place.soon
    go_on()
    assert flooding.reading
    send(flooding, b"x" * 99_000)
    assert flooding.reading, "bytes that were read in an earlier turn do not count"


@pytest.mark.parametrize("why", ["congested", "blocked", "draining", "lost"])
def test_yielding_does_not_end_another_pause(why: str) -> None:
    place = Place(limits=ConnectionLimits(quantum_bytes_max=1000))
    transport = place.connect()
    session = place.session
    place.congested = why == "congested"
    send(transport, b"x" * 1000 + (b"!" if why == "blocked" else b""))
    if why == "draining":
        transport.connection.stop_reading()
    if why == "lost":
        transport.abort()
    for go_on in place.soon:
        go_on()
    assert not transport.reading
    assert b"".join(session.frames)[:1000] == b"x" * 1000


def test_a_long_frame_gets_a_large_enough_buffer() -> None:
    place = Place(limits=ConnectionLimits(quantum_bytes_max=8_000_000))
    transport = place.connect()
    place.session.size = place.session.need = 3_000_000
    send(transport, b"x" * 3_000_000)
    assert [len(frame) for frame in place.session.frames] == [3_000_000]
    assert taken(place) == 4 * 1024 * 1024


def test_buffers_grow_with_the_read_size_and_are_freed_when_idle() -> None:
    place = Place(limits=ConnectionLimits(quantum_bytes_max=8_000_000))
    transport = place.connect()
    send(transport, b"x" * 4_000_000)
    assert taken(place) == place.hub.limits.receive_bytes_max
    for _ in range(3):
        place.hub.sweep()
    assert taken(place) == 0
    send(transport, b"y")
    assert place.session.frames[-1] == b"y"
    assert taken(place) == 0, "a frame that is read at once needs no buffer"


def test_a_resumed_session_gets_the_waiting_bytes() -> None:
    place = Place()
    transport = place.connect()
    send(transport, b"ab!cd")
    assert place.session.frames == [b"a", b"b", b"!"]
    assert not transport.reading
    place.session.blocked = False
    place.session.resume()
    assert place.session.frames == [b"a", b"b", b"!", b"c", b"d"]
    assert transport.reading


def test_resuming_into_another_pause_does_not_resume_reading() -> None:
    place = Place()
    transport = place.connect()
    send(transport, b"!!x")
    place.session.blocked = False
    place.session.resume()
    assert place.session.frames == [b"!", b"!"]
    assert not transport.reading


def test_bytes_of_another_transport_wait_for_a_paused_session() -> None:
    place = Place()
    connection = place.connect().connection
    moved = Wire(connection)
    session, offered = place.session, 0
    receive = session.receive

    def counting(data: memoryview) -> int:
        nonlocal offered
        offered += 1
        return receive(data)

    session.receive = counting  # type: ignore[method-assign]
    connection.move_to(moved, b"a!" + b"x" * 40_000)
    assert session.frames == [b"a", b"!"]
    assert offered == 1
    assert not moved.reading
    session.blocked = False
    session.resume()
    assert b"".join(session.frames) == b"a!" + b"x" * 40_000
    assert moved.reading


def test_reading_resumes_once_no_reason_to_pause_is_left() -> None:
    place = Place()
    transport = place.connect()
    place.congested = True
    send(transport, b"a!b")
    place.session.blocked = False
    place.session.resume()
    assert place.session.frames == [b"a", b"!"]
    assert not transport.reading
    place.congested = False
    (relieved,) = place.relief
    relieved()
    assert place.session.frames == [b"a", b"!", b"b"]
    assert transport.reading


def test_phases_only_move_forward_and_can_end_anywhere() -> None:
    assert set(TRANSITIONS) == set(Phase)
    for phase, following in TRANSITIONS.items():
        assert all(later > phase for later in following)
        assert phase is Phase.CLOSED or Phase.CLOSED in following


@pytest.mark.parametrize("wires", [1, 2])
@pytest.mark.parametrize("sent", [b"", b"Fr", b"Frame"])
@pytest.mark.parametrize("ending", ["lost", "end", "abort", "finished"])
def test_a_closed_connection_frees_everything_once(ending: str, sent: bytes, wires: int) -> None:
    place = Place(*[LongWire() for _ in range(wires)])
    transport = place.connect()
    for byte in sent:
        send(transport, bytes([byte]))
    connection = transport.connection
    endings = {
        "lost": lambda: connection.connection_lost(None),
        "end": lambda: connection.end("for a test"),
        "abort": lambda: connection.abort("for a test"),
        "finished": connection.eof_received,
    }
    endings[ending]()
    if ending == "finished":
        connection.connection_lost(None)
    assert not place.hub.connections
    assert taken(place) <= 0
    assert all(session.closed for wire in place.wires for session in wire.opened)


def test_a_client_that_does_not_read_is_not_read_from() -> None:
    place = Place(limits=ConnectionLimits(backlog_bytes_max=100))
    transport = place.connect()
    transport.takes = False
    place.session.output.write(b"x" * 200)
    assert place.session.output.backlog == 200
    send(transport, b"a")
    assert not transport.reading
    transport.take()
    assert transport.reading
    assert place.session.drained_count == 1


def test_parts_are_released_when_sent_or_when_the_connection_is_lost() -> None:
    place = Place()
    transport = place.connect()
    released: list[int] = []
    place.session.output.write_many([b"a", b"b"], lambda: released.append(1))
    assert released == [1]
    transport.takes = False
    place.session.output.write_many([b"c"], lambda: released.append(2))
    assert released == [1]
    transport.take()
    assert released == [1, 2]
    transport.takes = False
    place.session.output.write_many([b"d"], lambda: released.append(3))
    transport.abort()
    assert released == [1, 2, 3]
    place_after = place.session.output
    place_after.write_many([b"e"], lambda: released.append(4))
    assert released == [1, 2, 3, 4]


def test_bytes_before_the_end_of_the_stream_reach_the_session() -> None:
    place = Place()
    transport = place.connect()
    place.session.size = 10
    send(transport, b"left")
    assert transport.connection.eof_received()
    assert place.session.finished == b"left"


@pytest.mark.parametrize("error", [PeerError("garbage", fatal=True), RuntimeError("a bug")])
def test_a_failing_session_closes_only_its_connection(error: Exception) -> None:
    place = Place()
    failing, other = place.connect(), place.connect()
    first, second = place.wires[0].opened
    first.fails = error
    send(failing, b"a")
    assert failing.closing
    assert first.closed
    send(other, b"b")
    assert second.frames == [b"b"]
    assert place.commits >= 1, "requests of the failed session are committed and acknowledged first"


def test_a_failing_commit_leaves_no_connection_half_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place()
    failing = place.connect()
    place.session.fails = PeerError("garbage", fatal=True)

    def breaks() -> None:
        raise RuntimeError("a bug of the log")

    monkeypatch.setattr(place, "commit", breaks)
    send(failing, b"a")
    assert failing.closing
    assert place.session.closed


def test_the_protocol_is_detected_as_early_as_possible() -> None:
    short, long = FramesWire(), LongWire()
    place = Place(long, short)
    transport = place.connect()
    send(transport, b"Frame")
    assert len(long.opened) == 1
    assert long.opened[0].frames == [b"F", b"r", b"a", b"m", b"e"]
    assert not short.opened


def test_detection_waits_for_more_bytes() -> None:
    place = Place(LongWire())
    place.wires = (*place.wires, LongWire())
    transport = place.connect()
    for byte in b"Fram":
        send(transport, bytes([byte]))
    assert not place.wires[0].opened
    send(transport, b"e")
    assert place.wires[0].opened[0].frames == [b"F", b"r", b"a", b"m", b"e"]


def test_unknown_bytes_close_the_connection() -> None:
    place = Place(FramesWire(), LongWire())
    transport = place.connect()
    send(transport, b"GET / HTTP/1.1\r\n")
    assert transport.aborted


def test_a_connection_without_a_protocol_is_closed() -> None:
    place = Place(LongWire(), LongWire())
    transport = place.connect()
    for _ in range(place.hub.limits.unknown_s + 1):
        place.hub.sweep()
    assert transport.aborted


def test_connections_have_a_limit() -> None:
    place = Place(limits=ConnectionLimits(connections_max=2))
    for transport in (place.connect(), place.connect()):
        send(transport, b"F")
    third = place.connect()
    assert third.aborted
    assert place.hub.refused == 1
    next(iter(place.hub.connections)).abort("for a test")
    assert not place.connect().aborted


def test_a_silent_connection_gives_its_slot_to_a_new_one() -> None:
    place = Place(limits=ConnectionLimits(connections_max=3))
    spoken, silent, younger = place.connect(), place.connect(), place.connect()
    send(spoken, b"F")
    assert not place.connect().aborted
    assert [silent.aborted, younger.aborted, spoken.aborted] == [True, False, False]
    assert not place.connect().aborted
    assert younger.aborted
    assert len(place.hub.connections) == 3


def test_a_quiet_connection_gives_its_slot_to_a_new_one() -> None:
    place = Place(limits=ConnectionLimits(connections_max=2))
    quiet, busy = place.connect(), place.connect()
    send(quiet, b"F")
    for _ in range(QUIET_TICKS):
        place.hub.sweep()
        send(busy, b"F")
    assert not place.connect().aborted
    assert quiet.aborted
    assert not busy.aborted


def test_an_address_with_most_slots_gives_way_to_one_with_few() -> None:
    place = Place(limits=ConnectionLimits(connections_max=8))
    many = [place.connect(host="10.0.0.1") for _ in range(8)]
    for transport in many:
        send(transport, b"F")
    assert place.connect(host="10.0.0.1").aborted
    assert not place.connect(host="10.0.0.2").aborted
    assert sum(transport.aborted for transport in many) == 1


@pytest.mark.parametrize("has_finished", [False, True])
def test_a_reset_is_noticed_while_a_request_waits(*, has_finished: bool) -> None:
    """Event loops report no reset of a connection whose reading is paused, or whose stream has ended."""
    place = Place()
    transport = place.connect()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        transport.socket = server.accept()[0]
        with transport.socket:
            send(transport, b"ab!cd")
            assert not transport.reading
            if has_finished:
                client.shutdown(socket.SHUT_WR)
                transport.connection.eof_received()
            for _ in range(CHECK_TICKS):
                place.hub.sweep()
            assert not transport.aborted
            hang_up(client, End.RST)
            for _ in range(CHECK_TICKS):
                place.hub.sweep()
            assert transport.aborted


def test_a_stalled_request_closes_its_connection() -> None:
    place = Place()
    large, small, idle = stalled(place, 2_000_000), stalled(place, 2_000), place.connect()
    for _ in range(place.hub.limits.stalled_s + 1):
        place.hub.sweep()
    assert large.aborted
    assert small.aborted
    assert not idle.aborted


def test_a_request_that_arrives_too_slowly_closes_its_connection() -> None:
    place = Place()
    transport = stalled(place, 20_000)
    for _ in range(place.hub.limits.stalled_s + 1):
        assert not transport.aborted
        send(transport, b"x")
        place.hub.sweep()
    assert transport.aborted


def test_unread_responses_close_the_connection() -> None:
    place = Place()
    transport = place.connect()
    transport.takes = False
    place.session.output.write(b"x")
    for _ in range(place.hub.limits.stalled_s + 1):
        place.hub.sweep()
    assert transport.aborted


def test_unsent_responses_of_all_connections_have_a_limit() -> None:
    place = Place(limits=ConnectionLimits(backlog_bytes_max=10, backlog_total_bytes_max=250))
    transports = [place.connect() for _ in range(3)]
    for transport, session in zip(transports, place.wires[0].opened, strict=True):
        transport.takes = False
        session.output.write(b"x" * 100)
        place.hub.sweep()
    assert [transport.aborted for transport in transports] == [True, False, False]


def test_new_connections_are_rejected_while_draining() -> None:
    place = Place()
    place.hub.draining = True
    assert place.connect().aborted
