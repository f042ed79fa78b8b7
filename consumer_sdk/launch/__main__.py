"""`python -m consumer_sdk.launch MODULE`: runs a module of ours as the commands are run."""

import sys

from consumer_sdk.launch.commands import load

sys.exit(load(sys.argv[1])())
