"""Map keys to partitions with the hash functions of each protocol's clients, for one key or many.

Clients compute the same partitions (concepts: records#keys-and-partitions). Hashes use seed 0, are unsigned, and are
taken modulo the partition count. A null key is hashed like an empty one. Iggy's oldest dialect uses MurmurHash3 x64
128.
"""

from __future__ import annotations

from array import array
from typing import Any, Final

import cython

from polywire.records.memory import Lendable
from polywire.types import Buffer, KeyHash

if cython.compiled:
    from cython.cimports.polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i64,
        load_u32,
        load_u64,
        store_u32,
    )
else:
    from polywire.records.memory import Lent, lend, lend_writable, load_i64, load_u32, load_u64, store_u32

_FNV32 = cython.declare(cython.int, 0)
_FNV64 = cython.declare(cython.int, 1)
_XXH32 = cython.declare(cython.int, 2)
_MURMUR3 = cython.declare(cython.int, 3)
_NUMBERS = {KeyHash.FNV32: 0, KeyHash.FNV64: 1, KeyHash.XXH32: 2, KeyHash.MURMUR3: 3}

_FNV32_START = cython.declare(cython.uint, 0x811C9DC5)
_FNV32_PRIME = cython.declare(cython.uint, 0x01000193)
_FNV64_START = cython.declare(cython.ulonglong, 0xCBF29CE484222325)
_FNV64_PRIME = cython.declare(cython.ulonglong, 0x00000100000001B3)
_XXH_P1 = cython.declare(cython.uint, 0x9E3779B1)
_XXH_P2 = cython.declare(cython.uint, 0x85EBCA77)
_XXH_P3 = cython.declare(cython.uint, 0xC2B2AE3D)
_XXH_P4 = cython.declare(cython.uint, 0x27D4EB2F)
_XXH_P5 = cython.declare(cython.uint, 0x165667B1)
_MURMUR_C1 = cython.declare(cython.ulonglong, 0x87C37B91114253D5)
_MURMUR_C2 = cython.declare(cython.ulonglong, 0x4CF5AD432745937F)
_MURMUR_F1 = cython.declare(cython.ulonglong, 0xFF51AFD7ED558CCD)
_MURMUR_F2 = cython.declare(cython.ulonglong, 0xC4CEB9FE1A85EC53)
_MURMUR_A1 = cython.declare(cython.ulonglong, 0x52DCE729)
_MURMUR_A2 = cython.declare(cython.ulonglong, 0x38495AB5)

_MASK32: Final = 0xFFFFFFFF
_MASK64: Final = 0xFFFFFFFFFFFFFFFF


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _wrap32(x: cython.uint) -> cython.uint:
    """Reduce modulo 2^32, as C does implicitly."""
    return x if cython.compiled else x & _MASK32


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _wrap64(x: cython.ulonglong) -> cython.ulonglong:
    """Reduce modulo 2^64, as C does implicitly."""
    return x if cython.compiled else x & _MASK64


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _rotate32(x: cython.uint, bits: cython.int) -> cython.uint:
    return _wrap32(x << bits) | (x >> (32 - bits))


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _rotate64(x: cython.ulonglong, bits: cython.int) -> cython.ulonglong:
    return _wrap64(x << bits) | (x >> (64 - bits))


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _fnv1a_32(p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t) -> cython.uint:
    digest: cython.uint = _FNV32_START
    i: cython.Py_ssize_t
    for i in range(size):
        digest = _wrap32((digest ^ p[at + i]) * _FNV32_PRIME)
    return digest


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _fnv1a_64(p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t) -> cython.ulonglong:
    digest: cython.ulonglong = _FNV64_START
    i: cython.Py_ssize_t
    for i in range(size):
        digest = _wrap64((digest ^ p[at + i]) * _FNV64_PRIME)
    return digest


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _xxh32_round(lane: cython.uint, x: cython.uint) -> cython.uint:
    return _wrap32(_rotate32(_wrap32(lane + x * _XXH_P2), 13) * _XXH_P1)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _xxh32(p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t) -> cython.uint:
    end: cython.Py_ssize_t = at + size
    digest: cython.uint = _XXH_P5
    a: cython.uint = _wrap32(_XXH_P1 + _XXH_P2)
    b: cython.uint = _XXH_P2
    c: cython.uint = 0
    d: cython.uint = _wrap32(0 - _XXH_P1)
    if size >= 16:
        while at + 16 <= end:
            a = _xxh32_round(a, load_u32(p, at))
            b = _xxh32_round(b, load_u32(p, at + 4))
            c = _xxh32_round(c, load_u32(p, at + 8))
            d = _xxh32_round(d, load_u32(p, at + 12))
            at += 16
        digest = _wrap32(_rotate32(a, 1) + _rotate32(b, 7) + _rotate32(c, 12) + _rotate32(d, 18))
    digest = _wrap32(digest + cython.cast(cython.uint, size))
    while at + 4 <= end:
        digest = _wrap32(_rotate32(_wrap32(digest + load_u32(p, at) * _XXH_P3), 17) * _XXH_P4)
        at += 4
    while at < end:
        digest = _wrap32(_rotate32(_wrap32(digest + p[at] * _XXH_P5), 11) * _XXH_P1)
        at += 1
    digest = _wrap32((digest ^ (digest >> 15)) * _XXH_P2)
    digest = _wrap32((digest ^ (digest >> 13)) * _XXH_P3)
    return digest ^ (digest >> 16)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _murmur_mix(
    x: cython.ulonglong, first: cython.ulonglong, bits: cython.int, second: cython.ulonglong
) -> cython.ulonglong:
    return _wrap64(_rotate64(_wrap64(x * first), bits) * second)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _murmur_end(x: cython.ulonglong) -> cython.ulonglong:
    x = _wrap64((x ^ (x >> 33)) * _MURMUR_F1)
    x = _wrap64((x ^ (x >> 33)) * _MURMUR_F2)
    return x ^ (x >> 33)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _load_few(p: cython.p_const_uchar, at: cython.Py_ssize_t, end: cython.Py_ssize_t) -> cython.ulonglong:
    """Load up to eight bytes between ``at`` and ``end`` as a number."""
    x: cython.ulonglong = 0
    bits: cython.int = 0
    while at < end and bits < 64:
        x |= cython.cast(cython.ulonglong, p[at]) << bits
        bits += 8
        at += 1
    return x


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _murmur3(
    p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t, high: cython.bint
) -> cython.ulonglong:
    """Return half of MurmurHash3 x64 128 with seed 0: ``h2`` if ``high``, else ``h1``."""
    end: cython.Py_ssize_t = at + size
    a: cython.ulonglong = 0
    b: cython.ulonglong = 0
    while at + 16 <= end:
        a ^= _murmur_mix(load_u64(p, at), _MURMUR_C1, 31, _MURMUR_C2)
        a = _wrap64(_wrap64(_rotate64(a, 27) + b) * 5 + _MURMUR_A1)
        b ^= _murmur_mix(load_u64(p, at + 8), _MURMUR_C2, 33, _MURMUR_C1)
        b = _wrap64(_wrap64(_rotate64(b, 31) + a) * 5 + _MURMUR_A2)
        at += 16
    b ^= _murmur_mix(_load_few(p, at + 8, end), _MURMUR_C2, 33, _MURMUR_C1)
    a ^= _murmur_mix(_load_few(p, at, end), _MURMUR_C1, 31, _MURMUR_C2)
    a ^= cython.cast(cython.ulonglong, size)
    b ^= cython.cast(cython.ulonglong, size)
    a = _wrap64(a + b)
    b = _wrap64(b + a)
    a = _murmur_end(a)
    b = _murmur_end(b)
    a = _wrap64(a + b)
    return _wrap64(b + a) if high else a


@cython.cfunc
@cython.nogil
@cython.cdivision(True)  # the caller has checked that there are partitions
@cython.exceptval(check=False)
def _partition(
    p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t, count: cython.uint, kind: cython.int
) -> cython.uint:
    """Return the hash of a key modulo ``count``. MurmurHash3's 128-bit number is ``h2`` × 2^64 + ``h1``."""
    high: cython.ulonglong
    if kind == _FNV32:
        return _fnv1a_32(p, at, size) % count
    if kind == _FNV64:
        return _fnv1a_64(p, at, size) % count
    if kind == _XXH32:
        return _xxh32(p, at, size) % count
    high = (_wrap64(0 - cython.cast(cython.ulonglong, 1)) % count + 1) % count  # 2^64 modulo count
    high = _murmur3(p, at, size, True) % count * high
    return (high + _murmur3(p, at, size, False) % count) % count


@cython.cfunc
def _stop(lent: Lent, start: cython.Py_ssize_t, stop: Any) -> cython.Py_ssize_t:
    """Return the end of ``lent[start:stop]``. Raises ValueError if the slice is not within the buffer."""
    end: cython.Py_ssize_t = lent.size if stop is None else stop
    if start < 0 or end < start or end > lent.size:
        raise ValueError(f"range is not within the buffer start={start} stop={end} size={lent.size}")
    return end


def fnv1a_32(data: Buffer, start: int = 0, stop: int | None = None) -> int:
    """Return the 32-bit FNV-1a of ``data[start:stop]``."""
    lent: Lent = lend(data)
    at: cython.Py_ssize_t = start
    return _fnv1a_32(lent.p, at, _stop(lent, at, stop) - at)


def fnv1a_64(data: Buffer, start: int = 0, stop: int | None = None) -> int:
    """Return the 64-bit FNV-1a of ``data[start:stop]``."""
    lent: Lent = lend(data)
    at: cython.Py_ssize_t = start
    return _fnv1a_64(lent.p, at, _stop(lent, at, stop) - at)


def xxh32(data: Buffer, start: int = 0, stop: int | None = None) -> int:
    """Return XXH32, seed 0, of ``data[start:stop]``."""
    lent: Lent = lend(data)
    at: cython.Py_ssize_t = start
    return _xxh32(lent.p, at, _stop(lent, at, stop) - at)


def murmur3_128(data: Buffer, start: int = 0, stop: int | None = None) -> int:
    """Return MurmurHash3 x64 128, seed 0, of ``data[start:stop]`` as the number ``h2`` × 2^64 + ``h1``."""
    lent: Lent = lend(data)
    at: cython.Py_ssize_t = start
    size: cython.Py_ssize_t = _stop(lent, at, stop) - at
    high: int = _murmur3(lent.p, at, size, True)
    low: int = _murmur3(lent.p, at, size, False)
    return (high << 64) | low


def partition_of(key: Buffer, partition_count: int, hash_kind: KeyHash) -> int:
    """Return the partition of a key. Raises ValueError for a partition count below 1."""
    lent: Lent = lend(key)
    kind: cython.int = _NUMBERS[hash_kind]
    modulus: cython.uint = partition_count
    if modulus < 1:
        raise ValueError(f"partition count must be at least 1 count={partition_count}")
    return _partition(lent.p, 0, lent.size, modulus, kind)


def partitions_of(source: Buffer, spans: Lendable, partition_count: int, hash_kind: KeyHash) -> array[int]:
    """Return the partition of every record as an i32 array.

    Args:
        source: buffer with the keys.
        spans: positions and lengths of keys and values, as for ``batch.from_spans``.
        partition_count: number of partitions of the topic.
        hash_kind: hash function.

    Raises:
        ValueError: a key is outside of ``source``, or the partition count is below 1.
    """
    lent: Lent = lend(source)
    keys: Lent = lend(spans)
    count: cython.Py_ssize_t = keys.size // 32
    kind: cython.int = _NUMBERS[hash_kind]
    modulus: cython.uint = partition_count
    position: cython.longlong
    length: cython.longlong
    i: cython.Py_ssize_t
    if modulus < 1:
        raise ValueError(f"partition count must be at least 1 count={partition_count}")
    partitions = array("i", bytes(4 * count))
    target: Lent = lend_writable(partitions)
    for i in range(count):
        position = load_i64(keys.p, 32 * i)
        length = load_i64(keys.p, 32 * i + 8)
        if length == -1:
            position = length = 0
        if position < 0 or length < 0 or length > lent.size or position > lent.size - length:
            raise ValueError(f"key is not within the source buffer record={i} position={position} length={length}")
        store_u32(target.p, 4 * i, _partition(lent.p, position, length, modulus, kind))
    return partitions


def rows_by_partition(partitions: Lendable, partition_count: int) -> tuple[array[int], array[int]]:
    """Group records by partition, in their order. Return (rows, starts), both i32 arrays.

    The records of partition p have the indexes ``rows[starts[p]:starts[p + 1]]``.

    Args:
        partitions: i32 array, the partition of each record.
        partition_count: number of partitions of the topic.

    Raises:
        ValueError: a partition is not below ``partition_count``.
    """
    numbers: Lent = lend(partitions)
    count: cython.Py_ssize_t = numbers.size // 4
    modulus: cython.Py_ssize_t = partition_count
    number: cython.Py_ssize_t
    at: cython.Py_ssize_t
    i: cython.Py_ssize_t
    if modulus < 1:
        raise ValueError(f"partition count must be at least 1 count={partition_count}")
    rows = array("i", bytes(4 * count))
    starts = array("i", bytes(4 * (modulus + 2)))  # while it is filled, entries are shifted by one
    row: Lent = lend_writable(rows)
    start: Lent = lend_writable(starts)
    for i in range(count):
        number = load_u32(numbers.p, 4 * i)
        if number >= modulus:
            raise ValueError(f"partition is out of range record={i} partition={number}")
        at = 4 * (number + 2)
        store_u32(start.p, at, load_u32(start.p, at) + 1)
    for i in range(modulus):
        at = 4 * (i + 2)
        store_u32(start.p, at, load_u32(start.p, at) + load_u32(start.p, at - 4))
    for i in range(count):
        at = 4 * (load_u32(numbers.p, 4 * i) + 1)
        store_u32(row.p, 4 * load_u32(start.p, at), i)
        store_u32(start.p, at, load_u32(start.p, at) + 1)
    return rows, starts
