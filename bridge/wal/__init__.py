"""Logical replication: frames, pgoutput messages, relations, the connection."""
