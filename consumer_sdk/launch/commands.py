"""The entry points under their former name, for scripts that were installed with it."""

from tailrace.launch import bridge, cdc, spark_consumer

__all__ = ["bridge", "cdc", "spark_consumer"]
