"""What the operator sees: counters, metrics, logs, HTTP and the WAL monitor."""
