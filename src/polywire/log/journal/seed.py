"""The journal's seed: the secret that every group's checksum covers.

It is stored twice, because no group can be verified without it.

* A damaged copy is not used while the other is intact.
* An intact copy is never replaced by another seed.

```
seed, seed.copy: 24 bytes each      before: seed, 8 plain bytes
 0 u32 magic "PWK1" (0x314B5750)     0 u64 the seed
 4 u32 zero
 8 u64 the seed
16 u64 XXH64 of bytes 0..16
```
"""

from __future__ import annotations

from pathlib import Path
from struct import Struct
from typing import Final

from polywire.errors import Corrupt, ErrorCode
from polywire.records.checksum import xxh64
from polywire.store.files import COPY_MODE, Files, exists, read_file, replace_file

SEED_NAMES: Final = ("seed", "seed.copy")
_MAGIC: Final = 0x314B5750
_SEED: Final = Struct("<IIQ")
_PLAIN_BYTES: Final = 8


def find_seed(files: Files, directory: Path, *, has_slots: bool) -> int:
    """Return the seed of the journal in this directory; create one if there is neither a seed nor a slot.

    Raises Corrupt or OSError.
    """
    if has_slots or any(exists(files, directory / name) for name in SEED_NAMES):
        return read_seed(files, directory)
    seed = int.from_bytes(files.token(8), "little")
    keep_seed(files, directory, seed)
    return seed


def read_seed(files: Files, directory: Path) -> int:
    """Return the seed of the journal in this directory; raise Corrupt if no copy is intact."""
    contents = seed_copies(files, directory)
    for content in contents:
        if is_sound(content):
            return int(_SEED.unpack_from(content)[2])
    if len(contents[0]) == _PLAIN_BYTES and not contents[1]:
        return int.from_bytes(contents[0], "little")
    raise Corrupt(
        ErrorCode.CORRUPT,
        f"the seed of the journal is missing or damaged, so its groups cannot be verified path={str(directory / SEED_NAMES[0])!r}",
    )


def seed_copies(files: Files, directory: Path) -> list[bytes]:
    """Return the content of both seed files; a missing file counts as empty."""
    paths = [directory / name for name in SEED_NAMES]
    return [read_file(files, path) if exists(files, path) else b"" for path in paths]


def is_sound(content: bytes) -> bool:
    """Return whether this is a seed with its checksum."""
    size = _SEED.size
    if len(content) != size + 8 or _SEED.unpack_from(content)[0] != _MAGIC:
        return False
    return xxh64(content[:size]) == int.from_bytes(content[size:], "little")


def keep_seed(files: Files, directory: Path, seed: int) -> None:
    """Write the missing or damaged copies of the seed, one after the other, each synced; raise OSError."""
    content = _SEED.pack(_MAGIC, 0, seed)
    content += xxh64(content).to_bytes(8, "little")
    for name, found in zip(SEED_NAMES, seed_copies(files, directory), strict=True):
        if found == content:
            continue
        temporary = directory / f".{name}"
        replace_file(files, directory / name, [content], temporary=temporary, mode=COPY_MODE)
