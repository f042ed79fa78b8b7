"""`python -m spark_consumer`."""

from __future__ import annotations

from spark_consumer.cli import main

if __name__ == "__main__":
    main()
