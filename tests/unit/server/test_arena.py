"""The pool of receive buffers: unused buffers are freed, and buffers in use are not touched."""

from __future__ import annotations

import mmap

import pytest

from polywire.server.memory import BUFFER_BYTES_MIN, KEPT_BYTES_MAX, Arena

SIZE = 64 * 1024


def give_all(arena: Arena, count: int) -> None:
    for buffer in [arena.take(SIZE) for _ in range(count)]:
        arena.give(buffer)
    arena.settle()


def test_a_buffer_is_reused_only_after_settle() -> None:
    arena = Arena(1 << 20)
    first = arena.take(SIZE)
    arena.give(first)
    other = arena.take(SIZE)
    assert other is not first
    arena.settle()
    assert arena.take(SIZE) is first


def test_buffers_unused_for_two_seconds_are_freed() -> None:
    arena = Arena(1 << 20)
    give_all(arena, 10)
    assert arena.kept_bytes == 10 * SIZE
    arena.sweep()
    assert arena.kept_bytes == 10 * SIZE
    arena.sweep()
    assert arena.kept_bytes == 0


def test_buffers_in_use_stay_in_the_pool() -> None:
    arena = Arena(1 << 20)
    give_all(arena, 10)
    seen = set()
    for _ in range(10):
        buffer = arena.take(SIZE)
        seen.add(id(buffer))
        arena.give(buffer)
        arena.settle()
        arena.sweep()
    assert len(seen) <= 2
    assert arena.kept_bytes == SIZE


def test_a_buffer_unused_for_one_second_can_still_be_reused() -> None:
    arena = Arena(1 << 20)
    buffer = arena.take(SIZE)
    arena.give(buffer)
    arena.settle()
    arena.sweep()
    assert arena.take(SIZE) is buffer
    assert arena.kept_bytes == 0
    assert arena.out_bytes == SIZE


def test_a_sweep_does_not_free_viewed_buffers() -> None:
    arena = Arena(1 << 20)
    arena.give(arena.take(SIZE))
    arena.sweep()
    arena.sweep()
    arena.settle()
    arena.sweep()
    arena.sweep()
    assert arena.kept_bytes == 0
    assert not arena.viewed


def test_the_pool_has_a_limit() -> None:
    arena = Arena(1 << 30)
    give_all(arena, KEPT_BYTES_MAX // SIZE + 10)
    assert arena.kept_bytes == KEPT_BYTES_MAX
    arena.take(BUFFER_BYTES_MIN)
    assert arena.kept_bytes == KEPT_BYTES_MAX


@pytest.mark.parametrize("size", [16 * 1024, SIZE, 1 << 20])
def test_large_buffers_are_returned_to_the_system_at_once(size: int) -> None:
    """The allocator returns the heap only from its end, where a small block may lie."""
    assert isinstance(Arena(1 << 30).take(size), mmap.mmap)
