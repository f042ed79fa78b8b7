"""Changes of a batch: decoded, staged as Parquet, folded to one row for each key."""
