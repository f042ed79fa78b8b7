"""The targets of a mirror: SQLite, PostgreSQL, memory."""
