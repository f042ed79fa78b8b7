"""Snapshots: asked for, waited for, read chunk by chunk."""
