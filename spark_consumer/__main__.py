"""`python -m spark_consumer` is the command `spark-consumer`."""

from __future__ import annotations

import sys

from spark_consumer.cli import main

if __name__ == "__main__":
    sys.exit(main())
