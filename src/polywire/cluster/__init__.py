"""Who may write what: one shard of the log in a bucket."""
