"""`python -m bridge` is the command `bridge`."""

import sys

from bridge.cli import main

sys.exit(main())
