"""Topics as tables: Parquet files with a Delta log and Iceberg metadata, written next to the log (decision 0132)."""
