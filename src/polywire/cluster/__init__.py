"""Leadership: which process may write a shard of the log in a bucket."""
