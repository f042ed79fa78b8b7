"""The job: load tables from snapshots, then apply batches of the stream."""
