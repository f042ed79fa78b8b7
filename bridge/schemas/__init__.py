"""Schemas of published tables: what the catalog and the log say, and their versions."""
