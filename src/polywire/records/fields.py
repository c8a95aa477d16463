"""Read single fields of a stored batch's header (decision 0101).

Other packages use ``header_fields``, so they need not know field positions. Compiled modules of this package cimport
the load functions from ``fields.pxd``, where they are inlined. Uncompiled modules import them from here.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct, calcsize
from typing import Any, Final

PLACES: Final = {
    "magic": (0, "I"),
    "length": (4, "I"),
    "flags": (8, "I"),
    "columns": (12, "I"),
    "partition": (16, "q"),
    "epoch": (24, "I"),
    "record_count": (28, "I"),
    "base_offset": (32, "q"),
    "base_address": (40, "q"),
    "append_time_us": (48, "q"),
    "producer_epoch": (56, "q"),
    "base_sequence": (64, "q"),
    "body_bytes": (72, "I"),
    "body_bytes_raw": (76, "I"),
    "address_span": (80, "I"),
    "offset_span": (84, "I"),
    "body_checksum": (88, "Q"),
    "header_checksum": (96, "Q"),
}
"""Position and struct format by field name, as in ``columns.BatchHeader``."""


def header_fields(*names: str) -> Callable[..., tuple[Any, ...]]:
    """Return a function that reads these header fields of a batch. They must be given in their stored order.

    The arguments of the returned function are a buffer and the position of the batch in it (default 0). It raises
    struct.error if the buffer ends before the last field.
    """
    form, end = "<", 0
    for name in names:
        at, code = PLACES[name]
        assert at >= end, "fields are read in their stored order"
        form += f"{at - end}x{code}"
        end = at + calcsize(f"<{code}")
    return Struct(form).unpack_from


def _load(name: str) -> Callable[[memoryview, int], int]:
    read = header_fields(name)

    def load(p: memoryview, at: int) -> int:
        (field,) = read(p, at)
        return int(field)

    return load


load_length: Final = _load("length")
load_flags: Final = _load("flags")
load_columns: Final = _load("columns")
load_partition: Final = _load("partition")
load_epoch: Final = _load("epoch")
load_record_count: Final = _load("record_count")
load_base_offset: Final = _load("base_offset")
load_base_address: Final = _load("base_address")
load_append_time_us: Final = _load("append_time_us")
load_producer_epoch: Final = _load("producer_epoch")
load_base_sequence: Final = _load("base_sequence")
load_address_span: Final = _load("address_span")
load_offset_span: Final = _load("offset_span")
load_header_checksum: Final = _load("header_checksum")
