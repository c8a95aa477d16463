"""Encode Kafka messages with the programs that ``schema`` compiles (layout: see ``structure_decoder``).

* A message is encoded with one call. Record buffers of at least ``PART_BYTES_MIN`` bytes are not copied.
* A value that does not fit its field raises an error. It is never truncated.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any, Final

import cython

from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.cpython.bytearray import PyByteArray_AS_STRING, PyByteArray_Resize
    from cython.cimports.cpython.bytes import PyBytes_FromStringAndSize
    from cython.cimports.polywire.protocols.kafka.structures import Program, Step
    from cython.cimports.polywire.records.memory import Lent, lend, move
else:
    from polywire.protocols.kafka.structures import Program, Step
    from polywire.records.memory import Lent, lend, move

PART_BYTES_MIN: Final = 4096  # records of at least this size are sent as a separate buffer

_F64: Final = Struct(">d")
_TEXT_BYTES_MAX = cython.declare(cython.longlong, 32767)
_I32_MAX = cython.declare(cython.longlong, 2_147_483_647)
_ID_BYTES = cython.declare(cython.Py_ssize_t, 16)
_PART_MIN = cython.declare(cython.Py_ssize_t, 4096)
_AT_ONCE_MAX = cython.declare(cython.Py_ssize_t, 64)  # entries of a nested array that are encoded without a pause
_BOOL = cython.declare(cython.int, 0)
_I64 = cython.declare(cython.int, 8)
_FLOAT = cython.declare(cython.int, 9)
_ID = cython.declare(cython.int, 16)
_TEXT = cython.declare(cython.int, 17)
_RECORDS = cython.declare(cython.int, 19)
_STRUCTURE = cython.declare(cython.int, 20)


@cython.final
@cython.cclass
class Writer:
    """The output: written bytes, and record buffers that are not copied.

    Attributes:
        p: pointer to the bytes of ``out``.
        at: number of bytes written.
        size: size of ``out``.
        cuts: pairs of a position and a record buffer, which belongs before the byte at this position.
        outside: total size of these buffers.
    """

    if not cython.compiled:  # when compiled, structure_encoder.pxd declares the fields
        __slots__ = ("at", "cuts", "out", "outside", "p", "size")

    def __init__(self, size: int) -> None:
        self.out = bytearray(size)
        if cython.compiled:
            self.p = cython.cast(cython.p_uchar, PyByteArray_AS_STRING(self.out))
        else:
            self.p = memoryview(self.out)
        self.at = 0
        self.size = size
        self.cuts: list[tuple[int, Any]] = []
        self.outside = 0


@cython.cfunc
def _grow(w: Writer, size: cython.Py_ssize_t) -> cython.void:
    if w.size - w.at >= size:
        return
    w.size = 2 * w.size + size
    if cython.compiled:
        PyByteArray_Resize(w.out, w.size)
        w.p = cython.cast(cython.p_uchar, PyByteArray_AS_STRING(w.out))
    else:
        w.out = w.out + bytes(w.size - len(w.out))
        w.p = memoryview(w.out)


@cython.cfunc
def put(w: Writer, x: cython.longlong, size: cython.int) -> cython.void:
    """Write a number of ``size`` bytes. Raises ValueError if it does not fit."""
    if size < 8 and x >> (8 * size - 1) != 0 and x >> (8 * size - 1) != -1:
        raise ValueError(f"number does not fit its field number={x} bytes={size}")
    _grow(w, size)
    while size > 0:
        size -= 1
        w.p[w.at] = (x >> (8 * size)) & 255
        w.at += 1


@cython.cfunc
def _put_varint(w: Writer, x: cython.longlong) -> cython.void:
    _grow(w, 10)
    while x > 127:
        w.p[w.at] = (x & 127) | 128
        w.at += 1
        x >>= 7
    w.p[w.at] = x
    w.at += 1


@cython.cfunc
def put_length(w: Writer, length: cython.longlong, flexible: cython.bint, size: cython.int) -> cython.void:
    if flexible:
        _put_varint(w, length + 1)
    elif size == 2 and length > _TEXT_BYTES_MAX:
        raise ValueError(f"text does not fit its field bytes={length}")
    else:
        put(w, length, size)


@cython.cfunc
def put_raw(w: Writer, data: object) -> cython.void:
    lent: Lent = lend(data)  # type: ignore[arg-type, unused-ignore]
    _grow(w, lent.size)
    if lent.size > 0:
        move(w.p, w.at, lent.p, 0, lent.size)
    w.at += lent.size


@cython.cfunc
def put_records(w: Writer, data: object, flexible: cython.bint) -> cython.void:
    """Write record bytes, which are one buffer or several consecutive ones."""
    parts: list[object] = data if isinstance(data, list) else [data]
    size: cython.Py_ssize_t = 0
    lent: Lent
    part: object
    for part in parts:
        lent = lend(part)  # type: ignore[arg-type, unused-ignore]
        size += lent.size
    put_length(w, size, flexible, 4)
    for part in parts:
        lent = lend(part)  # type: ignore[arg-type, unused-ignore]
        if lent.size < _PART_MIN:
            put_raw(w, part)
        else:
            w.cuts.append((w.at, part))
            w.outside += lent.size


@cython.cfunc
def _put_single(w: Writer, step: Step, value: object, flexible: cython.bint) -> cython.void:
    kind: cython.int = step.kind
    encoded: bytes
    if kind == _BOOL:
        put(w, 1 if value else 0, 1)
    elif kind <= _I64:
        put(w, value, kind)  # type: ignore[arg-type, unused-ignore]
    elif kind == _STRUCTURE:
        if step.nullable and not step.is_array and step.tag < 0:
            put(w, -1 if value is None else 1, 1)
            if value is None:
                return
        if isinstance(value, bytes):  # already encoded
            put_raw(w, value)
            return
        _put_structure(w, step.program, step.program.record() if value is None else value)
    elif kind == _ID:
        if len(value) != _ID_BYTES:  # type: ignore[arg-type, unused-ignore]
            raise ValueError(f"id must have 16 bytes field={step.name}")
        put_raw(w, value)
    elif kind == _FLOAT:
        put_raw(w, _F64.pack(value))
    elif value is None and step.nullable and not step.is_array:
        put_length(w, -1, flexible, 2 if kind == _TEXT else 4)
    elif kind == _TEXT:
        encoded = b"" if value is None else value.encode()  # type: ignore[attr-defined, unused-ignore]
        put_length(w, len(encoded), flexible, 2)
        put_raw(w, encoded)
    elif kind == _RECORDS:
        put_records(w, b"" if value is None else value, flexible)
    else:
        value = b"" if value is None else value
        put_length(w, len(value), flexible, 4)  # type: ignore[arg-type, unused-ignore]
        put_raw(w, value)


@cython.cfunc
def _put_value(w: Writer, step: Step, value: object, flexible: cython.bint) -> cython.void:
    element: object
    if not step.is_array:
        _put_single(w, step, value, flexible)
    elif value is None:
        put_length(w, -1 if step.nullable else 0, flexible, 4)
    else:
        put_length(w, len(value), flexible, 4)  # type: ignore[arg-type, unused-ignore]
        for element in value:  # type: ignore[attr-defined, unused-ignore]
            _put_single(w, step, element, flexible)


@cython.cfunc
def _put_structure(w: Writer, program: Program, record: object) -> cython.void:
    step: Step
    for step in program.steps:
        _put_value(w, step, getattr(record, step.name), program.flexible)
    if program.flexible:
        _put_tags(w, program, record)


@cython.cfunc
def _put_tags(w: Writer, program: Program, record: object) -> cython.void:
    step: Step
    inner: Writer
    said: list[Step] = []
    for step in program.tagged:
        value = getattr(record, step.name)
        if value != step.default and not (step.is_array and not value):
            said.append(step)
    _put_varint(w, len(said))
    for step in sorted(said, key=_tag_of) if len(said) > 1 else said:
        inner = Writer(64)
        _put_value(inner, step, getattr(record, step.name), True)
        if inner.outside:
            raise ValueError(f"a tagged field cannot contain records field={step.name}")
        _put_varint(w, step.tag)
        _put_varint(w, inner.at)
        put_raw(w, memoryview(inner.out)[: inner.at])


def _tag_of(step: Step) -> int:
    return step.tag


@cython.cfunc
def finish(w: Writer) -> list:  # type: ignore[type-arg]
    """Replace the first four bytes by the length of the message, and return the message as consecutive buffers.

    Raises ValueError if it is too long.
    """
    at: cython.Py_ssize_t
    whole: cython.Py_ssize_t = w.at
    begun: cython.Py_ssize_t = 0
    if whole - 4 + w.outside > _I32_MAX:
        raise ValueError(f"message is too long bytes={whole - 4 + w.outside}")
    w.at = 0
    put(w, whole - 4 + w.outside, 4)
    if not w.cuts:
        return [_written(w, whole)]
    view = memoryview(w.out)
    parts: list[Buffer] = []
    for at, part in w.cuts:
        parts.append(view[begun:at])
        parts.append(part)
        begun = at
    if begun < whole:
        parts.append(view[begun:whole])
    return [part for part in parts if len(part)]


def encode(program: Program, record: object, prefix: bytes = b"") -> list[Buffer]:
    """Encode a message: its length, ``prefix`` and the structure. Return consecutive buffers.

    Record bytes of at least ``PART_BYTES_MIN`` become separate buffers and are not copied. A null in a field that this
    version does not allow to be null becomes an empty value. Raises ValueError or OverflowError for values that do not
    fit.
    """
    w: Writer = Writer(256)
    put(w, 0, 4)
    put_raw(w, prefix)
    _put_structure(w, program, record)
    return finish(w)


def encode_entries(program: Program, record: Any) -> Iterator[None]:
    """Encode the entries of a structure's arrays. Yields after each step.

    The entries are replaced by their bytes, which ``encode`` copies. They must not contain records. Raises ValueError
    or OverflowError for values that do not fit.
    """
    step: Step
    for step in program.steps:
        entries = getattr(record, step.name)
        if not step.is_array or step.kind != _STRUCTURE or not entries:
            continue
        encoded: list[bytes] = []
        for entry in entries:
            if _is_wide(step.program, entry):
                yield from encode_entries(step.program, entry)
            encoded.append(_entry_bytes(step.program, entry))
            yield None
        setattr(record, step.name, encoded)


def encode_entry(program: Program, entry: Any) -> Iterator[bytes | None]:
    """Encode one entry of an array. ``program`` encodes the structure that has the array.

    Yields None after each step, and the bytes at the end.
    """
    own: Program = _program_of(program, type(entry))
    if _is_wide(own, entry):
        yield from encode_entries(own, entry)
    yield _entry_bytes(own, entry)


@cython.cfunc
def _written(w: Writer, size: cython.Py_ssize_t) -> bytes:
    if cython.compiled:
        copy = PyBytes_FromStringAndSize(cython.cast(cython.p_char, w.p), size)
    else:
        copy = bytes(w.p[:size])
    return copy


@cython.cfunc
def _entry_bytes(program: Program, entry: object) -> bytes:
    w: Writer = Writer(64)
    _put_structure(w, program, entry)
    return _written(w, w.at)


@cython.cfunc
def _is_wide(program: Program, entry: object) -> cython.bint:
    """Return whether one of the entry's arrays has many entries."""
    step: Step
    widest: cython.Py_ssize_t = 0
    for step in program.steps:
        if step.is_array and step.kind == _STRUCTURE:
            widest = max(widest, len(getattr(entry, step.name) or ()))
    return widest > _AT_ONCE_MAX  # type: ignore[no-any-return, unused-ignore]


@cython.cfunc
def _program_of(program: Program, record: object) -> Program:
    """Return the program of the array in ``program`` whose elements are of this record's type, or None."""
    step: Step
    found: Program
    for step in program.steps:
        if step.kind == _STRUCTURE:
            found = step.program if step.program.record is record else _program_of(step.program, record)
            if found is not None:
                return found
    return None  # type: ignore[return-value, unused-ignore]
