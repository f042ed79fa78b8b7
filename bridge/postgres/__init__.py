"""Everything that speaks to PostgreSQL: connections, replication, slot, catalog."""
