# mypy: disable-error-code="no-any-return"
"""CRC-32C (Castagnoli), the checksum of Kafka's record batches.

It is computed with the processor's instruction if there is one, otherwise with tables. The compiled code assumes a
little-endian machine.
"""

from __future__ import annotations

import cython

from polywire.records.memory import Lendable

if cython.compiled:
    from cython.cimports.polywire.protocols.kafka.castagnoli import crc32c_chains, crc32c_instruction
    from cython.cimports.polywire.records.memory import Lent, lend, load_u32
else:
    from polywire.records.memory import Lent, lend

_POLYNOMIAL = cython.declare(cython.uint, 0x82F63B78)
_ONES = cython.declare(cython.uint, 0xFFFFFFFF)
_TABLES = cython.declare(cython.uint[2048])  # type: ignore[misc, valid-type]
_HAS_INSTRUCTION = cython.declare(cython.bint, False)
_PURE_TABLE: list[int] = []


@cython.cfunc
def _fill_tables() -> cython.void:
    """Fill the tables for slicing by 8.

    Table k advances the CRC over one byte that is followed by k zero bytes.
    """
    i: cython.int
    crc: cython.uint
    for i in range(256):
        crc = i
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
        if cython.compiled:
            _TABLES[i] = crc
        else:
            _PURE_TABLE.append(crc)
    if cython.compiled:
        for i in range(256, 2048):
            crc = _TABLES[i - 256]
            _TABLES[i] = (crc >> 8) ^ _TABLES[crc & 0xFF]


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _by_tables(p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t) -> cython.uint:
    crc: cython.uint = _ONES
    low: cython.uint
    high: cython.uint
    end: cython.Py_ssize_t = at + size
    if cython.compiled:
        while end - at >= 8:
            low = crc ^ load_u32(p, at)
            high = load_u32(p, at + 4)
            crc = (
                _TABLES[1792 + (low & 0xFF)]
                ^ _TABLES[1536 + ((low >> 8) & 0xFF)]
                ^ _TABLES[1280 + ((low >> 16) & 0xFF)]
                ^ _TABLES[1024 + (low >> 24)]
                ^ _TABLES[768 + (high & 0xFF)]
                ^ _TABLES[512 + ((high >> 8) & 0xFF)]
                ^ _TABLES[256 + ((high >> 16) & 0xFF)]
                ^ _TABLES[high >> 24]
            )
            at += 8
        while at < end:
            crc = (crc >> 8) ^ _TABLES[(crc ^ p[at]) & 0xFF]
            at += 1
    else:
        for byte in bytes(p[at:end]):
            crc = (crc >> 8) ^ _PURE_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ _ONES


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def crc32c_raw(p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t) -> cython.uint:
    if cython.compiled and _HAS_INSTRUCTION:
        crc: cython.uint = crc32c_chains(p + at, size)
    else:
        crc = _by_tables(p, at, size)
    return crc


def crc32c(data: Lendable) -> int:
    lent: Lent = lend(data)
    return crc32c_raw(lent.p, 0, lent.size)


def crc32c_by_tables(data: Lendable) -> int:
    lent: Lent = lend(data)
    return _by_tables(lent.p, 0, lent.size)


_fill_tables()
if cython.compiled:
    _HAS_INSTRUCTION = crc32c_instruction()
