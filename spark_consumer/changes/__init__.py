"""Changes as columns, folded to one row per key."""
