"""What a mirror writes into: SQLite, PostgreSQL, memory."""
