"""The PostgreSQL to JetStream service."""

from bridge.version import __version__

__all__ = ["__version__"]
