# mypy: disable-error-code="no-any-return"
"""Decode Kafka messages with the programs that ``schema`` compiles from the table of messages.

* A message is decoded with one call, or in steps if it has many elements. Nothing is read beyond the given end.
* An array must not claim more elements than there are bytes after its length. The elements and tags of all arrays
  together are limited, too.
* Record batches are not copied.

Numbers are big-endian. In flexible versions, lengths and counts are unsigned varints plus one, where 0 is null. In
other versions, lengths of strings are i16 and other lengths and counts are i32, where -1 is null. A flexible structure
ends with its tags: a varint count, then number, size and bytes of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any, Final

import cython

from polywire.errors import PeerError
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.cpython.bytes import PyBytes_FromStringAndSize
    from cython.cimports.cpython.unicode import PyUnicode_DecodeUTF8
    from cython.cimports.polywire.protocols.kafka.structures import Program, Step
    from cython.cimports.polywire.records.memory import Lent, lend
else:
    from polywire.protocols.kafka.structures import Program, Step
    from polywire.records.memory import Lent, lend

# limit for the elements of all arrays in a request, because each element becomes an object
ELEMENTS_MAX: Final = 100_000
AT_ONCE_MAX: Final = 2_048  # elements that are decoded without a pause, about 2 ms

_F64: Final = Struct(">d")
_NO_NAMES: Final = frozenset[str]()
# elements without nested arrays that are decoded between two pauses
_PLAIN_AT_ONCE_MAX = cython.declare(cython.longlong, 64)
_TAGS_MAX = cython.declare(cython.longlong, 1_000)  # limit for the tags in the header of a request
_VARINT_BYTES_MAX = cython.declare(cython.int, 5)
_TEXT_BYTES_MAX = cython.declare(cython.longlong, 32767)
_ID_BYTES = cython.declare(cython.Py_ssize_t, 16)
_BOOL = cython.declare(cython.int, 0)
_I64 = cython.declare(cython.int, 8)
_FLOAT = cython.declare(cython.int, 9)
_ID = cython.declare(cython.int, 16)
_TEXT = cython.declare(cython.int, 17)
_BYTES = cython.declare(cython.int, 18)
_RECORDS = cython.declare(cython.int, 19)
_STRUCTURE = cython.declare(cython.int, 20)


class Wide(PeerError):
    """A message has too many elements to decode it with one call."""


@cython.final
@cython.cclass
class _Cursor:
    """The read position ``at`` in a message.

    Attributes:
        names, found: names of numbers to find, and what was found; see ``locate``.
    """

    if cython.compiled:
        lent: Lent
        view: object
        at: cython.Py_ssize_t
        end: cython.Py_ssize_t
        elements_left: cython.longlong
        names: frozenset
        found: list
    else:
        __slots__ = ("at", "elements_left", "end", "found", "lent", "names", "view")

    def __init__(self, source: Buffer, start: int, elements_max: int) -> None:
        self.lent = lend(source)
        self.view = memoryview(source).cast("B")
        self.at = start
        self.end = self.lent.size
        self.elements_left = elements_max
        self.names: frozenset[str] = _NO_NAMES
        self.found: list[Any] = []
        if start < 0 or start > self.end:
            raise ValueError(f"start is outside the message start={start} size={self.end}")


@cython.cfunc
def _ends_early() -> object:
    raise PeerError("message ends early", fatal=True)


@cython.cfunc
def _no_null(name: str) -> object:
    raise PeerError(f"field must not be null field={name}", fatal=True)


@cython.cfunc
def _number(c: _Cursor, size: cython.int) -> cython.longlong:
    x: cython.longlong
    i: cython.int
    p: cython.p_const_uchar = c.lent.p
    if c.end - c.at < size:
        _ends_early()
    x = p[c.at]
    x -= (x >> 7) << 8
    for i in range(1, size):
        x = (x * 256) | p[c.at + i]
    c.at += size
    return x


@cython.cfunc
def _varint(c: _Cursor) -> cython.longlong:
    x: cython.longlong = 0
    byte: cython.longlong
    i: cython.int
    p: cython.p_const_uchar = c.lent.p
    for i in range(_VARINT_BYTES_MAX):
        if c.at == c.end:
            _ends_early()
        byte = p[c.at]
        c.at += 1
        x |= (byte & 127) << (7 * i)
        if byte < 128:
            if x > 0xFFFFFFFF:
                break
            return x
    raise PeerError("varint is too long", fatal=True)


@cython.cfunc
def _length(c: _Cursor, flexible: cython.bint, size: cython.int) -> cython.longlong:
    """Read a length or count. Returns -1 for null."""
    length: cython.longlong = _varint(c) - 1 if flexible else _number(c, size)
    if length < -1:
        raise PeerError(f"length is negative length={length}", fatal=True)
    return length


@cython.cfunc
def _take(c: _Cursor, length: cython.longlong) -> cython.Py_ssize_t:
    """Skip ``length`` bytes, and return where they begin."""
    if length > c.end - c.at:
        _ends_early()
    c.at += length
    return c.at - length


@cython.cfunc
def _text(c: _Cursor, step: Step, flexible: cython.bint) -> object:
    length: cython.longlong = _length(c, flexible, 2)
    at: cython.Py_ssize_t
    if length < 0:
        return None if step.nullable and not step.is_array else _no_null(step.name)
    if length > _TEXT_BYTES_MAX:
        raise PeerError(f"string is too long field={step.name} bytes={length}", fatal=True)
    at = _take(c, length)
    try:
        if cython.compiled:
            text = PyUnicode_DecodeUTF8(cython.cast(cython.p_char, c.lent.p + at), length, cython.NULL)
        else:
            text = bytes(c.lent.p[at : c.at]).decode()
        return text
    except UnicodeDecodeError:
        raise PeerError(f"string is not UTF-8 field={step.name}", fatal=True) from None


@cython.cfunc
def _raw(c: _Cursor, length: cython.longlong) -> object:
    at: cython.Py_ssize_t = _take(c, length)
    if cython.compiled:
        copy = PyBytes_FromStringAndSize(cython.cast(cython.p_char, c.lent.p + at), length)
    else:
        copy = bytes(c.lent.p[at : c.at])
    return copy


@cython.cfunc
def _single(c: _Cursor, step: Step, flexible: cython.bint) -> object:
    """Read one value of a field, or one element of its array."""
    kind: cython.int = step.kind
    length: cython.longlong
    at: cython.Py_ssize_t
    if kind == _BOOL:
        return _number(c, 1) != 0
    if kind <= _I64:
        return _number(c, kind)
    if kind == _TEXT:
        return _text(c, step, flexible)
    if kind == _STRUCTURE:
        if step.nullable and not step.is_array and step.tag < 0 and _number(c, 1) < 0:
            return None
        return _structure(c, step.program)
    if kind == _ID:
        return _raw(c, _ID_BYTES)
    if kind == _FLOAT:
        at = _take(c, 8)
        return _F64.unpack_from(c.view, at)[0]
    length = _length(c, flexible, 4)
    if length < 0:
        return None if step.nullable and not step.is_array else _no_null(step.name)
    if kind == _BYTES:
        return _raw(c, length)
    at = _take(c, length)
    return c.view[at : c.at]  # type: ignore[index, unused-ignore]  # a memoryview


@cython.cfunc
def _spend(c: _Cursor, name: str, count: cython.longlong) -> cython.void:
    """Subtract elements or tags from the number that may still be read. Raises Wide if that number becomes negative."""
    c.elements_left -= count
    if c.elements_left < 0:
        raise Wide(f"a message has too many elements field={name} count={count}", fatal=True)


@cython.cfunc
def _count(c: _Cursor, step: Step, flexible: cython.bint) -> cython.longlong:
    """Read the number of elements in an array. Returns -1 for null."""
    count: cython.longlong = _length(c, flexible, 4)
    if count < 0:
        if not step.nullable:
            _no_null(step.name)
        return -1
    if count > (c.end - c.at) // step.element_bytes_min:
        _ends_early()
    _spend(c, step.name, count)
    return count


@cython.cfunc
def _value(c: _Cursor, step: Step, flexible: cython.bint) -> object:
    count: cython.longlong
    found: list[object]
    if not step.is_array:
        return _single(c, step, flexible)
    count = _count(c, step, flexible)
    if count < 0:
        return None
    found = []
    while count > 0:
        found.append(_single(c, step, flexible))
        count -= 1
    return found


@cython.cfunc
def _empty(program: Program) -> object:
    """Return a record in which fields that may be absent have their defaults."""
    made: object = program.record.__new__(program.record)
    for name, default in program.defaults:
        setattr(made, name, default)
    return made


@cython.cfunc
def _structure(c: _Cursor, program: Program) -> object:
    made: object = _empty(program)
    step: Step
    for step in program.steps:
        if c.names is not _NO_NAMES and step.name in c.names:
            c.found.append((made, step.name, c.at, step.kind))
        setattr(made, step.name, _value(c, step, program.flexible))
    if program.flexible:
        _tags(c, program, made)
    return made


@cython.cfunc
def _tags(c: _Cursor, program: Program, made: object) -> cython.void:
    """Read the known tags into ``made``, and skip others."""
    count: cython.longlong = _varint(c)
    tag: cython.longlong
    at: cython.Py_ssize_t
    step: Step
    _spend(c, "tags", count)
    while count > 0:
        tag = _varint(c)
        at = _take(c, _varint(c))
        for step in program.tagged:
            if step.tag == tag:
                _tagged(c, step, at, made)
        count -= 1


@cython.cfunc
def _tagged(c: _Cursor, step: Step, at: cython.Py_ssize_t, made: object) -> cython.void:
    """Read the value of a tag at ``at`` into ``made``. The value ends at the read position."""
    end: cython.Py_ssize_t = c.at
    whole: cython.Py_ssize_t = c.end
    c.at = at
    c.end = end
    setattr(made, step.name, _value(c, step, True))
    c.at = end
    c.end = whole


def decode(program: Program, source: Buffer, start: int = 0, *, elements_max: int = ELEMENTS_MAX) -> Any:
    """Decode the structure at ``start``.

    Bytes after it are ignored. Record batches are returned as views of ``source``.

    Raises PeerError for malformed bytes, and Wide for more than ``elements_max`` elements.
    """
    return _structure(_Cursor(source, start, elements_max), program)


def locate(program: Program, source: Buffer, start: int, names: frozenset[str]) -> tuple[Any, list[Any]]:
    """Decode a valid structure, and find its numbers with these names, those of nested structures included.

    Return the structure, and the numbers as (record, name, position, size).
    """
    c: _Cursor = _Cursor(source, start, ELEMENTS_MAX)
    c.names = names
    return _structure(c, program), c.found


def decode_with_pauses(program: Program, source: Buffer, start: int = 0) -> Iterator[Any]:
    """Decode the structure at ``start`` in short steps.

    Yields None after each step, and the structure at the end. ``source`` must not change meanwhile. Raises the errors
    of ``decode``.
    """
    c: _Cursor = _Cursor(source, start, ELEMENTS_MAX)
    made = _empty(program)
    yield from _read_with_pauses(c, program, made)
    yield made


def _read_with_pauses(c: _Cursor, program: Program, made: object) -> Iterator[None]:
    """Read the fields of a structure into ``made``. Yields after each step."""
    step: Step
    found: list[object]
    count: cython.longlong
    plain: cython.longlong = 0
    has_arrays: cython.bint
    for step in program.steps:
        if not step.is_array:
            setattr(made, step.name, _single(c, step, program.flexible))
            continue
        count = _count(c, step, program.flexible)
        if count < 0:
            setattr(made, step.name, None)
            continue
        found = []
        has_arrays = _has_arrays(step)
        while count > 0:
            count -= 1
            if has_arrays:
                inner = _empty(step.program)
                yield from _read_with_pauses(c, step.program, inner)
                found.append(inner)
            else:
                found.append(_single(c, step, program.flexible))
            plain += 1
            if has_arrays or plain % _PLAIN_AT_ONCE_MAX == 0:
                yield None
        setattr(made, step.name, found)
    if program.flexible:
        _tags(c, program, made)


@cython.cfunc
def _has_arrays(step: Step) -> cython.bint:
    inner: Step
    if step.kind == _STRUCTURE:
        for inner in step.program.steps:
            if inner.is_array or inner.kind == _STRUCTURE:
                return True
    return False


def skip_tags(source: Buffer, start: int) -> int:
    """Return the position after the tags at ``start``. Raises PeerError for malformed tags."""
    c: _Cursor = _Cursor(source, start, _TAGS_MAX)
    _tags(c, _NO_TAGS, None)
    return c.at


_NO_TAGS: Final = Program(None, (), (), (), True)
