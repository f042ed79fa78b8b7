"""The PostgreSQL to JetStream service."""
