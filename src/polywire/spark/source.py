"""The data source ``polywire``: the class that Spark loads for ``format("polywire")``.

Options and schema are checked before any request to a broker. The class is pickled by reference, so workers must be
able to import this package.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from polywire.errors import ErrorCode, Invalid
from polywire.spark.options import Headers, read_options, write_options
from polywire.spark.readers import BatchReader, FilteringReader, StreamReader
from polywire.spark.schema import check_schema, source_schema
from polywire.spark.sink import BatchSink, StreamSink
from polywire.spark.worker_exit import depart_quietly, one_line_errors


@one_line_errors
class PolywireDataSource(DataSource):
    """Reads and writes, in batches and as streams, with the columns and option names of Spark's Kafka source and sink (docs/spark)."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``: ``polywire``."""
        return "polywire"

    def schema(self) -> StructType:
        """Return the columns of the source (docs/spark/source.md).

        Checks only the option that affects the columns, because Spark calls this before it knows whether the read is a
        stream.
        """
        depart_quietly()
        asked = self.options.get("includeHeaders", "false").strip().lower()
        return source_schema(Headers(asked) if asked in [kind.value for kind in Headers] else Headers.NONE)

    def reader(self, schema: StructType) -> BatchReader:
        """Return the reader of a batch. Raises Invalid for a wrong option or schema."""
        depart_quietly()
        check_schema(schema)
        options = read_options(dict(self.options), streaming=False)
        return FilteringReader(options, schema) if options.push_filters else BatchReader(options, schema)

    def streamReader(self, schema: StructType) -> StreamReader:
        """Return the reader of a stream. Raises Invalid for a wrong option or schema."""
        depart_quietly()
        check_schema(schema)
        return StreamReader(read_options(dict(self.options), streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchSink:
        """Return the writer of a batch. Raises Invalid for a wrong option or column, and for mode ``overwrite``."""
        depart_quietly()
        _refuse_overwriting(overwrite)
        return BatchSink(write_options(dict(self.options), streaming=False), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamSink:
        """Return the writer of a stream.

        Raises Invalid for a wrong option or column, and for output mode ``complete``.
        """
        depart_quietly()
        _refuse_overwriting(overwrite)
        return StreamSink(write_options(dict(self.options), streaming=True), schema)


def _refuse_overwriting(overwrite: bool) -> None:
    if overwrite:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            "a topic cannot be overwritten: use mode append (batch), or outputMode append (streaming); totals that change are appended "
            "in update mode through foreachBatch (docs/spark/sink.md, Update mode)",
        )
