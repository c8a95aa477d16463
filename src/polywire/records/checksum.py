"""Compute XXH64, the checksum of headers and bodies of stored batches, and CRC-32, the checksum of single values.

XXH64 uses seed 0. CRC-32 uses the IEEE polynomial, as in zlib. Compiled and uncompiled code return the same results.
Large inputs are read without the GIL. Compiled code requires a little-endian machine.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

import cython

from polywire.records.memory import Lendable
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.records.folding import crc32_fold, crc32_folds
    from cython.cimports.polywire.records.memory import Lent, lend, load_u32, load_u64, store_u32
else:
    from polywire.records.memory import Lent, lend, load_u32, load_u64, store_u32

_library: Any = None
if not cython.compiled:
    try:  # without compilation, the library is some hundred times faster than our implementation
        from xxhash import xxh64_intdigest as _library
    except ImportError:
        _library = None

NOGIL_BYTES_MIN = cython.declare(cython.Py_ssize_t, 262_144)
"""Inputs of at least this size are read without the GIL; for smaller ones acquiring it again can take longer than the
work.
"""

_P1 = cython.declare(cython.ulonglong, 0x9E3779B185EBCA87)
_P2 = cython.declare(cython.ulonglong, 0xC2B2AE3D27D4EB4F)
_P3 = cython.declare(cython.ulonglong, 0x165667B19E3779F9)
_P4 = cython.declare(cython.ulonglong, 0x85EBCA77C2B2AE63)
_P5 = cython.declare(cython.ulonglong, 0x27D4EB2F165667C5)
_CRC_POLYNOMIAL = cython.declare(cython.uint, 0xEDB88320)
_CRC_TABLES = cython.declare(cython.uint[4096])  # type: ignore[misc, valid-type]
_FOLDS = cython.declare(cython.bint, False)
_FOLD_BYTES_MIN = cython.declare(cython.Py_ssize_t, 32)  # for smaller inputs the tables are as fast

_MASK64: Final = 0xFFFFFFFFFFFFFFFF


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _wrap(x: cython.ulonglong) -> cython.ulonglong:
    """Reduce modulo 2^64, as C does implicitly."""
    return x if cython.compiled else x & _MASK64


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _rotate(x: cython.ulonglong, bits: cython.int) -> cython.ulonglong:
    return _wrap(x << bits) | (x >> (64 - bits))


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _round(lane: cython.ulonglong, x: cython.ulonglong) -> cython.ulonglong:
    return _wrap(_rotate(_wrap(lane + x * _P2), 31) * _P1)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _fold(digest: cython.ulonglong, lane: cython.ulonglong) -> cython.ulonglong:
    return _wrap((digest ^ _round(0, lane)) * _P1 + _P4)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def xxh64_raw(p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t) -> cython.ulonglong:
    """Return XXH64 of ``size`` bytes at ``at``. The caller has checked the range."""
    if not cython.compiled and _library is not None:
        digest: cython.ulonglong = _library(p[at : at + size])
        return digest
    return _xxh64_own(p, at, size)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _xxh64_own(p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t) -> cython.ulonglong:
    """Compute XXH64 without the xxhash library."""
    end: cython.Py_ssize_t = at + size
    digest: cython.ulonglong
    a: cython.ulonglong = _wrap(_P1 + _P2)
    b: cython.ulonglong = _P2
    c: cython.ulonglong = 0
    d: cython.ulonglong = _wrap(0 - _P1)
    if size >= 32:
        while at + 32 <= end:
            a = _round(a, load_u64(p, at))
            b = _round(b, load_u64(p, at + 8))
            c = _round(c, load_u64(p, at + 16))
            d = _round(d, load_u64(p, at + 24))
            at += 32
        digest = _wrap(_rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18))
        digest = _fold(_fold(_fold(_fold(digest, a), b), c), d)
    else:
        digest = _P5
    digest = _wrap(digest + cython.cast(cython.ulonglong, size))
    while at + 8 <= end:
        digest = _wrap(_rotate(digest ^ _round(0, load_u64(p, at)), 27) * _P1 + _P4)
        at += 8
    if at + 4 <= end:
        digest = _wrap(_rotate(digest ^ _wrap(load_u32(p, at) * _P1), 23) * _P2 + _P3)
        at += 4
    while at < end:
        digest = _wrap(_rotate(digest ^ _wrap(p[at] * _P5), 11) * _P1)
        at += 1
    digest = _wrap((digest ^ (digest >> 33)) * _P2)
    digest = _wrap((digest ^ (digest >> 29)) * _P3)
    return digest ^ (digest >> 32)


@cython.cfunc
def _fill_crc_tables() -> cython.void:
    """Fill the tables for a CRC-32 of 16 bytes per step (slicing-by-16).

    Table 0 advances the CRC by one byte, table k by that byte and k zero bytes.
    """
    i: cython.int
    crc: cython.uint
    for i in range(256):
        crc = i
        for _ in range(8):
            crc = (crc >> 1) ^ (_CRC_POLYNOMIAL if crc & 1 else 0)
        _CRC_TABLES[i] = crc
    for i in range(256, 4096):
        crc = _CRC_TABLES[i - 256]
        _CRC_TABLES[i] = (crc >> 8) ^ _CRC_TABLES[crc & 0xFF]


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _crc_word(table: cython.int, x: cython.uint) -> cython.uint:
    """Return the contribution of the four bytes in ``x`` to the CRC of a block in which ``table`` bytes follow them."""
    return (
        _CRC_TABLES[(table + 3) * 256 + (x & 0xFF)]
        ^ _CRC_TABLES[(table + 2) * 256 + ((x >> 8) & 0xFF)]
        ^ _CRC_TABLES[(table + 1) * 256 + ((x >> 16) & 0xFF)]
        ^ _CRC_TABLES[table * 256 + (x >> 24)]
    )


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def crc32_raw(p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t) -> cython.uint:
    """Return CRC-32 of ``size`` bytes at ``at``. The caller has checked the range."""
    if not cython.compiled:
        return zlib.crc32(p[at : at + size])
    end: cython.Py_ssize_t = at + size
    crc: cython.uint = 0xFFFFFFFF
    if cython.compiled and _FOLDS and size >= _FOLD_BYTES_MIN:
        crc = crc32_fold(p + at, size >> 4)
        at += size & ~15
    while at + 16 <= end:
        crc = (
            _crc_word(12, crc ^ load_u32(p, at))
            ^ _crc_word(8, load_u32(p, at + 4))
            ^ _crc_word(4, load_u32(p, at + 8))
            ^ _crc_word(0, load_u32(p, at + 12))
        )
        at += 16
    while at + 4 <= end:
        crc = _crc_word(0, crc ^ load_u32(p, at))
        at += 4
    while at < end:
        crc = (crc >> 8) ^ _CRC_TABLES[(crc ^ p[at]) & 0xFF]
        at += 1
    return ~crc


@cython.cfunc
def _check_range(lent: Lent, start: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> cython.void:
    if start < 0 or stop < start or stop > lent.size:
        raise ValueError(f"range is not within the buffer start={start} stop={stop} size={lent.size}")


def xxh64(data: Lendable) -> int:
    """Return XXH64, seed 0, of a whole buffer."""
    lent: Lent = lend(data)
    return xxh64_at(data, 0, lent.size)


def xxh64_at(data: Lendable, start: int, stop: int) -> int:
    """Return XXH64, seed 0, of ``data[start:stop]``. Raises ValueError if the range is not within the buffer."""
    lent: Lent = lend(data)
    at: cython.Py_ssize_t = start
    end: cython.Py_ssize_t = stop
    digest: cython.ulonglong
    _check_range(lent, at, end)
    if end - at < NOGIL_BYTES_MIN:
        return xxh64_raw(lent.p, at, end - at)
    with cython.nogil:
        digest = xxh64_raw(lent.p, at, end - at)
    return digest


def crc32_at(data: Buffer, start: int, stop: int) -> int:
    """Return CRC-32 (IEEE) of ``data[start:stop]``. Raises ValueError if the range is not within the buffer."""
    lent: Lent = lend(data)
    at: cython.Py_ssize_t = start
    end: cython.Py_ssize_t = stop
    crc: cython.uint
    _check_range(lent, at, end)
    if end - at < NOGIL_BYTES_MIN:
        return crc32_raw(lent.p, at, end - at)
    with cython.nogil:
        crc = crc32_raw(lent.p, at, end - at)
    return crc


def crc32_column(value_offsets: Lendable, value_bytes: Buffer) -> bytes:
    """Return the u32 CRCs of values, for the column ``value_crc32``.

    Value n is ``value_bytes[offsets[n]:offsets[n + 1]]``.

    Raises:
        ValueError: an offset decreases or lies outside of the values.
    """
    offsets: Lent = lend(value_offsets)
    values: Lent = lend(value_bytes)
    count: cython.Py_ssize_t = offsets.size // 4 - 1
    if count < 0 or offsets.size % 4 != 0:
        raise ValueError(f"size of the offsets column is 0 or not a multiple of 4 size={offsets.size}")
    column = bytearray(4 * count)
    crcs: Lent = lend(column)
    start: cython.Py_ssize_t = load_u32(offsets.p, 0)
    stop: cython.Py_ssize_t
    crc: cython.uint
    i: cython.Py_ssize_t
    for i in range(count):
        stop = load_u32(offsets.p, 4 * (i + 1))
        _check_range(values, start, stop)
        crc = crc32_raw(values.p, start, stop - start)
        store_u32(crcs.p, 4 * i, crc)
        start = stop
    return bytes(column)


if cython.compiled:
    _fill_crc_tables()
    _FOLDS = crc32_folds()
