"""Leadership: which process may write to a shard of a log that is stored in a bucket."""
