"""What `bridge check` looks at, in PostgreSQL and in NATS, each finding with its fix."""

from bridge.preflight.findings import Finding, raise_if_blocked

__all__ = ["Finding", "raise_if_blocked"]
