"""Merge small neighbouring batches of a partition before they are written, and call the completions of the appends.

One call handles all batches of a partition that are about to be written. The batches stay in order, and those that
cannot be merged stay separate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cython

from polywire.errors import BrokerError
from polywire.log.partition.partition import Append
from polywire.records.batch import merge
from polywire.records.columns import MERGED_BYTES_MAX
from polywire.types import Buffer, Level

if cython.compiled:
    from cython.cimports.polywire.records.fields import load_columns
    from cython.cimports.polywire.records.memory import Lent, lend
    from cython.cimports.polywire.records.reshape import small_records
else:
    from polywire.records.fields import load_columns
    from polywire.records.memory import Lent, lend
    from polywire.records.reshape import small_records

_MERGED_BYTES_MAX = cython.declare(cython.Py_ssize_t, MERGED_BYTES_MAX)
_ENTRY_BYTES = cython.declare(cython.Py_ssize_t, 32)
_WRITTEN = cython.declare(cython.int, Level.WRITTEN)


def merged(items: list[Append], slack: int) -> list[tuple[Buffer, Sequence[Append], Sequence[int]]]:
    """Merge small appends. Return the batches to write, each as (batch, its appends, record count of each append).

    The counts are empty for a batch of a single append. A merged batch may be larger than its parts together, because
    its columns may need wider alignment. All merged batches together are at most ``slack`` bytes larger.
    """
    entries: list[tuple[Buffer, Sequence[Append], Sequence[int]]] = []
    counts: list[int]
    start: cython.Py_ssize_t = 0
    stop: cython.Py_ssize_t
    size: cython.Py_ssize_t
    left: cython.Py_ssize_t = slack
    while start < len(items):
        counts = []
        size = 0
        shape: cython.uint = 0
        stop = start
        while stop < len(items):
            lent: Lent = lend(items[stop][0])
            records: cython.Py_ssize_t = small_records(lent.p, 0, lent.size)
            if records == 0:
                break
            columns: cython.uint = load_columns(lent.p, 0)
            if counts and (columns != shape or size + lent.size > _MERGED_BYTES_MAX):
                break
            shape = columns
            size += lent.size
            counts.append(records)
            stop += 1
        stop = max(stop, start + 1)
        owners = items[start:stop]
        batch = _merged(owners) if len(counts) > 1 else None
        growth: cython.Py_ssize_t = 0 if batch is None else len(batch) - size - _ENTRY_BYTES * (len(counts) - 1)
        if batch is not None and growth <= left:
            left -= growth
            entries.append((batch, owners, counts))
        else:
            entries.extend([(item[0], (item,), ()) for item in owners])
        start = stop
    return entries


@cython.cfunc
def _merged(items: list[Append]) -> bytearray | None:
    """Return these appends as one batch, or None if they must stay separate."""
    try:
        return merge([item[0] for item in items])
    except (ValueError, BrokerError):
        return None


def answer(
    owners: Sequence[Append],
    counts: Sequence[int],
    offset: int,
    written: list[tuple[Any, tuple[Any, ...]]],
    synced: list[tuple[Any, tuple[Any, ...]]],
) -> None:
    """Queue the completions of the appends in a batch at ``offset``, each with the offset of its own first record.

    Args:
        owners: the appends.
        counts: number of records of each append. Empty if there is only one.
        written: queue of calls to make once the batch is written.
        synced: queue of calls to make once the batch is synced.
    """
    first: cython.longlong = offset
    i: cython.Py_ssize_t
    level: cython.int
    for i in range(len(owners)):
        item = owners[i]
        if item[2] is not None:
            level = item[1]
            (synced if level > _WRITTEN else written).append((item[2], (first,)))
        if counts:
            first += counts[i]
