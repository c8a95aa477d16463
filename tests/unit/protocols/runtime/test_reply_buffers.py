"""Reuse of reply buffers, and the limit of cached ones."""

from __future__ import annotations

from polywire.protocols.runtime.reply_buffers import FREE_BYTES_MAX, REPLY_BYTES_MIN, REST_S, ReplyBuffers
from polywire.testing.loop import ManualLoop


def test_a_returned_buffer_is_reused() -> None:
    buffers = ReplyBuffers(ManualLoop())
    first = buffers.take()
    assert len(first) == REPLY_BYTES_MIN
    second = buffers.take()
    assert second is not first
    buffers.give(first)
    assert buffers.take(1) is first


def test_a_buffer_has_the_requested_size() -> None:
    buffers = ReplyBuffers(ManualLoop())
    small, large = buffers.take(), buffers.take(4 * REPLY_BYTES_MIN)
    assert len(large) == 4 * REPLY_BYTES_MIN
    buffers.give(large)
    buffers.give(small)
    assert buffers.take(2 * REPLY_BYTES_MIN) is large
    assert buffers.take(2 * REPLY_BYTES_MIN) is not small


def test_cached_buffers_are_bounded_and_the_oldest_are_dropped() -> None:
    buffers = ReplyBuffers(ManualLoop())
    size = FREE_BYTES_MAX // 4
    given = [bytearray(size) for _ in range(5)]
    for buffer in given:
        buffers.give(buffer)
    assert buffers.free_bytes == 4 * size
    taken = [buffers.take(size) for _ in range(4)]
    assert [id(buffer) for buffer in taken] == [id(buffer) for buffer in reversed(given[1:])]
    assert buffers.free_bytes == 0


def test_a_buffer_that_has_grown_too_large_is_not_cached() -> None:
    buffers = ReplyBuffers(ManualLoop())
    kept = buffers.take()
    buffers.give(kept)
    buffers.give(bytearray(FREE_BYTES_MAX + 1))
    assert buffers.free_bytes == len(kept)


def test_buffers_that_are_not_used_are_freed() -> None:
    loop = ManualLoop()
    buffers = ReplyBuffers(loop)
    for buffer in [buffers.take() for _ in range(3)]:
        buffers.give(buffer)
    loop.advance(REST_S)
    assert buffers.free_bytes == 3 * REPLY_BYTES_MIN, "all were used since the timer began"
    used = buffers.take()
    buffers.give(used)
    loop.advance(REST_S)
    assert buffers.free_bytes == REPLY_BYTES_MIN
    assert buffers.take() is used
    buffers.give(used)
    loop.advance(2 * REST_S)
    assert buffers.free_bytes == 0
    buffers.give(used)
    loop.advance(2 * REST_S)
    assert buffers.free_bytes == 0, "the timer runs again"
