"""Receive memory: in proportion to received bytes, within a limit, with pinned buffers; unused buffers are freed."""

from __future__ import annotations

import mmap
from socket import socketpair

import pytest

from polywire.server.hub import ConnectionLimits
from polywire.server.logins import Standing
from polywire.server.memory import BUFFER_BYTES_MIN, POOLED_BYTES_MAX, Arena, ReceiveMemory
from polywire.server.scheduling import PASS_S
from tests.unit.server.peers import Place, Wire, send, stalled, taken

SIZE = 64 * 1024


def give_all(arena: Arena, count: int) -> None:
    for buffer in [arena.take(SIZE) for _ in range(count)]:
        arena.give(buffer)
    arena.release_viewed()


def test_a_buffer_is_reused_only_after_release() -> None:
    arena = Arena(1 << 20)
    first = arena.take(SIZE)
    arena.give(first)
    other = arena.take(SIZE)
    assert other is not first
    arena.release_viewed()
    assert arena.take(SIZE) is first


def test_buffers_unused_for_two_seconds_are_freed() -> None:
    arena = Arena(1 << 20)
    give_all(arena, 10)
    assert arena.pooled_bytes == 10 * SIZE
    arena.sweep()
    assert arena.pooled_bytes == 10 * SIZE
    arena.sweep()
    assert arena.pooled_bytes == 0


def test_buffers_in_use_stay_in_the_pool() -> None:
    arena = Arena(1 << 20)
    give_all(arena, 10)
    seen = set()
    for _ in range(10):
        buffer = arena.take(SIZE)
        seen.add(id(buffer))
        arena.give(buffer)
        arena.release_viewed()
        arena.sweep()
    assert len(seen) <= 2
    assert arena.pooled_bytes == SIZE


def test_a_buffer_unused_for_one_second_can_still_be_reused() -> None:
    arena = Arena(1 << 20)
    buffer = arena.take(SIZE)
    arena.give(buffer)
    arena.release_viewed()
    arena.sweep()
    assert arena.take(SIZE) is buffer
    assert arena.pooled_bytes == 0
    assert arena.out_bytes == SIZE


def test_a_sweep_does_not_free_viewed_buffers() -> None:
    arena = Arena(1 << 20)
    arena.give(arena.take(SIZE))
    arena.sweep()
    arena.sweep()
    arena.release_viewed()
    arena.sweep()
    arena.sweep()
    assert arena.pooled_bytes == 0
    assert not arena.viewed


def test_the_pool_has_a_limit() -> None:
    arena = Arena(1 << 30)
    give_all(arena, POOLED_BYTES_MAX // SIZE + 10)
    assert arena.pooled_bytes == POOLED_BYTES_MAX
    arena.take(BUFFER_BYTES_MIN)
    assert arena.pooled_bytes == POOLED_BYTES_MAX


@pytest.mark.parametrize("size", [16 * 1024, SIZE, 1 << 20])
def test_large_buffers_are_returned_to_the_system_at_once(size: int) -> None:
    """The allocator returns the heap only from its end, where a small block may lie."""
    assert isinstance(Arena(1 << 30).take(size), mmap.mmap)


def test_requests_take_memory_in_proportion_to_received_bytes() -> None:
    place = Place()
    for number in range(1_100):
        transport = place.connect()
        session = place.wires[0].opened[-1]
        session.size, session.need = 4_000_000, 4_000_000
        send(transport, bytes(1 + number % 100))
    assert taken(place) <= 1_100 * BUFFER_BYTES_MIN
    large = place.connect()
    session = place.wires[0].opened[-1]
    session.size = session.need = 2_000_000
    send(large, bytes(2_000_000))
    assert len(session.frames) == 1


def test_arriving_requests_wait_for_memory_and_complete() -> None:
    place = Place(limits=ConnectionLimits(receive_total_bytes_max=3 * 1024 * 1024))
    transports = [place.connect() for _ in range(20)]
    sessions = place.wires[0].opened
    for session in sessions:
        session.size = session.need = 300_000
    sent = dict.fromkeys(transports, 0)
    for turn in range(10_000):
        for transport in transports:
            if transport.reading and sent[transport] < 300_000:
                send_some(transport, sent)
        go_on, place.soon[:] = list(place.soon), []
        for call in go_on:
            call()
        if turn % 100 == 99:
            place.hub.sweep()
        if all(size == 300_000 for size in sent.values()):
            break
    assert [len(session.frames) for session in sessions] == [1] * 20
    assert not any(transport.aborted for transport in transports)


def send_some(transport: Wire, sent: dict[Wire, int]) -> None:
    view = transport.connection.get_buffer(-1)
    size = min(len(view), 300_000 - sent[transport])
    transport.connection.buffer_updated(size)
    sent[transport] += size


def test_the_longest_stalled_request_is_closed_when_memory_is_short() -> None:
    place = Place(limits=ConnectionLimits(receive_total_bytes_max=5 * 1024 * 1024))
    old = stalled(place, 1_500_000)
    place.hub.sweep()
    young = stalled(place, 1_500_000)
    place.hub.sweep()
    assert not old.aborted
    third = stalled(place, 1_500_000)
    assert old.aborted
    assert not young.aborted
    assert not third.aborted
    assert taken(place) <= 5 * 1024 * 1024


@pytest.mark.parametrize(("unread", "goes"), [(0, True), (1, True), (5_000, True), (10_000, False)])
def test_unread_bytes_count_as_arrived_when_memory_is_short(unread: int, *, goes: bool) -> None:
    """If the loop was busy, 16 KiB a second are enough; a byte now and then is not."""
    place = Place(limits=ConnectionLimits(receive_total_bytes_max=200 * 1024))
    silent = stalled(place, 120_000)
    ours, theirs = socketpair()
    with ours, theirs:
        silent.socket = ours
        theirs.sendall(bytes(unread))
        for _ in range(3):
            place.hub.sweep()
        stalled(place, 120_000)
        assert silent.aborted is goes


def test_one_unread_byte_does_not_save_a_slow_request() -> None:
    place = Place(limits=ConnectionLimits(receive_total_bytes_max=200 * 1024))
    trickling = stalled(place, 120_000)
    ours, theirs = socketpair()
    with ours, theirs:
        trickling.socket = ours
        theirs.sendall(b"x")
        for _ in range(3):
            send(trickling, b"x")
            place.hub.sweep()
        stalled(place, 120_000)
        assert trickling.aborted


def test_pinned_bytes_stay_until_they_are_unpinned() -> None:
    place = Place(limits=ConnectionLimits(receive_total_bytes_max=5 * 1024 * 1024))
    pinned = stalled(place, 1_500_000)
    unpin = pinned.connection.pin()
    place.hub.sweep()
    old = stalled(place, 1_500_000)
    place.hub.sweep()
    place.hub.sweep()
    young = stalled(place, 1_500_000)
    assert pinned.aborted, "its peer has stalled longest"
    assert old.aborted, "pinned bytes are not reclaimed"
    assert not young.aborted
    before = taken(place)
    unpin()
    assert taken(place) == before - 2 * 1024 * 1024


def test_pinned_memory_is_not_read_into() -> None:
    place = Place(limits=ConnectionLimits(quantum_bytes_max=8_000_000))
    transport = place.connect()
    session = place.session
    session.size = session.need = 64 * 1024
    send(transport, b"x" * (64 * 1024 - 1))
    pins = []
    receive = session.receive

    def pinning(data: memoryview) -> int:
        pins.append((data, transport.connection.pin()))
        return receive(data)

    session.receive = pinning  # type: ignore[method-assign]
    send(transport, b"x")
    place.hub.commit()
    for _ in range(4):
        other = place.connect()
        place.wires[0].opened[-1].size = place.wires[0].opened[-1].need = 64 * 1024
        send(other, b"y" * (64 * 1024 - 1))
    ((data, unpin),) = pins
    assert bytes(data) == b"x" * 64 * 1024
    before = taken(place)
    unpin()
    assert taken(place) == before - 64 * 1024


def beyond(place: Place, size: int) -> Wire:
    """Return a connection in the middle of a frame larger than the limit of all receive memory."""
    transport = place.connect()
    session = place.wires[0].opened[-1]
    session.size = session.need = session.frame_bytes_max = size
    assert arrives(place, transport, size - 1) == size - 1
    return transport


def arrives(place: Place, transport: Wire, size: int) -> int:
    """Deliver bytes as far as they are read; return how many were."""
    left = size
    while left and transport.reading:
        step = min(left, 100_000)
        send(transport, b"x" * step)
        left -= step
        while left and place.soon:
            place.soon.pop(0)()
    return size - left


def test_other_requests_get_memory_beside_one_that_exceeds_the_limit() -> None:
    place = Place(limits=ConnectionLimits(receive_total_bytes_max=1024 * 1024))
    large = beyond(place, 3_000_000)
    for _ in range(10):
        other = place.connect()
        session = place.wires[0].opened[-1]
        session.size = session.need = 300_000
        assert arrives(place, other, 300_000) == 300_000
        assert len(session.frames) == 1
    assert not large.aborted


def test_the_next_request_may_exceed_the_limit_after_the_first() -> None:
    place = Place(limits=ConnectionLimits(receive_total_bytes_max=1024 * 1024))
    large = beyond(place, 3_000_000)
    session = place.wires[0].opened[-1]
    unpin = large.connection.pin()
    session.blocked = True
    send(large, b"x")
    following = place.connect()
    session = place.wires[0].opened[-1]
    session.size = session.need = session.frame_bytes_max = 3_000_000
    assert arrives(place, following, 3_000_000) < 3_000_000
    assert not following.reading
    assert taken(place) <= 5 * 1024 * 1024, "one request beyond the limit, and as much as the limit allows"
    unpin()
    large.connection.connection_lost(None)
    assert arrives(place, following, 1) == 0
    for call in list(place.soon):
        call()
    assert following.reading


def test_yielding_does_not_end_the_permission_to_exceed_the_limit() -> None:
    place = Place(limits=ConnectionLimits(receive_total_bytes_max=1024 * 1024, quantum_bytes_max=2_999_999))
    assert not beyond(place, 3_000_000).reading
    following = place.connect()
    session = place.wires[0].opened[-1]
    session.size = session.need = session.frame_bytes_max = 3_000_000
    assert arrives(place, following, 2_000_000) < 2_000_000
    assert taken(place) <= 5 * 1024 * 1024


def test_a_full_pass_does_not_end_the_permission_to_exceed_the_limit() -> None:
    place = Place(limits=ConnectionLimits(receive_total_bytes_max=1024 * 1024))
    large = beyond(place, 3_000_000)
    session = place.wires[0].opened[-1]
    session.size = session.need = session.frame_bytes_max = 4_000_000
    slow = place.connect()
    place.wires[0].opened[-1].on_receive = lambda: place.clock.advance(PASS_S)
    send(slow, b"x")
    send(large, b"x")
    assert not large.reading
    following = place.connect()
    session = place.wires[0].opened[-1]
    session.size = session.need = session.frame_bytes_max = 3_000_000
    del place.soon[:]
    view = following.connection.get_buffer(-1)
    while following.reading and taken(place) < 9 * 1024 * 1024:
        place.hub.run_queue.spent_s = 0.0  # there is time for this request
        following.connection.buffer_updated(len(view))
        view = following.connection.get_buffer(-1)
    assert taken(place) <= 6 * 1024 * 1024


def test_idle_connections_hold_no_memory_after_large_requests() -> None:
    place = Place()
    for _ in range(100):
        transport = place.connect()
        place.wires[0].opened[-1].size = 1000
        send(transport, b"x" * 200_000)
    assert taken(place) > 0
    for _ in range(5):
        place.hub.sweep()
    assert taken(place) == 0
    assert place.hub.memory.arena.pooled_bytes == 0


class Waiting:
    """A client in the middle of a request, which takes all memory it asks for and sends nothing more."""

    host = "127.0.0.1"
    standing = Standing.IDENTIFIED

    def __init__(self, memory: ReceiveMemory, held_bytes: int) -> None:
        self.held_bytes = held_bytes
        self.rate = float(held_bytes)
        self.is_receiving = True
        self.is_stalled = False
        self.aborted = False
        self._memory = memory

    def resume_receiving(self) -> None: ...

    def free_idle_buffer(self) -> None: ...

    def abort(self, reason: str = "") -> None:
        assert reason
        self.aborted = True
        self._memory.leave(self)

    def release(self) -> None: ...


def test_more_connections_are_closed_each_time_one_of_them_wastes_its_turn() -> None:
    """Connections that wait for memory are not stalled, so each one would have to get it first."""
    connections: list[Waiting] = []
    memory = ReceiveMemory(SIZE, connections, lambda call: None)
    memory.arena.take(2 * SIZE)
    small = Waiting(memory, BUFFER_BYTES_MIN)
    connections += [*(Waiting(memory, SIZE + number) for number in range(20)), small]
    closed = []
    for second in range(0, 40, 10):
        (wasteful,) = [
            connection for connection in connections if not connection.aborted and memory.grant(SIZE, connection)
        ]
        wasteful.is_receiving, wasteful.is_stalled = False, True
        memory.tick = second + 1
        memory.grant(SIZE, next(other for other in connections if not other.aborted and other is not wasteful))
        closed.append(sum(connection.aborted for connection in connections))
    assert closed == [2, 6, 14, 19], "all but the one that asks last"
    assert not small.aborted, "closing it would free next to nothing"
