"""`python -m spark_consumer`."""

from __future__ import annotations

from tailrace.launch import spark_consumer

if __name__ == "__main__":
    spark_consumer()
