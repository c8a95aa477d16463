"""XXH3 with 64 bits and seed 0: the checksum of every message in the current Iggy protocol.

Digests equal those of the reference implementation (xxHash) for every length, compiled and uncompiled. Compiled code
requires a little-endian machine.
"""

from __future__ import annotations

from typing import Any, Final

import cython

from polywire.records.memory import Lendable

if cython.compiled:
    from cython.cimports.polywire.records.memory import Lent, lend, load_u32, load_u64
    from cython.cimports.polywire.records.xxh3 import multiply_fold
else:
    from polywire.records.memory import Lent, lend, load_u32, load_u64

_library: Any = None
if not cython.compiled:
    try:  # without compilation, the library is some hundred times faster than our implementation
        from xxhash import xxh3_64_intdigest as _library
    except ImportError:
        _library = None

_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_secret = cython.declare(cython.uchar[192])  # type: ignore[misc, valid-type]
_P32_1 = cython.declare(cython.ulonglong, 0x9E3779B1)
_P32_2 = cython.declare(cython.ulonglong, 0x85EBCA77)
_P32_3 = cython.declare(cython.ulonglong, 0xC2B2AE3D)
_P64_1 = cython.declare(cython.ulonglong, 0x9E3779B185EBCA87)
_P64_2 = cython.declare(cython.ulonglong, 0xC2B2AE3D27D4EB4F)
_P64_3 = cython.declare(cython.ulonglong, 0x165667B19E3779F9)
_P64_4 = cython.declare(cython.ulonglong, 0x85EBCA77C2B2AE63)
_P64_5 = cython.declare(cython.ulonglong, 0x27D4EB2F165667C5)
_MX1 = cython.declare(cython.ulonglong, 0x165667919E3779F9)
_MX2 = cython.declare(cython.ulonglong, 0x9FB21C651E98DF25)
_LOW = cython.declare(cython.ulonglong, 0xFFFFFFFF)
_MASK64: Final = 0xFFFFFFFFFFFFFFFF

if not cython.compiled:

    def multiply_fold(a: int, b: int) -> int:
        """Multiply two 64-bit numbers, and return the exclusive-or of the product's two halves."""
        product = a * b
        return (product ^ product >> 64) & _MASK64


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
def _key(at: cython.Py_ssize_t) -> cython.ulonglong:
    return load_u64(_secret, at)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _swap32(x: cython.ulonglong) -> cython.ulonglong:
    return ((x & 0xFF) << 24) | ((x & 0xFF00) << 8) | ((x >> 8) & 0xFF00) | ((x >> 24) & 0xFF)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _avalanche_xxh64(x: cython.ulonglong) -> cython.ulonglong:
    """Mix the bits with XXH64's avalanche function, the last step of the hash of up to 3 bytes."""
    x = _wrap((x ^ (x >> 33)) * _P64_2)
    x = _wrap((x ^ (x >> 29)) * _P64_3)
    return x ^ (x >> 32)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _avalanche(x: cython.ulonglong) -> cython.ulonglong:
    """Mix the bits with XXH3's avalanche function, the last step of the hash of 9 and more bytes."""
    x = _wrap((x ^ (x >> 37)) * _MX1)
    return x ^ (x >> 32)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _mix16(p: cython.p_const_uchar, at: cython.Py_ssize_t, key: cython.Py_ssize_t) -> cython.ulonglong:
    return multiply_fold(load_u64(p, at) ^ _key(key), load_u64(p, at + 8) ^ _key(key + 8))


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _short(p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t) -> cython.ulonglong:
    """Hash up to 16 bytes."""
    low: cython.ulonglong
    high: cython.ulonglong
    if size > 8:
        low = load_u64(p, at) ^ _key(24) ^ _key(32)
        high = load_u64(p, at + size - 8) ^ _key(40) ^ _key(48)
        swapped: cython.ulonglong = _wrap(_swap32(low & _LOW) << 32) | _swap32(low >> 32)
        total: cython.ulonglong = _wrap(swapped + high + cython.cast(cython.ulonglong, size))
        return _avalanche(_wrap(total + multiply_fold(low, high)))
    if size >= 4:
        low = _wrap(load_u32(p, at + size - 4) + (cython.cast(cython.ulonglong, load_u32(p, at)) << 32))
        low = low ^ _key(8) ^ _key(16)
        low = _wrap((low ^ _rotate(low, 49) ^ _rotate(low, 24)) * _MX2)
        low = _wrap((low ^ _wrap((low >> 35) + cython.cast(cython.ulonglong, size))) * _MX2)
        return low ^ (low >> 28)
    if size > 0:
        low = p[at + size - 1] | cython.cast(cython.ulonglong, size) << 8
        low |= cython.cast(cython.ulonglong, p[at]) << 16 | cython.cast(cython.ulonglong, p[at + (size >> 1)]) << 24
        return _avalanche_xxh64(low ^ load_u32(_secret, 0) ^ load_u32(_secret, 4))
    return _avalanche_xxh64(_key(56) ^ _key(64))


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _middle(p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t) -> cython.ulonglong:
    """Hash 17 to 240 bytes."""
    total: cython.ulonglong = _wrap(cython.cast(cython.ulonglong, size) * _P64_1)
    i: cython.Py_ssize_t
    if size <= 128:
        i = (size - 1) >> 5
        while i >= 0:
            total = _wrap(total + _mix16(p, at + 16 * i, 32 * i))
            total = _wrap(total + _mix16(p, at + size - 16 * (i + 1), 32 * i + 16))
            i -= 1
        return _avalanche(total)
    for i in range(8):
        total = _wrap(total + _mix16(p, at + 16 * i, 16 * i))
    total = _avalanche(total)
    for i in range(8, size >> 4):
        total = _wrap(total + _mix16(p, at + 16 * i, 16 * (i - 8) + 3))
    return _avalanche(_wrap(total + _mix16(p, at + size - 16, 119)))


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _accumulate(
    lanes: cython.p_ulonglong, p: cython.p_const_uchar, at: cython.Py_ssize_t, key: cython.Py_ssize_t
) -> cython.void:
    """Add a block of 64 bytes to the eight accumulators. ``key`` is the position in the secret."""
    i: cython.Py_ssize_t
    x: cython.ulonglong
    keyed: cython.ulonglong
    for i in range(8):
        x = load_u64(p, at + 8 * i)
        keyed = x ^ _key(key + 8 * i)
        lanes[i ^ 1] = _wrap(lanes[i ^ 1] + x)
        lanes[i] = _wrap(lanes[i] + (keyed & _LOW) * (keyed >> 32))


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _long(
    p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t, lanes: cython.p_ulonglong
) -> cython.ulonglong:
    """Hash more than 240 bytes."""
    end: cython.Py_ssize_t = at + size
    digest: cython.ulonglong = _wrap(cython.cast(cython.ulonglong, size) * _P64_1)
    key: cython.Py_ssize_t = 0
    i: cython.Py_ssize_t
    while at + 64 < end:
        _accumulate(lanes, p, at, key)
        at += 64
        key += 8
        if key == 128 and at < end:
            for i in range(8):
                lanes[i] = _wrap((lanes[i] ^ (lanes[i] >> 47) ^ _key(128 + 8 * i)) * _P32_1)
            key = 0
    _accumulate(lanes, p, end - 64, 121)
    for i in range(4):
        digest = _wrap(digest + multiply_fold(lanes[2 * i] ^ _key(11 + 16 * i), lanes[2 * i + 1] ^ _key(19 + 16 * i)))
    return _avalanche(digest)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def xxh3_raw(p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t) -> cython.ulonglong:
    """Return XXH3-64 of ``size`` bytes at ``at``. The caller has checked the range."""
    if not cython.compiled and _library is not None:
        digest: cython.ulonglong = _library(p[at : at + size])
        return digest
    return _xxh3_own(p, at, size)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _xxh3_own(p: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t) -> cython.ulonglong:
    if size <= 16:
        return _short(p, at, size)
    if size <= 240:
        return _middle(p, at, size)
    if cython.compiled:
        lanes = cython.declare(cython.ulonglong[8])
    else:
        lanes = [0] * 8
    lanes[0] = _P32_3
    lanes[1] = _P64_1
    lanes[2] = _P64_2
    lanes[3] = _P64_3
    lanes[4] = _P64_4
    lanes[5] = _P32_2
    lanes[6] = _P64_5
    lanes[7] = _P32_1
    return _long(p, at, size, lanes)


def xxh3(data: Lendable) -> int:
    """Return XXH3-64, seed 0, of a whole buffer."""
    lent: Lent = lend(data)
    return xxh3_raw(lent.p, 0, lent.size)


def xxh3_own(data: Lendable) -> int:
    """Return XXH3-64, seed 0, without using the xxhash library. For tests."""
    lent: Lent = lend(data)
    return _xxh3_own(lent.p, 0, lent.size)


if cython.compiled:
    _place: cython.Py_ssize_t
    for _place in range(192):
        _secret[_place] = _SECRET[_place]
else:
    _secret = memoryview(_SECRET)
