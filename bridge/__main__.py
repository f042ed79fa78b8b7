"""`python -m bridge` is the command `bridge`."""

from bridge.launch.commands import bridge

bridge()
