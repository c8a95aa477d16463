"""Read the values of which Iggy's requests consist, in all dialects. This module is compiled.

A ``Reader`` never reads beyond its payload. For malformed bytes it raises ``Refused`` with the protocol's error number.

(spec: iggy#shared-encodings, iggy#d0-requests)
"""

from __future__ import annotations

from typing import Final

import cython

from polywire.protocols.iggy.dialect import Dialect
from polywire.protocols.iggy.messages import MALFORMED, U32, U64, Consumer, PermissionFlags, Refused, TopicFields

_PERMISSION_FLAGS: Final = 10
_STREAM_FLAGS: Final = 6
_TOPIC_FLAGS: Final = 4


@cython.final
@cython.cclass
class Reader:
    """Decodes a payload. Raises Refused for malformed bytes."""

    if cython.compiled:
        at = cython.declare(cython.Py_ssize_t, visibility="public")
        data = cython.declare(object, visibility="readonly")
        dialect = cython.declare(object, visibility="readonly")
        stop = cython.declare(cython.Py_ssize_t, visibility="readonly")
    else:
        __slots__ = ("at", "data", "dialect", "stop")

    def __init__(self, data: memoryview, dialect: Dialect) -> None:
        self.data = data
        self.dialect = dialect
        self.at = 0
        self.stop = len(data)

    @property
    def left(self) -> int:
        return self.stop - self.at

    def take(self, size: int) -> memoryview:
        at = self._skip(size)
        return self.data[at : at + size]

    @cython.cfunc
    def _skip(self, size: cython.Py_ssize_t) -> cython.Py_ssize_t:
        at: cython.Py_ssize_t = self.at
        if size > self.stop - at:
            raise Refused(MALFORMED)
        self.at = at + size
        return at

    @cython.cfunc
    def _u8(self) -> cython.int:
        return self.data[self._skip(1)]

    def u8(self) -> int:
        return self._u8()

    def u32(self) -> int:
        number: int = U32.unpack_from(self.data, self._skip(4))[0]
        return number

    def u64(self) -> int:
        number: int = U64.unpack_from(self.data, self._skip(8))[0]
        return number

    def flag(self) -> bool:
        value: cython.int = self._u8()
        if value > 1:
            raise Refused(MALFORMED)
        return value == 1

    def text(self, size: int) -> str:
        try:
            return str(self.take(size), "utf-8")
        except UnicodeDecodeError:
            raise Refused(MALFORMED) from None

    def name(self) -> str:
        size = self.u8()
        if size == 0:
            raise Refused(MALFORMED)
        return self.text(size)

    def str32(self) -> str:
        return self.text(self.u32())

    def ident(self) -> int | str:
        """Read an identifier: a name, or a number that counts from 0 or 1, as in the client's protocol version."""
        kind: cython.int = self._u8()
        size: cython.int = self._u8()
        if kind == 1 and size == 4:
            return self.u32()
        if kind == 2 and size > 0:
            return self.text(size)
        raise Refused(MALFORMED)

    def number(self) -> int:
        """Read a number of a stream, topic or partition. Return it counted from 0.

        If the client counts from 1, the invalid value 0 becomes -1.
        """
        return self.u32() - self.dialect.base

    def partition(self) -> int | None:
        """Read a partition number. Return it counted from 0, or None if the request has none."""
        if self.dialect.optional_partition:
            given = self.flag()
            number = self.u32()
            return number if given else None
        number = self.u32()
        return None if number == 0 else number - self.dialect.base

    def consumer(self) -> Consumer:
        kind = self.u8()
        if kind not in (1, 2):
            raise Refused(MALFORMED)
        return Consumer(kind == 2, self.ident() if self.dialect.ident_consumers else self.u32())

    def group(self) -> int | str:
        """Read a group's identifier, which is a plain number in protocol versions whose groups have no names."""
        return self.ident() if self.dialect.named_groups else self.u32()

    def topic_fields(self, *, is_patch: bool = False) -> TopicFields:
        """Read the fields of a topic after its ids and partitions.

        ``is_patch``: whether the request changes only some fields (since protocol 0.12), so that the name may be empty.
        """
        layout = self.dialect.topic_settings
        if layout == 4:
            name = "" if is_patch and self.dialect.contexts and self._is_zero() else self.name()
            return TopicFields(name, options=bytes(self.take(self.left)))
        compression = self.u8() if layout >= 2 else 1
        if layout == 3:
            expiry = self.u64()
            expiry_us = None if expiry == 0 else 0 if expiry == 2**64 - 1 else expiry
        else:
            expiry_us = self.u32() * 1_000_000
        size_max = self.u64() if layout >= 1 else None
        replication = self.u8() if layout >= 1 else 1
        return TopicFields(self.name(), expiry_us, compression, size_max, replication)

    def _is_zero(self) -> bool:
        if not self.left or self.data[self.at]:
            return False
        self.at += 1
        return True

    def permissions(self) -> PermissionFlags | None:
        """Read a flag and, if it is set, the length of the permissions and the permissions. Return None otherwise."""
        if not self.flag():
            return None
        inner = Reader(self.take(self.u32()), self.dialect)
        everywhere = inner.flags(_PERMISSION_FLAGS)
        streams = []
        more = inner.flag()
        while more:
            stream, flags, topics = inner.u32(), inner.flags(_STREAM_FLAGS), []
            has_topic = inner.flag()
            while has_topic:
                topics.append((inner.u32(), inner.flags(_TOPIC_FLAGS)))
                has_topic = inner.flag()
            streams.append((stream, flags, tuple(topics)))
            more = inner.flag()
        return PermissionFlags(everywhere, tuple(streams))

    def flags(self, count: int) -> tuple[bool, ...]:
        """Read ``count`` bytes that are each 0 or 1."""
        return tuple(self.flag() for _ in range(count))
