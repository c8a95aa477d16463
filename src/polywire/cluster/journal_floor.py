"""The floor of a shard's journal: the number of the object at which recovery begins. Objects below it may be deleted.

Raises Corrupt if the checksum is wrong.

```
 0 u32 magic "PWF1"
 4 u32 version 1
 8 u64 floor: number of the object
16 u64 base: number of the object whose group permits this floor, because it lists the segments
24 u64 start
32 u64 sealed: everything up to this sequence is in segments
40 zeros
56 u64 XXH64 of bytes 0 to 56
```

A shard without a floor object has the floor 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import Final

from polywire.errors import Corrupt, ErrorCode
from polywire.records.checksum import xxh64

_MAGIC: Final = 0x31465750
_VERSION: Final = 1
_FIELDS: Final = Struct("<IIQQQQ16x")
_CHECKSUM: Final = Struct("<Q")
FLOOR_BYTES: Final = _FIELDS.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class Floor:
    """Decoded floor object: the first journal object that is needed, and the state of the journal before it."""

    number: int = 1
    base: int = 0
    start: int = 0
    sealed: int = 0

    def pack(self) -> bytes:
        fields = _FIELDS.pack(_MAGIC, _VERSION, self.number, self.base, self.start, self.sealed)
        return fields + _CHECKSUM.pack(xxh64(fields))

    @classmethod
    def unpack(cls, content: bytes) -> Floor:
        """Decode a floor object. Raises Corrupt."""
        if (
            len(content) == FLOOR_BYTES
            and xxh64(content[: _FIELDS.size]) == _CHECKSUM.unpack_from(content, _FIELDS.size)[0]
        ):
            magic, version, number, base, start, sealed = _FIELDS.unpack_from(content)
            if magic == _MAGIC and version == _VERSION and number > 0:
                return cls(number, base, start, sealed)
        raise Corrupt(
            ErrorCode.CORRUPT,
            f"the object that stores the journal's first needed number is damaged size={len(content)}",
        )
