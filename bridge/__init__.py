"""The PostgreSQL to JetStream service."""

from consumer_sdk.transport.version import __version__

__all__ = ["__version__"]
