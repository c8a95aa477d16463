"""The process that writes one Parquet file for a download, and ends.

It reads records from its standard input, as ``table_orders.DownloadedRow`` in one MessagePack array, and writes the file to
its standard output. The file has the columns of a topic's table.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

import msgspec

from polywire.table_orders import DownloadedRow

NICE: Final = 19  # the broker and its clients come first
NO_PYARROW: Final = 3  # exit code; ``http.downloads`` knows it


def parquet_file(rows: list[DownloadedRow]) -> memoryview:
    """Return a file with these rows."""
    import pyarrow as pa

    from polywire.tables.columns import ARROW_SCHEMA
    from polywire.tables.parquet import ParquetWriter

    headers = [[{"key": key, "value": value} for key, value in row.headers] for row in rows]
    columns: dict[str, list[Any]] = {
        "partition": [row.partition for row in rows],
        "offset": [row.offset for row in rows],
        "timestamp": [row.timestamp_us for row in rows],
        "timestamp_type": [row.timestamp_type for row in rows],
        "key": [row.key for row in rows],
        "value": [row.value for row in rows],
        "headers": headers,
    }
    arrays: list[Any] = [pa.array(columns[field.name], field.type) for field in ARROW_SCHEMA]
    writer = ParquetWriter()
    writer.add([pa.RecordBatch.from_arrays(arrays, schema=ARROW_SCHEMA)])
    return writer.finish().content


def main() -> int:
    os.nice(NICE)
    rows = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=list[DownloadedRow])
    try:
        content = parquet_file(rows)
    except ImportError:
        return NO_PYARROW
    sys.stdout.buffer.write(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
