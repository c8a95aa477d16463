"""Reuse of reply buffers, and the limit of cached ones."""

from __future__ import annotations

from polywire.protocols.runtime.reply_buffers import FREE_BYTES_MAX, REPLY_BYTES_MIN, ReplyBuffers


def test_a_returned_buffer_is_reused() -> None:
    buffers = ReplyBuffers()
    first = buffers.take()
    assert len(first) == REPLY_BYTES_MIN
    second = buffers.take()
    assert second is not first
    buffers.give(first)
    assert buffers.take(1) is first


def test_a_buffer_has_the_requested_size() -> None:
    buffers = ReplyBuffers()
    small, large = buffers.take(), buffers.take(4 * REPLY_BYTES_MIN)
    assert len(large) == 4 * REPLY_BYTES_MIN
    buffers.give(large)
    buffers.give(small)
    assert buffers.take(2 * REPLY_BYTES_MIN) is large
    assert buffers.take(2 * REPLY_BYTES_MIN) is not small


def test_cached_buffers_are_bounded_and_the_oldest_are_dropped() -> None:
    buffers = ReplyBuffers()
    size = FREE_BYTES_MAX // 4
    given = [bytearray(size) for _ in range(5)]
    for buffer in given:
        buffers.give(buffer)
    assert buffers.free_bytes == 4 * size
    taken = [buffers.take(size) for _ in range(4)]
    assert [id(buffer) for buffer in taken] == [id(buffer) for buffer in reversed(given[1:])]
    assert buffers.free_bytes == 0


def test_a_buffer_that_has_grown_too_large_is_not_cached() -> None:
    buffers = ReplyBuffers()
    kept = buffers.take()
    buffers.give(kept)
    buffers.give(bytearray(FREE_BYTES_MAX + 1))
    assert buffers.free_bytes == len(kept)
