"""Buffers of replies: who has them, and how many are kept."""

from __future__ import annotations

from polywire.protocols.runtime.reply_buffers import KEPT_BYTES_MAX, REPLY_BYTES_MIN, ReplyBuffers


def test_a_buffer_is_used_again_once_it_was_given_back() -> None:
    buffers = ReplyBuffers()
    first = buffers.take()
    assert len(first) == REPLY_BYTES_MIN
    second = buffers.take()
    assert second is not first
    buffers.give(first)
    assert buffers.take(1) is first


def test_a_buffer_is_as_large_as_was_asked_for() -> None:
    buffers = ReplyBuffers()
    small, large = buffers.take(), buffers.take(4 * REPLY_BYTES_MIN)
    assert len(large) == 4 * REPLY_BYTES_MIN
    buffers.give(large)
    buffers.give(small)
    assert buffers.take(2 * REPLY_BYTES_MIN) is large
    assert buffers.take(2 * REPLY_BYTES_MIN) is not small


def test_what_is_kept_has_a_limit_and_the_oldest_goes_first() -> None:
    buffers = ReplyBuffers()
    size = KEPT_BYTES_MAX // 4
    given = [bytearray(size) for _ in range(5)]
    for buffer in given:
        buffers.give(buffer)
    assert buffers.kept_bytes == 4 * size
    taken = [buffers.take(size) for _ in range(4)]
    assert [id(buffer) for buffer in taken] == [id(buffer) for buffer in reversed(given[1:])]
    assert buffers.kept_bytes == 0


def test_one_that_has_grown_too_large_is_not_kept() -> None:
    buffers = ReplyBuffers()
    kept = buffers.take()
    buffers.give(kept)
    buffers.give(bytearray(KEPT_BYTES_MAX + 1))
    assert buffers.kept_bytes == len(kept)
