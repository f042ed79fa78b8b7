"""Snapshots of tables at a consistent point."""
