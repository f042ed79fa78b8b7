"""A Spark job that loads tables from snapshots and applies the change stream to them."""
