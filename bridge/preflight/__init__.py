"""`bridge check`: findings on PostgreSQL and NATS, each with its fix."""

from bridge.preflight.findings import Finding, raise_if_blocked

__all__ = ["Finding", "raise_if_blocked"]
