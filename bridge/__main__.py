"""`python -m bridge` is the command `bridge`."""

from consumer_sdk.launch.commands import bridge

bridge()
